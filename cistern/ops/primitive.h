#pragma once
// The scaffold of a fused primitive: from one description P it makes the op pair
//   NAME(arguments) -> (Tensor, ...)
//   NAME_backward(Tensor?[] grads, Tensor?[] outputs, arguments) -> Tensor[]
// with checks, the CPU kernels in float and double, shapes for meta tensors, the autograd formula
// and second derivatives; forward-mode derivatives are refused. For .cc files of this layer.
//
// At the Autograd key the pair is joined and sent on to the device's own kernels: those below for
// the CPU, and whatever is registered for NAME and NAME_backward under another device's dispatch
// key. Tokens in half precision that the CPU's kernels do not take go through them as floats. Only
// where nothing serves a tensor (a device without a kernel, CISTERN_IMPL=composite) the primitive
// is what P composes of other ops, differentiated by autograd; so it is for such a device below
// Autograd as well (inference mode, graphs of torch.compile).
//
// P has:
//   kSchema             "NAME(Tensor q, ..., Tensor? starts=None, Tensor? lengths=None) -> (...)"
//   Arguments, kFields  the arguments as a struct with a Mask `mask`; [](auto& a) { return
//                       std::tie(a.q, ..., a.mask.starts, a.mask.lengths); } in the schema's order.
//                       Its tensors are differentiable, but for the mask's and those optional ones
//                       of which IsConstant(a, &a.field) is true. A field `save` is true where a
//                       gradient is recorded.
//   kOutputs, kDifferentiable      how many tensors are returned; those after the differentiable
//                                  ones are for the backward
//   kTime               the dimension of time in Tokens(a), whose rows are dimension 0: lengths and
//                       starts are of them, and their dtype and device choose the kernel
//   Check(a)            TORCH_CHECKs of shapes and dtypes; the mask's come with the scaffold
//   Empty(a)            the outputs, not filled; EmptyGradients(a) of the differentiable arguments
//                       that are given, in the order of the fields: what the kernels return
//   Compose(a)          the outputs, as other ops make them; those for the backward may be missing
//   Forward(a, mask, outputs)      by the kernel
//   Backward(a, mask, grads, outputs)    -> gradients; those of outputs may be undefined
// and may have:
//   ForwardReference(a, mask) -> outputs, BackwardReference(a, mask, grads, outputs): the
//                       definition; without them CISTERN_IMPL=reference composes
//   Keep(a, outputs)    leaves undefined what the backward does not need
//   InPlace(a)          the outputs, not filled, but for the states after, which are those of a
//                       themselves: Forward finds them there and moves them on
//   kBFloat16 = true    the kernels take tokens in bfloat16 as well
#include <ATen/ATen.h>
#include <c10/core/TensorOptions.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <array>
#include <tuple>

#include "cistern/ops/impl.h"
#include "cistern/ops/in_place.h"
#include "cistern/ops/mask.h"
#include "cistern/ops/tensor_rows.h"

namespace cistern::ops {

using Tensors = std::vector<at::Tensor>;

inline OptionalTensor Given(const at::Tensor& x) {
  return x.defined() ? OptionalTensor(x) : std::nullopt;
}
inline at::Tensor OrZeros(const at::Tensor& grad, const at::Tensor& like) {
  return grad.defined() ? grad : at::zeros_like(like);
}

// For the references: contiguous, in double; the data of such a tensor, or null. Undefined stays
// so.
inline at::Tensor AsDouble(const at::Tensor& x) {
  return x.defined() ? x.to(at::kDouble).contiguous() : x;
}
inline const double* DataOrNull(const at::Tensor& x) {
  return x.defined() ? x.const_data_ptr<double>() : nullptr;
}

// Not filled, like x: as EmptyHeads, or contiguous.
inline at::Tensor LikeHeads(const at::Tensor& x) { return EmptyHeads(x.sym_sizes(), x.options()); }
// The gradient of x, not filled: in the layout of x where its heads lie one after another, so that
// whoever made x of one product for all heads takes it without a copy; else as EmptyHeads.
inline at::Tensor GradientLike(const at::Tensor& x) {
  return x.is_contiguous() ? EmptyHeadByHead(x.sym_sizes(), x.options()) : LikeHeads(x);
}
inline at::Tensor LikePlain(const at::Tensor& x) {
  return at::empty_symint(x.sym_sizes(), x.options());
}

inline bool NeedsGradient(at::TensorList x) {
  return c10::GradMode::is_enabled() && std::any_of(x.begin(), x.end(), [](const at::Tensor& t) {
           return t.defined() && t.requires_grad();
         });
}

// The state after begins as the one before; where it is that one, it does already.
inline void BeginState(const at::Tensor& before, const at::Tensor& after) {
  if (!after.is_same(before)) after.copy_(before);
}

// Inputs to differentiate by, each on its own: where one was computed from another, a view keeps
// the path through it out of that other's gradient.
inline at::Tensor Apart(const at::Tensor& x) {
  return x.requires_grad() ? x.view_as(x) : x.detach().requires_grad_();
}
inline Tensors Apart(const Tensors& x) {
  Tensors inputs;
  for (const at::Tensor& t : x) inputs.push_back(Apart(t));
  return inputs;
}

// Whether forward-mode differentiation (torch.func.jvp) has a tangent for one of these.
inline bool HaveTangents(at::TensorList x) {
  return std::any_of(x.begin(), x.end(),
                     [](const at::Tensor& t) { return t.defined() && t._fw_grad(0).defined(); });
}

// Typed handle of a registered op.
template <class Schema>
c10::TypedOperatorHandle<Schema> OpHandle(const std::string& name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name.c_str(), "").typed<Schema>();
}

