// GELU and the loss over a vocabulary as paths.
#include <ATen/ATen.h>

#include <cmath>
#include <limits>

#include "cistern/verify/path_machine.h"
#include "cistern/verify/paths.h"
#include "cistern/verify/properties.h"

namespace cistern::verify {
namespace path_rows {

// Finite numbers of every size, and where gelu bends or runs out.
at::Tensor GeluInputs(int64_t count) {
  const at::Tensor x = Normal({count}, 2);
  const double some[] = {0, -0.0, 1e-30, -1e-30, 5.5, -5.5, 40, -40, 1e4, -1e4, -13.5, -14.5};
  for (size_t i = 0; i < std::size(some) && int64_t(i) < count; ++i)
    x[int64_t(i)].fill_(double(float(some[i])));
  return x;
}

double Phi(double x) { return 0.5 * std::erfc(-x / std::sqrt(2.0)); }

// of(x) of each number.
template <class Of>
at::Tensor Each(const at::Tensor& x, Of&& of) {
  const at::Tensor y = at::empty_like(x);
  for (int64_t i = 0; i < x.numel(); ++i)
    y.mutable_data_ptr<double>()[i] = of(x.const_data_ptr<double>()[i]);
  return y;
}

Outcome CompareGelu(const Paths& paths, at::ScalarType dtype, double tolerance) {
  Meter meter;
  for (const int64_t count : {1, 15, 1000}) {
    const at::Tensor x = GeluInputs(count), g = Normal({count}), leaf = Leaves({x.to(dtype)})[0],
                     y = paths.gelu(leaf), dx = Gradients((y * g.to(dtype)).sum(), {leaf})[0];
    const at::Tensor want = Each(x, [](double a) { return a * Phi(a); });
    const at::Tensor slope = Each(x, [](double a) {
      return Phi(a) + a * std::exp(-a * a / 2) / std::sqrt(2 * std::acos(-1.0));
    });
    meter.Close(y, want, tolerance, "count ", count);
    meter.Close(dx, slope * g, tolerance, "gradient, count ", count);
    // Small values count as much as large ones.
    const at::Tensor near = (x.abs() < 4).nonzero().squeeze(1);
    const at::Tensor got = y.detach().to(at::kDouble);
    meter.Add(count == 1 ? 0.0 : (got - want).index_select(0, near).abs().max().item<double>(),
              tolerance, "the largest difference, count ", count);
  }
  return meter.result();
}
Outcome CheckGelu(const Paths& paths, const Settings&) {
  return CompareGelu(paths, at::kDouble, 1e-13);
}
Outcome CheckGeluInFloat(const Paths& paths, const Settings&) {
  return CompareGelu(paths, at::kFloat, 1e-6);
}

Outcome CheckGeluNonFinite(const Paths& paths, const Settings&) {
  Meter meter;
  const at::Tensor x = GeluInputs(40).to(at::kFloat), want = paths.gelu(x);
  for (int64_t i = 0; i < 40; i += 13) {
    const at::Tensor other = x.clone();
    other[i].fill_(std::numeric_limits<double>::quiet_NaN());
    const at::Tensor got = paths.gelu(other);
    meter.True(std::isnan(got[i].item<double>()), "NaN at ", i);
    const at::Tensor rest = (at::arange(40) != i).nonzero().squeeze(1);
    meter.Same(got.index_select(0, rest), want.index_select(0, rest), "beside NaN at ", i);
  }
  return meter.result();
}

Outcome CheckGeluSimd(const Paths& paths, const Settings&) {
  if (HasOneTarget()) return OneTarget();
  Meter meter;
  const at::Tensor x = GeluInputs(1000), want = Each(x, [](double a) { return a * Phi(a); });
  CloseOnTargets(
      meter, "gelu", {want}, [&](at::ScalarType dtype) { return Tensors{paths.gelu(x.to(dtype))}; },
      1e-14, 1e-6);
  return meter.result();
}

struct Loss {
  std::string name;
  at::Tensor hidden, weight, bias, targets;
  double smoothing = 0;
};

// hidden [N,3], weight [V,3]; some targets are ignored.
Loss MakeLoss(const std::string& name, int64_t rows, int64_t vocabulary, double smoothing,
              double scale = 1) {
  Loss l{name,
         Normal({rows, 3}),
         Normal({vocabulary, 3}, scale),
         Normal({vocabulary}),
         at::randint(vocabulary, {rows}, at::kLong),
         smoothing};
  for (int64_t i = 0; i < rows; i += 4) l.targets[i].fill_(-100);
  return l;
}

std::vector<Loss> Losses() {
  std::vector<Loss> all = {MakeLoss("plain", 13, 17, 0), MakeLoss("smoothed", 13, 17, 0.1),
                           MakeLoss("two words", 5, 2, 0.1), MakeLoss("all ignored", 3, 9, 0),
                           MakeLoss("in blocks", 40, 33000, 0.05)};
  all[0].bias = at::Tensor();
  all[3].targets.fill_(-100);
  return all;
}

// Mean over the targets of log sum_v e^(l_v) - (1 - s) l_y - s / V sum_v l_v, l = W h + b.
double LossOf(const Loss& l) {
  const int64_t N = l.hidden.size(0), V = l.weight.size(0);
  const auto h = l.hidden.accessor<double, 2>(), w = l.weight.accessor<double, 2>();
  const auto y = l.targets.accessor<int64_t, 1>();
  double sum = 0, count = 0;
  for (int64_t i = 0; i < N; ++i) {
    if (y[i] == -100) continue;
    std::vector<double> logits(size_t(V), 0.0);
    double high = -std::numeric_limits<double>::infinity(), total = 0, mean = 0;
    for (int64_t v = 0; v < V; ++v) {
      double x = l.bias.defined() ? l.bias.const_data_ptr<double>()[v] : 0;
      for (int64_t c = 0; c < 3; ++c) x += w[v][c] * h[i][c];
      logits[size_t(v)] = x;
      high = std::max(high, x), mean += x / double(V);
    }
    for (const double x : logits) total += std::exp(x - high);
    sum += high + std::log(total) - (1 - l.smoothing) * logits[size_t(y[i])] - l.smoothing * mean;
    ++count;
  }
  return count > 0 ? sum / count : 0;
}

at::Tensor Run(const Paths& paths, const Loss& l, at::ScalarType dtype) {
  return paths.loss(l.hidden.to(dtype), l.weight.to(dtype),
                    l.bias.defined() ? l.bias.to(dtype) : l.bias, l.targets, l.smoothing);
}

Outcome CompareLoss(const Paths& paths, at::ScalarType dtype, double tolerance, double scale = 1) {
  Meter meter;
  std::vector<Loss> all = Losses();
  if (scale != 1) all = {MakeLoss("large logits", 13, 17, 0, scale)};
  for (const Loss& l : all)
    meter.Close(Run(paths, l, dtype).to(at::kDouble), at::full({}, LossOf(l), at::kDouble),
                tolerance, l.name);
  return meter.result();
}
Outcome CheckLoss(const Paths& paths, const Settings&) {
  return CompareLoss(paths, at::kDouble, 1e-12);
}
Outcome CheckLossInFloat(const Paths& paths, const Settings&) {
  return CompareLoss(paths, at::kFloat, 2e-6);
}
Outcome CheckLossExtreme(const Paths& paths, const Settings&) {
  return CompareLoss(paths, at::kFloat, 1e-5, 1000);
}

Outcome CheckLossGradient(const Paths& paths, const Settings&) {
  Meter meter;
  for (const Loss& l : Losses()) {
    if (l.weight.size(0) > 1000) continue;
    Tensors x = {l.hidden, l.weight};
    std::vector<std::string> names = {"hidden", "weight"};
    if (l.bias.defined()) x.push_back(l.bias), names.push_back("bias");
    Differences(
        [&](const Tensors& of) {
          return 3 *
                 paths.loss(of[0], of[1], of.size() > 2 ? of[2] : l.bias, l.targets, l.smoothing);
        },
        x, 2e-7, l.name, names, meter);
  }
  return meter.result();
}

// In float with gradients, on every instruction set against double on the best.
Outcome CheckLossSimd(const Paths& paths, const Settings&) {
  if (HasOneTarget()) return OneTarget();
  Meter meter;
  for (const Loss& l : {MakeLoss("smoothed", 13, 17, 0.1), MakeLoss("wide", 7, 1003, 0)}) {
    const auto run = [&](const Paths& by, at::ScalarType dtype) {
      const Tensors leaves = Leaves(Cast({l.hidden, l.weight, l.bias}, dtype));
      const at::Tensor loss = by.loss(leaves[0], leaves[1], leaves[2], l.targets, l.smoothing);
      Tensors all = Gradients(loss, leaves);
      all.push_back(loss.detach());
      return all;
    };
    CloseOnTargets(
        meter, l.name, run(OurPaths(), at::kDouble),
        [&](at::ScalarType dtype) { return run(paths, dtype); }, 1e-12, 1e-5);
  }
  return meter.result();
}

Outcome CheckLossThreads(const Paths& paths, const Settings&) {
  Meter meter;
  const Loss l = MakeLoss("in blocks", 40, 33000, 0.05);
  // torch's product keeps its own order of sums
  SameOnThreads(
      meter, l.name, [&](at::ScalarType dtype) { return Tensors{Run(paths, l, dtype)}; }, 1);
  return meter.result();
}

}  // namespace path_rows

std::vector<PathCheck> RowPathChecks() {
  using namespace path_rows;
  const auto machine = Property::Scope::kMachine;
  return {{"gelu", "definition", CheckGelu, machine},
          {"gelu", "float", CheckGeluInFloat, machine},
          {"gelu", "nonfinite", CheckGeluNonFinite, machine},
          {"gelu", "simd", CheckGeluSimd, machine},
          {"vocab_loss", "definition", CheckLoss, machine},
          {"vocab_loss", "float", CheckLossInFloat, machine},
          {"vocab_loss", "extreme", CheckLossExtreme, machine},
          {"vocab_loss", "gradient", CheckLossGradient, machine},
          {"vocab_loss", "threads", CheckLossThreads, machine},
          {"vocab_loss", "simd", CheckLossSimd, machine}};
}

}  // namespace cistern::verify
