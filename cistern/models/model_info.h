#pragma once
// What a kind of model is: its declaration, made in the kind's own files and listed in models.def.
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "cistern/attention/mechanism.h"
#include "cistern/io/fields.h"

namespace cistern {

class Model;
struct ModelConfig;

struct ModelInfo {
  std::string name, summary;
  // Its stacks of layers, each of one form: kBidirectional is the group `encoder` of config.json,
  // kCausal `decoder`, kCross `cross`, which belongs to the decoder's blocks.
  std::vector<Form> forms;
  // The tensors of a batch that Model::TrainingLoss reads besides "targets", by name; a name that
  // ends with "?" may be missing.
  std::vector<std::string> inputs;
  bool extends = false;          // a LanguageModel: it extends a state
  bool encodes = false;          // its state begins with a source (LanguageModel::Encode)
  bool classifies = false;       // a Classifier, whose head has `pooling` and `head`
  bool predicts_tokens = false;  // has an OutputLayer, of tie_embeddings, head_bias, scale_logits
  bool pad_row = false;          // row 0 of its embedding may stand for padding (InitOptions)
  std::function<Fields()> options;  // of its own, with their defaults; none: it has none
  // What only the kind knows: UsageError where the config does not fit. May be empty.
  std::function<void(const ModelConfig&)> check;
  // Numbers of its embeddings, positions and output layer: what it has besides its stacks.
  std::function<double(const ModelConfig&)> tables;
  std::function<std::shared_ptr<Model>(const ModelConfig&)> make;

  bool Has(Form form) const;
};

// All kinds, in the order of models.def.
const std::vector<const ModelInfo*>& Models();
std::vector<std::string> ModelKinds();
// UsageError with the nearest name.
const ModelInfo& FindModel(const std::string& kind);

}  // namespace cistern