template <class P, class Fields>
class OpPairOf;
template <class P>
using OpPair = OpPairOf<P, decltype(P::kFields(std::declval<typename P::Arguments&>()))>;

template <class P, class... F>
class OpPairOf<P, std::tuple<F&...>> {
 public:
  using Arguments = typename P::Arguments;
  using Outputs = decltype(std::tuple_cat(std::array<at::Tensor, P::kOutputs>()));

  static Outputs Call(const Arguments& a) {
    TORCH_CHECK(!a.mask.valid, Prefix(),
                " expected a mask of lengths and starts; ToFront "
                "(ops/mask.h) makes one of a token mask");
    return std::apply([](const auto&... f) { return Op().call(f...); }, P::kFields(a));
  }

  // As Call, for states that are the caller's alone (in_place.h): where no gradient is recorded and
  // nobody watches the calls of ops, the kernel writes to them and they are the states after.
  static Outputs CallInPlace(Arguments& a) {
    const at::Tensor& tokens = P::Tokens(a);
    bool plain =
        !a.mask.valid && ActiveImpl() == Impl::kKernel && OnCpu(tokens) && NobodyWatchesOps();
    EachInput(a, [&](const at::Tensor& t) {
      plain = plain && IsPlain(t) && !(c10::GradMode::is_enabled() && t.requires_grad()) &&
              !t._fw_grad(0).defined();
    });
    if (!plain) return Call(a);
    Check(a);
    const MaskView view(a.mask, tokens.size(P::kTime));
    Tensors y = P::InPlace(a);
    P::Forward(a, view.mask, y);
    return Tuple(std::move(y));
  }

  static void Define(torch::Library& m) {
    const std::vector<at::Tag> tags = {at::Tag::pt2_compliant_tag};
    const std::string schema = P::kSchema;
    const size_t open = schema.find('('), close = schema.find(") ->");
    m.def(P::kSchema, tags);
    m.def((Name() + "_backward(Tensor?[] grads, Tensor?[] outputs, " +
           schema.substr(open + 1, close - open - 1) + ") -> Tensor[]")
              .c_str(),
          tags);
  }
  static void Cpu(torch::Library& m) { Register(m, &ForwardCpu, &BackwardCpu); }
  static void Meta(torch::Library& m) { Register(m, &ForwardMeta, &BackwardMeta); }
  // Devices without kernels, below Autograd: in inference mode, and in a graph that is compiled.
  static void OtherDevices(torch::Library& m) { m.impl(Name().c_str(), &ForwardComposed); }
  static void Autograd(torch::Library& m) { Register(m, &ForwardAutograd, &BackwardAutograd); }

 private:
  // As the dispatcher passes a field.
  template <class T>
  using Passed = std::conditional_t<std::is_arithmetic_v<T>, T, const T&>;
  using List = c10::List<OptionalTensor>;
  using ForwardSchema = Outputs(Passed<F>...);
  using BackwardSchema = Tensors(const List&, const List&, Passed<F>...);
  static constexpr bool kHasReference = requires(const Arguments& a, const RowMask& mask) {
    P::ForwardReference(a, mask);
  };

