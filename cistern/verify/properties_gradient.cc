#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>

#include "cistern/verify/properties.h"

namespace cistern::verify {
namespace {

// Central differences; the second step is tried where the first may have met a kink or a large
// third derivative.
constexpr double kSteps[] = {1e-5, 1e-6};
constexpr double kTolerance = 2e-7;  // 1e-10 of the third derivative, and 1e-16 / 1e-5 of the value

// How far a gradient, given by its product with the direction, is from the slope that f(step) has
// there. The nearer of the two steps: a wrong gradient is far from both.
double Distance(const at::Tensor& product, double tolerance,
                const std::function<double(double)>& f) {
  const double got = product.sum().item<double>(), norm = product.norm().item<double>();
  double distance = std::numeric_limits<double>::infinity();
  for (const double step : kSteps) {
    const double want = (f(step) - f(-step)) / (2 * step);
    const double here = std::abs(got - want) / std::max(1.0, norm + std::abs(want));
    if (here < distance) distance = here;
    if (distance <= tolerance) break;
  }
  return distance;
}

}  // namespace

void Differences(const std::function<at::Tensor(const Tensors&)>& f, const Tensors& x,
                 double tolerance, const std::string& where, const std::vector<std::string>& names,
                 Meter& meter) {
  const Tensors leaves = Leaves(x);
  const Tensors g = Gradients(f(leaves), leaves);
  at::NoGradGuard guard;
  for (size_t i = 0; i < x.size(); ++i) {
    const at::Tensor direction = at::randn_like(x[i]).masked_fill(x[i].isinf(), 0.0);
    Tensors moved = x;
    const double distance = Distance(g[i] * direction, tolerance, [&](double step) {
      moved[i] = x[i] + step * direction;
      return f(moved).item<double>();
    });
    meter.Add(distance, tolerance, "gradient of ", names[i], ", ", where);
  }
}

namespace {

// The same for the mechanism's own parameters, which are moved in place and put back.
void ParameterDifferences(Mechanism& m, const std::function<at::Tensor()>& f, double tolerance,
                          const std::string& where, Meter& meter) {
  for (const auto& entry : m.named_parameters()) {
    at::Tensor p = entry.value();
    if (!p.requires_grad()) continue;
    const at::Tensor g = Gradients(f(), {p})[0];
    at::NoGradGuard guard;
    const at::Tensor before = p.clone(), direction = at::randn_like(p);
    const double distance = Distance(g * direction, tolerance, [&](double step) {
      p.copy_(before + step * direction);
      return f().item<double>();
    });
    p.copy_(before);
    meter.Add(distance, tolerance, "gradient of the parameter ", entry.key(), ", ", where);
  }
}

// The floating-point tensors of a state, and a copy of it with others in their places.
Tensors Floating(const State& state) {
  Tensors out;
  for (const NamedTensor& t : state.tensors) {
    if (t.value.defined() && t.value.is_floating_point()) out.push_back(t.value.detach().clone());
  }
  return out;
}
State WithFloating(const State& state, const Tensors& values) {
  State out = state;
  size_t i = 0;
  for (NamedTensor& t : out.tensors) {
    if (t.value.defined() && t.value.is_floating_point()) t.value = values[i++];
  }
  return out;
}

void StateDifferences(Subject& subject, double tolerance, Meter& meter) {
  Mechanism& m = subject.In(at::kDouble);
  const Tensors first = subject.Inputs(2, 9), next = subject.Inputs(2, 6);
  const at::Tensor g = subject.Weights(2, 6);
  State start = m.EmptyState(2, first[0].options());
  m.Extend(first, start, {});
  std::vector<std::string> names;
  for (const NamedTensor& t : start.tensors) {
    if (t.value.defined() && t.value.is_floating_point()) names.push_back("the state's " + t.name);
  }
  const State kept = start.Detach().Clone();
  auto loss = [&](const Tensors& values) {
    State state = WithFloating(kept.Clone(), values);
    const at::Tensor a = m.Extend(Narrow(next, 0, 4), state, {}),
                     b = m.Extend(Narrow(next, 4, 2), state, {});
    return (at::cat({a, b}, 2) * g).sum();
  };
  Tensors values = Floating(kept);
  // Functions that own what they are given: a state may be written in place while no gradient is
  // recorded.
  Differences(
      [&](const Tensors& v) {
        Tensors own;
        for (const at::Tensor& t : v) own.push_back(t.clone());
        return loss(own);
      },
      values, tolerance, "through the state", names, meter);
}

}  // namespace

Outcome CheckGradient(Subject& subject, const Settings& settings) {
  Meter meter;
  Mechanism& m = subject.In(at::kDouble);
  const double tolerance = kTolerance * std::max(1.0, subject.info().tolerance / 1e-6);
  const int64_t length = settings.full ? 70 : 13;
  const Tensors x = subject.Inputs(3, length);
  const at::Tensor g = subject.Weights(3, length);
  std::vector<std::string> names;
  for (const Projection& p : m.Projections()) names.push_back(p.name);
  const std::pair<std::string, ops::Mask> masks[] = {
      {"no mask", {}},
      {"padded", {LengthsOf({length, 5, 0}), {}}},
      {"packed",
       {LengthsOf({length, 9, 4}), StartsAt(3, length, {{0, 0}, {0, 5}, {1, 7}, {2, 2}})}}};
  for (const auto& [mask_name, mask] : masks) {
    for (const Form form : {Form::kBidirectional, Form::kCausal, Form::kCross}) {
      if (!settings.Has(form) || !subject.Has(form)) continue;
      if (mask.starts && (form == Form::kCross || subject.mechanism().SeesPadding())) continue;
      auto loss = [&, &mask = mask](const Tensors& y) {
        const at::Tensor out =
            form == Form::kCausal ? Pieces(m, y, {0, 6, length}, mask) : Whole(m, form, y, y, mask);
        return (out * g).sum();
      };
      const std::string where = FormName(form) + ", " + mask_name;
      Differences(loss, x, tolerance, where, names, meter);
      if (!mask.starts && !mask.lengths)
        ParameterDifferences(
            m, [&] { return loss(x); }, tolerance, where, meter);
    }
  }
  if (settings.Has(Form::kCausal) && subject.Has(Form::kCausal))
    StateDifferences(subject, tolerance, meter);
  return meter.result();
}

}  // namespace cistern::verify
