#pragma once
// The suite for one trained language model: its own ways to run a text against each other, on the user's text.
#include <functional>
#include <string>
#include <vector>

#include "cistern/models/decoder_lm.h"
#include "cistern/verify/outcome.h"

namespace cistern::verify {

struct ModelResult {
  std::string property, description;
  Outcome outcome;
};

// `model` in float and `twin`, the same weights in double; both in evaluation mode. ids [T]: at least 16 tokens of the text, no more than
// the model takes. Tolerances follow the model: 16 times what rounding its weights once more would change in its logits. `full` cuts the
// text at every point. `done` hears of each result and stops the run by returning false.
std::vector<ModelResult> CheckModel(DecoderLm& model, DecoderLm& twin, const at::Tensor& ids, bool full,
                                    const std::function<bool(const ModelResult&)>& done = nullptr);

}  // namespace cistern::verify
