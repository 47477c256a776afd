#include "cistern/models/stack.h"

#include <algorithm>
#include <cmath>

#include "cistern/attention/head_groups.h"
#include "cistern/base/error.h"
#include "cistern/models/config.h"

namespace cistern {
namespace {

// {"latte": {"latents": 64}} over {"latte": {"share": true}}, option by option.
void MergeOptions(Json& all, const Json& over) {
  for (const auto& [mechanism, options] : over.items()) {
    if (!options.is_object()) continue;  // Validate refuses it
    Json& known = all[mechanism];
    if (!known.is_object()) known = Json::object();
    known.update(options);
  }
}

void CheckByMechanism(const Json& options, const std::string& key) {
  if (!options.is_object()) FailUsage(key, " must be an object of options by mechanism");
  for (const auto& [name, inner] : options.items()) {
    FindMechanism(name);
    if (!inner.is_object()) FailUsage(key, ".", name, " must be an object");
  }
}

}  // namespace

const EnumNames<SourceMemory>& SourceMemories() {
  static const EnumNames<SourceMemory> names = {{SourceMemory::kOwn, "own"},
                                                {SourceMemory::kDecoder, "decoder"},
                                                {SourceMemory::kEncoder, "encoder"}};
  return names;
}

Fields StackOptions::Describe() {
  Fields f;
  f.Add("attention", &attention, "mechanism of this stack's layers, or one for each")
      .OmitWhen(Json::array());
  f.Add("attention_options", &attention_options, "options by mechanism, over the model's")
      .OmitWhen(Json::object());
  f.Add("layer_options", &layer_options,
        "options by layer and mechanism, such as {\"2\": {\"latte\": {\"latents\": 8}}}")
      .OmitWhen(Json::object());
  f.Add("dim", &dim, "width; 0: the model's", {0, 65536}).OmitWhen(0);
  f.Add("qkv_dim", &qkv_dim,
        "width of queries, keys and values, all heads together; 0: the model's", {0, 65536})
      .OmitWhen(0);
  f.Add("layers", &layers, "blocks; 0: the model's", {0, 1024}).OmitWhen(0);
  f.Add("heads", &heads, "attention heads; 0: the model's", {0, 1024}).OmitWhen(0);
  f.Add("ffn_dim", &ffn_dim, "width of the feed-forward; 0: 4 dim; -1: the model's", {-1, 1 << 20})
      .OmitWhen(-1);
  f.Add("max_length", &max_length, "longest input; 0: the model's", {0, 1 << 30}).OmitWhen(0);
  f.Add("conv", &conv, "taps of the short convolution; 0: none; -1: the model's", {-1, 64})
      .OmitWhen(-1);
  f.Add("positions", &positions, "position encoding; none said: the model's", PositionKinds());
  f.Add("dropout", &dropout, "-1: the model's", {-1.0, 0.95}).OmitWhen(-1.0);
  f.Add("attention_dropout", &attention_dropout, "-1: the model's", {-1.0, 0.95}).OmitWhen(-1.0);
  f.Add("ffn_dropout", &ffn_dropout, "-1: the model's", {-1.0, 0.95}).OmitWhen(-1.0);
  f.Add("tied_layers", &tied_layers, "as the model's, of this stack's layers", {0, 1023})
      .OmitWhen(Json::array());
  return f;
}

Fields StackOptions::DescribeCross() {
  Fields f;
  f.Add("attention", &attention,
        "mechanism of the decoder's cross attention, or one for each layer; none: softmax")
      .OmitWhen(Json::array());
  f.Add("attention_options", &attention_options, "options by mechanism, over the model's")
      .OmitWhen(Json::object());
  f.Add("layer_options", &layer_options, "options by layer and mechanism").OmitWhen(Json::object());
  f.Add("heads", &heads, "attention heads; 0: the decoder's", {0, 1024}).OmitWhen(0);
  f.Add("qkv_dim", &qkv_dim,
        "width of queries, keys and values, all heads together; 0: the decoder's", {0, 65536})
      .OmitWhen(0);
  f.Add("attention_dropout", &attention_dropout, "-1: the decoder's", {-1.0, 0.95}).OmitWhen(-1.0);
  f.Add(
       "memory", &memory,
       "the memory that luna packs a source into and that the decoder's luna_causal weighs tokens "
       "by: learned, each layer's the same (own); or one that goes from layer to layer, each "
       "packing the source into it, as Luna's decoder: begun by a learned one (decoder), or by the "
       "encoder's last (encoder, Luna's code)",
       SourceMemories())
      .OmitWhen("own");
  return f;
}

// What positions=auto means here.
PositionKind LayerStack::FittingPositions() const {
  const bool turns =
      options_.heads > 0 && options_.qkv_dim / options_.heads % 2 == 0 &&
      std::all_of(options_.attention.begin(), options_.attention.end(),
                  [](const auto& name) { return FindMechanism(name).Fits(PositionKind::kRotary); });
  return turns && form_ != Form::kCross ? PositionKind::kRotary : PositionKind::kNone;
}

LayerStack::LayerStack(const ModelConfig& config, Form form)
    : config_(config), form_(form), options_(config.Group(form)) {
  const ModelInfo& info = config.info();
  crossed_ = info.Has(Form::kCross) && form != Form::kBidirectional;
  StackOptions& o = options_;
  const bool cross = form == Form::kCross;
  StackOptions above;  // what the group leaves open
  above.dim = config.dim, above.layers = config.layers, above.heads = config.heads;
  above.qkv_dim = config.qkv_dim;
  above.ffn_dim = config.ffn_dim, above.max_length = config.max_length;
  above.positions = config.positions, above.tied_layers = config.tied_layers;
  above.dropout = config.dropout, above.attention_dropout = config.attention_dropout;
  above.ffn_dropout = config.ffn_dropout;
  above.attention = config.attention;
  // The model's convolution is that of the causal stack if there is another stack.
  above.conv = info.forms.size() > 1 && form != Form::kCausal ? 0 : config.conv;
  source_dim_ = 0;
  if (cross) {
    above = LayerStack(config, Form::kCausal).options();
    above.conv = 0;
    const LayerStack source(config, Form::kBidirectional);
    source_dim_ = source.dim();
    above.max_length = source.options().max_length;
    if (above.positions == PositionKind::kRotary || above.positions == PositionKind::kRelative)
      above.positions = PositionKind::kNone;  // source and target count apart
    above.attention = {"softmax"};
  }
  if (o.attention.empty()) o.attention = above.attention;
  const auto unset = [](auto& value, const auto& otherwise, auto none) {
    if (value == none) value = otherwise;
  };
  unset(o.dim, above.dim, 0);
  unset(o.qkv_dim, above.qkv_dim, 0);
  unset(o.qkv_dim, o.dim, 0);
  unset(o.layers, above.layers, 0);
  unset(o.heads, above.heads, 0);
  unset(o.ffn_dim, above.ffn_dim, -1);
  unset(o.max_length, above.max_length, 0);
  unset(o.conv, above.conv, -1);
  if (!o.positions) o.positions = above.positions;
  if (o.positions == PositionKind::kAuto) o.positions = FittingPositions();
  unset(o.dropout, above.dropout, -1.0);
  unset(o.attention_dropout, above.attention_dropout, -1.0);
  unset(o.ffn_dropout, above.ffn_dropout, -1.0);
  if (o.tied_layers.empty()) o.tied_layers = above.tied_layers;
  o.attention_options = config.attention_options;
  if (config.Group(form).attention_options.is_object())
    MergeOptions(o.attention_options, config.Group(form).attention_options);
}

std::string LayerStack::Key(const std::string& name, bool in_group) const {
  return in_group ? GroupName(form_) + "." + name : name;
}

int64_t LayerStack::input_dim() const {
  return form_ == Form::kBidirectional && config_.input_dim > 0 ? config_.input_dim : dim();
}

const std::string& LayerStack::Mechanism(int64_t layer) const {
  return options_.attention[options_.attention.size() == 1 ? 0 : size_t(layer)];
}

Json LayerStack::OptionsByMechanism(int64_t layer) const {
  Json all = options_.attention_options;
  const std::string number = std::to_string(layer);
  if (form_ != Form::kCross && config_.layer_options.contains(number))
    MergeOptions(all, config_.layer_options.at(number));
  if (options_.layer_options.contains(number)) MergeOptions(all, options_.layer_options.at(number));
  return all;
}

Json LayerStack::Options(int64_t layer) const {
  const std::string& name = Mechanism(layer);
  const Json all = OptionsByMechanism(layer);
  if (IsHeadGroups(name)) return all;
  return all.contains(name) ? all.at(name) : Json::object();
}

bool LayerStack::Uses(int64_t layer, const std::string& mechanism) const {
  return Mechanism(layer) == mechanism || InHeadGroups(Mechanism(layer), mechanism);
}

bool LayerStack::Alike(int64_t a, int64_t b) const {
  return Mechanism(a) == Mechanism(b) && Options(a) == Options(b);
}

int64_t LayerStack::Copied(int64_t layer) const {
  const MechanismInfo& info = FindMechanism(Mechanism(layer));
  if (!info.copies_scores) return 0;
  return info.copy_plan(Options(layer), options_.heads, layers())[size_t(layer)];
}

AttentionLayerOptions LayerStack::Attention(int64_t layer) const {
  AttentionLayerOptions a;
  a.mechanism = Mechanism(layer);
  a.mechanism_options = Options(layer);
  a.dims = {options_.qkv_dim, options_.heads, options_.max_length, layer,
            options_.attention_dropout};
  a.dims.model = options_.qkv_dim == options_.dim ? 0 : options_.dim;
  a.dims.relative_std = config_.PositionStd();
  const MechanismInfo& info = FindMechanism(Mechanism(layer));
  const SourceMemory memory = config_.cross.memory;
  a.dims.memory_given = form_ == Form::kCross ? memory == SourceMemory::kEncoder
                        : form_ == Form::kCausal
                            ? memory != SourceMemory::kOwn && info.memory == MemoryUse::kFixed
                            : false;
  a.dims.copied = Copied(layer);
  a.dims.copied_on = layer + 1 < layers() ? std::max<int64_t>(0, Copied(layer + 1)) : 0;
  a.form = form_;
  a.source_dim = info.MakesLatents() && form_ == Form::kBidirectional ? input_dim() : source_dim_;
  a.positions = *options_.positions;
  a.conv = options_.conv;
  a.bias = config_.bias;
  a.init_std = config_.init_std;
  a.out_std = config_.init_std;
  if (config_.init.residual_scaling)
    a.out_std /= std::sqrt((crossed_ ? 3.0 : 2.0) * double(layers()));
  return a;
}

bool LayerStack::HandsOnMemory(int64_t layer) const {
  return FindMechanism(Mechanism(layer)).HandsOnMemory();
}

BlockOptions LayerStack::Block(int64_t layer) const {
  BlockOptions b;
  b.attention = Attention(layer);
  if (crossed_) b.cross = config_.Stack(Form::kCross).Attention(layer);
  b.norm = config_.norm;
  b.activation = config_.activation;
  b.ffn_bias = config_.bias || config_.ffn_bias;
  b.ffn_dim = options_.ffn_dim;
  b.dropout = options_.dropout;
  b.ffn_dropout = options_.ffn_dropout;
  b.ffn_out_dropout = config_.ffn_out_dropout;
  b.norm_eps = config_.norm_eps;
  b.norm_kind = config_.norm_kind;
  // What reaches no later block, not the head and not the decoder is left out.
  const bool memory_pooled = form_ == Form::kBidirectional && config_.PoolsMemory();
  b.attention.tokens_out = layer + 1 < layers() || !memory_pooled;
  b.source_memory = crossed_ && config_.cross.memory != SourceMemory::kOwn;
  b.memory_out = form_ == Form::kBidirectional
                     ? memory_pooled || config_.cross.memory == SourceMemory::kEncoder
                     : b.source_memory && layer + 1 < layers();
  for (int64_t later = layer + 1; later < layers() && form_ == Form::kBidirectional; ++later)
    b.memory_out = b.memory_out || HandsOnMemory(later);
  return b;
}

// ---- what single fields cannot check

void LayerStack::Validate() const {
  const std::vector<std::string>& names = options_.attention;
  const bool several = config_.info().forms.size() > 1;
  const bool own = form_ == Form::kCross || !config_.Group(form_).attention.empty();
  const std::string key = Key("attention", own),
                    of = several
                             ? " of the " + GroupName(form_ == Form::kCross ? Form::kCausal : form_)
                             : "";
  if (names.empty() || (names.size() != 1 && int64_t(names.size()) != layers())) {
    FailUsage(key, " lists ", names.size(), " mechanisms for ", layers(), " layers", of,
              "; give one for all or one for each",
              several && !own ? " in " + Key("attention", true) : "");
  }
  if (options_.qkv_dim % options_.heads != 0) {
    const StackOptions& group = config_.Group(form_);
    const bool wide = group.qkv_dim > 0 || config_.qkv_dim > 0;
    FailUsage(wide ? Key("qkv_dim", group.qkv_dim > 0) : Key("dim", group.dim > 0), "=",
              options_.qkv_dim, " is not divisible by ", Key("heads", group.heads > 0), "=",
              options_.heads);
  }
  const PositionKind positions = *options_.positions;
  if ((positions == PositionKind::kSinusoidal || positions == PositionKind::kSinusoidalHalves) &&
      form_ != Form::kCross && options_.dim % 2 != 0)
    FailUsage("positions=", NameOf(positions, PositionKinds()), " needs an even dim, got ",
              Key("dim", config_.Group(form_).dim > 0), "=", options_.dim);
  ValidateOptions();
  ValidateScores();
  // Form, positions, convolution and sizes of every mechanism in use.
  for (int64_t layer = 0; layer < layers(); ++layer) {
    // The last one too: what layers share may be too little for it.
    if (layer == 0 || layer + 1 == layers() || !Alike(layer, layer - 1))
      MakeMechanism(Attention(layer));
  }
  ValidateMemory();
  if (form_ == Form::kCross) ValidateSourceMemory();
  ValidateTies();
  // One table for all layers, which belongs to the first.
  for (int64_t layer = 1; layer < layers() && *options_.positions == PositionKind::kRelative;
       ++layer) {
    if (Alike(layer, 0)) continue;
    FailUsage(
        "positions=relative: all layers share one table, so they need one mechanism with the "
        "same options, not ",
        Mechanism(0), " and ", Mechanism(layer),
        "; reuse has exact layers as well, by its placement");
  }
}

void LayerStack::ValidateOptions() const {
  const StackOptions& group = config_.Group(form_);
  CheckByMechanism(group.attention_options, Key("attention_options", true));
  const std::string key = Key("layer_options", true);
  if (!group.layer_options.is_object())
    FailUsage(key, " must be an object of options by layer, such as {\"2\": {\"latte\": ",
              "{\"latents\": 8}}}");
  for (const auto& [number, options] : group.layer_options.items()) {
    int64_t layer = 0;
    while (layer < layers() && std::to_string(layer) != number) ++layer;
    if (layer == layers())
      FailUsage(key, ": there is no layer '", number, "'; they are counted from 0 to ",
                layers() - 1);
    CheckByMechanism(options, key + "." + number);
    for (const auto& [name, inner] : options.items()) {
      if (!Uses(layer, name))
        FailUsage(key, ".", number, ".", name, ": layer ", layer, " has ", Mechanism(layer));
    }
  }
}

// Scores that a layer reuses from the previous one.
void LayerStack::ValidateScores() const {
  const std::string key =
      Key("attention", form_ == Form::kCross || !config_.Group(form_).attention.empty());
  bool copies = false, planned = false;
  int64_t first = -1;
  for (int64_t layer = 0; layer < layers(); ++layer) {
    const MechanismInfo& info = FindMechanism(Mechanism(layer));
    if (!info.copies_scores) continue;
    if (first < 0) first = layer;
    if (!(Options(layer) == Options(first))) {
      FailUsage("layer_options: the options of ", info.name, " decide which layers copy; set ",
                "them in attention_options");
    }
    const int64_t copied = Copied(layer);
    copies = copies || copied != 0;
    const std::vector<int64_t> plan = info.copy_plan(Options(layer), options_.heads, layers());
    planned = std::any_of(plan.begin(), plan.end(), [](int64_t c) { return c != 0; });
    if (copied > 0 && !FindMechanism(Mechanism(layer - 1)).leaves_scores) {
      FailUsage(key, ": layer ", layer + 1, " of ", layers(), " (", Mechanism(layer),
                ") would reuse the scores of layer ", layer, ", and ", Mechanism(layer - 1),
                " leaves none; put softmax or reuse there, or another mechanism in layer ",
                layer + 1);
    }
  }
  if (planned && !copies)
    FailUsage(key,
              ": with its placement no layer with reuse copies scores; use softmax there, or "
              "another placement");
}

void LayerStack::ValidateMemory() const {
  // One memory or set of latents goes from block to block, so their layers make the same ones.
  int64_t first = -1;
  for (int64_t layer = 0; layer < layers() && form_ == Form::kBidirectional; ++layer) {
    const MechanismInfo& info = FindMechanism(Mechanism(layer));
    if (!HandsOnMemory(layer)) continue;
    if (first >= 0 && Mechanism(first) != info.name) {
      FailUsage(Key("attention", !config_.Group(form_).attention.empty()), " has both ",
                Mechanism(first), " and ", info.name,
                ", but one memory goes from block to block; use one of them");
    }
    if (first >= 0 && !Alike(first, layer)) {
      FailUsage("layer_options: layers ", first, " and ", layer, " have other options of ",
                info.name, ", but one memory goes from block to block; give all the same");
    }
    if (first < 0) first = layer;
  }
}

// One memory for the decoder's cross attention and luna_causal (SourceMemory).
void LayerStack::ValidateSourceMemory() const {
  const SourceMemory memory = config_.cross.memory;
  if (memory == SourceMemory::kOwn) return;
  const std::string key = "cross.memory=" + NameOf(memory, SourceMemories());
  const LayerStack encoder = config_.Stack(Form::kBidirectional),
                   decoder = config_.Stack(Form::kCausal);
  const auto slots = [](const LayerStack& stack, int64_t layer) {
    return MakeMechanism(stack.Attention(layer))->memory_mechanism()->Slots();
  };
  const auto same = [&](const LayerStack& stack, int64_t layer) {
    if (slots(stack, layer) != slots(*this, 0))
      FailUsage(key, ": layer ", layer, " of the ", GroupName(stack.form()), " (",
                stack.Mechanism(layer), ") has ", slots(stack, layer),
                " slots and cross attention ", slots(*this, 0),
                ", but they have one memory; give all the same");
  };
  for (int64_t layer = 0; layer < layers(); ++layer) {
    if (FindMechanism(Mechanism(layer)).memory != MemoryUse::kStream)
      FailUsage(key, " needs cross attention that packs the source into a memory, and layer ",
                layer, " has ", Mechanism(layer), "; use cross.attention=luna, or memory=own");
    if (!Alike(layer, 0))
      FailUsage(key, ": layers 0 and ", layer, " of cross attention have other options of ",
                Mechanism(0), ", but one memory goes from layer to layer; give all the same");
    if (FindMechanism(decoder.Mechanism(layer)).memory == MemoryUse::kFixed) same(decoder, layer);
  }
  if (memory != SourceMemory::kEncoder) return;
  int64_t last = encoder.layers() - 1;
  while (last >= 0 && !encoder.HandsOnMemory(last)) --last;
  if (last < 0)
    FailUsage(key, " begins with the encoder's memory, and no layer of the encoder has one; use ",
              "encoder.attention=luna, or cross.memory=decoder");
  if (encoder.dim() != dim())
    FailUsage(key, ": the encoder's memory is ", encoder.dim(), " wide, the decoder's ", dim(),
              "; give both the same dim, or use cross.memory=decoder");
  same(encoder, last);
}

void LayerStack::ValidateTies() const {
  const std::vector<int64_t>& ties = options_.tied_layers;
  if (ties.empty()) return;
  const std::string key = Key("tied_layers", !config_.Group(form_).tied_layers.empty());
  if (int64_t(ties.size()) != layers()) {
    FailUsage(key, " lists ", ties.size(), " numbers for ", layers(), " layers",
              config_.info().forms.size() > 1 ? " of the " + GroupName(form_) : "",
              "; give for each the layer whose parameters it has");
  }
  for (int64_t layer = 0; layer < layers(); ++layer) {
    const int64_t owner = TiedTo(layer);
    if (owner < 0 || owner > layer || TiedTo(owner) != owner) {
      FailUsage(key, ": layer ", layer, " cannot have the parameters of layer ", owner,
                ": that must be an earlier layer with its own, or the layer itself");
    }
    if (owner == layer) continue;
    const AttentionLayerOptions a = Attention(layer), b = Attention(owner);
    if (a.mechanism != b.mechanism) {
      FailUsage(key, ": layer ", layer, " (", a.mechanism, ") cannot have the parameters of layer ",
                owner, " (", b.mechanism, "); tie layers of one mechanism");
    }
    if (!Alike(layer, owner))
      FailUsage(key, ": layers ", layer, " and ", owner, " have other options of ", a.mechanism,
                "; tie layers with the same options");
    const std::string refusal = MakeMechanism(a)->TieRefusal();
    if (!refusal.empty())
      FailUsage(key, ": layers ", owner, " and ", layer, ": ", a.mechanism, " ", refusal);
    if (a.dims.copied != b.dims.copied || a.dims.copied_on != b.dims.copied_on) {
      FailUsage(key, ": by the placement of ", a.mechanism, " layers ", owner, " and ", layer,
                " do not copy the same scores, so they cannot have the same parameters; tie other "
                "layers, or choose another placement");
    }
  }
}

}  // namespace cistern
