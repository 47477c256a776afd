#include "cistern/ops/favor_bidirectional.h"

#include "cistern/kernels/favor_attention.h"
#include "cistern/ops/primitive.h"
#include "cistern/ops/written_terms.h"

namespace cistern::ops {
namespace favor_bidirectional {

// x: k of a write, q of a read, which has no v; padding of q is never given.
struct Arguments {
  at::Tensor x, v, memory, z;
  OptionalTensor matrix;  // always given: optional ones may be constants
  Mask mask;
  double scale = 1;
};

// What both have.
struct Both {
  using Arguments = favor_bidirectional::Arguments;
  static constexpr int64_t kTime = 2;
  static constexpr bool kBFloat16 = true;
  static const at::Tensor& Tokens(const Arguments& a) { return a.x; }
  static bool IsConstant(const Arguments& a, const OptionalTensor* field) {
    return field == &a.matrix;
  }
  static SlotShape ShapeOf(const Arguments& a) {
    return {a.x.size(0), a.x.size(1), a.x.size(2), a.matrix->size(0), a.memory.size(3)};
  }
  static void CheckBoth(const char* op, const Arguments& a) {
    TORCH_CHECK(a.x.dim() == 4, op, " expected tokens [B,H,T,d], got ", a.x.sym_sizes());
    TORCH_CHECK(a.matrix && a.matrix->dim() == 2 && a.matrix->sym_size(1) == a.x.sym_size(3), op,
                " expected matrix [n,d] for tokens ", a.x.sym_sizes(), ", got ",
                a.matrix ? a.matrix->sym_sizes() : c10::SymIntArrayRef());
    TORCH_CHECK(a.matrix->scalar_type() == ComputeTypeOf(a.x) ||
                    a.matrix->scalar_type() == a.x.scalar_type(),
                op, " expected matrix of ", ComputeTypeOf(a.x), " for tokens of ",
                a.x.scalar_type(), ", got ", a.matrix->scalar_type());
    TORCH_CHECK(
        a.memory.dim() == 4 && a.memory.sym_sizes().slice(0, 2) == a.x.sym_sizes().slice(0, 2) &&
            a.memory.sym_size(2) == a.matrix->sym_size(0) && a.z.dim() == 3 &&
            a.z.sym_sizes() == a.memory.sym_sizes().slice(0, 3),
        op, " expected memory [B,H,n,d] and z [B,H,n] for tokens ", a.x.sym_sizes(), " and matrix ",
        a.matrix->sym_sizes(), ", got ", a.memory.sym_sizes(), " and ", a.z.sym_sizes());
    TORCH_CHECK(a.memory.scalar_type() == at::kDouble && a.z.scalar_type() == at::kDouble, op,
                " expected memory and z in double, got ", a.memory.scalar_type(), " and ",
                a.z.scalar_type());
  }
  // x' matrix^T in the type that is computed in; squares: less |x'|^2 / 2.
  static at::Tensor LogFeatures(const Arguments& a, const at::Tensor& x, bool squares) {
    const at::Tensor y = x * a.scale, logits = at::matmul(y, a.matrix->to(y.scalar_type()).t());
    return squares ? logits - 0.5 * y.square().sum({3}, true) : logits;
  }
  // body(map) with the map as tokens stored as T take it.
  template <class T, class Body>
  static void WithMap(const Arguments& a, Body body) {
    using C = ComputeType<T>;
    const at::Tensor matrix = a.matrix->to(ComputeTypeOf(a.x)).contiguous();
    body(FavorMap<C>{matrix.const_data_ptr<C>(), a.x.size(3), a.scale});
  }
};

struct Write : Both {
  static constexpr const char* kSchema =
      "favor_write(Tensor k, Tensor v, Tensor memory, Tensor z, Tensor? matrix, Tensor? "
      "starts=None, Tensor? lengths=None, float scale=1) -> (Tensor, Tensor)";
  static constexpr auto kFields = [](auto& a) {
    return std::tie(a.x, a.v, a.memory, a.z, a.matrix, a.mask.starts, a.mask.lengths, a.scale);
  };
  static constexpr size_t kOutputs = 2, kDifferentiable = 2;
  enum { kMemory, kZ };

