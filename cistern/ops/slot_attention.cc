#include "cistern/ops/slot_attention.h"

#include <limits>

#include "cistern/kernels/favor_attention.h"
#include "cistern/kernels/ref/slot_memory_ref.h"
#include "cistern/kernels/slot_attention.h"
#include "cistern/ops/primitive.h"
#include "cistern/ops/slot_checks.h"

namespace cistern::ops {
namespace slot_attention {

SlotShape ShapeOf(const at::Tensor& s, const at::Tensor& v) {
  return {s.size(0), s.size(1), s.size(2), s.size(3), v.size(3)};
}

// The gradient of a state's memory in the type of the tokens, for the kernel to move on.
at::Tensor GradientOf(const at::Tensor& d_memory, const at::Tensor& memory, at::ScalarType type) {
  return d_memory.defined() ? d_memory.to(type, false, true, at::MemoryFormat::Contiguous)
                            : at::zeros(memory.sizes(), memory.options().dtype(type));
}

// Adds dM . M_T of each slot to h.
void AddDot(const at::Tensor& d_memory, const at::Tensor& memory_end, at::Tensor& h) {
  if (d_memory.defined()) h = h + (d_memory * memory_end).sum(-1);
}

// h of SlotAdjoint where the sequence ends, in double, from the gradients of the memory after it
// and of its z.
at::Tensor EndTerms(const at::Tensor& d_memory, const at::Tensor& d_z, const at::Tensor& memory_end,
                    const at::Tensor& z) {
  at::Tensor h = at::zeros(z.sizes(), z.options());
  AddDot(d_memory, memory_end, h);
  return d_z.defined() ? h - d_z : h;
}

struct LatteArguments {
  at::Tensor q, s, v, memory, z;  // q: x of favor
  Mask mask;
};

// softmax(x + z) in double, over the slots that hold something; zeros where a row reads nothing.
at::Tensor FavorWeights(const at::Tensor& x, const at::Tensor& s, const SlotState& state,
                        const Mask& mask) {
  constexpr double kNone = -std::numeric_limits<double>::infinity();
  // A memory one channel wide gives z at every position.
  const at::Tensor ones = at::ones({1, 1, 1, 1}, state.z.options())
                              .expand_symint({s.sym_size(0), s.sym_size(1), s.sym_size(2), 1}),
                   narrow = at::zeros_like(state.z).unsqueeze(-1),
                   z = SlotMatch(ones, s.to(at::kDouble), ones, {narrow, state.z}, mask, true)
                           .z_out;
  const at::Tensor empty = at::isneginf(z), sum = (x + z).masked_fill(empty, kNone),
                   nothing = at::isneginf(sum).all(-1, true);
  return at::softmax(sum.masked_fill(nothing, 0.0), -1).masked_fill(empty.logical_or(nothing), 0.0);
}

// latte, and favor.
template <bool kFavor>
struct TokenRead {
  static constexpr const char* kSchema =
      kFavor ? "favor(Tensor x, Tensor s, Tensor v, Tensor memory, Tensor z, Tensor? starts=None, "
               "Tensor? lengths=None) -> (Tensor, Tensor, Tensor)"
             : "latte(Tensor q, Tensor s, Tensor v, Tensor memory, Tensor z, Tensor? starts=None, "
               "Tensor? lengths=None) -> (Tensor, Tensor, Tensor)";
  using Arguments = LatteArguments;
  static constexpr auto kFields = [](auto& x) {
    return std::tie(x.q, x.s, x.v, x.memory, x.z, x.mask.starts, x.mask.lengths);
  };
  static constexpr size_t kOutputs = 3, kDifferentiable = 3;
  enum { kOut, kMemory, kZ };
  static constexpr int64_t kTime = 2;
  static constexpr bool kBFloat16 = true;
  static const at::Tensor& Tokens(const Arguments& x) { return x.v; }

