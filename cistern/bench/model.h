#pragma once
// `cistern bench model`: a whole model on made-up tokens: training steps, decoding, memory.
#include <memory>

#include "cistern/bench/record.h"
#include "cistern/models/classifier.h"
#include "cistern/models/language_model.h"
#include "cistern/train/optimizer.h"
#include "cistern/train/row_parts.h"

namespace cistern::bench {

struct ModelSettings {
  int64_t batch = 8, length = 256;  // of a training step
  int64_t target_length = 0;  // of an encoder_decoder, whose sources have `length`; 0: as long
  OptimizerOptions optimizer;
  double clip = 1;
  ThreadsTake parallel = ThreadsTake::kAuto;
  std::string dtype = "float32";  // bfloat16: linear maps in bfloat16, the rest in float32
  std::vector<int64_t> positions = {0,
                                    1024};  // tokens before, where decoding is measured; ascending
  int64_t decoded = 32;                     // tokens at each of them
  std::vector<int64_t> sequences = {
      256};  // batches that decode from the start, beside one sequence
  bool train = true, decode = true;
  TimerSettings timer;
  uint64_t seed = 1;
  std::function<bool()> stop;
};

// A training step: random tokens or values, all of them real; loss, gradients, clipping, update.
// UsageError for kinds of model that read something else, where lengths go beyond what the model
// has. The weights change.
class TrainingStep {
 public:
  TrainingStep(std::shared_ptr<Model> model, const ModelSettings& settings);
  void Run();
  // Of a step, as the tasks count them: of a source and its target, or two texts, both.
  int64_t tokens() const { return batch_.tokens; }
  int64_t parts() const { return parts_; }  // of the batch, which threads take (train/row_parts.h)

 private:
  std::shared_ptr<Model> model_;
  ModelSettings settings_;
  std::unique_ptr<Optimizer> optimizer_;
  Batch batch_;
  int64_t parts_ = 1, steps_ = 0;
};

// Inference: the logits of such rows, without gradients or dropout. UsageError for models that are
// no classifiers.
class Inference {
 public:
  Inference(std::shared_ptr<Model> model, const ModelSettings& settings);
  at::Tensor Run();
  int64_t tokens() const { return batch_.tokens; }

 private:
  std::shared_ptr<Classifier> model_;
  Batch batch_;
};

// Translation: random sources of `length` tokens are read, then target_length tokens of each are
// decoded, the likeliest one after the other. UsageError for models without a source.
class Translation {
 public:
  Translation(std::shared_ptr<Model> model, const ModelSettings& settings);
  at::Tensor Run();  // the tokens [batch,target_length]
  int64_t tokens() const { return source_.size(0) * length_; }

 private:
  std::shared_ptr<LanguageModel> model_;
  int64_t length_;
  at::Tensor source_;
};

// UsageError, with an estimate, where the memory that is free is too small for a training step of
// such a model. Before it is made.
void CheckStepMemory(const ModelConfig& config, const ModelSettings& settings);

// Rows "train" and, of language models that need no source, "decode" at each position: one token of
// one sequence and its logits; its state's bytes. Then the same of several sequences at once.
// "config" of what was measured is a hash of the model's settings that are not the defaults, and
// "parallel" what threads took of the batch.
// Shares are of what the weights take at least (DecodeLimits): of_memory to read them, of_peak to
// multiply by them. "faults_per_step" are pages that a training step asks the system for, a median.
std::vector<Row> MeasureModel(const std::shared_ptr<Model>& model, const ModelSettings& settings,
                              Json* peaks);  // Record::peaks

const std::vector<Column>& ModelColumns();

}  // namespace cistern::bench
