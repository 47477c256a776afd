#include "cistern/models/model_state_file.h"

#include <ATen/ATen.h>

#include <algorithm>

#include "cistern/base/error.h"
#include "cistern/base/hash.h"
#include "cistern/io/json_text.h"
#include "cistern/tensors/torch_error.h"

namespace cistern {
namespace {

using Metadata = std::map<std::string, std::string>;

constexpr const char kFormat[] = "cistern model state";

uint64_t HashTensor(const std::string& name, const at::Tensor& tensor, uint64_t seed) {
  const at::Tensor x = tensor.detach().to(at::kCPU).contiguous();
  seed = XxHash64(StrCat(name, ' ', at::toString(x.scalar_type()), ' ', x.sizes()), seed);
  return XxHash64({static_cast<const char*>(x.const_data_ptr()), x.nbytes()}, seed);
}

std::string LayerName(size_t layer, const std::string& tensor) {
  return StrCat("layers.", layer, ".", tensor);
}

std::string LayerMechanisms(const StatefulModel& model) {
  std::string out;
  for (const AttentionLayer* layer : model.state_layers())
    out += (out.empty() ? "" : ",") + layer->mechanism().info().name;
  return out;
}

// As --dtype has it.
std::string DTypeText(const StatefulModel& model) {
  const at::ScalarType type = at::typeMetaToScalarType(model.options().dtype());
  return type == at::kFloat ? "float32" : type == at::kDouble ? "float64" : at::toString(type);
}

// What the file says about the model, other than its hash.
Metadata ModelMetadata(const StatefulModel& model) {
  return {{"format", kFormat},
          {"version", std::to_string(kModelStateVersion)},
          {"mechanisms", LayerMechanisms(model)},
          {"dtype", DTypeText(model)}};
}

// The file's own word for `key`, which has to be there.
const std::string& MetadataOf(const Metadata& metadata, const std::string& key,
                              const std::string& path) {
  const auto at = metadata.find(key);
  CISTERN_CHECK(at != metadata.end(), path, ": the metadata lack '", key, "'; the file is broken");
  return at->second;
}

// From what makes it no state at all to what makes it one of another model.
void CheckMetadata(const std::string& path, const TensorFile& file, const StatefulModel& model,
                   const Metadata& made) {
  const Metadata found(file.metadata.begin(), file.metadata.end());
  const auto format = found.find("format");
  CISTERN_CHECK(format != found.end() && format->second == kFormat, path,
                " is not a saved state: its metadata lack format='", kFormat,
                "' (`cistern generate MODEL --save-state FILE` writes one)");
  Metadata want = ModelMetadata(model);
  const std::string& version = MetadataOf(found, "version", path);
  if (version != want["version"]) {
    const bool newer = version.size() > 1 || version > want["version"];  // versions have one digit
    FailUsage(path, " has version ", version, " of the format, of ", newer ? "a newer" : "an older",
              " cistern, and this one reads version ", want["version"],
              newer ? "; load it with the cistern that wrote it"
                    : "; make it again from its text: cistern generate MODEL --prompt-file TEXT "
                      "-n 0 --save-state FILE");
  }
  CISTERN_CHECK(MetadataOf(found, "checksum", path) == ModelStateChecksum(file), path,
                ": the contents do not fit their checksum; the file is corrupt");
  if (const std::string& mechanisms = MetadataOf(found, "mechanisms", path);
      mechanisms != want["mechanisms"]) {
    FailUsage(path, " was made with another model: its layers are ", mechanisms,
              ", those of this model ", want["mechanisms"]);
  }
  if (const std::string& dtype = MetadataOf(found, "dtype", path); dtype != want["dtype"]) {
    FailUsage(path, " was made in ", dtype, ", and this model runs in ", want["dtype"],
              "; use the same --dtype for both");
  }
  if (const std::string& hash = MetadataOf(found, "model", path), own = HexText(ModelHash(model));
      hash != own) {
    FailUsage(path, " was made with another model (hash ", hash, "; this model has ", own, ")");
  }
  for (const auto& [key, value] : made) {
    if (const std::string& other = MetadataOf(found, key, path); other != value) {
      FailUsage(path, " was made with another ", key, " (hash ", other, "; this one has ", value,
                ")");
    }
  }
}

// Tensors of the file by name; those taken are gone.
class StateTensors {
 public:
  StateTensors(const std::string& path, std::vector<NamedTensor> all)
      : path_(path), all_(std::move(all)) {}

  bool Has(const std::string& name) const {
    return std::any_of(all_.begin(), all_.end(),
                       [&](const NamedTensor& t) { return t.name == name; });
  }
  // The tensor that stands in place of `like`, with its type and sizes, where a size of 0 may be
  // any other. Where `like` is undefined it may be missing or anything.
  at::Tensor Take(const std::string& name, const at::Tensor& like) {
    const auto at = std::find_if(all_.begin(), all_.end(),
                                 [&](const NamedTensor& t) { return t.name == name; });
    if (at == all_.end()) {
      CISTERN_CHECK(!like.defined(), path_, ": tensor '", name, "' is missing");
      return {};
    }
    const at::Tensor found = at->value;
    all_.erase(at);
    if (!like.defined()) return found;
    bool fits = found.dim() == like.dim() && found.scalar_type() == like.scalar_type();
    for (int64_t d = 0; fits && d < like.dim(); ++d)
      fits = like.size(d) == 0 || found.size(d) == like.size(d);
    CISTERN_CHECK(fits, path_, ": tensor '", name, "' has shape ", found.sizes(), " of type ",
                  at::toString(found.scalar_type()), ", expected ", like.sizes(), " of type ",
                  at::toString(like.scalar_type()));
    return found;
  }
  std::vector<NamedTensor> Rest() { return std::move(all_); }

