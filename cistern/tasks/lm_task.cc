#include "cistern/tasks/lm_task.h"

#include <ATen/ATen.h>

#include "cistern/base/error.h"

namespace cistern {
const TaskInfo& lm_task() {
  static const TaskInfo info = [] {
    TaskInfo t;
    t.name = "lm";
    t.summary = "language modelling: the next token of any text, in bytes or byte-level BPE";
    t.models = {"decoder_lm"};
    t.metrics = {BitsPerByte()};
    t.data = "text";
    t.claims = [](const std::string& path) {
      return path.ends_with(".txt") || path.ends_with(".txt.gz") || path.ends_with(".md");
    };
    // The rate suits a few minutes of training: for hours take less.
    t.defaults = {"model.dim=128",
                  "model.layers=2",
                  "model.heads=4",
                  "model.conv=4",
                  "model.init_std=0.0884",
                  "model.embedding_std=0.1",
                  "model.attention_options={\"abc_mlp\":{\"slots\":16}}",
                  "task.length=256",
                  "train.batch=8",
                  "train.lr=12e-3"};
    t.mechanisms = {"softmax", "latte", "abc_mlp", "window:2+latte:2"};
    t.former = {"split=tail"};
    BindTask<LmTask>(t);
    return t;
  }();
  return info;
}

Batch LmTask::TrainBatch(uint64_t seed, int64_t step, int64_t rows) const {
  const at::Tensor blocks = TrainBlocks(seed, step, rows);
  const int64_t length = options().length;
  Batch batch;
  batch.Add("ids", blocks.narrow(1, 0, length));
  batch.Add("targets", blocks.narrow(1, 1, length));
  batch.rows = rows;
  batch.tokens = rows * length;
  return batch;
}

at::Tensor LmTask::Loss(Model& model, const Batch& batch, double label_smoothing) const {
  return model.TrainingLoss(batch.tensors, label_smoothing);
}

std::unique_ptr<BatchReader> LmTask::Read(Split split, const ReadOptions& o) const {
  return ReadBlocks(Of(tokens(split)), o.length > 0 ? o.length : options().length,
                    o.rows > 0 ? o.rows : 8, o.max_tokens);
}

std::unique_ptr<BatchReader> LmTask::ReadFile(const std::string& path, bool labelled,
                                              const ReadOptions& o) const {
  if (!labelled) {
    FailUsage(
        "a language model continues a text (cistern generate) or is measured on one (cistern "
        "eval MODEL TEXT); it has no predictions row by row");
  }
  const std::shared_ptr<TokenFile> file = Tokenize(path);
  return ReadBlocks(Of(*file), o.length > 0 ? o.length : options().length, o.rows > 0 ? o.rows : 8,
                    o.max_tokens, file);
}

std::optional<TokenText> LmTask::Text(Split split) const { return Of(tokens(split)); }

std::optional<TokenText> LmTask::Text(const std::string& path) const {
  const std::shared_ptr<TokenFile> file = Tokenize(path);
  TokenText text = Of(*file);
  text.read = [file](int64_t begin, int64_t count, int64_t* out) { file->Copy(begin, count, out); };
  return text;
}

Score LmTask::Measure(Model& model, const Batch& batch) const {
  return MeasureBlocks(dynamic_cast<LanguageModel&>(model), batch, token_bytes());
}

}  // namespace cistern
