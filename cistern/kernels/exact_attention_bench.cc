// Exact attention in float and of bfloat16, 8 heads. GFLOP/s count the least operations of each
// pair that is seen: 2 (dk + dv) forward, 5 products of which two are made again, 2 (3 dk + 2 dv),
// backward.
#include <benchmark/benchmark.h>

#include <algorithm>
#include <vector>

#include "cistern/base/parallel.h"
#include "cistern/base/random.h"
#include "cistern/kernels/exact_attention_bfloat16.h"

namespace cistern {
namespace {

constexpr int64_t kHeads = 8;

// Arguments: T, d, window (0: full, -1: causal), dropout in percent.
template <class T>
struct Inputs {
  explicit Inputs(const benchmark::State& state, int64_t queries)
      : shape{1, kHeads, queries, state.range(0), state.range(1), state.range(1)} {
    Random random(1);
    const int64_t d = shape.key_width, S = shape.keys;
    for (auto* x : {&q, &out, &g}) x->resize(size_t(kHeads * queries * d));
    for (auto* x : {&k, &v}) x->resize(size_t(kHeads * S * d));
    dq.resize(size_t(kHeads * queries * d));
    for (auto* x : {&dk, &dv}) x->resize(size_t(kHeads * S * d));
    for (auto* x : {&q, &k, &v, &g}) {
      for (T& value : *x) value = T(float(random.Normal()));
    }
    stats.resize(size_t(2 * kHeads * queries));
    const int64_t window = state.range(2);
    pairs = double(queries) * double(S);
    if (window != 0) {
      pairs = 0;
      for (int64_t t = 0; t < queries; ++t) {
        const int64_t end = S - queries + t + 1;
        ranges.push_back({window < 0 ? 0 : std::max<int64_t>(0, end - window), end, 0});
        pairs += double(end - ranges.back().begin);
      }
    }
    mask = {
        ranges.empty() ? nullptr : ranges.data(), 0, nullptr, {double(state.range(3)) / 100, 1}};
  }
  template <class S>
  Rows<S> R(std::vector<S>& x) const {
    const int64_t head = int64_t(x.size()) / kHeads;
    return {x.data(), kHeads * head, head, shape.key_width};
  }
  Rows<const T> C(std::vector<T>& x) const {
    const Rows<T> rows = R(x);
    return {rows.data, rows.batch, rows.head, rows.time};
  }
  void Forward(float* kept) {
    AttentionForward(shape, 0.125, C(q), C(k), C(v), mask, R(out), kept);
  }
  void Backward() {
    AttentionBackward(shape, 0.125, C(q), C(k), C(v), C(out), C(g), mask, stats.data(), R(dq),
                      R(dk), R(dv));
  }
  void Report(benchmark::State& state, double products) const {
    state.counters["GFLOP/s"] =
        benchmark::Counter(products * 2e-9 * double(kHeads) * pairs * double(shape.key_width),
                           benchmark::Counter::kIsIterationInvariantRate);
    state.counters["threads"] = NumThreads();
  }
  AttentionShape shape;
  std::vector<T> q, k, v, g, out, dq, dk, dv;
  std::vector<float> stats;
  std::vector<KeyRange> ranges;
  AttentionMask mask;
  double pairs = 0;
};

bool CanRun(benchmark::State& state, BFloat16) {
  if (!CanAttendBFloat16()) state.SkipWithError("no products of bfloat16 on this processor");
  return CanAttendBFloat16();
}
bool CanRun(benchmark::State&, float) { return true; }

template <class T>
void Forward(benchmark::State& state) {
  if (!CanRun(state, T())) return;
  Inputs<T> x(state, state.range(0));
  for (auto _ : state) x.Forward(x.stats.data());
  x.Report(state, 2);
}

template <class T>
void Backward(benchmark::State& state) {
  if (!CanRun(state, T())) return;
  Inputs<T> x(state, state.range(0));
  x.Forward(x.stats.data());
  for (auto _ : state) x.Backward();
  x.Report(state, 5);
}

// One query against T keys.
void Decode(benchmark::State& state) {
  Inputs<float> x(state, 1);
  for (auto _ : state) x.Forward(nullptr);
  x.Report(state, 2);
}

void Shapes(benchmark::internal::Benchmark* benchmark) {
  benchmark->ArgNames({"T", "d", "window", "dropout"})
      ->UseRealTime()
      ->Unit(benchmark::kMillisecond);
  for (int64_t T : {256, 1024, 4096})
    benchmark->Args({T, 64, 0, 0})->Args({T, 64, -1, 0})->Args({T, 64, 0, 10});
  benchmark->Args({1024, 32, 0, 0})->Args({4096, 64, 256, 0})->Args({16384, 64, 256, 0});
}
void Contexts(benchmark::internal::Benchmark* benchmark) {
  benchmark->ArgNames({"T", "d", "window", "dropout"})
      ->UseRealTime()
      ->Unit(benchmark::kMicrosecond);
  for (int64_t T : {128, 1024, 16384}) benchmark->Args({T, 64, 0, 0});
}

BENCHMARK_TEMPLATE(Forward, float)->Apply(Shapes);
BENCHMARK_TEMPLATE(Forward, BFloat16)->Apply(Shapes);
BENCHMARK_TEMPLATE(Backward, float)->Apply(Shapes);
BENCHMARK_TEMPLATE(Backward, BFloat16)->Apply(Shapes);
BENCHMARK(Decode)->Apply(Contexts);

}  // namespace
}  // namespace cistern
