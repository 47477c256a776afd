#include "cistern/models/model.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>

#include <algorithm>
#include <filesystem>
#include <mutex>

#include "cistern/base/error.h"
#include "cistern/base/hash.h"
#include "cistern/base/terminal.h"
#include "cistern/io/atomic_file.h"
#include "cistern/io/json_text.h"
#include "cistern/io/safetensors.h"
#include "cistern/models/changed_files.h"
#include "cistern/tensors/device.h"

namespace cistern {

#define CISTERN_MODEL(name) const ModelInfo& name##_model();
#include "cistern/models/models.def"
#undef CISTERN_MODEL

const std::vector<const ModelInfo*>& Models() {
  static const std::vector<const ModelInfo*> all = {
#define CISTERN_MODEL(name) &name##_model(),
#include "cistern/models/models.def"
#undef CISTERN_MODEL
  };
  return all;
}

std::vector<std::string> ModelKinds() {
  std::vector<std::string> names;
  for (const ModelInfo* info : Models()) names.push_back(info->name);
  return names;
}

const ModelInfo& FindModel(const std::string& kind) {
  for (const ModelInfo* info : Models()) {
    if (info->name == kind) return *info;
  }
  throw UsageError(UnknownName("kind of model", kind, ModelKinds()));
}

bool ModelInfo::Has(Form form) const {
  return std::find(forms.begin(), forms.end(), form) != forms.end();
}

int64_t Model::ParameterCount() const {
  int64_t count = 0;
  for (const at::Tensor& p : parameters()) count += p.numel();
  return count;
}

at::TensorOptions Model::options() const {
  const auto all = parameters();
  return at::TensorOptions().dtype(all[0].dtype()).device(all[0].device());
}

namespace {

// What TrainingLoss of the kind reads.
std::vector<std::string> ReadNames(const ModelInfo& info) {
  std::vector<std::string> names = {"targets"};
  for (std::string name : info.inputs) {
    if (name.ends_with("?")) name.pop_back();
    names.push_back(std::move(name));
  }
  return names;
}

}  // namespace

void Model::RequireKnown(const NamedTensors& batch) const {
  const std::vector<std::string> names = ReadNames(info());
  for (const NamedTensor& t : batch.all()) {
    if (std::find(names.begin(), names.end(), t.name) == names.end())
      Fail("[", config_.kind, "] ", UnknownName("tensor", t.name, names));
  }
}

at::Tensor Model::TrainingLoss(const NamedTensors& batch, double label_smoothing) {
  if (!(label_smoothing >= 0 && label_smoothing < 1))
    FailUsage("label_smoothing must be at least 0 and below 1, got ", label_smoothing);
  RequireKnown(batch);
  return DoTrainingLoss(batch, label_smoothing);
}

NamedTensors Model::ReadOf(const NamedTensors& batch) const {
  NamedTensors read;
  for (const std::string& name : ReadNames(info())) {
    if (batch.Has(name)) read.Set(name, batch[name]);
  }
  return read;
}

namespace {

// torch's default generator, which is as it was after this; one at a time.
class DefaultGenerator {
 public:
  DefaultGenerator() : alone_(OneAtATime()), generator_(at::detail::getDefaultCPUGenerator()) {
    const std::lock_guard lock(generator_.mutex());
    before_ = generator_.get_state();
  }
  ~DefaultGenerator() {
    const std::lock_guard lock(generator_.mutex());
    generator_.set_state(before_);
  }
  DefaultGenerator(const DefaultGenerator&) = delete;
  DefaultGenerator& operator=(const DefaultGenerator&) = delete;

  void Seed(uint64_t seed) {
    const std::lock_guard lock(generator_.mutex());
    generator_.set_current_seed(seed);
  }

 private:
  static std::mutex& OneAtATime() {
    static std::mutex mutex;
    return mutex;
  }