  static void Check(const Arguments& x) {
    const char* op = kFavor ? "[favor]" : "[latte]";
    const char* q = kFavor ? "x" : "q";
    CheckSlots(op, "s", x.s, "v", x.v, x.memory, &x.z);
    TORCH_CHECK(x.q.sym_sizes() == x.s.sym_sizes(), op, " expected ", q, " of shape ",
                x.s.sym_sizes(), ", got ", x.q.sym_sizes());
    TORCH_CHECK(x.q.scalar_type() == x.s.scalar_type() && x.s.scalar_type() == x.v.scalar_type(),
                op, " expected one dtype, got ", q, " ", x.q.scalar_type(), ", s ",
                x.s.scalar_type(), ", v ", x.v.scalar_type());
  }

  static Tensors Compose(const Arguments& x) {
    const auto type = ComputeTypeOf(x.v);
    at::Tensor q = x.q.to(type);
    // Whatever padding holds, NaN too, has no gradient.
    const at::Tensor pad = x.mask.HeadsPadding(q.size(2));
    if (pad.defined()) q = q.masked_fill(pad, 0.0);
    const at::Tensor weights =
        kFavor ? FavorWeights(q, x.s, {x.memory, x.z}, x.mask).to(type) : at::softmax(q, -1);
    const SlotResult r = SlotRead(weights, x.s.to(type), x.v.to(type), {x.memory, x.z}, x.mask);
    return {r.out.to(x.v.scalar_type()), r.state.memory, r.state.z};
  }

  static Tensors Empty(const Arguments& x) {
    return {LikeHeads(x.v), LikePlain(x.memory), LikePlain(x.z)};
  }
  static Tensors EmptyGradients(const Arguments& x) {
    return {GradientLike(x.q), GradientLike(x.s), GradientLike(x.v), LikePlain(x.memory),
            LikePlain(x.z)};
  }

  static Tensors InPlace(const Arguments& x) { return {LikeHeads(x.v), x.memory, x.z}; }

  static void Forward(const Arguments& x, const RowMask& mask, const Tensors& y) {
    const at::Tensor q = UnitStride(x.q), s = UnitStride(x.s), v = UnitStride(x.v);
    const at::Tensor &memory = y[kMemory], &z = y[kZ], &out = y[kOut];
    BeginState(x.memory, memory), BeginState(x.z, z);
    DispatchStored(v, [&]<class T>(T) {
      (kFavor ? &FavorForward<T>
              : &LatteForward<T>)(ShapeOf(s, v), InputRows<T>(q), InputRows<T>(s), InputRows<T>(v),
                                  mask, memory.mutable_data_ptr<double>(),
                                  z.mutable_data_ptr<double>(), OutputRows<T>(out));
    });
  }

  static Tensors Keep(const Arguments&, const Tensors& y) { return {y[kMemory]}; }

  static Tensors Backward(const Arguments& x, const RowMask& mask, const Tensors& g,
                          const Tensors& kept) {
    const at::Tensor q = UnitStride(x.q), s = UnitStride(x.s), v = UnitStride(x.v),
                     d_out = UnitStride(OrZeros(g[kOut], v)), memory = x.memory.contiguous(),
                     z = x.z.contiguous();
    const auto type = ComputeTypeOf(v);
    const at::Tensor G = GradientOf(g[kMemory], memory, type);
    const at::Tensor h = EndTerms(g[kMemory], g[kZ], kept[0], z).to(type), dq = GradientLike(x.q),
                     ds = GradientLike(x.s), dv = GradientLike(x.v);
    DispatchStored(v, [&]<class T>(T) {
      (kFavor ? &FavorBackward<T>
              : &LatteBackward<T>)(ShapeOf(s, v), InputRows<T>(q), InputRows<T>(s), InputRows<T>(v),
                                   InputRows<T>(d_out), mask, memory.const_data_ptr<double>(),
                                   z.const_data_ptr<double>(), G.mutable_data_ptr<ComputeType<T>>(),
                                   h.mutable_data_ptr<ComputeType<T>>(), OutputRows<T>(dq),
                                   OutputRows<T>(ds), OutputRows<T>(dv));
    });
    const at::Tensor d_memory = G.to(at::kDouble);
    return {dq, ds, dv, d_memory, (d_memory * memory).sum(-1) - h};
  }

