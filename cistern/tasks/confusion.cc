#include "cistern/tasks/confusion.h"

#include <cmath>
#include <numeric>

namespace cistern {
namespace {

// Rows (expected) and columns (predicted) summed.
struct Sums {
  std::vector<double> expected, predicted;
  double right = 0;
};

Sums SumsOf(const Confusion& c) {
  Sums s{std::vector<double>(size_t(c.classes)), std::vector<double>(size_t(c.classes))};
  for (int64_t i = 0; i < c.classes; ++i) {
    for (int64_t j = 0; j < c.classes; ++j) {
      const double n = c.counts[size_t(i * c.classes + j)];
      s.expected[size_t(i)] += n;
      s.predicted[size_t(j)] += n;
      if (i == j) s.right += n;
    }
  }
  return s;
}

}  // namespace

double Confusion::Total() const { return std::accumulate(counts.begin(), counts.end(), 0.0); }

double Confusion::Accuracy() const {
  const double n = Total();
  return n > 0 ? SumsOf(*this).right / n : std::nan("");
}

double Confusion::MacroF1() const {
  const Sums s = SumsOf(*this);
  double sum = 0;
  int64_t there = 0;
  for (int64_t i = 0; i < classes; ++i) {
    const double both = s.expected[size_t(i)] + s.predicted[size_t(i)];
    if (both == 0) continue;
    sum += 2 * counts[size_t(i * classes + i)] / both;
    ++there;
  }
  return there > 0 ? sum / double(there) : std::nan("");
}

double Confusion::Matthews() const {
  const Sums s = SumsOf(*this);
  const double n = Total();
  double products = 0, expected = 0, predicted = 0;
  for (int64_t i = 0; i < classes; ++i) {
    products += s.expected[size_t(i)] * s.predicted[size_t(i)];
    expected += s.expected[size_t(i)] * s.expected[size_t(i)];
    predicted += s.predicted[size_t(i)] * s.predicted[size_t(i)];
  }
  const double below = std::sqrt((n * n - expected) * (n * n - predicted));
  return below > 0 ? (s.right * n - products) / below : 0;
}

}  // namespace cistern
