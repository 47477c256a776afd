#pragma once
// What op pairs (`x` and `x_backward`, registered with torch's dispatcher) have in common. For .cc
// files of this layer.
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/view_as.h>
#include <ATen/ops/zeros_like.h>

#include "cistern/ops/tensor_rows.h"

namespace cistern::ops {

// starts [B,T] bool and lengths [B] int64 for the B and T of x [B,H,T,.]; op as in "[slot_read]".
inline void CheckMask(const char* op, const at::Tensor& x, const OptionalTensor& starts,
                      const OptionalTensor& lengths) {
  if (starts) {
    TORCH_CHECK(starts->dim() == 2 && starts->sym_size(0) == x.sym_size(0) &&
                    starts->sym_size(1) == x.sym_size(2) && starts->scalar_type() == at::kBool,
                op, " expected starts of shape [B,T] and dtype bool, got ", starts->sym_sizes(),
                " ", starts->scalar_type());
  }
  if (lengths) {
    TORCH_CHECK(lengths->dim() == 1 && lengths->sym_size(0) == x.sym_size(0) &&
                    lengths->scalar_type() == at::kLong,
                op, " expected lengths of shape [B] and dtype int64, got ", lengths->sym_sizes(),
                " ", lengths->scalar_type());
  }
}

inline OptionalTensor Given(const at::Tensor& x) {
  return x.defined() ? OptionalTensor(x) : std::nullopt;
}
inline at::Tensor OrZeros(const OptionalTensor& grad, const at::Tensor& like) {
  return grad ? *grad : at::zeros_like(like);
}

// Inputs to differentiate by, each on its own: where one was computed from another, a view keeps
// the path through it out of that other's gradient.
inline std::vector<at::Tensor> Apart(at::TensorList x) {
  std::vector<at::Tensor> inputs;
  for (const at::Tensor& t : x)
    inputs.push_back(t.requires_grad() ? t.view_as(t) : t.detach().requires_grad_());
  return inputs;
}

// For the references: contiguous, in double; the data of such a tensor, or null.
inline at::Tensor AsDouble(const at::Tensor& x) { return x.to(at::kDouble).contiguous(); }
inline at::Tensor AsDouble(const OptionalTensor& x) { return x ? AsDouble(*x) : at::Tensor(); }
inline const double* DataOrNull(const at::Tensor& x) {
  return x.defined() ? x.const_data_ptr<double>() : nullptr;
}

// Whether forward-mode differentiation (torch.func.jvp) has a tangent for one of these.
template <class... Tensors>
bool HaveTangents(const Tensors&... x) {
  const auto has = [](const at::Tensor& t) { return t.defined() && t._fw_grad(0).defined(); };
  return (has(x) || ...);
}
// Error where they have: a kernel would lose the tangent, and the derivative be zero.
template <class... Tensors>
void RefuseTangents(const char* op, const Tensors&... x) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      !HaveTangents(x...), op,
      " has no forward-mode derivative; differentiate backwards (torch.autograd.grad), or run with "
      "CISTERN_IMPL=composite");
}

// Typed handle of a registered op.
template <class Schema>
c10::TypedOperatorHandle<Schema> OpHandle(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Schema>();
}

// Bound<true, &F>::Call(args...) = F(true, args...): one function registered for two ops that
// differ in a flag.
template <bool kFlag, auto kFunction>
struct Bound;
template <bool kFlag, class R, class... Args, R (*kFunction)(bool, Args...)>
struct Bound<kFlag, kFunction> {
  static R Call(Args... args) { return kFunction(kFlag, args...); }
};

}  // namespace cistern::ops