  static void Check(const Arguments& a) {
    CheckBoth("[favor_write]", a);
    TORCH_CHECK(
        a.v.dim() == 4 && a.v.sym_sizes().slice(0, 3) == a.x.sym_sizes().slice(0, 3) &&
            a.v.sym_size(3) == a.memory.sym_size(3) && a.v.scalar_type() == a.x.scalar_type(),
        "[favor_write] expected v [B,H,T,d] for k ", a.x.sym_sizes(), " ", a.x.scalar_type(),
        " and memory ", a.memory.sym_sizes(), ", got ", a.v.sym_sizes(), " ", a.v.scalar_type());
    TORCH_CHECK(!a.mask.starts,
                "[favor_write] a state holds one document: packed rows have to be split before "
                "they are written");
  }

  static Tensors Compose(const Arguments& a) {
    const auto type = ComputeTypeOf(a.x);
    const at::Tensor pad = a.mask.HeadsPadding(a.x.size(2)), x = a.x.to(type);
    // Whatever padding holds, NaN too, has no gradient.
    const SlotState after =
        SlotWrite(LogFeatures(a, pad.defined() ? x.masked_fill(pad, 0.0) : x, true), a.v.to(type),
                  {a.memory, a.z}, a.mask);
    return {after.memory, after.z};
  }

  static Tensors Empty(const Arguments& a) { return {LikePlain(a.memory), LikePlain(a.z)}; }
  static Tensors EmptyGradients(const Arguments& a) {
    return {GradientLike(a.x), GradientLike(a.v), LikePlain(a.memory), LikePlain(a.z)};
  }

  static void Forward(const Arguments& a, const RowMask& mask, const Tensors& y) {
    const at::Tensor k = UnitStride(a.x), v = UnitStride(a.v);
    BeginState(a.memory, y[kMemory]), BeginState(a.z, y[kZ]);
    DispatchStored(v, [&]<class T>(T) {
      WithMap<T>(a, [&](const auto& map) {
        cistern::FavorWrite<T>(ShapeOf(a), map, InputRows<T>(k), InputRows<T>(v), mask.lengths,
                               y[kMemory].mutable_data_ptr<double>(),
                               y[kZ].mutable_data_ptr<double>());
      });
    });
  }

  static Tensors Keep(const Arguments&, const Tensors& y) { return y; }

  static Tensors Backward(const Arguments& a, const RowMask& mask, const Tensors& g,
                          const Tensors& kept) {
    const at::Tensor k = UnitStride(a.x), v = UnitStride(a.v), dk = GradientLike(a.x),
                     dv = GradientLike(a.v);
    const WrittenTerms terms(g[kMemory], g[kZ], a.memory, a.z, kept[kMemory], kept[kZ],
                             ComputeTypeOf(v));
    DispatchStored(v, [&]<class T>(T) {
      using C = ComputeType<T>;
      const SlotWrittenGradients<T> written = {InputRows<T>(v), terms.G.const_data_ptr<C>(),
                                               OutputRows<T>(dv)};
      WithMap<T>(a, [&](const auto& map) {
        FavorWriteBackward<T>(ShapeOf(a), map, InputRows<T>(k), written, mask.lengths,
                              terms.z_after.const_data_ptr<double>(), terms.h.const_data_ptr<C>(),
                              OutputRows<T>(dk));
      });
    });
    return {dk, dv, terms.DMemory(), terms.DZ()};
  }
};

struct Read : Both {
  static constexpr const char* kSchema =
      "favor_read(Tensor q, Tensor memory, Tensor z, Tensor? matrix, float scale=1) -> Tensor";
  static constexpr auto kFields = [](auto& a) {
    return std::tie(a.x, a.memory, a.z, a.matrix, a.scale);
  };
  static constexpr size_t kOutputs = 1, kDifferentiable = 1;