  static Tensors ForwardReference(const Arguments& a, const RowMask& mask) requires(kFavor) {
    const at::Tensor x = AsDouble(a.q), s = AsDouble(a.s), v = AsDouble(a.v),
                     memory = a.memory.clone(at::MemoryFormat::Contiguous),
                     z = a.z.clone(at::MemoryFormat::Contiguous), out = at::empty_like(v);
    ref::FavorRead(ShapeOf(s, v), DataOrNull(x), DataOrNull(s), DataOrNull(v), mask,
                   memory.mutable_data_ptr<double>(), z.mutable_data_ptr<double>(),
                   out.mutable_data_ptr<double>());
    return {out.to(a.v.scalar_type()), memory, z};
  }

  static Tensors BackwardReference(const Arguments& a, const RowMask& mask, const Tensors& g,
                                   const Tensors&) requires(kFavor) {
    const at::Tensor x = AsDouble(a.q), s = AsDouble(a.s), v = AsDouble(a.v),
                     memory = AsDouble(a.memory), z = AsDouble(a.z),
                     g_out = AsDouble(OrZeros(g[kOut], a.v)), g_memory = AsDouble(g[kMemory]),
                     g_z = AsDouble(g[kZ]);
    const at::Tensor dx = at::zeros_like(x), ds = at::zeros_like(s), dv = at::zeros_like(v),
                     dm = at::zeros_like(memory), dz = at::zeros_like(z);
    ref::FavorReadBackward(ShapeOf(s, v), DataOrNull(x), DataOrNull(s), DataOrNull(v), mask,
                           DataOrNull(memory), DataOrNull(z), DataOrNull(g_out),
                           DataOrNull(g_memory), DataOrNull(g_z), dx.mutable_data_ptr<double>(),
                           ds.mutable_data_ptr<double>(), dv.mutable_data_ptr<double>(),
                           dm.mutable_data_ptr<double>(), dz.mutable_data_ptr<double>());
    const auto dtype = a.v.scalar_type();
    return {dx.to(dtype), ds.to(dtype), dv.to(dtype), dm, dz};
  }
};
using Latte = TokenRead<false>;
using Favor = TokenRead<true>;

struct FavorQueriesArguments {
  at::Tensor q, k, v, memory, z;
  OptionalTensor matrix;  // always given: optional ones may be constants
  Mask mask;
  double scale = 1;
};

// favor, of the logarithms of features that it forms from queries and keys.
struct FavorQueries {
  static constexpr const char* kSchema =
      "favor_queries(Tensor q, Tensor k, Tensor v, Tensor memory, Tensor z, Tensor? matrix, "
      "Tensor? starts=None, Tensor? lengths=None, float scale=1) -> (Tensor, Tensor, Tensor)";
  using Arguments = FavorQueriesArguments;
  static constexpr auto kFields = [](auto& x) {
    return std::tie(x.q, x.k, x.v, x.memory, x.z, x.matrix, x.mask.starts, x.mask.lengths, x.scale);
  };
  static constexpr size_t kOutputs = 3, kDifferentiable = 3;
  enum { kOut, kMemory, kZ };
  static constexpr int64_t kTime = 2;
  static constexpr bool kBFloat16 = true;
  static const at::Tensor& Tokens(const Arguments& x) { return x.v; }
  static bool IsConstant(const Arguments& x, const OptionalTensor* field) {
    return field == &x.matrix;
  }

