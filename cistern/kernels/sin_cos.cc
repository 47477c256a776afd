#include "cistern/kernels/sin_cos.h"

#include <cmath>

#include "cistern/base/parallel.h"
#include "cistern/kernels/dispatch.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cistern/kernels/sin_cos.cc"
#include "hwy/foreach_target.h"  // must come before highway.h

#include "cistern/kernels/bfloat16-inl.h"
#include "hwy/contrib/math/math-inl.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace cistern {
namespace HWY_NAMESPACE {

// Highway's reduction of the argument holds up to there.
constexpr float kFarthest = 39000;

HWY_NOINLINE void SinCosFar(size_t count, float factor, const float* x, float* sine,
                            float* cosine) {
  for (size_t j = 0; j < count; ++j) {
    sine[j] = factor * static_cast<float>(std::sin(static_cast<double>(x[j])));
    cosine[j] = factor * static_cast<float>(std::cos(static_cast<double>(x[j])));
  }
}

void SinCosPart(int64_t begin, int64_t end, int64_t width, float factor, const float* x, float* y) {
  const Tag<float> d;
  const Vec<float> f = hn::Set(d, factor), farthest = hn::Set(d, kFarthest);
  for (int64_t i = begin; i < end; ++i) {
    const float* const from = x + i * width;
    float *const sine = y + 2 * i * width, *const cosine = sine + width;
    EachVector(static_cast<size_t>(width), [&](size_t j, size_t count) HWY_ATTR {
      const Vec<float> v = LoadUpTo(from + j, count);
      if (!hn::AllTrue(d, hn::Le(hn::Abs(v), farthest)))
        return SinCosFar(count, factor, from + j, sine + j, cosine + j);
      StoreUpTo(hn::Mul(f, hn::Sin(d, v)), sine + j, count);
      StoreUpTo(hn::Mul(f, hn::Cos(d, v)), cosine + j, count);
    });
  }
}

void SinCosBackwardPart(int64_t begin, int64_t end, int64_t width, const float* dy, const float* y,
                        float* dx) {
  for (int64_t i = begin; i < end; ++i) {
    const float *const sine = y + 2 * i * width, *const cosine = sine + width;
    const float *const d_sine = dy + 2 * i * width, *const d_cosine = d_sine + width;
    EachVector(static_cast<size_t>(width), [&](size_t j, size_t count) HWY_ATTR {
      const Vec<float> kept = hn::Mul(LoadUpTo(d_cosine + j, count), LoadUpTo(sine + j, count));
      StoreUpTo(hn::MulSub(LoadUpTo(d_sine + j, count), LoadUpTo(cosine + j, count), kept),
                dx + i * width + j, count);
    });
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace cistern
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace cistern {
namespace {

// Rows of a thread at least.
int64_t Grain(int64_t width) { return (int64_t{1} << 14) / (width + 1) + 1; }

}  // namespace

HWY_EXPORT(SinCosPart);
HWY_EXPORT(SinCosBackwardPart);

void SinCos(int64_t rows, int64_t width, float factor, const float* x, float* y) {
  ParallelFor(rows, Grain(width), [&](int64_t begin, int64_t end) {
    CISTERN_DISPATCH(SinCosPart)(begin, end, width, factor, x, y);
  });
}

void SinCosBackward(int64_t rows, int64_t width, const float* dy, const float* y, float* dx) {
  ParallelFor(rows, Grain(width), [&](int64_t begin, int64_t end) {
    CISTERN_DISPATCH(SinCosBackwardPart)(begin, end, width, dy, y, dx);
  });
}

}  // namespace cistern
#endif  // HWY_ONCE
