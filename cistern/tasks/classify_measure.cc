// What a classifier is trained and measured by: losses, sums, metrics, predictions.
#include <ATen/ATen.h>

#include <algorithm>
#include <numeric>
#include <utility>

#include "cistern/base/error.h"
#include "cistern/models/heads.h"
#include "cistern/tasks/class_measure.h"
#include "cistern/tasks/classify_task.h"

namespace cistern {

at::Tensor ClassifyTask::Loss(Model& model, const Batch& batch, double label_smoothing) const {
  const at::Tensor logits = ClassifierLogits(model, batch);
  if (options_.regression) return NumberLoss(logits, batch["targets"], label_smoothing);
  if (options_.class_weights == ClassWeights::kNone)
    return NextTokenLoss(logits, batch["targets"], label_smoothing);
  return at::cross_entropy_loss(logits, batch["targets"], WeightOfClasses().to(logits.options()),
                                at::Reduction::Mean, -100, label_smoothing);
}

std::string ClassifyTask::WhyNoSmoothing(const Model& model) const {
  return options_.regression ? kNumbersAreNoClasses : Task::WhyNoSmoothing(model);
}

at::Tensor ClassifyTask::WeightOfClasses() const {
  std::vector<double> weights;
  const double total = std::accumulate(class_counts_.begin(), class_counts_.end(), 0.0);
  for (const double n : class_counts_) weights.push_back(total / (n * double(classes_.size())));
  return at::tensor(weights, at::kDouble);
}

double ClassifyTask::Terms(const Batch& batch) const {
  if (options_.regression || options_.class_weights == ClassWeights::kNone)
    return double(batch.rows);
  return WeightOfClasses().index_select(0, batch["targets"].cpu()).sum().item<double>();
}

Score ClassifyTask::Measure(Model& model, const Batch& batch) const {
  const at::Tensor logits = ClassifierLogits(model, batch);
  if (options_.regression) return MeasureNumbers(logits, batch["targets"], scale_);
  const int64_t majority =
      std::max_element(class_counts_.begin(), class_counts_.end()) - class_counts_.begin();
  return MeasureClasses(logits, batch["targets"], majority);
}

Json ClassifyTask::Metrics(const Score& score) const {
  return options_.regression ? NumberFigures(score) : ClassFigures(score, classes_);
}

std::vector<Json> ClassifyTask::Predict(Model& model, const Batch& batch) const {
  const at::Tensor logits = ClassifierLogits(model, batch), lines = batch["lines"].cpu();
  std::vector<Json> out;
  for (int64_t r = 0; r < batch.rows; ++r)
    out.push_back({{"line", lines.const_data_ptr<int64_t>()[r]}});
  return options_.regression ? PredictNumbers(logits, scale_, std::move(out))
                             : PredictClasses(logits, classes_, std::move(out));
}

}  // namespace cistern
