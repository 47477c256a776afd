// What a classifier is trained and measured by: losses, sums, metrics, predictions.
#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>

#include "cistern/base/error.h"
#include "cistern/models/classifier.h"
#include "cistern/tasks/class_measure.h"
#include "cistern/tasks/classify_task.h"

namespace cistern {
namespace {

at::Tensor ClassLogits(Model& model, const Batch& batch) {
  return dynamic_cast<Classifier&>(model).Logits(batch.tensors);
}

}  // namespace

at::Tensor ClassifyTask::Loss(Model& model, const Batch& batch, double label_smoothing) const {
  const at::Tensor logits = ClassLogits(model, batch);
  if (options_.regression)
    return at::mse_loss(logits.squeeze(1), batch["targets"].to(logits.scalar_type()));
  if (options_.class_weights == ClassWeights::kNone)
    return NextTokenLoss(logits, batch["targets"], label_smoothing);
  return at::cross_entropy_loss(logits, batch["targets"], WeightOfClasses().to(logits.options()),
                                at::Reduction::Mean, -100, label_smoothing);
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
  const at::Tensor logits = ClassLogits(model, batch);
  if (options_.regression) {
    Score score;
    score.Add("examples", double(batch.rows));
    const at::Tensor y = batch["targets"].cpu(),
                     p = logits.squeeze(1).to(at::kCPU, at::kDouble).contiguous();
    for (int64_t r = 0; r < batch.rows; ++r) {
      // About the mean of the training labels: squares of labels far from 0 would hold nothing of
      // their spread.
      const double wanted = deviation_ * y.const_data_ptr<double>()[r],
                   error = deviation_ * p.const_data_ptr<double>()[r] - wanted;
      score.Add("squares", error * error);
      score.Add("absolute", std::abs(error));
      score.Add("labels", wanted);
      score.Add("label_squares", wanted * wanted);
    }
    return score;
  }
  const int64_t majority =
      std::max_element(class_counts_.begin(), class_counts_.end()) - class_counts_.begin();
  return MeasureClasses(logits, batch["targets"], majority);
}

Json ClassifyTask::Metrics(const Score& score) const {
  if (options_.regression) {
    const double n = score["examples"];
    const double mean = score["labels"] / n,
                 spread = score["label_squares"] - n * mean * mean;  // about their own mean
    return {{"rmse", std::sqrt(score["squares"] / n)},
            {"mae", score["absolute"] / n},
            {"r2", spread > 0 ? 1 - score["squares"] / spread : std::nan("")},
            {"examples", int64_t(n)},
            {"mean_rmse", std::sqrt(score["label_squares"] / n)}};
  }
  return ClassFigures(score, classes_);
}

std::vector<Json> ClassifyTask::Predict(Model& model, const Batch& batch) const {
  const at::Tensor logits = ClassLogits(model, batch), lines = batch["lines"].cpu();
  std::vector<Json> out;
  for (int64_t r = 0; r < batch.rows; ++r)
    out.push_back({{"line", lines.const_data_ptr<int64_t>()[r]}});
  if (!options_.regression) return PredictClasses(logits, classes_, std::move(out));
  const at::Tensor values = logits.to(at::kDouble).cpu().contiguous();
  for (int64_t r = 0; r < batch.rows; ++r) {
    const double value = mean_ + deviation_ * values.const_data_ptr<double>()[r];
    CISTERN_CHECK(std::isfinite(value), "the model's value for the row at line ",
                  lines.const_data_ptr<int64_t>()[r], " is not finite");
    out[size_t(r)]["value"] = value;
  }
  return out;
}

}  // namespace cistern
