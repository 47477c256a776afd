#pragma once
// How much each token of a text changes what a model makes of it: by the gradient with respect to
// the token's embedding, and by putting another token in its place.
#include <string>
#include <vector>

#include "cistern/models/model.h"

namespace cistern {

// Why it cannot be had of the models of a config, and what fits; empty: it can.
std::string InputGradientRefusal(const ModelConfig& config);

// What a model makes of one text, ids [1,T] int64 on the model's device without padding.
//   decoder_lm, masked_lm       [1,T,D]: hidden states, before the output layer
//   encoder_classifier          [1,1,classes]: logits
at::Tensor OutputsOf(Model& model, const at::Tensor& ids);

// |d y_t / d e_s| of the outputs y at `queries` (places in OutputsOf's second dimension) in the
// embeddings e of the tokens: the Frobenius norm of the Jacobian, [queries,T] double. Estimated
// from `probes` directions of +1 and -1 that depend on the seed (their mean square is exact);
// probes = 0: exactly, by all channels. A backward pass for each query and probe. The model's
// table of embeddings is replaced by the text's own while this runs.
at::Tensor InputGradients(Model& model, const at::Tensor& ids, const std::vector<int64_t>& queries,
                          int64_t probes, uint64_t seed);

// Total variation between the model's predictions with and without another token at place
// `changed`: [T] double of each output, or [1] of a classifier. The token is a function of the seed
// and the place.
at::Tensor PredictionChange(Model& model, const at::Tensor& ids, const at::Tensor& probabilities,
                            int64_t changed, uint64_t seed);
// What the model predicts: [T,V], or [1,classes].
at::Tensor Predictions(Model& model, const at::Tensor& ids);

}  // namespace cistern
