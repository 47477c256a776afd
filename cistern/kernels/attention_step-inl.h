// Exact attention of a few queries, as in decoding: one query at a time against its keys, in parts
// that threads divide among themselves; included once per Highway target.
#if defined(CISTERN_KERNELS_ATTENTION_STEP_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef CISTERN_KERNELS_ATTENTION_STEP_INL_H_
#undef CISTERN_KERNELS_ATTENTION_STEP_INL_H_
#else
#define CISTERN_KERNELS_ATTENTION_STEP_INL_H_
#endif

#include "cistern/kernels/attention_tile-inl.h"
#include "cistern/kernels/bfloat16-inl.h"

HWY_BEFORE_NAMESPACE();
namespace cistern {
namespace HWY_NAMESPACE {

constexpr size_t kStepKeys = 64;    // keys weighed at once
constexpr size_t kPartKeys = 2048;  // keys of one part: what threads divide

// What some keys give: the weighted sum of the values, behind the largest score and the sum of the
// weights.
template <class T>
struct StepPart {
  static size_t Size(size_t value_width) { return 2 + value_width; }
  explicit StepPart(T* at) : high(at[0]), sum(at[1]), values(at + 2) {}
  T &high, &sum;
  T* values;
};

// x . y of two rows; those of keys and values are of T, or of bfloat16 with T = float.
template <class T, class S>
HWY_INLINE T Dot(const T* HWY_RESTRICT x, const S* HWY_RESTRICT y, size_t width) {
  const Tag<T> d;
  constexpr size_t kN = kLanes<T>;
  Vec<T> sum0 = hn::Zero(d), sum1 = hn::Zero(d);
  size_t j = 0;
  for (; j + 2 * kN <= width; j += 2 * kN) {
    sum0 = hn::MulAdd(hn::LoadU(d, x + j), LoadAs<T>(y + j), sum0);
    sum1 = hn::MulAdd(hn::LoadU(d, x + j + kN), LoadAs<T>(y + j + kN), sum1);
  }
  for (; j + kN <= width; j += kN) sum0 = hn::MulAdd(hn::LoadU(d, x + j), LoadAs<T>(y + j), sum0);
  T rest = 0;
  for (; j < width; ++j) rest += x[j] * static_cast<T>(y[j]);
  return hn::GetLane(hn::SumOfLanes(d, hn::Add(sum0, sum1))) + rest;
}

// values = values factor + sum_i p[i] v[row[i]].
template <class T, class S>
HWY_NOINLINE void AddValues(size_t count, const T* p, const S* const* row, size_t width, T factor,
                            T* values) {
  const Tag<T> d;
  constexpr size_t kN = kLanes<T>;
  const auto columns = [&]<int kVectors>(std::integral_constant<int, kVectors>, size_t c) HWY_ATTR {
    Vec<T> sum[kVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v)
      sum[v] = hn::Mul(hn::Set(d, factor), hn::LoadU(d, values + c + v * kN));
    for (size_t i = 0; i < count; ++i) {
      const Vec<T> weight = hn::Set(d, p[i]);
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v)
        sum[v] = hn::MulAdd(weight, LoadAs<T>(row[i] + c + v * kN), sum[v]);
    }
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) hn::StoreU(sum[v], d, values + c + v * kN);
  };
  size_t c = 0;
  for (; c + 4 * kN <= width; c += 4 * kN) columns(std::integral_constant<int, 4>(), c);
  for (; c + kN <= width; c += kN) columns(std::integral_constant<int, 1>(), c);
  for (; c < width; ++c) {
    T sum = values[c] * factor;
    for (size_t i = 0; i < count; ++i) sum += p[i] * static_cast<T>(row[i][c]);
    values[c] = sum;
  }
}

// part: of query t (q: its row, scaled) and the keys [begin, end) that it sees.
template <class T, class S>
HWY_NOINLINE void StepKeys(const AttentionView& view, size_t begin, size_t end, const T* q,
                           const Sequence<const S>& k, const Sequence<const S>& v, size_t key_width,
                           size_t value_width, StepPart<T> part) {
  const Tag<T> d;
  HWY_ALIGN T p[kStepKeys];
  const S* row[kStepKeys];
  while (begin < end) {
    size_t count = 0;
    for (; begin < end && count < kStepKeys; ++begin) {
      if (!view.Valid(begin)) continue;
      p[count] = Dot(q, k.At(begin), key_width);
      row[count++] = v.At(begin);
    }
    if (count == 0) break;
    for (size_t i = count; i < RoundUp(count, kLanes<T>); ++i) p[i] = kNoScore<T>;
    Vec<T> most = hn::Load(d, p);
    for (size_t i = kLanes<T>; i < count; i += kLanes<T>) most = hn::Max(most, hn::Load(d, p + i));
    const T before = part.high;
    const T high = std::max(before, hn::GetLane(hn::MaxOfLanes(d, most)));
    const T base = high == kNoScore<T> ? T{0} : high;
    const T factor = Rescale(before, base);
    const Vec<T> largest = hn::Set(d, base), far = FarScore(largest),
                 reference = ReferenceOf(hn::Sub(largest, far));
    Vec<T> sum = hn::Zero(d);
    for (size_t i = 0; i < count; i += kLanes<T>) {
      const Vec<T> e = WeightOf(hn::Sub(hn::Load(d, p + i), far), reference);
      sum = hn::Add(sum, e);
      hn::Store(e, d, p + i);
    }
    part.sum = part.sum * factor + hn::GetLane(hn::SumOfLanes(d, sum));
    part.high = high;
    AddValues(count, p, row, value_width, factor, part.values);
  }
}

