#include "cistern/models/config.h"

#include <algorithm>
#include <limits>

#include "cistern/attention/head_groups.h"
#include "cistern/base/error.h"

namespace cistern {

const EnumNames<PoolingKind>& PoolingKinds() {
  static const EnumNames<PoolingKind> names = {
      {PoolingKind::kMean, "mean"},        {PoolingKind::kCls, "cls"},
      {PoolingKind::kMemory, "memory"},    {PoolingKind::kFirst, "first"},
      {PoolingKind::kMeanAll, "mean_all"}, {PoolingKind::kMeanZeros, "mean_zeros"}};
  return names;
}

const EnumNames<HeadKind>& HeadKinds() {
  static const EnumNames<HeadKind> names = {{HeadKind::kRelu, "relu"},
                                            {HeadKind::kGelu, "gelu"},
                                            {HeadKind::kLinear, "linear"},
                                            {HeadKind::kTanh, "tanh"}};
  return names;
}

const EnumNames<PaddingKind>& PaddingKinds() {
  static const EnumNames<PaddingKind> names = {{PaddingKind::kMasked, "masked"},
                                               {PaddingKind::kReads, "reads"},
                                               {PaddingKind::kSeen, "seen"},
                                               {PaddingKind::kZeros, "zeros"}};
  return names;
}

const EnumNames<ClsPlace>& ClsPlaces() {
  static const EnumNames<ClsPlace> names = {{ClsPlace::kBefore, "before"},
                                            {ClsPlace::kAfter, "after"}};
  return names;
}

std::string GroupName(Form form) {
  return form == Form::kBidirectional ? "encoder" : form == Form::kCausal ? "decoder" : "cross";
}

Fields ModelConfig::Describe() {
  Fields f;
  f.Add("kind", &kind, "what the model is", ModelKinds());
  f.Add("version", &version, "version of this file's format");
  f.Add("vocab_size", &vocab_size, "token ids; set by the task", {0, 1 << 24});
  f.Add("classes", &classes, "classes of a classifier; set by the task", {0, 1 << 20});
  f.Add("attention", &attention,
        "mechanism of all layers (cistern info lists them), one for each layer, or head groups: "
        "softmax:2+latte:2");
  f.Add("attention_options", &attention_options,
        "options by mechanism, such as {\"latte\": {\"latents\": 64}}");
  f.Add("layer_options", &layer_options,
        "the same for single layers, by number from 0: {\"2\": {\"latte\": {\"latents\": 8}}}")
      .OmitWhen(Json::object());
  f.Add("dim", &dim, "width of the model (D)", {1, 65536});
  f.Add("qkv_dim", &qkv_dim,
        "width of queries, keys and values, all heads together, where it is not dim (64 of 128 in "
        "Long Range Arena's image model); 0: dim",
        {0, 65536});
  f.Add("input_dim", &input_dim,
        "width of the tokens' embeddings and positions where the first layer is a perceiver, whose "
        "latents, with all that follows, are dim wide; 0: dim",
        {0, 65536})
      .OmitWhen(0);
  f.Add("layers", &layers, "blocks", {1, 1024});
  f.Add("heads", &heads, "attention heads; dim (or qkv_dim) must be divisible by it", {1, 1024});
  f.Add("tied_layers", &tied_layers,
        "the layer whose parameters each layer has, by number from 0: 0,1,0,1 runs two layers "
        "twice; none: each has its own",
        {0, 1023});
  f.Add("ffn_dim", &ffn_dim, "width of the feed-forward; 0: 4 dim", {0, 1 << 20});
  f.Add("max_length", &max_length,
        "longest input of mechanisms and positions that have a fixed length", {1, 1 << 30});
  f.Add("conv", &conv,
        "taps of the causal convolution on the projections (with an encoder: of the decoder's "
        "own); 0: none",
        {0, 64});
  f.Add("norm", &norm, "layer norm before or after attention and feed-forward", NormPlaces());
  f.Add("embedding_norm", &embedding_norm,
        "a layer norm of embeddings and positions, before the first block: BERT, Luna's encoders "
        "(whose memory has one too, its option "
        "norm)");
  f.Add("final_norm", &final_norm, "a layer norm after the last block");
  f.Add("norm_kind", &norm_kind,
        "layer norm, or T5's RMSNorm, which takes no mean away and has no bias", NormKinds());
  f.Add("norm_eps", &norm_eps, "epsilon of the layer norms", {0.0, 1.0});
  f.Add("activation", &activation, "of the feed-forward", Activations());
  f.Add("positions", &positions,
        "position encoding: a learned table; sinusoids that interleave sin and cos, or all sines "
        "before all cosines (Luna); rotary; relative, T5's 32 buckets of the distance, a learned "
        "bias of the scores; auto: rotary where all mechanisms of a stack turn queries and keys, "
        "else none",
        PositionKinds());
  f.Add("scale_embeddings", &scale_embeddings,
        "the embeddings of tokens times sqrt(dim): fairseq, Luna");
  f.Add("scale_logits", &scale_logits,
        "of a language model: the tied output layer's input divided by sqrt(dim), as in T5");
  f.Add("pooling", &pooling,
        "of a classifier: the input of the head: the mean of the tokens, a learned token put "
        "before them, the mean of the memory's slots, the data's own first token; or the mean over "
        "the whole length of the batch, with padding as it is (mean_all, Long Range Arena) or as "
        "zeros (mean_zeros, Nystromformer's)",
        PoolingKinds());
  f.Add("cls_place", &cls_place,
        "pooling=cls: the token comes before positions are added, and has the first (Long Range "
        "Arena), or after, and has none (P000's code)",
        ClsPlaces());
  f.Add("padding", &padding,
        "of a classifier: padding is masked; reads the tokens and is not read (Long Range Arena); "
        "is seen as any token, with an embedding (seen) or with zeros for one (zeros, P000's "
        "code). Beyond masked, task.pad_to says how much of it there is",
        PaddingKinds());
  f.Add("norm_pooled", &norm_pooled,
        "of a classifier: the final norm comes after pooling, not before");
  f.Add("head", &head,
        "of a classifier: a hidden layer of ffn_dim with relu (Long Range Arena) or gelu "
        "(P000), or one linear map (Latte, UCU); or one of dim with tanh (BERT's pooler)",
        HeadKinds());
  f.Add("head_dims", &head_dims,
        "of a classifier: widths of the head's hidden layers, such as 512,512 (P000's image "
        "head); none: one of the width that `head` says",
        {1, 1 << 20});
  f.Add("head_dropout", &head_dropout,
        "of a classifier: after the head's hidden layer (of several, all but the last); -1: as "
        "dropout",
        {-1.0, 0.95});
  f.Add("bias", &bias, "biases in all linear maps");
  f.Add("ffn_bias", &ffn_bias, "biases in the feed-forward also without `bias`");
  f.Add("head_bias", &head_bias,
        "of a language model: a bias in the output layer also without `bias`, and in a tied one, "
        "which `bias` leaves without");
  f.Add("tie_embeddings", &tie_embeddings,
        "of a language model: the output layer shares the (target's) embedding matrix");
  f.Add("target_vocab_size", &target_vocab_size,
        "token ids of the target if it is another sequence; 0: vocab_size", {0, 1 << 24});
  f.Add("dropout", &dropout, "after attention, feed-forward and embedding", {0.0, 0.95});
  f.Add("attention_dropout", &attention_dropout, "on the attention probabilities", {0.0, 0.95});
  f.Add("ffn_dropout", &ffn_dropout,
        "after the activation of the feed-forward: Long Range Arena, P000's code, Luna and fairseq "
        "have it",
        {0.0, 0.95});
  f.Add("ffn_out_dropout", &ffn_out_dropout,
        "of what the feed-forward adds, where that is not `dropout`, as in P000's code; -1: as "
        "dropout",
        {-1.0, 0.95})
      .OmitWhen(-1.0);
  f.Add("init_std", &init_std, "standard deviation of the initial weights", {1e-6, 10.0});
  f.Add("embedding_std", &embedding_std,
        "standard deviation of embeddings and learned positions; 0 takes init_std", {0.0, 10.0});
  f.Add("position_std", &position_std,
        "standard deviation of learned positions, 0 as P000's code; -1 takes that of embeddings",
        {-1.0, 10.0});
  f.Add("layer_drop", &layer_drop,
        "probability with which a training pass leaves out a block (LayerDrop, Fan et al. 2020)",
        {0.0, 0.95})
      .OmitWhen(0.0);
  f.Group("init", init.Describe());
  f.Group("encoder", encoder.Describe());
  f.Group("decoder", decoder.Describe());
  f.Group("cross", cross.DescribeCross());
  for (const ModelInfo* info : Models()) {
    if (!info->options) continue;
    Json& json = own.try_emplace(info->name, Json::object()).first->second;
    std::string names;
    for (const std::string& name : info->options().Names())
      names += (names.empty() ? "" : ", ") + name;
    f.Add(info->name, &json, "options of this kind only: " + names).OmitWhen(Json::object());
  }
  return f;
}

const StackOptions& ModelConfig::Group(Form form) const {
  return form == Form::kBidirectional ? encoder : form == Form::kCausal ? decoder : cross;
}

Json ModelConfig::Own() const {
  const auto found = own.find(kind);
  return found == own.end() ? Json::object() : found->second;
}

namespace {

// A group of a stack that the kind does not have, and options of another kind, would be ignored.
void CheckGroups(const ModelConfig& config) {
  const ModelInfo& info = config.info();
  for (const Form form : {Form::kBidirectional, Form::kCausal, Form::kCross}) {
    if (info.Has(form)) continue;
    StackOptions group = config.Group(form), unset;
    const auto said = [&](StackOptions& o) {
      return (form == Form::kCross ? o.DescribeCross() : o.Describe()).Write();
    };
    if (const Json own = said(group); own != said(unset)) {
      std::string others;
      for (const ModelInfo* other : Models()) {
        if (other->Has(form)) others += (others.empty() ? "" : ", ") + other->name;
      }
      FailUsage("a model of kind ", config.kind, " has no ", GroupName(form),
                form == Form::kCross ? " attention" : "", "; leave out ", GroupName(form), ".",
                own.begin().key(), ", or take a kind that has: ", others);
    }
  }
  for (const auto& [kind, options] : config.own) {
    if (kind != config.kind && !options.empty())
      FailUsage("options of kind ", kind, " do not fit a model of kind ", config.kind,
                "; leave them out");
  }
  if (info.options) info.options().Read(config.Own(), config.kind);
}

// Options of mechanisms that no layer has are checked as if the first stack had them.
void CheckUnused(const ModelConfig& config) {
  for (const auto& [name, options] : config.attention_options.items()) {
    bool used = false;
    for (const Form form : config.info().forms) {
      const LayerStack stack = config.Stack(form);
      for (const std::string& a : stack.options().attention)
        used = used || a == name || InHeadGroups(a, name);
    }
    if (!used)
      FindMechanism(name).Make(options,
                               {config.qkv_dim > 0 ? config.qkv_dim : config.dim, config.heads,
                                config.max_length, 0, config.attention_dropout});
  }
}

// Keys of classifiers and of language models, which no other kind reads.
void CheckParts(const ModelConfig& config) {
  const auto only = [&](bool set, bool fits, const char* key, const char* kinds) {
    if (set && !fits)
      FailUsage(key, " is for ", kinds, "; a model of kind ", config.kind,
                " does not read it: leave it out");
  };
  const bool classifies = config.info().classifies;
  const char* classifiers = "classifiers";
  only(config.padding != PaddingKind::kMasked, classifies, "padding", classifiers);
  only(config.cls_place != ClsPlace::kBefore, classifies && config.pooling == PoolingKind::kCls,
       "cls_place", "pooling=cls");
  only(!config.head_dims.empty(), classifies, "head_dims", classifiers);
  only(config.head_dropout >= 0, classifies, "head_dropout", classifiers);
  only(config.pooling != PoolingKind::kMean, classifies, "pooling", classifiers);
  only(config.norm_pooled, classifies, "norm_pooled", classifiers);
  only(config.head != HeadKind::kRelu, classifies, "head", classifiers);
  only(config.classes > 0, classifies, "classes", classifiers);
  only(config.target_vocab_size > 0, config.info().encodes, "target_vocab_size",
       "models with a source and a target");
  // Other kinds may be trained on their tokens first (train/pretrain.h).
  const bool tokens = config.kind != "forecaster";
  only(!config.tie_embeddings, tokens, "tie_embeddings", "language models");
  only(config.head_bias, tokens, "head_bias", "language models");
  only(config.scale_logits, tokens && !classifies, "scale_logits", "language models");
  if (config.head == HeadKind::kLinear && (!config.head_dims.empty() || config.head_dropout > 0))
    FailUsage("head=linear has no hidden layer for head_dims or head_dropout; use relu or gelu");
}

// Tokens of another width than the blocks: latents lead from one to the other.
void CheckInputDim(const ModelConfig& config) {
  if (config.input_dim == 0 || config.input_dim == config.dim) return;
  std::string first = "no encoder";
  if (config.info().Has(Form::kBidirectional)) {
    first = config.Stack(Form::kBidirectional).Mechanism(0);
    if (FindMechanism(first).MakesLatents()) return;
  }
  FailUsage("input_dim=", config.input_dim, " and dim=", config.dim,
            " need latents that attend to the tokens in the first layer, which has ", first,
            "; use attention=perceiver there, or leave out input_dim");
}

// The keys outside the groups: layer numbers of some stack, mechanisms of those layers.
void CheckLayerOptions(const ModelConfig& config) {
  if (!config.layer_options.is_object()) {
    FailUsage("layer_options must be an object of options by layer, such as ",
              "{\"2\": {\"latte\": {\"latents\": 8}}}");
  }
  for (const auto& [number, options] : config.layer_options.items()) {
    if (!options.is_object()) FailUsage("layer_options.", number, " must be an object");
    for (const auto& [name, inner] : options.items()) {
      FindMechanism(name);
      if (!inner.is_object()) FailUsage("layer_options.", number, ".", name, " must be an object");
      std::string mechanisms;
      bool used = false;
      for (const Form form : config.info().forms) {
        if (form == Form::kCross) continue;
        const LayerStack stack = config.Stack(form);
        for (int64_t layer = 0; layer < stack.layers(); ++layer) {
          if (std::to_string(layer) != number) continue;
          used = used || stack.Uses(layer, name);
          mechanisms += (mechanisms.empty() ? "" : ", ") + stack.Mechanism(layer);
        }
      }
      if (mechanisms.empty())
        FailUsage("layer_options: there is no layer '", number, "'; they are counted from 0");
      if (!used)
        FailUsage("layer_options.", number, ".", name, ": layer ", number, " has ", mechanisms);
    }
  }
}

// Blocks that need the one before them cannot do without it.
void CheckLayerDrop(const ModelConfig& config) {
  if (config.layer_drop == 0) return;
  for (const Form form : config.info().forms) {
    const LayerStack stack = config.Stack(form);
    for (int64_t layer = 0; layer < stack.layers(); ++layer) {
      const MechanismInfo& info = FindMechanism(stack.Mechanism(layer));
      if (info.copies_scores || info.HandsOnMemory() || info.MakesLatents())
        FailUsage(
            "layer_drop=", config.layer_drop, " leaves out blocks, and ", info.name,
            " needs what the block before it hands on; take another mechanism or layer_drop=0");
    }
  }
}

constexpr int64_t kAnyLength = std::numeric_limits<int64_t>::max();

// Tokens for which all mechanisms of the stack have weights: their option length, or max_length.
int64_t FixedLength(const LayerStack& stack) {
  int64_t limit = kAnyLength;
  for (int64_t layer = 0; layer < stack.layers(); ++layer) {
    const std::string& name = stack.Mechanism(layer);
    for (const MechanismInfo* info : MechanismsOf(name)) {
      const Json all = stack.Options(layer),
                 own = IsHeadGroups(name) ? all.value(info->name, Json::object()) : all;
      if (!info->fixed_length && !(info->fixes_length && info->fixes_length(own))) continue;
      const int64_t length = own.value("length", int64_t{0});
      limit = std::min(limit, length > 0 ? length : stack.options().max_length);
    }
  }
  return limit;
}

}  // namespace

int64_t ModelConfig::PositionLimit(Form form) const {
  const StackOptions o = Stack(form).options();
  return o.positions == PositionKind::kLearned ? o.max_length : kAnyLength;
}

int64_t ModelConfig::LengthLimit(Form form) const {
  int64_t limit = std::min(PositionLimit(form), FixedLength(Stack(form)));
  if (form == Form::kBidirectional && info().Has(Form::kCross))
    limit = std::min(limit, FixedLength(Stack(Form::kCross)));
  return limit;
}

void ModelConfig::Reach(Form form, int64_t tokens, const std::string& what) {
  if (tokens <= LengthLimit(form)) return;
  max_length = std::max(max_length, tokens);
  if (const int64_t limit = LengthLimit(form); tokens > limit)
    FailUsage(what, " has ", tokens, " tokens, and the positions of the model end at ", limit,
              "; raise model.", GroupName(form),
              ".max_length, or the option length of its mechanism");
}

void ModelConfig::CheckPositions(Form form, int64_t tokens, const char* what) const {
  const int64_t limit = PositionLimit(form);
  if (tokens > limit)
    FailUsage(what, " of ", tokens, " tokens is beyond max_length=", limit,
              ", where the learned positions of this model end");
}

void ModelConfig::Validate() const {
  if (version != kConfigVersion) {
    FailUsage("config version ", version, " is not known to this build, which reads versions 1 to ",
              kConfigVersion, version > kConfigVersion ? "; a newer cistern wrote it" : "");
  }
  ModelConfig copy = *this;
  Fields fields = copy.Describe();
  fields.Read(fields.Write(), "model");  // the ranges of single fields
  if (qkv_dim == 0 && dim % heads != 0)
    FailUsage("dim=", dim, " is not divisible by heads=", heads);
  if (qkv_dim % heads != 0) FailUsage("qkv_dim=", qkv_dim, " is not divisible by heads=", heads);
  if (!attention_options.is_object())
    FailUsage("attention_options must be an object of options by mechanism");
  for (const auto& [name, options] : attention_options.items()) {
    FindMechanism(name);
    if (!options.is_object()) FailUsage("attention_options.", name, " must be an object");
  }
  CheckGroups(*this);
  CheckUnused(*this);
  CheckParts(*this);
  double parameters = double(vocab_size) * double(dim);
  for (const Form form : info().forms) {
    const LayerStack stack = Stack(form);
    const StackOptions& o = stack.options();
    parameters += double(o.layers) * 12.0 * double(o.dim) * double(o.dim);
  }
  if (parameters > 1e11)
    FailUsage("the model would have about ", parameters, " parameters; check dim=", dim,
              " and layers=", layers);
  for (const Form form : info().forms) {
    const LayerStack stack = Stack(form);
    if (stack.options().attention.size() == 1 ||
        int64_t(stack.options().attention.size()) == stack.layers())
      continue;
    stack.Validate();  // says how many mechanisms were expected
  }
  CheckLayerOptions(*this);
  CheckInputDim(*this);
  for (const Form form : info().forms) Stack(form).Validate();
  init.Check(*this);
  CheckLayerDrop(*this);
  if (info().check) info().check(*this);
}

std::string ModelConfig::Summary() const {
  const std::vector<Form>& forms = info().forms;
  bool one_count = true;
  for (const Form form : forms)
    one_count = one_count && Stack(form).options().heads == Stack(forms[0]).options().heads;
  std::string out, between;
  int64_t taps = 0;
  for (const Form form : forms) {
    const LayerStack stack = Stack(form);
    std::string names;
    for (const std::string& a : stack.options().attention) names += (names.empty() ? "" : "+") + a;
    if (form == Form::kCross) {
      out += " and " + names + " to the source";
    } else {
      out += StrCat(between, forms.size() > 1 ? GroupName(form) + " " : "", names, ", ",
                    stack.layers(), " layers x ", stack.dim());
    }
    if (!one_count) out += StrCat(", ", stack.options().heads, " heads");
    between = "; ";
    taps = std::max(taps, stack.options().conv);
  }
  return StrCat(out, one_count ? StrCat(", ", Stack(forms[0]).options().heads, " heads") : "",
                taps > 0 ? StrCat(", conv ", taps) : "");
}

ModelConfig ReadModelConfig(const Json& json, const std::string& where) {
  ModelConfig config;
  try {
    config.Describe().Read(ConvertModelConfig(json), where);
    config.Validate();
  } catch (const UsageError& e) {
    const std::string text = e.what();
    if (text.starts_with(where)) throw;
    FailUsage(where, ": ", text);
  }
  return config;
}

}  // namespace cistern