  static void Check(const Arguments& x) {
    constexpr const char* kOp = "[favor_queries]";
    TORCH_CHECK(x.q.dim() == 4 && x.k.sym_sizes() == x.q.sym_sizes(), kOp,
                " expected q and k of one shape [B,H,T,d], got ", x.q.sym_sizes(), " and ",
                x.k.sym_sizes());
    TORCH_CHECK(x.v.dim() == 4 && x.v.sym_sizes().slice(0, 3) == x.q.sym_sizes().slice(0, 3), kOp,
                " expected v of shape [B,H,T,d] with the B, H, T of q ", x.q.sym_sizes(), ", got ",
                x.v.sym_sizes());
    TORCH_CHECK(x.matrix && x.matrix->dim() == 2 && x.matrix->sym_size(1) == x.q.sym_size(3), kOp,
                " expected matrix [n,d] for q ", x.q.sym_sizes(), ", got ",
                x.matrix ? x.matrix->sym_sizes() : c10::SymIntArrayRef());
    TORCH_CHECK(
        x.memory.dim() == 4 && x.memory.sym_sizes().slice(0, 2) == x.q.sym_sizes().slice(0, 2) &&
            x.memory.sym_size(2) == x.matrix->sym_size(0) &&
            x.memory.sym_size(3) == x.v.sym_size(3) && x.z.dim() == 3 &&
            x.z.sym_sizes() == x.memory.sym_sizes().slice(0, 3),
        kOp, " expected memory [B,H,n,d] and z [B,H,n] for matrix ", x.matrix->sym_sizes(),
        " and v ", x.v.sym_sizes(), ", got ", x.memory.sym_sizes(), " and ", x.z.sym_sizes());
    TORCH_CHECK(x.memory.scalar_type() == at::kDouble && x.z.scalar_type() == at::kDouble, kOp,
                " expected memory and z in double, got ", x.memory.scalar_type(), " and ",
                x.z.scalar_type());
    TORCH_CHECK(x.k.scalar_type() == x.q.scalar_type() && x.v.scalar_type() == x.q.scalar_type(),
                kOp, " expected one dtype, got q ", x.q.scalar_type(), ", k ", x.k.scalar_type(),
                ", v ", x.v.scalar_type());
    TORCH_CHECK(x.matrix->scalar_type() == ComputeTypeOf(x.q) ||
                    x.matrix->scalar_type() == x.q.scalar_type(),
                kOp, " expected matrix of ", ComputeTypeOf(x.q), " for q of ", x.q.scalar_type(),
                ", got ", x.matrix->scalar_type());
  }

  static Tensors Compose(const Arguments& x) {
    const auto type = ComputeTypeOf(x.q);
    // Whatever padding holds, NaN too, has no gradient.
    const at::Tensor pad = x.mask.HeadsPadding(x.q.size(2)), turned = x.matrix->to(type).t();
    const auto scaled = [&](const at::Tensor& y) {
      const at::Tensor z = y.to(type) * x.scale;
      return pad.defined() ? z.masked_fill(pad, 0.0) : z;
    };
    const at::Tensor q = scaled(x.q), k = scaled(x.k);
    const AttentionResult r = FavorAttention(
        at::matmul(q, turned), at::matmul(k, turned) - 0.5 * k.square().sum({3}, true),
        x.v.to(type), {x.memory, x.z}, x.mask);
    return {r.out.to(x.v.scalar_type()), r.state.memory, r.state.z};
  }

  static Tensors Empty(const Arguments& x) {
    return {LikeHeads(x.v), LikePlain(x.memory), LikePlain(x.z)};
  }
  static Tensors EmptyGradients(const Arguments& x) {
    return {GradientLike(x.q), GradientLike(x.k), GradientLike(x.v), LikePlain(x.memory),
            LikePlain(x.z)};
  }
  static Tensors InPlace(const Arguments& x) { return {LikeHeads(x.v), x.memory, x.z}; }

  static SlotShape Shape(const Arguments& x) {
    return {x.q.size(0), x.q.size(1), x.q.size(2), x.matrix->size(0), x.v.size(3)};
  }
  // The map in the type that kernels compute in; `matrix` holds its memory.
  template <class T>
  static FavorMap<T> Map(const Arguments& x, at::Tensor* matrix) {
    *matrix = x.matrix->to(ComputeTypeOf(x.q)).contiguous();
    return {matrix->const_data_ptr<T>(), x.q.size(3), x.scale};
  }

  static void Forward(const Arguments& x, const RowMask& mask, const Tensors& y) {
    const at::Tensor q = UnitStride(x.q), k = UnitStride(x.k), v = UnitStride(x.v);
    BeginState(x.memory, y[kMemory]), BeginState(x.z, y[kZ]);
    DispatchStored(v, [&]<class T>(T) {
      at::Tensor matrix;
      FavorQueriesForward<T>(Shape(x), Map<ComputeType<T>>(x, &matrix), InputRows<T>(q),
                             InputRows<T>(k), InputRows<T>(v), mask,
                             y[kMemory].mutable_data_ptr<double>(),
                             y[kZ].mutable_data_ptr<double>(), OutputRows<T>(y[kOut]));
    });
  }

  static Tensors Keep(const Arguments&, const Tensors& y) { return {y[kMemory]}; }