  static void Check(const Arguments& a) { CheckBoth("[favor_read]", a); }

  static Tensors Compose(const Arguments& a) {
    // Counted from the largest in double, z loses nothing of weight in float.
    const at::Tensor most = a.z.detach().amax({2}, true), none = at::isneginf(most),
                     z = (a.z - most.masked_fill(none, 0.0)).masked_fill(none, 0.0),
                     x = LogFeatures(a, a.x.to(ComputeTypeOf(a.x)), false);
    return {
        SlotSoftmaxRead(x + z.to(x.scalar_type()).unsqueeze(2), a.memory).to(a.x.scalar_type())};
  }

  static Tensors Empty(const Arguments& a) {
    const c10::SymInt sizes[] = {a.x.sym_size(0), a.x.sym_size(1), a.x.sym_size(2),
                                 a.memory.sym_size(3)};
    return {EmptyHeads(sizes, a.x.options())};
  }
  static Tensors EmptyGradients(const Arguments& a) {
    return {GradientLike(a.x), LikePlain(a.memory), LikePlain(a.z)};
  }

  static void Forward(const Arguments& a, const RowMask&, const Tensors& y) {
    const at::Tensor q = UnitStride(a.x), memory = a.memory.contiguous(), z = a.z.contiguous();
    DispatchStored(q, [&]<class T>(T) {
      WithMap<T>(a, [&](const auto& map) {
        cistern::FavorRead<T>(ShapeOf(a), map, InputRows<T>(q), memory.const_data_ptr<double>(),
                              z.const_data_ptr<double>(), OutputRows<T>(y[0]));
      });
    });
  }

  static Tensors Keep(const Arguments&, const Tensors&) { return {}; }

  static Tensors Backward(const Arguments& a, const RowMask&, const Tensors& g, const Tensors&) {
    const at::Tensor q = UnitStride(a.x), memory = a.memory.contiguous(), z = a.z.contiguous(),
                     d_out = UnitStride(g[0]), dq = GradientLike(a.x), d_memory = LikePlain(memory),
                     d_z = LikePlain(z);
    DispatchStored(q, [&]<class T>(T) {
      WithMap<T>(a, [&](const auto& map) {
        FavorReadBackward<T>(ShapeOf(a), map, InputRows<T>(q), memory.const_data_ptr<double>(),
                             z.const_data_ptr<double>(), InputRows<T>(d_out), OutputRows<T>(dq),
                             d_memory.mutable_data_ptr<double>(), d_z.mutable_data_ptr<double>());
      });
    });
    return {dq, d_memory, d_z};
  }
};

}  // namespace favor_bidirectional

CISTERN_PRIMITIVE(favor_bidirectional::Write)
CISTERN_PRIMITIVE(favor_bidirectional::Read)

SlotState FavorWrite(const at::Tensor& k, const at::Tensor& v, const at::Tensor& matrix,
                     double scale, const SlotState& state, const Mask& mask) {
  using favor_bidirectional::Write;
  const Write::Arguments a = {k, v, state.memory, state.z, matrix, mask, scale};
  if (NeedsGradient({matrix})) {
    Write::Check(a);
    const Tensors y = Write::Compose(a);
    return {y[0], y[1]};
  }
  auto [memory, z] = OpPair<Write>::Call(a);
  return {memory, z};
}

at::Tensor FavorRead(const at::Tensor& q, const at::Tensor& matrix, double scale,
                     const SlotState& state) {
  using favor_bidirectional::Read;
  const Read::Arguments a = {q, {}, state.memory, state.z, matrix, {}, scale};
  if (!NeedsGradient({matrix})) return std::get<0>(OpPair<Read>::Call(a));
  Read::Check(a);
  return Read::Compose(a)[0];
}

}  // namespace cistern::ops
