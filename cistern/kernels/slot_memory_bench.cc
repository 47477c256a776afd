// B*H = 8 heads in float. GFLOP/s count the recurrence's least operations per token and head: 4 n d
// forward (write, read), 6 n d for the adjoint (G, du, ds), so chunking's extra work shows as time.
#include <benchmark/benchmark.h>

#include <vector>

#include "cistern/base/parallel.h"
#include "cistern/base/random.h"
#include "cistern/kernels/slot_attention.h"
#include "cistern/kernels/slot_decoding.h"

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

// One token of `sequences` sequences with 8 heads: the state in double, or with writes put off.
template <bool kAbc, bool kDeferred>
void Token(benchmark::State& state) {
  const SlotShape shape = {state.range(0), 8, 1, state.range(1), state.range(2)};
  Random random(1);
  const int64_t heads = shape.batch * 8, n = shape.slots, d = shape.width;
  const auto normal = [&](int64_t width) {
    std::vector<float> x(size_t(heads * width));
    for (float& value : x) value = float(random.Normal());
    return x;
  };
  std::vector<float> s = normal(n), latents = normal(n), q = normal(d), k = normal(d),
                     v = normal(d), out = normal(d);
  std::vector<double> keys(size_t(heads * n * d)), values(keys.size()), z(size_t(heads * n));
  const auto in = [](std::vector<float>& x, int64_t width) {
    return Rows<const float>{x.data(), 8 * width, width, width};
  };
  std::vector<std::byte> held(size_t(heads * DecodingBytes(n, d, kAbc)) + 64);
  std::byte* const at = held.data() + (64 - reinterpret_cast<uintptr_t>(held.data()) % 64) % 64;
  BeginDecoding(shape, kAbc ? keys.data() : nullptr, values.data(), z.data(), at);
  const Rows<float> to = {out.data(), 8 * d, d, d};
  for (auto _ : state) {
    if constexpr (kAbc && kDeferred) {
      AbcDecode<float>(shape, 0.1, in(q, d), in(k, d), in(v, d), in(s, n), {}, at, to);
    } else if constexpr (kAbc) {
      AbcForward<float>(shape, 0.1, false, in(q, d), in(k, d), in(v, d), in(s, n), {}, keys.data(),
                        values.data(), z.data(), to, {});
    } else if constexpr (kDeferred) {
      LatteDecode<float>(shape, in(latents, n), in(s, n), in(v, d), {}, at, to);
    } else {
      LatteForward<float>(shape, in(latents, n), in(s, n), in(v, d), {}, values.data(), z.data(),
                          to);
    }
  }
  state.counters["ns/head"] =
      benchmark::Counter(double(heads) * 1e-9, benchmark::Counter::kIsIterationInvariantRate |
                                                   benchmark::Counter::kInvert);
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
void Tokens(benchmark::internal::Benchmark* benchmark) {
  benchmark->ArgNames({"B", "n", "d"})->UseRealTime()->Unit(benchmark::kMicrosecond);
  for (int64_t B : {1, 16, 256}) benchmark->Args({B, 64, 64});
}

BENCHMARK(Token<false, false>)->Name("Latte")->Apply(Tokens);
BENCHMARK(Token<false, true>)->Name("LatteDecode")->Apply(Tokens);
BENCHMARK(Token<true, false>)->Name("Abc")->Apply(Tokens);
BENCHMARK(Token<true, true>)->Name("AbcDecode")->Apply(Tokens);
BENCHMARK(Read)->Apply(Decode);
BENCHMARK(Match)->Apply(Decode);

}  // namespace
}  // namespace cistern