 private:
  const std::string& path_;
  std::vector<NamedTensor> all_;
};

}  // namespace

std::string ModelStateChecksum(const TensorFile& file) {
  uint64_t hash = 0;
  for (const auto& [key, value] : Metadata(file.metadata.begin(), file.metadata.end())) {
    if (key != "checksum") hash = XxHash64(value, XxHash64(key, hash));
  }
  std::vector<const NamedTensor*> sorted;
  for (const NamedTensor& t : file.tensors) sorted.push_back(&t);
  std::sort(sorted.begin(), sorted.end(),
            [](const NamedTensor* a, const NamedTensor* b) { return a->name < b->name; });
  for (const NamedTensor* t : sorted) hash = HashTensor(t->name, t->value, hash);
  return HexText(hash);
}

Json ChangedSettings(ModelConfig config) {
  const Json all = config.Describe().Write(), usual = ModelConfig().Describe().Write();
  Json changed = Json::object();
  for (const auto& [key, value] : all.items()) {
    if (!usual.contains(key) || usual[key] != value) changed[key] = value;
  }
  return changed;
}

uint64_t ModelHash(const Model& model) {
  uint64_t hash = XxHash64(JsonLine(ChangedSettings(model.config())));
  for (const auto& p : model.named_parameters()) hash = HashTensor(p.key(), p.value(), hash);
  for (const auto& b : model.named_buffers()) hash = HashTensor(b.key(), b.value(), hash);
  return hash;
}

void SaveModelState(const std::string& path, const StatefulModel& model,
                    const ModelStateFile& file) {
  CISTERN_CHECK(file.state.positions.defined() && file.state.positions.size(0) > 0,
                "[model_state] there is no row to save");
  const ModelState state = model.Compact(file.state);
  TensorFile out;
  for (size_t i = 0; i < state.layers.size(); ++i) {
    for (const NamedTensor& t : state.layers[i].tensors) {
      if (t.value.defined())
        out.tensors.push_back({LayerName(i, t.name), t.value.detach().to(at::kCPU).contiguous()});
    }
  }
  out.tensors.push_back({"positions", state.positions});
  for (const NamedTensor& t : file.extra) {
    CISTERN_CHECK(!t.name.starts_with("layers.") && t.name != "positions", "[model_state] '",
                  t.name, "' is a name of the state's own");
    out.tensors.push_back(t);
  }
  Metadata metadata = ModelMetadata(model);
  metadata["model"] = HexText(ModelHash(model));
  metadata["batch"] = std::to_string(state.positions.size(0));
  for (const auto& [key, value] : file.made)
    CISTERN_CHECK(key != "checksum" && metadata.emplace(key, value).second, "[model_state] '", key,
                  "' is a key of the state's own");
  out.metadata.assign(metadata.begin(), metadata.end());
  out.metadata.emplace_back("checksum", ModelStateChecksum(out));
  SaveTensors(path, out);
}

ModelStateFile LoadModelState(const std::string& path, const StatefulModel& model,
                              const Metadata& made) {
  TensorFile file = LoadTensors(path);
  CheckMetadata(path, file, model, made);
  const std::string rows =
      MetadataOf(Metadata(file.metadata.begin(), file.metadata.end()), "batch", path);
  StateTensors tensors(path, std::move(file.tensors));
  ModelStateFile out;
  out.made = made;
  const at::TensorOptions options = model.options();
  out.state.positions = tensors.Take("positions", at::empty({0}, at::kLong)).to(options.device());
  const int64_t batch = out.state.positions.size(0);
  CISTERN_CHECK(batch > 0 && rows == std::to_string(batch), path, ": tensor 'positions' has ",
                batch, " rows, the metadata say ", rows);
  CISTERN_CHECK((out.state.positions >= 0).all().item<bool>(), path,
                ": tensor 'positions' holds a position below 0");
  for (size_t i = 0; i < model.state_layers().size(); ++i) {
    const AttentionLayer& layer = *model.state_layers()[i];
    State state = layer.StateForm(
        batch, options, [&](const std::string& name) { return tensors.Has(LayerName(i, name)); });
    for (NamedTensor& t : state.tensors) {
      const at::Tensor value = tensors.Take(LayerName(i, t.name), t.value);
      t.value = value.defined() ? value.to(t.value.defined() ? t.value.device() : options.device())
                                : value;
    }
    State settled;
    try {
      layer.mechanism().CheckState(state);
      settled = layer.mechanism().Settled(state);  // the sizes that `decoding` says fit
    } catch (const std::exception& e) {            // c10::Error, too
      Fail(path, ": layers.", i, ": ", FirstLine(e));
    }
    if (!options.device().is_cpu()) {  // where no state has the form that decodes
      for (size_t j = 0; j < settled.tensors.size(); ++j) {
        const at::Tensor& now = settled.tensors[j].value;
        at::Tensor& t = state.tensors[j].value;
        t = t.defined() || !now.defined() ? now : now.to(options.device());
      }
    }
    out.state.layers.push_back(std::move(state));
  }
  out.extra = tensors.Rest();
  for (const NamedTensor& t : out.extra) {
    CISTERN_CHECK(!t.name.starts_with("layers."), path, ": tensor '", t.name,
                  "' is not of this model's state");
  }
  return out;
}

}  // namespace cistern
