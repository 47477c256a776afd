#include "cistern/tasks/score.h"

#include <cmath>

#include "cistern/base/error.h"

namespace cistern {

void ExactSum::Add(double x) {
  if (!std::isfinite(x)) {
    special_ += x;
    return;
  }
  size_t kept = 0;
  for (double y : partials_) {
    if (std::abs(x) < std::abs(y)) std::swap(x, y);
    const double high = x + y, low = y - (high - x);  // high + low == x + y exactly
    if (low != 0) partials_[kept++] = low;
    x = high;
  }
  partials_.resize(kept);
  if (x != 0) partials_.push_back(x);
}

void ExactSum::Add(const ExactSum& other) {
  special_ += other.special_;
  for (const double p : std::vector<double>(other.partials_)) Add(p);
}

double ExactSum::Value() const {
  if (special_ != 0) return special_;  // NaN also compares unequal
  double sum = 0, low = 0;
  size_t i = partials_.size();
  while (i > 0 && low == 0) {
    const double y = partials_[--i], high = sum + y;
    low = y - (high - sum);
    sum = high;
  }
  // A remainder of exactly half a unit rounds by what lies below it.
  if (i > 0 && (low > 0) == (partials_[i - 1] > 0) && low != 0) {
    const double twice = 2 * low, rounded = sum + twice;
    if (rounded - sum == twice) sum = rounded;
  }
  return sum;
}

void Score::Merge(const Score& other) {
  for (const auto& [name, cells] : other.sums_) {
    for (const auto& [index, sum] : cells) sums_[name][index].Add(sum);
  }
}

double Score::At(const std::string& name, int64_t index) const {
  const auto cells = sums_.find(name);
  if (cells == sums_.end()) return 0;
  const auto cell = cells->second.find(index);
  return cell == cells->second.end() ? 0 : cell->second.Value();
}

Json Score::Write() const {
  Json out = Json::object();
  for (const auto& [name, cells] : sums_) {
    for (const auto& [index, sum] : cells) {
      Json parts = sum.partials();
      // JSON has no NaN and no infinity: words.
      if (!std::isfinite(sum.Value()))
        parts = std::isnan(sum.Value()) ? "nan" : sum.Value() > 0 ? "inf" : "-inf";
      out[name][std::to_string(index)] = std::move(parts);
    }
  }
  return out;
}

Score Score::Read(const Json& json) {
  Score score;
  try {
    for (const auto& [name, cells] : json.items()) {
      for (const auto& [index, parts] : cells.items()) {
        ExactSum& sum = score.sums_[name][std::stoll(index)];
        if (parts.is_string()) {
          sum.Add(std::stod(parts.get<std::string>()));
          continue;
        }
        for (const Json& p : parts) sum.Add(p.get<double>());
      }
    }
  } catch (const std::exception& e) {
    Fail("[score] not the sums of a measurement: ", e.what());
  }
  return score;
}

}  // namespace cistern
