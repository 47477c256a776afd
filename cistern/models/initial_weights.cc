#include "cistern/models/initial_weights.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <set>
#include <vector>

#include "cistern/base/error.h"
#include "cistern/base/hash.h"
#include "cistern/models/model.h"
#include "cistern/nn/linear.h"
#include "cistern/tensors/device.h"

namespace cistern {
namespace {

enum class Kind {
  kDefault,
  kNormal,
  kTruncatedNormal,
  kWidthNormal,
  kUniform,
  kTorch,
  kXavierUniform,
  kLecunNormal,
  kZeros
};

const EnumNames<Kind>& Kinds() {
  static const EnumNames<Kind> names = {{Kind::kDefault, "default"},
                                        {Kind::kNormal, "normal"},
                                        {Kind::kTruncatedNormal, "truncated_normal"},
                                        {Kind::kWidthNormal, "width_normal"},
                                        {Kind::kUniform, "uniform"},
                                        {Kind::kTorch, "torch"},
                                        {Kind::kXavierUniform, "xavier_uniform"},
                                        {Kind::kLecunNormal, "lecun_normal"},
                                        {Kind::kZeros, "zeros"}};
  return names;
}

struct Scheme {
  Kind kind = Kind::kDefault;
  double number = 0;  // deviation, bound or gain
};

// "normal(0.02)". UsageError that names the key.
Scheme ParseScheme(const std::string& text, const std::string& key) {
  const size_t open = text.find('(');
  const bool numbered = open != std::string::npos;
  Scheme scheme;
  try {
    scheme.kind = ValueOf(text.substr(0, open), Kinds(), "scheme of initial weights");
  } catch (const UsageError& e) {
    FailUsage("init.", key, ": ", e.what());
  }
  const bool needs = scheme.kind == Kind::kNormal || scheme.kind == Kind::kTruncatedNormal ||
                     scheme.kind == Kind::kUniform,
             may = needs || scheme.kind == Kind::kXavierUniform;
  const std::string& name = NameOf(scheme.kind, Kinds());
  if (numbered != needs && !(numbered && may)) {
    FailUsage("init.", key, "=", text, ": ", name,
              needs ? " needs a number, such as " + name + "(0.02)" : " takes no number");
  }
  scheme.number = 1;
  if (!numbered) return scheme;
  const std::string number = text.substr(open + 1);
  char* end = nullptr;
  scheme.number = std::strtod(number.c_str(), &end);
  if (end == number.c_str() || std::string(end) != ")" || !(scheme.number > 0) ||
      !(scheme.number <= 100)) {
    FailUsage("init.", key, "=", text, " is not ", name,
              "(x) with a number x above 0, at most 100; zeros draws nothing");
  }
  return scheme;
}

// One key of the group, and the key whose scheme holds where it is left out.
struct Key {
  const char* name;
  std::string InitOptions::*member;
  const char* parent;
  const char* help;
};

const std::vector<Key>& Keys() {
  using O = InitOptions;
  static const std::vector<Key> keys = {
      {"linear", &O::linear, nullptr,
       "weights of all linear maps: default, normal(std), truncated_normal(std), width_normal, "
       "uniform(bound), torch, xavier_uniform(gain), lecun_normal, zeros"},
      {"query_key", &O::query_key, "linear",
       "of attention's maps other than values and output: queries, keys, controls, gates"},
      {"value", &O::value, "linear", "of the maps to values"},
      {"attention_out", &O::attention_out, "linear", "of attention's output projection"},
      {"ffn_up", &O::ffn_up, "linear", "of the feed-forward's first map"},
      {"ffn_down", &O::ffn_down, "linear", "of the feed-forward's second map"},
      {"head", &O::head, "linear", "of a classifier's head, of an untied output layer"},
      {"bias", &O::bias, nullptr, "biases of all linear maps: default is zeros"},
      {"attention_out_bias", &O::attention_out_bias, "bias", "of attention's output projection"},
      {"ffn_bias", &O::ffn_bias, "bias", "of the feed-forward"},
      {"head_bias", &O::head_bias, "bias", "of a classifier's head, of an untied output layer"},
      {"embedding", &O::embedding, nullptr, "token embeddings, in place of embedding_std"},
      {"positions", &O::positions, nullptr, "learned positions, in place of position_std"},
      {"cls", &O::cls, nullptr, "the learned token of pooling=cls: default is zeros"}};
  return keys;
}

const Key& FindKey(const std::string& name) {
  for (const Key& key : Keys()) {
    if (key.name == name) return key;
  }
  Fail("[initial weights] no key ", name);
}

// Half the width of what flax keeps of a normal variable, and the deviation of that part.
constexpr double kCut = 2.0;
double CutDeviation() {
  const double density = std::exp(-kCut * kCut / 2) / std::sqrt(2 * M_PI),
               mass = std::erf(kCut / std::sqrt(2.0));
  return std::sqrt(1 - 2 * kCut * density / mass);
}

struct Fans {
  double in = 0, out = 0;
};

Fans FansOf(at::IntArrayRef shape) {
  if (shape.size() < 2) return {};
  double rest = 1;
  for (size_t i = 2; i < shape.size(); ++i) rest *= double(shape[i]);
  return {double(shape[1]) * rest, double(shape[0]) * rest};
}

at::Tensor Drawn(const Scheme& scheme, at::IntArrayRef shape, const Fans& fans, uint64_t seed) {
  at::Generator generator = at::make_generator<at::CPUGeneratorImpl>(seed);
  at::Tensor x = at::zeros(shape, at::kFloat);
  const auto normal = [&](double std) { return x.normal_(0, std, generator); };
  const auto uniform = [&](double bound) { return x.uniform_(-bound, bound, generator); };
  const auto cut = [&](double std) {
    const double inside = std::erf(kCut / std::sqrt(2.0));
    return x.uniform_(-inside, inside, generator).erfinv_().mul_(std::sqrt(2.0) * std);
  };
  switch (scheme.kind) {
    case Kind::kNormal:
      return normal(scheme.number);
    case Kind::kTruncatedNormal:
      return cut(scheme.number);
    case Kind::kWidthNormal:
      return normal(1 / std::sqrt(double(shape.back())));
    case Kind::kUniform:
      return uniform(scheme.number);
    case Kind::kTorch:
      return uniform(1 / std::sqrt(fans.in));
    case Kind::kXavierUniform:
      return uniform(scheme.number * std::sqrt(6 / (fans.in + fans.out)));
    case Kind::kLecunNormal:
      return cut(1 / std::sqrt(fans.in) / CutDeviation());
    case Kind::kDefault:
    case Kind::kZeros:
      break;
  }
  return x;
}

// The parts of "layers.0.attention.q_proj".
std::vector<std::string> Parts(const std::string& path) {
  std::vector<std::string> parts(1);
  for (const char c : path) {
    if (c == '.') {
      parts.emplace_back();
    } else {
      parts.back() += c;
    }
  }
  return parts;
}

struct Roles {
  std::string weight, bias;  // keys
};

// By the names that modules have in a model file.
Roles RolesOf(const std::string& path) {
  const std::vector<std::string> parts = Parts(path);
  const std::string& leaf = parts.back();
  for (const std::string& part : parts) {
    if (part == "ffn") return {leaf == "down_proj" ? "ffn_down" : "ffn_up", "ffn_bias"};
    if (part == "attention" || part == "cross_attention") {
      if (leaf == "o_proj" || leaf == "packed_o_proj")
        return {"attention_out", "attention_out_bias"};
      // Those of head groups have the mechanism's name before them: latte_v_proj.
      const bool value = leaf == "v_proj" || leaf == "pv_proj" || leaf.ends_with("_v_proj") ||
                         leaf.ends_with("_pv_proj");
      return {value ? "value" : "query_key", "bias"};
    }
    if (part == "classifier" || part == "lm_head") return {"head", "head_bias"};
  }
  return {"linear", "bias"};
}

class Drawer {
 public:
  Drawer(const InitOptions& options, uint64_t seed) : options_(options), seed_(seed) {}

