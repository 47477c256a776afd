#include "cistern/kernels/linear_bidirectional.h"

#include "cistern/kernels/ref/linear_attention_ref.h"
#include "cistern/ops/linear_attention.h"
#include "cistern/ops/primitive.h"

namespace cistern::ops {
namespace linear_bidirectional {

// Padding of q is never given: every row is for itself.
struct Arguments {
  at::Tensor x, v, memory;  // x: q or k; no v of a read
  Mask mask;
  int64_t map = 0;
  double map_eps = 0;
  int64_t divisor = 0;
  double value = 0;
  LinearRule rule() const { return {FeatureMap(map), map_eps, DivisorRule(divisor), value}; }
};

at::Tensor Features(const at::Tensor& x, const LinearRule& rule) {
  if (rule.map == FeatureMap::kNone) return x;
  return rule.map_eps > 0 ? EluPlusOne(x) + rule.map_eps : EluPlusOne(x);
}

void CheckRule(const char* op, const Arguments& a) {
  TORCH_CHECK(a.map >= 0 && a.map <= int64_t(FeatureMap::kEluPlusOne) && a.divisor >= 0 &&
                  a.divisor <= int64_t(DivisorRule::kNone),
              op, " expected map 0 to 1 and divisor 0 to 4, got ", a.map, " and ", a.divisor);
  TORCH_CHECK(a.map_eps == 0 || a.map != int64_t(FeatureMap::kNone), op,
              " map_eps is added to what a map gives; map 0 is none");
  TORCH_CHECK(a.x.dim() == 4 && a.memory.dim() == 4 &&
                  a.memory.sym_sizes().slice(0, 2) == a.x.sym_sizes().slice(0, 2) &&
                  a.memory.sym_size(2) == a.x.sym_size(3),
              op, " expected tokens [B,H,T,n] and memory [B,H,n,...], got ", a.x.sym_sizes(),
              " and ", a.memory.sym_sizes());
  TORCH_CHECK(a.memory.scalar_type() == at::kDouble, op, " expected memory in double, got ",
              a.memory.scalar_type());
}

struct Write {
  static constexpr const char* kSchema =
      "linear_write(Tensor k, Tensor v, Tensor memory, Tensor? starts=None, Tensor? lengths=None, "
      "int map=0, float map_eps=0, int divisor=0, float value=1e-06) -> Tensor";
  using Arguments = linear_bidirectional::Arguments;
  static constexpr auto kFields = [](auto& a) {
    return std::tie(a.x, a.v, a.memory, a.mask.starts, a.mask.lengths, a.map, a.map_eps, a.divisor,
                    a.value);
  };
  static constexpr size_t kOutputs = 1, kDifferentiable = 1;
  static constexpr int64_t kTime = 2;
  static constexpr bool kBFloat16 = true;
  static const at::Tensor& Tokens(const Arguments& a) { return a.v; }
  static SlotShape ShapeOf(const Arguments& a) {
    return {a.x.size(0), a.x.size(1), a.x.size(2), a.x.size(3), a.v.size(3)};
  }

  static void Check(const Arguments& a) {
    CheckRule("[linear_write]", a);
    TORCH_CHECK(a.v.dim() == 4 && a.v.sym_sizes().slice(0, 3) == a.x.sym_sizes().slice(0, 3) &&
                    a.memory.sym_size(3) ==
                        a.v.sym_size(3) + (a.rule().divisor == DivisorRule::kNone ? 0 : 1),
                "[linear_write] expected k [B,H,T,n], v [B,H,T,d] and memory [B,H,n,d+1], or "
                "[B,H,n,d] without a divisor, got ",
                a.x.sym_sizes(), ", ", a.v.sym_sizes(), " and ", a.memory.sym_sizes());
    TORCH_CHECK(a.x.scalar_type() == a.v.scalar_type(), "[linear_write] expected one dtype, got k ",
                a.x.scalar_type(), ", v ", a.v.scalar_type());
    TORCH_CHECK(!a.mask.starts,
                "[linear_write] a memory holds one document: packed rows have to be split before "
                "they are written");
  }