// The parts of one query, in their order -> its output.
template <class T>
void MergeParts(T* parts, size_t count, size_t width, int64_t empty, bool blind, T* out) {
  const size_t size = StepPart<T>::Size(width);
  T high = empty > 0 ? T{0} : kNoScore<T>, sum = static_cast<T>(empty);
  for (size_t i = 0; i < count; ++i) high = std::max(high, StepPart<T>(parts + i * size).high);
  if (high == kNoScore<T>) high = 0;
  if (empty > 0) sum *= Rescale(T{0}, high);
  for (size_t j = 0; j < width; ++j) out[j] = 0;
  for (size_t i = 0; i < count; ++i) {
    const StepPart<T> part(parts + i * size);
    const T factor = Rescale(part.high, high);
    sum += part.sum * factor;
    for (size_t j = 0; j < width; ++j) out[j] += part.values[j] * factor;
  }
  const T share = blind ? T{0} : T{1} / sum;
  for (size_t j = 0; j < width; ++j) out[j] *= share;
}

// Nothing is allocated once a thread's workspace has grown.
template <class S, class T = ComputeType<S>>
void StepAll(const AttentionShape& shape, double scale, const Rows<const S>& q_rows,
             const Rows<const S>& k_rows, const Rows<const S>& v_rows, const AttentionMask& mask,
             const Rows<S>& out_rows) {
  const int64_t views = AttentionView::Number(shape);
  const int64_t queries = (shape.queries + shape.dilation - 1) / shape.dilation;
  const size_t keys = size_t((shape.keys + shape.dilation - 1) / shape.dilation);
  const size_t parts = std::max<size_t>(1, (keys + kPartKeys - 1) / kPartKeys);
  const size_t kw = size_t(shape.key_width), vw = size_t(shape.value_width),
               size = StepPart<T>::Size(vw);
  // The parts are the calling thread's, beside the workspaces of those that fill them.
  thread_local Workspace gathered;
  gathered.Start(sizeof(T) * (size_t(views * queries) * parts * size + vw), 2);
  T* const all = gathered.Take<T>(size_t(views * queries) * parts * size);
  T* const merged = gathered.Take<T>(vw);
  const auto part_of = [&](int64_t item, size_t part) {
    return all + (size_t(item) * parts + part) * size;
  };
  const int64_t work = int64_t(std::min(keys, kPartKeys) * (kw + vw));
  const int64_t grain = std::max<int64_t>(1, 65536 / (work + 1));
  ParallelFor(views * queries * int64_t(parts), grain, [&](int64_t begin, int64_t end) {
    Workspace& workspace = Workspace::OfThisThread();
    workspace.Start(sizeof(T) * kw, 1);
    T* const q = workspace.Take<T>(kw);
    for (int64_t i = begin; i < end; ++i) {
      const int64_t item = i / int64_t(parts);
      const size_t index = size_t(i % int64_t(parts)), t = size_t(item % queries);
      const AttentionView view(shape, mask, item / queries);
      if (t >= view.queries) continue;
      const KeyRange range = view.Range(t);
      const size_t first = size_t(range.begin) + index * kPartKeys;
      const StepPart<T> part(part_of(item, index));
      part.high = kNoScore<T>, part.sum = 0;
      for (size_t j = 0; j < vw; ++j) part.values[j] = 0;
      const T factor = static_cast<T>(scale);
      const S* const row = view.Of(q_rows).At(t);
      for (size_t j = 0; j < kw; ++j) q[j] = static_cast<T>(row[j]) * factor;
      StepKeys(view, first, std::min(first + kPartKeys, size_t(range.end)), q, view.Of(k_rows),
               view.Of(v_rows), kw, vw, part);
    }
  });
  for (int64_t item = 0; item < views * queries; ++item) {
    const AttentionView view(shape, mask, item / queries);
    const size_t t = size_t(item % queries);
    if (t >= view.queries) continue;
    const KeyRange range = view.Range(t);
    const bool blind = range.empty == 0 && [&] {
      for (int64_t j = range.begin; j < range.end; ++j) {
        if (view.Valid(size_t(j))) return false;
      }
      return true;
    }();
    MergeParts(part_of(item, 0), parts, vw, range.empty, blind, merged);
    S* const out = view.Of(out_rows).At(t);
    for (size_t j = 0; j < vw; ++j) out[j] = static_cast<S>(merged[j]);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace cistern
HWY_AFTER_NAMESPACE();

#endif  // include guard
