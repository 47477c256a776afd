#include "cistern/tasks/self_task.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "cistern/base/error.h"
#include "cistern/models/masked_lm.h"
#include "cistern/tasks/lm_blocks.h"

namespace cistern {
namespace {

constexpr uint64_t kSelfMasks = 0x73656c66;  // xor of the seed: not the draws of the order of rows
constexpr uint64_t kSelfMeasured = 0x6d656173;  // seed of the masks that measurements share

}  // namespace

const EnumNames<SelfObjective>& SelfObjectives() {
  static const EnumNames<SelfObjective> names = {{SelfObjective::kNone, "none"},
                                                 {SelfObjective::kMasked, "masked"},
                                                 {SelfObjective::kCausal, "causal"}};
  return names;
}

SelfTask::SelfTask(const Task& task, SelfObjective objective, double mask_share, int64_t vocab)
    : task_(task), objective_(objective), vocab_(vocab), token_bytes_(size_t(vocab), 1) {
  shares_.chosen = mask_share;
  const Batch first = task.TrainBatch(1, 0, 1);
  if (!first.tensors.Has("ids") || first.tensors.Has("second_ids"))
    FailUsage(
        "pretraining predicts tokens of single rows, and the rows of this task are real values or "
        "pairs; take input=ids, or a task such as listops, classify, image or pathfinder");
  if (first.tensors.Has("positions"))
    FailUsage(
        "pretraining predicts every token of a row, and zero_is_padding leaves some of them out; "
        "take zero_is_padding=false");
  if (first["targets"].sizes() == first["ids"].sizes())
    FailUsage("this task predicts tokens already; pretraining is for tasks with labels");
}

Batch SelfTask::Asked(const Batch& batch, uint64_t seed, uint64_t stream) const {
  const at::Tensor& rows = batch["ids"];
  const at::Tensor lengths = batch.tensors.Has("lengths")
                                 ? batch["lengths"].to(at::kLong).contiguous()
                                 : at::full({rows.size(0)}, rows.size(1), at::kLong);
  const at::Tensor ids = rows.to(at::kLong).clone(at::MemoryFormat::Contiguous),
                   targets = at::full(rows.sizes(), -100, at::kLong);
  const int64_t count = ids.size(0), width = ids.size(1);
  std::vector<int64_t> places;
  for (int64_t r = 0; r < count; ++r) {
    const int64_t length = lengths.const_data_ptr<int64_t>()[r];
    int64_t* const id = ids.mutable_data_ptr<int64_t>() + r * width;
    int64_t* const target = targets.mutable_data_ptr<int64_t>() + r * width;
    if (objective_ == SelfObjective::kCausal) {
      std::copy(id + std::min<int64_t>(1, length), id + length, target);
      continue;
    }
    places.clear();
    for (int64_t t = 0; t < length; ++t) places.push_back(t);
    Random random(seed, stream + uint64_t(r));
    MaskTokens(shares_, vocab_, random, places, id, target);
  }
  Batch asked;
  asked.rows = batch.rows;
  asked.tokens = batch.tokens;
  asked.Add("ids", ids);
  asked.Add("targets", targets);
  asked.Add("lengths", lengths);
  asked.padded = batch.padded;
  if (!asked.padded.empty()) asked.padded.push_back({"targets", "lengths"});
  return asked;
}

Batch SelfTask::TrainBatch(uint64_t seed, int64_t step, int64_t rows) const {
  return Asked(task_.TrainBatch(seed, step, rows), seed ^ kSelfMasks, uint64_t(step * rows));
}

at::Tensor SelfTask::Loss(Model& model, const Batch& batch, double label_smoothing) const {
  return model.TrainingLoss(model.ReadOf(batch.tensors), label_smoothing);
}

double SelfTask::Terms(const Batch& batch) const {
  return double(batch["targets"].ne(-100).sum().item<int64_t>());
}

class SelfTask::Reader : public BatchReader {
 public:
  Reader(const SelfTask& task, std::unique_ptr<BatchReader> rows)
      : task_(task), rows_(std::move(rows)) {}
  std::optional<Batch> Next() override {
    const std::optional<Batch> batch = rows_->Next();
    if (!batch) return std::nullopt;
    const uint64_t stream = read_;
    read_ += uint64_t(batch->rows);
    return task_.Asked(*batch, kSelfMeasured, stream);
  }
  int64_t total() const override { return rows_->total(); }
  int64_t done() const override { return rows_->done(); }
  const char* unit() const override { return rows_->unit(); }

 private:
  const SelfTask& task_;
  std::unique_ptr<BatchReader> rows_;
  uint64_t read_ = 0;
};

std::unique_ptr<BatchReader> SelfTask::Read(Split split, const ReadOptions& options) const {
  return std::make_unique<Reader>(*this, task_.Read(split, options));
}

Score SelfTask::Measure(Model& model, const Batch& batch) const {
  const at::Tensor targets = batch["targets"].reshape({-1}), chosen = TargetPositions(targets);
  Score score;
  if (chosen.numel() == 0) return score;
  const auto add = [&](const at::Tensor& hidden, const auto& logits) {
    MeasureTokens(logits, hidden.reshape({-1, hidden.size(-1)}).index_select(0, chosen),
                  targets.index_select(0, chosen), token_bytes_, score);
  };
  if (objective_ == SelfObjective::kMasked) {
    MaskedLm& lm = dynamic_cast<MaskedLm&>(model);
    add(lm.Hidden(batch["ids"], MaskOf(batch.tensors)),
        [&](const at::Tensor& rows) { return lm.Logits(rows); });
  } else {
    LanguageModel& lm = dynamic_cast<LanguageModel&>(model);
    ModelState state = lm.EmptyState(batch.rows);
    add(lm.Hidden(batch["ids"], state, MaskOf(batch.tensors)),
        [&](const at::Tensor& rows) { return lm.Logits(rows); });
  }
  return score;
}

Json SelfTask::Metrics(const Score& score) const {
  const double tokens = score["tokens"];
  return {{"perplexity", std::exp(score["nats"] / tokens)},
          {"nats_per_token", score["nats"] / tokens},
          {"accuracy", 100 * score["correct"] / tokens},
          {"tokens", int64_t(tokens)}};
}

const Metric& SelfTask::metric() const {
  static const Metric perplexity = {"perplexity", "perplexity",
                                    "of the predicted tokens; lower is better", true};
  return perplexity;
}

}  // namespace cistern
