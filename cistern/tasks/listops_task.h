#pragma once
// ListOps as a sequence classification task (spec 3.1): the published TSV files, or generated from
// a seed and cached as such.
#include <memory>

#include "cistern/data/listops.h"
#include "cistern/tasks/order.h"
#include "cistern/tasks/task.h"

namespace cistern {

class ListOpsTask : public Task {
 public:
  explicit ListOpsTask(const TaskOptions& options) : options_(options) {}
  void Prepare() override;
  void Complete(ModelConfig& config) const override;
  Batch TrainBatch(uint64_t seed, int64_t step, int64_t rows) const override;
  at::Tensor Loss(Model& model, const Batch& batch, double label_smoothing) const override;
  // accuracy in percent, loss in nats, and what it must beat: majority and root_operator (the first
  // token alone), in percent, and root_operator_loss, in nats.
  Json Evaluate(Model& model, Split split, const EvalOptions& options) const override;
  std::string metric() const override { return "accuracy"; }
  bool lower_is_better() const override { return false; }
  int64_t tokens_per_row() const override { return options_.length; }
  Json DataSummary() const override;
  void SaveAssets(const std::string&) const override {}

 private:
  const ListOpsSet& Set(Split split) const;
  Batch MakeBatch(const ListOpsSet& set, const std::vector<int64_t>& rows) const;

  TaskOptions options_;
  ListOpsSplits data_;
  std::unique_ptr<ShuffledOrder> order_;
  std::vector<std::string> notes_;
};

}  // namespace cistern
