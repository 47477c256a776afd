#pragma once
// The likeliest sequence after a state: greedy, or by beams (as fairseq's).
#include <atomic>
#include <cstdint>
#include <vector>

#include "cistern/models/language_model.h"

namespace cistern {

struct BeamOptions {
  int64_t beam = 1;            // hypotheses kept of each row; 1: greedy
  double length_penalty = 1;   // hypotheses compare by logprob / tokens^length_penalty
  int32_t start = 0, end = 0;  // ids: read first; ends a sequence
  std::vector<int64_t> most;   // tokens of each row, at least 1
  const std::atomic<bool>* interrupted = nullptr;  // ends early, with what there is

  void Validate() const;  // UsageError
};

struct Hypothesis {
  std::vector<int32_t> tokens;                // without start and end
  double logprob = 0;                         // of the tokens and the end, in nats
  bool ended = false;                         // false: cut at `most`
  double Score(double length_penalty) const;  // the end counts as a token
};

// Of each row of `state`, in which nothing but a source has been read, the best hypothesis found.
// A row ends when as many hypotheses as beams have ended: those that do while they are among the
// `beam` likeliest. Cut ones are taken where none has ended. The state's memory is used up: keep a
// Clone. Error where logits are not finite. O(tokens beam) steps of the model for each row.
std::vector<Hypothesis> BeamSearch(LanguageModel& model, ModelState state,
                                   const BeamOptions& options);

}  // namespace cistern
