#include "cistern/tasks/number_measure.h"

#include <ATen/ATen.h>
#include <ATen/OpMathType.h>

#include <cmath>

#include "cistern/base/error.h"

namespace cistern {

NumberScale NumberScale::Of(const std::vector<double>& labels, const std::string& data) {
  double sum = 0, squares = 0;
  for (const double y : labels) sum += y;
  NumberScale scale;
  scale.mean = sum / double(labels.size());
  for (const double y : labels) squares += (y - scale.mean) * (y - scale.mean);
  scale.deviation = std::sqrt(squares / double(labels.size()));
  CISTERN_CHECK(std::isfinite(scale.mean) && std::isfinite(scale.deviation), data,
                ": the labels are too large for their mean and deviation; scale them");
  CISTERN_CHECK(scale.deviation > 0, data, ": all labels are ", scale.mean);
  return scale;
}

bool NumberScale::Good() const {
  return std::isfinite(mean) && std::isfinite(deviation) && deviation > 0;
}

at::Tensor NumberLoss(const at::Tensor& outputs, const at::Tensor& targets,
                      double label_smoothing) {
  if (label_smoothing > 0) FailUsage("train.label_smoothing ", kNumbersAreNoClasses);
  const auto wide = at::toOpMathType(outputs.scalar_type());  // of bfloat16: float
  return at::mse_loss(outputs.squeeze(1).to(wide), targets.to(wide));
}

Score MeasureNumbers(const at::Tensor& outputs, const at::Tensor& targets,
                     const NumberScale& scale) {
  Score score;
  score.Add("examples", double(targets.size(0)));
  const at::Tensor y = targets.to(at::kCPU, at::kDouble).contiguous(),
                   p = outputs.squeeze(1).to(at::kCPU, at::kDouble).contiguous();
  for (int64_t r = 0; r < y.size(0); ++r) {
    // About the mean of the training labels: squares of labels far from 0 would hold nothing of
    // their spread.
    const double wanted = scale.deviation * y.const_data_ptr<double>()[r],
                 error = scale.deviation * p.const_data_ptr<double>()[r] - wanted;
    CISTERN_CHECK(std::isfinite(error),
                  "the model's output for a row is not finite, so that it has no prediction");
    score.Add("squares", error * error);
    score.Add("absolute", std::abs(error));
    score.Add("labels", wanted);
    score.Add("label_squares", wanted * wanted);
  }
  return score;
}

Json NumberFigures(const Score& score) {
  const double n = score["examples"];
  const double mean = score["labels"] / n, squares = score["label_squares"],
               spread = squares - n * mean * mean;  // about their own mean
  return {{"rmse", std::sqrt(score["squares"] / n)},
          {"mae", score["absolute"] / n},
          // Of equal labels the difference is what rounding leaves.
          {"r2", spread > 1e-12 * squares ? 1 - score["squares"] / spread : std::nan("")},
          {"examples", int64_t(n)},
          {"mean_rmse", std::sqrt(squares / n)}};
}

std::vector<Json> PredictNumbers(const at::Tensor& outputs, const NumberScale& scale,
                                 std::vector<Json> rows) {
  const at::Tensor values = outputs.to(at::kCPU, at::kDouble).contiguous();
  for (size_t r = 0; r < rows.size(); ++r) {
    const double value = scale.mean + scale.deviation * values.const_data_ptr<double>()[r];
    CISTERN_CHECK(std::isfinite(value), "the model's value for the row at line ",
                  rows[r].value("line", int64_t{0}), " is not finite");
    rows[r]["value"] = value;
  }
  return rows;
}

Metric RmseMetric() {
  return {"rmse", "RMSE",
          "root of the mean squared error, in the label's unit (regression); lower is better",
          true};
}

}  // namespace cistern
