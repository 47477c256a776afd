#pragma once
// The scaffold of a fused primitive: from one description P it makes the op pair
//   NAME(Tensor[] x, Tensor? starts, Tensor? lengths, float option, bool save) -> Tensor[]
//   NAME_backward(Tensor?[] grads, Tensor[] x, Tensor[] outputs, Tensor? starts, Tensor? lengths,
//                 float option) -> Tensor[]
// with checks, the CPU kernels in float and double, shapes for meta tensors, the autograd formula
// and second derivatives. Where no kernel of ours serves a tensor (another device without one,
// another dtype, CISTERN_IMPL=composite or reference), the primitive is what P composes of other
// ops, differentiated by autograd. For .cc files of this layer.
//
// P has:
//   kName, kOutputs     outputs that callers see; the forward saves others after them
//   Check(x)            TORCH_CHECKs of shapes and dtypes
//   Tokens(x)           the input [B,H,T,.] that lengths and starts belong to
//   Compose(x, mask, option)      the outputs, as other ops make them
//   Empty(x, save)                all outputs, not yet filled
//   Forward(x, mask, option, outputs)              by the kernel; Backward(grads, x, outputs, mask,
//   option) likewise, with a gradient for each of x; grads of outputs may be undefined
#include <ATen/ATen.h>
#include <c10/core/TensorOptions.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include "cistern/ops/impl.h"
#include "cistern/ops/op_pair.h"
#include "cistern/ops/slot_memory.h"

namespace cistern::ops {

using Tensors = std::vector<at::Tensor>;

// run(float{}) or run(double{}), as x is.
template <class Run>
void DispatchType(const at::Tensor& x, Run&& run) {
  x.scalar_type() == at::kFloat ? run(float{}) : run(double{});
}

inline bool NeedsGradient(at::TensorList x) {
  return c10::GradMode::is_enabled() &&
         std::any_of(x.begin(), x.end(), [](const at::Tensor& t) { return t.requires_grad(); });
}

template <class P>
class OpPair {
 public:
  static Tensors Call(const Tensors& x, const Mask& mask, double option = 0) {
    Tensors y = Op().call(x, mask.starts, mask.lengths, option, false);
    y.resize(P::kOutputs);
    return y;
  }

  static void Define(torch::Library& m) {
    const std::vector<at::Tag> tags = {at::Tag::pt2_compliant_tag};
    m.def((std::string(P::kName) + "(Tensor[] x, Tensor? starts, Tensor? lengths, float option, "
                                   "bool save) -> Tensor[]")
              .c_str(),
          tags);
    m.def((std::string(P::kName) + "_backward(Tensor?[] grads, Tensor[] x, Tensor[] outputs, "
                                   "Tensor? starts, Tensor? lengths, float option) -> Tensor[]")
              .c_str(),
          tags);
  }
  static void Cpu(torch::Library& m) { Register(m, &ForwardCpu, &BackwardCpu); }
  static void Meta(torch::Library& m) { Register(m, &ForwardMeta, &BackwardMeta); }
  static void Autograd(torch::Library& m) { Register(m, &ForwardAutograd, &BackwardAutograd); }

 private:
  using Grads = c10::List<OptionalTensor>;
  using ForwardSchema = Tensors(at::TensorList, const OptionalTensor&, const OptionalTensor&,
                                double, bool);
  using BackwardSchema = Tensors(const Grads&, at::TensorList, at::TensorList,
                                 const OptionalTensor&, const OptionalTensor&, double);

  static void Register(torch::Library& m, ForwardSchema* forward, BackwardSchema* backward) {
    m.impl(P::kName, forward);
    m.impl((std::string(P::kName) + "_backward").c_str(), backward);
  }
  static const c10::TypedOperatorHandle<ForwardSchema>& Op() {
    static const auto op = OpHandle<ForwardSchema>((std::string("cistern::") + P::kName).c_str());
    return op;
  }
  static const c10::TypedOperatorHandle<BackwardSchema>& BackwardOp() {
    static const auto op =
        OpHandle<BackwardSchema>((std::string("cistern::") + P::kName + "_backward").c_str());
    return op;
  }

  // Whether the op below Autograd has a kernel for x.
  static bool HasKernel(const at::Tensor& x) {
    if (x.device().is_cpu()) return UsesKernel(x) && ActiveImpl() == Impl::kKernel;
    return x.is_meta() || Op().hasKernelForDispatchKey(
                              c10::computeDispatchKey(x.scalar_type(), x.layout(), x.device()));
  }

  static void Check(at::TensorList x, const OptionalTensor& starts, const OptionalTensor& lengths) {
    P::Check(x);
    CheckMask((std::string("[") + P::kName + "]").c_str(), P::Tokens(x), starts, lengths);
  }

  static Tensors ForwardCpu(at::TensorList x, const OptionalTensor& starts,
                            const OptionalTensor& lengths, double option, bool save) {
    Check(x, starts, lengths);
    if (!HasKernel(P::Tokens(x))) {
      Tensors y = P::Compose(x.vec(), {lengths, starts}, option);
      y.resize(save ? P::Empty(x, true).size() : P::kOutputs, at::empty({0}));
      return y;
    }
    const MaskView view(starts, lengths, P::Tokens(x).size(2));
    const Tensors y = P::Empty(x, save);
    P::Forward(x, view.mask, option, y);
    return y;
  }
  static Tensors BackwardCpu(const Grads& grads, at::TensorList x, at::TensorList outputs,
                             const OptionalTensor& starts, const OptionalTensor& lengths,
                             double option) {
    TORCH_CHECK(HasKernel(P::Tokens(x)), "[", P::kName, "_backward] has no kernel for ",
                P::Tokens(x).scalar_type(), " with CISTERN_IMPL=", ImplName(ActiveImpl()),
                "; differentiate ", P::kName, " instead");
    const MaskView view(starts, lengths, P::Tokens(x).size(2));
    return P::Backward(Vector(grads), x, outputs, view.mask, option);
  }