  // `bias_of`: of a bias, the fans of its map's weight.
  void Draw(const std::string& key, const std::string& name, const at::Tensor& parameter,
            const Fans* bias_of = nullptr) {
    const Key* from = &FindKey(key);
    while ((options_.*from->member).empty()) from = &FindKey(from->parent);
    const std::string& text = options_.*from->member;
    const Scheme scheme = ParseScheme(text, from->name);
    if (scheme.kind == Kind::kDefault) return;
    used_.insert(from->name);
    const bool fans = scheme.kind == Kind::kTorch || scheme.kind == Kind::kXavierUniform ||
                      scheme.kind == Kind::kLecunNormal;
    const bool linear = key != "embedding" && key != "positions" && key != "cls";
    const bool fits =
        bias_of ? scheme.kind != Kind::kWidthNormal && (!fans || scheme.kind == Kind::kTorch)
                : !fans || linear || (scheme.kind == Kind::kXavierUniform && parameter.dim() >= 2);
    if (!fits) {
      FailUsage("init.", from->name, "=", text, " does not fit '", name, "', ",
                bias_of ? "a bias; those that do: default, zeros, torch, normal(std), "
                          "truncated_normal(std), uniform(bound)"
                        : "which is no linear map; those that do: default, zeros, normal(std), "
                          "truncated_normal(std), width_normal, uniform(bound)");
    }
    if (parameter.is_meta()) return;
    const at::NoGradGuard guard;
    const Fans of = bias_of ? *bias_of : FansOf(parameter.sizes());
    at::Tensor(parameter).copy_(Drawn(scheme, parameter.sizes(), of, XxHash64(name, seed_)));
  }

