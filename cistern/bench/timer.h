#pragma once
// Times of alternating runs: the contestants take turns, so that a change of the machine's speed or
// load meets all of them.
#include <chrono>
#include <cstdint>
#include <functional>
#include <vector>

#include "cistern/io/fields.h"

namespace cistern::bench {

double SecondsSince(std::chrono::steady_clock::time_point began);

// Of the samples of one contestant: the median, and the quartiles as its spread.
struct Spread {
  double median = 0, low = 0, high = 0;
  int64_t runs = 0;
  double Relative() const { return median > 0 ? (high - low) / median : 0; }
};
Spread SpreadOf(std::vector<double> samples);  // Error without samples
Json SpreadJson(const Spread& spread);
Spread ReadSpread(const Json& json);  // Error where it is none

struct Contestant {
  std::function<void()> run;               // what is timed
  std::function<void()> before = nullptr;  // ahead of each sample, not timed; may be empty
  int64_t most = 100'000;                  // runs within a sample
};

struct TimerSettings {
  double seconds = 0.5;     // of samples, for each contestant
  int64_t runs = 5;         // samples of each at least
  int64_t most = 1000;      // and at most
  double shortest = 0.001;  // seconds of a sample: shorter work is repeated within it
};

// Milliseconds a run. Each first runs twice: to make memory and kernels ready, and to see how often
// it is repeated in a sample. Then rounds, every second one in reverse order, until the time is
// over. `stop` is asked between samples; what was measured until then is the result, which has
// fewer runs, or none.
std::vector<Spread> TimeAlternating(const std::vector<Contestant>& contestants,
                                    const TimerSettings& settings,
                                    const std::function<bool()>& stop = nullptr);

}  // namespace cistern::bench
