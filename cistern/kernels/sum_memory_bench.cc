// The summing slot memory with B*H = 8 heads in float, next to slot_memory_bench's exp mode.
// GFLOP/s count the recurrence's least operations per token and head: 4 n d forward (write, read),
// 6 n d for the adjoint (G, du, dw), so chunking's extra work shows as time.
#include <benchmark/benchmark.h>

#include <cmath>
#include <utility>
#include <vector>

#include "cistern/base/parallel.h"
#include "cistern/base/random.h"
#include "cistern/kernels/sum_memory.h"

namespace cistern {
namespace {

struct Inputs {
  explicit Inputs(const benchmark::State& state)
      : shape{1, 8, state.range(0), state.range(1), state.range(2)}, gates(state.range(3)) {
    Random random(1);
    gate.resize(size_t(8 * shape.length * gates));
    for (auto* x : {&slots, &slots2, &w}) x->resize(size_t(8 * shape.length * shape.slots));
    for (auto* x : {&wide, &u}) x->resize(size_t(8 * shape.length * shape.width));
    for (auto* x : {&slots, &slots2, &w, &gate, &wide, &u}) {
      for (float& value : *x) value = float(random.Normal());
    }
    for (float& value : gate) value = -0.1f * std::abs(value);
    memory.resize(size_t(8 * shape.slots * shape.width));
    h.resize(size_t(8 * shape.slots));
  }
  Rows<float> R(std::vector<float>& x) const {
    const int64_t width = int64_t(x.size()) / (8 * shape.length);
    return {x.data(), 8 * shape.length * width, shape.length * width, width};
  }
  Rows<const float> C(std::vector<float>& x) const {
    const Rows<float> rows = R(x);
    return {rows.data, rows.batch, rows.head, rows.time};
  }
  LogGates<float> Gate() { return {C(gate), gates}; }
  void Report(benchmark::State& state, double operations) const {
    state.counters["GFLOP/s"] =
        benchmark::Counter(operations * 8e-9 * double(shape.length * shape.slots * shape.width),
                           benchmark::Counter::kIsIterationInvariantRate);
    state.counters["threads"] = NumThreads();
  }
  SlotShape shape;
  int64_t gates;
  std::vector<float> slots, slots2, w, gate, wide, u;
  std::vector<double> memory, h;
};

void Read(benchmark::State& state) {
  Inputs x(state);
  for (auto _ : state)
    SumRead<float>(x.shape, x.C(x.slots), x.C(x.w), x.C(x.u), x.Gate(), {}, x.memory.data(),
                   x.R(x.wide));
  x.Report(state, 4);
}

void Match(benchmark::State& state) {
  Inputs x(state);
  for (auto _ : state)
    SumMatch<float>(x.shape, x.C(x.wide), x.C(x.w), x.C(x.u), x.Gate(), {}, x.memory.data(),
                    x.R(x.slots));
  x.Report(state, 4);
}

// The adjoint alone; a read's or match's backward is one more forward.
void Adjoint(benchmark::State& state) {
  Inputs x(state);
  std::vector<float> du(x.u.size()), dw(x.w.size()), dgate(x.gate.size());
  for (auto _ : state) {
    SumAdjoint<float>(x.shape, x.C(x.slots), x.C(x.wide), x.C(x.w), x.C(x.u), x.C(x.slots2),
                      x.Gate(), {}, x.memory.data(), x.h.data(), x.R(du), x.R(dw), x.R(dgate));
  }
  x.Report(state, 6);
}

void Shapes(benchmark::internal::Benchmark* benchmark) {
  benchmark->ArgNames({"T", "n", "d", "gates"})->UseRealTime()->Unit(benchmark::kMillisecond);
  for (const auto& [n, d] : {std::pair<int64_t, int64_t>{64, 64}, {32, 32}, {16, 32}}) {
    for (int64_t gates : {int64_t{0}, int64_t{1}, n}) benchmark->Args({4096, n, d, gates});
  }
}
void Decode(benchmark::internal::Benchmark* benchmark) {
  benchmark->ArgNames({"T", "n", "d", "gates"})
      ->UseRealTime()
      ->Unit(benchmark::kMicrosecond)
      ->Args({1, 64, 64, 0})
      ->Args({1, 64, 64, 64});
}

BENCHMARK(Read)->Apply(Shapes);
BENCHMARK(Match)->Apply(Shapes);
BENCHMARK(Adjoint)->Apply(Shapes);
BENCHMARK(Read)->Apply(Decode);
BENCHMARK(Match)->Apply(Decode);

}  // namespace
}  // namespace cistern
