#include "cistern/ops/dropout.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>

#include "cistern/ops/draws.h"
#include "cistern/ops/impl.h"
#include "cistern/ops/primitive.h"

namespace cistern::ops {
namespace dropout {

using torch::autograd::variable_list;

// numbers: as the kernel's, or undefined.
at::Tensor ByKernel(const at::Tensor& x_in, const at::Tensor& numbers, const DropoutDraw& draw) {
  const at::Tensor x = x_in.contiguous(), y = at::empty_like(x);
  const int64_t rows = x.size(0), width = rows == 0 ? 0 : x.numel() / rows;
  const int64_t* const of = numbers.defined() ? numbers.const_data_ptr<int64_t>() : nullptr;
  const auto run = [&]<class T>(T) {
    cistern::Dropout<T>(draw, rows, width, of, ConstData<T>(x), MutableData<T>(y));
  };
  DispatchStored(x, run);
  return y;
}

// 0 or what is kept is multiplied by, [rows,...] as x, by the definition.
at::Tensor Factors(const at::Tensor& x, const at::Tensor& numbers, const DropoutDraw& draw) {
  const int64_t rows = x.size(0), width = rows == 0 ? 0 : x.numel() / rows;
  const at::Tensor factors = at::empty({rows, width}, at::kDouble);
  double* to = factors.mutable_data_ptr<double>();
  for (int64_t r = 0; r < rows; ++r) {
    const int64_t number =
        draw.first_row + (numbers.defined() ? numbers.const_data_ptr<int64_t>()[r] : r);
    for (int64_t i = 0; i < width; ++i)
      *to++ = draw.KeepsValue(uint64_t(number), uint64_t(i)) ? draw.KeptValueFactor() : 0;
  }
  return factors.view(x.sizes()).to(x.scalar_type());
}

bool HasKernel(const at::Tensor& x) {
  const auto type = x.scalar_type();
  return ActiveImpl() == Impl::kKernel &&
         (type == at::kFloat || type == at::kDouble || type == at::kBFloat16);
}

// The gradient drops what the value drops: it is the same function.
struct Function : torch::autograd::Function<Function> {
  static at::Tensor forward(torch::autograd::AutogradContext* ctx, const at::Tensor& x,
                            const OptionalTensor& numbers, double rate, int64_t seed,
                            int64_t first_row) {
    ctx->save_for_backward({numbers.value_or(at::Tensor())});
    ctx->saved_data["rate"] = rate;
    ctx->saved_data["seed"] = seed;
    ctx->saved_data["first_row"] = first_row;
    ctx->set_materialize_grads(false);
    const at::NoGradGuard guard;
    return ByKernel(x, numbers.value_or(at::Tensor()), {rate, uint64_t(seed), first_row});
  }
  static variable_list backward(torch::autograd::AutogradContext* ctx, const variable_list& grads) {
    variable_list to(5);
    if (!grads[0].defined()) return to;
    to[0] = Function::apply(grads[0], Given(ctx->get_saved_variables()[0]),
                            ctx->saved_data["rate"].toDouble(), ctx->saved_data["seed"].toInt(),
                            ctx->saved_data["first_row"].toInt());
    return to;
  }
};

at::Tensor Dropped(const at::Tensor& x, const at::Tensor& numbers, const DropoutDraw& draw) {
  TORCH_CHECK(x.dim() >= 1 && x.is_floating_point(),
              "[dropout] expected at least one dimension of real numbers, got ", x.sizes(), " of ",
              x.scalar_type());
  TORCH_CHECK(draw.rate <= 1, "[dropout] expected a rate from 0 to 1, got ", draw.rate);
  if (x.is_meta() || x.numel() == 0) return x * 1;
  if (!x.device().is_cpu()) return at::dropout(x, draw.rate, true);
  if (!HasKernel(x) || HaveTangents({x})) return x * Factors(x, numbers, draw);
  return Function::apply(x, Given(numbers), draw.rate, int64_t(draw.seed), draw.first_row);
}

}  // namespace dropout

at::Tensor Dropout(const at::Tensor& x, double rate, bool training) {
  return Dropout(x, DrawDropout(training ? rate : 0));
}

at::Tensor Dropout(const at::Tensor& x, const DropoutDraw& draw) {
  return draw.Any() ? dropout::Dropped(x, {}, draw) : x;
}

at::Tensor DropoutOfTokens(const at::Tensor& x, const at::Tensor& tokens, int64_t tokens_per_row,
                           double rate, bool training) {
  if (!training || rate <= 0) return x;
  const DropoutDraw draw = DrawDropout(rate);
  TORCH_CHECK(tokens.dim() == 1 && tokens.scalar_type() == at::kLong && x.dim() >= 1 &&
                  tokens.size(0) == x.size(0),
              "[dropout] expected an int64 for each of ", x.sizes(), " tokens, got ",
              tokens.sizes(), " of ", tokens.scalar_type());
  // Those of token t of row b are b + 2^32 t, however many tokens a row has here.
  const at::Tensor numbers =
      tokens.div(tokens_per_row, "floor") + tokens.remainder(tokens_per_row) * (int64_t{1} << 32);
  return dropout::Dropped(x, numbers, draw);
}

}  // namespace cistern::ops
