#include "cistern/kernels/slot_decoding.h"

#include <cstring>
#include <vector>

#include "cistern/kernels/dispatch.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cistern/kernels/slot_decoding.cc"
#include "hwy/foreach_target.h"  // must come before the headers below

#include "cistern/kernels/slot_decoding-inl.h"

HWY_BEFORE_NAMESPACE();
namespace cistern {
namespace HWY_NAMESPACE {

// U_0 = M, W_0 = 1 and c = z.
void BeginHead(const double* keys, const double* values, const double* z, DecodingHead& to) {
  to.Clear();
  for (size_t l = 0; l < to.n; ++l) {
    if (z != nullptr && z[l] == kEmpty) continue;  // whatever the caller left there
    to.c[l] = z != nullptr ? z[l] : 0, to.W[l] = 1;
    for (size_t j = 0; j < to.width; ++j)
      PutSum(values[l * to.width + j], to.values, l * to.dp + j);
    for (size_t j = 0; keys != nullptr && j < to.width; ++j)
      PutSum(keys[l * to.width + j], to.keys, j * to.np + l);
  }
}

void EndHead(const DecodingHead& from, double* keys, double* values, double* z) {
  for (size_t l = 0; l < from.n; ++l) {
    const bool empty = from.W[l] == 0;
    const double share = empty ? 0 : 1 / from.W[l];
    if (z != nullptr) z[l] = empty ? kEmpty : from.c[l] + std::log(from.W[l]);
    for (size_t j = 0; j < from.width; ++j) {
      values[l * from.width + j] = empty ? 0 : share * SumOf(from.values, from.count(), l, j);
      if (keys != nullptr)
        keys[l * from.width + j] = empty ? 0 : share * SumOf(from.keys, from.count(), j, l);
    }
  }
}

// A row of the token, and whether no sum with it can overflow.
template <class S>
bool TakeRow(const Sequence<const S>& row, const DecodingHead& m, float* x) {
  const Tag<float> d;
  PackRows(row, 0, 1, m.width, m.dp, 0.0f, x);
  const Vec<float> most = hn::Set(d, 1e15f);
  auto moderate = hn::Eq(most, most);
  for (size_t j = 0; j < m.dp; j += kLanes<float>)
    moderate = hn::And(moderate, hn::Le(hn::Abs(hn::Load(d, x + j)), most));
  return hn::AllTrue(d, moderate);
}

// The head in double, for a token that is not finite.
struct InDouble {
  InDouble(DecodingHead& head, bool with_keys, bool with_z = true)
      : keys(with_keys ? head.n * head.width : 0),
        values(head.n * head.width),
        z(with_z ? head.n : 0),
        head(head) {
    EndHead(head, Keys(), values.data(), Z());
  }
  void Back() { BeginHead(Keys(), values.data(), Z(), head); }
  double* Keys() { return keys.empty() ? nullptr : keys.data(); }
  double* Z() { return z.empty() ? nullptr : z.data(); }
  std::vector<double> keys, values, z;
  DecodingHead& head;
};

// Rows of a token in floats, with whole vectors.
struct DecodingScratch {
  explicit DecodingScratch(const DecodingHead& m) {
    Workspace& workspace = Workspace::OfThisThread();
    workspace.Start(sizeof(float) * (3 * m.np + 2 * m.dp) + sizeof(double) * m.np, 6);
    s = workspace.Take<float>(m.np), shares = workspace.Take<float>(m.np);
    r = workspace.Take<float>(m.np), q = workspace.Take<float>(m.dp);
    out = workspace.Take<float>(m.dp), next = workspace.Take<double>(m.np);
  }
  float *s, *shares, *r, *q, *out;
  double* next;
};

// The weights of the token with the log-weights scratch.s, and whether its write can be put off.
// Writes that were put off earlier may join the memory.
bool WeighToken(DecodingHead& m, const DecodingScratch& scratch) {
  DecodingHead::Weighed weighed = m.Weigh(scratch.s);
  if (weighed == DecodingHead::Weighed::kFar) {
    m.Join(m.W, scratch.s, scratch.shares);
    weighed = m.Weigh(scratch.s);
  }
  return weighed == DecodingHead::Weighed::kNear;
}

template <class S>
bool WeighToken(DecodingHead& m, const Sequence<const S>& s, const DecodingScratch& scratch) {
  PackRows(s, 0, 1, m.n, m.np, kMinusInfinity<float>, scratch.s);
  return WeighToken(m, scratch);
}

// out = softmax(r)^T M, r [np] with -inf in its padding.
template <class S>
void ReadToken(const DecodingHead& m, const DecodingScratch& scratch, const Sequence<S>& out) {
  const Tag<float> d;
  SoftmaxRows(1, m.np, scratch.r, scratch.r);
  for (size_t l = 0; l < m.np; l += kLanes<float>)
    hn::Store(hn::Mul(hn::Load(d, scratch.r + l), hn::Load(d, scratch.shares + l)), d,
              scratch.r + l);
  ReadDeferred(m.values, scratch.r, m.count(), scratch.out);
  UnpackRows(scratch.out, 0, 1, m.width, m.dp, out);
}

// The softmax of scale q . K reads the values; the token has been written.
template <class S>
void AttendToken(DecodingHead& m, float scale, const Sequence<const S>& q,
                 const DecodingScratch& scratch, const Sequence<S>& out) {
  const Tag<float> d;
  PackRows(q, 0, 1, m.width, m.dp, 0.0f, scratch.q);
  ReadDeferred(m.keys, scratch.q, m.count(), scratch.r);
  const Vec<float> by = hn::Set(d, scale);
  for (size_t l = 0; l < m.np; l += kLanes<float>)
    hn::Store(hn::Mul(hn::Mul(by, hn::Load(d, scratch.r + l)), hn::Load(d, scratch.shares + l)), d,
              scratch.r + l);
  FillPadding(1, m.n, m.np, kMinusInfinity<float>, scratch.r);
  ReadToken(m, scratch, out);
  m.JoinIfFull(scratch.shares);
}

template <class S>
HWY_NOINLINE void LatteTokenOf(const ForwardHead<float>& head, const LatteTensors<S>& x,
                               DecodingHead& m) {
  if (head.tokens.length == 0) return ZeroRows(0, 1, m.width, x.out);
  if (head.tokens.StartsAt(0)) m.Clear();
  const DecodingScratch scratch(m);
  const bool weighed = WeighToken(m, x.s, scratch);
  if (!TakeRow(x.v, m, m.NextValue()) || !weighed) {
    InDouble whole(m, false);
    LatteToken<TokenWeights<float>, S>(head, x, whole.values.data(), whole.z.data());
    return whole.Back();
  }
  m.Write(scratch.shares);
  PackRows(x.q, 0, 1, m.n, m.np, kMinusInfinity<float>, scratch.r);
  ReadToken(m, scratch, x.out);
  m.JoinIfFull(scratch.shares);
}

// A FAVOR+ token's products as logits, x [np] = scale P - offset with -inf in its padding. Returns
// whether all are below infinity.
bool ProductsToLogits(const Sequence<const float>& products, float scale, float offset,
                      const DecodingHead& m, float* x) {
  const Tag<float> d;
  PackRows(products, 0, 1, m.n, m.np, kMinusInfinity<float>, x);
  const Vec<float> by = hn::Set(d, scale), less = hn::Set(d, offset),
                   most = hn::Set(d, -kMinusInfinity<float>);
  auto below = hn::Lt(less, most);
  for (size_t l = 0; l < m.np; l += kLanes<float>) {
    const Vec<float> y = hn::MulSub(by, hn::Load(d, x + l), less);
    below = hn::And(below, hn::Lt(y, most));
    hn::Store(y, d, x + l);
  }
  return hn::AllTrue(d, below);
}

// |scale k|^2 / 2.
template <class S>
float HalfSquare(const Sequence<const S>& k, float scale, size_t width) {
  const Tag<float> d;
  const Vec<float> by = hn::Set(d, scale);
  Vec<float> sum = hn::Zero(d);
  for (size_t j = 0; j < width; j += kLanes<float>) {
    const Vec<float> x = hn::Mul(by, LoadPart(k.At(0), j, width));
    sum = hn::MulAdd(x, x, sum);
  }
  return hn::GetLane(hn::SumOfLanes(d, sum)) / 2;
}

// out [dp] of the logits x [np]: with e_l = e^(x_l + c_l - m), m the largest of the exponents,
// sum_l e_l U_l over sum_l e_l W_l. x becomes e.
HWY_NOINLINE void ReadFavor(const DecodingHead& m, float* x, double* exponents, float* out) {
  const Tag<double> d;
  const Tag<float> f;
  Double highest = hn::Set(d, kEmpty);
  for (size_t l = 0; l < m.np; l += kLanes<double>) {
    const Double y = hn::Add(LoadAsDouble(x + l), hn::Load(d, m.c + l));
    highest = hn::Max(highest, y);
    hn::Store(y, d, exponents + l);
  }
  const double most = hn::GetLane(hn::MaxOfLanes(d, highest));
  if (most == kEmpty) {
    std::fill_n(out, m.dp, 0.0f);
    return;
  }
  const Double from = hn::Set(d, most);
  for (size_t l = 0; l < m.np; l += kLanes<double>)
    StoreDouble(hn::Sub(hn::Load(d, exponents + l), from), x + l);
  Double sum = hn::Zero(d);
  for (size_t l = 0; l < m.np; l += kLanes<float>) {
    hn::Store(WeightExp(hn::Load(f, x + l)), f, x + l);
    for (size_t j = l; j < l + kLanes<float>; j += kLanes<double>)
      sum = hn::MulAdd(LoadAsDouble(x + j), hn::Load(d, m.W + j), sum);
  }
  ReadDeferred(m.values, x, m.count(), out);
  const Vec<float> share = hn::Set(f, static_cast<float>(1 / hn::GetLane(hn::SumOfLanes(d, sum))));
  for (size_t j = 0; j < m.dp; j += kLanes<float>)
    hn::Store(hn::Mul(share, hn::Load(f, out + j)), f, out + j);
}

// Products of queries and keys with the features' rows, keys and values.
template <class S>
struct FavorTensors {
  Sequence<const float> of_q, of_k;
  Sequence<const S> k, v;
  Sequence<S> out;
};

template <class S>
HWY_NOINLINE void FavorTokenOf(const ForwardHead<float>& head, const FavorTokenMap& map,
                               const FavorTensors<S>& a, DecodingHead& m) {
  if (head.tokens.length == 0) return ZeroRows(0, 1, m.width, a.out);
  if (head.tokens.StartsAt(0)) m.Clear();
  const DecodingScratch scratch(m);
  const auto scale = static_cast<float>(map.scale);
  float *const x = scratch.r, *const s = scratch.s;
  const bool known = ProductsToLogits(a.of_q, scale, 0, m, x);
  ProductsToLogits(a.of_k, scale, HalfSquare(a.k, scale, static_cast<size_t>(map.key_width)), m, s);
  const bool weighed = WeighToken(m, scratch), moderate = TakeRow(a.v, m, m.NextValue());
  if (!weighed || !moderate || !known) {
    // Copies: one token in double has a scratch of its own, in the same workspace.
    const std::vector<float> logits(x, x + m.n), weights(s, s + m.n),
        value(m.NextValue(), m.NextValue() + m.width);
    std::vector<float> row(m.width);
    float* const out = RoomForRow(a.out, row.data());
    InDouble whole(m, false);
    LatteToken<FavorWeights<float>, float>(
        head,
        {{logits.data(), m.n}, {weights.data(), m.n}, {value.data(), m.width}, {out, m.width}},
        whole.values.data(), whole.z.data());
    PutRow(out, m.width, a.out);
    return whole.Back();
  }
  m.Write(scratch.shares);
  ReadFavor(m, x, scratch.next, scratch.out);
  UnpackRows(scratch.out, 0, 1, m.width, m.dp, a.out);
  m.JoinIfFull(scratch.shares);
}

template <class S>
HWY_NOINLINE void AbcTokenOf(const ForwardHead<float>& head, float scale, const AbcTensors<S>& a,
                             DecodingHead& m) {
  if (head.tokens.length == 0) return ZeroRows(0, 1, m.width, a.out);
  if (head.tokens.StartsAt(0)) m.Clear();
  const DecodingScratch scratch(m);
  const bool weighed = WeighToken(m, a.s, scratch), keyed = TakeRow(a.k, m, m.NextKey());
  if (!TakeRow(a.v, m, m.NextValue()) || !keyed || !weighed) {
    InDouble whole(m, true);
    AbcToken<S>(head, scale, false, a, whole.keys.data(), whole.values.data(), whole.z.data());
    return whole.Back();
  }
  m.Write(scratch.shares);
  AttendToken(m, scale, a.q, scratch, a.out);
}

template <class S>
HWY_NOINLINE void GatedTokenOf(const GatedForwardHead<S>& head, DecodingHead& m) {
  if (head.tokens.length == 0) return ZeroRows(0, 1, m.width, head.out);
  if (head.tokens.StartsAt(0)) m.Clear();
  const DecodingScratch scratch(m);
  PackRows(head.x, 0, 1, m.n, m.np, std::numeric_limits<float>::infinity(), scratch.s);
  DecodingHead::Weighed weighed = m.WeighGates(scratch.s, head.rate, scratch.next);
  if (weighed == DecodingHead::Weighed::kFar) {
    m.Join(scratch.next, nullptr, scratch.shares);
    weighed = m.WeighGates(scratch.s, head.rate, scratch.next);
  }
  const bool keyed = TakeRow(head.k, m, m.NextKey());
  if (!TakeRow(head.v, m, m.NextValue()) || !keyed || weighed != DecodingHead::Weighed::kNear) {
    InDouble whole(m, true, false);
    GatedSlotsOfToken(head, whole.keys.data(), whole.values.data());
    return whole.Back();
  }
  m.WriteGates(scratch.next, scratch.shares);
  AttendToken(m, head.scale, head.q, scratch, head.out);
}

template <class T>
T* OrNull(T* x, int64_t offset) {
  return x == nullptr ? nullptr : x + offset;
}

void BeginAll(const SlotShape& shape, const double* keys, const double* values, const double* z,
              std::byte* decoding) {
  const int64_t size = shape.slots * shape.width;
  ForDecoding(shape, keys != nullptr, decoding, [&](int64_t i, DecodingHead& head) {
    BeginHead(OrNull(keys, i * size), values + i * size, OrNull(z, i * shape.slots), head);
  });
}
void EndAll(const SlotShape& shape, const std::byte* decoding, double* keys, double* values,
            double* z) {
  const int64_t size = shape.slots * shape.width;
  ForDecoding(shape, keys != nullptr, const_cast<std::byte*>(decoding),
              [&](int64_t i, const DecodingHead& head) {
                EndHead(head, OrNull(keys, i * size), values + i * size,
                        OrNull(z, i * shape.slots));
              });
}

template <class S>
void LatteAll(const SlotShape& shape, const Rows<const S>& q, const Rows<const S>& s,
              const Rows<const S>& v, const RowMask& mask, std::byte* decoding,
              const Rows<S>& out) {
  ForDecoding(shape, false, decoding, [&](int64_t i, DecodingHead& m) {
    const ForwardHead<float> head(shape, mask, i);
    const int64_t b = head.b, h = head.h;
    LatteTokenOf<S>(head, {{q, b, h}, {s, b, h}, {v, b, h}, {out, b, h}}, m);
  });
}
template <class S>
void FavorAll(const SlotShape& shape, const FavorTokenMap& map, const Rows<const float>& of_q,
              const Rows<const float>& of_k, const Rows<const S>& k, const Rows<const S>& v,
              const RowMask& mask, std::byte* decoding, const Rows<S>& out) {
  ForDecoding(shape, false, decoding, [&](int64_t i, DecodingHead& m) {
    const ForwardHead<float> head(shape, mask, i);
    const int64_t b = head.b, h = head.h;
    FavorTokenOf<S>(head, map, {{of_q, b, h}, {of_k, b, h}, {k, b, h}, {v, b, h}, {out, b, h}}, m);
  });
}
template <class S>
void AbcAll(const SlotShape& shape, double scale, const Rows<const S>& q, const Rows<const S>& k,
            const Rows<const S>& v, const Rows<const S>& s, const RowMask& mask,
            std::byte* decoding, const Rows<S>& out) {
  ForDecoding(shape, true, decoding, [&](int64_t i, DecodingHead& m) {
    const ForwardHead<float> head(shape, mask, i);
    const int64_t b = head.b, h = head.h;
    AbcTokenOf<S>(head, static_cast<float>(scale),
                  {{q, b, h}, {k, b, h}, {v, b, h}, {s, b, h}, {out, b, h}, {nullptr, 0}}, m);
  });
}

template <class S>
void GatedAll(const SlotShape& shape, const GatedSlotsOptions& options,
              const GatedSlotsInputs<S>& in, const RowMask& mask, std::byte* decoding,
              const Rows<S>& out) {
  ForDecoding(shape, true, decoding, [&](int64_t i, DecodingHead& m) {
    GatedTokenOf<S>(GatedForwardHead<S>(shape, options, in, out, {}, mask, i, {}, 0), m);
  });
}

#define CISTERN_SLOT_DECODING(S, Name)                                                            \
  void Gated##Name(const SlotShape& shape, const GatedSlotsOptions& options,                      \
                   const GatedSlotsInputs<S>& in, const RowMask& mask, std::byte* decoding,       \
                   Rows<S> out) {                                                                 \
    GatedAll<S>(shape, options, in, mask, decoding, out);                                         \
  }                                                                                               \
  void Latte##Name(const SlotShape& shape, Rows<const S> q, Rows<const S> s, Rows<const S> v,     \
                   const RowMask& mask, std::byte* decoding, Rows<S> out) {                       \
    LatteAll<S>(shape, q, s, v, mask, decoding, out);                                             \
  }                                                                                               \
  void Favor##Name(const SlotShape& shape, const FavorTokenMap& map, Rows<const float> of_q,      \
                   Rows<const float> of_k, Rows<const S> k, Rows<const S> v, const RowMask& mask, \
                   std::byte* decoding, Rows<S> out) {                                            \
    FavorAll<S>(shape, map, of_q, of_k, k, v, mask, decoding, out);                               \
  }                                                                                               \
  void Abc##Name(const SlotShape& shape, double scale, Rows<const S> q, Rows<const S> k,          \
                 Rows<const S> v, Rows<const S> s, const RowMask& mask, std::byte* decoding,      \
                 Rows<S> out) {                                                                   \
    AbcAll<S>(shape, scale, q, k, v, s, mask, decoding, out);                                     \
  }
