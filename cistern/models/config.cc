#include "cistern/models/config.h"

#include <algorithm>
#include <cmath>

#include "cistern/attention/head_groups.h"
#include "cistern/attention/reuse.h"
#include "cistern/base/error.h"
#include "cistern/nn/positions.h"

namespace cistern {

Fields ModelConfig::Describe() {
  Fields f;
  f.Add("kind", &kind, "what the model is",
        {"decoder_lm", "encoder_classifier", "encoder_decoder"});
  f.Add("version", &version, "version of this file's format");
  f.Add("vocab_size", &vocab_size, "token ids; set by the task", {0, 1 << 24});
  f.Add("classes", &classes, "classes of a classifier; set by the task", {0, 1 << 20});
  f.Add("attention", &attention,
        "mechanism of all layers (cistern info lists them), one for each, or shares of the heads: "
        "softmax:2+latte:2");
  f.Add("attention_options", &attention_options,
        "options by mechanism, such as {\"latte\": {\"latents\": 64}}");
  f.Add("dim", &dim, "width of the model (D)", {1, 65536});
  f.Add("layers", &layers, "blocks", {1, 1024});
  f.Add("heads", &heads, "attention heads; dim must be divisible by it", {1, 1024});
  f.Add("tied_layers", &tied_layers,
        "the layer whose parameters each layer has, by number from 0: 0,1,0,1 runs two layers "
        "twice; none: each has its own",
        {0, 1023});
  f.Add("ffn_dim", &ffn_dim, "width of the feed-forward; 0: 4 dim", {0, 1 << 20});
  f.Add("max_length", &max_length,
        "longest input of mechanisms and positions that have a fixed length", {1, 1 << 30});
  f.Add("decoder_layers", &decoder_layers,
        "encoder_decoder: blocks of the decoder; 0: as many as `layers`, the encoder's", {0, 1024});
  f.Add("decoder_attention", &decoder_attention,
        "encoder_decoder: mechanism of the decoder's causal attention, or one for each layer; "
        "none: as `attention`, the encoder's");
  f.Add("cross_attention", &cross_attention,
        "encoder_decoder: mechanism by which the decoder attends to the source, or one for each "
        "layer");
  f.Add("conv", &conv,
        "taps of the causal convolution on the projections (of an encoder_decoder: of the "
        "decoder's own); 0: none",
        {0, 64});
  f.Add("norm", &norm, "layer norm before or after attention and feed-forward", {"pre", "post"});
  f.Add("embedding_norm", &embedding_norm,
        "a layer norm of embeddings and positions, before the first block: BERT, Luna's encoders "
        "(whose memory has one too, its option "
        "norm)");
  f.Add("final_norm", &final_norm, "a layer norm after the last block");
  f.Add("norm_eps", &norm_eps, "epsilon of the layer norms", {0.0, 1.0});
  f.Add("activation", &activation, "of the feed-forward", {"gelu", "gelu_tanh", "relu"});
  f.Add("positions", &positions, "position encoding", PositionKinds());
  f.Add("pooling", &pooling,
        "encoder_classifier: what the head sees: the mean of the tokens, a learned token put "
        "before them, the mean of the memory's slots",
        {"mean", "cls", "memory"});
  f.Add("norm_pooled", &norm_pooled,
        "encoder_classifier: the final norm comes after pooling, not before");
  f.Add("head", &head,
        "encoder_classifier: a hidden layer of ffn_dim with relu (Long Range Arena) or gelu "
        "(P000), or one linear map (Latte, UCU)",
        {"relu", "gelu", "linear"});
  f.Add("bias", &bias, "biases in all linear maps");
  f.Add("ffn_bias", &ffn_bias, "biases in the feed-forward, whatever `bias` says");
  f.Add("head_bias", &head_bias,
        "decoder_lm, encoder_decoder: a bias in the output layer, whatever `bias` says; needs "
        "tie_embeddings=false");
  f.Add("tie_embeddings", &tie_embeddings,
        "decoder_lm, encoder_decoder: the output layer shares the (target's) embedding matrix");
  f.Add("share_embeddings", &share_embeddings,
        "encoder_decoder: source and target share one embedding matrix");
  f.Add("target_vocab_size", &target_vocab_size,
        "encoder_decoder without share_embeddings: token ids of the target; 0: vocab_size",
        {0, 1 << 24});
  f.Add("dropout", &dropout, "after attention, feed-forward and embedding", {0.0, 0.95});
  f.Add("attention_dropout", &attention_dropout, "on the attention probabilities", {0.0, 0.95});
  f.Add("ffn_dropout", &ffn_dropout,
        "after the activation of the feed-forward: Long Range Arena, P000's code, Luna and fairseq "
        "have it",
        {0.0, 0.95});
  f.Add("init_std", &init_std, "standard deviation of the initial weights", {1e-6, 10.0});
  f.Add("embedding_std", &embedding_std,
        "the same of embeddings and learned positions; 0 takes init_std", {0.0, 10.0});
  f.Add("position_std", &position_std,
        "the same of learned positions, 0 as P000's code; -1 takes that of embeddings",
        {-1.0, 10.0});
  return f;
}

void ModelConfig::Validate() const {
  if (version != kConfigVersion) {
    FailUsage("config version ", version, " is not known to this build, which reads version ",
              kConfigVersion, version > kConfigVersion ? "; a newer cistern wrote it" : "");
  }
  if (dim % heads != 0) FailUsage("dim=", dim, " is not divisible by heads=", heads);
  if (head_bias && tie_embeddings && kind != "encoder_classifier")
    FailUsage("head_bias=true needs tie_embeddings=false: a tied output layer has no bias");
  if (kind == "encoder_decoder" && embedding_norm)
    FailUsage(
        "embedding_norm=true is for the other kinds: an encoder_decoder has no norm there; leave "
        "it out");
  if (kind == "encoder_decoder" && share_embeddings && TargetVocabSize() != vocab_size) {
    FailUsage("target_vocab_size=", target_vocab_size,
              " needs share_embeddings=false: one shared matrix has vocab_size=", vocab_size,
              " rows");
  }
  if (!attention_options.is_object())
    FailUsage("attention_options must be an object of options by mechanism");
  for (const auto& [name, options] : attention_options.items()) {
    if (!options.is_object()) FailUsage("attention_options.", name, " must be an object");
    const MechanismInfo& info = FindMechanism(name);
    const auto part = [&name](const std::string& a) { return InHeadGroups(a, name); };
    const auto parted = [&](Form form) {
      return std::any_of(Attention(form).begin(), Attention(form).end(), part);
    };
    const std::vector<Form> forms = Forms();
    if (std::any_of(forms.begin(), forms.end(), parted))
      continue;  // for fewer heads: checked below
    info.make(options, {dim, heads, max_length, 0, attention_dropout});  // reads and checks them
  }
  double blocks = 0;
  for (const Form form : Forms()) blocks += double(Layers(form));
  const double parameters =
      double(vocab_size) * double(dim) + blocks * 12.0 * double(dim) * double(dim);
  if (parameters > 1e11)
    FailUsage("the model would have about ", parameters, " parameters; check dim=", dim,
              " and layers=", layers);
  for (const Form form : Forms()) ValidateStack(form);
  ValidateMemory();
  ValidateTies();
}

void ModelConfig::ValidateTies() const {
  if (tied_layers.empty()) return;
  if (kind == "encoder_decoder")
    FailUsage(
        "tied_layers has no meaning for an encoder_decoder, which has two stacks of layers; leave "
        "it out");
  if (int64_t(tied_layers.size()) != layers) {
    FailUsage("tied_layers lists ", tied_layers.size(), " numbers for ", layers,
              " layers; give for each the layer whose parameters it has");
  }
  const Form form = Forms()[0];
  for (int64_t layer = 0; layer < layers; ++layer) {
    const int64_t owner = TiedTo(layer);
    if (owner < 0 || owner > layer || TiedTo(owner) != owner) {
      FailUsage("tied_layers: layer ", layer, " cannot have the parameters of layer ", owner,
                ": that must be an earlier layer with its own, or the layer itself");
    }
    if (owner == layer) continue;
    const AttentionLayerOptions a = AttentionOptions(layer, form),
                                b = AttentionOptions(owner, form);
    if (a.mechanism != b.mechanism) {
      FailUsage("tied_layers: layer ", layer, " (", a.mechanism,
                ") cannot have the parameters of layer ", owner, " (", b.mechanism,
                "); tie layers of one mechanism");
    }
    const auto core = MakeMechanism(a);
    const auto redrawn = [](const CoreWeight& w) { return w.kind == CoreWeight::Kind::kRedrawn; };
    if (std::any_of(core->weights().begin(), core->weights().end(), redrawn)) {
      FailUsage("tied_layers: ", a.mechanism,
                " draws features anew while it is trained, which must not happen between layers ",
                owner, " and ", layer, "; set its redraw=0");
    }
    if (a.dims.copied != b.dims.copied || a.dims.copied_on != b.dims.copied_on) {
      FailUsage("tied_layers: by the placement of ", a.mechanism, " layers ", owner, " and ", layer,
                " do not copy the same scores, so they cannot have the same parameters; tie other "
                "layers, or choose another placement");
    }
  }
}

void ModelConfig::ValidateMemory() const {
  std::string streamed;  // the mechanism that hands a memory from block to block
  for (int64_t layer = 0; layer < layers; ++layer) {
    if (!HandsOnMemory(layer)) continue;
    const std::string& name = Mechanism(layer, Form::kBidirectional);
    if (!streamed.empty() && streamed != name) {
      FailUsage("attention has both ", streamed, " and ", name,
                ", but one memory goes from block to block; use one of them");
    }
    streamed = name;
  }
  if (kind != "encoder_classifier") return;
  if (pooling == "memory" && !HandsOnMemory(layers - 1)) {
    FailUsage(
        "pooling=memory needs a last layer that hands on a memory, such as luna or conv_luna, not ",
        Mechanism(layers - 1), "; use pooling=mean");
  }
  for (int64_t layer = 0; layer < layers && pooling == "cls"; ++layer) {
    if (FindMechanism(Mechanism(layer)).memory == MemoryUse::kLatents) {
      FailUsage("pooling=cls sees a token, but after ", Mechanism(layer),
                " there are latents alone; use pooling=mean");
    }
  }
}

std::vector<Form> ModelConfig::Forms() const {
  if (kind == "encoder_decoder") return {Form::kBidirectional, Form::kCausal, Form::kCross};
  return {kind == "decoder_lm" ? Form::kCausal : Form::kBidirectional};
}

void ModelConfig::ValidateStack(Form form) const {
  const std::vector<std::string>& names = Attention(form);
  const char* key = &names == &attention   ? "attention"
                    : form == Form::kCross ? "cross_attention"
                                           : "decoder_attention";
  const int64_t count = Layers(form);
  if (names.empty() || (names.size() != 1 && int64_t(names.size()) != count)) {
    const bool decoder = kind == "encoder_decoder" && form == Form::kCausal;
    FailUsage(key, " lists ", names.size(), " mechanisms for ", count, " layers",
              decoder ? " of the decoder" : "", "; give one for all or one for each",
              decoder && &names == &attention ? " in decoder_attention" : "");
  }
  bool copies = false, planned = false;
  for (int64_t layer = 0; layer < count; ++layer) {  // scores that are copied
    if (!FindMechanism(Mechanism(layer, form)).copies_scores) continue;
    const int64_t copied = Copied(layer, form);
    copies = copies || copied != 0;
    const std::vector<int64_t> plan = ReusePlan(OptionsOf(Mechanism(layer, form)), heads, count);
    planned = std::any_of(plan.begin(), plan.end(), [](int64_t c) { return c != 0; });
    if (copied > 0 && !FindMechanism(Mechanism(layer - 1, form)).leaves_scores) {
      FailUsage(
          key, ": layer ", layer + 1, " of ", count, " (", Mechanism(layer, form),
          ") would take over the scores of layer ", layer, ", and ", Mechanism(layer - 1, form),
          " leaves none; put softmax or reuse there, or another mechanism in layer ", layer + 1);
    }
  }
  if (planned && !copies)
    FailUsage(key,
              ": by its placement no layer with reuse takes over scores; use softmax there, or "
              "another placement");
  for (int64_t layer = 0; layer < count;
       ++layer) {  // form, positions, convolution and sizes of every mechanism in use
    MakeMechanism(AttentionOptions(layer, form));
    if (names.size() == 1) break;
  }
}

const std::vector<std::string>& ModelConfig::Attention(Form form) const {
  if (kind != "encoder_decoder" || form == Form::kBidirectional) return attention;
  if (form == Form::kCross) return cross_attention;
  return decoder_attention.empty() ? attention : decoder_attention;
}

int64_t ModelConfig::Layers(Form form) const {
  return kind == "encoder_decoder" && form != Form::kBidirectional && decoder_layers > 0
             ? decoder_layers
             : layers;
}

const std::string& ModelConfig::Mechanism(int64_t layer, Form form) const {
  const std::vector<std::string>& names = Attention(form);
  return names[names.size() == 1 ? 0 : size_t(layer)];
}

const Json& ModelConfig::OptionsOf(const std::string& mechanism) const {
  static const Json none = Json::object();
  if (IsHeadGroups(mechanism)) return attention_options;
  return attention_options.contains(mechanism) ? attention_options.at(mechanism) : none;
}

int64_t ModelConfig::Copied(int64_t layer, Form form) const {
  const std::string& name = Mechanism(layer, form);
  if (!FindMechanism(name).copies_scores) return 0;
  return ReusePlan(OptionsOf(name), heads, Layers(form))[size_t(layer)];
}

AttentionLayerOptions ModelConfig::AttentionOptions(int64_t layer, Form form) const {
  const bool decoder = kind == "encoder_decoder" && form != Form::kBidirectional;
  AttentionLayerOptions a;
  a.mechanism = Mechanism(layer, form);
  a.mechanism_options = OptionsOf(a.mechanism);
  a.dims = {dim, heads, max_length, layer, attention_dropout};
  a.dims.copied = Copied(layer, form);
  a.dims.copied_on = layer + 1 < Layers(form) ? std::max<int64_t>(0, Copied(layer + 1, form)) : 0;
  a.form = form;
  a.positions = form == Form::kCross && positions == "rotary"
                    ? "none"
                    : positions;  // source and target count apart
  a.conv = kind == "encoder_decoder" && form != Form::kCausal ? 0 : conv;
  a.bias = bias;
  a.init_std = init_std;
  a.out_std = init_std / std::sqrt((decoder ? 3.0 : 2.0) * double(Layers(form)));
  return a;
}

bool ModelConfig::HandsOnMemory(int64_t layer) const {
  return FindMechanism(Mechanism(layer, Form::kBidirectional)).HandsOnMemory();
}

BlockOptions ModelConfig::Block(int64_t layer, Form form) const {
  BlockOptions b;
  b.attention = AttentionOptions(layer, form);
  if (kind == "encoder_decoder" && form == Form::kCausal)
    b.cross = AttentionOptions(layer, Form::kCross);
  b.norm = norm;
  b.activation = activation;
  b.ffn_bias = bias || ffn_bias;
  b.ffn_dim = ffn_dim;
  b.dropout = dropout;
  b.ffn_dropout = ffn_dropout;
  b.norm_eps = norm_eps;
  // What reaches no later block and not the head is left out.
  const bool memory_pooled = kind == "encoder_classifier" && pooling == "memory";
  b.attention.tokens_out = layer + 1 < layers || !memory_pooled;
  b.memory_out = memory_pooled;
  for (int64_t later = layer + 1; later < layers && form == Form::kBidirectional; ++later)
    b.memory_out = b.memory_out || HandsOnMemory(later);
  return b;
}

std::string ModelConfig::Summary() const {
  std::string out, between;
  for (const Form form : Forms()) {
    std::string names;
    for (const std::string& a : Attention(form)) names += (names.empty() ? "" : "+") + a;
    if (form == Form::kCross) {
      out += " and " + names + " to the source";
    } else {
      out += StrCat(between,
                    kind != "encoder_decoder" ? ""
                    : form == Form::kCausal   ? "decoder "
                                              : "encoder ",
                    names, ", ", Layers(form), " layers x ", dim);
    }
    between = "; ";
  }
  return StrCat(out, ", ", heads, " heads", conv > 0 ? StrCat(", conv ", conv) : "");
}

ModelConfig ReadModelConfig(const Json& json, const std::string& where) {
  ModelConfig config;
  if (json.is_object() && json.contains("version") && json["version"].is_number_integer() &&
      json["version"] != kConfigVersion) {
    config.version =
        json["version"]
            .get<int64_t>();  // before unknown keys of another version confuse the message
    config.Validate();
  }
  config.Describe().Read(json, where);
  try {
    config.Validate();
  } catch (const UsageError& e) {
    FailUsage(where, ": ", e.what());
  }
  return config;
}

}  // namespace cistern
