#include "cistern/models/hugging_face.h"

#include <ATen/ATen.h>

#include <filesystem>
#include <functional>
#include <map>

#include "cistern/base/error.h"
#include "cistern/io/json_text.h"
#include "cistern/tensors/tensor_file.h"

namespace cistern {
namespace {

namespace fs = std::filesystem;

// config.json of the folder. Settings that are left out have transformers' defaults.
class Settings {
 public:
  explicit Settings(const std::string& folder) : path_(folder + "/config.json") {
    CISTERN_CHECK(fs::exists(path_), "there is no ", path_,
                  "; give the folder of a model of Hugging Face's transformers");
    json_ = ReadJsonFile(path_);
    CISTERN_CHECK(json_.is_object(), path_, ": expected an object");
  }
  template <class T>
  T Get(const std::string& key, const T& usual) const {
    const auto found = json_.find(key);
    if (found == json_.end() || found->is_null()) return usual;
    const bool fits = std::is_same_v<T, std::string> ? found->is_string()
                      : std::is_same_v<T, bool>      ? found->is_boolean()
                      : std::is_same_v<T, int64_t>   ? found->is_number_integer()
                                                     : found->is_number();
    CISTERN_CHECK(fits, path_, ": ", key, " is ", found->dump().substr(0, 60));
    return found->template get<T>();
  }
  // Error where a setting is not what our model does.
  template <class T>
  void Require(const std::string& key, const T& expected) const {
    const T value = Get<T>(key, expected);
    CISTERN_CHECK(value == expected, path_, ": ", key, "=", Json(value).dump(),
                  " is not supported; ", Json(expected).dump(), " is");
  }
  Activation ActivationOf(const std::string& key, const std::string& usual) const {
    const std::map<std::string, Activation> known = {{"gelu", Activation::kGelu},
                                                     {"gelu_new", Activation::kGeluTanh},
                                                     {"gelu_pytorch_tanh", Activation::kGeluTanh},
                                                     {"relu", Activation::kRelu}};
    const std::string name = Get(key, usual);
    const auto found = known.find(name);
    CISTERN_CHECK(found != known.end(), path_, ": ", key, "=", name,
                  " is not supported; gelu, gelu_new, gelu_pytorch_tanh and relu are");
    return found->second;
  }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
  Json json_;
};

// The tensors of model.safetensors under the names of the model's main part, each taken once.
class Weights {
 public:
  Weights(const std::string& folder, const std::string& prefix)
      : path_(folder + "/model.safetensors") {
    CISTERN_CHECK(fs::exists(path_), "there is no ", path_,
                  fs::exists(path_ + ".index.json")
                      ? "; its weights are in several files: save the model in one"
                  : fs::exists(folder + "/pytorch_model.bin")
                      ? "; pytorch_model.bin is a pickle, which can run any program: load it in "
                        "Python and save it by save_pretrained"
                      : "");
    for (NamedTensor& t : LoadTensors(path_).tensors) {
      CISTERN_CHECK(t.value.is_floating_point() || t.name.ends_with("position_ids") ||
                        t.name.ends_with(".attn.bias"),
                    path_, ": tensor '", t.name, "' has type ", at::toString(t.value.scalar_type()),
                    ", expected floating point");
      std::string name = t.name.starts_with(prefix) ? t.name.substr(prefix.size()) : t.name;
      CISTERN_CHECK(tensors_.emplace(name, t.value).second, path_, ": tensor '", name,
                    "' is there with and without '", prefix, "'");
    }
  }
  bool Has(const std::string& name) const { return tensors_.contains(name); }
  void Check(const std::string& name, at::IntArrayRef shape) const {
    const auto found = tensors_.find(name);
    CISTERN_CHECK(found != tensors_.end(), path_, ": tensor '", name, "' is missing");
    CISTERN_CHECK(found->second.sizes() == shape, path_, ": tensor '", name, "' has the shape ",
                  StrCat(found->second.sizes()), ", expected ", StrCat(shape));
  }
  at::Tensor Take(const std::string& name, at::IntArrayRef shape) {
    Check(name, shape);
    const auto found = tensors_.find(name);
    at::Tensor taken = found->second.to(at::kFloat);
    tensors_.erase(found);
    return taken;
  }
  // Where it has to be another tensor again, as tied ones are saved twice at times.
  void DropEqual(const std::string& name, const at::Tensor& other) {
    if (!Has(name)) return;
    CISTERN_CHECK(Take(name, other.sizes()).equal(other), path_, ": tensor '", name,
                  "' is tied to another one by config.json, and differs from it");
  }
  // The others, which the model has no place for.
  std::vector<std::string> Left() const {
    std::vector<std::string> names;
    for (const auto& [name, value] : tensors_) names.push_back(name);
    return names;
  }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
  std::map<std::string, at::Tensor> tensors_;
};

// The model's parameters, each set once.
class Parameters {
 public:
  explicit Parameters(const Model& model) {
    for (const auto& p : model.named_parameters()) left_[p.key()] = p.value();
  }
  void Set(const std::string& name, const at::Tensor& value) {
    const at::NoGradGuard guard;
    const auto found = left_.find(name);
    CISTERN_CHECK(found != left_.end(), "the model has no parameter ", name);
    found->second.copy_(value);
    left_.erase(found);
  }
  // weight and bias of a map or a norm.
  void SetBoth(const std::string& name, const at::Tensor& weight, const at::Tensor& bias) {
    Set(name + ".weight", weight);
    Set(name + ".bias", bias);
  }
  void CheckAllSet() const {
    CISTERN_CHECK(left_.empty(), "the source has no ", left_.begin()->first);
  }

