#pragma once
// An exponential moving average of the weights (Polyak averaging): after each update
//   a = decay a + (1 - decay) w,   a = w at the beginning,
// with which a model is evaluated and saved while training goes on with w.
#include <string>
#include <vector>

#include "cistern/models/model.h"

namespace cistern {

class WeightAverage {
 public:
  // decay 0: there is none; Update, Save and Use do nothing.
  WeightAverage(const Model& model, double decay);
  WeightAverage(const WeightAverage&) = delete;
  WeightAverage& operator=(const WeightAverage&) = delete;

  void Update();
  // "average.layers.0...", of checkpoints. Load: an Error where one is missing or does not fit.
  std::vector<NamedTensor> Save() const;
  void Load(const std::vector<NamedTensor>& tensors, const std::string& where);
  std::string FirstNonFinite() const;  // empty: all are finite

  // The model has the averages while it lives, and then its own weights again, bit for bit.
  class Use {
   public:
    explicit Use(const WeightAverage& average);
    ~Use();
    Use(const Use&) = delete;
    Use& operator=(const Use&) = delete;

   private:
    const WeightAverage& average_;
    std::vector<at::Tensor> own_;
  };

 private:
  double decay_;
  std::vector<std::string> names_;
  std::vector<at::Tensor> parameters_, averages_;
};

}  // namespace cistern
