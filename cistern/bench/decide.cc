#include "cistern/bench/decide.h"

#include <algorithm>
#include <cmath>

#include "cistern/base/error.h"
#include "cistern/base/format.h"

namespace cistern {
namespace {

constexpr double kEqualSpeed = 0.05, kUnknownScatter = 0.02;

// Whether a is as good as b in all criteria and better in one.
bool Beats(const std::vector<Criterion>& criteria, size_t a, size_t b) {
  bool better = false;
  for (const Criterion& c : criteria) {
    const double x = c.lower_is_better ? -c.values[a] : c.values[a],
                 y = c.lower_is_better ? -c.values[b] : c.values[b];
    if (!(x >= y)) return false;  // NaN too
    better = better || x > y;
  }
  return better;
}

const Criterion* Find(const std::vector<Criterion>& criteria, const std::string& name) {
  for (const Criterion& c : criteria) {
    if (c.name == name) return &c;
  }
  return nullptr;
}

// The row with the best value of a criterion among those for which `may` holds; -1: none.
template <class May>
int64_t BestOf(const Criterion& c, May&& may) {
  int64_t best = -1;
  for (size_t i = 0; i < c.values.size(); ++i) {
    if (std::isnan(c.values[i]) || !may(i)) continue;
    if (best < 0 || (c.lower_is_better ? c.values[i] < c.values[size_t(best)]
                                       : c.values[i] > c.values[size_t(best)]))
      best = int64_t(i);
  }
  return best;
}

std::string Said(const Criterion& c, double value) {
  if (c.name == "memory" || c.name == "state") return ByteCount(value);
  if (c.name == "speed") return Thousands(std::llround(value)) + " tokens/s";
  if (c.name == "decoding") return Fixed(value, 3) + " ms per token";
  return StrCat(Significant(value, 4), " ", c.label);
}

std::string Join(const std::vector<std::string>& names) {
  std::string out;
  for (size_t i = 0; i < names.size(); ++i)
    out += (i == 0 ? "" : i + 1 == names.size() ? " and " : ", ") + names[i];
  return out;
}

}  // namespace

std::vector<bool> ParetoFront(const std::vector<Criterion>& criteria) {
  if (criteria.empty()) return {};
  const size_t rows = criteria[0].values.size();
  std::vector<bool> front(rows, true);
  for (size_t i = 0; i < rows; ++i) {
    for (const Criterion& c : criteria) front[i] = front[i] && !std::isnan(c.values[i]);
    for (size_t j = 0; j < rows && front[i]; ++j) {
      if (Beats(criteria, j, i)) front[i] = false;
    }
  }
  return front;
}

Decision Decide(const std::vector<Candidate>& candidates, const std::vector<Criterion>& criteria,
                double known_scatter, int64_t state_at) {
  Decision decision;
  decision.front =
      criteria.empty() ? std::vector<bool>(candidates.size(), false) : ParetoFront(criteria);
  const Criterion* quality = Find(criteria, "quality");
  if (!quality) return decision;
  const auto any = [](size_t) { return true; };
  const int64_t best = BestOf(*quality, any);
  if (best < 0) return decision;
  const double best_value = quality->values[size_t(best)],
               scatter = known_scatter > 0 ? known_scatter : kUnknownScatter * std::abs(best_value);
  const auto near = [&](size_t i) { return std::abs(quality->values[i] - best_value) <= scatter; };
  bool bounded = false;
  for (size_t i = 0; i < candidates.size(); ++i)
    bounded = bounded || (near(i) && candidates[i].bounded);
  const auto fits = [&](size_t i) { return near(i) && (!bounded || candidates[i].bounded); };
  const Criterion *speed = Find(criteria, "speed"), *state = Find(criteria, "state");
  int64_t chosen = speed ? BestOf(*speed, fits) : -1;
  if (chosen < 0) chosen = best;
  if (speed && state) {
    const double fastest = speed->values[size_t(chosen)];
    const int64_t smaller = BestOf(*state, [&](size_t i) {
      return fits(i) && speed->values[i] >= (1 - kEqualSpeed) * fastest;
    });
    if (smaller >= 0) chosen = smaller;
  }
  const auto row = size_t(chosen);
  const std::string& name = candidates[row].name;
  decision.recommended = name;

  std::vector<std::string>& say = decision.reasons;
  if (chosen == best) {
    say.push_back(StrCat(name, " has the best quality of all: ", Said(*quality, best_value), "."));
  } else {
    say.push_back(StrCat(name, " reaches ", Said(*quality, quality->values[row]), "; the best, ",
                         candidates[size_t(best)].name, ", ", Significant(best_value, 4),
                         ", which is too near to tell apart (differences below ",
                         Significant(scatter, 2), ")."));
  }
  // Of classifiers, say, no state was measured.
  if (candidates[row].bounded && !state) {
    say.push_back("Its state is bounded: of those near the best, such mechanisms go first.");
  } else if (candidates[row].bounded) {
    std::string text = "Its state does not grow with the text";
    if (!std::isnan(state->values[row]))
      text += StrCat(": ", ByteCount(state->values[row]), " at any length");
    std::vector<std::string> growing;
    for (size_t i = 0; i < candidates.size(); ++i) {
      if (candidates[i].bounded || std::isnan(state->values[i])) continue;
      growing.push_back(StrCat(candidates[i].name, " has ", ByteCount(state->values[i]), " after ",
                               Thousands(state_at), " tokens"));
    }
    say.push_back(text + (growing.empty() ? "." : ", where " + Join(growing) + ", and grows."));
  } else {
    say.push_back(StrCat(state ? "Its state grows with the text: none" : "None",
                         " whose state is bounded comes near its quality here."));
  }
  if (speed) {
    const int64_t fastest = BestOf(*speed, any);
    const double its = speed->values[row];
    say.push_back(fastest == chosen ? StrCat("It trains fastest: ", Said(*speed, its), ".")
                                    : StrCat("It trains at ", Said(*speed, its), "; the fastest, ",
                                             candidates[size_t(fastest)].name, ", at ",
                                             Said(*speed, speed->values[size_t(fastest)]), "."));
  }
  // Who else may be right, for whom.
  for (const Criterion& criterion : criteria) {
    if (&criterion == quality && chosen == best) continue;
    const int64_t other = BestOf(criterion, any);
    if (other < 0 || other == chosen || !decision.front[size_t(other)]) continue;
    const char* matter = criterion.name == "quality"  ? "quality alone matters"
                         : criterion.name == "speed"  ? "training speed matters most"
                         : criterion.name == "memory" ? "the memory of training is short"
                         : criterion.name == "state"  ? "many texts are held at once"
                                                      : "time per generated token matters most";
    say.push_back(StrCat("Where ", matter, ": ", candidates[size_t(other)].name, ", ",
                         Said(criterion, criterion.values[size_t(other)]), " (quality ",
                         Significant(quality->values[size_t(other)], 4), ")."));
  }
  std::vector<std::string> beaten;  // of which all is known: others may be off the front unbeaten
  for (size_t i = 0; i < candidates.size(); ++i) {
    const bool known = std::none_of(criteria.begin(), criteria.end(),
                                    [&](const Criterion& c) { return std::isnan(c.values[i]); });
    if (known && !decision.front[i]) beaten.push_back(candidates[i].name);
  }
  if (!beaten.empty())
    say.push_back(StrCat("Not on the Pareto front: ", Join(beaten),
                         ". Another mechanism is at least as good in everything measured here."));
  return decision;
}

}  // namespace cistern
