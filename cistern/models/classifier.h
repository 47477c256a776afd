#pragma once
// A model that gives each row of a batch a class, whatever its kind.
#include "cistern/models/heads.h"
#include "cistern/models/model.h"

namespace cistern {

class Classifier : public Model {
 public:
  using Model::Model;
  // The tensors that info().inputs names -> [B,classes].
  virtual at::Tensor Logits(const NamedTensors& inputs) = 0;
  // Which setting makes the amount of padding count; empty: none does.
  virtual std::string SeesPadding() const = 0;

 protected:
  // targets [B] int64.
  at::Tensor DoTrainingLoss(const NamedTensors& batch, double label_smoothing) override {
    return NextTokenLoss(Logits(batch), batch["targets"], label_smoothing);
  }
};

}  // namespace cistern
