#pragma once
// The suite for one trained model: the ways of a model that extends a state to run a text or a
// series, against each other; the ways of a model of whole rows to see an input.
#include <functional>
#include <string>
#include <vector>

#include "cistern/models/language_model.h"
#include "cistern/verify/outcome.h"

namespace cistern::verify {

struct ModelResult {
  std::string property, description;
  Outcome outcome;
};

// `model` in float and `twin`, the same weights in double; both in evaluation mode. tokens: at
// least 16 ids [T] or values [T,C], no more than the model takes. Tolerances follow the model: 16
// times what rounding its weights once more would change in its logits. `full` cuts the text at
// every point. `done` hears of each result and stops the run by returning false. source [S]: at
// least 8 tokens for a model that encodes one, undefined for any other.
std::vector<ModelResult> CheckModel(StatefulModel& model, StatefulModel& twin,
                                    const at::Tensor& tokens, bool full,
                                    const std::function<bool(const ModelResult&)>& done = nullptr,
                                    const at::Tensor& source = {});

// The same for a Classifier or a MaskedLm: ids [T] or values [T,C] are one input, which is looked
// at whole, cut short, next to others and next to padding.
std::vector<ModelResult> CheckRows(Model& model, Model& twin, const at::Tensor& input,
                                   const std::function<bool(const ModelResult&)>& done = nullptr);

// Why no row is what it is alone (RowsMeet).
inline constexpr char kRowsMeet[] = "its options let the rows of a batch change each other";
// For both. Error that names the weight, unless the model's answers are finite.
void RequireFinite(const Model& model, const at::Tensor& answers);
// `least`, and 16 times what a relative change of every weight by up to `unit` does to `before`,
// what `run` gave; at most a tenth.
double ToleranceOf(Model& twin, const std::function<at::Tensor()>& run, const at::Tensor& before,
                   double least, double unit);
struct ModelCheck {
  const char *property, *description;
  std::function<Outcome()> check;
};
// In order; throwing is failing.
std::vector<ModelResult> RunModelChecks(const std::vector<ModelCheck>& checks,
                                        const std::function<bool(const ModelResult&)>& done);

}  // namespace cistern::verify
