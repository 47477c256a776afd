#pragma once
// What a model is made of: config.json of a model folder, the [model] table of an experiment file.
#include <string>
#include <vector>

#include "cistern/io/fields.h"
#include "cistern/nn/block.h"

namespace cistern {

inline constexpr int64_t kConfigVersion = 1;

struct ModelConfig {
  std::string kind = "decoder_lm";  // decoder_lm | encoder_classifier | encoder_decoder
  int64_t version = kConfigVersion;
  int64_t vocab_size = 0;  // set by the task
  int64_t classes = 0;     // encoder_classifier: set by the task
  int64_t dim = 128, layers = 2, heads = 4, ffn_dim = 0, max_length = 1024;
  std::vector<std::string> attention = {"latte"};  // one mechanism for all layers, or one per layer
  Json attention_options =
      Json::object();  // options of the mechanisms, by name: {"latte": {"latents": 64}}
  int64_t conv = 0;
  std::string norm = "pre", activation = "gelu", positions = "none", pooling = "mean",
              head = "relu";
  bool embedding_norm = false, final_norm = true, norm_pooled = false, tie_embeddings = true;
  std::vector<int64_t> tied_layers =
      {};  // the layer whose parameters each layer has, by number from 0; none: each has its own
  // encoder_decoder: `layers` and `attention` are the encoder's.
  int64_t decoder_layers = 0;                              // 0: as many as `layers`
  std::vector<std::string> decoder_attention = {};         // causal; none: as `attention`
  std::vector<std::string> cross_attention = {"softmax"};  // one mechanism or one per decoder layer
  int64_t target_vocab_size = 0;                           // 0: vocab_size
  bool share_embeddings = true;                            // of source and target
  bool bias = false, ffn_bias = false,
       head_bias = false;  // bias: all of them; Latte's paper has the other two alone
  double dropout = 0, attention_dropout = 0, ffn_dropout = 0, init_std = 0.02, embedding_std = 0,
         position_std = -1, norm_eps = 1e-5;

  Fields Describe();
  // Checks what single fields cannot: divisibility, mechanisms, options; UsageError names the key.
  // Call after reading.
  void Validate() const;
  double PositionStd() const { return position_std >= 0 ? position_std : EmbeddingStd(); }
  double EmbeddingStd() const { return embedding_std > 0 ? embedding_std : init_std; }
  // A stack of layers of one form: of an encoder_decoder the encoder (bidirectional), the decoder's
  // own (causal) or cross attention.
  const std::vector<std::string>& Attention(Form form) const;
  int64_t Layers(Form form) const;
  const std::string& Mechanism(int64_t layer, Form form = Form::kCausal) const;
  AttentionLayerOptions AttentionOptions(int64_t layer, Form form) const;
  BlockOptions Block(int64_t layer,
                     Form form) const;  // a causal one of an encoder_decoder has cross attention
  bool HandsOnMemory(int64_t layer) const;  // the mechanism of this bidirectional layer does
  int64_t TiedTo(int64_t layer) const {
    return tied_layers.empty() ? layer : tied_layers[size_t(layer)];
  }
  int64_t TargetVocabSize() const { return target_vocab_size > 0 ? target_vocab_size : vocab_size; }
  std::string Summary() const;  // "latte, 2 layers x 128, 4 heads"

 private:
  std::vector<Form> Forms() const;
  void ValidateStack(Form form) const;
  void ValidateMemory() const;
  void ValidateTies() const;
  const Json& OptionsOf(const std::string& mechanism) const;
  int64_t Copied(int64_t layer, Form form) const;  // AttentionDims::copied
};

ModelConfig ReadModelConfig(const Json& json, const std::string& where);

}  // namespace cistern