  static std::string Name() {
    const std::string schema = P::kSchema;
    return schema.substr(0, schema.find('('));
  }
  static const char* Prefix() {  // of messages
    static const std::string prefix = "[" + Name() + "]";
    return prefix.c_str();
  }
  static void Register(torch::Library& m, ForwardSchema* forward, BackwardSchema* backward) {
    m.impl(Name().c_str(), forward);
    m.impl((Name() + "_backward").c_str(), backward);
  }
  static const c10::TypedOperatorHandle<ForwardSchema>& Op() {
    static const auto op = OpHandle<ForwardSchema>("cistern::" + Name());
    return op;
  }
  static const c10::TypedOperatorHandle<BackwardSchema>& BackwardOp() {
    static const auto op = OpHandle<BackwardSchema>("cistern::" + Name() + "_backward");
    return op;
  }

  static Arguments Packed(Passed<F>... f) {
    Arguments a;
    P::kFields(a) = std::tie(f...);
    return a;
  }
  static Outputs Tuple(Tensors y) {
    return [&]<size_t... i>(std::index_sequence<i...>) { return Outputs{std::move(y[i])...}; }
    (std::make_index_sequence<P::kOutputs>());
  }
  static Tensors Vector(Outputs y) {
    return std::apply([](auto&... t) { return Tensors{std::move(t)...}; }, y);
  }
  static Tensors Vector(const List& list) {
    Tensors x;
    for (const OptionalTensor& t : list) x.push_back(t.value_or(at::Tensor()));
    return x;
  }
  static List Listed(at::TensorList x) {
    List list;
    for (const at::Tensor& t : x) list.push_back(Given(t));
    return list;
  }

  static bool IsConstant(const Arguments& a, const OptionalTensor* field) {
    if constexpr (requires { P::IsConstant(a, field); }) {
      if (P::IsConstant(a, field)) return true;
    }
    return field == &a.mask.starts || field == &a.mask.lengths;
  }
  // visit(tensor) of each differentiable argument that is given.
  template <class Visit>
  static void EachInput(Arguments& a, Visit&& visit) {
    const auto one = [&](auto& field) {
      using T = std::remove_cvref_t<decltype(field)>;
      if constexpr (std::is_same_v<T, at::Tensor>) {
        visit(field);
      } else if constexpr (std::is_same_v<T, OptionalTensor>) {
        if (field && !IsConstant(a, &field)) visit(*field);
      }
    };
    std::apply([&](auto&... field) { (one(field), ...); }, P::kFields(a));
  }
  static Tensors Inputs(Arguments& a) {
    Tensors x;
    EachInput(a, [&](const at::Tensor& t) { x.push_back(t); });
    return x;
  }

  // Whether the CPU's kernels, or the reference, serve x.
  static bool OnCpu(const at::Tensor& x) {
    if constexpr (requires { P::kBFloat16; }) {
      if (x.scalar_type() == at::kBFloat16)
        return ActiveImpl() == Impl::kKernel && x.device().is_cpu();
    }
    return UsesKernel(x) && (kHasReference || ActiveImpl() == Impl::kKernel);
  }
  // Whether below Autograd there is a kernel that serves x.
  static bool HasKernel(const at::Tensor& x) {
    if (x.is_meta()) return true;
    if (x.device().is_cpu()) return OnCpu(x);
    if (ActiveImpl() != Impl::kKernel) return false;
    const auto key = c10::computeDispatchKey(x.scalar_type(), x.layout(), x.device());
    return Op().hasKernelForDispatchKey(key) && BackwardOp().hasKernelForDispatchKey(key);
  }

  // Whether the CPU's kernels serve x as floats.
  static bool GoesAsFloats(const at::Tensor& x) {
    return (x.scalar_type() == at::kBFloat16 || x.scalar_type() == at::kHalf) &&
           x.device().is_cpu() && ActiveImpl() == Impl::kKernel && !OnCpu(x);
  }
  static Outputs AsFloats(Arguments a) {
    const at::ScalarType type = P::Tokens(a).scalar_type();
    const auto widen = [type](auto& field) {
      using T = std::remove_cvref_t<decltype(field)>;
      if constexpr (std::is_same_v<T, at::Tensor>) {
        if (field.scalar_type() == type) field = field.to(at::kFloat);
      } else if constexpr (std::is_same_v<T, OptionalTensor>) {
        if (field && field->scalar_type() == type) field = field->to(at::kFloat);
      }
    };
    std::apply([&](auto&... field) { (widen(field), ...); }, P::kFields(a));
    Tensors y = Vector(Call(a));
    for (at::Tensor& t : y) {
      if (t.scalar_type() == at::kFloat) t = t.to(type);
    }
    return Tuple(std::move(y));
  }

