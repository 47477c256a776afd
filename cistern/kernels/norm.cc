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

void NormRows(const NormShape& shape, int64_t begin, int64_t end, const float* x,
              const float* weight, const float* bias, BFloat16* y, float* stats) {
  const Tag<float> d;
  const auto width = static_cast<size_t>(shape.width);
  const auto share = static_cast<float>(1.0 / double(shape.width));
  for (int64_t row = begin; row < end; ++row) {
    const float* const from = x + row * shape.width;
    BFloat16* const to = y + row * shape.width;
    float m = 0;
    if (bias != nullptr) {
      Vec<float> sum = hn::Zero(d);
      EachVector(width, [&](size_t j, size_t count)
                            HWY_ATTR { sum = hn::Add(sum, LoadUpTo(from + j, count)); });
      m = Total(sum) * share;
    }
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
      const Vec<float> w = LoadUpTo(weight + j, count);
      StoreUpTo(bias == nullptr ? hn::Mul(n, w) : hn::MulAdd(n, w, LoadUpTo(bias + j, count)),
                to + j, count);
    });
    stats[2 * row] = m;
    stats[2 * row + 1] = r;
  }
}

// Rows [begin, end); their sums are added to d_weight and d_bias.
void NormBackwardRows(const NormShape& shape, int64_t begin, int64_t end, const float* x,
                      const float* weight, bool centred, const float* stats, const BFloat16* dy,
                      float* dx, float* d_weight, float* d_bias) {
  const Tag<float> d;
  const auto width = static_cast<size_t>(shape.width);
  const auto share = static_cast<float>(1.0 / double(shape.width));
  for (int64_t row = begin; row < end; ++row) {
    const float* const from = x + row * shape.width;
    const BFloat16* const g_row = dy + row * shape.width;
    float* const to = dx + row * shape.width;
    const Vec<float> mean = hn::Set(d, stats[2 * row]), scale = hn::Set(d, stats[2 * row + 1]);
    Vec<float> sum = hn::Zero(d), along = hn::Zero(d);
    EachVector(width, [&](size_t j, size_t count) HWY_ATTR {
      const Vec<float> g = LoadUpTo(g_row + j, count),
                       n = hn::Mul(hn::Sub(LoadUpTo(from + j, count), mean), scale),
                       gw = hn::Mul(g, LoadUpTo(weight + j, count));
      sum = hn::Add(sum, gw);
      along = hn::MulAdd(gw, n, along);
      StoreUpTo(hn::MulAdd(g, n, LoadUpTo(d_weight + j, count)), d_weight + j, count);
      StoreUpTo(hn::Add(g, LoadUpTo(d_bias + j, count)), d_bias + j, count);
    });
    const Vec<float> mean_g = hn::Set(d, centred ? Total(sum) * share : 0.0f),
                     mean_along = hn::Set(d, Total(along) * share);
    EachVector(width, [&](size_t j, size_t count) HWY_ATTR {
      const Vec<float> n = hn::Mul(hn::Sub(LoadUpTo(from + j, count), mean), scale),
                       gw = hn::Mul(LoadUpTo(g_row + j, count), LoadUpTo(weight + j, count));
      StoreUpTo(hn::Mul(scale, hn::Sub(hn::NegMulAdd(n, mean_along, gw), mean_g)), to + j, count);
    });
  }
}

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

HWY_EXPORT(NormRows);
HWY_EXPORT(NormBackwardRows);
HWY_EXPORT(AddPart);

void Norm(const NormShape& shape, const float* x, const float* weight, const float* bias,
          BFloat16* y, float* stats) {
  ParallelFor(shape.rows, kGrain / std::max<int64_t>(1, shape.width) + 1,
              [&](int64_t begin, int64_t end) {
                CISTERN_DISPATCH(NormRows)(shape, begin, end, x, weight, bias, y, stats);
              });
}

void NormBackward(const NormShape& shape, const float* x, const float* weight, const float* bias,
                  const float* stats, const BFloat16* dy, float* dx, float* d_weight,
                  float* d_bias) {
  const int64_t blocks = (shape.rows + kBlockRows - 1) / kBlockRows;
  const auto width = static_cast<size_t>(shape.width);
  std::vector<float> sums(static_cast<size_t>(blocks) * 2 * width, 0.0f);
  ParallelFor(blocks, kGrain / std::max<int64_t>(1, kBlockRows * shape.width) + 1,
              [&](int64_t begin, int64_t end) {
                for (int64_t i = begin; i < end; ++i) {
                  float* const at = sums.data() + static_cast<size_t>(i) * 2 * width;
                  CISTERN_DISPATCH(NormBackwardRows)
                  (shape, i * kBlockRows, std::min(shape.rows, (i + 1) * kBlockRows), x, weight,
                   bias != nullptr, stats, dy, dx, at, at + width);
                }
              });
  std::vector<double> total(2 * width, 0.0);
  for (size_t i = 0; i < sums.size(); ++i) total[i % (2 * width)] += double(sums[i]);
  for (size_t j = 0; j < width; ++j) {
    d_weight[j] = static_cast<float>(total[j]);
    if (d_bias != nullptr) d_bias[j] = static_cast<float>(total[width + j]);
  }
}

void AddBFloat16(int64_t n, const float* x, const BFloat16* y, float* sum) {
  ParallelFor(n, kGrain, [&](int64_t begin, int64_t end) {
    CISTERN_DISPATCH(AddPart)(begin, end, x, y, sum);
  });
}

}  // namespace cistern
#endif  // HWY_ONCE
