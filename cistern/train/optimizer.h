#pragma once
// AdamW (Loshchilov & Hutter 2019) on torch's fused CPU update. Weight decay is decoupled and
// leaves vectors (norms, biases) alone.
#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

#include "cistern/attention/state.h"
#include "cistern/models/model.h"

namespace cistern {

struct AdamWOptions {
  double beta1 = 0.9, beta2 = 0.98, eps = 1e-8, weight_decay = 0.01;
};

class AdamW {
 public:
  AdamW(const Model& model, const AdamWOptions& options);
  // Clips the global gradient norm to `clip` (0: not), updates with rate lr, clears the gradients.
  // Returns the norm before clipping. A norm that is not finite changes nothing: the caller
  // decides.
  double Step(double lr, double clip);
  // The first parameter whose value, or whose gradient, is not finite; empty when all are.
  std::string FirstNonFinite(bool gradients) const;
  // The same of its moments.
  std::string FirstNonFiniteMoment() const;

  std::vector<NamedTensor> Save() const;
  void Load(const std::vector<NamedTensor>& tensors, const std::string& where);

 private:
  struct Group {
    double weight_decay;
    std::vector<at::Tensor> parameters, means, squares, steps;
  };
  AdamWOptions options_;
  std::vector<std::string> names_;
  std::vector<at::Tensor> parameters_;
  Group groups_[2];  // decayed matrices, undecayed vectors
  struct Place {
    int group;
    size_t index;
  };
  std::vector<Place> places_;  // of parameter i
};

}  // namespace cistern