  static Tensors Compose(const Arguments& a) {
    const auto type = ComputeTypeOf(a.v);
    const at::Tensor pad = a.mask.HeadsPadding(a.x.size(2)), x = a.x.to(type),
                     k = pad.defined() ? x.masked_fill(pad, 0.0) : x;
    return {SumWrite(Features(k, a.rule()), WithOnes(a.v.to(type), a.rule().divisor), a.memory,
                     a.mask)};
  }

  static Tensors Empty(const Arguments& a) { return {LikePlain(a.memory)}; }
  static Tensors EmptyGradients(const Arguments& a) {
    return {GradientLike(a.x), GradientLike(a.v), LikePlain(a.memory)};
  }

  static void Forward(const Arguments& a, const RowMask& mask, const Tensors& y) {
    const at::Tensor k = UnitStride(a.x), v = UnitStride(a.v);
    BeginState(a.memory, y[0]);
    DispatchStored(v, [&]<class T>(T) {
      cistern::LinearWrite<T>(ShapeOf(a), a.rule(), InputRows<T>(k), InputRows<T>(v), mask.lengths,
                              y[0].mutable_data_ptr<double>());
    });
  }

  static Tensors Keep(const Arguments&, const Tensors&) { return {}; }

  static Tensors Backward(const Arguments& a, const RowMask& mask, const Tensors& g,
                          const Tensors&) {
    const at::Tensor k = UnitStride(a.x), v = UnitStride(a.v), G = g[0].contiguous(),
                     dk = GradientLike(a.x), dv = GradientLike(a.v);
    DispatchStored(v, [&]<class T>(T) {
      LinearWriteBackward<T>(ShapeOf(a), a.rule(), InputRows<T>(k), InputRows<T>(v), mask.lengths,
                             G.const_data_ptr<double>(), OutputRows<T>(dk), OutputRows<T>(dv));
    });
    return {dk, dv, G};
  }

  // By the walk that writes and reads.
  static Tensors ForwardReference(const Arguments& a, const RowMask& mask) {
    const at::Tensor k = AsDouble(a.x), v = AsDouble(a.v), q = at::zeros_like(k),
                     memory = a.memory.clone(at::MemoryFormat::Contiguous), out = at::empty_like(v);
    ref::LinearForward(ShapeOf(a), a.rule(), DataOrNull(q), DataOrNull(k), DataOrNull(v), mask,
                       memory.mutable_data_ptr<double>(), out.mutable_data_ptr<double>());
    return {memory};
  }
  static Tensors BackwardReference(const Arguments& a, const RowMask& mask, const Tensors& g,
                                   const Tensors&) {
    const at::Tensor k = AsDouble(a.x), v = AsDouble(a.v), q = at::zeros_like(k),
                     memory = AsDouble(a.memory), d_out = at::zeros_like(v), G = AsDouble(g[0]);
    const at::Tensor dq = at::zeros_like(q), dk = at::zeros_like(k), dv = at::zeros_like(v),
                     dm = at::zeros_like(memory);
    ref::LinearBackward(ShapeOf(a), a.rule(), DataOrNull(q), DataOrNull(k), DataOrNull(v), mask,
                        DataOrNull(memory), DataOrNull(d_out), DataOrNull(G),
                        dq.mutable_data_ptr<double>(), dk.mutable_data_ptr<double>(),
                        dv.mutable_data_ptr<double>(), dm.mutable_data_ptr<double>());
    const auto dtype = a.v.scalar_type();
    return {dk.to(dtype), dv.to(dtype), dm};
  }
};

struct Read {
  static constexpr const char* kSchema =
      "linear_read(Tensor q, Tensor memory, int map=0, float map_eps=0, int divisor=0, float "
      "value=1e-06) -> Tensor";
  using Arguments = linear_bidirectional::Arguments;
  static constexpr auto kFields = [](auto& a) {
    return std::tie(a.x, a.memory, a.map, a.map_eps, a.divisor, a.value);
  };
  static constexpr size_t kOutputs = 1, kDifferentiable = 1;
  static constexpr int64_t kTime = 2;
  static constexpr bool kBFloat16 = true;
  static const at::Tensor& Tokens(const Arguments& a) { return a.x; }
  static c10::SymInt Width(const Arguments& a) {
    return a.memory.sym_size(3) - (a.rule().divisor == DivisorRule::kNone ? 0 : 1);
  }
  static SlotShape ShapeOf(const Arguments& a) {
    return {a.x.size(0), a.x.size(1), a.x.size(2), a.x.size(3), Width(a).expect_int()};
  }

