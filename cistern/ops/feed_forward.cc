#include "cistern/ops/feed_forward.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <ATen/autocast_mode.h>

#include <algorithm>
#include <tuple>

#include "cistern/kernels/dropout.h"
#include "cistern/kernels/gelu.h"
#include "cistern/ops/draws.h"
#include "cistern/ops/dropout.h"
#include "cistern/ops/gelu.h"
#include "cistern/ops/linear_product.h"
#include "cistern/ops/norm.h"
#include "cistern/ops/primitive.h"

namespace cistern::ops {
namespace feed_forward {

using torch::autograd::variable_list;

// Of one thread at a time: 1 MB of a hidden width of 512, as much as a core has of its own.
constexpr int64_t kBlockRows = 512;

struct Draws {
  DropoutDraw hidden, out;
};

// What is added to the residual, composed of other ops.
at::Tensor Composed(const at::Tensor& x, const FeedForwardMaps& maps, const Draws& draws) {
  const at::Tensor g = Dropout(Gelu(LinearProduct(x, maps.up, maps.up_bias)), draws.hidden);
  return Dropout(LinearProduct(g, maps.down, maps.down_bias), draws.out);
}

at::Tensor Rows(const at::Tensor& x) { return x.contiguous().view({-1, x.size(-1)}); }

// Of tokens [N,W] from number `first` on among those of a batch, of which each row has `tokens`;
// what x loses, `beside` loses too. In place.
void DropTokens(const DropoutDraw& draw, int64_t tokens, int64_t first, const at::Tensor& x,
                const at::Tensor& beside = {}) {
  const int64_t width = x.size(1);
  if (draw.Any())
    DropoutOfPart(draw, tokens * width, first * width, x.numel(), x.mutable_data_ptr<float>(),
                  beside.defined() ? beside.mutable_data_ptr<float>() : nullptr);
}

// Tokens of a row of a batch x [B,...,D].
int64_t TokensOfRow(const at::Tensor& x) { return x.numel() / x.size(0) / x.size(-1); }

// y, and of each block what the activation reads, where `hidden` is given.
at::Tensor Forward(const at::Tensor& x, const FeedForwardMaps& maps, const at::Tensor& residual,
                   const Draws& draws, variable_list* hidden) {
  const at::Tensor y = LikePlain(x), x_rows = Rows(x), y_rows = y.view({-1, x.size(-1)}),
                   added = Rows(residual);
  // Threads that share the products share a block.
  const int64_t rows = x_rows.size(0), tokens = TokensOfRow(x),
                step = kBlockRows * (at::in_parallel_region() ? 1 : at::get_num_threads());
  for (int64_t begin = 0; begin < rows; begin += step) {
    const int64_t count = std::min(step, rows - begin);
    const at::Tensor h = LinearProduct(x_rows.narrow(0, begin, count), maps.up, maps.up_bias),
                     g = hidden != nullptr ? LikePlain(h) : h;
    cistern::Gelu(h.numel(), h.const_data_ptr<float>(), g.mutable_data_ptr<float>());
    if (hidden != nullptr) hidden->push_back(h);
    DropTokens(draws.hidden, tokens, begin, g);
    const at::Tensor out = LinearProduct(g, maps.down, maps.down_bias);
    DropTokens(draws.out, tokens, begin, out);
    at::Tensor to = y_rows.narrow(0, begin, count);
    at::add_out(to, added.narrow(0, begin, count), out);
  }
  return y;
}

struct Function : torch::autograd::Function<Function> {
  // The inputs, of which the biases may be undefined; all but the last are kept.
  enum { kX, kUp, kUpBias, kDown, kDownBias, kResidual, kKept = kResidual };

  static at::Tensor forward(torch::autograd::AutogradContext* ctx, const at::Tensor& x,
                            const at::Tensor& up, const OptionalTensor& up_bias,
                            const at::Tensor& down, const OptionalTensor& down_bias,
                            const at::Tensor& residual, const Draws& draws) {
    const at::AutoDispatchBelowADInplaceOrView guard;
    variable_list saved = {x, up, up_bias.value_or(at::Tensor()), down,
                           down_bias.value_or(at::Tensor())};
    const at::Tensor y =
        Forward(x, {up, saved[kUpBias], down, saved[kDownBias]}, residual, draws, &saved);
    ctx->save_for_backward(std::move(saved));
    ctx->saved_data["hidden"] = Packed(draws.hidden);
    ctx->saved_data["out"] = Packed(draws.out);
    return y;
  }

  static variable_list backward(torch::autograd::AutogradContext* ctx, const variable_list& grads) {
    const variable_list saved = ctx->get_saved_variables();
    const at::TensorList inputs = at::TensorList(saved).slice(0, kKept);
    const Draws draws = {Unpacked(ctx->saved_data["hidden"]), Unpacked(ctx->saved_data["out"])};
    variable_list d = NeedsGradient(grads) || NeedsGradient(inputs)
                          ? OfComposed(inputs.vec(), draws, grads[0])
                          : ByBlocks(ctx, saved, draws, grads[0]);
    d.push_back(grads[0]);
    d.emplace_back();  // of the draws
    return d;
  }

