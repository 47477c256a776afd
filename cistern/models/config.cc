#include "cistern/models/config.h"

#include <algorithm>
#include <cmath>

#include "cistern/attention/head_groups.h"
#include "cistern/base/error.h"
#include "cistern/nn/positions.h"

namespace cistern {

Fields ModelConfig::Describe() {
  Fields f;
  f.Add("kind", &kind, "what the model is", {"decoder_lm", "encoder_classifier"});
  f.Add("version", &version, "version of this file's format");
  f.Add("vocab_size", &vocab_size, "token ids; set by the task", {0, 1 << 24});
  f.Add("classes", &classes, "classes of a classifier; set by the task", {0, 1 << 20});
  f.Add("attention", &attention,
        "mechanism of all layers (cistern info lists them), one for each, or shares of the heads: softmax:2+latte:2");
  f.Add("attention_options", &attention_options, "options by mechanism, such as {\"latte\": {\"latents\": 64}}");
  f.Add("dim", &dim, "width of the model (D)", {1, 65536});
  f.Add("layers", &layers, "blocks", {1, 1024});
  f.Add("heads", &heads, "attention heads; dim must be divisible by it", {1, 1024});
  f.Add("ffn_dim", &ffn_dim, "width of the feed-forward; 0: 4 dim", {0, 1 << 20});
  f.Add("max_length", &max_length, "longest input of mechanisms and positions that have a fixed length", {1, 1 << 30});
  f.Add("conv", &conv, "taps of the causal convolution on the projections; 0: none", {0, 64});
  f.Add("norm", &norm, "layer norm before or after attention and feed-forward", {"pre", "post"});
  f.Add("final_norm", &final_norm, "a layer norm after the last block");
  f.Add("norm_eps", &norm_eps, "epsilon of the layer norms", {0.0, 1.0});
  f.Add("activation", &activation, "of the feed-forward", {"gelu", "gelu_tanh", "relu"});
  f.Add("positions", &positions, "position encoding", PositionKinds());
  f.Add("pooling", &pooling,
        "encoder_classifier: what the head sees: the mean of the tokens, a learned token put before them, the mean of the memory's slots",
        {"mean", "cls", "memory"});
  f.Add("norm_pooled", &norm_pooled, "encoder_classifier: the final norm comes after pooling, not before");
  f.Add("head", &head,
        "encoder_classifier: a hidden layer of ffn_dim with relu (Long Range Arena) or gelu (P000), or one linear map (Latte, UCU)",
        {"relu", "gelu", "linear"});
  f.Add("bias", &bias, "biases in all linear maps");
  f.Add("ffn_bias", &ffn_bias, "biases in the feed-forward, whatever `bias` says");
  f.Add("head_bias", &head_bias, "decoder_lm: a bias in the output layer, whatever `bias` says; needs tie_embeddings=false");
  f.Add("tie_embeddings", &tie_embeddings, "decoder_lm: the output layer shares the embedding matrix");
  f.Add("dropout", &dropout, "after attention, feed-forward and embedding", {0.0, 0.95});
  f.Add("attention_dropout", &attention_dropout, "on the attention probabilities", {0.0, 0.95});
  f.Add("init_std", &init_std, "standard deviation of the initial weights", {1e-6, 10.0});
  f.Add("embedding_std", &embedding_std, "the same of embeddings and learned positions; 0 takes init_std", {0.0, 10.0});
  f.Add("position_std", &position_std, "the same of learned positions, 0 as P000's code; -1 takes that of embeddings", {-1.0, 10.0});
  return f;
}

void ModelConfig::Validate() const {
  if (version != kConfigVersion) {
    FailUsage("config version ", version, " is not known to this build, which reads version ", kConfigVersion,
              version > kConfigVersion ? "; a newer cistern wrote it" : "");
  }
  if (dim % heads != 0) FailUsage("dim=", dim, " is not divisible by heads=", heads);
  if (head_bias && tie_embeddings && kind == "decoder_lm")
    FailUsage("head_bias=true needs tie_embeddings=false: a tied output layer has no bias");
  if (attention.empty() || (attention.size() != 1 && int64_t(attention.size()) != layers)) {
    FailUsage("attention lists ", attention.size(), " mechanisms for ", layers, " layers; give one for all or one for each");
  }
  if (!attention_options.is_object()) FailUsage("attention_options must be an object of options by mechanism");
  for (const auto& [name, options] : attention_options.items()) {
    if (!options.is_object()) FailUsage("attention_options.", name, " must be an object");
    const MechanismInfo& info = FindMechanism(name);
    const auto part = [&name](const std::string& a) { return InHeadGroups(a, name); };
    if (std::any_of(attention.begin(), attention.end(), part)) continue;  // for fewer heads: checked below
    info.make(options, {dim, heads, max_length, 0, attention_dropout});   // reads and checks them
  }
  std::string streamed;  // the mechanism that hands a memory from block to block
  for (int64_t layer = 0; layer < layers; ++layer) {
    if (!HandsOnMemory(layer)) continue;
    if (!streamed.empty() && streamed != Mechanism(layer)) {
      FailUsage("attention has both ", streamed, " and ", Mechanism(layer), ", but one memory goes from block to block; use one of them");
    }
    streamed = Mechanism(layer);
  }
  if (pooling == "memory" && kind == "encoder_classifier" && !HandsOnMemory(layers - 1)) {
    FailUsage("pooling=memory needs a last layer that hands on a memory, such as luna or conv_luna, not ", Mechanism(layers - 1),
              "; use pooling=mean");
  }
  for (int64_t layer = 0; layer < layers && pooling == "cls" && kind == "encoder_classifier"; ++layer) {
    if (FindMechanism(Mechanism(layer)).memory == MemoryUse::kLatents) {
      FailUsage("pooling=cls sees a token, but after ", Mechanism(layer), " there are latents alone; use pooling=mean");
    }
  }
  const double parameters = double(vocab_size) * double(dim) + double(layers) * 12.0 * double(dim) * double(dim);
  if (parameters > 1e11) FailUsage("the model would have about ", parameters, " parameters; check dim=", dim, " and layers=", layers);
  for (int64_t layer = 0; layer < layers; ++layer) {  // form, positions, convolution and sizes of every mechanism in use
    MakeMechanism(Block(layer, kind == "decoder_lm" ? Form::kCausal : Form::kBidirectional).attention);
    if (attention.size() == 1) break;
  }
}

bool ModelConfig::HandsOnMemory(int64_t layer) const { return FindMechanism(Mechanism(layer)).HandsOnMemory(); }

BlockOptions ModelConfig::Block(int64_t layer, Form form) const {
  BlockOptions b;
  b.attention.mechanism = Mechanism(layer);
  if (IsHeadGroups(b.attention.mechanism)) {
    b.attention.mechanism_options = attention_options;
  } else if (attention_options.contains(b.attention.mechanism)) {
    b.attention.mechanism_options = attention_options.at(b.attention.mechanism);
  }
  b.attention.dims = {dim, heads, max_length, layer, attention_dropout};
  b.attention.form = form;
  b.attention.positions = positions;
  b.attention.conv = conv;
  b.attention.bias = bias;
  b.attention.init_std = init_std;
  b.attention.out_std = init_std / std::sqrt(2.0 * double(layers));
  b.norm = norm;
  b.activation = activation;
  b.ffn_bias = bias || ffn_bias;
  b.ffn_dim = ffn_dim;
  b.dropout = dropout;
  b.norm_eps = norm_eps;
  // What reaches no later block and not the head is left out.
  const bool memory_pooled = kind == "encoder_classifier" && pooling == "memory";
  b.attention.tokens_out = layer + 1 < layers || !memory_pooled;
  b.memory_out = memory_pooled;
  for (int64_t later = layer + 1; later < layers; ++later) b.memory_out = b.memory_out || HandsOnMemory(later);
  return b;
}

std::string ModelConfig::Summary() const {
  std::string names;
  for (const std::string& a : attention) names += (names.empty() ? "" : "+") + a;
  return StrCat(names, ", ", layers, " layers x ", dim, ", ", heads, " heads", conv > 0 ? StrCat(", conv ", conv) : "");
}

ModelConfig ReadModelConfig(const Json& json, const std::string& where) {
  ModelConfig config;
  if (json.is_object() && json.contains("version") && json["version"].is_number_integer() && json["version"] != kConfigVersion) {
    config.version = json["version"].get<int64_t>();  // before unknown keys of another version confuse the message
    config.Validate();
  }
  config.Describe().Read(json, where);
  try {
    config.Validate();
  } catch (const UsageError& e) {
    FailUsage(where, ": ", e.what());
  }
  return config;
}

}  // namespace cistern
