// Linear attention's fused walk as a path: feature maps, divisors, the memory in and out.
#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "cistern/verify/path_machine.h"
#include "cistern/verify/paths.h"
#include "cistern/verify/properties.h"

namespace cistern::verify {
namespace path_linear {

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

struct Case {
  std::string name;
  at::Tensor q, k, v, memory, g, g_memory;
  LinearRule rule;
  ops::Mask mask = {};
};

Case Make(const std::string& name, const LinearRule& rule, int64_t batch, int64_t length,
          int64_t features, int64_t width) {
  Case c{name,
         Normal({batch, 2, length, features}),
         Normal({batch, 2, length, features}),
         Normal({batch, 2, length, width}),
         Normal({batch, 2, features, rule.Columns(width)}),
         Normal({batch, 2, length, width}),
         Normal({batch, 2, features, rule.Columns(width)}),
         rule};
  if (rule.map == FeatureMap::kNone) c.q = c.q.abs(), c.k = c.k.abs();
  if (rule.divisor != DivisorRule::kNone) {  // sums of weights are positive
    at::Tensor z = c.memory.narrow(3, width, 1);
    z.copy_(z.abs() + 1);
  }
  return c;
}

std::vector<Case> Cases(int64_t T) {
  const LinearRule elu = {FeatureMap::kEluPlusOne, 0.125, DivisorRule::kPlus, 1e-6};
  std::vector<Case> all = {
      Make("elu + 1", elu, 2, T, 6, 5),
      Make("features, divisor at least", {FeatureMap::kNone, 0, DivisorRule::kAtLeast, 0.5}, 1, T,
           17, 3),
      Make("features, magnitude", {FeatureMap::kNone, 0, DivisorRule::kMagnitude, 0.5}, 1, T, 4, 8),
      Make("features, sign", {FeatureMap::kNone, 0, DivisorRule::kSignSafe, 0.5}, 1, T, 4, 8),
      Make("features, no divisor", {FeatureMap::kNone, 0, DivisorRule::kNone, 0.25}, 2, T, 9, 4)};
  Case padded = Make("lengths", elu, 3, T, 5, 4), packed = Make("documents", elu, 2, T, 5, 4);
  padded.mask = {LengthsOf({T, T / 2, 0}), {}};
  packed.mask = {{}, StartsAt(2, T, {{0, 0}, {0, T / 2}, {1, T - 1}})};
  all.push_back(padded);
  all.push_back(packed);
  return all;
}

double Map(const LinearRule& rule, double x) {
  if (rule.map == FeatureMap::kNone) return x;
  return (x > 0 ? x + 1 : std::exp(x)) + rule.map_eps;
}

double Divided(const LinearRule& rule, double sum, double z) {
  switch (rule.divisor) {
    case DivisorRule::kPlus:
      return sum / (z + rule.value);
    case DivisorRule::kAtLeast:
      return sum / std::max(z, rule.value);
    case DivisorRule::kMagnitude:
      return sum / std::max(std::abs(z), rule.value);
    case DivisorRule::kSignSafe:
      return sum / (std::abs(z) >= rule.value ? z : std::copysign(rule.value, z));
    default:
      return sum * rule.value;
  }
}

// S_t = S_{t-1} + phi(k_t) (x) (v_t, 1), out_t = phi(q_t) S_t over the divisor of its last column.
ops::SumResult Definition(const Case& c) {
  const int64_t B = c.q.size(0), H = c.q.size(1), T = c.q.size(2), n = c.q.size(3), d = c.v.size(3),
                columns = c.rule.Columns(d);
  const at::Tensor out = at::zeros({B, H, T, d}, at::kDouble), last = c.memory.clone();
  const auto q = c.q.accessor<double, 4>(), k = c.k.accessor<double, 4>(),
             v = c.v.accessor<double, 4>();
  auto y = out.accessor<double, 4>(), S = last.accessor<double, 4>();
  for (int64_t b = 0; b < B; ++b) {
    for (int64_t h = 0; h < H; ++h) {
      for (int64_t t = 0; t < T; ++t) {
        if (c.mask.lengths && t >= (*c.mask.lengths)[b].item<int64_t>()) break;
        const bool begins = c.mask.starts && (*c.mask.starts)[b][t].item<bool>();
        std::vector<double> read(size_t(columns), 0.0);
        for (int64_t l = 0; l < n; ++l) {
          const double weight = Map(c.rule, k[b][h][t][l]), by = Map(c.rule, q[b][h][t][l]);
          for (int64_t i = 0; i < columns; ++i) {
            if (begins) S[b][h][l][i] = 0;
            S[b][h][l][i] += weight * (i < d ? v[b][h][t][i] : 1);
            read[size_t(i)] += by * S[b][h][l][i];
          }
        }
        for (int64_t i = 0; i < d; ++i)
          y[b][h][t][i] = Divided(c.rule, read[size_t(i)], read.back());
      }
    }
  }
  return {out, last};
}

ops::SumResult Run(const Paths& paths, const Case& c, at::ScalarType dtype = at::kDouble) {
  return paths.linear(c.q.to(dtype), c.k.to(dtype), c.v.to(dtype), c.memory, c.rule, c.mask);
}

at::Tensor Loss(const Paths& paths, const Case& c, const Tensors& x) {
  const ops::SumResult y = paths.linear(x[0], x[1], x[2], x[3], c.rule, c.mask);
  return (y.out * c.g.to(y.out.scalar_type())).sum() + (y.memory * c.g_memory).sum();
}

// The output, the memory after it and the gradients of q, k, v and the memory before it.
Tensors Everything(const Paths& paths, const Case& c, at::ScalarType dtype) {
  const Tensors leaves = Leaves({c.q.to(dtype), c.k.to(dtype), c.v.to(dtype), c.memory});
  const ops::SumResult y = Run(paths, c, dtype);
  Tensors all = {y.out.detach(), y.memory.detach()};
  for (const at::Tensor& x : Gradients(Loss(paths, c, leaves), leaves)) all.push_back(x);
  return all;
}

Outcome Compare(const Paths& paths, const Settings& settings, at::ScalarType dtype,
                double tolerance) {
  Meter meter;
  for (const int64_t T : settings.full ? std::vector<int64_t>{1, 17, 65, 130, 2100}
                                       : std::vector<int64_t>{1, 17, 65, 130}) {
    for (const Case& c : Cases(T)) {
      const ops::SumResult want = Definition(c), got = Run(paths, c, dtype);
      meter.Close(got.out, want.out, tolerance, c.name, ", T=", T);
      meter.Close(got.memory, want.memory, tolerance, c.name, ", memory, T=", T);
    }
  }
  return meter.result();
}
Outcome CheckDefinitionOf(const Paths& paths, const Settings& settings) {
  return Compare(paths, settings, at::kDouble, 1e-12);
}
Outcome CheckFloatOf(const Paths& paths, const Settings& settings) {
  return Compare(paths, settings, at::kFloat, 2e-6);
}

Outcome CheckGradientOf(const Paths& paths, const Settings& settings) {
  Meter meter;
  for (const int64_t T :
       settings.full ? std::vector<int64_t>{1, 9, 70} : std::vector<int64_t>{1, 9}) {
    for (const Case& c : Cases(T)) {
      Differences([&](const Tensors& x) { return Loss(paths, c, x); }, {c.q, c.k, c.v, c.memory},
                  2e-7, StrCat(c.name, ", T=", T), {"q", "k", "v", "memory"}, meter);
    }
  }
  return meter.result();
}

// The memory passes from piece to piece.
Outcome CheckPiecesOf(const Paths& paths, const Settings&) {
  Meter meter;
  const int64_t T = 70;
  for (const Case& c : Cases(T)) {
    const ops::SumResult want = Definition(c);
    for (const std::vector<int64_t>& cuts :
         {std::vector<int64_t>{0, 1, 33, T}, std::vector<int64_t>{0, 64, T}, EachToken(T)}) {
      Case piece = c;
      Tensors out;
      for (size_t i = 0; i + 1 < cuts.size(); ++i) {
        const int64_t begin = cuts[i], count = cuts[i + 1] - begin;
        piece.q = c.q.narrow(2, begin, count), piece.k = c.k.narrow(2, begin, count);
        piece.v = c.v.narrow(2, begin, count), piece.mask = c.mask.Narrow(begin, count);
        const ops::SumResult y = Run(paths, piece);
        out.push_back(y.out);
        piece.memory = y.memory;
      }
      meter.Close(at::cat(out, 2), want.out, 1e-12, c.name, " in ", cuts.size() - 1, " pieces");
      meter.Close(piece.memory, want.memory, 1e-12, c.name, ", memory");
    }
  }
  return meter.result();
}

// Later tokens, documents after and before, and padding change no bit, whatever they hold.
Outcome CheckUnseen(const Paths& paths, const std::vector<double>& values) {
  Meter meter;
  const int64_t T = 70, from = 40;
  for (const Case& c : Cases(T)) {
    const at::Tensor want = Run(paths, c, at::kFloat).out;
    for (const double value : values) {
      Case later = c;
      later.q = c.q.clone(), later.k = c.k.clone(), later.v = c.v.clone();
      for (const at::Tensor& x : {later.q, later.k, later.v})
        x.narrow(2, from, T - from).fill_(value);
      meter.Same(Run(paths, later, at::kFloat).out.narrow(2, 0, from), want.narrow(2, 0, from),
                 c.name, ", tokens ", from, " on = ", value);
    }
  }
  return meter.result();
}
Outcome CheckFutureOf(const Paths& paths, const Settings&) { return CheckUnseen(paths, {3.0}); }
Outcome CheckNonFiniteOf(const Paths& paths, const Settings&) { return CheckUnseen(paths, {kNan}); }

Outcome CheckPaddingOf(const Paths& paths, const Settings&) {
  Meter meter;
  // The composite multiplies by zero, so mechanisms give it padding of zeros.
  const double content = ops::ActiveImpl() == ops::Impl::kComposite ? 7.0 : kNan;
  for (const Case& c : Cases(30)) {
    if (!c.mask.lengths) continue;
    Case other = c;
    other.q = c.q.clone(), other.k = c.k.clone(), other.v = c.v.clone(), other.g = c.g.clone();
    for (const at::Tensor& x : {other.q, other.k, other.v})
      x.select(0, 1).narrow(1, 15, 15).fill_(content);
    other.g.select(0, 1).narrow(1, 15, 15).fill_(7.0);
    const Tensors got = Everything(paths, other, at::kDouble),
                  want = Everything(paths, c, at::kDouble);
    for (size_t i = 0; i < got.size(); ++i) meter.Same(got[i], want[i], c.name, ", result ", i);
    for (const size_t i : {0, 2, 3, 4})
      meter.Zero(got[i].select(0, 1).narrow(1, 15, 15), c.name, ", padding of result ", i);
  }
  return meter.result();
}

auto AllOf(const Paths& paths, const Case& c) {
  return [&](at::ScalarType dtype) { return Everything(paths, c, dtype); };
}

Outcome CheckThreadsOf(const Paths& paths, const Settings&) {
  Meter meter;
  std::vector<Case> all = Cases(130);
  all.push_back(
      Make("segments", {FeatureMap::kEluPlusOne, 0, DivisorRule::kPlus, 1e-6}, 1, 2100, 5, 4));
  for (const Case& c : all) SameOnThreads(meter, c.name, AllOf(paths, c));
  return meter.result();
}

Outcome CheckSimdOf(const Paths& paths, const Settings&) {
  if (HasOneTarget()) return OneTarget();
  Meter meter;
  for (const Case& c : Cases(70)) {
    CloseToReferenceOnTargets(
        meter, c.name, paths, 2e-5,
        [&](const Paths& by, at::ScalarType dtype) { return Everything(by, c, dtype); });
  }
  return meter.result();
}

Outcome CheckPoisonOf(const Paths& paths, const Settings&) {
  Meter meter;
  for (const Case& c : Cases(70)) SameWithPoison(meter, c.name, AllOf(paths, c));
  return meter.result();
}

}  // namespace path_linear

std::vector<PathCheck> LinearPathChecks() {
  using namespace path_linear;
  const std::string path = "linear_attention";
  const auto machine = Property::Scope::kMachine;
  return {{path, "definition", CheckDefinitionOf},
          {path, "float", CheckFloatOf},
          {path, "pieces", CheckPiecesOf},
          {path, "future", CheckFutureOf, machine},
          {path, "gradient", CheckGradientOf},
          {path, "padding", CheckPaddingOf},
          {path, "nonfinite", CheckNonFiniteOf, machine},
          {path, "threads", CheckThreadsOf, machine},
          {path, "simd", CheckSimdOf, machine},
          {path, "poison", CheckPoisonOf, machine}};
}

}  // namespace cistern::verify
