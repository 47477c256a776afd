#include "cistern/analyses/analysis.h"
#include "cistern/base/error.h"
#include "cistern/decode/eval_scope.h"
#include "cistern/models/classifier.h"
#include "cistern/models/language_model.h"
#include "cistern/models/token_predictor.h"

namespace cistern {

#define CISTERN_ANALYSIS(name) const AnalysisInfo& name##_analysis();
#include "cistern/analyses/analyses.def"
#undef CISTERN_ANALYSIS

const std::vector<const AnalysisInfo*>& Analyses() {
  static const std::vector<const AnalysisInfo*> all = {
#define CISTERN_ANALYSIS(name) &name##_analysis(),
#include "cistern/analyses/analyses.def"
#undef CISTERN_ANALYSIS
  };
  return all;
}

const AnalysisInfo& FindAnalysis(const std::string& name) {
  std::vector<std::string> names;
  for (const AnalysisInfo* info : Analyses()) {
    if (info->name == name) return *info;
    names.push_back(info->name);
  }
  throw UsageError(UnknownName("analysis", name, names) + " (cistern analyze --list)");
}

std::string RowsRefusal(const ModelConfig& config) {
  if (config.kind != "two_tower") return "";
  return "a two_tower runs its layers once for each of two texts, so that a row has no single "
         "attention; analyze an encoder_classifier of one text";
}

std::vector<CapturedLayer> RunLayers(Model& model, const Batch& batch) {
  const EvalScope scope(model);
  LayerCapture capture;
  if (auto* classifier = dynamic_cast<Classifier*>(&model)) {
    classifier->Logits(model.ReadOf(batch.tensors));
  } else if (auto* decoder = dynamic_cast<LanguageModel*>(&model)) {  // without its output layer
    decoder->HiddenOfRows(model.ReadOf(batch.tensors));
  } else if (auto* tokens = dynamic_cast<TokenPredictor*>(&model)) {  // a row may have no target
    tokens->Hidden(batch["ids"], MaskOf(batch.tensors));
  } else {
    model.TrainingLoss(model.ReadOf(batch.tensors));
  }
  return capture.Take();
}

}  // namespace cistern
