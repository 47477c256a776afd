#pragma once
// What all models share: parameters by name, counting, saving and loading a model folder.
#include <torch/nn/module.h>

#include <memory>
#include <string>
#include <vector>

#include "cistern/models/config.h"
#include "cistern/tensors/tensor_file.h"

namespace cistern {

class SafetensorsFile;

class Model : public torch::nn::Module {
 public:
  explicit Model(const ModelConfig& config) : config_(config) {}
  const ModelConfig& config() const { return config_; }
  const ModelInfo& info() const { return config_.info(); }
  int64_t ParameterCount() const;
  at::TensorOptions options() const;  // dtype and device of the parameters

  // The mean loss, in nats, of what the model makes of `batch`: the tensors that info().inputs
  // names and "targets", on the device of the parameters. Error where one is missing, or where
  // there is another, UsageError where label_smoothing is not within [0, 1).
  at::Tensor TrainingLoss(const NamedTensors& batch, double label_smoothing = 0);
  // Those of `batch` that the model knows: a task has others beside them.
  NamedTensors ReadOf(const NamedTensors& batch) const;
  // Why it refuses label_smoothing: "is for ..."; "" where it does not.
  virtual std::string WhyNoSmoothing() const { return ""; }

 protected:
  // Error where the batch has a tensor that the model does not read; "targets" may be there.
  void RequireKnown(const NamedTensors& batch) const;
  virtual at::Tensor DoTrainingLoss(const NamedTensors& batch, double label_smoothing) = 0;

  ModelConfig config_;
};

// On ActiveDevice. Random parameters are a function of the seed: the same in every build. Threads
// may make and load models at once. Both draw from torch's default generator and leave it as it
// was; draws of other threads meanwhile mix with theirs.
std::shared_ptr<Model> MakeModel(const ModelConfig& config, uint64_t seed);

// A model folder: config.json and model.safetensors, both written atomically. Loading checks names,
// shapes and dtypes before anything is used; errors name the file and the tensor.
void SaveModel(const Model& model, const std::string& folder);
std::shared_ptr<Model> LoadModel(const std::string& folder);
// Biases that earlier versions had where today's default has none, and the other way round, as the
// file of weights has them: of abc_mlp's control, which followed `bias`, and of rfa_gate's gate,
// which did. Options that the config names stay.
void KeepBiases(ModelConfig& config, const SafetensorsFile& weights);
// Weights alone, into an existing model.
void LoadWeights(Model& model, const std::string& path);

// Fills in `options`, `check` and `make` of an info from M::Options, M::Describe(Options&) ->
// Fields, M::Check(const ModelConfig&) and M(config). A kind without options of its own says
// `using Options = void`.
template <class M>
void BindModel(ModelInfo& info) {
  if constexpr (!std::is_void_v<typename M::Options>) {
    info.options = [] {
      static typename M::Options defaults;
      return M::Describe(defaults);
    };
  }
  info.check = &M::Check;
  info.make = [](const ModelConfig& config) -> std::shared_ptr<Model> {
    return std::make_shared<M>(config);
  };
}

// The options of M's own in a config; UsageError where they are not what M::Describe says.
template <class M>
typename M::Options OwnOptions(const ModelConfig& config) {
  typename M::Options options;
  M::Describe(options).Read(config.Own(), config.kind);
  return options;
}

}  // namespace cistern
