#include "cistern/verify/outcome.h"

#include <ATen/ATen.h>

#include <cmath>
#include <limits>

namespace cistern::verify {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

}  // namespace

Outcome NotApplicable(const std::string& reason) {
  Outcome out;
  out.kind = Outcome::Kind::kNotApplicable;
  out.reason = reason;
  return out;
}

double RelativeRms(const at::Tensor& got, const at::Tensor& want) {
  if (!got.defined() || !want.defined() || got.sizes() != want.sizes()) return kInfinity;
  at::Tensor a = got.detach().to(at::kDouble), b = want.detach().to(at::kDouble);
  const at::Tensor infinite = b.isinf();
  if (infinite.any().item<bool>()) {
    if (!at::equal(a.masked_select(infinite), b.masked_select(infinite))) return kInfinity;
    a = a.masked_fill(infinite, 0.0), b = b.masked_fill(infinite, 0.0);
  }
  const double difference = (a - b).norm().item<double>();
  if (!std::isfinite(difference)) return kInfinity;
  if (difference == 0) return 0;
  const double size = b.norm().item<double>();
  return size > 0 ? difference / size : kInfinity;
}

double Meter::BitDifference(const at::Tensor& got, const at::Tensor& want) {
  if (at::equal(got, want)) return 0;
  const double difference = RelativeRms(got, want);
  return difference > 0 ? difference : std::numeric_limits<double>::min();
}

double Meter::Largest(const at::Tensor& x) {
  if (x.numel() == 0) return 0;
  const double largest = x.detach().abs().max().item<double>();
  return std::isnan(largest) ? kInfinity : largest;
}

bool Meter::Count(double error, double tolerance) {
  ++worst_.comparisons;
  if (std::isnan(error)) error = kInfinity;
  // What is not finite passes no tolerance, and nothing passes one that is not.
  const bool passes = std::isfinite(error) && std::isfinite(tolerance) && error <= tolerance;
  const bool measured = std::isfinite(tolerance) && tolerance > 0;
  const double badness = measured ? error / tolerance : passes ? 0 : kInfinity;
  if (badness <= badness_) return false;
  badness_ = badness;
  worst_.error = error;
  worst_.tolerance = tolerance;
  worst_.kind = passes ? Outcome::Kind::kPass : Outcome::Kind::kFail;
  return true;
}

}  // namespace cistern::verify
