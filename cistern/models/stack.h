#pragma once
// A stack of layers of one form, fully resolved: the model's keys combined with those of the
// stack's own group, and the settings that follow for each layer.
#include <string>

#include "cistern/models/stack_options.h"
#include "cistern/nn/block.h"

namespace cistern {

struct ModelConfig;

class LayerStack {
 public:
  // Of a config whose kind has the form. The config must outlive it.
  LayerStack(const ModelConfig& config, Form form);

  Form form() const { return form_; }
  // All values are set; none refers to the model's keys.
  const StackOptions& options() const { return options_; }
  int64_t layers() const { return options_.layers; }
  int64_t dim() const { return options_.dim; }
  // Of the embeddings: dim, unless latents of that width read tokens of another.
  int64_t input_dim() const;
  int64_t ffn_dim() const { return options_.ffn_dim > 0 ? options_.ffn_dim : 4 * options_.dim; }
  const std::string& Mechanism(int64_t layer) const;
  // The options of the layer's mechanism; of head groups, those of each by name.
  Json Options(int64_t layer) const;
  AttentionLayerOptions Attention(int64_t layer) const;
  // Of the causal stack of a kind with cross attention: with that of the same layer.
  BlockOptions Block(int64_t layer) const;
  bool HandsOnMemory(int64_t layer) const;
  int64_t TiedTo(int64_t layer) const {
    return options_.tied_layers.empty() ? layer : options_.tied_layers[size_t(layer)];
  }
  // The layer has the mechanism, or a group of its heads does.
  bool Uses(int64_t layer, const std::string& mechanism) const;
  // Two layers have the same mechanism with the same options, so that what such layers share is
  // one.
  bool Alike(int64_t a, int64_t b) const;
  // UsageError that names the key.
  void Validate() const;

 private:
  std::string Key(const std::string& name, bool in_group) const;  // "decoder.attention"
  Json OptionsByMechanism(int64_t layer) const;
  int64_t Copied(int64_t layer) const;  // AttentionDims::copied
  PositionKind FittingPositions() const;
  void ValidateOptions() const;
  void ValidateScores() const;
  void ValidateMemory() const;
  void ValidateSourceMemory() const;
  void ValidateTies() const;

  const ModelConfig& config_;
  Form form_;
  bool crossed_;        // the blocks of this stack have cross attention besides their own
  int64_t source_dim_;  // cross: width of what it attends to
  StackOptions options_;
};

}  // namespace cistern
