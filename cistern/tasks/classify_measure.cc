// What a classifier is trained and measured by: losses, sums, metrics, predictions.
#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "cistern/models/classifier.h"
#include "cistern/tasks/classify_task.h"
#include "cistern/tasks/confusion.h"

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
  Score score;
  score.Add("examples", double(batch.rows));
  if (options_.regression) {
    const at::Tensor y = batch["targets"].cpu(),
                     p = logits.squeeze(1).to(at::kCPU, at::kDouble).contiguous();
    for (int64_t r = 0; r < batch.rows; ++r) {
      const double wanted = mean_ + deviation_ * y.const_data_ptr<double>()[r],
                   error = mean_ + deviation_ * p.const_data_ptr<double>()[r] - wanted;
      score.Add("squares", error * error);
      score.Add("absolute", std::abs(error));
      score.Add("labels", wanted);
      score.Add("label_squares", wanted * wanted);
    }
    return score;
  }
  const int64_t classes = int64_t(classes_.size());
  const int64_t majority =
      std::max_element(class_counts_.begin(), class_counts_.end()) - class_counts_.begin();
  const at::Tensor nats =
      -at::log_softmax(logits.to(at::kDouble), 1).gather(1, batch["targets"].unsqueeze(1)).cpu();
  const at::Tensor targets = batch["targets"].cpu(), predicted = logits.argmax(1).cpu();
  for (int64_t r = 0; r < batch.rows; ++r) {
    const int64_t wanted = targets.const_data_ptr<int64_t>()[r];
    score.Add("nats", nats.const_data_ptr<double>()[r]);
    score.Add("confusion", wanted * classes + predicted.const_data_ptr<int64_t>()[r], 1);
    score.Add("majority", wanted == majority);
  }
  return score;
}

Json ClassifyTask::Metrics(const Score& score) const {
  const double n = score["examples"];
  if (options_.regression) {
    const double mean = score["labels"] / n,
                 spread = score["label_squares"] - n * mean * mean;  // about their own mean
    return {{"rmse", std::sqrt(score["squares"] / n)},
            {"mae", score["absolute"] / n},
            {"r2", spread > 0 ? 1 - score["squares"] / spread : std::nan("")},
            {"examples", int64_t(n)},
            {"mean_rmse", std::sqrt((score["label_squares"] - 2 * mean_ * score["labels"]) / n +
                                    mean_ * mean_)}};
  }
  Confusion confusion{int64_t(classes_.size()), {}};
  for (int64_t i = 0; i < confusion.classes * confusion.classes; ++i)
    confusion.counts.push_back(score.At("confusion", i));
  Json out = {{"accuracy", 100 * confusion.Accuracy()},
              {"macro_f1", 100 * confusion.MacroF1()},
              {"matthews", confusion.Matthews()},
              {"log_loss", score["nats"] / n},
              {"examples", int64_t(n)},
              {"majority", 100 * score["majority"] / n}};
  constexpr int64_t kShown = 20;
  if (confusion.classes <= kShown) {
    out["classes"] = classes_;
    for (int64_t i = 0; i < confusion.classes; ++i) {
      Json row = Json::array();
      for (int64_t j = 0; j < confusion.classes; ++j)
        row.push_back(int64_t(confusion.counts[size_t(i * confusion.classes + j)]));
      out["confusion"].push_back(std::move(row));
    }
  }
  return out;
}

std::vector<Json> ClassifyTask::Predict(Model& model, const Batch& batch) const {
  const at::Tensor logits = ClassLogits(model, batch).to(at::kDouble);
  const at::Tensor lines = batch["lines"].cpu(),
                   p = (options_.regression ? logits : at::softmax(logits, 1)).cpu().contiguous();
  std::vector<Json> out;
  for (int64_t r = 0; r < batch.rows; ++r) {
    const double* row = p.const_data_ptr<double>() + r * p.size(1);
    Json line = {{"line", lines.const_data_ptr<int64_t>()[r]}};
    if (options_.regression) {
      line["value"] = mean_ + deviation_ * row[0];
    } else {
      const int64_t best = std::max_element(row, row + p.size(1)) - row;
      line["label"] = classes_[size_t(best)];
      line["probability"] = row[best];
      for (size_t c = 0; c < classes_.size(); ++c) line["probabilities"][classes_[c]] = row[c];
    }
    out.push_back(std::move(line));
  }
  return out;
}

}  // namespace cistern
