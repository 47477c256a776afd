#pragma once
// What a comparison says should be taken: which candidates no other one beats in everything (the
// Pareto front), and a recommendation in plain words with its reasons.
#include <string>
#include <vector>

namespace cistern {

// One thing that candidates are compared in. NaN: not known.
struct Criterion {
  std::string name;   // quality, speed, memory, state or decoding
  std::string label;  // of an axis: "training, tokens/s"
  bool lower_is_better = false;
  std::vector<double> values = {};  // of each candidate
};

struct Candidate {
  std::string name;
  bool bounded = true;  // its state does not grow with the text
};

// Which candidates no other beats: none is as good in all criteria and better in one. Those that
// lack a value are not on it.
std::vector<bool> ParetoFront(const std::vector<Criterion>& criteria);

struct Decision {
  std::string recommended;           // empty: there is no quality of any candidate
  std::vector<std::string> reasons;  // sentences
  std::vector<bool> front;           // by all criteria, of each candidate
};

// Of those whose quality is within `scatter` of the best (differences below it rank nothing; 0: not
// known, 2 % of the best value), one whose state does not grow if there is one, of these the
// fastest in training; speeds within 5 % count as equal, and the smaller state wins. The criterion
// `quality` has to be there. `state_at`: the tokens after which the state was measured.
Decision Decide(const std::vector<Candidate>& candidates, const std::vector<Criterion>& criteria,
                double scatter, int64_t state_at = 0);

}  // namespace cistern