  const std::lock_guard<std::mutex> alone_;
  at::Generator generator_;
  at::Tensor before_;
};

// With what its modules draw themselves.
std::shared_ptr<Model> Made(const ModelConfig& config, uint64_t seed) {
  DefaultGenerator generator;
  config.Validate();  // it makes mechanisms, which draw as well
  generator.Seed(seed);
  std::shared_ptr<Model> model = config.info().make(config);
  if (ActiveDevice() != at::Device(at::kCPU)) model->to(ActiveDevice());
  return model;
}

}  // namespace

std::shared_ptr<Model> MakeModel(const ModelConfig& config, uint64_t seed) {
  std::shared_ptr<Model> model = Made(config, seed);
  DrawInitialWeights(*model, seed);
  return model;
}

namespace {

// What a model file holds: parameters, then buffers (drawn once and not trained, such as random
// projections).
torch::OrderedDict<std::string, at::Tensor> Weights(const Model& model) {
  auto all = model.named_parameters();
  for (const auto& b : model.named_buffers()) all.insert(b.key(), b.value());
  return all;
}

}  // namespace

namespace {

// What a model's numbers depend on besides its weights; their hashes are in its metadata.
constexpr const char* kBeside[] = {"config.json", "tokenizer.json"};

// Of what a JSON file says, however it is written. O(bytes).
std::string JsonHash(const std::string& path) {
  return HexText(XxHash64(ParseSortedJson(ReadFile(path), path).dump()));
}

}  // namespace

std::vector<std::string> ChangedFiles(const SafetensorsFile& weights, const std::string& folder) {
  std::vector<std::string> changed;
  for (const char* name : kBeside) {
    const std::string path = folder + "/" + name;
    const auto said = weights.metadata().find(name);
    if (said == weights.metadata().end() || !std::filesystem::exists(path)) continue;
    if (JsonHash(path) != said->second) {
      changed.push_back(StrCat(path, " is not the one that ", weights.path(),
                               " was saved with; unless it was changed on purpose, it is damaged"));
    }
  }
  return changed;
}

void SaveModel(const Model& model, const std::string& folder) {
  EnsureDirectory(folder);
  ModelConfig config = model.config();
  WriteFileAtomically(folder + "/config.json", JsonFileText(config.Describe().Write()));
  TensorFile file;
  for (const auto& p : Weights(model)) file.tensors.push_back({p.key(), p.value()});
  file.metadata.emplace_back("format", "pt");
  for (const char* name : kBeside) {
    const std::string path = folder + "/" + name;
    if (std::filesystem::exists(path)) file.metadata.emplace_back(name, JsonHash(path));
  }
  SaveTensors(folder + "/model.safetensors", file);
}

void LoadWeights(Model& model, const std::string& path) {
  const TensorFile file = LoadTensors(path);
  const auto weights = Weights(model);
  std::vector<std::string> names;
  for (const auto& p : weights) names.push_back(p.key());
  // Everything is checked before the first copy.
  for (const NamedTensor& t : file.tensors) {
    const at::Tensor* p = weights.find(t.name);
    if (!p) throw Error(StrCat(path, ": ", UnknownName("tensor", t.name, names)));
    CISTERN_CHECK(p->sizes() == t.value.sizes(), path, ": tensor '", t.name, "' has shape ",
                  t.value.sizes(), ", the model's config asks for ", p->sizes());
    CISTERN_CHECK(t.value.is_floating_point(), path, ": tensor '", t.name, "' has type ",
                  at::toString(t.value.scalar_type()), ", expected floating point");
  }
  for (const std::string& name : names) {
    bool found = false;
    for (const NamedTensor& t : file.tensors) found = found || t.name == name;
    CISTERN_CHECK(found, path, ": tensor '", name, "' is missing");
  }
  at::NoGradGuard guard;
  for (const NamedTensor& t : file.tensors) weights.find(t.name)->copy_(t.value);
}

namespace {

// Before anything of the config's sizes is allocated: embeddings and feed-forwards alone must not
// have more numbers than the file.
void CheckSizes(const ModelConfig& c, const std::string& config, const SafetensorsFile& file) {
  double found = 0;
  for (const TensorEntry& e : file.entries())
    found += double(e.bytes) / double(DTypeBytes(e.dtype));
  const LayerStack first = c.Stack(c.info().forms[0]);  // the one that reads the embeddings
  // The bands of an adaptive embedding have fewer.
  double least = std::min(double(c.vocab_size) * double(first.input_dim()), c.info().tables(c));
  for (const Form form : c.info().forms) {
    if (form == Form::kCross) continue;
    const LayerStack stack = c.Stack(form);
    for (int64_t layer = 0; layer < stack.layers(); ++layer) {
      if (stack.TiedTo(layer) != layer || !stack.Block(layer).attention.tokens_out) continue;
      least += 2 * double(stack.dim()) * double(stack.ffn_dim());
    }
  }
  CISTERN_CHECK(least <= found, file.path(), ": its shapes hold ", int64_t(found), " numbers, and ",
                config, " asks for more than ", least, " (vocab_size=", c.vocab_size,
                ", dim=", first.dim(), ", layers=", first.layers(), ", ffn_dim=", first.ffn_dim(),
                "); they belong to different models");
}

}  // namespace

void KeepBiases(ModelConfig& c, const SafetensorsFile& file) {
  const auto has = [&](const std::string& end) {
    return std::any_of(file.entries().begin(), file.entries().end(),
                       [&](const TensorEntry& e) { return e.name.ends_with(end); });
  };
  const auto keep = [&](const char* mechanism, const char* option, const Json& value) {
    for (const Form form : c.info().forms) {
      const LayerStack stack = c.Stack(form);
      for (int64_t layer = 0; layer < stack.layers(); ++layer) {
        if (!stack.Uses(layer, mechanism)) continue;
        Json& own = c.attention_options[mechanism];
        if (!own.contains(option)) own[option] = value;
        return;
      }
    }
  };
  if (has("control_proj.bias")) keep("abc_mlp", "control_bias", "model");
  if (has("gate_proj.weight") && !has("gate_proj.bias")) keep("rfa_gate", "gate_bias", false);
}

std::shared_ptr<Model> LoadModel(const std::string& folder) {
  const std::string path = folder + "/config.json";
  ModelConfig config = ReadModelConfig(ReadJsonFile(path), path);
  const std::string weights = folder + "/model.safetensors";
  std::shared_ptr<Model> model;
  {
    const SafetensorsFile file(weights);
    CheckSizes(config, path, file);
    KeepBiases(config, file);
    for (const std::string& said : ChangedFiles(file, folder)) Note(said);
    model = Made(config, 0);
    if (!file.entries().empty() && file.entries()[0].dtype == DType::kF64) model->to(at::kDouble);
  }
  LoadWeights(*model, weights);
  model->eval();
  return model;
}

}  // namespace cistern