  static void Check(const Arguments& a) {
    P::Check(a);
    const at::Tensor& tokens = P::Tokens(a);
    a.mask.Check(Prefix(), tokens.sym_size(0), tokens.sym_size(P::kTime));
  }

  static Tensors Composed(const Arguments& a) {
    Tensors y = P::Compose(a);
    y.resize(P::kOutputs);
    for (at::Tensor& t : y) {
      if (!t.defined()) t = at::empty({0}, P::Tokens(a).options());
    }
    return y;
  }

  static Outputs ForwardCpu(Passed<F>... f) {
    const Arguments a = Packed(f...);
    Check(a);
    const at::Tensor& tokens = P::Tokens(a);
    if (GoesAsFloats(tokens)) return AsFloats(a);
    if (!HasKernel(tokens)) return Tuple(Composed(a));
    const MaskView view(a.mask, tokens.size(P::kTime));
    if constexpr (kHasReference) {
      if (ActiveImpl() == Impl::kReference) return Tuple(P::ForwardReference(a, view.mask));
    }
    const Tensors y = P::Empty(a);
    P::Forward(a, view.mask, y);
    return Tuple(y);
  }
  static Tensors BackwardCpu(const List& grads, const List& outputs, Passed<F>... f) {
    const Arguments a = Packed(f...);
    const at::Tensor& tokens = P::Tokens(a);
    TORCH_CHECK(HasKernel(tokens), "[", Name(), "_backward] has no kernel for ",
                tokens.scalar_type(), " with CISTERN_IMPL=", ImplName(ActiveImpl()),
                "; differentiate ", Name(), " instead");
    const MaskView view(a.mask, tokens.size(P::kTime));
    if constexpr (kHasReference) {
      if (ActiveImpl() == Impl::kReference)
        return P::BackwardReference(a, view.mask, Vector(grads), Vector(outputs));
    }
    return P::Backward(a, view.mask, Vector(grads), Vector(outputs));
  }

  static Outputs ForwardComposed(Passed<F>... f) {
    const Arguments a = Packed(f...);
    Check(a);
    return Tuple(Composed(a));
  }

  static Outputs ForwardMeta(Passed<F>... f) {
    const Arguments a = Packed(f...);
    Check(a);
    return Tuple(P::Empty(a));
  }
  static Tensors BackwardMeta(const List&, const List&, Passed<F>... f) {
    return P::EmptyGradients(Packed(f...));
  }

