#pragma once
// Small models of every kind for the tests of this layer.
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "cistern/attention/testing_mechanisms.h"
#include "cistern/models/decoder_lm.h"
#include "cistern/models/encoder_classifier.h"

namespace cistern::testing {

inline ModelConfig SmallLm(std::vector<std::string> attention = {"latte", "softmax", "abc_mlp"}) {
  ModelConfig c;
  c.vocab_size = 23, c.dim = 12, c.heads = 2, c.max_length = 64;
  c.layers = attention.size() == 1 ? 2 : int64_t(attention.size());
  c.attention = std::move(attention);
  c.attention_options = Json{{"latte", {{"latents", 6}}}, {"abc_mlp", {{"slots", 3}}}};
  c.init_std = 0.5;
  return c;
}

// Models whose weights have the same shapes have the same weights.
template <class M>
std::shared_ptr<M> Make(const ModelConfig& config, at::ScalarType dtype = at::kDouble) {
  auto model = std::dynamic_pointer_cast<M>(MakeModel(config, 1));
  at::NoGradGuard guard;
  model->to(dtype);
  at::manual_seed(2);
  for (at::Tensor& p : model->parameters()) p.normal_(0, 0.4);
  model->eval();
  return model;
}

inline at::Tensor Ids(int64_t batch, int64_t length) {
  return at::randint(0, 23, {batch, length}, at::kLong);
}

// Mixed mechanisms, with convolution and learned positions; softmax alone with rotary ones.
inline std::vector<ModelConfig> Lms() {
  std::vector<ModelConfig> all = {SmallLm(), SmallLm(), SmallLm({"softmax"}), SmallLm({"latte"}),
                                  SmallLm({"latte", "softmax", "latte"})};
  all[1].conv = 3, all[1].positions = PositionKind::kLearned, all[1].norm = NormPlace::kPost,
  all[1].bias = true, all[1].tie_embeddings = false;
  all[2].positions = PositionKind::kRotary, all[2].final_norm = false;
  all[3].positions = PositionKind::kSinusoidal, all[3].conv = 4, all[3].head_bias = true;
  all[4].tied_layers = {0, 1, 0}, all[4].embedding_norm = true;
  return all;
}

// abc_mlp's control and Linformer's matrix, each for all layers of its mechanism; the second layer
// has another one.
inline ModelConfig TiedLm(bool tied) {
  ModelConfig c = SmallLm({"abc_mlp", "latte", "abc_mlp", "linformer", "linformer"});
  c.max_length = 20;
  c.attention_options =
      Json{{"abc_mlp", {{"slots", 3}, {"tied", tied}}},
           {"linformer", {{"slots", 5}, {"sharing", tied ? "layerwise" : "key_value"}}},
           {"latte", {{"latents", 6}}}};
  return c;
}

}  // namespace cistern::testing
