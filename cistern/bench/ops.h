#pragma once
// `cistern bench ops`: mechanisms over lengths, sizes, types, threads and SIMD targets.
#include <exception>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "cistern/bench/core.h"
#include "cistern/bench/record.h"

namespace cistern::bench {

// Every combination of the lists is a case. With one mechanism given, it is one set of its options.
struct Sweep {
  std::vector<std::pair<const MechanismInfo*, Json>> mechanisms;  // with their options
  std::vector<Way> ways = {Way::kCausal};
  std::vector<Pass> passes = {Pass::kForward, Pass::kBoth};
  std::vector<int64_t> lengths = {1024}, batches = {1}, heads = {8}, widths = {64}, threads;
  std::vector<at::ScalarType> dtypes = {at::kFloat};
  std::vector<std::string> isas;
  std::vector<ops::Impl> implementations = {ops::Impl::kKernel};
  std::vector<Layout> layouts = {Layout::kHeadsFirst};

  // Cases that take turns stand together. Decoding has the pass forward alone.
  std::vector<Case> Cases() const;
};

struct MeasureSettings {
  TimerSettings timer;
  bool memory = true;  // runs once more for the memory
  uint64_t seed = 1;
  std::function<bool()> stop;                                    // asked between samples
  std::function<void(const Case& next, int64_t done)> progress;  // before each case's preparation
};

// Peaks of the machine, each measured when it is first asked for.
class Peaks {
 public:
  double MultiplyAdds(const Case& c);  // GFLOP/s; bfloat16: those of float32
  double Bandwidth(const Case& c);     // GB/s
  Json Written() const;                // Record::peaks

 private:
  std::map<std::string, std::pair<Json, double>> known_;
};

// Why it threw, as the reason of a row that is skipped; rethrows what is no property of the row,
// and a UsageError where it is `alone`.
std::string ReasonOf(const std::exception_ptr& thrown, bool alone);

// Checks and times the cases; rows in their order. A case that cannot be run is skipped with the
// reason, and so is one whose values are wrong (Row::wrong): it has no time. A single case that
// cannot be run is a UsageError.
std::vector<Row> Measure(const std::vector<Case>& cases, const MeasureSettings& settings,
                         Peaks& peaks);

// "latte.latents=32,64" for the mechanisms of a sweep: each value is a set of options of its own; a
// value in brackets is a list. UsageError: the mechanism is not in the sweep, no such option.
void AddOptions(Sweep& sweep, const std::vector<std::string>& assignments);

const std::vector<Column>& OpsColumns();

}  // namespace cistern::bench
