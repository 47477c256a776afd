#include "cistern/models/transfer.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <map>
#include <set>

#include "cistern/base/error.h"
#include "cistern/base/format.h"
#include "cistern/models/changed_files.h"

namespace cistern {
namespace {

enum class Part { kTrunk, kAttention, kHead };

// By the names that all kinds give to their parts (models/trunk.h): anything else is of a head.
Part PartOf(std::string_view name) {
  for (const std::string_view stack : {"encoder.", "decoder."}) {
    if (name.starts_with(stack)) name.remove_prefix(stack.size());
  }
  if (name.starts_with("layers.")) {
    const std::string_view inner = name.substr(std::min(name.size(), name.find('.', 7) + 1));
    return inner.starts_with("attention.") || inner.starts_with("cross_attention.")
               ? Part::kAttention
               : Part::kTrunk;
  }
  const std::string_view first = name.substr(0, name.find('.'));
  for (const std::string_view trunk : {"embed_tokens", "source_embed_tokens", "embed_values",
                                       "embed_positions", "embed_norm", "norm"}) {
    if (first == trunk) return Part::kTrunk;
  }
  return Part::kHead;
}

// Whether the first rows of `theirs`, of a larger vocabulary, are `mine`.
bool BeginsWith(std::string_view name, const at::Tensor& theirs, const at::Tensor& mine) {
  const std::string_view first = name.substr(0, name.find('.'));
  return (first == "embed_tokens" || first == "source_embed_tokens" || first == "lm_head") &&
         theirs.dim() == mine.dim() && theirs.size(0) > mine.size(0) &&
         theirs.sizes().slice(1) == mine.sizes().slice(1);
}

// Whether `name` is of the last block.
bool OfLastBlock(std::string_view name, const ModelConfig& config) {
  const int64_t layers = config.Stack(config.info().forms[0]).layers();
  const std::string last = StrCat("layers.", layers - 1, ".");
  return name.starts_with(last) || name.starts_with("encoder." + last);
}

// The options of the kind's own, with their defaults, but for those that the task sets.
Json OwnSettings(const ModelConfig& config) {
  if (!config.info().options) return Json::object();
  Fields fields = config.info().options();
  Json own = fields.Write();
  own.update(config.Own());
  for (const char* of_the_task : {"input", "channels", "inputs", "outputs"}) own.erase(of_the_task);
  return own;
}

ModelConfig FolderConfig(const std::string& folder) {
  const std::string path = folder + "/config.json";
  return ReadModelConfig(ReadJsonFile(path), path);
}

// Stacks whose weights have the same names: all of two models of one kind, else the first of each.
struct StackPair {
  LayerStack mine, theirs;
  std::string name;  // "decoder ", where there are several
};
std::vector<StackPair> StackPairs(const ModelConfig& here, const ModelConfig& there) {
  const std::vector<Form>&mine = here.info().forms, &theirs = there.info().forms;
  if (here.kind != there.kind || mine.size() == 1)
    return {{here.Stack(mine[0]), there.Stack(theirs[0]), ""}};
  std::vector<StackPair> pairs;
  for (const Form form : mine)
    pairs.push_back({here.Stack(form), there.Stack(form), GroupName(form) + " "});
  return pairs;
}

void CheckMechanisms(const ModelConfig& here, const ModelConfig& there, const std::string& folder) {
  for (const StackPair& pair : StackPairs(here, there)) {
    const LayerStack &mine = pair.mine, &theirs = pair.theirs;
    for (int64_t layer = 0; layer < std::min(mine.layers(), theirs.layers()); ++layer) {
      const std::string &a = mine.Mechanism(layer), &b = theirs.Mechanism(layer);
      if (a == b && mine.Options(layer) == theirs.Options(layer)) continue;
      FailUsage(pair.name, "layer ", layer, " has the attention ", b,
                a == b ? " with options " + theirs.Options(layer).dump() : std::string(), " in ",
                folder, " and ", a, a == b ? " with " + mine.Options(layer).dump() : std::string(),
                " here; --swap-attention takes the weights that fit and initializes the others "
                "from scratch");
    }
  }
}

// Settings that no shape shows.
std::vector<std::string> OtherSettings(const ModelConfig& here, const ModelConfig& there,
                                       const std::string& folder) {
  std::vector<std::string> notes;
  const auto compare = [&](const std::string& name, const auto& a, const auto& b) {
    if (a != b)
      notes.push_back(StrCat("model.", name, " is ", a, " here and was ", b, " in ", folder));
  };
  const auto compare_named = [&](const std::string& name, auto a, auto b, const auto& names) {
    compare(name, NameOf(a, names), NameOf(b, names));
  };
  for (const auto& [mine, theirs, name] : StackPairs(here, there)) {
    const std::string group = name.empty() ? "" : GroupName(mine.form()) + ".";
    const StackOptions &a = mine.options(), &b = theirs.options();
    compare(group + "heads", a.heads, b.heads);
    compare(group + "max_length", a.max_length, b.max_length);
    if (mine.form() != Form::kCross || theirs.form() != Form::kCross)
      compare_named(group + "positions", *a.positions, *b.positions, PositionKinds());
    if (mine.form() != theirs.form())
      notes.push_back(StrCat("the layers were ", FormName(theirs.form()), " in ", folder,
                             " and are ", FormName(mine.form()), " here"));
  }
  compare_named("norm", here.norm, there.norm, NormPlaces());
  compare_named("norm_kind", here.norm_kind, there.norm_kind, NormKinds());
  compare("norm_eps", here.norm_eps, there.norm_eps);
  compare("scale_embeddings", here.scale_embeddings, there.scale_embeddings);
  compare_named("padding", here.padding, there.padding, PaddingKinds());
  compare_named("activation", here.activation, there.activation, Activations());
  if (here.kind != there.kind) return notes;
  compare("scale_logits", here.scale_logits, there.scale_logits);
  if (here.info().classifies) {
    compare_named("pooling", here.pooling, there.pooling, PoolingKinds());
    compare_named("cls_place", here.cls_place, there.cls_place, ClsPlaces());
    compare("norm_pooled", here.norm_pooled, there.norm_pooled);
    compare_named("head", here.head, there.head, HeadKinds());
  }
  const Json mine = OwnSettings(here), theirs = OwnSettings(there);
  for (const auto& [key, value] : theirs.items())
    compare(here.kind + "." + key, mine.value(key, Json()).dump(), value.dump());
  return notes;
}

std::string Listed(const std::vector<std::string>& names) {
  constexpr size_t kShown = 6;
  std::string text;
  for (size_t i = 0; i < std::min(kShown, names.size()); ++i)
    text += (i == 0 ? "" : ", ") + names[i];
  if (names.size() > kShown) text += StrCat(" and ", names.size() - kShown, " more");
  return text;
}

}  // namespace

std::string TransferReport::Summary() const {
  std::string text =
      StrCat(taken.size(), " tensors taken, ",
             Fixed(100.0 * double(numbers_taken) / double(numbers), 1), " % of the weights");
  if (!fresh.empty()) text += "; new: " + Listed(fresh);
  if (!left.empty()) text += "; left: " + Listed(left);
  return text;
}

TransferReport TakeWeights(Model& model, const std::string& folder,
                           const TransferOptions& options) {
  const ModelConfig there = FolderConfig(folder);
  if (!options.swap_attention) CheckMechanisms(model.config(), there, folder);
  const std::string weights = folder + "/model.safetensors";
  const TensorFile file = LoadTensors(weights);
  std::map<std::string, const at::Tensor*> theirs;
  for (const NamedTensor& t : file.tensors) theirs[t.name] = &t.value;

  auto mine = model.named_parameters();
  for (const auto& b : model.named_buffers()) mine.insert(b.key(), b.value());
  TransferReport report;
  // A model that pools its memory has no tokens after its last block, one that does not no memory:
  // each lacks weights of that block that the other has.
  const bool other_end = model.config().PoolsMemory() != there.PoolsMemory();
  const auto may_lack = [&](const std::string& name) {
    return other_end && OfLastBlock(name, model.config());
  };
  for (const auto& p : mine) {
    const std::string& name = p.key();
    const Part part = PartOf(name);
    report.numbers += p.value().numel();
    const auto found = theirs.find(name);
    CISTERN_CHECK(found == theirs.end() || found->second->is_floating_point(), weights,
                  ": tensor '", name, "' has type ", at::toString(found->second->scalar_type()),
                  ", expected floating point");
    const bool fits = found != theirs.end() &&
                      (found->second->sizes() == p.value().sizes() ||
                       (options.first_ids && BeginsWith(name, *found->second, p.value())));
    if (fits && !(part == Part::kHead && options.new_head)) {
      report.taken.push_back(name);
      report.numbers_taken += p.value().numel();
      continue;
    }
    if (found == theirs.end() && may_lack(name)) {
      report.fresh.push_back(name);
      continue;
    }
    const std::string what = found == theirs.end()
                                 ? StrCat("'", name, "' is not in ", folder)
                                 : StrCat("'", name, "' has the shape ", found->second->sizes(),
                                          " in ", folder, " and ", p.value().sizes(), " here");
    if (part == Part::kHead && found != theirs.end() && !options.new_head)
      FailUsage(what, "; --new-head initializes what follows the layers from scratch");
    if (part == Part::kAttention && !options.swap_attention)
      FailUsage(what, "; --swap-attention initializes what does not fit from scratch");
    if (part == Part::kTrunk) {
      const bool tokens = found != theirs.end() && name.find("embed_tokens") != std::string::npos &&
                          found->second->size(0) != p.value().size(0);
      FailUsage(what, tokens ? "; the two must read the same tokens"
                             : "; the two must have the same sizes and norms: settings of [model] "
                               "that are left out are those of the folder");
    }
    report.fresh.push_back(name);
  }
  for (const NamedTensor& t : file.tensors) {
    if (mine.contains(t.name)) continue;
    const Part part = PartOf(t.name);
    if (part != Part::kHead && may_lack(t.name)) {
      report.left.push_back(t.name);
      continue;
    }
    if (part == Part::kTrunk) {
      FailUsage("'", t.name, "' of ", folder, " has no place in a ", model.info().name, " of ",
                model.config().Summary());
    }
    if (part == Part::kAttention && !options.swap_attention) {
      FailUsage("'", t.name, "' of ", folder,
                " has no place in this model; --swap-attention leaves it out");
    }
    if (t.name.starts_with("lm_head.") && there.kind == model.config().kind && !options.new_head)
      FailUsage("'", t.name, "' of ", folder, " has no place in this model, whose output layer ",
                t.name == "lm_head.bias" ? "has no bias" : "is tied to the embeddings",
                "; --new-head begins with another, and without the setting it is the folder's");
    report.left.push_back(t.name);
  }
  report.notes = ChangedFiles(SafetensorsFile(weights), folder);
  for (std::string& other : OtherSettings(model.config(), there, folder))
    report.notes.push_back(std::move(other));
  const at::NoGradGuard guard;
  for (const std::string& name : report.taken) {
    at::Tensor& to = mine[name];
    const at::Tensor& from = *theirs[name];
    to.copy_(to.sizes() == from.sizes() ? from : from.narrow(0, 0, to.size(0)));
  }
  return report;
}

Json StartingConfig(const std::string& folder, const std::string& kind) {
  ModelConfig there = FolderConfig(folder);
  const Form from = there.info().forms[0], to = FindModel(kind).forms[0];
  Json all = there.Describe().Write();
  const std::string group = GroupName(from);
  Json config = Json::object();
  for (const char* key : {"attention",     "attention_options",
                          "layer_options", "dim",
                          "layers",        "heads",
                          "tied_layers",   "ffn_dim",
                          "max_length",    "conv",
                          "norm",          "embedding_norm",
                          "final_norm",    "norm_eps",
                          "activation",    "positions",
                          "bias",          "ffn_bias",
                          "dropout",       "attention_dropout",
                          "ffn_dropout",   "init_std",
                          "embedding_std", "position_std",
                          "layer_drop",    "qkv_dim",
                          "norm_kind",     "scale_embeddings",
                          "input_dim",     "ffn_out_dropout"}) {
    if (all.contains(key)) config[key] = all[key];
  }
  if (kind == there.kind) {
    for (const char* key : {"scale_logits", "tie_embeddings", "head_bias", "pooling", "cls_place",
                            "padding", "norm_pooled", "head", "head_dims", "head_dropout"}) {
      if (all.contains(key)) config[key] = all[key];
    }
    if (there.info().options) config[kind] = OwnSettings(there);
  }
  if (kind == there.kind && there.info().encodes) {
    for (const char* stack : {"encoder", "decoder", "cross"}) {
      if (all.contains(stack)) config[stack] = all[stack];
    }
    return config;
  }
  if (all.contains(group)) {  // what is said of the stack, for all
    for (const auto& [key, value] : all[group].items()) {
      if (value.is_object() && config.contains(key)) {
        config[key].merge_patch(value);  // options, mechanism by mechanism
      } else {
        config[key] = value;
      }
    }
  }
  // Bands of an adaptive embedding are parts of the trunk.
  if (there.Own().value("embedding", "") == "adaptive") {
    if (kind != there.kind)
      FailUsage(folder, " has ", there.kind, ".embedding=adaptive, which a model of kind ", kind,
                " cannot have; begin with a model that has one table of embeddings");
    config[kind] = there.Own();
    config["tie_embeddings"] = there.tie_embeddings;
  }
  if (to == Form::kBidirectional) config["conv"] = 0;
  return config;
}

}  // namespace cistern
