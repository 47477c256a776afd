#pragma once
// A task = data + model head + loss + metric. Batches are a pure function of (seed, step), so
// training resumes exactly.
#include <ATen/core/Tensor.h>

#include <atomic>
#include <memory>
#include <string>

#include "cistern/io/fields.h"
#include "cistern/models/model.h"

namespace cistern {

struct Batch {
  at::Tensor ids, targets, lengths;  // lengths undefined: nothing is padded
  int64_t tokens = 0;                // real tokens, for rates
};

enum class Split { kTrain, kValid, kTest };

struct EvalOptions {
  int64_t max_tokens = 0;                          // 0: the whole split
  const std::atomic<bool>* interrupted = nullptr;  // stops early, with what is done so far
};

class Task {
 public:
  virtual ~Task() = default;
  // Reads or makes the data; slow the first time (progress bar), then cached.
  virtual void Prepare() = 0;
  // Sets what the data decides: kind, vocab_size, classes, max_length.
  virtual void Complete(ModelConfig& config) const = 0;
  virtual Batch TrainBatch(uint64_t seed, int64_t step, int64_t rows) const = 0;
  virtual at::Tensor Loss(Model& model, const Batch& batch, double label_smoothing) const = 0;
  // A flat object of named numbers, the metric among them.
  virtual Json Evaluate(Model& model, Split split, const EvalOptions& options) const = 0;
  virtual std::string metric() const = 0;  // its name in what Evaluate returns
  virtual bool lower_is_better() const = 0;
  virtual int64_t tokens_per_row() const = 0;  // longest row, for the memory estimate
  virtual Json DataSummary() const = 0;        // what was read: counts, hashes, notes
  virtual void SaveAssets(const std::string& folder) const = 0;  // tokenizer.json and the like
};

// The [task] table: kind and the options of that kind.
struct TaskOptions {
  std::string kind = "lm";        // lm | listops
  std::string text;               // lm: a file or folder
  std::string tokenizer = "bpe";  // lm: bpe | bytes
  int64_t vocab_size = 2048;      // lm with bpe
  int64_t length = 256;           // tokens of a training row; listops: longest row
  std::string cache = "";  // folder for tokens and generated data; empty: $XDG_CACHE_HOME/cistern
                           // or ~/.cache/cistern
  std::string data;        // listops: folder with the published TSV files; empty: generated
  bool group_by_length =
      false;  // listops: training batches of examples of about one length, with little padding
  int64_t data_seed = 1, train_examples = 96000, valid_examples = 2000,
          test_examples = 2000;  // listops, generated
  // What Complete will make of the model, known before the data is.
  std::string ModelKind() const { return kind == "listops" ? "encoder_classifier" : "decoder_lm"; }
  Fields Describe();
};

std::unique_ptr<Task> MakeTask(const TaskOptions& options);

}  // namespace cistern
