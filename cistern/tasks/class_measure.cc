#include "cistern/tasks/class_measure.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "cistern/base/error.h"
#include "cistern/base/parallel.h"
#include "cistern/io/checked_json.h"
#include "cistern/models/classifier.h"
#include "cistern/tasks/confusion.h"
#include "cistern/tasks/row_groups.h"
#include "cistern/tensors/parallel_rows.h"

namespace cistern {

at::Tensor ClassifierLogits(Model& model, const Batch& batch) {
  Classifier& classifier = dynamic_cast<Classifier&>(model);
  const bool measured = !model.is_training() && !at::GradMode::is_enabled();
  if (!measured || batch.padded.empty() || !RowsStandAlone(model))
    return classifier.Logits(model.ReadOf(batch.tensors));
  const at::Tensor order = OrderByLength(batch);
  const Batch sorted = batch.InOrder(order);
  const std::vector<RowGroup> groups = GroupsByLength(sorted, NumThreads());
  std::vector<at::Tensor> logits(groups.size());
  const auto take = [&](int64_t i) {
    const RowGroup& g = groups[size_t(i)];
    const Batch rows = sorted.Rows(g.begin, g.end).WithoutPadding();
    logits[size_t(i)] = classifier.Logits(model.ReadOf(rows.tensors));
  };
  const auto count = int64_t(groups.size());
  if (count >= NumThreads()) {
    ForRows(count, take);
  } else {
    for (int64_t i = 0; i < count; ++i) take(i);
  }
  return at::cat(logits).index_select(0, at::argsort(order));
}

Score MeasureClasses(const at::Tensor& logits, const at::Tensor& targets, int64_t majority) {
  const int64_t rows = logits.size(0), classes = logits.size(1);
  const at::Tensor nats =
      -at::log_softmax(logits.to(at::kDouble), 1).gather(1, targets.unsqueeze(1)).cpu();
  const at::Tensor wanted = targets.cpu(), predicted = logits.argmax(1).cpu();
  Score score;
  score.Add("examples", double(rows));
  for (int64_t r = 0; r < rows; ++r) {
    const int64_t target = wanted.const_data_ptr<int64_t>()[r];
    CISTERN_CHECK(std::isfinite(nats.const_data_ptr<double>()[r]),
                  "the model's outputs for a row are not finite, so that it has no prediction");
    score.Add("nats", nats.const_data_ptr<double>()[r]);
    score.Add("confusion", target * classes + predicted.const_data_ptr<int64_t>()[r], 1);
    score.Add("majority", target == majority);
  }
  return score;
}

Json ClassFigures(const Score& score, const std::vector<std::string>& classes) {
  const double n = score["examples"];
  Confusion confusion{int64_t(classes.size()), {}};
  for (int64_t i = 0; i < confusion.classes * confusion.classes; ++i)
    confusion.counts.push_back(score.At("confusion", i));
  Json out = {{"accuracy", 100 * confusion.Accuracy()},
              {"macro_f1", 100 * confusion.MacroF1()},
              {"matthews", confusion.Matthews()},
              {"log_loss", score["nats"] / n},
              {"examples", int64_t(n)},
              {"majority", 100 * score["majority"] / n}};
  constexpr int64_t kShown = 20;
  if (confusion.classes > kShown) return out;
  out["classes"] = classes;
  for (int64_t i = 0; i < confusion.classes; ++i) {
    Json row = Json::array();
    for (int64_t j = 0; j < confusion.classes; ++j)
      row.push_back(int64_t(confusion.counts[size_t(i * confusion.classes + j)]));
    out["confusion"].push_back(std::move(row));
  }
  return out;
}

std::vector<Json> PredictClasses(const at::Tensor& logits, const std::vector<std::string>& classes,
                                 std::vector<Json> rows) {
  const at::Tensor p = at::softmax(logits.to(at::kDouble), 1).cpu().contiguous();
  for (size_t r = 0; r < rows.size(); ++r) {
    const double* row = p.const_data_ptr<double>() + int64_t(r) * p.size(1);
    const int64_t best = std::max_element(row, row + p.size(1)) - row;
    CISTERN_CHECK(std::isfinite(row[best]), "the model's outputs for the row at line ",
                  rows[r].value("line", int64_t{0}),
                  " are not finite, so that it has no prediction");
    rows[r]["label"] = classes[size_t(best)];
    rows[r]["probability"] = row[best];
    for (size_t c = 0; c < classes.size(); ++c) rows[r]["probabilities"][classes[c]] = row[c];
  }
  return rows;
}

at::Tensor ClassTask::Loss(Model& model, const Batch& batch, double label_smoothing) const {
  return model.TrainingLoss(model.ReadOf(batch.tensors), label_smoothing);
}

Score ClassTask::Measure(Model& model, const Batch& batch) const {
  const int64_t majority =
      std::max_element(class_counts_.begin(), class_counts_.end()) - class_counts_.begin();
  return MeasureClasses(ClassifierLogits(model, batch), batch["targets"], majority);
}

std::vector<Json> ClassTask::Predict(Model& model, const Batch& batch) const {
  const at::Tensor lines = batch["lines"].cpu();
  std::vector<Json> rows;
  for (int64_t r = 0; r < batch.rows; ++r)
    rows.push_back({{"line", lines.const_data_ptr<int64_t>()[r]}});
  return PredictClasses(ClassifierLogits(model, batch), classes_, std::move(rows));
}

void ClassTask::SetClasses(std::vector<std::string> names, std::vector<double> counts,
                           const std::string& data) {
  CISTERN_CHECK(names.size() == counts.size() && names.size() >= 2, data,
                ": at least two classes are needed, got ", names.size());
  for (size_t c = 0; c < names.size(); ++c)
    CISTERN_CHECK(IsUtf8(names[c]) && std::find(names.begin(), names.begin() + int64_t(c),
                                                names[c]) == names.begin() + int64_t(c),
                  data, ": the class name ", JsonLine(names[c]),
                  " is given twice, or is not valid UTF-8");
  for (size_t c = 0; c < names.size(); ++c)
    CISTERN_CHECK(counts[c] > 0, data, ": no training row has the class '", names[c], "'");
  classes_ = std::move(names);
  class_counts_ = std::move(counts);
}

void ClassTask::SaveClasses(const std::string& path, Json more) const {
  more["classes"] = classes_;
  more["class_counts"] = class_counts_;
  WriteCheckedJson(path, std::move(more));
}

Json ClassTask::LoadClasses(const std::string& path) {
  const Json json = ReadCheckedJson(path, "predictions may be others");
  try {
    classes_ = json.at("classes").get<std::vector<std::string>>();
    class_counts_ = json.at("class_counts").get<std::vector<double>>();
  } catch (const nlohmann::json::exception& e) {
    Fail(path, " is broken: ", e.what());
  }
  CISTERN_CHECK(classes_.size() >= 2 && class_counts_.size() == classes_.size(), path,
                " is broken: its parts do not fit each other");
  return json;
}

Json ClassTask::CountsByClass() const {
  Json counts = Json::object();
  for (size_t c = 0; c < classes_.size() && c < 100; ++c) counts[classes_[c]] = class_counts_[c];
  return counts;
}

std::vector<Metric> AccuracyMetric() {
  return {{"accuracy", "accuracy, %", "of the rows, in percent; higher is better"}};
}

}  // namespace cistern
