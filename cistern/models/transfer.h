#pragma once
// Starts one model from the weights of another (train --from): those of the same name and shape
// are taken; what does not fit is refused unless the caller allows it to start from scratch.
#include <cstdint>
#include <string>
#include <vector>

#include "cistern/models/model.h"

namespace cistern {

struct TransferOptions {
  bool new_head = false;  // initialize what follows the trunk from scratch, even if it would fit
  bool swap_attention = false;  // mechanisms may differ; of their weights, those that fit are taken
  // The folder's vocabulary is the model's and more ids behind it, whose rows are left.
  bool first_ids = false;
};

struct TransferReport {
  std::vector<std::string> taken, fresh, left;  // left: tensors of the folder that have no place
  int64_t numbers_taken = 0, numbers = 0;       // of the model's weights
  std::vector<std::string> notes;  // settings that fit, but are others than the folder's

  std::string Summary() const;  // "12 tensors taken (93 % of the weights); new: ...; left: ..."
};

// Into `model`, from a model folder of any kind. UsageError, before anything is changed, that names
// the tensor or the layer and what would make it fit; Error where the folder cannot be read.
TransferReport TakeWeights(Model& model, const std::string& folder, const TransferOptions& options);

// The settings of a folder's model that another one begins with: sizes, mechanisms, norms,
// positions; not what the task sets; those of heads, poolings and output layers where both are of
// one kind. A model whose stack is of the other form takes the group of it; an encoder_decoder all
// groups of another; a convolution, which is causal, is left out where it would be refused.
Json StartingConfig(const std::string& folder, const std::string& kind);

}  // namespace cistern
