#pragma once
// What a measurement adds up: sums by name, from which a task makes its metrics. Sums are exact, so
// that they are the same however the rows were shared out over batches, files and processes.
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "cistern/io/fields.h"

namespace cistern {

// The sum of doubles without rounding (Shewchuk 1997: partial sums that do not overlap), rounded
// once when it is read. Add: O(number of partial sums), a few. A NaN or an infinity stays one.
class ExactSum {
 public:
  void Add(double x);
  void Add(const ExactSum& other);
  double Value() const;
  const std::vector<double>& partials() const { return partials_; }

 private:
  std::vector<double> partials_;  // ascending in magnitude, not overlapping
  double special_ = 0;            // the sum of what is not finite, once there is such
};

class Score {
 public:
  void Add(const std::string& name, double value) { Add(name, 0, value); }
  // Cell `index` of a table of sums, such as a confusion matrix.
  void Add(const std::string& name, int64_t index, double value) { sums_[name][index].Add(value); }
  // A sum that was made apart, which looks up no name for each of its values.
  void Add(const std::string& name, int64_t index, const ExactSum& sum) {
    sums_[name][index].Add(sum);
  }
  void Merge(const Score& other);
  // 0 where nothing was added.
  double operator[](const std::string& name) const { return At(name, 0); }
  double At(const std::string& name, int64_t index) const;
  bool Has(const std::string& name) const { return sums_.contains(name); }

  // {"nats": {"0": [partial sums]}, ...} and back: the same sums. Error on anything else.
  Json Write() const;
  static Score Read(const Json& json);

 private:
  std::map<std::string, std::map<int64_t, ExactSum>> sums_;
};

}  // namespace cistern
