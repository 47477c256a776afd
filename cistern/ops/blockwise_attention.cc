#include "cistern/ops/blockwise_attention.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>

#include "cistern/ops/primitive.h"
#include "cistern/ops/softmax_parts.h"

namespace cistern::ops {
namespace blockwise_attention {

using torch::autograd::variable_list;

constexpr int64_t kBlock = int64_t{1} << 22;  // probabilities formed at once

struct Settings {
  double scale = 0;
  DropoutDraw dropout = {};
};

// q, k, v, bias, each of all rows; bias and visible may be undefined.
struct Inputs {
  at::Tensor q, k, v, bias, visible;
};

int64_t BlockRows(const at::Tensor& q, const at::Tensor& k) {
  return std::max<int64_t>(1, kBlock / std::max<int64_t>(1, q.size(0) * q.size(1) * k.size(2)));
}

// The rows of something that is given for each query, or for all of them at once.
at::Tensor Rows(const at::Tensor& x, int64_t begin, int64_t count) {
  return x.defined() && x.size(2) > 1 ? x.narrow(2, begin, count) : x;
}

Inputs Block(const Inputs& x, int64_t begin, int64_t count) {
  return {x.q.narrow(2, begin, count), x.k, x.v, Rows(x.bias, begin, count),
          Rows(x.visible, begin, count)};
}

// Of the block of queries that begins at row `begin`.
at::Tensor Attend(const Inputs& x, const Settings& s, int64_t begin) {
  const at::Tensor p = softmax_attention::Probabilities(x.q, x.k, x.visible, s.scale, x.bias);
  return at::matmul(softmax_attention::Dropped(p, s.dropout, begin), x.v);
}

at::Tensor AttendAll(const Inputs& x, const Settings& s) {
  std::vector<at::Tensor> out;
  const int64_t rows = BlockRows(x.q, x.k);
  for (int64_t begin = 0; begin < x.q.size(2); begin += rows)
    out.push_back(Attend(Block(x, begin, std::min(rows, x.q.size(2) - begin)), s, begin));
  return out.size() == 1 ? out[0] : at::cat(out, 2);
}

// Gradients of q, k, v and, if there is one, bias; nothing of a block outlives it.
variable_list GradientsByBlock(const Inputs& x, const Settings& s, const at::Tensor& g) {
  const at::AutoGradMode enable(true);
  Inputs leaves = {{}, Apart(x.k.detach()), Apart(x.v.detach()), {}, x.visible};
  variable_list sums = {at::empty_like(x.q), at::zeros_like(x.k), at::zeros_like(x.v)};
  if (x.bias.defined()) sums.push_back(at::zeros_like(x.bias));
  const int64_t rows = BlockRows(x.q, x.k);
  for (int64_t begin = 0; begin < x.q.size(2); begin += rows) {
    const int64_t count = std::min(rows, x.q.size(2) - begin);
    Inputs block = Block(x, begin, count);
    block.q = Apart(block.q.detach()), block.k = leaves.k, block.v = leaves.v;
    variable_list wanted = {block.q, block.k, block.v};
    if (x.bias.defined()) wanted.push_back(block.bias = Apart(block.bias.detach()));
    const variable_list d =
        torch::autograd::grad({Attend(block, s, begin)}, wanted, {g.narrow(2, begin, count)});
    const at::NoGradGuard adding;
    sums[0].narrow(2, begin, count).copy_(d[0]);
    sums[1].add_(d[1]);
    sums[2].add_(d[2]);
    if (x.bias.defined()) Rows(sums[3], begin, count).add_(d[3]);
  }
  return sums;
}

struct Function : torch::autograd::Function<Function> {
  static at::Tensor forward(torch::autograd::AutogradContext* ctx, const at::Tensor& q,
                            const at::Tensor& k, const at::Tensor& v, const OptionalTensor& bias,
                            const OptionalTensor& visible, double scale, double dropout,
                            int64_t seed, int64_t first_row) {
    const Inputs x = {q, k, v, bias.value_or(at::Tensor()), visible.value_or(at::Tensor())};
    ctx->save_for_backward({x.q, x.k, x.v, x.bias, x.visible});
    ctx->saved_data["scale"] = scale;
    ctx->saved_data["dropout"] = dropout;
    ctx->saved_data["seed"] = seed;
    ctx->saved_data["first_row"] = first_row;
    ctx->set_materialize_grads(false);
    const at::NoGradGuard guard;
    return AttendAll(x, {scale, {dropout, uint64_t(seed), first_row}});
  }
  static variable_list backward(torch::autograd::AutogradContext* ctx, const variable_list& grads) {
    variable_list to(9);
    if (!grads[0].defined()) return to;
    const variable_list kept = ctx->get_saved_variables();
    const Settings s = {
        ctx->saved_data["scale"].toDouble(),
        {ctx->saved_data["dropout"].toDouble(), uint64_t(ctx->saved_data["seed"].toInt()),
         ctx->saved_data["first_row"].toInt()}};
    Inputs x = {kept[0], kept[1], kept[2], kept[3], kept[4]};
    variable_list d;
    if (at::GradMode::is_enabled()) {
      x = {Apart(x.q), Apart(x.k), Apart(x.v), x.bias.defined() ? Apart(x.bias) : x.bias,
           x.visible};
      variable_list wanted = {x.q, x.k, x.v};
      if (x.bias.defined()) wanted.push_back(x.bias);
      d = torch::autograd::grad({AttendAll(x, s)}, wanted, {grads[0]}, true, true);
    } else {
      d = GradientsByBlock(x, s, grads[0]);
    }
    std::copy(d.begin(), d.end(), to.begin());
    return to;
  }
};

}  // namespace blockwise_attention

at::Tensor BlockwiseAttention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                              const at::Tensor& visible, const at::Tensor& bias, double scale,
                              const DropoutDraw& dropout) {
  return blockwise_attention::Function::apply(q, k, v, Given(bias), Given(visible), scale,
                                              dropout.rate, int64_t(dropout.seed),
                                              dropout.first_row);
}

bool WorthBlocks(const at::Tensor& q, const at::Tensor& k) {
  return q.device().is_cpu() &&
         q.size(0) * q.size(1) * q.size(2) * k.size(2) > blockwise_attention::kBlock;
}

}  // namespace cistern::ops
