#include "cistern/ops/fourier_features.h"

#include "cistern/ops/fourier_map.h"
#include "cistern/ops/primitive.h"

namespace cistern::ops {
namespace fourier_features {

struct Arguments {
  at::Tensor x;
  OptionalTensor scale;
  OptionalTensor matrices;  // always given: optional ones may be constants
  bool normalise = false;
  double factor = 1;
  Mask mask;  // never given: every token is for itself
};

struct Op {
  static constexpr const char* kSchema =
      "fourier_features(Tensor x, Tensor? scale, Tensor? matrices, bool normalise, float factor) "
      "-> Tensor";
  using Arguments = fourier_features::Arguments;
  static constexpr auto kFields = [](auto& a) {
    return std::tie(a.x, a.scale, a.matrices, a.normalise, a.factor);
  };
  static constexpr size_t kOutputs = 1, kDifferentiable = 1;
  static constexpr int64_t kTime = 2;
  static constexpr bool kBFloat16 = true;
  static const at::Tensor& Tokens(const Arguments& a) { return a.x; }
  static bool IsConstant(const Arguments& a, const OptionalTensor* field) {
    return field == &a.matrices;
  }

  static void Check(const Arguments& a) {
    TORCH_CHECK(a.x.dim() == 4, "[fourier_features] expected x [B,H,T,d], got ", a.x.sym_sizes());
    CheckFourier("[fourier_features]", "x", a.x, a.scale, a.matrices);
  }

  static Tensors Compose(const Arguments& a) {
    const auto type = ComputeTypeOf(a.x);
    at::Tensor y = a.x.to(type);
    if (a.normalise) y = y / (at::linalg_vector_norm(y, 2, {-1}, true) + kLengthEpsilon);
    if (a.scale) y = y * a.scale->to(type);
    y = at::matmul(y, a.matrices->to(type).transpose(1, 2));
    return {at::cat({y.sin(), y.cos()}, -1) * a.factor};
  }
  static Tensors Empty(const Arguments& a) {
    const auto& x = a.x;
    return {
        EmptyHeadByHead({x.sym_size(0), x.sym_size(1), x.sym_size(2), a.matrices->sym_size(1) * 2},
                        x.options().dtype(ComputeTypeOf(x)))};
  }
  static Tensors EmptyGradients(const Arguments& a) {
    Tensors grads = {GradientLike(a.x)};
    if (a.scale) grads.push_back(at::empty_symint(a.scale->sym_sizes(), a.scale->options()));
    return grads;
  }

  static FourierShape ShapeOf(const at::Tensor& x) { return {x.size(0), x.size(1), x.size(2)}; }

  static void Forward(const Arguments& a, const RowMask&, const Tensors& y) {
    DispatchStored(a.x, [&]<class S>(S) {
      const at::Tensor x = UnitStride(a.x);
      const FourierTensors<S> given(a.x, a.scale, *a.matrices, a.normalise, a.factor);
      cistern::FourierFeatures<S>(ShapeOf(x), given.map(), InputRows<S>(x),
                                  OutputRows<ComputeType<S>>(y[0]));
    });
  }

  static Tensors Backward(const Arguments& a, const RowMask&, const Tensors& g,
                          const Tensors& kept) {
    Tensors grads = EmptyGradients(a);
    DispatchStored(a.x, [&]<class S>(S) {
      using T = ComputeType<S>;
      const at::Tensor x = UnitStride(a.x), d_out = UnitStride(g[0]);
      const FourierTensors<S> given(a.x, a.scale, *a.matrices, a.normalise, a.factor);
      const at::Tensor d_scale = given.EmptyScaleGradient();
      FourierFeaturesBackward<S>(ShapeOf(x), given.map(), InputRows<S>(x), InputRows<T>(kept[0]),
                                 InputRows<T>(d_out), OutputRows<S>(grads[0]),
                                 d_scale.defined() ? MutableData<T>(d_scale) : nullptr);
      if (a.scale) grads[1].copy_(d_scale);
    });
    return grads;
  }
};

}  // namespace fourier_features

CISTERN_PRIMITIVE(fourier_features::Op)

at::Tensor FourierFeatures(const at::Tensor& x, const FourierFeatureMap& map) {
  using fourier_features::Op;
  const Op::Arguments a = {x, Given(map.scale), map.matrices, map.normalise, map.factor, {}};
  if (!NeedsGradient({map.matrices})) return std::get<0>(OpPair<Op>::Call(a));
  Op::Check(a);
  return Op::Compose(a)[0];
}

}  // namespace cistern::ops
