#pragma once
// What the definitions of the mechanisms are written with: one query at a time against the tokens
// it sees, in double. Slow and plain.
#include <ATen/core/Tensor.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/zeros.h>

#include <vector>

#include "cistern/attention/mechanism.h"

namespace cistern {

// f(query, seen) -> [B,H,1,d] for every token: `query` is its row of every tensor of `queries`,
// `seen` the rows of `x` that it sees (up to itself in the causal form, else all). Where it sees
// none, zeros of `width` channels.
template <class F>
at::Tensor EachQuery(Form form, const std::vector<at::Tensor>& queries,
                     const std::vector<at::Tensor>& x, int64_t width, F&& f) {
  auto rows = [](const std::vector<at::Tensor>& y, int64_t begin, int64_t count) {
    std::vector<at::Tensor> out;
    for (const at::Tensor& t : y) out.push_back(t.narrow(2, begin, count));
    return out;
  };
  const at::Tensor& like = queries[0];
  const at::Tensor none = at::zeros({like.size(0), like.size(1), 1, width}, like.options());
  std::vector<at::Tensor> out = {none.narrow(2, 0, 0)};
  for (int64_t t = 0; t < like.size(2); ++t) {
    const int64_t seen = form == Form::kCausal ? t + 1 : x[0].size(2);
    out.push_back(seen == 0 ? none : f(rows(queries, t, 1), rows(x, 0, seen)));
  }
  return at::cat(out, 2);
}

}  // namespace cistern
