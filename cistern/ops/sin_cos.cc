#include "cistern/ops/sin_cos.h"

#include "cistern/kernels/sin_cos.h"
#include "cistern/ops/primitive.h"

namespace cistern::ops {
namespace sin_cos {

struct Arguments {
  at::Tensor x;
  double factor = 1;
  Mask mask;  // never given: every element is for itself
};

struct Op {
  static constexpr const char* kSchema = "sin_cos(Tensor x, float factor) -> Tensor";
  using Arguments = sin_cos::Arguments;
  static constexpr auto kFields = [](auto& a) { return std::tie(a.x, a.factor); };
  static constexpr size_t kOutputs = 1, kDifferentiable = 1;
  static constexpr int64_t kTime = 0;
  static const at::Tensor& Tokens(const Arguments& a) { return a.x; }

  static void Check(const Arguments& a) {
    TORCH_CHECK(a.x.dim() >= 1 && a.x.is_floating_point(),
                "[sin_cos] expected at least one dimension of real numbers, got ", a.x.sym_sizes(),
                " of ", a.x.scalar_type());
  }

  static Tensors Compose(const Arguments& a) {
    return {at::cat({a.x.sin(), a.x.cos()}, -1) * a.factor};
  }
  static Tensors Empty(const Arguments& a) {
    c10::SymDimVector sizes(a.x.sym_sizes().begin(), a.x.sym_sizes().end());
    sizes.back() = sizes.back() * 2;
    return {at::empty_symint(sizes, a.x.options())};
  }
  static Tensors EmptyGradients(const Arguments& a) { return {LikePlain(a.x)}; }

  static void Forward(const Arguments& a, const RowMask&, const Tensors& y) {
    if (a.x.scalar_type() == at::kDouble) {
      y[0].copy_(Compose(a)[0]);
      return;
    }
    const at::Tensor x = a.x.contiguous();
    const int64_t width = x.size(-1);
    cistern::SinCos(width == 0 ? 0 : x.numel() / width, width, static_cast<float>(a.factor),
                    ConstData<float>(x), MutableData<float>(y[0]));
  }

  static Tensors Keep(const Arguments&, const Tensors& y) { return y; }

  static Tensors Backward(const Arguments& a, const RowMask&, const Tensors& g,
                          const Tensors& kept) {
    const at::Tensor& y = kept[0];
    const int64_t width = a.x.size(-1);
    if (y.scalar_type() == at::kDouble) {
      return {g[0].narrow(-1, 0, width) * y.narrow(-1, width, width) -
              g[0].narrow(-1, width, width) * y.narrow(-1, 0, width)};
    }
    const at::Tensor dy = g[0].contiguous(), dx = LikePlain(a.x);
    SinCosBackward(width == 0 ? 0 : a.x.numel() / width, width, ConstData<float>(dy),
                   ConstData<float>(y), MutableData<float>(dx));
    return {dx};
  }
};

}  // namespace sin_cos

CISTERN_PRIMITIVE(sin_cos::Op)

at::Tensor SinCos(const at::Tensor& x, double factor) {
  return std::get<0>(OpPair<sin_cos::Op>::Call({x, factor, {}}));
}

}  // namespace cistern::ops
