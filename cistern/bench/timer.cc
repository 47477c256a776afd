#include "cistern/bench/timer.h"

#include <algorithm>
#include <chrono>
#include <cmath>

namespace cistern::bench {
namespace {

using Clock = std::chrono::steady_clock;

// At a share of the sorted samples, linear between them.
double Quantile(const std::vector<double>& sorted, double share) {
  const double place = share * double(sorted.size() - 1);
  const size_t below = size_t(place), above = std::min(below + 1, sorted.size() - 1);
  return sorted[below] + (place - double(below)) * (sorted[above] - sorted[below]);
}

// Seconds a run.
double Sample(const Contestant& c, int64_t repeats) {
  if (c.before) c.before();
  const auto began = Clock::now();
  for (int64_t i = 0; i < repeats; ++i) c.run();
  return SecondsSince(began) / double(repeats);
}

}  // namespace

double SecondsSince(Clock::time_point began) {
  return std::chrono::duration<double>(Clock::now() - began).count();
}

Spread SpreadOf(std::vector<double> samples) {
  CISTERN_CHECK(!samples.empty(), "[bench] a spread of no samples");
  std::sort(samples.begin(), samples.end());
  return {Quantile(samples, 0.5), Quantile(samples, 0.25), Quantile(samples, 0.75),
          int64_t(samples.size())};
}

Json SpreadJson(const Spread& s) {
  return {{"median", s.median}, {"low", s.low}, {"high", s.high}, {"runs", s.runs}};
}

Spread ReadSpread(const Json& json) {
  Spread s;
  const auto number = [&](const char* key) {
    CISTERN_CHECK(json.is_object() && json.contains(key) && json[key].is_number(),
                  "a time lacks the number '", key, "': ", json.dump());
    return json[key].get<double>();
  };
  s.median = number("median"), s.low = number("low"), s.high = number("high");
  s.runs = int64_t(number("runs"));
  CISTERN_CHECK(std::isfinite(s.median) && s.median > 0 && s.low <= s.median && s.median <= s.high,
                "a time whose quartiles do not lie around its median: ", json.dump());
  return s;
}

std::vector<Spread> TimeAlternating(const std::vector<Contestant>& contestants,
                                    const TimerSettings& settings,
                                    const std::function<bool()>& stop) {
  const size_t count = contestants.size();
  std::vector<int64_t> repeats(count, 1);
  std::vector<std::vector<double>> samples(count);
  const auto stopped = [&] { return stop && stop(); };
  for (size_t i = 0; i < count && !stopped(); ++i) {
    Sample(contestants[i], 1);
    const double seconds = Sample(contestants[i], 1);
    if (seconds < settings.shortest)
      repeats[i] =
          std::min(contestants[i].most, int64_t(settings.shortest / std::max(seconds, 1e-9)) + 1);
  }
  const auto began = Clock::now();
  const double budget = settings.seconds * double(count);
  for (int64_t round = 0; round < settings.most && !stopped(); ++round) {
    if (round >= settings.runs && SecondsSince(began) >= budget) break;
    for (size_t i = 0; i < count && !stopped(); ++i) {
      const size_t which = round % 2 == 0 ? i : count - 1 - i;
      samples[which].push_back(1e3 * Sample(contestants[which], repeats[which]));
    }
  }
  std::vector<Spread> out;
  for (const auto& times : samples) out.push_back(times.empty() ? Spread{} : SpreadOf(times));
  return out;
}

}  // namespace cistern::bench
