#include "cistern/models/model.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <filesystem>

#include "cistern/base/error.h"
#include "cistern/base/hash.h"
#include "cistern/base/terminal.h"
#include "cistern/io/atomic_file.h"
#include "cistern/io/json_text.h"
#include "cistern/io/safetensors.h"
#include "cistern/models/decoder_lm.h"
#include "cistern/models/encoder_classifier.h"
#include "cistern/models/encoder_decoder.h"

namespace cistern {
namespace {

DType FromTorch(at::ScalarType type) {
  switch (type) {
    case at::kDouble:
      return DType::kF64;
    case at::kFloat:
      return DType::kF32;
    case at::kHalf:
      return DType::kF16;
    case at::kBFloat16:
      return DType::kBF16;
    case at::kLong:
      return DType::kI64;
    case at::kInt:
      return DType::kI32;
    case at::kBool:
      return DType::kBool;
    case at::kByte:
      return DType::kU8;
    default:
      Fail("tensors of type ", at::toString(type), " are not written to files");
  }
}

at::ScalarType ToTorch(DType type, const std::string& where) {
  switch (type) {
    case DType::kF64:
      return at::kDouble;
    case DType::kF32:
      return at::kFloat;
    case DType::kF16:
      return at::kHalf;
    case DType::kBF16:
      return at::kBFloat16;
    case DType::kI64:
      return at::kLong;
    case DType::kI32:
      return at::kInt;
    case DType::kBool:
      return at::kBool;
    case DType::kU8:
      return at::kByte;
    default:
      Fail(where, ": tensors of type ", DTypeName(type), " are not supported");
  }
}

}  // namespace

int64_t Model::ParameterCount() const {
  int64_t count = 0;
  for (const at::Tensor& p : parameters()) count += p.numel();
  return count;
}

at::TensorOptions Model::options() const {
  const auto all = parameters();
  return at::TensorOptions().dtype(all[0].dtype()).device(all[0].device());
}

std::vector<std::shared_ptr<Block>> AddBlocks(Container& layers, const ModelConfig& config,
                                              Form form) {
  std::vector<std::shared_ptr<Block>> blocks;
  for (int64_t i = 0; i < config.Layers(form); ++i) {
    if (const int64_t owner = config.TiedTo(i); owner != i) {
      blocks.push_back(blocks[size_t(owner)]);
      continue;
    }
    BlockOptions options = config.Block(i, form);
    for (int64_t j = i; j-- > 0;) {
      const class Block& earlier = *blocks[size_t(j)];
      if (config.Mechanism(j, form) == config.Mechanism(i, form))
        options.attention.first = &earlier.attention();
      if (options.cross && config.Mechanism(j, Form::kCross) == config.Mechanism(i, Form::kCross))
        options.cross->first = &earlier.cross();
    }
    blocks.push_back(layers.Add(std::to_string(i), std::make_shared<Block>(options)));
  }
  return blocks;
}

std::shared_ptr<Model> MakeModel(const ModelConfig& config, uint64_t seed) {
  config.Validate();
  at::manual_seed(seed);
  if (config.kind == "decoder_lm") return std::make_shared<DecoderLm>(config);
  if (config.kind == "encoder_decoder") return std::make_shared<EncoderDecoder>(config);
  return std::make_shared<EncoderClassifier>(config);
}

void SaveTensors(const std::string& path, const TensorFile& file) {
  std::vector<at::Tensor> kept;  // contiguous, alive until written
  std::vector<TensorEntry> entries;
  for (const NamedTensor& t : file.tensors) {
    kept.push_back(t.value.detach().to(at::kCPU).contiguous());
    const at::Tensor& x = kept.back();
    entries.push_back({t.name, FromTorch(x.scalar_type()), x.sizes().vec(), x.const_data_ptr(),
                       int64_t(x.nbytes())});
  }
  WriteSafetensors(path, entries, {file.metadata.begin(), file.metadata.end()});
}

TensorFile LoadTensors(const std::string& path) {
  const SafetensorsFile file(path);
  if (!file.checked()) Note(path + " has no checksum of ours: damage to it would not be seen");
  TensorFile out;
  out.metadata.assign(file.metadata().begin(), file.metadata().end());
  for (const TensorEntry& e : file.entries()) {
    const auto type = ToTorch(e.dtype, StrCat(path, ": tensor '", e.name, "'"));
    if (e.dtype == DType::kBool) {  // any other byte would be undefined behaviour to read as a bool
      const auto* bytes = static_cast<const unsigned char*>(e.data);
      CISTERN_CHECK(std::all_of(bytes, bytes + e.bytes, [](unsigned char b) { return b <= 1; }),
                    path, ": tensor '", e.name,
                    "' of type BOOL holds a byte that is neither 0 nor 1; the file is corrupt");
    }
    out.tensors.push_back(
        {e.name, at::from_blob(const_cast<void*>(e.data), e.shape, at::TensorOptions().dtype(type))
                     .clone()});
  }
  return out;
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

// What a model's numbers depend on beside its weights; their hashes are in its metadata.
constexpr const char* kBeside[] = {"config.json", "tokenizer.json"};

// Of what a JSON file says, however it is written. O(bytes).
std::string JsonHash(const std::string& path) {
  return HexText(XxHash64(ParseSortedJson(ReadFile(path), path).dump()));
}

void NoteChanges(const SafetensorsFile& weights, const std::string& folder) {
  for (const char* name : kBeside) {
    const std::string path = folder + "/" + name;
    const auto said = weights.metadata().find(name);
    if (said == weights.metadata().end() || !std::filesystem::exists(path)) continue;
    if (JsonHash(path) != said->second) {
      Note(StrCat(path, " is not the one that ", weights.path(),
                  " was saved with; unless it was changed on purpose, it is damaged"));
    }
  }
}

}  // namespace

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
  double found = 0, owned = 0;
  for (const TensorEntry& e : file.entries())
    found += double(e.bytes) / double(DTypeBytes(e.dtype));
  const Form form = c.kind == "decoder_lm" ? Form::kCausal : Form::kBidirectional;
  for (int64_t layer = 0; layer < c.layers; ++layer)
    owned += c.TiedTo(layer) == layer && c.Block(layer, form).attention.tokens_out;
  const double dim = double(c.dim), ffn = c.ffn_dim > 0 ? double(c.ffn_dim) : 4 * dim,
               least = double(c.vocab_size) * dim + 2 * owned * dim * ffn;
  CISTERN_CHECK(least <= found, file.path(), ": its shapes hold ", int64_t(found), " numbers, and ",
                config, " asks for more than ", least, " (vocab_size=", c.vocab_size,
                ", dim=", c.dim, ", layers=", c.layers, ", ffn_dim=", int64_t(ffn),
                "); they belong to different models");
}

}  // namespace

std::shared_ptr<Model> LoadModel(const std::string& folder) {
  const std::string path = folder + "/config.json";
  const ModelConfig config = ReadModelConfig(ReadJsonFile(path), path);
  const std::string weights = folder + "/model.safetensors";
  std::shared_ptr<Model> model;
  {
    const SafetensorsFile file(weights);
    CheckSizes(config, path, file);
    NoteChanges(file, folder);
    model = MakeModel(config, 0);
    if (!file.entries().empty() && file.entries()[0].dtype == DType::kF64) model->to(at::kDouble);
  }
  LoadWeights(*model, weights);
  model->eval();
  return model;
}

}  // namespace cistern
