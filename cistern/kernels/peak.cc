#include "cistern/kernels/peak.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <memory>

#include "cistern/base/parallel.h"
#include "cistern/kernels/dispatch.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cistern/kernels/peak.cc"
#include "hwy/foreach_target.h"  // must come before highway.h

#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace cistern {
namespace HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

// Twelve chains: more than the eight that two units of a latency of four need, and with the two
// factors no more than sixteen registers.
constexpr int kChains = 12;

// `steps` multiply-adds of each chain -> operations done; what they gave is added to *sink. Each
// chain goes to y / (1 - x), so nothing becomes denormal or infinite.
template <class T>
HWY_NOINLINE double Chains(int64_t steps, T* sink) {
  const hn::ScalableTag<T> d;
  const auto x = hn::Set(d, T(0.875)), y = hn::Set(d, T(0.125));
  hn::Vec<decltype(d)> c[kChains];
#pragma GCC unroll 12
  for (int j = 0; j < kChains; ++j) c[j] = hn::Set(d, T(j));
  for (int64_t i = 0; i < steps; ++i) {
#pragma GCC unroll 12
    for (int j = 0; j < kChains; ++j) c[j] = hn::MulAdd(c[j], x, y);
  }
#pragma GCC unroll 12
  for (int j = 1; j < kChains; ++j) c[0] = hn::Add(c[0], c[j]);
  *sink += hn::GetLane(c[0]);
  return 2.0 * double(steps) * kChains * double(hn::Lanes(d));
}
double ChainsFloat(int64_t steps, float* sink) { return Chains<float>(steps, sink); }
double ChainsDouble(int64_t steps, double* sink) { return Chains<double>(steps, sink); }

void AddArrays(const float* HWY_RESTRICT a, const float* HWY_RESTRICT b, float* HWY_RESTRICT c,
               size_t count) {
  const hn::ScalableTag<float> d;
  const size_t lanes = hn::Lanes(d);
  const auto x = hn::Set(d, 0.5f);
  for (size_t i = 0; i + lanes <= count; i += lanes)
    hn::StoreU(hn::MulAdd(hn::LoadU(d, a + i), x, hn::LoadU(d, b + i)), d, c + i);
}

}  // namespace HWY_NAMESPACE
}  // namespace cistern
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace cistern {

HWY_EXPORT(ChainsFloat);
HWY_EXPORT(ChainsDouble);
HWY_EXPORT(AddArrays);

namespace {

using Clock = std::chrono::steady_clock;

double Since(Clock::time_point began) {
  return std::chrono::duration<double>(Clock::now() - began).count();
}

std::atomic<double> nobody_reads;  // so that the work has a result

template <class T>
double RunChains(int64_t steps) {
  T sink = 0;
  double operations = 0;
  if constexpr (sizeof(T) == sizeof(float)) {
    operations = CISTERN_DISPATCH(ChainsFloat)(steps, &sink);
  } else {
    operations = CISTERN_DISPATCH(ChainsDouble)(steps, &sink);
  }
  nobody_reads.store(double(sink), std::memory_order_relaxed);
  return operations;
}

}  // namespace

template <class T>
double MultiplyAddPeak(double seconds) {
  constexpr int64_t kSteps = 1 << 18;  // about half a millisecond
  const int64_t threads = NumThreads();
  double best = 0;
  const auto began = Clock::now();
  for (int round = 0; round < 4 || Since(began) < seconds; ++round) {
    std::atomic<double> operations{0};
    const auto start = Clock::now();
    ParallelFor(threads, 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) operations.fetch_add(RunChains<T>(kSteps));
    });
    if (round > 0) best = std::max(best, operations.load() / Since(start) * 1e-9);
  }
  return best;
}
template double MultiplyAddPeak<float>(double seconds);
template double MultiplyAddPeak<double>(double seconds);

double TriadBandwidth(int64_t bytes, double seconds) {
  constexpr int64_t kBlock = 1 << 14;  // floats
  const int64_t blocks = std::max<int64_t>(1, bytes / int64_t(sizeof(float)) / kBlock);
  const size_t count = size_t(blocks * kBlock);
  const std::unique_ptr<float[]> a(new float[count]), b(new float[count]), c(new float[count]);
  double best = 0;
  const auto began = Clock::now();
  for (int round = 0; round < 4 || Since(began) < seconds; ++round) {
    const auto start = Clock::now();
    ParallelFor(blocks, 16, [&](int64_t begin, int64_t end) {
      float* const parts[] = {a.get() + begin * kBlock, b.get() + begin * kBlock,
                              c.get() + begin * kBlock};
      const size_t floats = size_t((end - begin) * kBlock);
      // Each thread touches its own parts first, so that they are near it.
      if (round == 0) {
        for (float* part : parts) std::fill_n(part, floats, 1.0f);
      }
      CISTERN_DISPATCH(AddArrays)(parts[0], parts[1], parts[2], floats);
    });
    if (round > 0) best = std::max(best, 12.0 * double(count) / Since(start) * 1e-9);
  }
  nobody_reads.store(double(c[count / 2]), std::memory_order_relaxed);
  return best;
}

}  // namespace cistern
#endif