  static Tensors Backward(const Arguments& x, const RowMask& mask, const Tensors& g,
                          const Tensors& kept) {
    const at::Tensor q = UnitStride(x.q), k = UnitStride(x.k), v = UnitStride(x.v),
                     d_out = UnitStride(OrZeros(g[kOut], v)), memory = x.memory.contiguous(),
                     z = x.z.contiguous();
    const auto type = ComputeTypeOf(v);
    const at::Tensor G = GradientOf(g[kMemory], memory, type);
    const at::Tensor h = EndTerms(g[kMemory], g[kZ], kept[0], z).to(type);
    const Tensors grads = {GradientLike(x.q), GradientLike(x.k), GradientLike(x.v)};
    DispatchStored(v, [&]<class T>(T) {
      using C = ComputeType<T>;
      at::Tensor matrix;
      FavorQueriesBackward<T>(
          Shape(x), Map<C>(x, &matrix), InputRows<T>(q), InputRows<T>(k), InputRows<T>(v),
          InputRows<T>(d_out), mask, memory.const_data_ptr<double>(), z.const_data_ptr<double>(),
          G.mutable_data_ptr<C>(), h.mutable_data_ptr<C>(), OutputRows<T>(grads[0]),
          OutputRows<T>(grads[1]), OutputRows<T>(grads[2]));
    });
    const at::Tensor d_memory = G.to(at::kDouble);
    return {grads[0], grads[1], grads[2], d_memory, (d_memory * memory).sum(-1) - h};
  }
};

struct AbcArguments {
  at::Tensor q, k, v, s, keys, values, z;
  Mask mask;
  double scale = 1;
  bool masked = false, save = false;
};

struct Abc {
  static constexpr const char* kSchema =
      "abc(Tensor q, Tensor k, Tensor v, Tensor s, Tensor keys, Tensor values, Tensor z, Tensor? "
      "starts=None, Tensor? lengths=None, float scale=1, bool masked=False, bool save=False) -> "
      "(Tensor, Tensor, Tensor, Tensor, Tensor)";
  using Arguments = AbcArguments;
  static constexpr auto kFields = [](auto& x) {
    return std::tie(x.q, x.k, x.v, x.s, x.keys, x.values, x.z, x.mask.starts, x.mask.lengths,
                    x.scale, x.masked, x.save);
  };
  static constexpr size_t kOutputs = 5, kDifferentiable = 4;
  enum { kOut, kKeys, kValues, kZ, kScores };  // scores: what SlotMatch gives, if saved
  static constexpr int64_t kTime = 2;
  static constexpr bool kBFloat16 = true;
  static const at::Tensor& Tokens(const Arguments& x) { return x.v; }

  static void Check(const Arguments& x) {
    CheckSlots("[abc]", "s", x.s, "v", x.v, x.values, &x.z);
    CheckSlots("[abc]", "s", x.s, "k", x.k, x.keys, &x.z);
    for (const at::Tensor& t : {x.q, x.k}) {
      TORCH_CHECK(t.sym_sizes() == x.v.sym_sizes(), "[abc] expected q and k of shape ",
                  x.v.sym_sizes(), ", got ", t.sym_sizes());
    }
    for (const at::Tensor& t : {x.q, x.k, x.s}) {
      TORCH_CHECK(t.scalar_type() == x.v.scalar_type(), "[abc] expected one dtype, got ",
                  t.scalar_type(), " beside v ", x.v.scalar_type());
    }
  }

  static Tensors Compose(const Arguments& x) {
    const auto type = ComputeTypeOf(x.v);
    const at::Tensor s = x.s.to(type);
    const SlotResult matched =
        SlotMatch(x.q.to(type), s, x.k.to(type), {x.keys, x.z}, x.mask, x.masked);
    at::Tensor scores = matched.out * x.scale;
    if (x.masked)
      scores =
          scores.masked_fill(at::isneginf(matched.z_out), std::numeric_limits<float>::lowest());
    const SlotResult r =
        SlotRead(at::softmax(scores, -1), s, x.v.to(type), {x.values, x.z}, x.mask);
    return {r.out.to(x.v.scalar_type()), matched.state.memory, r.state.memory, r.state.z};
  }

