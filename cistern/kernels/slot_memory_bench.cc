// B*H = 8 heads in float. GFLOP/s count the recurrence's least operations per token and head: 4 n d
// forward (write, read), 6 n d for the adjoint (G, du, ds), so chunking's extra work shows as time.
#include <benchmark/benchmark.h>

#include <vector>

#include "cistern/base/parallel.h"
#include "cistern/base/random.h"
#include "cistern/kernels/slot_memory.h"

namespace cistern {
namespace {

struct Inputs {
  explicit Inputs(const benchmark::State& state)
      : shape{1, 8, state.range(0), state.range(1), state.range(2)} {
    Random random(1);
    for (auto* x : {&slots, &slots2, &s}) x->resize(size_t(8 * shape.length * shape.slots));
    for (auto* x : {&wide, &wide2, &u}) x->resize(size_t(8 * shape.length * shape.width));
    for (auto* x : {&slots, &slots2, &s, &wide, &wide2, &u}) {
      for (float& value : *x) value = float(random.Normal());
    }
    memory.resize(size_t(8 * shape.slots * shape.width));
    G.resize(memory.size());
    z.assign(size_t(8 * shape.slots), 0.0);
    h.resize(z.size());
  }
  Rows<float> R(std::vector<float>& x) const {
    const int64_t width = int64_t(x.size()) / (8 * shape.length);
    return {x.data(), 8 * shape.length * width, shape.length * width, width};
  }
  Rows<const float> C(std::vector<float>& x) const {
    const Rows<float> rows = R(x);
    return {rows.data, rows.batch, rows.head, rows.time};
  }
  void Report(benchmark::State& state, double operations) const {
    state.counters["GFLOP/s"] =
        benchmark::Counter(operations * 8e-9 * double(shape.length * shape.slots * shape.width),
                           benchmark::Counter::kIsIterationInvariantRate);
    state.counters["threads"] = NumThreads();
  }
  SlotShape shape;
  std::vector<float> slots, slots2, s, wide, wide2, u, G, h;
  std::vector<double> memory, z;
};

void Read(benchmark::State& state) {
  Inputs x(state);
  for (auto _ : state)
    SlotRead<float>(x.shape, x.C(x.slots), x.C(x.s), x.C(x.u), {}, x.memory.data(), x.z.data(),
                    x.R(x.wide), {});
  x.Report(state, 4);
}

void Match(benchmark::State& state) {
  Inputs x(state);
  for (auto _ : state)
    SlotMatch<float>(x.shape, x.C(x.wide), x.C(x.s), x.C(x.u), {}, x.memory.data(), x.z.data(),
                     x.R(x.slots), {});
  x.Report(state, 4);
}

void Adjoint(benchmark::State& state) {
  Inputs x(state);
  std::vector<float> du(x.u.size()), ds(x.s.size());
  for (auto _ : state) {
    SlotAdjoint<float>(x.shape, x.C(x.slots), x.C(x.wide), x.C(x.s), x.C(x.u), x.C(x.slots2), {},
                       {}, x.z.data(), x.G.data(), x.h.data(), x.R(du), x.R(ds));
  }
  x.Report(state, 6);
}

void Shapes(benchmark::internal::Benchmark* benchmark) {
  benchmark->ArgNames({"T", "n", "d"})->UseRealTime()->Unit(benchmark::kMillisecond);
  for (int64_t T : {1024, 4096}) benchmark->Args({T, 64, 64})->Args({T, 32, 32})->Args({T, 16, 32});
}
void Decode(benchmark::internal::Benchmark* benchmark) {
  benchmark->ArgNames({"T", "n", "d"})
      ->UseRealTime()
      ->Unit(benchmark::kMicrosecond)
      ->Args({1, 64, 64})
      ->Args({1, 32, 32});
}

BENCHMARK(Read)->Apply(Shapes);
BENCHMARK(Match)->Apply(Shapes);
BENCHMARK(Adjoint)->Apply(Shapes);
BENCHMARK(Read)->Apply(Decode);
BENCHMARK(Match)->Apply(Decode);

}  // namespace
}  // namespace cistern
