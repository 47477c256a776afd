#include "cistern/ops/rotary.h"

#include "cistern/kernels/rotary.h"
#include "cistern/ops/primitive.h"

namespace cistern::ops {
namespace rotary {

struct Arguments {
  at::Tensor x;
  OptionalTensor table;  // always given: optional ones may be constants
  Mask mask;             // never given: every token is for itself
};

struct Op {
  static constexpr const char* kSchema = "rotary(Tensor x, Tensor? table) -> Tensor";
  using Arguments = rotary::Arguments;
  static constexpr auto kFields = [](auto& a) { return std::tie(a.x, a.table); };
  static constexpr size_t kOutputs = 1, kDifferentiable = 1;
  static constexpr int64_t kTime = 2;
  static constexpr bool kBFloat16 = true;
  static const at::Tensor& Tokens(const Arguments& a) { return a.x; }
  static bool IsConstant(const Arguments& a, const OptionalTensor* field) {
    return field == &a.table;
  }

  static void Check(const Arguments& a) {
    TORCH_CHECK(a.x.dim() == 4 && a.x.sym_size(3) % 2 == 0,
                "[rotary] expected x [B,H,T,d] with an even d, got ", a.x.sym_sizes());
    TORCH_CHECK(a.table && a.table->dim() == 3 &&
                    (a.table->sym_size(0) == 1 || a.table->sym_size(0) == a.x.sym_size(0)) &&
                    a.table->sym_size(1) == a.x.sym_size(2) &&
                    a.table->sym_size(2) == a.x.sym_size(3),
                "[rotary] expected table [1 or B,T,d] for x ", a.x.sym_sizes(), ", got ",
                a.table ? a.table->sym_sizes() : c10::SymIntArrayRef());
    TORCH_CHECK(a.table->scalar_type() == ComputeTypeOf(a.x), "[rotary] expected table of ",
                ComputeTypeOf(a.x), " for x of ", a.x.scalar_type(), ", got ",
                a.table->scalar_type());
  }

  static Tensors Compose(const Arguments& a) {
    const int64_t half = a.x.size(3) / 2;
    const at::Tensor x = a.x.to(ComputeTypeOf(a.x)), table = a.table->unsqueeze(1),
                     cos = table.narrow(3, 0, half), sin = table.narrow(3, half, half),
                     first = x.narrow(3, 0, half), second = x.narrow(3, half, half);
    return {
        at::cat({first * cos - second * sin, second * cos + first * sin}, 3).to(a.x.scalar_type())};
  }
  static Tensors Empty(const Arguments& a) { return {LikeHeads(a.x)}; }
  static Tensors EmptyGradients(const Arguments& a) { return Empty(a); }

  static void Turn(const Arguments& a, const at::Tensor& x, bool back, const at::Tensor& y) {
    const at::Tensor from = UnitStride(x), table = a.table->contiguous();
    const RotaryShape shape{x.size(0), x.size(1), x.size(2), x.size(3) / 2, table.size(0) == 1};
    DispatchStored(x, [&]<class T>(T) {
      cistern::Rotary<T>(shape, InputRows<T>(from), table.const_data_ptr<ComputeType<T>>(), back,
                         OutputRows<T>(y));
    });
  }
  static void Forward(const Arguments& a, const RowMask&, const Tensors& y) {
    Turn(a, a.x, false, y[0]);
  }
  static Tensors Keep(const Arguments&, const Tensors&) { return {}; }
  static Tensors Backward(const Arguments& a, const RowMask&, const Tensors& g, const Tensors&) {
    Tensors dx = EmptyGradients(a);
    Turn(a, g[0], true, dx[0]);
    return dx;
  }
};

}  // namespace rotary

CISTERN_PRIMITIVE(rotary::Op)

at::Tensor Rotary(const at::Tensor& x, const at::Tensor& table) {
  return std::get<0>(OpPair<rotary::Op>::Call({x, table, {}}));
}

}  // namespace cistern::ops
