#include "cistern/kernels/norm.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "cistern/base/parallel.h"
#include "cistern/kernels/dispatch.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cistern/kernels/norm.cc"
#include "hwy/foreach_target.h"  // must come before highway.h

#include "cistern/kernels/bfloat16-inl.h"

HWY_BEFORE_NAMESPACE();
namespace cistern {
namespace HWY_NAMESPACE {

HWY_INLINE float Total(Vec<float> x) { return hn::GetLane(hn::SumOfLanes(Tag<float>(), x)); }

template <class Added, class Out>
HWY_INLINE void NormRows(const NormShape& shape, int64_t begin, int64_t end,
                         const NormWeights& weights, const float* x, const Added* added, float* sum,
                         Out* y, float* stats) {
  const Tag<float> d;
  const auto width = static_cast<size_t>(shape.width);
  const auto share = static_cast<float>(1.0 / double(shape.width));
  for (int64_t row = begin; row < end; ++row) {
    const float* from = x + row * shape.width;
    Out* const to = y + row * shape.width;
    Vec<float> total = hn::Zero(d);
    if (added != nullptr) {
      const Added* const plus = added + row * shape.width;
      float* const s = sum + row * shape.width;
      EachVector(width, [&](size_t j, size_t count) HWY_ATTR {
        const Vec<float> v = hn::Add(LoadUpTo(from + j, count), LoadUpTo(plus + j, count));
        StoreUpTo(v, s + j, count);
        total = hn::Add(total, v);
      });
      from = s;
    } else if (weights.bias != nullptr) {
      EachVector(width, [&](size_t j, size_t count)
                            HWY_ATTR { total = hn::Add(total, LoadUpTo(from + j, count)); });
    }
    const float m = weights.bias != nullptr ? Total(total) * share : 0.0f;
    const Vec<float> mean = hn::Set(d, m);
    Vec<float> squares = hn::Zero(d);
    EachVector(width, [&](size_t j, size_t count) HWY_ATTR {
      const Vec<float> c =
          hn::IfThenElseZero(hn::FirstN(d, count), hn::Sub(LoadUpTo(from + j, count), mean));
      squares = hn::MulAdd(c, c, squares);
    });
    const float r = static_cast<float>(1.0 / std::sqrt(double(Total(squares) * share) + shape.eps));
    const Vec<float> scale = hn::Set(d, r);
    EachVector(width, [&](size_t j, size_t count) HWY_ATTR {
      const Vec<float> n = hn::Mul(hn::Sub(LoadUpTo(from + j, count), mean), scale);
      const Vec<float> w = LoadUpTo(weights.weight + j, count);
      StoreUpTo(weights.bias == nullptr ? hn::Mul(n, w)
                                        : hn::MulAdd(n, w, LoadUpTo(weights.bias + j, count)),
                to + j, count);
    });
    stats[2 * row] = m;
    stats[2 * row + 1] = r;
  }
}

// Rows [begin, end); their sums are added to to.d_weight and to.d_bias.
template <class Out>
HWY_INLINE void NormBackwardRows(const NormShape& shape, int64_t begin, int64_t end,
                                 const NormWeights& weights, const float* x, const float* stats,
                                 const Out* dy, const float* d_sum, const NormGradients& to) {
  const Tag<float> d;
  const auto width = static_cast<size_t>(shape.width);
  const auto share = static_cast<float>(1.0 / double(shape.width));
  for (int64_t row = begin; row < end; ++row) {
    const int64_t at = row * shape.width;
    const float* const from = x + at;
    const Out* const g_row = dy + at;
    const Vec<float> mean = hn::Set(d, stats[2 * row]), scale = hn::Set(d, stats[2 * row + 1]);
    Vec<float> sum = hn::Zero(d), along = hn::Zero(d);
    EachVector(width, [&](size_t j, size_t count) HWY_ATTR {
      const Vec<float> g = LoadUpTo(g_row + j, count),
                       n = hn::Mul(hn::Sub(LoadUpTo(from + j, count), mean), scale),
                       gw = hn::Mul(g, LoadUpTo(weights.weight + j, count));
      sum = hn::Add(sum, gw);
      along = hn::MulAdd(gw, n, along);
      StoreUpTo(hn::MulAdd(g, n, LoadUpTo(to.d_weight + j, count)), to.d_weight + j, count);
      StoreUpTo(hn::Add(g, LoadUpTo(to.d_bias + j, count)), to.d_bias + j, count);
    });
    const Vec<float> mean_g = hn::Set(d, weights.bias != nullptr ? Total(sum) * share : 0.0f),
                     mean_along = hn::Set(d, Total(along) * share);
    EachVector(width, [&](size_t j, size_t count) HWY_ATTR {
      const Vec<float> n = hn::Mul(hn::Sub(LoadUpTo(from + j, count), mean), scale),
                       gw =
                           hn::Mul(LoadUpTo(g_row + j, count), LoadUpTo(weights.weight + j, count));
      Vec<float> dx = hn::Mul(scale, hn::Sub(hn::NegMulAdd(n, mean_along, gw), mean_g));
      if (d_sum != nullptr) dx = hn::Add(dx, LoadUpTo(d_sum + at + static_cast<int64_t>(j), count));
      StoreUpTo(dx, to.dx + at + j, count);
      if (to.d_added != nullptr) StoreUpTo(dx, to.d_added + at + j, count);
    });
  }
}

#define CISTERN_NORM(Added, AddedName, Out, OutName)                                            \
  void Norm##AddedName##OutName(const NormShape& shape, int64_t begin, int64_t end,             \
                                const NormWeights& weights, const float* x, const Added* added, \
                                float* sum, Out* y, float* stats) {                             \
    NormRows(shape, begin, end, weights, x, added, sum, y, stats);                              \
  }
#define CISTERN_NORM_BACKWARD(Out, Name)                                                  \
  void NormBackward##Name(const NormShape& shape, int64_t begin, int64_t end,             \
                          const NormWeights& weights, const float* x, const float* stats, \
                          const Out* dy, const float* d_sum, const NormGradients& to) {   \
    NormBackwardRows(shape, begin, end, weights, x, stats, dy, d_sum, to);                \
  }
