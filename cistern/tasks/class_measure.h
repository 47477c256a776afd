#pragma once
// What every task of classes is measured by: sums of a batch, the figures that they give, and what
// a model says of each row.
#include <string>
#include <vector>

#include "cistern/tasks/score.h"
#include "cistern/tasks/task.h"

namespace cistern {

// The logits [B,C] of a classifier. In evaluation, without gradients, rows that stand alone go in
// groups of about one length (tasks/row_groups.h), so that little is computed of padding, several
// groups at once.
at::Tensor ClassifierLogits(Model& model, const Batch& batch);

// The sums of logits [B,C] and targets [B] int64: examples, nats, the confusion matrix, and how
// often `majority` was right, the class that the training data have most of.
Score MeasureClasses(const at::Tensor& logits, const at::Tensor& targets, int64_t majority);
// accuracy, macro_f1, matthews, log_loss, examples, majority (in percent but for matthews and
// log_loss); of up to 20 classes their names and confusion[expected][predicted].
Json ClassFigures(const Score& score, const std::vector<std::string>& classes);
// label, probability, probabilities by class of each row of logits, which go behind what `rows`
// says of it.
std::vector<Json> PredictClasses(const at::Tensor& logits, const std::vector<std::string>& classes,
                                 std::vector<Json> rows);

// A task of classes that a Classifier learns by the mean cross-entropy of its rows.
class ClassTask : public Task {
 public:
  at::Tensor Loss(Model& model, const Batch& batch, double label_smoothing) const override;
  Score Measure(Model& model, const Batch& batch) const override;
  Json Metrics(const Score& score) const override { return ClassFigures(score, classes_); }
  // line: the row's number, from 1 ("lines" of the batch), then as PredictClasses.
  std::vector<Json> Predict(Model& model, const Batch& batch) const override;

 protected:
  // The classes' names and how many training rows each has; Error where one has none.
  void SetClasses(std::vector<std::string> names, std::vector<double> counts,
                  const std::string& data);
  // As JSON, in a file of the model folder, with what else a task keeps there.
  void SaveClasses(const std::string& path, Json more = Json::object()) const;
  Json LoadClasses(const std::string& path);
  Json CountsByClass() const;

  std::vector<std::string> classes_;
  std::vector<double> class_counts_;
};

// The metrics that MeasureClasses gives and a run can be decided by: accuracy alone.
std::vector<Metric> AccuracyMetric();

}  // namespace cistern
