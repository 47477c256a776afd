// What Python asks the library: mechanisms and what they declare, first weights, empty states,
// definitions, models. Answers that are no tensors are JSON; {"error": "..."} stands for a
// UsageError, which Python raises as one.
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <torch/library.h>

#include "cistern/attention/fourier.h"
#include "cistern/base/error.h"
#include "cistern/io/json_text.h"
#include "cistern/models/changed_files.h"
#include "cistern/models/classifier.h"
#include "cistern/models/forecaster.h"
#include "cistern/models/language_model.h"
#include "cistern/models/token_predictor.h"
#include "python/src/core_scope.h"

namespace cistern::python {
namespace {

template <class F>
std::string Answer(F&& f) {
  try {
    return f().dump();
  } catch (const UsageError& e) {
    return Json{{"error", e.what()}}.dump();
  }
}

std::vector<std::string> FormNames(const MechanismInfo& info) {
  std::vector<std::string> names;
  for (const Form form : info.forms) names.push_back(FormName(form));
  return names;
}

std::string PackedOutputName(const Mechanism& mechanism) {
  const MemoryMechanism* memory = const_cast<Mechanism&>(mechanism).memory_mechanism();
  if (!memory || memory->packed_output() == MemoryMechanism::PackedOutput::kNone) return "none";
  return memory->packed_output() == MemoryMechanism::PackedOutput::kOwn ? "own" : "shared";
}

std::string AllMechanisms() {
  return Answer([] {
    Json all = Json::object();
    for (const MechanismInfo* i : Mechanisms()) {
      all[i->name] = {{"title", i->title},
                      {"source", i->source},
                      {"summary", i->summary},
                      {"definition", i->definition},
                      {"forms", FormNames(*i)},
                      {"refusals", i->refusals},
                      {"verbs", i->verbs},
                      {"exact", i->exact},
                      {"stochastic", i->stochastic},
                      {"bounded", i->bounded},
                      {"positions", i->PositionNames()},
                      {"time", i->time},
                      {"state", i->state},
                      {"tolerance", i->tolerance},
                      {"options", i->options().Write()},
                      {"cases", i->cases},
                      {"help", i->options().Help()},
                      {"memory", MemoryUseName(i->memory)},
                      {"leaves_scores", i->leaves_scores},
                      {"copies_scores", i->copies_scores}};
    }
    return all;
  });
}

Form ParseForm(std::string_view name) {
  for (const Form form : {Form::kBidirectional, Form::kCausal, Form::kCross}) {
    if (name == FormName(form)) return form;
  }
  FailUsage(UnknownName("form", std::string(name), {"bidirectional", "causal", "cross"}));
}

// What the core of a layer is made of, after all checks of the layer (form, positions,
// convolution).
std::string DescribeCore(std::string_view text, std::string_view form, std::string_view positions,
                         int64_t conv) {
  const Undisturbed undisturbed;
  return Answer([&] {
    const CoreSpec spec = ParseSpec(std::string(text));
    AttentionLayerOptions layer;
    layer.mechanism = spec.mechanism;
    layer.mechanism_options = spec.options;
    layer.dims = spec.dims;
    layer.form = ParseForm(form);
    layer.positions = ValueOf(std::string(positions), PositionKinds(), "positions");
    layer.conv = conv;
    const std::shared_ptr<Mechanism> checked = MakeCore(spec);
    layer.dims.first = checked.get();
    const std::shared_ptr<Mechanism> later =
        MakeMechanism(layer);  // in a later layer, which does not own what is tied
    Json projections = Json::array(), weights = Json::array(), state = Json::array();
    for (const Projection& p : checked->Projections()) {
      projections.push_back({{"name", p.name},
                             {"side", SideName(p.side)},
                             {"map", p.map.empty() ? p.name : p.map},
                             {"identity", p.identity},
                             {"bias", p.bias ? Json(*p.bias) : Json()},
                             {"normalised", p.normalised},
                             {"copied", p.name.starts_with("copied_")},
                             {"width", p.width},
                             {"rotary", p.rotary},
                             {"heads", p.heads == 0 ? checked->dims().heads : p.heads},
                             {"tied", p.tied}});
    }
    for (const CoreWeight& w : checked->weights()) {
      bool tied = true;
      for (const CoreWeight& other : later->weights()) tied = tied && other.name != w.name;
      weights.push_back({{"name", w.name},
                         {"trained", w.kind == CoreWeight::Kind::kTrained},
                         {"tied", tied},
                         {"redrawn", w.kind == CoreWeight::Kind::kRedrawn},
                         {"shape", w.value->sizes().vec()}});
    }
    for (const NamedTensor& t :
         Visible(checked->EmptyState(1, at::TensorOptions().device(at::kMeta))).tensors)
      state.push_back(t.name);
    const MechanismInfo& info = checked->info();
    const MemoryMechanism* memory = checked->memory_mechanism();
    return Json{{"projections", projections},
                {"weights", weights},
                {"state", state},
                {"forms", FormNames(info)},
                {"bounded", info.bounded},
                {"summary", info.summary},
                {"memory", MemoryUseName(info.memory)},
                {"heads", checked->dims().heads},
                {"width", checked->dims().dim},
                {"packed_output", PackedOutputName(*checked)},
                {"memory_dropout", memory ? memory->MemoryDropout() : 0.0},
                {"output_dropout", checked->OutputDropout(layer.form)},
                {"sees_padding", checked->SeesPadding()},
                {"leaves_scores", info.leaves_scores}};
  });
}

// The weights of a new core, drawn from torch's generator where they are random parameters.
std::vector<at::Tensor> InitialWeights(std::string_view spec) {
  const c10::impl::ForceDispatchKeyGuard no_modes(WithoutModes());
  const std::shared_ptr<Mechanism> core = MakeCore(ParseSpec(std::string(spec)));
  std::vector<at::Tensor> out;
  for (const CoreWeight& w : core->weights()) out.push_back(w.value->detach());
  return out;
}

// The learned memory or latents before the first layer, [1,M,D], made of the weights, as in
// evaluation: Python drops of it, which a graph can hold.
at::Tensor InitialMemory(at::TensorList weights, std::string_view spec) {
  const CoreScope core(std::string(spec), weights, false, Form::kBidirectional);
  const at::Tensor memory = core->InitialMemory();
  if (!memory.defined()) FailUsage("[", core->info().name, "] has no memory");
  return memory;
}

// The empty state of `batch` rows, on the device and in the type of `like`.
std::vector<at::Tensor> EmptyRows(std::string_view spec, const at::Tensor& like, int64_t batch,
                                  bool training) {
  const CoreScope core{std::string(spec)};
  core->train(training);
  std::vector<at::Tensor> out;
  for (const NamedTensor& t : Visible(core->EmptyState(batch, like.options())).tensors) {
    out.push_back(t.value.defined() ? t.value.contiguous()
                                    : at::empty({batch, 0}, like.options().dtype(at::kBool)));
  }
  return out;
}

std::vector<at::Tensor> EmptyRowsMeta(std::string_view spec, const at::Tensor& like,
                                      c10::SymInt batch, bool) {
  const CoreScope core{std::string(spec)};
  std::vector<at::Tensor> out;
  for (const NamedTensor& t : core.form().tensors) {
    const auto type = !t.value.defined()                    ? at::kBool
                      : t.value.scalar_type() == at::kFloat ? like.scalar_type()
                                                            : t.value.scalar_type();
    std::vector<c10::SymInt> shape = {batch, 0};
    if (t.value.defined()) shape = t.value.sym_sizes().vec(), shape[0] = batch;
    out.push_back(at::empty_symint(shape, like.options().dtype(type)));
  }
  return out;
}

// What the paper says, in plain double-precision code. x in declared order, key-side tensors of
// their own length in the cross form.
at::Tensor Definition(at::TensorList x, at::TensorList weights, std::string_view spec,
                      std::string_view form_name) {
  const Form form = ParseForm(form_name);
  const CoreScope core(std::string(spec), weights, false, form);
  RequireForm(core->info(), form);
  std::vector<Projection> projections = core.projections();
  std::erase_if(projections, [](const Projection& p) { return !p.OfTokens(); });
  CISTERN_CHECK(x.size() == projections.size(), "[", core->info().name, "] expected ",
                projections.size(), " tensors, got ", x.size());
  // In the cross form each of the two lists has its own length, and what stands in the other side's
  // places does not matter.
  std::vector<at::Tensor> queries, keys;
  const at::Tensor *query = &x[0], *key = &x[0];
  for (size_t i = 0; i < x.size(); ++i) (projections[i].side == Side::kQuery ? query : key) = &x[i];
  for (size_t i = 0; i < x.size(); ++i) {
    const at::Tensor t = x[i].to(at::kDouble);
    auto zeros = [&](int64_t length) {
      return at::zeros({t.size(0), t.size(1), length, t.size(3)}, t.options());
    };
    const bool of_query = projections[i].side == Side::kQuery, cross = form == Form::kCross;
    queries.push_back(cross && !of_query ? zeros(query->size(2)) : t);
    keys.push_back(cross && of_query ? zeros(key->size(2)) : t);
  }
  return core->Definition(form, queries, keys);
}

// The config of a model folder with every key, and the biases that its weights have.
std::string FolderConfig(std::string_view folder) {
  const Undisturbed undisturbed;
  return Answer([&] {
    const std::string path = std::string(folder) + "/config.json";
    ModelConfig config = ReadModelConfig(ReadJsonFile(path), path);
    KeepBiases(config, SafetensorsFile(std::string(folder) + "/model.safetensors"));
    return config.Describe().Write();
  });
}

ModelConfig ConfigOf(std::string_view text) {
  return ReadModelConfig(ParseJson(std::string(text), "config"), "config");
}

std::string CompleteConfig(std::string_view text) {
  const Undisturbed undisturbed;
  return Answer([&] { return ConfigOf(text).Describe().Write(); });
}

// The first weights of a model by their names, after an answer that may be an error. The seed is
// drawn from torch's generator.
std::tuple<std::string, c10::Dict<std::string, at::Tensor>> InitialModelWeights(
    std::string_view text) {
  at::Generator generator = at::globalContext().defaultGenerator(at::kCPU);
  uint64_t seed = 0;
  {
    const std::lock_guard lock(generator.mutex());
    seed = at::check_generator<at::CPUGeneratorImpl>(generator)->random64();
  }
  const Undisturbed undisturbed;
  c10::Dict<std::string, at::Tensor> weights;
  const std::string answer = Answer([&] {
    const std::shared_ptr<Model> model = MakeModel(ConfigOf(text), seed);
    for (const auto& p : model->named_parameters()) weights.insert(p.key(), p.value().detach());
    for (const auto& b : model->named_buffers()) weights.insert(b.key(), b.value());
    return Json::object();
  });
  return {answer, weights};
}

std::vector<std::string> ChangedFilesOf(std::string_view folder) {
  const std::string path(folder);
  return ChangedFiles(SafetensorsFile(path + "/model.safetensors"), path);
}

// Arguments of one attention layer by Python's names; null: its attention is left out. Positions of
// embeddings are the model's.
Json AttentionArguments(const AttentionLayerOptions& a) {
  if (a.dims.copied == AttentionDims::kSkipped) return nullptr;
  const bool layer_has =
      a.positions == PositionKind::kRotary || a.positions == PositionKind::kRelative;
  Json options = a.mechanism_options;
  int64_t source_dim = a.source_dim;
  if (FindMechanism(a.mechanism).MakesLatents() && a.form == Form::kBidirectional) {
    if (source_dim == 0) source_dim = a.dims.Model();
    source_dim += FourierOf(a.mechanism_options).Channels();
  }
  if (FindMechanism(a.mechanism).copies_scores)
    options["heads"] = a.dims.copied;  // by the placement
  return {{"mechanism", a.mechanism},
          {"dim", a.dims.Model()},
          {"qkv_dim", a.dims.dim},
          {"relative_std", a.dims.relative_std},
          {"heads", a.dims.heads},
          {"source_dim", source_dim},
          {"form", FormName(a.form)},
          {"options", options},
          {"max_length", a.dims.max_length},
          {"layer", a.dims.layer},
          {"dropout", a.dims.dropout},
          {"positions", layer_has ? NameOf(a.positions, PositionKinds()) : "none"},
          {"conv", a.conv},
          {"bias", a.bias},
          {"init_std", a.init_std},
          {"out_std", a.out_std},
          {"tokens_out", a.tokens_out}};
}

// The stack of one form of a model whose config is `text`: its settings, and of each of its blocks
// the arguments of its attention and of its cross attention (null: it has none), whether the memory
// after the block is used, and whether the next layer takes over scores.
std::string ModelStack(std::string_view text, std::string_view form_name) {
  const Undisturbed undisturbed;
  return Answer([&] {
    const ModelConfig config = ConfigOf(text);
    const LayerStack stack = config.Stack(ParseForm(form_name));
    Json blocks = Json::array(), owners = Json::array();
    for (int64_t layer = 0; layer < stack.layers(); ++layer) {
      const BlockOptions block = stack.Block(layer);
      owners.push_back(stack.TiedTo(layer));
      blocks.push_back({{"attention", AttentionArguments(block.attention)},
                        {"has_cross", block.cross.has_value()},
                        {"cross", block.cross ? AttentionArguments(*block.cross) : Json()},
                        {"memory_out", block.memory_out},
                        {"leaves", block.attention.dims.copied_on > 0},
                        {"cross_leaves", block.cross && block.cross->dims.copied_on > 0}});
    }
    const StackOptions& o = stack.options();
    return Json{{"dim", o.dim},
                {"input_dim", stack.input_dim()},
                {"ffn_dim", stack.ffn_dim()},
                {"max_length", o.max_length},
                {"positions", NameOf(*o.positions, PositionKinds())},
                {"dropout", o.dropout},
                {"ffn_dropout", o.ffn_dropout},
                {"owners", owners},
                {"blocks", blocks}};
  });
}

// All kinds of models, as models.def lists them.
std::string AllModels() {
  return Answer([] {
    Json all = Json::object();
    for (const ModelInfo* i : Models()) {
      Json forms = Json::array();
      for (const Form form : i->forms) forms.push_back(FormName(form));
      all[i->name] = {{"summary", i->summary},
                      {"forms", forms},
                      {"inputs", i->inputs},
                      {"extends", i->extends},
                      {"encodes", i->encodes},
                      {"classifies", i->classifies},
                      {"options", i->options ? i->options().Write() : Json::object()}};
    }
    return all;
  });
}

// The tensors of a safetensors file by their names; Error names the file.
c10::Dict<std::string, at::Tensor> LoadTensorFile(std::string_view path) {
  c10::Dict<std::string, at::Tensor> tensors;
  for (const NamedTensor& t : LoadTensors(std::string(path)).tensors)
    tensors.insert(t.name, t.value);
  return tensors;
}

// What the C++ program computes from a model folder: logits [B,T,V] of a language model, masked or
// not, [B,T,2] of a span_predictor, [B,classes] of a classifier, whose ids may be real values. With
// a source, `lengths` are the source's; to a model of two texts it is the second one.
at::Tensor FolderLogits(std::string_view folder, const at::Tensor& ids,
                        const std::optional<at::Tensor>& lengths,
                        const std::optional<at::Tensor>& source) {
  const at::NoGradGuard guard;
  const Undisturbed undisturbed;
  const std::shared_ptr<Model> model = LoadModel(std::string(folder));
  const auto all = [](const at::Tensor& x) {
    return at::full({x.size(0)}, x.size(1), x.options().dtype(at::kLong));
  };
  const ops::Mask mask = {lengths, {}};
  if (auto* lm = dynamic_cast<LanguageModel*>(model.get())) {
    ModelState state = source ? lm->Encode(*source, mask) : lm->EmptyState(ids.size(0));
    return lm->Extend(ids, state, source ? ops::Mask() : mask);
  }
  if (auto* forecaster = dynamic_cast<Forecaster*>(model.get())) {
    ModelState state = forecaster->EmptyState(ids.size(0));
    return forecaster->Extend(ids, state, mask);
  }
  if (auto* tokens = dynamic_cast<TokenPredictor*>(model.get()))
    return tokens->Logits(tokens->Hidden(ids, mask));
  auto* classifier = dynamic_cast<Classifier*>(model.get());
  CISTERN_CHECK(classifier, std::string(folder),
                " holds neither a language model nor a classifier");
  NamedTensors inputs = {{"lengths", lengths ? *lengths : all(ids)}};
  inputs.Set(ids.is_floating_point() ? "values" : "ids", ids);
  if (source) inputs.Set("second_ids", *source), inputs.Set("second_lengths", all(*source));
  return classifier->Logits(inputs);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(cistern, m) {
  const std::vector<at::Tag> tags = {at::Tag::pt2_compliant_tag};
  m.def("mechanisms() -> str", &AllMechanisms);
  m.def("describe_core(str spec, str form, str positions, int conv) -> str", &DescribeCore);
  m.def("folder_config(str folder) -> str", &FolderConfig);
  m.def("complete_model_config(str config) -> str", &CompleteConfig);
  m.def("initial_model_weights(str config) -> (str, Dict(str, Tensor))", &InitialModelWeights);
  m.def("changed_files(str folder) -> str[]", &ChangedFilesOf);
  m.def("model_stack(str config, str form) -> str", &ModelStack);
  m.def("models() -> str", &AllModels);
  m.def("load_tensors(str path) -> Dict(str, Tensor)", &LoadTensorFile);
  m.def("initial_weights(str spec) -> Tensor[]", &InitialWeights);
  m.def("initial_memory(Tensor[] weights, str spec) -> Tensor", &InitialMemory, tags);
  m.def("empty_state(str spec, Tensor like, SymInt batch, bool training) -> Tensor[]", tags);
  m.def("definition(Tensor[] x, Tensor[] weights, str spec, str form) -> Tensor");
  m.def(
      "folder_logits(str folder, Tensor ids, Tensor? lengths=None, Tensor? source=None) -> Tensor");
}
TORCH_LIBRARY_IMPL(cistern, CompositeExplicitAutograd, m) {
  m.impl("empty_state", &EmptyRows);
  m.impl("definition", &Definition);
  m.impl("folder_logits", &FolderLogits);
}
TORCH_LIBRARY_IMPL(cistern, Meta, m) { m.impl("empty_state", &EmptyRowsMeta); }
TORCH_LIBRARY_IMPL(cistern, Autograd, m) {  // none of them has a gradient
  for (const char* name : {"empty_state", "definition", "folder_logits"})
    m.impl(name, torch::CppFunction::makeFallthrough());
}

}  // namespace cistern::python
