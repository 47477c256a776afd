// Linear attention's fused walk in float, 8 heads, ELU + 1 and a denominator. GFLOP/s count the
// recurrence's least operations per token and head: 4 n (d + 1) forward (write, read), 10 n (d + 1)
// backward (write, dq; G, dk, dv), so chunking's extra work shows as time.
#include <benchmark/benchmark.h>

#include <vector>

#include "cistern/base/parallel.h"
#include "cistern/base/random.h"
#include "cistern/kernels/linear_attention.h"

namespace cistern {
namespace {

constexpr int64_t kHeads = 8;

struct Inputs {
  explicit Inputs(const benchmark::State& state)
      : shape{1, kHeads, state.range(0), state.range(1), state.range(2)},
        rule{FeatureMap::kEluPlusOne, 0, DivisorRule::kPlus, 1e-6} {
    Random random(1);
    const size_t tokens = size_t(kHeads * shape.length);
    for (auto* x : {&q, &k, &dq, &dk}) x->resize(tokens * size_t(shape.slots));
    for (auto* x : {&v, &out, &g, &dv}) x->resize(tokens * size_t(shape.width));
    z.resize(tokens);
    for (auto* x : {&q, &k, &v, &g}) {
      for (float& value : *x) value = float(random.Normal());
    }
    memory.assign(size_t(kHeads * shape.slots * rule.Columns(shape.width)), 0.0);
    G = start = memory;
  }
  Rows<float> R(std::vector<float>& x) const {
    const int64_t width = int64_t(x.size()) / (kHeads * shape.length);
    return {x.data(), kHeads * shape.length * width, shape.length * width, width};
  }
  Rows<const float> C(std::vector<float>& x) const {
    const Rows<float> rows = R(x);
    return {rows.data, rows.batch, rows.head, rows.time};
  }
  void Forward() {
    LinearForward<float>(shape, rule, C(q), C(k), C(v), {}, memory.data(), R(out), R(z));
  }
  void Report(benchmark::State& state, double operations) const {
    state.counters["GFLOP/s"] =
        benchmark::Counter(operations * 1e-9 * double(kHeads * shape.length * shape.slots) *
                               double(rule.Columns(shape.width)),
                           benchmark::Counter::kIsIterationInvariantRate);
    state.counters["threads"] = NumThreads();
  }
  SlotShape shape;
  LinearRule rule;
  std::vector<float> q, k, v, g, out, z, dq, dk, dv;
  std::vector<double> memory, start, G;
};

void Forward(benchmark::State& state) {
  Inputs x(state);
  for (auto _ : state) {
    x.memory = x.start;
    x.Forward();
  }
  x.Report(state, 4);
}

void Backward(benchmark::State& state) {
  Inputs x(state);
  x.Forward();
  for (auto _ : state) {
    x.G.assign(x.G.size(), 0.0);
    LinearBackward<float>(x.shape, x.rule, x.C(x.q), x.C(x.k), x.C(x.v), x.C(x.out), x.C(x.z),
                          x.C(x.g), {}, x.start.data(), x.G.data(), x.R(x.dq), x.R(x.dk),
                          x.R(x.dv));
  }
  x.Report(state, 10);
}

void Shapes(benchmark::internal::Benchmark* benchmark) {
  benchmark->ArgNames({"T", "n", "d"})->UseRealTime()->Unit(benchmark::kMillisecond);
  for (int64_t T : {1024, 4096, 16384}) benchmark->Args({T, 64, 64});
  benchmark->Args({4096, 32, 32})->Args({4096, 16, 64});
}
void Steps(benchmark::internal::Benchmark* benchmark) {
  benchmark->ArgNames({"T", "n", "d"})
      ->UseRealTime()
      ->Unit(benchmark::kMicrosecond)
      ->Args({1, 64, 64})
      ->Args({1, 32, 32});
}

BENCHMARK(Forward)->Apply(Shapes);
BENCHMARK(Backward)->Apply(Shapes);
BENCHMARK(Forward)->Apply(Steps);

}  // namespace
}  // namespace cistern
