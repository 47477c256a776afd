#include "cistern/kernels/linear_decoding.h"

#include "cistern/kernels/dispatch.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cistern/kernels/linear_decoding.cc"
#include "hwy/foreach_target.h"  // must come before the headers below

#include "cistern/kernels/linear_core-inl.h"
#include "cistern/kernels/slot_decoding-inl.h"

HWY_BEFORE_NAMESPACE();
namespace cistern {
namespace HWY_NAMESPACE {

// Rows of a token in floats, with whole vectors.
struct FeatureScratch {
  static size_t Bytes(const DecodingHead& m) { return sizeof(float) * (2 * m.np + m.dp); }
  static constexpr size_t kPieces = 3;
  FeatureScratch(const DecodingHead& m, Workspace& workspace)
      : q(workspace.Take<float>(m.np)),
        ones(workspace.Take<float>(m.np)),
        out(workspace.Take<float>(m.dp)) {}
  float *q, *ones, *out;
};

// phi of row 0 of x, with zeros in the padding.
template <class S>
void FeaturesOfToken(const LinearRule& rule, FeatureReader<S>& reader, const Sequence<const S>& x,
                     const DecodingHead& m, float* features) {
  if (rule.map == FeatureMap::kNone) return PackRows(x, 0, 1, m.n, m.np, 0.0f, features);
  reader.Of(x, 0, 1, features);
  std::fill(features + m.n, features + m.np, 0.0f);
}

template <class S>
HWY_NOINLINE void LinearTokenOf(const LinearPart<float>& part, const Sequence<const S>& q,
                                const Sequence<const S>& k, const Sequence<const S>& v,
                                const Sequence<S>& out, DecodingHead& m) {
  if (part.tokens.length == 0) return ZeroRows(0, 1, m.width, out);
  if (part.tokens.StartsAt(0)) m.Clear();
  Workspace& workspace = Workspace::OfThisThread();
  workspace.Start(FeatureScratch::Bytes(m) + FeatureReader<S>::Bytes(part.fourier, m.n),
                  FeatureScratch::kPieces + FeatureReader<S>::kPieces);
  const FeatureScratch scratch(m, workspace);
  FeatureReader<S> reader(part.rule, part.fourier, part.h, m.n, workspace);
  FeaturesOfToken(part.rule, reader, q, m, scratch.q);
  FeaturesOfToken(part.rule, reader, k, m, m.NextWeights());
  PackRows(v, 0, 1, m.width, m.dp, 0.0f, m.NextValue());
  m.WriteFeatures();

  const Tag<double> d;
  const Tag<float> f;
  Double sum = hn::Zero(d);
  for (size_t l = 0; l < m.np; l += kLanes<double>)
    sum = hn::MulAdd(LoadAsDouble(scratch.q + l), hn::Load(d, m.W + l), sum);
  const double z = hn::GetLane(hn::SumOfLanes(d, sum));
  const Vec<float> share =
      hn::Set(f, static_cast<float>(1 / DivisorOf(part.rule.divisor, part.rule.value, z)));
  ReadDeferred(m.values, scratch.q, m.count(), scratch.out);
  for (size_t j = 0; j < m.dp; j += kLanes<float>)
    hn::Store(hn::Mul(share, hn::Load(f, scratch.out + j)), f, scratch.out + j);
  UnpackRows(scratch.out, 0, 1, m.width, m.dp, out);
  m.JoinFeaturesIfFull(scratch.ones);
}

template <class S>
void DecodeAll(const SlotShape& shape, const LinearRule& rule, const Rows<const S>& q,
               const Rows<const S>& k, const Rows<const S>& v, const RowMask& mask,
               std::byte* decoding, const Rows<S>& out, const FourierMap<float>* fourier) {
  ForDecoding(shape, false, decoding, [&](int64_t i, DecodingHead& m) {
    const LinearPart<float> part(shape, rule, fourier, mask, i, 0, 1);
    LinearTokenOf<S>(part, part.Of(q), part.Of(k), part.Of(v), part.Of(out), m);
  });
}
#define CISTERN_LINEAR_DECODING(S, Name)                                                        \
  void Decode##Name(const SlotShape& shape, const LinearRule& rule, Rows<const S> q,            \
                    Rows<const S> k, Rows<const S> v, const RowMask& mask, std::byte* decoding, \
                    Rows<S> out, const FourierMap<float>* fourier) {                            \
    DecodeAll<S>(shape, rule, q, k, v, mask, decoding, out, fourier);                           \
  }
CISTERN_LINEAR_DECODING(float, Float)
CISTERN_LINEAR_DECODING(BFloat16, BFloat16)
#undef CISTERN_LINEAR_DECODING

void BeginAll(const SlotShape& shape, const double* memory, std::byte* decoding) {
  const int64_t size = shape.slots * (shape.width + 1);
  ForDecoding(shape, false, decoding, [&](int64_t i, DecodingHead& to) {
    to.Clear();
    const double* row = memory + i * size;
    for (size_t l = 0; l < to.n; ++l, row += to.width + 1) {
      for (size_t j = 0; j < to.width; ++j) PutSum(row[j], to.values, l * to.dp + j);
      to.W[l] = row[to.width];
    }
  });
}
void EndAll(const SlotShape& shape, const std::byte* decoding, double* memory) {
  const int64_t size = shape.slots * (shape.width + 1);
  ForDecoding(shape, false, const_cast<std::byte*>(decoding),
              [&](int64_t i, const DecodingHead& from) {
                double* row = memory + i * size;
                for (size_t l = 0; l < from.n; ++l, row += from.width + 1) {
                  for (size_t j = 0; j < from.width; ++j)
                    row[j] = SumOf(from.values, from.count(), l, j);
                  row[from.width] = from.W[l];
                }
              });
}

}  // namespace HWY_NAMESPACE
}  // namespace cistern
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace cistern {

HWY_EXPORT(DecodeFloat);
HWY_EXPORT(DecodeBFloat16);
HWY_EXPORT(BeginAll);
HWY_EXPORT(EndAll);

void BeginLinearDecoding(const SlotShape& shape, const double* memory, std::byte* decoding) {
  CISTERN_DISPATCH(BeginAll)(shape, memory, decoding);
}
void EndLinearDecoding(const SlotShape& shape, const std::byte* decoding, double* memory) {
  CISTERN_DISPATCH(EndAll)(shape, decoding, memory);
}

#define CISTERN_LINEAR_DECODING(T, Name)                                                        \
  template <>                                                                                   \
  void LinearDecode(const SlotShape& shape, const LinearRule& rule, Rows<const T> q,            \
                    Rows<const T> k, Rows<const T> v, const RowMask& mask, std::byte* decoding, \
                    Rows<T> out, const FourierMap<float>* fourier) {                            \
    CISTERN_DISPATCH(Decode##Name)(shape, rule, q, k, v, mask, decoding, out, fourier);         \
  }
CISTERN_LINEAR_DECODING(float, Float)
CISTERN_LINEAR_DECODING(BFloat16, BFloat16)
#undef CISTERN_LINEAR_DECODING

}  // namespace cistern
#endif  // HWY_ONCE
