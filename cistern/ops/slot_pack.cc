// The slots' attention to all tokens.
#include "cistern/kernels/slot_bidirectional.h"
#include "cistern/ops/primitive.h"
#include "cistern/ops/slot_memory.h"
#include "cistern/ops/written_terms.h"

namespace cistern::ops {
namespace slot_pack {

struct Arguments {
  at::Tensor queries, k, v, memory, z;
  Mask mask;
  double scale = 1;
};

struct Pack {
  static constexpr const char* kSchema =
      "slot_pack(Tensor queries, Tensor k, Tensor v, Tensor memory, Tensor z, Tensor? starts=None, "
      "Tensor? lengths=None, float scale=1) -> (Tensor, Tensor)";
  using Arguments = slot_pack::Arguments;
  static constexpr auto kFields = [](auto& a) {
    return std::tie(a.queries, a.k, a.v, a.memory, a.z, a.mask.starts, a.mask.lengths, a.scale);
  };
  static constexpr size_t kOutputs = 2, kDifferentiable = 2;
  enum { kMemory, kZ };
  static constexpr int64_t kTime = 2;
  static constexpr bool kBFloat16 = true;
  static const at::Tensor& Tokens(const Arguments& a) { return a.v; }

  static SlotShape ShapeOf(const Arguments& a) {
    return {a.v.size(0), a.v.size(1), a.v.size(2), a.queries.size(2), a.v.size(3)};
  }

  static void Check(const Arguments& a) {
    TORCH_CHECK(
        a.k.dim() == 4 && a.v.dim() == 4 && a.queries.dim() == 4 && a.memory.dim() == 4 &&
            a.v.sym_sizes().slice(0, 3) == a.k.sym_sizes().slice(0, 3) &&
            a.queries.sym_sizes().slice(0, 2) == a.k.sym_sizes().slice(0, 2) &&
            a.queries.sym_size(3) == a.k.sym_size(3) &&
            a.memory.sym_sizes().slice(0, 3) == a.queries.sym_sizes().slice(0, 3) &&
            a.memory.sym_size(3) == a.v.sym_size(3) &&
            a.z.sym_sizes() == a.memory.sym_sizes().slice(0, 3),
        "[slot_pack] expected queries [B,H,n,d_k], k [B,H,T,d_k], v [B,H,T,d], memory [B,H,n,d] "
        "and z [B,H,n], got ",
        a.queries.sym_sizes(), ", ", a.k.sym_sizes(), ", ", a.v.sym_sizes(), ", ",
        a.memory.sym_sizes(), " and ", a.z.sym_sizes());
    TORCH_CHECK(a.k.scalar_type() == a.v.scalar_type(),
                "[slot_pack] expected k and v of one dtype, got ", a.k.scalar_type(), " and ",
                a.v.scalar_type());
    TORCH_CHECK(a.queries.scalar_type() == at::kDouble && a.memory.scalar_type() == at::kDouble &&
                    a.z.scalar_type() == at::kDouble,
                "[slot_pack] expected queries, memory and z in double, got ",
                a.queries.scalar_type(), ", ", a.memory.scalar_type(), " and ", a.z.scalar_type());
    TORCH_CHECK(!a.mask.starts,
                "[slot_pack] a state holds one document: packed rows have to be split before they "
                "are written");
  }

  static Tensors Compose(const Arguments& a) {
    const auto type = ComputeTypeOf(a.v);
    const at::Tensor pad = a.mask.HeadsPadding(a.k.size(2)), k = a.k.to(type),
                     // Whatever padding holds, NaN too, has no gradient.
        keys = pad.defined() ? k.masked_fill(pad, 0.0) : k,
                     s = at::matmul(keys, (a.queries * a.scale).to(type).transpose(2, 3));
    const SlotState after = SlotWrite(s, a.v.to(type), {a.memory, a.z}, a.mask);
    return {after.memory, after.z};
  }

  static Tensors Empty(const Arguments& a) { return {LikePlain(a.memory), LikePlain(a.z)}; }
  static Tensors EmptyGradients(const Arguments& a) {
    return {LikePlain(a.queries), GradientLike(a.k), GradientLike(a.v), LikePlain(a.memory),
            LikePlain(a.z)};
  }

  static void Forward(const Arguments& a, const RowMask& mask, const Tensors& y) {
    const at::Tensor k = UnitStride(a.k), v = UnitStride(a.v), queries = a.queries.contiguous();
    BeginState(a.memory, y[kMemory]), BeginState(a.z, y[kZ]);
    DispatchStored(v, [&]<class T>(T) {
      cistern::SlotPack<T>(ShapeOf(a), {a.scale, queries.const_data_ptr<double>(), k.size(3)},
                           InputRows<T>(k), InputRows<T>(v), mask.lengths,
                           y[kMemory].mutable_data_ptr<double>(), y[kZ].mutable_data_ptr<double>());
    });
  }

  static Tensors Keep(const Arguments&, const Tensors& y) { return y; }

  static Tensors Backward(const Arguments& a, const RowMask& mask, const Tensors& g,
                          const Tensors& kept) {
    const at::Tensor k = UnitStride(a.k), v = UnitStride(a.v), queries = a.queries.contiguous(),
                     dk = GradientLike(a.k), dv = GradientLike(a.v), d_queries = LikePlain(queries);
    const WrittenTerms terms(g[kMemory], g[kZ], a.memory, a.z, kept[kMemory], kept[kZ],
                             ComputeTypeOf(v));
    DispatchStored(v, [&]<class T>(T) {
      using C = ComputeType<T>;
      const SlotWrittenGradients<T> written = {InputRows<T>(v), terms.G.const_data_ptr<C>(),
                                               OutputRows<T>(dv)};
      SlotPackBackward<T>(ShapeOf(a), {a.scale, queries.const_data_ptr<double>(), k.size(3)},
                          InputRows<T>(k), written, mask.lengths,
                          terms.z_after.const_data_ptr<double>(), terms.h.const_data_ptr<C>(),
                          OutputRows<T>(dk), d_queries.mutable_data_ptr<double>());
    });
    return {d_queries, dk, dv, terms.DMemory(), terms.DZ()};
  }
};

}  // namespace slot_pack

CISTERN_PRIMITIVE(slot_pack::Pack)

SlotState SlotPack(const at::Tensor& queries, const at::Tensor& k, const at::Tensor& v,
                   double scale, const SlotState& state, const Mask& mask) {
  auto [memory, z] =
      OpPair<slot_pack::Pack>::Call({queries, k, v, state.memory, state.z, mask, scale});
  return {memory, z};
}

}  // namespace cistern::ops
