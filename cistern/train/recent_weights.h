#pragma once
// The weights of the last evaluations, as files of the run folder (recent-<step>.safetensors), and
// their mean: fairseq's averaging of the last checkpoints (P003's translation: five epochs).
#include <cstdint>
#include <string>
#include <vector>

#include "cistern/models/model.h"

namespace cistern {

class RecentWeights {
 public:
  // count 0: there are none; Save and Average do nothing.
  RecentWeights(std::string folder, int64_t count) : folder_(std::move(folder)), count_(count) {}
  // Writes the model's parameters, whole or not at all, and removes all but the newest `count`.
  void Save(const Model& model, int64_t step) const;
  // Removes those of steps after `step`: a run that goes on from there makes them again.
  void Forget(int64_t step) const;
  // Gives the model the mean of those there are, summed in double. Returns how many; 0: the model
  // is as it was.
  int64_t Average(Model& model) const;

 private:
  std::vector<int64_t> Steps() const;  // ascending
  std::string Path(int64_t step) const;

  std::string folder_;
  int64_t count_;
};

}  // namespace cistern