  void RequireAllUsed(const std::string& kind) const {
    for (const Key& key : Keys()) {
      const std::string& text = options_.*key.member;
      if (!text.empty() && text != "default" && used_.count(key.name) == 0)
        FailUsage("init.", key.name, "=", text, " fits no weight of this ", kind,
                  "; leave it out, or set it to default where a file that is extended says it");
    }
  }

 private:
  const InitOptions& options_;
  uint64_t seed_;
  std::set<std::string> used_;
};

}  // namespace

Fields InitOptions::Describe() {
  Fields f;
  for (const Key& key : Keys()) {
    const std::string otherwise = key.parent ? StrCat("; not given: as ", key.parent) : "";
    f.Add(key.name, &(this->*key.member), key.help + otherwise)
        .OmitWhen(key.parent ? "" : "default");
  }
  f.Add(
       "residual_scaling", &residual_scaling,
       "divide what attention_out and ffn_down draw by default by sqrt(2 layers), as GPT-2 (3 with "
       "cross attention)")
      .OmitWhen(true);
  f.Add("values_std", &values_std,
        "of a classifier's map of real values: standard deviation of its weights, 1 for x w + b of "
        "P000's code; 0: 1/sqrt(3 channels), that of torch's Linear (P002)",
        {0.0, 10.0})
      .OmitWhen(0.0);
  f.Add("values_bias_std", &values_bias_std, "the same of its biases, 0.1 for P000's code",
        {0.0, 10.0})
      .OmitWhen(0.0);
  f.Add("zero_pad_row", &zero_pad_row,
        "row 0 of the token embedding is zero and stays so: torch's padding_idx=0, as P000's code "
        "and Luna have it; for tasks whose real ids begin at 1")
      .OmitWhen(false);
  return f;
}

bool InitOptions::AnyNamed() const {
  for (const Key& key : Keys()) {
    const std::string& text = this->*key.member;
    if (!text.empty() && text != "default") return true;
  }
  return false;
}

void InitOptions::Check(const ModelConfig& config) const {
  const auto named = [&](const std::string& text) { return !text.empty() && text != "default"; };
  for (const Key& key : Keys()) {
    const std::string& text = this->*key.member;
    if (text.empty() && !key.parent) FailUsage("init.", key.name, " is empty; default is a scheme");
    if (!text.empty()) ParseScheme(text, key.name);
  }
  bool learned = false;
  for (const Form form : config.info().forms)
    learned = learned || config.Stack(form).options().positions == PositionKind::kLearned;
  if (named(positions) && !learned)
    FailUsage("init.positions=", positions, " has no effect: it needs positions=learned");
  if (named(positions) && config.position_std >= 0)
    FailUsage("init.positions=", positions, " and position_std=", config.position_std,
              " say the same; leave out one of them");
  if (named(embedding) && config.embedding_std > 0 &&
      (!learned || named(positions) || config.position_std >= 0))
    FailUsage("init.embedding=", embedding, " and embedding_std=", config.embedding_std,
              " say the same; leave out one of them");
  if (named(cls) && !(config.info().classifies && config.pooling == PoolingKind::kCls))
    FailUsage("init.cls=", cls, " has no effect: it needs a classifier with pooling=cls");
  const auto out = [&](const std::string& own) { return named(own.empty() ? linear : own); };
  if (!residual_scaling && out(attention_out) && out(ffn_down))
    FailUsage(
        "init.residual_scaling=false has no effect: named schemes draw attention's output and the "
        "feed-forward's second map, and they are never scaled; leave it out");
  const std::vector<std::string>& inputs = config.info().inputs;
  const bool takes_values = std::find(inputs.begin(), inputs.end(), "values?") != inputs.end();
  if ((values_std > 0 || values_bias_std > 0) && !takes_values)
    FailUsage("init.", values_std > 0 ? "values_std" : "values_bias_std",
              " is of a map of real values, which a model of kind ", config.kind,
              " does not have; leave it out");
  if (zero_pad_row && !config.info().pad_row)
    FailUsage("init.zero_pad_row=true: a model of kind ", config.kind,
              " has no token that stands for padding; leave it out");
}

void DrawInitialWeights(Model& model, uint64_t seed) {
  const InitOptions& options = model.config().init;
  if (options.AnyNamed()) {
    Drawer drawer(options, seed);
    for (const auto& entry : model.named_modules({}, /*include_self=*/false)) {
      const std::string& path = entry.key();
      if (const auto* table = dynamic_cast<const Embedding*>(entry.value().get())) {
        drawer.Draw("embedding", path + ".weight", table->weight);
      } else if (const auto* map = dynamic_cast<const Linear*>(entry.value().get())) {
        const Roles roles = RolesOf(path);
        const Fans fans = FansOf(map->weight.sizes());
        // What is said of the map of values alone, which its model has drawn, stands against a
        // scheme of all.
        const bool values = path.ends_with("embed_values");
        if (!(values && options.values_std > 0))
          drawer.Draw(roles.weight, path + ".weight", map->weight);
        if (map->bias.defined() && !(values && options.values_bias_std > 0))
          drawer.Draw(roles.bias, path + ".bias", map->bias, &fans);
      }
    }
    for (const auto& p : model.named_parameters()) {
      const std::string& name = p.key();
      if (name == "mask_token") drawer.Draw("embedding", name, p.value());
      if (name == "cls_token") drawer.Draw("cls", name, p.value());
      if (name.ends_with("embed_positions.weight")) drawer.Draw("positions", name, p.value());
    }
    drawer.RequireAllUsed(model.config().kind);
  }
  if (!options.zero_pad_row) return;
  const at::NoGradGuard guard;
  for (const auto& p : model.named_parameters()) {
    if (p.key().ends_with("embed_tokens.weight")) p.value().select(0, 0).zero_();
  }
}

}  // namespace cistern
