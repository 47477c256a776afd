#pragma once
// What all models share: parameters by name, counting, saving and loading a model folder.
#include <torch/nn/module.h>

#include <memory>
#include <string>
#include <vector>

#include "cistern/models/config.h"
#include "cistern/nn/linear.h"

namespace cistern {

class Model : public torch::nn::Module {
 public:
  explicit Model(const ModelConfig& config) : config_(config) {}
  const ModelConfig& config() const { return config_; }
  int64_t ParameterCount() const;
  at::TensorOptions options() const;  // dtype and device of the parameters

 protected:
  ModelConfig config_;
};

// The blocks of a model, registered in `layers` as "0", "1", ...; what a mechanism ties across
// layers belongs to its first block. A layer tied to an earlier one (ModelConfig::tied_layers) is
// that block again, so its parameters are counted, saved and trained once.
std::vector<std::shared_ptr<Block>> AddBlocks(Container& layers, const ModelConfig& config,
                                              Form form);

std::shared_ptr<Model> MakeModel(const ModelConfig& config, uint64_t seed);

// A model folder: config.json and model.safetensors, both written atomically. Loading checks names,
// shapes and dtypes before anything is used; errors name the file and the tensor.
void SaveModel(const Model& model, const std::string& folder);
std::shared_ptr<Model> LoadModel(const std::string& folder);
// Weights alone, into an existing model.
void LoadWeights(Model& model, const std::string& path);

// Named tensors from and to safetensors files.
struct TensorFile {
  std::vector<NamedTensor> tensors;
  std::vector<std::pair<std::string, std::string>> metadata;
};
void SaveTensors(const std::string& path, const TensorFile& file);
TensorFile LoadTensors(const std::string& path);

}  // namespace cistern
