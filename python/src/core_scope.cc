#include "python/src/core_scope.h"

#include <ATen/ATen.h>

#include <unordered_map>

#include "cistern/attention/decoding_state.h"
#include "cistern/base/error.h"
#include "cistern/io/json_text.h"

namespace cistern::python {
namespace {

constexpr size_t kCached = 256;  // specifications a thread keeps

const Core& CachedCore(const std::string& text, bool cross) {
  thread_local std::unordered_map<std::string, Core> cache;
  const std::string key = (cross ? "cross " : "") + text;
  const auto found = cache.find(key);
  if (found != cache.end()) return found->second;
  const Undisturbed undisturbed;
  Core core;
  CoreSpec spec = ParseSpec(text);
  spec.dims.cross = cross;
  core.mechanism = MakeCore(spec);
  core.mechanism->eval();
  core.projections = core.mechanism->Projections();
  for (Projection& p : core.projections)
    p.heads = p.heads == 0 ? core.mechanism->dims().heads : p.heads;
  for (const CoreWeight& w : core.mechanism->weights()) core.own.push_back(*w.value);
  core.form = Visible(
      core.mechanism->EmptyState(1, at::TensorOptions().dtype(at::kFloat).device(at::kMeta)));
  core.memory = core.mechanism->memory_mechanism();
  core.slots = core.memory ? core.memory->InitialMemory().size(1) : 0;
  if (cache.size() >= kCached) cache.clear();
  return cache.emplace(key, std::move(core)).first->second;
}

}  // namespace

c10::impl::LocalDispatchKeySet WithoutModes() {
  c10::impl::LocalDispatchKeySet keys = c10::impl::tls_local_dispatch_key_set();
  keys.excluded_ = keys.excluded_ | c10::DispatchKeySet({c10::DispatchKey::Python,
                                                         c10::DispatchKey::PythonTLSSnapshot});
  keys.included_ = keys.included_.remove_backend(c10::BackendComponent::MetaBit);
  return keys;
}

Undisturbed::Undisturbed()
    : no_modes_(WithoutModes()),
      generator_(at::globalContext().defaultGenerator(at::kCPU)),
      before_(generator_.get_state()) {}

Undisturbed::~Undisturbed() { generator_.set_state(before_); }

State Visible(const State& state) {
  State visible;
  for (const NamedTensor& t : state.tensors) {
    if (!IsDecodingName(t.name)) visible.tensors.push_back(t);
  }
  return visible;
}

CoreSpec ParseSpec(const std::string& text) {
  CoreSpec spec;
  Fields f;
  f.Add("mechanism", &spec.mechanism, "");
  f.Add("options", &spec.options, "");
  f.Add("dim", &spec.dims.dim, "", {1, 1 << 24});
  f.Add("heads", &spec.dims.heads, "", {1, 65536});
  f.Add("max_length", &spec.dims.max_length, "", {0, 1 << 30});
  f.Add("layer", &spec.dims.layer, "", {0, 1 << 20});
  f.Add("dropout", &spec.dims.dropout, "", {0.0, 0.95});
  f.Add("model", &spec.dims.model, "", {0, 1 << 24});
  f.Add("relative", &spec.dims.relative, "");
  f.Add("relative_std", &spec.dims.relative_std, "", {0.0, 10.0});
  const Json given = ParseJson(text, "specification");
  const bool named = given.is_object() && given.value("mechanism", Json()).is_string();
  f.Read(given, named ? "[" + given["mechanism"].get<std::string>() + "]" : "specification");
  return spec;
}

std::shared_ptr<Mechanism> MakeCore(const CoreSpec& spec) {
  if (spec.dims.dim < 1 || spec.dims.heads < 1 || spec.dims.dim % spec.dims.heads != 0) {
    FailUsage("dim=", spec.dims.dim, " is not divisible by heads=", spec.dims.heads);
  }
  std::shared_ptr<Mechanism> core = FindMechanism(spec.mechanism).Make(spec.options, spec.dims);
  if (core->weights().size() != core->named_parameters().size() + core->named_buffers().size()) {
    FailUsage("[", spec.mechanism,
              "] is not in the Python package yet: it holds weights that cannot be passed; train "
              "it with the program");
  }
  return core;
}

CoreScope::CoreScope(const std::string& spec) : core_(CachedCore(spec, false)) {}

CoreScope::CoreScope(const std::string& spec, at::TensorList weights, bool training, Form form)
    : core_(CachedCore(spec, form == Form::kCross)) {
  const auto& slots = core_.mechanism->weights();
  CISTERN_CHECK(weights.size() == slots.size(), "[", core_.mechanism->info().name, "] expected ",
                slots.size(), " weights, got ", weights.size());
  for (size_t i = 0; i < slots.size(); ++i) {
    CISTERN_CHECK(weights[i].sizes() == core_.own[i].sizes(), "[", core_.mechanism->info().name,
                  "] expected ", slots[i].name, " of shape ", core_.own[i].sizes(), ", got ",
                  weights[i].sizes());
  }
  for (size_t i = 0; i < slots.size(); ++i) *slots[i].value = weights[i];
  core_.mechanism->train(training);
}

CoreScope::~CoreScope() {
  const auto& slots = core_.mechanism->weights();
  for (size_t i = 0; i < slots.size(); ++i) *slots[i].value = core_.own[i];
  core_.mechanism->train(false);
}

}  // namespace cistern::python