  static at::Tensor Scores(const Arguments& x) {
    return EmptyHeads(x.s.sym_sizes(), x.s.options().dtype(ComputeTypeOf(x.s)));
  }
  static Tensors Empty(const Arguments& x) {
    return {LikeHeads(x.v), LikePlain(x.keys), LikePlain(x.values), LikePlain(x.z),
            x.save ? Scores(x) : at::empty({0}, x.s.options())};
  }
  static Tensors EmptyGradients(const Arguments& x) {
    return {GradientLike(x.q), GradientLike(x.k),   GradientLike(x.v), GradientLike(x.s),
            LikePlain(x.keys), LikePlain(x.values), LikePlain(x.z)};
  }

  static Tensors InPlace(const Arguments& x) {
    return {LikeHeads(x.v), x.keys, x.values, x.z, at::Tensor()};
  }

  static void Forward(const Arguments& x, const RowMask& mask, const Tensors& y) {
    const at::Tensor q = UnitStride(x.q), k = UnitStride(x.k), v = UnitStride(x.v),
                     s = UnitStride(x.s);
    BeginState(x.keys, y[kKeys]), BeginState(x.values, y[kValues]), BeginState(x.z, y[kZ]);
    DispatchStored(v, [&]<class T>(T) {
      AbcForward<T>(ShapeOf(s, v), x.scale, x.masked, InputRows<T>(q), InputRows<T>(k),
                    InputRows<T>(v), InputRows<T>(s), mask, y[kKeys].mutable_data_ptr<double>(),
                    y[kValues].mutable_data_ptr<double>(), y[kZ].mutable_data_ptr<double>(),
                    OutputRows<T>(y[kOut]),
                    x.save ? OutputRows<ComputeType<T>>(y[kScores]) : Rows<ComputeType<T>>{});
    });
  }

  static Tensors Keep(const Arguments&, const Tensors& y) {
    return {y[kKeys], y[kValues], y[kScores]};
  }

