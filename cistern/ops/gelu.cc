#include "cistern/ops/gelu.h"

#include "cistern/kernels/gelu.h"
#include "cistern/ops/primitive.h"

namespace cistern::ops {
namespace gelu {

struct Arguments {
  at::Tensor x;
  Mask mask;  // never given: every element is for itself
};

template <class Run>
void FloatOrBFloat16(const at::Tensor& x, Run&& run) {
  x.scalar_type() == at::kFloat ? run(float{}) : run(BFloat16{});
}

struct Op {
  static constexpr const char* kSchema = "gelu(Tensor x) -> Tensor";
  using Arguments = gelu::Arguments;
  static constexpr auto kFields = [](auto& a) { return std::tie(a.x); };
  static constexpr size_t kOutputs = 1, kDifferentiable = 1;
  static constexpr int64_t kTime = 0;
  static constexpr bool kBFloat16 = true;
  static const at::Tensor& Tokens(const Arguments& a) { return a.x; }

  static void Check(const Arguments& a) {
    TORCH_CHECK(a.x.dim() >= 1 && a.x.is_floating_point(),
                "[gelu] expected at least one dimension of real numbers, got ", a.x.sym_sizes(),
                " of ", a.x.scalar_type());
  }

  static Tensors Compose(const Arguments& a) { return {at::gelu(a.x)}; }
  static Tensors Empty(const Arguments& a) { return {LikePlain(a.x)}; }
  static Tensors EmptyGradients(const Arguments& a) { return {LikePlain(a.x)}; }

  static void Forward(const Arguments& a, const RowMask&, const Tensors& y) {
    if (a.x.scalar_type() == at::kDouble) {
      y[0].copy_(at::gelu(a.x));
      return;
    }
    const at::Tensor x = a.x.contiguous();
    FloatOrBFloat16(
        x, [&]<class T>(T) { cistern::Gelu<T>(x.numel(), ConstData<T>(x), MutableData<T>(y[0])); });
  }

  static Tensors Keep(const Arguments&, const Tensors&) { return {}; }

  static Tensors Backward(const Arguments& a, const RowMask&, const Tensors& g, const Tensors&) {
    if (a.x.scalar_type() == at::kDouble) return {at::gelu_backward(g[0], a.x)};
    const at::Tensor x = a.x.contiguous(), dy = g[0].contiguous(), dx = LikePlain(x);
    FloatOrBFloat16(x, [&]<class T>(T) {
      GeluBackward<T>(x.numel(), ConstData<T>(dy), ConstData<T>(x), MutableData<T>(dx));
    });
    return {dx};
  }
};

}  // namespace gelu

CISTERN_PRIMITIVE(gelu::Op)

at::Tensor Gelu(const at::Tensor& x) { return std::get<0>(OpPair<gelu::Op>::Call({x, {}})); }

}  // namespace cistern::ops
