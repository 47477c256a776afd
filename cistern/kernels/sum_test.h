#pragma once
// Random problems for the tests of the summing slot memory; the helpers that do not depend on the
// mode are slot_test.h's.
#include "cistern/kernels/slot_test.h"
#include "cistern/kernels/sum_memory.h"

namespace cistern::sum_test {

using slot_test::Array;
using slot_test::ExpectDifferences;
using slot_test::ForEachIsa;
using slot_test::kInf;
using slot_test::Layout;
using slot_test::Normals;
using slot_test::RelativeRms;
using slot_test::SameBits;

enum class Gates {
  kNone,    // raw mode
  kMild,    // around e^-1
  kSlow,    // forgets over a million tokens
  kStrong,  // chunks end early
  kJumps,   // slow, with a few e^-200, e^-800 and 0
  kMixed,   // every slot has its own speed, 0 to e^-30
  kShared,  // one mild gate for all slots, now and then 0 or e^-50
};
inline constexpr Gates kAllGates[] = {Gates::kNone,  Gates::kMild,  Gates::kSlow,  Gates::kStrong,
                                      Gates::kJumps, Gates::kMixed, Gates::kShared};

struct Problem : slot_test::AnyProblem {
  std::vector<double> w, log_gate;
  int64_t gates = 0;  // per token: n, 1 or 0
};

inline std::vector<double> RandomGates(Random& random, const SlotShape& shape, Gates kind) {
  std::vector<double> gates;
  if (kind == Gates::kNone) return gates;
  const int64_t width = kind == Gates::kShared ? 1 : shape.slots;
  for (int64_t i = 0; i < shape.batch * shape.heads * shape.length * width; ++i) {
    const double x = std::abs(random.Normal()), speed[] = {0, 1e-3, 0.1, 2, 30};
    double gate = -x;
    if (kind == Gates::kSlow) gate = -1e-6 * x;
    if (kind == Gates::kStrong) gate = -20 * x;
    if (kind == Gates::kMixed) gate = -x * speed[i % shape.slots % 5];
    if (kind == Gates::kJumps) {
      const double jumps[] = {-200, -800, -kInf}, jump = jumps[random.Below(3)];
      gate = random.Below(30) == 0 ? jump : -1e-2 * x;
    }
    if (kind == Gates::kShared && random.Below(10) == 0) gate = random.Below(2) == 0 ? -50 : -kInf;
    gates.push_back(static_cast<float>(gate));
  }
  return gates;
}

struct Options {
  Gates gates = Gates::kMild;
  bool empty = false, starts = false, lengths = false;
};

inline Problem MakeProblem(uint64_t seed, bool match, const SlotShape& shape,
                           const Options& options = {}) {
  Random random(seed);
  Problem p;
  p.shape = shape;
  p.match = match;
  p.Draw(random, "seed " + std::to_string(seed) + " gates " + std::to_string(int(options.gates)),
         options.starts, options.lengths);
  p.w = Normals(random, p.Tokens() * shape.slots);
  p.log_gate = RandomGates(random, shape, options.gates);
  p.gates = options.gates == Gates::kNone ? 0 : options.gates == Gates::kShared ? 1 : shape.slots;
  if (options.empty) std::fill(p.memory.begin(), p.memory.end(), 0);
  return p;
}

// log_gate of p in the kernels' precision.
template <class T>
Array<T> GateArray(const Problem& p, Layout layout) {
  return Array<T>(p.shape, p.gates, layout, p.log_gate);
}
template <class T>
cistern::LogGates<T> KernelGates(const Problem& p, const Array<T>& gates) {
  return {gates.in(), p.gates};
}

// A gate for every slot, as the reference has it; and the gradient of p's gates from that of the
// slots' gates.
inline std::vector<double> SlotGates(const Problem& p) {
  std::vector<double> gates;
  for (int64_t i = 0; p.gates > 0 && i < p.Tokens() * p.shape.slots; ++i)
    gates.push_back(p.log_gate[i * p.gates / p.shape.slots]);
  return gates;
}
inline std::vector<double> SumOverSlots(const Problem& p, const std::vector<double>& slots) {
  std::vector<double> gates(p.log_gate.size());
  for (size_t i = 0; i < slots.size(); ++i) gates[int64_t(i) * p.gates / p.shape.slots] += slots[i];
  return gates;
}

struct Forward {
  std::vector<double> out, memory;
};

template <class T>
Forward RunForward(const Problem& p, Layout layout = Layout::kBTHW) {
  const Array<T> a(p.shape, p.AWidth(), layout, p.a), w(p.shape, p.shape.slots, layout, p.w),
      u(p.shape, p.shape.width, layout, p.u), gate = GateArray<T>(p, layout);
  Array<T> out(p.shape, p.OutWidth(), layout);
  std::vector<double> memory = p.memory;
  (p.match ? SumMatch<T> : SumRead<T>)(p.shape, a.in(), w.in(), u.in(), KernelGates(p, gate),
                                       p.Mask(), memory.data(), out.rows());
  return {out.Values(), memory};
}

template <class T>
constexpr double kTolerance = std::is_same_v<T, float> ? 1e-6 : 1e-13;

}  // namespace cistern::sum_test