 private:
  using PackedDraw = std::tuple<double, int64_t, int64_t>;
  static PackedDraw Packed(const DropoutDraw& d) { return {d.rate, int64_t(d.seed), d.first_row}; }
  static DropoutDraw Unpacked(const c10::IValue& packed) {
    const auto [rate, seed, first_row] = packed.to<PackedDraw>();
    return {rate, uint64_t(seed), first_row};
  }

  static variable_list ByBlocks(torch::autograd::AutogradContext* ctx, const variable_list& saved,
                                const Draws& draws, const at::Tensor& grad) {
    // The context counts the inputs that are given.
    const auto needs = [&](size_t i) {
      const auto defined = [](const at::Tensor& t) { return t.defined(); };
      const auto index = std::count_if(saved.begin(), saved.begin() + int64_t(i), defined);
      return saved[i].defined() && ctx->needs_input_grad(size_t(index));
    };
    const at::Tensor dy = Rows(Dropout(grad, draws.out)), x = Rows(saved[kX]), up = saved[kUp].t(),
                     down = saved[kDown].t(), dx = needs(kX) ? LikePlain(x) : at::Tensor();
    variable_list d(kKept);
    // The blocks are those of the forward pass, which had as many threads as it had.
    const int64_t tokens = TokensOfRow(grad);
    int64_t begin = 0;
    for (size_t block = kKept; block < saved.size(); ++block) {
      const int64_t count = saved[block].size(0);
      const at::Tensor &h = saved[block], g = LikePlain(h), dy_part = dy.narrow(0, begin, count),
                       dh = LinearProduct(dy_part, down);
      float* const to = dh.mutable_data_ptr<float>();
      GeluWithBackward(h.numel(), to, h.const_data_ptr<float>(), g.mutable_data_ptr<float>(), to);
      DropTokens(draws.hidden, tokens, begin, g, dh);
      if (needs(kDown)) AddTransposedProduct(dy_part, g, d[kDown]);
      if (needs(kX)) dx.narrow(0, begin, count).copy_(LinearProduct(dh, up));
      if (needs(kUp)) AddTransposedProduct(dh, x.narrow(0, begin, count), d[kUp]);
      if (needs(kUpBias)) d[kUpBias] = d[kUpBias].defined() ? d[kUpBias] + dh.sum(0) : dh.sum(0);
      begin += count;
    }
    if (needs(kDownBias)) d[kDownBias] = dy.sum(0);
    if (needs(kX)) d[kX] = dx.view(grad.sizes());
    return d;
  }

  // For derivatives of the gradients: autograd through other ops.
  static variable_list OfComposed(variable_list inputs, const Draws& draws, const at::Tensor& dy) {
    const at::AutoGradMode enable(true);
    variable_list given;
    for (at::Tensor& t : inputs) {
      if (t.defined()) given.push_back(t = Apart(t));
    }
    const at::Tensor y = Composed(
        inputs[kX], {inputs[kUp], inputs[kUpBias], inputs[kDown], inputs[kDownBias]}, draws);
    const variable_list of_given = torch::autograd::grad({y}, given, {dy}, true, true, true);
    variable_list d(kKept);
    for (size_t i = 0, j = 0; i < inputs.size(); ++i) {
      if (inputs[i].defined()) d[i] = of_given[j++];
    }
    return d;
  }
};

bool TakesBlocks(const at::Tensor& x, const FeedForwardMaps& maps, const at::Tensor& residual) {
  if (ActiveImpl() != Impl::kKernel || !NobodyWatchesOps() || x.dim() < 2 || x.numel() == 0 ||
      at::autocast::is_autocast_enabled(at::kCPU))
    return false;
  const at::Tensor inputs[] = {x, maps.up, maps.up_bias, maps.down, maps.down_bias, residual};
  return std::all_of(std::begin(inputs), std::end(inputs),
                     [](const at::Tensor& t) {
                       return !t.defined() || (IsPlain(t) && t.scalar_type() == at::kFloat);
                     }) &&
         !HaveTangents(inputs);
}

}  // namespace feed_forward

at::Tensor GeluFeedForward(const at::Tensor& x, const FeedForwardMaps& maps,
                           const at::Tensor& residual, const FeedForwardDropout& dropout) {
  TORCH_CHECK(std::max(dropout.hidden, dropout.out) <= 1,
              "[feed_forward] expected rates of dropout from 0 to 1, got ", dropout.hidden, " and ",
              dropout.out);
  TORCH_CHECK(residual.sym_sizes() == x.sym_sizes(),
              "[feed_forward] expected residual of the shape of x, ", x.sym_sizes(), ", got ",
              residual.sym_sizes());
  const feed_forward::Draws draws = {DrawDropout(dropout.hidden), DrawDropout(dropout.out)};
  if (!feed_forward::TakesBlocks(x, maps, residual))
    return AddResidual(residual, feed_forward::Composed(x, maps, draws));
  if (NeedsGradient({x, maps.up, maps.up_bias, maps.down, maps.down_bias, residual}))
    return feed_forward::Function::apply(x, maps.up, Given(maps.up_bias), maps.down,
                                         Given(maps.down_bias), residual, draws);
  return feed_forward::Forward(x, maps, residual, draws, nullptr);
}

}  // namespace cistern::ops