CISTERN_NORM(float, Float, float, Float)
CISTERN_NORM(float, Float, BFloat16, BFloat16)
CISTERN_NORM(BFloat16, BFloat16, float, Float)
CISTERN_NORM(BFloat16, BFloat16, BFloat16, BFloat16)
CISTERN_NORM_BACKWARD(float, Float)
CISTERN_NORM_BACKWARD(BFloat16, BFloat16)
#undef CISTERN_NORM
#undef CISTERN_NORM_BACKWARD

void AddPart(int64_t begin, int64_t end, const float* x, const BFloat16* y, float* sum) {
  const auto n = static_cast<size_t>(end - begin);
  EachVector(n, [&](size_t j, size_t count) HWY_ATTR {
    StoreUpTo(hn::Add(LoadUpTo(x + begin + j, count), LoadUpTo(y + begin + j, count)),
              sum + begin + j, count);
  });
}

}  // namespace HWY_NAMESPACE
}  // namespace cistern
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace cistern {
namespace {

constexpr int64_t kGrain = 1 << 14;  // values of a thread at least
constexpr int64_t kBlockRows = 128;  // whose sums of weights' gradients are formed in float

}  // namespace

HWY_EXPORT(AddPart);

#define CISTERN_NORM(Added, AddedName, Out, OutName)                            \
  HWY_EXPORT(Norm##AddedName##OutName);                                         \
  template <>                                                                   \
  void Norm(const NormShape& shape, const NormWeights& weights, const float* x, \
            const Added* added, float* sum, Out* y, float* stats) {             \
    ParallelFor(shape.rows, kGrain / std::max<int64_t>(1, shape.width) + 1,     \
                [&](int64_t begin, int64_t end) {                               \
                  CISTERN_DISPATCH(Norm##AddedName##OutName)                    \
                  (shape, begin, end, weights, x, added, sum, y, stats);        \
                });                                                             \
  }
CISTERN_NORM(float, Float, float, Float)
CISTERN_NORM(float, Float, BFloat16, BFloat16)
CISTERN_NORM(BFloat16, BFloat16, float, Float)
CISTERN_NORM(BFloat16, BFloat16, BFloat16, BFloat16)
#undef CISTERN_NORM

HWY_EXPORT(NormBackwardFloat);
HWY_EXPORT(NormBackwardBFloat16);

namespace {

void CallNormBackward(const NormShape& shape, int64_t begin, int64_t end,
                      const NormWeights& weights, const float* sum, const float* stats,
                      const float* dy, const float* d_sum, const NormGradients& to) {
  CISTERN_DISPATCH(NormBackwardFloat)(shape, begin, end, weights, sum, stats, dy, d_sum, to);
}
void CallNormBackward(const NormShape& shape, int64_t begin, int64_t end,
                      const NormWeights& weights, const float* sum, const float* stats,
                      const BFloat16* dy, const float* d_sum, const NormGradients& to) {
  CISTERN_DISPATCH(NormBackwardBFloat16)(shape, begin, end, weights, sum, stats, dy, d_sum, to);
}

}  // namespace

template <class Out>
void NormBackward(const NormShape& shape, const NormWeights& weights, const float* sum,
                  const float* stats, const Out* dy, const float* d_sum, const NormGradients& to) {
  const int64_t blocks = (shape.rows + kBlockRows - 1) / kBlockRows;
  const auto width = static_cast<size_t>(shape.width);
  std::vector<float> sums(static_cast<size_t>(blocks) * 2 * width, 0.0f);
  ParallelFor(blocks, kGrain / std::max<int64_t>(1, kBlockRows * shape.width) + 1,
              [&](int64_t begin, int64_t end) {
                for (int64_t i = begin; i < end; ++i) {
                  NormGradients part = to;
                  part.d_weight = sums.data() + static_cast<size_t>(i) * 2 * width;
                  part.d_bias = part.d_weight + width;
                  CallNormBackward(shape, i * kBlockRows,
                                   std::min(shape.rows, (i + 1) * kBlockRows), weights, sum, stats,
                                   dy, d_sum, part);
                }
              });
  std::vector<double> total(2 * width, 0.0);
  for (size_t i = 0; i < sums.size(); ++i) total[i % (2 * width)] += double(sums[i]);
  for (size_t j = 0; j < width; ++j) {
    to.d_weight[j] = static_cast<float>(total[j]);
    if (to.d_bias != nullptr) to.d_bias[j] = static_cast<float>(total[width + j]);
  }
}
template void NormBackward(const NormShape&, const NormWeights&, const float*, const float*,
                           const float*, const float*, const NormGradients&);
template void NormBackward(const NormShape&, const NormWeights&, const float*, const float*,
                           const BFloat16*, const float*, const NormGradients&);

void AddBFloat16(int64_t n, const float* x, const BFloat16* y, float* sum) {
  ParallelFor(n, kGrain, [&](int64_t begin, int64_t end) {
    CISTERN_DISPATCH(AddPart)(begin, end, x, y, sum);
  });
}

}  // namespace cistern
#endif  // HWY_ONCE