  static Tensors ForwardMeta(at::TensorList x, const OptionalTensor& starts,
                             const OptionalTensor& lengths, double, bool save) {
    Check(x, starts, lengths);
    return P::Empty(x, save);
  }
  static Tensors BackwardMeta(const Grads&, at::TensorList x, at::TensorList, const OptionalTensor&,
                              const OptionalTensor&, double) {
    Tensors grads;
    for (const at::Tensor& t : x) grads.push_back(EmptyLike(t));
    return grads;
  }

  struct Function : torch::autograd::Function<Function> {
    static torch::autograd::variable_list forward(torch::autograd::AutogradContext* ctx,
                                                  at::TensorList x, const OptionalTensor& starts,
                                                  const OptionalTensor& lengths, double option) {
      at::AutoDispatchBelowADInplaceOrView guard;
      Tensors y = Op().call(x, starts, lengths, option, true);
      torch::autograd::variable_list kept = x.vec();
      kept.insert(kept.end(), y.begin(), y.end());
      kept.push_back(starts.value_or(at::Tensor()));
      kept.push_back(lengths.value_or(at::Tensor()));
      ctx->save_for_backward(std::move(kept));
      ctx->saved_data["inputs"] = static_cast<int64_t>(x.size());
      ctx->saved_data["option"] = option;
      ctx->set_materialize_grads(false);
      y.resize(P::kOutputs);
      return y;
    }
    static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                   const torch::autograd::variable_list& grads) {
      const auto count = static_cast<size_t>(ctx->saved_data["inputs"].toInt());
      torch::autograd::variable_list to(count + 3);
      Grads given;
      bool any = false;
      for (const at::Tensor& g : grads) {
        given.push_back(Given(g));
        any |= g.defined();
      }
      if (!any) return to;
      const auto kept = ctx->get_saved_variables();
      const at::TensorList all(kept);
      const Tensors dx = BackwardOp().call(
          given, all.slice(0, count), all.slice(count, kept.size() - count - 2),
          Given(kept[kept.size() - 2]), Given(kept.back()), ctx->saved_data["option"].toDouble());
      std::copy(dx.begin(), dx.end(), to.begin());
      return to;
    }
  };

  static Tensors ForwardAutograd(at::TensorList x, const OptionalTensor& starts,
                                 const OptionalTensor& lengths, double option, bool save) {
    if (!HasKernel(P::Tokens(x))) {
      Check(x, starts, lengths);
      return P::Compose(x.vec(), {lengths, starts}, option);
    }
    for (const at::Tensor& t : x) RefuseTangents((std::string("[") + P::kName + "]").c_str(), t);
    if (!NeedsGradient(x)) {
      at::AutoDispatchBelowADInplaceOrView guard;
      return Op().call(x, starts, lengths, option, save);
    }
    return Function::apply(x, starts, lengths, option);
  }

  // Second derivatives: autograd through what P composes.
  static Tensors BackwardAutograd(const Grads& grads, at::TensorList x, at::TensorList outputs,
                                  const OptionalTensor& starts, const OptionalTensor& lengths,
                                  double option) {
    const Tensors g = Vector(grads);
    if (!NeedsGradient(x) && !NeedsGradient(g)) {
      at::AutoDispatchBelowADInplaceOrView guard;
      return BackwardOp().call(grads, x, outputs, starts, lengths, option);
    }
    at::AutoGradMode enable(true);
    Tensors inputs = Apart(x), to, from;
    const Tensors y = P::Compose(inputs, {lengths, starts}, option);
    for (size_t i = 0; i < P::kOutputs; ++i) {
      if (g[i].defined()) to.push_back(y[i]), from.push_back(g[i]);
    }
    Tensors dx = torch::autograd::grad(to, inputs, from, true, true, true);
    for (size_t i = 0; i < dx.size(); ++i) {
      if (!dx[i].defined()) dx[i] = at::zeros_like(inputs[i]);
    }
    return dx;
  }

  static Tensors Vector(const Grads& grads) {
    Tensors g;
    for (const OptionalTensor& x : grads) g.push_back(x.value_or(at::Tensor()));
    return g;
  }
  static at::Tensor EmptyLike(const at::Tensor& x) {
    return x.dim() == 4 && x.scalar_type() != at::kDouble
               ? EmptyHeads(x.sym_sizes(), x.options())
               : at::empty_symint(x.sym_sizes(), x.options());
  }
};

}  // namespace cistern::ops

// Registers primitive P, whose description stands in namespace cistern::ops.
#define CISTERN_PRIMITIVE(P)                                                   \
  TORCH_LIBRARY_FRAGMENT(cistern, m) { ::cistern::ops::OpPair<P>::Define(m); } \
  TORCH_LIBRARY_IMPL(cistern, CPU, m) { ::cistern::ops::OpPair<P>::Cpu(m); }   \
  TORCH_LIBRARY_IMPL(cistern, Meta, m) { ::cistern::ops::OpPair<P>::Meta(m); } \
  TORCH_LIBRARY_IMPL(cistern, Autograd, m) { ::cistern::ops::OpPair<P>::Autograd(m); }