  struct Function : torch::autograd::Function<Function> {
    static torch::autograd::variable_list forward(torch::autograd::AutogradContext* ctx,
                                                  at::TensorList inputs, const Arguments& a) {
      at::AutoDispatchBelowADInplaceOrView guard;
      const Tensors y = Vector(Call(a));
      Tensors saved;
      int options = 0;
      const auto save = [&](const auto& field) {
        using T = std::remove_cvref_t<decltype(field)>;
        if constexpr (std::is_same_v<T, at::Tensor>) {
          saved.push_back(field);
        } else if constexpr (std::is_same_v<T, OptionalTensor>) {
          saved.push_back(field.value_or(at::Tensor()));
        } else {
          ctx->saved_data[std::to_string(options++)] = field;
        }
      };
      std::apply([&](const auto&... field) { (save(field), ...); }, P::kFields(a));
      for (const at::Tensor& t : Kept(a, y)) saved.push_back(t);
      ctx->save_for_backward(std::move(saved));
      ctx->saved_data["inputs"] = static_cast<int64_t>(inputs.size());
      ctx->set_materialize_grads(false);
      if constexpr (P::kOutputs > P::kDifferentiable)
        ctx->mark_non_differentiable({y.begin() + P::kDifferentiable, y.end()});
      return y;
    }
    static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                   const torch::autograd::variable_list& grads) {
      torch::autograd::variable_list to(size_t(ctx->saved_data["inputs"].toInt()) + 1);
      if (std::none_of(grads.begin(), grads.end(), [](const auto& g) { return g.defined(); }))
        return to;
      const Tensors saved = ctx->get_saved_variables();
      Arguments a;
      size_t tensors = 0;
      int options = 0;
      const auto restore = [&](auto& field) {
        using T = std::remove_cvref_t<decltype(field)>;
        if constexpr (std::is_same_v<T, at::Tensor>) {
          field = saved[tensors++];
        } else if constexpr (std::is_same_v<T, OptionalTensor>) {
          field = Given(saved[tensors++]);
        } else {
          field = ctx->saved_data[std::to_string(options++)].template to<T>();
        }
      };
      std::apply([&](auto&... field) { (restore(field), ...); }, P::kFields(a));
      const Tensors dx = std::apply(
          [&](const auto&... field) {
            return BackwardOp().call(Listed(at::TensorList(grads).slice(0, P::kDifferentiable)),
                                     Listed(at::TensorList(saved).slice(tensors)), field...);
          },
          P::kFields(a));
      std::copy(dx.begin(), dx.end(), to.begin());
      return to;
    }
    static Tensors Kept(const Arguments& a, const Tensors& y) {
      if constexpr (requires { P::Keep(a, y); }) {
        return P::Keep(a, y);
      } else {
        return y;
      }
    }
  };

  static Outputs ForwardAutograd(Passed<F>... f) {
    Arguments a = Packed(f...);
    if (!HasKernel(P::Tokens(a))) {
      Check(a);
      return GoesAsFloats(P::Tokens(a)) ? AsFloats(a) : Tuple(Composed(a));
    }
    const Tensors x = Inputs(a);
    // A kernel would lose the tangent, and the derivative be zero.
    TORCH_CHECK_NOT_IMPLEMENTED(!HaveTangents(x), Prefix(),
                                " has no forward-mode derivative; differentiate backwards "
                                "(torch.autograd.grad), or run with CISTERN_IMPL=composite");
    if (!NeedsGradient(x)) {
      at::AutoDispatchBelowADInplaceOrView guard;
      return Call(a);
    }
    if constexpr (requires { a.save; }) a.save = true;
    return Tuple(Function::apply(at::TensorList(x), a));
  }

  // Second derivatives: autograd through what P composes.
  static Tensors BackwardAutograd(const List& grads, const List& outputs, Passed<F>... f) {
    Arguments a = Packed(f...);
    const Tensors g = Vector(grads);
    if (!NeedsGradient(Inputs(a)) && !NeedsGradient(g)) {
      at::AutoDispatchBelowADInplaceOrView guard;
      return BackwardOp().call(grads, outputs, f...);
    }
    at::AutoGradMode enable(true);
    EachInput(a, [](at::Tensor& t) { t = Apart(t); });
    const Tensors inputs = Inputs(a), y = P::Compose(a);
    Tensors to, from;
    for (size_t i = 0; i < P::kDifferentiable; ++i) {
      // The output of no tokens depends on nothing.
      if (g[i].defined() && y[i].requires_grad()) to.push_back(y[i]), from.push_back(g[i]);
    }
    Tensors dx = to.empty() ? Tensors(inputs.size())
                            : torch::autograd::grad(to, inputs, from, true, true, true);
    for (size_t i = 0; i < dx.size(); ++i) {
      if (!dx[i].defined()) dx[i] = at::zeros_like(inputs[i]);
    }
    return dx;
  }
};

}  // namespace cistern::ops

// Registers primitive P, whose description stands in namespace cistern::ops.
#define CISTERN_PRIMITIVE(P)                                                   \
  TORCH_LIBRARY_FRAGMENT(cistern, m) { ::cistern::ops::OpPair<P>::Define(m); } \
  TORCH_LIBRARY_IMPL(cistern, CPU, m) { ::cistern::ops::OpPair<P>::Cpu(m); }   \
  TORCH_LIBRARY_IMPL(cistern, Meta, m) { ::cistern::ops::OpPair<P>::Meta(m); } \
  TORCH_LIBRARY_IMPL(cistern, CompositeExplicitAutograd, m) {                  \
    ::cistern::ops::OpPair<P>::OtherDevices(m);                                \
  }                                                                            \
  TORCH_LIBRARY_IMPL(cistern, Autograd, m) { ::cistern::ops::OpPair<P>::Autograd(m); }
