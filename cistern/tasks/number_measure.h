#pragma once
// What every task whose labels are numbers is trained and measured by. The model's output [B,1] is
// the label less the mean of the training labels, divided by their deviation.
#include <string>
#include <vector>

#include "cistern/tasks/score.h"
#include "cistern/tasks/task.h"

namespace cistern {

struct NumberScale {
  double mean = 0, deviation = 1;

  // Of the training labels; Error, naming the data, where they are all the same, or too large.
  static NumberScale Of(const std::vector<double>& labels, const std::string& data);
  // Of the saved mean and deviation; false where they cannot be those of labels.
  bool Good() const;
  double Scaled(double label) const { return (label - mean) / deviation; }
};

inline constexpr const char* kNumbersAreNoClasses = "is for classes; these labels are numbers";

// targets [B] scaled. UsageError with label_smoothing.
at::Tensor NumberLoss(const at::Tensor& outputs, const at::Tensor& targets, double label_smoothing);
Score MeasureNumbers(const at::Tensor& outputs, const at::Tensor& targets,
                     const NumberScale& scale);
// In the labels' unit: rmse, mae, r2 (of the rows' own mean), examples, mean_rmse (of always giving
// the training labels' mean).
Json NumberFigures(const Score& score);
// `value` of each row, behind what `rows` says of it.
std::vector<Json> PredictNumbers(const at::Tensor& outputs, const NumberScale& scale,
                                 std::vector<Json> rows);
Metric RmseMetric();

}  // namespace cistern
