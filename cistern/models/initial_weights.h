#pragma once
// Initial weights by named schemes, one for each kind of weight: the group `init` of config.json.
// Each published model starts from its own distributions (spec 1.1, 1.2); without the group the
// modules keep what they drew themselves (init_std, embedding_std, position_std).
//
// A scheme is a word, some with a number: "normal(0.02)".
//   default              what the module drew
//   normal(s)            N(0, s^2); torch's embeddings: normal(1)
//   truncated_normal(s)  N(0, s^2) cut at two s, not rescaled: TensorFlow's, of BERT
//   width_normal         N(0, 1/D), D the last dimension: fairseq's and flax's embeddings
//   uniform(b)           U(-b, b)
//   torch                U(-b, b) with b = 1/sqrt(fan in): torch's Linear, its bias as well
//   xavier_uniform(g)    U(-b, b) with b = g sqrt(6 / (fan in + fan out)); xavier_uniform: g = 1
//   lecun_normal         flax's Dense: a normal cut at two deviations, scaled so that what is left
//                        has the deviation 1/sqrt(fan in)
//   zeros
// Fans are those of a linear map, W [out, in]; of another tensor those that torch takes of its
// shape (the second and the first dimension, times the rest): a CLS token [1,1,D] has D and D.
//
// What a mechanism's core owns (memory, latents, filters) has its own options (`init`).
#include <cstdint>
#include <string>

#include "cistern/io/fields.h"

namespace cistern {

struct ModelConfig;
class Model;

struct InitOptions {
  // Weights of linear maps: all, and single kinds of them over that.
  std::string linear = "default", query_key = "", value = "", attention_out = "", ffn_up = "",
              ffn_down = "", head = "";
  // Their biases.
  std::string bias = "default", attention_out_bias = "", ffn_bias = "", head_bias = "";
  std::string embedding = "default", positions = "default", cls = "default";
  bool residual_scaling = true;  // of what is drawn by default
  // Deviations of the first weights and biases of a classifier's map of real values, over `linear`
  // and `bias`; 0: what these draw, by default torch's Linear and zeros.
  double values_std = 0, values_bias_std = 0;
  bool zero_pad_row = false;

  Fields Describe();
  int64_t pad_row() const { return zero_pad_row ? 0 : -1; }  // of at::embedding: has no gradient
  bool AnyNamed() const;                                     // a scheme other than the default
  // Each scheme is one, and what the config alone shows to be without effect is refused: UsageError
  // that names the key.
  void Check(const ModelConfig& config) const;
};

// Draws anew what has a named scheme, each parameter from (seed, its name) alone: so one scheme
// does not change what another draws, nor the order of parameters, nor the number of threads.
// UsageError where a scheme fits no parameter of the model, or not that kind of parameter.
// O(parameters).
void DrawInitialWeights(Model& model, uint64_t seed);

}  // namespace cistern
