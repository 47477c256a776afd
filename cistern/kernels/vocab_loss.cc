#include "cistern/kernels/vocab_loss.h"

#include <algorithm>
#include <cmath>

#include "cistern/base/parallel.h"
#include "cistern/kernels/dispatch.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cistern/kernels/vocab_loss.cc"
#include "hwy/foreach_target.h"  // must come before highway.h

#include "cistern/kernels/bfloat16-inl.h"
#include "cistern/kernels/exponentials-inl.h"
#include "cistern/kernels/workspace.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace cistern {
namespace HWY_NAMESPACE {

template <class T>
HWY_INLINE T LargestOf(const T* x, int64_t n) {
  const Tag<T> d;
  const auto lanes = static_cast<int64_t>(kLanes<T>);
  Vec<T> most = hn::Set(d, x[0]), nan = hn::Zero(d);  // Max may drop a NaN
  int64_t i = 0;
  for (; i + lanes <= n; i += lanes) {
    const Vec<T> v = hn::LoadU(d, x + i);
    most = hn::Max(most, v);
    nan = hn::IfThenElse(hn::IsNaN(v), v, nan);
  }
  T largest = hn::GetLane(hn::MaxOfLanes(d, most)), broken = hn::GetLane(hn::SumOfLanes(d, nan));
  for (; i < n; ++i) {
    largest = std::max(largest, x[i]);
    if (std::isnan(x[i])) broken = x[i];
  }
  return largest + broken;
}

// The loss of one row.
template <class T>
HWY_INLINE double RowLoss(const VocabLossShape& shape, T* x, int64_t target) {
  const Tag<T> d;
  const auto lanes = static_cast<int64_t>(kLanes<T>);
  const int64_t n = shape.vocabulary, whole = n / lanes * lanes;
  const T largest = LargestOf(x, n);
  const Vec<T> most = hn::Set(d, largest);
  const double s = shape.smoothing, uniform = s / double(n), at_target = double(x[target]);
  HWY_ALIGN T rest[HWY_MAX_BYTES / sizeof(T)];
  std::fill_n(rest, kLanes<T>, T(-std::numeric_limits<T>::infinity()));
  std::copy_n(x + whole, n - whole, rest);
  double all = 0;  // of the logits
  if (s > 0) {
    for (int64_t i = 0; i < n; ++i) all += double(x[i]);
  }
  Vec<T> sum = hn::Zero(d), sum2 = hn::Zero(d);
  const auto exp = [&](const T* from) { return WeightExp(hn::Sub(hn::LoadU(d, from), most)); };
  int64_t i = 0;
  for (; i + 4 * lanes <= whole; i += 4 * lanes) {
    Vec<T> e[4];
    ForVectors<4>([&](int j) HWY_ATTR { e[j] = hn::Sub(hn::LoadU(d, x + i + j * lanes), most); });
    WeightExps<4>(e);
    sum = hn::Add(sum, hn::Add(e[0], e[1]));
    sum2 = hn::Add(sum2, hn::Add(e[2], e[3]));
    if (!shape.gradient) continue;
    ForVectors<4>([&](int j) HWY_ATTR { hn::StoreU(e[j], d, x + i + j * lanes); });
  }
  for (; i < whole; i += lanes) {
    const Vec<T> a = exp(x + i);
    sum = hn::Add(sum, a);
    if (shape.gradient) hn::StoreU(a, d, x + i);
  }
  const Vec<T> last = exp(rest);
  if (whole < n) sum = hn::Add(sum, last);
  const double total = double(hn::GetLane(hn::SumOfLanes(d, hn::Add(sum, sum2))));
  const double nats = double(largest) + std::log(total) - (1 - s) * at_target - uniform * all;
  if (!shape.gradient) return nats;
  const Vec<T> scale = hn::Set(d, static_cast<T>(shape.share / total)),
               less = hn::Set(d, static_cast<T>(-uniform * shape.share));
  for (i = 0; i < whole; i += lanes)
    hn::StoreU(hn::MulAdd(hn::LoadU(d, x + i), scale, less), d, x + i);
  hn::Store(hn::MulAdd(last, scale, less), d, rest);
  std::copy_n(rest, n - whole, x + whole);
  x[target] = static_cast<T>(double(x[target]) - (1 - s) * shape.share);
  return nats;
}

// The same through a row of floats.
HWY_INLINE double RowLoss(const VocabLossShape& shape, BFloat16* x, int64_t target) {
  const auto n = static_cast<size_t>(shape.vocabulary);
  Workspace& workspace = Workspace::OfThisThread();
  workspace.Start(n * sizeof(float), 1);
  float* const wide = workspace.Take<float>(n);
  ConvertRow(n, x, wide);
  const double nats = RowLoss(shape, wide, target);
  if (shape.gradient) ConvertRow(n, wide, x);
  return nats;
}

template <class T>
HWY_INLINE void LossPart(const VocabLossShape& shape, int64_t begin, int64_t end, T* logits,
                         const int64_t* targets, double* nats) {
  for (int64_t r = begin; r < end; ++r) {
    T* const x = logits + r * shape.vocabulary;
    nats[r] = 0;
    if (targets[r] >= 0) {
      nats[r] = RowLoss(shape, x, targets[r]);
    } else if (shape.gradient) {
      std::fill_n(x, shape.vocabulary, T());
    }
  }
}

#define CISTERN_VOCAB_LOSS(T, Name)                                                       \
  void LossPart##Name(const VocabLossShape& shape, int64_t begin, int64_t end, T* logits, \
                      const int64_t* targets, double* nats) {                             \
    LossPart(shape, begin, end, logits, targets, nats);                                   \
  }
CISTERN_VOCAB_LOSS(float, Float)
CISTERN_VOCAB_LOSS(double, Double)
CISTERN_VOCAB_LOSS(BFloat16, BFloat16)
#undef CISTERN_VOCAB_LOSS

}  // namespace HWY_NAMESPACE
}  // namespace cistern
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace cistern {
namespace {

int64_t Grain(const VocabLossShape& shape) {  // rows of a thread at least
  return std::max<int64_t>(1, (int64_t{1} << 15) / std::max<int64_t>(1, shape.vocabulary));
}

}  // namespace

HWY_EXPORT(LossPartFloat);
HWY_EXPORT(LossPartDouble);
HWY_EXPORT(LossPartBFloat16);

#define CISTERN_VOCAB_LOSS(T, Name)                                                              \
  template <>                                                                                    \
  void VocabLoss(const VocabLossShape& shape, T* logits, const int64_t* targets, double* nats) { \
    ParallelFor(shape.rows, Grain(shape), [&](int64_t begin, int64_t end) {                      \
      CISTERN_DISPATCH(LossPart##Name)(shape, begin, end, logits, targets, nats);                \
    });                                                                                          \
  }
CISTERN_VOCAB_LOSS(float, Float)
CISTERN_VOCAB_LOSS(double, Double)
CISTERN_VOCAB_LOSS(BFloat16, BFloat16)
#undef CISTERN_VOCAB_LOSS

}  // namespace cistern
#endif  // HWY_ONCE