  static void Check(const Arguments& a) {
    CheckRule("[linear_read]", a);
    TORCH_CHECK(Width(a) > 0,
                "[linear_read] expected memory of shape [B,H,n,d+1], or [B,H,n,d] "
                "without a divisor, got ",
                a.memory.sym_sizes());
  }

  static Tensors Compose(const Arguments& a) {
    const LinearRule rule = a.rule();
    const auto type = ComputeTypeOf(a.x);
    const at::Tensor sums = at::matmul(Features(a.x.to(type), rule), a.memory.to(type));
    return {DivideSums(sums, rule.divisor, rule.value).to(a.x.scalar_type())};
  }

  static Tensors Empty(const Arguments& a) {
    const c10::SymInt sizes[] = {a.x.sym_size(0), a.x.sym_size(1), a.x.sym_size(2), Width(a)};
    return {EmptyHeads(sizes, a.x.options())};
  }
  static Tensors EmptyGradients(const Arguments& a) {
    return {GradientLike(a.x), LikePlain(a.memory)};
  }

  static void Forward(const Arguments& a, const RowMask&, const Tensors& y) {
    const at::Tensor q = UnitStride(a.x), memory = a.memory.contiguous();
    DispatchStored(q, [&]<class T>(T) {
      cistern::LinearRead<T>(ShapeOf(a), a.rule(), InputRows<T>(q), memory.const_data_ptr<double>(),
                             OutputRows<T>(y[0]));
    });
  }

  static Tensors Keep(const Arguments&, const Tensors& y) { return y; }

  static Tensors Backward(const Arguments& a, const RowMask&, const Tensors& g,
                          const Tensors& kept) {
    const at::Tensor q = UnitStride(a.x), memory = a.memory.contiguous(), out = UnitStride(kept[0]),
                     d_out = UnitStride(g[0]), dq = GradientLike(a.x), d_memory = LikePlain(memory);
    DispatchStored(q, [&]<class T>(T) {
      LinearReadBackward<T>(ShapeOf(a), a.rule(), InputRows<T>(q), memory.const_data_ptr<double>(),
                            InputRows<T>(out), InputRows<T>(d_out), OutputRows<T>(dq),
                            d_memory.mutable_data_ptr<double>());
    });
    return {dq, d_memory};
  }
};

}  // namespace linear_bidirectional

CISTERN_PRIMITIVE(linear_bidirectional::Write)
CISTERN_PRIMITIVE(linear_bidirectional::Read)

at::Tensor LinearWrite(const at::Tensor& k, const at::Tensor& v, const at::Tensor& memory,
                       const LinearRule& rule, const Mask& mask) {
  return std::get<0>(OpPair<linear_bidirectional::Write>::Call(
      {k, v, memory, mask, int64_t(rule.map), rule.map_eps, int64_t(rule.divisor), rule.value}));
}

at::Tensor LinearRead(const at::Tensor& q, const at::Tensor& memory, const LinearRule& rule) {
  return std::get<0>(OpPair<linear_bidirectional::Read>::Call(
      {q, {}, memory, {}, int64_t(rule.map), rule.map_eps, int64_t(rule.divisor), rule.value}));
}

}  // namespace cistern::ops