  static Tensors Backward(const Arguments& x, const RowMask& mask, const Tensors& g,
                          const Tensors& kept) {
    const at::Tensor q = UnitStride(x.q), k = UnitStride(x.k), v = UnitStride(x.v),
                     s = UnitStride(x.s), d_out = UnitStride(OrZeros(g[kOut], v)),
                     keys = x.keys.contiguous(), values = x.values.contiguous(),
                     z = x.z.contiguous();
    const auto type = ComputeTypeOf(v);
    const at::Tensor G_keys = GradientOf(g[kKeys], keys, type),
                     G_values = GradientOf(g[kValues], values, type);
    at::Tensor h = at::zeros(z.sizes(), z.options());
    AddDot(g[kKeys], kept[0], h), AddDot(g[kValues], kept[1], h);
    if (g[kZ].defined()) h = h - g[kZ];
    h = h.to(type);
    const at::Tensor dq = GradientLike(x.q), dk = GradientLike(x.k), dv = GradientLike(x.v),
                     ds = GradientLike(x.s), dx = Scores(x);
    DispatchStored(v, [&]<class T>(T) {
      AbcBackward<T>(ShapeOf(s, v), x.scale, InputRows<T>(q), InputRows<T>(k), InputRows<T>(v),
                     InputRows<T>(s), InputRows<ComputeType<T>>(kept[2]), InputRows<T>(d_out), mask,
                     keys.const_data_ptr<double>(), values.const_data_ptr<double>(),
                     z.const_data_ptr<double>(), G_keys.mutable_data_ptr<ComputeType<T>>(),
                     G_values.mutable_data_ptr<ComputeType<T>>(),
                     h.mutable_data_ptr<ComputeType<T>>(), OutputRows<T>(dq), OutputRows<T>(dk),
                     OutputRows<T>(dv), OutputRows<T>(ds), OutputRows<ComputeType<T>>(dx));
    });
    const at::Tensor d_keys = G_keys.to(at::kDouble), d_values = G_values.to(at::kDouble);
    return {dq,
            dk,
            dv,
            ds,
            d_keys,
            d_values,
            (d_keys * keys).sum(-1) + (d_values * values).sum(-1) - h};
  }
};

}  // namespace slot_attention

CISTERN_PRIMITIVE(slot_attention::Latte)
CISTERN_PRIMITIVE(slot_attention::Favor)
CISTERN_PRIMITIVE(slot_attention::FavorQueries)
CISTERN_PRIMITIVE(slot_attention::Abc)

namespace {

template <class Op>
AttentionResult Whole(const slot_attention::LatteArguments& x) {
  auto [out, memory, z] = OpPair<Op>::Call(x);
  return {out, {memory, z}};
}

template <class Op, class Arguments>
at::Tensor Extend(Arguments x, bool alone, at::Tensor& memory, at::Tensor& z) {
  at::Tensor out;
  std::tie(out, memory, z) = alone ? OpPair<Op>::CallInPlace(x) : OpPair<Op>::Call(x);
  return out;
}

}  // namespace

AttentionResult LatteAttention(const at::Tensor& q, const at::Tensor& s, const at::Tensor& v,
                               const SlotState& state, const Mask& mask) {
  return Whole<slot_attention::Latte>({q, s, v, state.memory, state.z, mask});
}
at::Tensor LatteExtend(const at::Tensor& q, const at::Tensor& s, const at::Tensor& v,
                       at::Tensor& memory, at::Tensor& z, const Mask& mask) {
  const bool alone = OwnedAlone(memory) && OwnedAlone(z);
  return Extend<slot_attention::Latte>(slot_attention::LatteArguments{q, s, v, memory, z, mask},
                                       alone, memory, z);
}

AttentionResult FavorAttention(const at::Tensor& x, const at::Tensor& s, const at::Tensor& v,
                               const SlotState& state, const Mask& mask) {
  return Whole<slot_attention::Favor>({x, s, v, state.memory, state.z, mask});
}
at::Tensor FavorExtend(const at::Tensor& x, const at::Tensor& s, const at::Tensor& v,
                       at::Tensor& memory, at::Tensor& z, const Mask& mask) {
  const bool alone = OwnedAlone(memory) && OwnedAlone(z);
  return Extend<slot_attention::Favor>(slot_attention::LatteArguments{x, s, v, memory, z, mask},
                                       alone, memory, z);
}

AttentionResult FavorQueriesAttention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                      const at::Tensor& matrix, double scale,
                                      const SlotState& state, const Mask& mask) {
  using Op = slot_attention::FavorQueries;
  const Op::Arguments x = {q, k, v, state.memory, state.z, matrix, mask, scale};
  Tensors y;
  if (NeedsGradient({matrix})) {
    Op::Check(x);
    y = Op::Compose(x);
  } else {
    auto [out, memory, z] = OpPair<Op>::Call(x);
    y = {out, memory, z};
  }
  return {y[0], {y[1], y[2]}};
}
at::Tensor FavorQueriesExtend(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                              const at::Tensor& matrix, double scale, at::Tensor& memory,
                              at::Tensor& z, const Mask& mask) {
  if (NeedsGradient({matrix})) {
    const AttentionResult r = FavorQueriesAttention(q, k, v, matrix, scale, {memory, z}, mask);
    memory = r.state.memory, z = r.state.z;
    return r.out;
  }
  const bool alone = OwnedAlone(memory) && OwnedAlone(z);
  return Extend<slot_attention::FavorQueries>(
      slot_attention::FavorQueriesArguments{q, k, v, memory, z, matrix, mask, scale}, alone, memory,
      z);
}

AbcResult AbcAttention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                       const at::Tensor& s, const AbcState& state, double scale, const Mask& mask,
                       bool masked) {
  auto [out, keys, values, z, scores] = OpPair<slot_attention::Abc>::Call(
      {q, k, v, s, state.keys, state.values, state.z, mask, scale, masked});
  return {out, {keys, values, z}};
}

at::Tensor AbcExtend(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                     const at::Tensor& s, at::Tensor& keys, at::Tensor& values, at::Tensor& z,
                     double scale, const Mask& mask, bool masked) {
  const bool alone = OwnedAlone(keys) && OwnedAlone(values) && OwnedAlone(z);
  slot_attention::AbcArguments x = {q, k, v, s, keys, values, z, mask, scale, masked};
  using Op = OpPair<slot_attention::Abc>;
  at::Tensor out, scores;
  std::tie(out, keys, values, z, scores) = alone ? Op::CallInPlace(x) : Op::Call(x);
  return out;
}

}  // namespace cistern::ops
