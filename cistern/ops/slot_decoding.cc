#include "cistern/ops/slot_decoding.h"

#include "cistern/kernels/linear_decoding.h"
#include "cistern/ops/fourier_map.h"
#include "cistern/ops/linear_product.h"
#include "cistern/ops/primitive.h"
#include "cistern/ops/slot_checks.h"

namespace cistern::ops {
namespace slot_decoding {

thread_local bool at_once = false;

bool IsDeferredType(at::ScalarType type) { return type == at::kFloat || type == at::kBFloat16; }

bool HasNoGradient(const at::Tensor& x) {
  return IsPlain(x) && !(c10::GradMode::is_enabled() && x.requires_grad()) &&
         !x._fw_grad(0).defined();
}

// Whether these tokens and the state are such that a write is put off: one token, on the CPU, that
// no gradient passes through.
bool Defers(std::initializer_list<const at::Tensor*> tokens, const SlotHandles& state,
            const Mask& mask) {
  if (at_once || !state.decoding || mask.valid || ActiveImpl() != Impl::kKernel ||
      !NobodyWatchesOps())
    return false;
  const at::Tensor& first = **tokens.begin();
  const at::ScalarType type = first.scalar_type();
  if (first.dim() != 4 || first.size(2) != 1 || first.numel() == 0 || !IsDeferredType(type))
    return false;
  for (const at::Tensor* t : tokens) {
    if (!t->device().is_cpu() || t->scalar_type() != type || !HasNoGradient(*t)) return false;
  }
  if (state.IsDecoding()) return IsPlain(*state.decoding);
  return HasNoGradient(state.values) && (!state.keys || HasNoGradient(*state.keys)) &&
         (!state.z || HasNoGradient(*state.z));
}

std::byte* Bytes(const at::Tensor& decoding) {
  return reinterpret_cast<std::byte*>(decoding.mutable_data_ptr<uint8_t>());
}

// TORCH_CHECKs that `decoding` is of these sizes, and no other tensor is beside it.
void CheckDecoding(const SlotHandles& state, int64_t batch, int64_t heads, int64_t slots,
                   int64_t width) {
  const at::Tensor& decoding = *state.decoding;
  const std::array<int64_t, 3> want = {batch, heads,
                                       DecodingBytes(slots, width, state.keys != nullptr)};
  TORCH_CHECK(decoding.scalar_type() == at::kByte && decoding.sizes() == at::IntArrayRef(want),
              "[slot_decoding] expected a state `decoding` of shape ", at::IntArrayRef(want),
              " and type Byte, got ", decoding.sizes(), " ", decoding.scalar_type());
  if (decoding.numel() > 0) {
    const auto* head = reinterpret_cast<const std::byte*>(decoding.const_data_ptr<uint8_t>());
    const DecodingSizes sizes = SizesOfDecoding(head);
    TORCH_CHECK(sizes.slots == slots && sizes.width == width,
                "[slot_decoding] expected a state `decoding` of ", slots, " slots of width ", width,
                ", got one of ", sizes.slots, " of width ", sizes.width,
                "; a state goes on with what began it");
  }
  for (const at::Tensor* t : {state.keys, &state.values, state.z})
    TORCH_CHECK(!t || !t->defined(),
                "[slot_decoding] a state has `decoding` or memories, not both");
}

// TORCH_CHECKs the tokens, s being log-weights or logits of gates, and gives the kernels' shape.
SlotShape Check(const char* op, const char* name, const at::Tensor& s, const at::Tensor& v,
                const SlotHandles& state, const Mask& mask) {
  if (!state.IsDecoding()) {
    CheckSlots(op, name, s, "v", v, state.values, state.z);
    if (state.keys) CheckSlots(op, name, s, "k", v, *state.keys, state.z);
  }
  TORCH_CHECK(s.dim() == 4 && s.sizes().slice(0, 3) == v.sizes().slice(0, 3), op, " expected ",
              name, " of shape [B,H,1,n] beside v ", v.sizes(), ", got ", s.sizes());
  mask.Check(op, v.sym_size(0), v.sym_size(2));
  return {v.size(0), v.size(1), 1, s.size(3), v.size(3)};
}
void CheckSame(const char* op, const char* name, const at::Tensor& x, const at::Tensor& like) {
  TORCH_CHECK(x.sizes() == like.sizes(), op, " expected ", name, " of shape ", like.sizes(),
              ", got ", x.sizes());
}

// `decoding` for the caller to write in.
void Begin(const SlotShape& shape, const SlotHandles& state) {
  if (state.IsDecoding()) {
    CheckDecoding(state, shape.batch, shape.heads, shape.slots, shape.width);
    if (!OwnedAlone(*state.decoding)) *state.decoding = state.decoding->clone();
    return;
  }
  const auto contiguous = [](const at::Tensor* t) { return t ? t->contiguous() : at::Tensor(); };
  const at::Tensor keys = contiguous(state.keys), values = contiguous(&state.values),
                   z = contiguous(state.z);
  at::Tensor decoding =
      EmptyDecoding(shape.batch, shape.heads, shape.slots, shape.width, state.keys != nullptr);
  if (state.IsLinear()) {
    BeginLinearDecoding(shape, DataOrNull(values), Bytes(decoding));
  } else {
    BeginDecoding(shape, DataOrNull(keys), DataOrNull(values), DataOrNull(z), Bytes(decoding));
  }
  *state.decoding = std::move(decoding);
  for (at::Tensor* t : {state.keys, &state.values, state.z}) {
    if (t) *t = at::Tensor();
  }
}

// The same of linear attention with n features of q and k.
SlotShape CheckLinear(const char* op, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                      int64_t n, const SlotHandles& state, const Mask& mask) {
  TORCH_CHECK(
      k.dim() == 4 && k.sizes().slice(0, 3) == v.sizes().slice(0, 3) && q.sizes() == k.sizes(), op,
      " expected q and k of one shape [B,H,1,n] and v [B,H,1,d], got ", q.sizes(), ", ", k.sizes(),
      " and ", v.sizes());
  const std::array<int64_t, 4> memory = {v.size(0), v.size(1), n, v.size(3) + 1};
  TORCH_CHECK(state.IsDecoding() || (state.values.sizes() == at::IntArrayRef(memory) &&
                                     state.values.scalar_type() == at::kDouble),
              op, " expected memory of shape ", at::IntArrayRef(memory), " in double, got ",
              state.values.sizes(), " ", state.values.scalar_type());
  mask.Check(op, v.sym_size(0), v.sym_size(2));
  return {v.size(0), v.size(1), 1, n, v.size(3)};
}

// run(T{}) for the type of the tokens.
template <class Run>
void Dispatch(const at::Tensor& v, Run&& run) {
  v.scalar_type() == at::kBFloat16 ? run(BFloat16{}) : run(float{});
}

}  // namespace slot_decoding

WriteAtOnceScope::WriteAtOnceScope() : before_(slot_decoding::at_once) {
  slot_decoding::at_once = true;
}
WriteAtOnceScope::~WriteAtOnceScope() { slot_decoding::at_once = before_; }

at::Tensor EmptyDecoding(int64_t batch, int64_t heads, int64_t slots, int64_t width, bool keys) {
  return at::empty({batch, heads, DecodingBytes(slots, width, keys)}, at::kByte);
}

void EndDecoding(const SlotHandles& state, int64_t slots, int64_t width) {
  if (!state.IsDecoding()) return;
  const at::Tensor decoding = state.decoding->contiguous();
  const int64_t batch = decoding.size(0), heads = decoding.size(1);
  slot_decoding::CheckDecoding(state, batch, heads, slots, width);
  const at::TensorOptions options = at::TensorOptions().dtype(at::kDouble);
  const int64_t columns = state.IsLinear() ? width + 1 : width;
  const at::Tensor values = at::empty({batch, heads, slots, columns}, options),
                   keys = state.keys ? at::empty_like(values) : at::Tensor(),
                   z = state.z ? at::empty({batch, heads, slots}, options) : at::Tensor();
  const auto data = [](const at::Tensor& x) {
    return x.defined() ? x.mutable_data_ptr<double>() : nullptr;
  };
  const SlotShape shape = {batch, heads, 1, slots, width};
  if (state.IsLinear()) {
    EndLinearDecoding(shape, slot_decoding::Bytes(decoding), data(values));
  } else {
    EndDecoding(shape, slot_decoding::Bytes(decoding), data(keys), data(values), data(z));
  }
  state.values = values;
  if (state.keys) *state.keys = keys;
  if (state.z) *state.z = z;
  *state.decoding = at::Tensor();
}

int64_t DecodingStateBytes(int64_t batch, int64_t heads, int64_t slots, int64_t width, bool keys,
                           const at::TensorOptions& options) {
  const at::ScalarType type = at::typeMetaToScalarType(options.dtype());
  if (!slot_decoding::IsDeferredType(type) || !options.device().is_cpu() ||
      ActiveImpl() != Impl::kKernel)
    return 0;
  return batch * heads * DecodingBytes(slots, width, keys);
}

at::Tensor LatteExtend(const at::Tensor& q, const at::Tensor& s, const at::Tensor& v,
                       const SlotHandles& state, const Mask& mask) {
  if (!slot_decoding::Defers({&v, &q, &s}, state, mask)) {
    EndDecoding(state, s.size(3), v.size(3));
    return LatteExtend(q, s, v, state.values, *state.z, mask);
  }
  const SlotShape shape = slot_decoding::Check("[latte]", "s", s, v, state, mask);
  slot_decoding::CheckSame("[latte]", "q", q, s);
  slot_decoding::Begin(shape, state);
  const MaskView view(mask, 1);
  const at::Tensor out = LikeHeads(v), qs = UnitStride(q), ss = UnitStride(s), vs = UnitStride(v);
  slot_decoding::Dispatch(v, [&]<class T>(T) {
    LatteDecode<T>(shape, InputRows<T>(qs), InputRows<T>(ss), InputRows<T>(vs), view.mask,
                   slot_decoding::Bytes(*state.decoding), OutputRows<T>(out));
  });
  return out;
}

at::Tensor AbcExtend(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                     const at::Tensor& s, const SlotHandles& state, double scale,
                     const Mask& mask) {
  if (!slot_decoding::Defers({&v, &q, &k, &s}, state, mask)) {
    EndDecoding(state, s.size(3), v.size(3));
    return AbcExtend(q, k, v, s, *state.keys, state.values, *state.z, scale, mask);
  }
  const SlotShape shape = slot_decoding::Check("[abc]", "s", s, v, state, mask);
  slot_decoding::CheckSame("[abc]", "q", q, v);
  slot_decoding::CheckSame("[abc]", "k", k, v);
  slot_decoding::Begin(shape, state);
  const MaskView view(mask, 1);
  const at::Tensor out = LikeHeads(v), qs = UnitStride(q), ks = UnitStride(k), vs = UnitStride(v),
                   ss = UnitStride(s);
  slot_decoding::Dispatch(v, [&]<class T>(T) {
    AbcDecode<T>(shape, scale, InputRows<T>(qs), InputRows<T>(ks), InputRows<T>(vs),
                 InputRows<T>(ss), view.mask, slot_decoding::Bytes(*state.decoding),
                 OutputRows<T>(out));
  });
  return out;
}

at::Tensor GatedSlotsExtend(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                            const at::Tensor& logits, const SlotHandles& state, double scale,
                            double temperature, const Mask& mask) {
  if (!slot_decoding::Defers({&v, &q, &k, &logits}, state, mask)) {
    EndDecoding(state, logits.size(3), v.size(3));
    return GatedSlotsExtend(q, k, v, logits, *state.keys, state.values, scale, temperature, mask);
  }
  const SlotShape shape = slot_decoding::Check("[gated_slots]", "logits", logits, v, state, mask);
  slot_decoding::CheckSame("[gated_slots]", "q", q, v);
  slot_decoding::CheckSame("[gated_slots]", "k", k, v);
  slot_decoding::Begin(shape, state);
  const MaskView view(mask, 1);
  const at::Tensor out = LikeHeads(v), qs = UnitStride(q), ks = UnitStride(k), vs = UnitStride(v),
                   xs = UnitStride(logits);
  slot_decoding::Dispatch(v, [&]<class T>(T) {
    GatedSlotsDecode<T>(shape, {scale, temperature},
                        {InputRows<T>(qs), InputRows<T>(ks), InputRows<T>(vs), InputRows<T>(xs)},
                        view.mask, slot_decoding::Bytes(*state.decoding), OutputRows<T>(out));
  });
  return out;
}

at::Tensor FavorQueriesExtend(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                              const at::Tensor& matrix, double scale, const SlotHandles& state,
                              const Mask& mask) {
  constexpr const char* kOp = "[favor_queries]";
  if (!slot_decoding::Defers({&v, &q, &k}, state, mask) || NeedsGradient({matrix})) {
    EndDecoding(state, matrix.size(0), v.size(3));
    return FavorQueriesExtend(q, k, v, matrix, scale, state.values, *state.z, mask);
  }
  slot_decoding::CheckSame(kOp, "k", k, q);
  // All heads at once: rows of one matrix.
  const auto products = [&](const at::Tensor& x) {
    return UnitStride(LinearProduct(x.to(at::kFloat), matrix.to(at::kFloat)));
  };
  const at::Tensor of_q = products(q), of_k = products(k);
  const SlotShape shape = slot_decoding::Check(kOp, "features", of_k, v, state, mask);
  slot_decoding::Begin(shape, state);
  const MaskView view(mask, 1);
  const at::Tensor out = LikeHeads(v), ks = UnitStride(k), vs = UnitStride(v);
  slot_decoding::Dispatch(v, [&]<class T>(T) {
    FavorDecode<T>(shape, {scale, k.size(3)}, InputRows<float>(of_q), InputRows<float>(of_k),
                   InputRows<T>(ks), InputRows<T>(vs), view.mask,
                   slot_decoding::Bytes(*state.decoding), OutputRows<T>(out));
  });
  return out;
}

namespace slot_decoding {

at::Tensor DecodeLinear(const SlotShape& shape, const at::Tensor& q, const at::Tensor& k,
                        const at::Tensor& v, const SlotHandles& state, const LinearRule& rule,
                        const Mask& mask, const FourierFeatureMap* map) {
  Begin(shape, state);
  const MaskView view(mask, 1);
  const at::Tensor out = LikeHeads(v), qs = UnitStride(q), ks = UnitStride(k), vs = UnitStride(v);
  Dispatch(v, [&]<class T>(T) {
    const auto decode = [&](const FourierMap<float>* fourier) {
      LinearDecode<T>(shape, rule, InputRows<T>(qs), InputRows<T>(ks), InputRows<T>(vs), view.mask,
                      Bytes(*state.decoding), OutputRows<T>(out), fourier);
    };
    if (!map) return decode(nullptr);
    const FourierTensors<T> given(v, Given(map->scale), map->matrices, map->normalise, map->factor);
    const FourierMap<float> taken = given.map();
    decode(&taken);
  });
  return out;
}

}  // namespace slot_decoding

at::Tensor LinearExtend(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                        const SlotHandles& state, const LinearRule& rule, const Mask& mask) {
  if (rule.divisor == DivisorRule::kNone || !slot_decoding::Defers({&v, &q, &k}, state, mask)) {
    EndDecoding(state, k.size(3), v.size(3));
    return LinearExtend(q, k, v, state.values, rule, mask);
  }
  const SlotShape shape =
      slot_decoding::CheckLinear("[linear_attention]", q, k, v, k.size(3), state, mask);
  return slot_decoding::DecodeLinear(shape, q, k, v, state, rule, mask, nullptr);
}

at::Tensor FourierExtend(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                         const SlotHandles& state, const FourierFeatureMap& map,
                         const LinearRule& rule, const Mask& mask) {
  const int64_t n = map.matrices.size(1) * 2;
  if (rule.divisor == DivisorRule::kNone || !slot_decoding::Defers({&v, &q, &k}, state, mask) ||
      NeedsGradient({map.scale, map.matrices})) {
    EndDecoding(state, n, v.size(3));
    return FourierExtend(q, k, v, state.values, map, rule, mask);
  }
  const SlotShape shape =
      slot_decoding::CheckLinear("[fourier_attention]", q, k, v, n, state, mask);
  CheckFourier("[fourier_attention]", "k", k, Given(map.scale), map.matrices);
  return slot_decoding::DecodeLinear(shape, q, k, v, state, rule, mask, &map);
}

}  // namespace cistern::ops