CISTERN_SLOT_DECODING(float, Float)
CISTERN_SLOT_DECODING(BFloat16, BFloat16)
#undef CISTERN_SLOT_DECODING

int64_t BytesOfHead(int64_t slots, int64_t width, bool keys) {
  return static_cast<int64_t>(
      DecodingHead::Bytes(static_cast<size_t>(slots), static_cast<size_t>(width), keys));
}

}  // namespace HWY_NAMESPACE
}  // namespace cistern
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace cistern {

HWY_EXPORT(BytesOfHead);
HWY_EXPORT(BeginAll);
HWY_EXPORT(EndAll);
HWY_EXPORT(LatteFloat);
HWY_EXPORT(LatteBFloat16);
HWY_EXPORT(FavorFloat);
HWY_EXPORT(FavorBFloat16);
HWY_EXPORT(AbcFloat);
HWY_EXPORT(AbcBFloat16);
HWY_EXPORT(GatedFloat);
HWY_EXPORT(GatedBFloat16);

int64_t DecodingBytes(int64_t slots, int64_t width, bool keys) {
  return CISTERN_DISPATCH(BytesOfHead)(slots, width, keys);
}
DecodingSizes SizesOfDecoding(const std::byte* head) {
  DecodingSizes sizes;
  std::memcpy(&sizes, head + sizeof(int64_t), sizeof(sizes));
  return sizes;
}
void BeginDecoding(const SlotShape& shape, const double* keys, const double* values,
                   const double* z, std::byte* decoding) {
  CISTERN_DISPATCH(BeginAll)(shape, keys, values, z, decoding);
}
void EndDecoding(const SlotShape& shape, const std::byte* decoding, double* keys, double* values,
                 double* z) {
  CISTERN_DISPATCH(EndAll)(shape, decoding, keys, values, z);
}

#define CISTERN_SLOT_DECODING(T, Name)                                                             \
  template <>                                                                                      \
  void GatedSlotsDecode(const SlotShape& shape, const GatedSlotsOptions& options,                  \
                        const GatedSlotsInputs<T>& in, const RowMask& mask, std::byte* decoding,   \
                        Rows<T> out) {                                                             \
    CISTERN_DISPATCH(Gated##Name)(shape, options, in, mask, decoding, out);                        \
  }                                                                                                \
  template <>                                                                                      \
  void LatteDecode(const SlotShape& shape, Rows<const T> q, Rows<const T> s, Rows<const T> v,      \
                   const RowMask& mask, std::byte* decoding, Rows<T> out) {                        \
    CISTERN_DISPATCH(Latte##Name)(shape, q, s, v, mask, decoding, out);                            \
  }                                                                                                \
  template <>                                                                                      \
  void FavorDecode(const SlotShape& shape, const FavorTokenMap& map, Rows<const float> q_products, \
                   Rows<const float> k_products, Rows<const T> k, Rows<const T> v,                 \
                   const RowMask& mask, std::byte* decoding, Rows<T> out) {                        \
    CISTERN_DISPATCH(Favor##Name)(shape, map, q_products, k_products, k, v, mask, decoding, out);  \
  }                                                                                                \
  template <>                                                                                      \
  void AbcDecode(const SlotShape& shape, double scale, Rows<const T> q, Rows<const T> k,           \
                 Rows<const T> v, Rows<const T> s, const RowMask& mask, std::byte* decoding,       \
                 Rows<T> out) {                                                                    \
    CISTERN_DISPATCH(Abc##Name)(shape, scale, q, k, v, s, mask, decoding, out);                    \
  }
CISTERN_SLOT_DECODING(float, Float)
CISTERN_SLOT_DECODING(BFloat16, BFloat16)
#undef CISTERN_SLOT_DECODING

}  // namespace cistern
#endif  // HWY_ONCE
