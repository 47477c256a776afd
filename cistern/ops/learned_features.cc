#include "cistern/ops/learned_features.h"

#include "cistern/kernels/learned_features.h"
#include "cistern/ops/exact_attention.h"
#include "cistern/ops/primitive.h"

namespace cistern::ops {
namespace learned_features {

struct Arguments {
  at::Tensor x, weights, bias;
  double scale = 1;
  Mask mask;  // never given: every token is for itself
};

// Of fewer tokens a row the weights' other order would cost more than their product.
constexpr int64_t kFewestTokens = 16;

struct Op {
  static constexpr const char* kSchema =
      "learned_features(Tensor x, Tensor weights, Tensor bias, float scale) -> Tensor";
  using Arguments = learned_features::Arguments;
  static constexpr auto kFields = [](auto& a) { return std::tie(a.x, a.weights, a.bias, a.scale); };
  static constexpr size_t kOutputs = 1, kDifferentiable = 1;
  static constexpr int64_t kTime = 2;
  static constexpr bool kBFloat16 = true;
  static const at::Tensor& Tokens(const Arguments& a) { return a.x; }

  static void Check(const Arguments& a) {
    TORCH_CHECK(a.x.dim() == 4, "[learned_features] expected x [B,H,T,d], got ", a.x.sym_sizes());
    TORCH_CHECK(a.weights.dim() == 3 && a.weights.sym_size(0) == a.x.sym_size(1) &&
                    a.weights.sym_size(2) == a.x.sym_size(3),
                "[learned_features] expected weights [H,n,d] for x ", a.x.sym_sizes(), ", got ",
                a.weights.sym_sizes());
    TORCH_CHECK(a.bias.dim() == 2 && a.bias.sym_size(0) == a.weights.sym_size(0) &&
                    a.bias.sym_size(1) == a.weights.sym_size(1),
                "[learned_features] expected bias [H,n] for weights ", a.weights.sym_sizes(),
                ", got ", a.bias.sym_sizes());
    for (const at::Tensor* t : {&a.weights, &a.bias}) {
      TORCH_CHECK(t->scalar_type() == ComputeTypeOf(a.x) || t->scalar_type() == a.x.scalar_type(),
                  "[learned_features] expected weights and bias of ", ComputeTypeOf(a.x),
                  " for x of ", a.x.scalar_type(), ", got ", t->scalar_type());
    }
  }

  static Tensors Compose(const Arguments& a) {
    const auto type = ComputeTypeOf(a.x);
    const at::Tensor y = at::matmul(a.x.to(type), (a.weights.to(type) * a.scale).transpose(1, 2));
    return {at::relu(y + a.bias.to(type).unsqueeze(1)).to(a.x.scalar_type())};
  }
  static Tensors Empty(const Arguments& a) {
    const auto& x = a.x;
    return {EmptyHeadByHead({x.sym_size(0), x.sym_size(1), x.sym_size(2), a.weights.sym_size(1)},
                            x.options())};
  }
  static Tensors EmptyGradients(const Arguments& a) {
    return {GradientLike(a.x), LikePlain(a.weights), LikePlain(a.bias)};
  }

  // W and b in the type that is computed in.
  template <class T>
  struct Map {
    explicit Map(const Arguments& a)
        : weights(a.weights.to(ComputeTypeOf(a.x)).contiguous()),
          bias(a.bias.to(ComputeTypeOf(a.x)).contiguous()),
          map{ConstData<T>(weights), ConstData<T>(bias), a.scale} {}
    at::Tensor weights, bias;
    LearnedMap<T> map;
  };
  static SlotShape ShapeOf(const Arguments& a) {
    return {a.x.size(0), a.x.size(1), a.x.size(2), a.weights.size(1), a.x.size(3)};
  }

  static void Forward(const Arguments& a, const RowMask&, const Tensors& y) {
    if (a.x.size(2) < kFewestTokens) {
      y[0].copy_(Compose(a)[0]);
      return;
    }
    DispatchStored(a.x, [&]<class S>(S) {
      const at::Tensor x = UnitStride(a.x);
      cistern::LearnedFeatures<S>(ShapeOf(a), Map<ComputeType<S>>(a).map, InputRows<S>(x),
                                  OutputRows<S>(y[0]));
    });
  }

  static Tensors Backward(const Arguments& a, const RowMask&, const Tensors& g,
                          const Tensors& kept) {
    Tensors grads = EmptyGradients(a);
    DispatchStored(a.x, [&]<class S>(S) {
      using T = ComputeType<S>;
      const at::Tensor x = UnitStride(a.x), d_out = UnitStride(g[0]);
      const Map<T> given(a);
      const at::Tensor d_weights = at::empty_like(given.weights),
                       d_bias = at::empty_like(given.bias);
      LearnedFeaturesBackward<S>(ShapeOf(a), given.map, InputRows<S>(x), InputRows<S>(kept[0]),
                                 InputRows<S>(d_out), OutputRows<S>(grads[0]),
                                 MutableData<T>(d_weights), MutableData<T>(d_bias));
      grads[1].copy_(d_weights);
      grads[2].copy_(d_bias);
    });
    return grads;
  }
};

}  // namespace learned_features

CISTERN_PRIMITIVE(learned_features::Op)

at::Tensor LearnedFeatures(const at::Tensor& x, const at::Tensor& weights, const at::Tensor& bias,
                           double scale) {
  using learned_features::Op;
  if (x.scalar_type() != at::kBFloat16 || !MultipliesBFloat16())
    return std::get<0>(OpPair<Op>::Call({x, weights, bias, scale, {}}));
  const Op::Arguments a = {x, weights, bias, scale, {}};
  Op::Check(a);
  return at::relu(at::matmul(x * scale, weights.to(at::kBFloat16).transpose(1, 2)) +
                  bias.to(at::kBFloat16).unsqueeze(1));
}

}  // namespace cistern::ops