 private:
  std::map<std::string, at::Tensor> left_;
};

// From the file to the model.
struct Copy {
  Weights& from;
  Parameters& to;
  bool turned;  // maps are stored as [in, out]

  void Norm(const std::string& ours, const std::string& theirs, int64_t width) {
    to.SetBoth(ours, from.Take(theirs + ".weight", {width}), from.Take(theirs + ".bias", {width}));
  }
  void Map(const std::string& ours, const std::string& theirs, int64_t in, int64_t out) {
    const at::Tensor weight = turned ? from.Take(theirs + ".weight", {in, out}).t()
                                     : from.Take(theirs + ".weight", {out, in});
    to.SetBoth(ours, weight, from.Take(theirs + ".bias", {out}));
  }
  // Everything is set; what is neither idle nor taken goes into the notes.
  void Finish(const std::function<bool(const std::string&)>& idle,
              std::vector<std::string>* notes) {
    to.CheckAllSet();
    for (const std::string& name : from.Left())
      if (!idle(name)) notes->push_back("left: " + name);
  }
};

// Of the sizes that a config says, by their keys.
using Sizes = std::map<std::string, int64_t>;
void CheckSizes(const Settings& settings, const Sizes& sizes) {
  for (const auto& [key, value] : sizes)
    CISTERN_CHECK(value >= 1 && value <= (int64_t{1} << 24), settings.path(), ": ", key, "=", value,
                  " is not within 1..2^24");
}

// The config's own limits are those of our model.
std::shared_ptr<Model> Made(const ModelConfig& config, const Settings& settings) {
  try {
    return MakeModel(config, 1);
  } catch (const UsageError& e) {
    throw Error(settings.path() + " does not make a model here: " + e.what());
  }
}

ModelConfig CommonConfig() {
  ModelConfig c;
  c.attention = {"softmax"};
  c.positions = PositionKind::kLearned;
  c.bias = true;
  return c;
}

// GPT-2 (Radford et al. 2019), class GPT2LMHeadModel. Its maps are stored as [in, out], those of
// queries, keys and values side by side.
ForeignModel Gpt2(const std::string& folder, const Settings& settings) {
  for (const char* key : {"scale_attn_by_inverse_layer_idx", "add_cross_attention"})
    settings.Require(key, false);
  for (const char* key : {"scale_attn_weights", "tie_word_embeddings"}) settings.Require(key, true);
  ModelConfig c = CommonConfig();
  c.vocab_size = settings.Get<int64_t>("vocab_size", 50257);
  c.max_length = settings.Get<int64_t>("n_positions", 1024);
  c.dim = settings.Get<int64_t>("n_embd", 768);
  c.layers = settings.Get<int64_t>("n_layer", 12);
  c.heads = settings.Get<int64_t>("n_head", 12);
  c.ffn_dim = settings.Get<int64_t>("n_inner", 4 * c.dim);
  c.norm_eps = settings.Get("layer_norm_epsilon", 1e-5);
  c.activation = settings.ActivationOf("activation_function", "gelu_new");
  c.dropout = settings.Get("resid_pdrop", 0.1);
  c.attention_dropout = settings.Get("attn_pdrop", 0.1);
  c.init_std = settings.Get("initializer_range", 0.02);
  CheckSizes(settings, {{"vocab_size", c.vocab_size},
                        {"n_positions", c.max_length},
                        {"n_embd", c.dim},
                        {"n_layer", c.layers},
                        {"n_head", c.heads},
                        {"n_inner", c.ffn_dim}});
  ForeignModel read;
  if (settings.Get("embd_pdrop", 0.1) != c.dropout)
    read.notes.push_back("embd_pdrop differs from resid_pdrop, which is the dropout of both here");
  Weights from(folder, "transformer.");
  const int64_t D = c.dim;
  from.Check("wte.weight", {c.vocab_size, D});  // before a model of these sizes is made
  from.Check("wpe.weight", {c.max_length, D});
  from.Check("h.0.mlp.c_fc.weight", {D, c.ffn_dim});
  read.model = Made(c, settings);
  Parameters to(*read.model);
  Copy copy{from, to, true};
  const at::Tensor table = from.Take("wte.weight", {c.vocab_size, D});
  to.Set("embed_tokens.weight", table);
  from.DropEqual("lm_head.weight", table);
  to.Set("embed_positions.weight", from.Take("wpe.weight", {c.max_length, D}));
  copy.Norm("norm", "ln_f", D);
  for (int64_t i = 0; i < c.layers; ++i) {
    const std::string ours = StrCat("layers.", i, "."), theirs = StrCat("h.", i, ".");
    copy.Norm(ours + "attention_norm", theirs + "ln_1", D);
    copy.Norm(ours + "ffn_norm", theirs + "ln_2", D);
    const at::Tensor weight = from.Take(theirs + "attn.c_attn.weight", {D, 3 * D}),
                     bias = from.Take(theirs + "attn.c_attn.bias", {3 * D});
    int64_t part = 0;
    for (const char* name : {"q", "k", "v"}) {
      to.SetBoth(ours + "attention." + name + "_proj", weight.narrow(1, part * D, D).t(),
                 bias.narrow(0, part * D, D));
      ++part;
    }
    copy.Map(ours + "attention.o_proj", theirs + "attn.c_proj", D, D);
    copy.Map(ours + "ffn.up_proj", theirs + "mlp.c_fc", D, c.ffn_dim);
    copy.Map(ours + "ffn.down_proj", theirs + "mlp.c_proj", c.ffn_dim, D);
  }
  copy.Finish(
      [](const std::string& name) {  // masks that old versions saved
        return name.ends_with(".attn.bias") || name.ends_with(".attn.masked_bias");
      },
      &read.notes);
  return read;
}

// RoBERTa (Liu et al. 2019), class RobertaForMaskedLM.
ForeignModel Roberta(const std::string& folder, const Settings& settings, int64_t mask_row) {
  settings.Require<std::string>("position_embedding_type", "absolute");
  for (const char* key : {"is_decoder", "add_cross_attention"}) settings.Require(key, false);
  settings.Require("tie_word_embeddings", true);
  ModelConfig c = CommonConfig();
  c.kind = "masked_lm";
  c.vocab_size = settings.Get<int64_t>("vocab_size", 50265);
  const int64_t first = settings.Get<int64_t>("pad_token_id", 1) + 1,
                places = settings.Get<int64_t>("max_position_embeddings", 512),
                segments = settings.Get<int64_t>("type_vocab_size", 2);
  c.max_length = places - first;
  c.dim = settings.Get<int64_t>("hidden_size", 768);
  const int64_t D = c.dim;
  c.layers = settings.Get<int64_t>("num_hidden_layers", 12);
  c.heads = settings.Get<int64_t>("num_attention_heads", 12);
  c.ffn_dim = settings.Get<int64_t>("intermediate_size", 3072);
  c.norm = NormPlace::kPost;
  c.embedding_norm = true, c.final_norm = false, c.head_bias = true;
  c.norm_eps = settings.Get("layer_norm_eps", 1e-12);
  c.activation = settings.ActivationOf("hidden_act", "gelu");
  c.dropout = settings.Get("hidden_dropout_prob", 0.1);
  c.attention_dropout = settings.Get("attention_probs_dropout_prob", 0.1);
  c.init_std = settings.Get("initializer_range", 0.02);
  CheckSizes(settings, {{"vocab_size", c.vocab_size},
                        {"pad_token_id + 1", first},
                        {"max_position_embeddings - (pad_token_id + 1)", c.max_length},
                        {"hidden_size", D},
                        {"num_hidden_layers", c.layers},
                        {"num_attention_heads", c.heads},
                        {"intermediate_size", c.ffn_dim},
                        {"type_vocab_size", segments}});
  CISTERN_CHECK(mask_row >= 0 && mask_row < c.vocab_size, settings.path(), ": the mask's id ",
                mask_row, " is not within the vocabulary of ", c.vocab_size);
  ForeignModel read;
  Weights from(folder, "roberta.");
  CISTERN_CHECK(from.Has("lm_head.dense.weight"), from.path(),
                " has no lm_head: only RobertaForMaskedLM can be read, which predicts tokens");
  from.Check("embeddings.word_embeddings.weight", {c.vocab_size, D});  // before a model is made
  from.Check("embeddings.position_embeddings.weight", {places, D});
  from.Check("encoder.layer.0.intermediate.dense.weight", {c.ffn_dim, D});
  read.model = Made(c, settings);
  Parameters to(*read.model);
  Copy copy{from, to, false};
  const at::Tensor table = from.Take("embeddings.word_embeddings.weight", {c.vocab_size, D}),
                   segment = from.Take("embeddings.token_type_embeddings.weight", {segments, D}),
                   bias = from.Take("lm_head.bias", {c.vocab_size});
  to.Set("embed_tokens.weight", table);
  to.Set("mask_token", table[mask_row]);
  to.Set("embed_positions.weight", from.Take("embeddings.position_embeddings.weight", {places, D})
                                           .narrow(0, first, c.max_length) +
                                       segment[0]);
  copy.Norm("embed_norm", "embeddings.LayerNorm", D);
  copy.Map("transform", "lm_head.dense", D, D);
  copy.Norm("transform_norm", "lm_head.layer_norm", D);
  to.Set("lm_head.bias", bias);
  from.DropEqual("lm_head.decoder.weight", table);
  from.DropEqual("lm_head.decoder.bias", bias);
  for (int64_t i = 0; i < c.layers; ++i) {
    const std::string ours = StrCat("layers.", i, "."), theirs = StrCat("encoder.layer.", i, ".");
    for (const auto& [name, of] :
         std::map<std::string, std::string>{{"q", "query"}, {"k", "key"}, {"v", "value"}})
      copy.Map(ours + "attention." + name + "_proj", theirs + "attention.self." + of, D, D);
    copy.Map(ours + "attention.o_proj", theirs + "attention.output.dense", D, D);
    copy.Norm(ours + "attention_norm", theirs + "attention.output.LayerNorm", D);
    copy.Map(ours + "ffn.up_proj", theirs + "intermediate.dense", D, c.ffn_dim);
    copy.Map(ours + "ffn.down_proj", theirs + "output.dense", c.ffn_dim, D);
    copy.Norm(ours + "ffn_norm", theirs + "output.LayerNorm", D);
  }
  if (segments > 1) read.notes.push_back("left: the embeddings of segments other than the first");
  copy.Finish([](const std::string& name) { return name.ends_with("position_ids"); }, &read.notes);
  return read;
}

std::string TypeOf(const Settings& settings) {
  const auto type = settings.Get<std::string>("model_type", "");
  CISTERN_CHECK(type == "gpt2" || type == "roberta", settings.path(),
                type.empty() ? ": there is no model_type" : ": model_type=", type,
                "; gpt2 and roberta can be read");
  return type;
}

}  // namespace

std::string HuggingFaceKind(const std::string& folder) {
  return TypeOf(Settings(folder)) == "gpt2" ? "decoder_lm" : "masked_lm";
}

ForeignModel ReadHuggingFace(const std::string& folder, int64_t mask_row) {
  const Settings settings(folder);
  return TypeOf(settings) == "gpt2" ? Gpt2(folder, settings) : Roberta(folder, settings, mask_row);
}

}  // namespace cistern
