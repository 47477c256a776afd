// Softmax attention with few keys or few queries beside many tokens, by the kernels of slots,
// against sums over all pairs.
#include <ATen/ATen.h>

#include <cmath>
#include <limits>

#include "cistern/verify/path_machine.h"
#include "cistern/verify/paths.h"
#include "cistern/verify/properties.h"

namespace cistern::verify {
namespace path_slots {

constexpr double kScale = 0.4;
constexpr double kFloatTolerance = 2e-6;

struct Case {
  std::string name;
  at::Tensor q, k, v, g;
  ops::Mask mask;    // of the keys
  at::Tensor valid;  // [B,S] bool, true where a key is seen; undefined: all are
  int64_t tokens() const { return std::max(q.size(2), k.size(2)); }
};

// Heads enough for these kernels, of 1,024 tokens or more.
std::vector<Case> Cases() {
  const auto make = [](const std::string& name, int64_t queries, int64_t keys, int64_t width,
                       int64_t value_width) {
    constexpr int64_t kBatch = 3, kHeads = 11;
    return Case{name,
                Normal({kBatch, kHeads, queries, width}),
                Normal({kBatch, kHeads, keys, width}),
                Normal({kBatch, kHeads, keys, value_width}),
                Normal({kBatch, kHeads, queries, value_width}),
                {},
                {}};
  };
  std::vector<Case> all = {make("few keys", 1030, 17, 5, 5), make("one key", 1024, 1, 3, 3),
                           make("few queries", 17, 1030, 5, 5),
                           make("few queries, other widths", 5, 1100, 3, 7),
                           make("few queries of segments", 6, 2100, 2, 2)};
  Case hidden = make("few keys, some hidden", 1024, 9, 4, 4);
  hidden.valid = at::arange(9).remainder(3) != 1;
  hidden.valid = hidden.valid.expand({3, 9}).clone();
  hidden.valid[1].fill_(false);
  all.push_back(hidden);
  Case lengths = make("few queries, lengths", 9, 1070, 4, 4);
  lengths.mask.lengths = at::tensor({int64_t{1070}, int64_t{0}, int64_t{501}}, at::kLong);
  all.push_back(lengths);
  return all;
}

// [B,1,1,S]: the keys that are seen.
at::Tensor Seen(const Case& c) {
  const int64_t keys = c.k.size(2);
  at::Tensor seen = c.valid.defined() ? c.valid : at::ones({c.k.size(0), keys}, at::kBool);
  if (c.mask.lengths) seen = at::arange(keys).unsqueeze(0) < c.mask.lengths->unsqueeze(1);
  return seen.unsqueeze(1).unsqueeze(1);
}

// out_t = sum_j e^(scale q_t . k_j) v_j / sum_j e^(scale q_t . k_j), 0 of no keys
at::Tensor Definition(const Case& c) {
  const at::Tensor seen = Seen(c);
  const at::Tensor scores = kScale * (c.q.unsqueeze(3) * c.k.unsqueeze(2)).sum(4),
                   e = (scores - scores.amax(3, true)).exp() * seen.to(at::kDouble),
                   sum = e.sum(3, true);
  return at::matmul(e / sum.masked_fill(sum == 0, 1.0), c.v);
}

at::Tensor Run(const Paths& paths, const Case& c, at::ScalarType dtype) {
  return paths.slots(c.q.to(dtype), c.k.to(dtype), c.v.to(dtype), kScale, c.mask, c.valid);
}

// The output and the gradients of q, k and v.
Tensors Everything(const Paths& paths, const Case& c, at::ScalarType dtype) {
  const Tensors leaves = Leaves(Cast({c.q, c.k, c.v}, dtype));
  const at::Tensor out = paths.slots(leaves[0], leaves[1], leaves[2], kScale, c.mask, c.valid);
  Tensors all = Gradients((out * c.g.to(dtype)).sum(), leaves);
  all.insert(all.begin(), out.detach());
  return all;
}

Outcome CompareWithDefinition(const Paths& paths, at::ScalarType dtype, double tolerance) {
  Meter meter;
  for (const Case& c : Cases()) {
    const at::Tensor want = Definition(c);
    meter.Close(Run(paths, c, dtype), want, tolerance, c.name);
    meter.Close(Everything(paths, c, dtype)[0], want, tolerance, c.name, ", with gradients");
  }
  return meter.result();
}
Outcome CheckDefinitionOf(const Paths& paths, const Settings&) {
  return CompareWithDefinition(paths, at::kDouble, 1e-12);
}
Outcome CheckFloatOf(const Paths& paths, const Settings&) {
  return CompareWithDefinition(paths, at::kFloat, kFloatTolerance);
}

Outcome CheckGradientOf(const Paths& paths, const Settings&) {
  Meter meter;
  for (const Case& c : Cases()) {
    Differences(
        [&](const Tensors& x) {
          return (paths.slots(x[0], x[1], x[2], kScale, c.mask, c.valid) * c.g).sum();
        },
        {c.q, c.k, c.v}, 2e-7, c.name, {"q", "k", "v"}, meter);
  }
  return meter.result();
}

// What is hidden, NaN too, changes no bit and has exactly zero gradient.
Outcome CheckMaskedOf(const Paths& paths, const Settings&) {
  Meter meter;
  for (const Case& c : Cases()) {
    const at::Tensor hidden = Seen(c).logical_not().squeeze(2).unsqueeze(-1);  // [B,1,S,1]
    if (!hidden.any().item<bool>()) continue;
    const Tensors want = Everything(paths, c, at::kFloat);
    Case other = c;
    other.k = c.k.masked_fill(hidden, std::numeric_limits<double>::quiet_NaN());
    other.v = c.v.masked_fill(hidden, std::numeric_limits<double>::quiet_NaN());
    const Tensors got = Everything(paths, other, at::kFloat);
    for (size_t i = 0; i < got.size(); ++i)
      meter.Same(got[i], want[i], c.name, ", result ", i, ", NaN where it is hidden");
    for (const size_t i : {2, 3})
      meter.Zero(got[i].masked_fill(hidden.logical_not(), 0.0), c.name,
                 ", gradient of what is hidden");
  }
  return meter.result();
}

// A key or a value of NaN that is seen makes NaN of every query of its row and head, and of no
// other.
Outcome CheckNonFiniteOf(const Paths& paths, const Settings&) {
  Meter meter;
  for (const Case& c : Cases()) {
    const at::Tensor want = Run(paths, c, at::kFloat);
    for (const bool key : {true, false}) {
      Case other = c;
      other.k = c.k.clone(), other.v = c.v.clone();
      (key ? other.k : other.v)[2][1].select(0, 0).fill_(std::nan(""));
      const at::Tensor got = Run(paths, other, at::kFloat);
      meter.True(got[2][1].isnan().all().item<bool>(), c.name, ", NaN is seen");
      meter.Same(got.narrow(0, 0, 2), want.narrow(0, 0, 2), c.name, ", other rows");
      meter.Same(got[2].narrow(0, 2, 9), want[2].narrow(0, 2, 9), c.name, ", other heads");
    }
  }
  return meter.result();
}

auto BothWays(const Paths& paths, const Case& c) {
  return [&](at::ScalarType dtype) {
    Tensors all = Everything(paths, c, dtype);
    all.push_back(Run(paths, c, dtype));
    return all;
  };
}

Outcome CheckThreadsOf(const Paths& paths, const Settings&) {
  Meter meter;
  for (const Case& c : Cases()) SameOnThreads(meter, c.name, BothWays(paths, c));
  return meter.result();
}

Outcome CheckSimdOf(const Paths& paths, const Settings&) {
  if (HasOneTarget()) return OneTarget();
  Meter meter;
  for (const Case& c : Cases()) {
    CloseToReferenceOnTargets(
        meter, c.name, paths, 10 * kFloatTolerance,
        [&](const Paths& by, at::ScalarType dtype) { return Everything(by, c, dtype); });
  }
  return meter.result();
}

Outcome CheckPoisonOf(const Paths& paths, const Settings&) {
  Meter meter;
  for (const Case& c : Cases()) SameWithPoison(meter, c.name, BothWays(paths, c));
  return meter.result();
}

}  // namespace path_slots

std::vector<PathCheck> SlotPathChecks() {
  using namespace path_slots;
  const std::string path = "attention_of_slots";
  const auto machine = Property::Scope::kMachine;
  return {{path, "definition", CheckDefinitionOf},
          {path, "float", CheckFloatOf},
          {path, "gradient", CheckGradientOf},
          {path, "masked", CheckMaskedOf, machine},
          {path, "nonfinite", CheckNonFiniteOf, machine},
          {path, "threads", CheckThreadsOf, machine},
          {path, "simd", CheckSimdOf, machine},
          {path, "poison", CheckPoisonOf, machine}};
}

}  // namespace cistern::verify
