// cistern info: the build, the machine, the mechanisms; or what a model folder holds.
#include <ATen/Parallel.h>
#include <torch/version.h>

#include <cstdio>

#include "cistern/attention/mechanism.h"
#include "cistern/base/error.h"
#include "cistern/cli/command.h"
#include "cistern/cli/info_experiment.h"
#include "cistern/decode/lm_folder.h"
#include "cistern/io/json_text.h"
#include "cistern/kernels/isa.h"
#include "cistern/models/model_state.h"
#include "cistern/ops/impl.h"
#include "cistern/tasks/task.h"

namespace cistern::cli {
namespace {

struct InfoArguments {
  Common common;
  std::string folder;
  bool docs = false, tasks = false, models = false;
};

std::string Joined(const std::vector<std::string>& words, const char* comma = ", ") {
  std::string out;
  for (const std::string& w : words) out += (out.empty() ? "" : comma) + w;
  return out;
}

std::vector<std::string> FormNames(const std::vector<Form>& forms) {
  std::vector<std::string> names;
  for (const Form form : forms) names.push_back(FormName(form));
  return names;
}
std::vector<std::string> FormNames(const MechanismInfo& info) { return FormNames(info.forms); }

Json MechanismJson(const MechanismInfo& info) {
  return {{"name", info.name},
          {"title", info.title},
          {"source", info.source},
          {"summary", info.summary},
          {"definition", info.definition},
          {"forms", FormNames(info)},
          {"exact", info.exact},
          {"stochastic", info.stochastic},
          {"bounded", info.bounded},
          {"verbs", info.verbs},
          {"merges", info.merges},
          {"truncates", info.truncates},
          {"fixed_length", info.fixed_length},
          {"copies_scores", info.copies_scores},
          {"positions", info.PositionNames()},
          {"time", info.time},
          {"state", info.state},
          {"refusals", info.refusals},
          {"options", info.options().Write()}};
}

// What it can do beyond its forms, in words.
std::string Abilities(const MechanismInfo& info) {
  std::vector<std::string> words;
  words.push_back(info.verbs ? "write, read, extend" : "no verbs: whole sequences alone");
  if (info.verbs) words.push_back(info.bounded ? "state of one size" : "state grows");
  if (info.merges) words.push_back("states merge");
  if (info.truncates) words.push_back("states can be cut back");
  words.push_back(info.exact ? "exact" : "not softmax attention");
  if (info.stochastic) words.push_back("draws random numbers in training");
  if (info.fixed_length) words.push_back("fixed length");
  if (info.copies_scores) words.push_back("copies scores");
  return Joined(words, "; ");
}

// The kinds of models.
int PrintModels(bool as_json) {
  Json all = Json::array();
  for (const ModelInfo* i : Models()) {
    std::vector<std::string> groups;
    for (const Form form : i->forms) groups.push_back(GroupName(form));
    const Json own = i->options ? i->options().Write() : Json::object();
    all.push_back({{"name", i->name},
                   {"summary", i->summary},
                   {"groups", groups},
                   {"inputs", i->inputs},
                   {"options", own}});
    if (as_json) continue;
    std::printf("%-20s %s\n%20s stacks: %s; reads %s\n", i->name.c_str(), i->summary.c_str(), "",
                Joined(groups).c_str(), Joined(i->inputs).c_str());
    if (i->options) std::printf("%s", i->options().Help(21).c_str());
  }
  if (as_json) std::printf("%s\n", all.dump().c_str());
  return 0;
}

// The generated part of docs/mechanisms.md.
int PrintDocs() {
  std::printf(
      "| mechanism | forms | time | decoding state | positions | source "
      "|\n|---|---|---|---|---|---|\n");
  for (const MechanismInfo* i : Mechanisms()) {
    std::printf("| `%s` | %s | %s | %s | %s | %s |\n", i->name.c_str(),
                Joined(FormNames(*i)).c_str(), i->time.c_str(), i->state.c_str(),
                Joined(i->PositionNames()).c_str(), i->source.c_str());
  }
  for (const MechanismInfo* i : Mechanisms()) {
    std::printf("\n### %s (`%s`)\n\n%s\n\n```text\n%s\n```\n", i->title.c_str(), i->name.c_str(),
                i->summary.c_str(), i->definition.c_str());
    for (const std::string& refusal : i->refusals) std::printf("\nNot %s.\n", refusal.c_str());
    const std::string help = i->options().Help();
    if (!help.empty()) std::printf("\n```text\n%s```\n", help.c_str());
  }
  return 0;
}

// Where the size of a model's state is shown.
constexpr int64_t kStateTokens[] = {0, 1'000, 1'000'000};

void PrintState(const StatefulModel& model) {
  const auto& layers = model.state_layers();
  const size_t self = size_t(model.config().Stack(Form::kCausal).layers());
  std::printf("state        bytes of one text after that many tokens%s:\n%33s",
              layers.size() > self ? ", with as many of its source" : "", "");
  for (const int64_t tokens : kStateTokens) std::printf(" %14lld", static_cast<long long>(tokens));
  for (size_t i = 0; i <= layers.size(); ++i) {
    const bool all = i == layers.size();
    const std::string name = all ? "model"
                                 : StrCat("layer ", i % self, i < self ? " (" : " to the source (",
                                          layers[i]->mechanism().info().name, ")");
    std::printf("\n  %-31s", name.c_str());
    for (const int64_t tokens : kStateTokens) {
      std::printf(" %14lld",
                  static_cast<long long>(
                      all ? model.StateBytes(1, tokens, tokens)
                          : layers[i]->StateBytes(1, tokens, model.options(), i < self)));
    }
  }
  std::printf("\n");
}

int PrintModel(const InfoArguments& a) {
  ReadFolderConfig(a.folder);  // says what a folder lacks
  const auto model = LoadModel(a.folder);
  Json json = {{"folder", a.folder},
               {"model", model->config().Summary()},
               {"parameters", model->ParameterCount()}};
  const auto* stateful = dynamic_cast<StatefulModel*>(model.get());
  if (stateful) {
    for (const int64_t tokens : kStateTokens)
      json["state_bytes"][std::to_string(tokens)] = stateful->StateBytes(1, tokens, tokens);
  }
  if (a.common.json) {
    for (const auto& p : model->named_parameters())
      json["tensors"][p.key()] = p.value().sizes().vec();
    std::printf("%s\n", JsonLine(json).c_str());
    return 0;
  }
  std::printf("%-12s %s\n%-12s %s\n%-12s %lld\n", "folder", a.folder.c_str(), "model",
              model->config().Summary().c_str(), "parameters",
              static_cast<long long>(model->ParameterCount()));
  if (stateful) PrintState(*stateful);
  for (const auto& p : model->named_parameters()) {
    std::printf("  %-48s %s\n", p.key().c_str(), Json(p.value().sizes().vec()).dump().c_str());
  }
  return 0;
}

Json TaskJson(const TaskInfo& t) {
  Json metrics = Json::array();
  for (const Metric& m : t.metrics) {
    metrics.push_back({{"name", m.name},
                       {"summary", m.summary},
                       {"better", m.lower_is_better ? "lower" : "higher"}});
  }
  return {{"name", t.name},
          {"summary", t.summary},
          {"models", t.models},
          {"metrics", metrics},
          {"data", t.data},
          {"defaults", t.defaults},
          {"options", t.config()->Describe().Write()}};
}

int PrintTasks(const InfoArguments& a) {
  if (a.common.json) {
    Json json = Json::array();
    for (const TaskInfo* t : Tasks()) json.push_back(TaskJson(*t));
    std::printf("%s\n", json.dump().c_str());
    return 0;
  }
  for (const TaskInfo* t : Tasks()) {
    std::printf("%-16s %s\n", t->name.c_str(), t->summary.c_str());
    std::printf("%16s models: %s; --data: %s\n", "", Joined(t->models).c_str(),
                t->data.empty() ? "none" : t->data.c_str());
    for (const Metric& m : t->metrics)
      std::printf("%16s %s: %s\n", "", m.name.c_str(), m.summary.c_str());
    std::printf("%s", t->config()->Describe().Help(17).c_str());
  }
  return 0;
}

int RunInfo(const InfoArguments& a) {
  ApplyCommon(a.common);
  if (a.tasks) return PrintTasks(a);
  if (a.docs && a.common.json) FailUsage("--docs prints Markdown; leave out --json");
  if (a.docs) return PrintDocs();
  if (a.models) return PrintModels(a.common.json);
  if (a.folder.ends_with(".toml")) return PrintExperiment(a.folder, a.common.json);
  if (!a.folder.empty()) return PrintModel(a);
  Json json = {
      {"version", CISTERN_VERSION},       {"libtorch", TORCH_VERSION},
      {"threads", at::get_num_threads()}, {"simd_targets", CompiledIsas()},
      {"simd_in_use", ActiveIsa()},       {"implementation", ops::ImplName(ops::ActiveImpl())}};
  if (a.common.json) {
    for (const MechanismInfo* i : Mechanisms()) json["mechanisms"].push_back(MechanismJson(*i));
    std::printf("%s\n", JsonLine(json).c_str());
    return 0;
  }
  std::printf("cistern %s, libtorch %s, %d threads\n", CISTERN_VERSION, TORCH_VERSION,
              at::get_num_threads());
  std::printf("SIMD: %s in use; compiled: %s\n", ActiveIsa().c_str(),
              Joined(CompiledIsas()).c_str());
  std::printf("implementation: %s (CISTERN_IMPL)\n\n", ops::ImplName(ops::ActiveImpl()).c_str());
  for (const MechanismInfo* i : Mechanisms()) {
    std::printf("%-16s %s\n", i->name.c_str(), i->summary.c_str());
    std::printf("%10s forms: %s; positions: %s; time %s; state %s; %s\n", "",
                Joined(FormNames(*i)).c_str(), Joined(i->PositionNames()).c_str(), i->time.c_str(),
                i->state.c_str(), i->source.c_str());
    std::printf("%10s %s\n", "", Abilities(*i).c_str());
    const std::string help = i->options().Help(11);
    if (!help.empty()) std::printf("%s", help.c_str());
  }
  return 0;
}

}  // namespace

void AddInfo(CLI::App& app, Run& run) {
  auto a = std::make_shared<InfoArguments>();
  CLI::App* command = app.add_subcommand(
      "info",
      "show the build, the machine and the mechanisms, or what a model folder or an experiment "
      "file holds");
  command->add_option("folder", a->folder, "model folder, or experiment file (.toml)");
  command->add_flag("--tasks", a->tasks, "every task: its models, metrics and options");
  command->add_flag("--docs", a->docs, "print the generated part of docs/mechanisms.md");
  command->add_flag("--models", a->models, "the kinds of models and their own options");
  AddCommon(*command, a->common);
  command->callback([a, &run] { run = [a] { return RunInfo(*a); }; });
}

}  // namespace cistern::cli
