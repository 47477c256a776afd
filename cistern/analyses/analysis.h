#pragma once
// An analysis: what can be said of a trained model from its inside, as sums over examples that
// merge, and figures made of the sums. Declared as mechanisms and tasks are: an AnalysisInfo, a
// pair of files and a line in analyses.def. From it follow the options, help, and which models fit.
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "cistern/analyses/captured_layers.h"
#include "cistern/analyses/figures.h"
#include "cistern/models/model.h"
#include "cistern/tasks/batch.h"

namespace cistern {

// What an analysis may ask about the model and where its rows come from.
struct AnalysisContext {
  std::shared_ptr<Model> model;  // in evaluation mode
  ModelConfig config;
  // The text of a token's id, for people; empty where tokens are no text.
  std::function<std::string(int64_t id)> token = nullptr;
  uint64_t seed = 1;
  std::string task = "";  // its kind: "lm", "image"
};

class Analysis {
 public:
  virtual ~Analysis() = default;
  // Adds a batch: its rows, and what each attention layer did with them in evaluation. Error where
  // the layers have no such figures. No gradient is recorded.
  virtual void Add(const Batch& batch, const std::vector<CapturedLayer>& layers) = 0;
  // Adds the sums of another of the same kind, options and model.
  virtual void Merge(const Analysis& other) = 0;
  virtual Figures Report() const = 0;  // Error where nothing was added that it needs
};

// One of several models that were looked at on the same data.
struct ComparedModel {
  std::string label;
  const Analysis* analysis;
  const ModelConfig* config;
  Json result;  // what its training ended in: metrics of the test, or of validation; else {}
};

struct AnalysisInfo {
  std::string name, title, summary;
  std::string needs;  // which models fit, in words: "layers with a memory: luna, conv_luna, ..."
  std::function<Fields()> options;  // with their defaults
  // Why the model of a config does not fit, and what does; empty: it fits.
  std::function<std::string(const ModelConfig& config)> refusal;
  // UsageError where the options do not fit the model.
  std::function<std::unique_ptr<Analysis>(const Json& options, const AnalysisContext& context)>
      make;
  // Whether a model that fits has something to show only beside another one, so that it is not
  // looked at unless it is asked for or several models are. Null: never.
  std::function<bool(const ModelConfig& config)> for_comparison = nullptr;
  // What is to be said of several models together, where there is something. Two or more of them.
  std::function<Figures(const std::vector<ComparedModel>& models)> compare = nullptr;
};

// All analyses, in the order of analyses.def.
const std::vector<const AnalysisInfo*>& Analyses();
const AnalysisInfo& FindAnalysis(const std::string& name);  // UsageError with the nearest name

// Fills in `options` and `make` of an info from A::Options, A::Describe(Options&) -> Fields and
// A(options, context).
template <class A>
void BindAnalysis(AnalysisInfo& info) {
  info.options = [] {
    static typename A::Options defaults;
    return A::Describe(defaults);
  };
  info.make = [name = info.name](const Json& json, const AnalysisContext& context) {
    typename A::Options options;
    A::Describe(options).Read(json, "options of " + name);
    return std::unique_ptr<Analysis>(std::make_unique<A>(options, context));
  };
}

// Why a model's rows cannot be looked at layer by layer: a two_tower runs its layers on two texts.
std::string RowsRefusal(const ModelConfig& config);

// One pass of a batch through the model, in evaluation and without gradients; what its attention
// layers did. The batch has what the model reads, and targets where it is no classifier.
std::vector<CapturedLayer> RunLayers(Model& model, const Batch& batch);

}  // namespace cistern
