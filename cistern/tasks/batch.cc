#include "cistern/tasks/batch.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <set>

namespace cistern {

Batch Batch::Rows(int64_t begin, int64_t end) const {
  Batch part;
  part.rows = end - begin;
  part.padded = padded;
  for (const NamedTensor& t : tensors.all()) part.Add(t.name, t.value.narrow(0, begin, part.rows));
  part.tokens = part.tensors.Has("lengths") ? part["lengths"].sum().item<int64_t>()
                                            : tokens / rows * part.rows;
  return part;
}

Batch Batch::InOrder(const at::Tensor& order) const {
  Batch other = *this;
  for (const NamedTensor& t : tensors.all()) other.Add(t.name, t.value.index_select(0, order));
  return other;
}

Batch Batch::WithoutPadding() const {
  Batch cut = *this;
  for (const Padded& p : padded) {
    const at::Tensor &x = tensors[p.tensor], &lengths = tensors[p.lengths];
    const int64_t longest = rows == 0 ? 0 : lengths.max().item<int64_t>();
    cut.Add(p.tensor, x.narrow(1, 0, std::min(x.size(1), std::max<int64_t>(longest, 1))));
  }
  return cut;
}

at::Tensor Batch::TokensOfRows() const {
  std::set<std::string> names;
  for (const Padded& p : padded) names.insert(p.lengths);
  at::Tensor sum = at::zeros({rows}, at::kLong);
  for (const std::string& name : names) sum = sum + tensors[name];
  return sum;
}

}  // namespace cistern
