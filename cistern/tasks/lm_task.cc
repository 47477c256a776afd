#include "cistern/tasks/lm_task.h"

#include <ATen/ATen.h>

#include <filesystem>
#include <utility>

#include "cistern/base/error.h"

namespace cistern {
const TaskInfo& lm_task() {
  static const TaskInfo info = [] {
    TaskInfo t;
    t.name = "lm";
    t.summary = "language modelling: the next token of any text, in bytes, BPE or words";
    t.models = {"decoder_lm"};
    t.metrics = {BitsPerByte(), Perplexity()};
    t.data = "text";
    t.claims = [](const std::string& path) {
      std::error_code ignored;
      return path.ends_with(".txt") || path.ends_with(".md") ||
             path.ends_with(".txt.gz") ||  // refused with the way to unpack it
             std::filesystem::exists(path + "/wiki.train.tokens", ignored);
    };
    // The rate suits a few minutes of training: for hours take less.
    t.defaults = {"model.dim=128",
                  "model.layers=2",
                  "model.heads=4",
                  "model.conv=4",
                  "model.init_std=0.0884",
                  "model.embedding_std=0.1",
                  "model.attention_options={\"abc_mlp\":{\"slots\":16}}",
                  "task.vocab_size=4096",
                  "task.length=512",
                  "model.positions=auto",
                  "train.batch=4",
                  "train.optimizer=muon",
                  "train.weight_decay=0.1",
                  "train.schedule=linear",
                  "train.lr=14e-3"};
    t.mechanisms = {"softmax", "latte", "abc_mlp", "window:2+latte:2", "window:2+gated_slots:2"};
    t.former = {"split=tail"};
    BindTask<LmTask>(t);
    return t;
  }();
  return info;
}

Fields LmTask::Describe(Options& o) {
  Fields f = TextTask::Describe(o);
  f.Add("context", &o.context,
        "in evaluation: how many tokens of a block of `length` stand before those that are "
        "measured; 480 of 512 measures 32 at a time (fairseq's --context-window; it takes "
        "length / (length - context) times as long)",
        {0, int64_t{1} << 30})
      .OmitWhen(0);
  return f;
}

LmTask::LmTask(const Options& options, const std::string& cache)
    : TextTask("lm", options, cache), context_(options.context) {
  if (context_ >= options.length)
    FailUsage("task.lm.context=", context_, " must be below length=", options.length,
              ", of which the rest is measured");
}

std::unique_ptr<BatchReader> LmTask::Blocks(const TokenText& text, const ReadOptions& o,
                                            std::shared_ptr<void> keep) const {
  TextBlocks blocks;
  blocks.length = o.length > 0 ? o.length : options().length;
  blocks.context = o.context >= 0 ? o.context : context_;
  blocks.rows = o.rows > 0 ? o.rows : 8;
  blocks.max_tokens = o.max_tokens;
  return ReadBlocks(text, blocks, std::move(keep));
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
  return model.TrainingLoss(model.ReadOf(batch.tensors), label_smoothing);
}

std::unique_ptr<BatchReader> LmTask::Read(Split split, const ReadOptions& o) const {
  return Blocks(Of(split), o);
}

std::unique_ptr<BatchReader> LmTask::ReadFile(const std::string& path, bool labelled,
                                              const ReadOptions& o) const {
  if (!labelled) {
    FailUsage(
        "a language model continues a text (cistern generate) or is measured on one (cistern "
        "eval MODEL TEXT); it has no predictions row by row");
  }
  const std::shared_ptr<TokenFile> file = Tokenize(path);
  return Blocks(Of(*file), o, file);
}

std::optional<TokenText> LmTask::Text(Split split) const { return Of(split); }

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
