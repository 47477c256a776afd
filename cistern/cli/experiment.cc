#include "cistern/cli/experiment.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <filesystem>
#include <functional>
#include <utility>

#include "cistern/base/error.h"
#include "cistern/base/format.h"
#include "cistern/base/parallel.h"
#include "cistern/base/terminal.h"
#include "cistern/cli/analysis_log.h"
#include "cistern/io/checked_json.h"
#include "cistern/io/safetensors.h"
#include "cistern/kernels/isa.h"
#include "cistern/models/transfer.h"
#include "cistern/nn/product_speed.h"
#include "cistern/tensors/device.h"
#include "cistern/train/checkpoint.h"

namespace cistern::cli {

Fields Experiment::Describe() {
  Fields f;
  f.Add("seed", &seed, "of the weights, the order of the data, dropout", {0, int64_t{1} << 62});
  f.Add("dtype", &dtype,
        "bfloat16: linear maps in bfloat16, everything else in float32; auto: bfloat16 where this "
        "machine's matrix products are faster in it, else float32",
        {"auto", "float32", "float64", "bfloat16"});
  f.Add("from", &from,
        "a model folder to start from: its weights, its tokenizer and, unless told "
        "otherwise, the settings of its layers; empty: random weights");
  f.Add("new_head", &new_head, "with from: initialize what follows the layers from scratch");
  f.Add("swap_attention", &swap_attention,
        "with from: allow other mechanisms; of their weights, take those that fit");
  f.Group("task", task.Describe());
  f.Group("model", model.Describe());
  f.Group("train", train.Describe());
  f.Group("pretrain", pretrain.Describe());
  f.Group("published", published.Describe());
  return f;
}

Json Experiment::Write() {
  Json tree = Describe().Write();
  tree["task"] = task.Write();
  return tree;
}

namespace {

// The kind of model: the task's choice unless one was named, which must fit it.
void ChooseModel(Experiment& experiment) {
  const TaskInfo& task = experiment.task.info();
  std::string& kind = experiment.model.kind;
  if (kind.empty()) kind = task.models[0];
  if (std::find(task.models.begin(), task.models.end(), kind) != task.models.end()) return;
  std::string fit;
  for (const std::string& m : task.models) fit += (fit.empty() ? "" : ", ") + m;
  FailUsage("model.kind=", kind, " does not fit the task ", task.name, ", which trains ", fit);
}

std::vector<std::string> Plain(std::vector<std::string> assignments) {
  for (std::string& a : assignments) a = PlainAssignment(a);
  return assignments;
}

// The value of a text key, at the top of the file or in one of its tables, or in an assignment.
std::string Said(const Json& tree, const std::vector<std::string>& assignments,
                 const std::string& table, const std::string& key) {
  std::string value;
  const Json none, &inner = table.empty()                              ? tree
                            : tree.is_object() && tree.contains(table) ? tree[table]
                                                                       : none;
  if (inner.is_object() && inner.contains(key) && inner[key].is_string())
    value = inner[key].get<std::string>();
  const std::string start = (table.empty() ? "" : table + ".") + key + "=";
  for (const std::string& a : assignments) {
    if (a.starts_with(start)) value = AssignedValue(a);
  }
  return value;
}

// Parts of the head of a --from folder for which this model, told otherwise, has no place. said:
// whether somebody asks for the key here.
void DropIdleParts(ModelConfig& model, const std::function<bool(const std::string&)>& said) {
  const ModelConfig unset;
  const auto drop = [&](bool idle, const std::string& key, auto& value, const auto& usual) {
    if (idle && !said("model." + key)) value = usual;
  };
  const bool linear = model.head == HeadKind::kLinear, output = model.info().predicts_tokens;
  drop(model.pooling != PoolingKind::kCls, "cls_place", model.cls_place, unset.cls_place);
  drop(linear, "head_dims", model.head_dims, unset.head_dims);
  drop(linear, "head_dropout", model.head_dropout, unset.head_dropout);
  drop(!output, "tie_embeddings", model.tie_embeddings, unset.tie_embeddings);
  drop(!output, "head_bias", model.head_bias, unset.head_bias);
  drop(!output || !model.tie_embeddings, "scale_logits", model.scale_logits, unset.scale_logits);
}

// What a file says of other kinds of model does not hold for this one, as other tasks' tables do
// not for this task: their own groups, and the head of one text beside that of pairs.
void LeaveOutOtherKinds(Json& model, const std::string& kind, const std::string& where) {
  for (const ModelInfo* other : Models()) {
    if (other->name == kind || !other->options || !model.contains(other->name)) continue;
    other->options().Read(model[other->name], StrCat(where, ": model.", other->name));
    model.erase(other->name);
  }
  if (kind == "two_tower" && model.value(kind, Json::object()).contains("match")) {
    for (const char* of_one : {"head", "head_dims"}) {
      if (!model.contains(of_one)) continue;
      ModelConfig().Describe().Read({{of_one, model[of_one]}}, where + ": model");
      model.erase(of_one);
    }
  }
}

void ReadTree(Experiment& experiment, Json tree, const std::string& where,
              const std::vector<std::string>& given) {
  const std::vector<std::string> assignments = Plain(given);
  Fields fields = experiment.Describe();
  const bool begun = tree.is_object() && tree.contains("data");
  if (tree.is_object()) {
    for (const char* result : {"result", "data", "environment"})
      tree.erase(result);  // an experiment.json of a finished run
    if (tree.contains("model")) tree["model"] = ConvertModelConfig(tree["model"]);
  }
  std::string kind = Said(tree, assignments, "task", "kind");
  // Names the file in what `check` throws, unless an assignment to `key` may be what is wrong.
  const auto of_file = [&](const char* key, auto&& check) {
    try {
      return check();
    } catch (const UsageError& e) {
      const auto said = [&](const std::string& a) { return a.starts_with(key); };
      if (where.empty() || std::any_of(assignments.begin(), assignments.end(), said)) throw;
      throw UsageError(where + ": " + e.what());
    }
  };
  kind = of_file("task.kind=",
                 [&] { return FindTask(kind.empty() ? experiment.task.kind : kind).name; });
  std::string model_kind = Said(tree, assignments, "model", "kind");
  if (model_kind.empty()) model_kind = FindTask(kind).models[0];
  if (tree.is_object() && tree.contains("model") && tree["model"].is_object())
    LeaveOutOtherKinds(tree["model"], model_kind, where);
  // A run that was begun has all settings in its record, and does not need the folder any more.
  const std::string from = begun ? "" : Said(tree, assignments, "", "from");
  if (!from.empty()) {
    Fields start;
    start.Group("model", experiment.model.Describe());
    start.Read({{"model", StartingConfig(from, model_kind)}}, from);
  }
  if (!tree.is_null()) {
    if (tree.is_object() && tree.contains("task"))
      tree["task"] = begun ? TaskOptions::Recorded(tree["task"], kind)
                           : TaskOptions::Grouped(tree["task"], kind, where.ends_with(".json"));
    fields.Read(tree, where);
  }
  for (const std::string& a : assignments) fields.Set(TaskOptions::Grouped(a, kind));
  ChooseModel(experiment);
  if (!from.empty()) {
    DropIdleParts(experiment.model, [&](const std::string& key) {
      const auto assigns = [&](const std::string& a) { return a.starts_with(key + "="); };
      const Json model = tree.is_object() ? tree.value("model", Json()) : Json();
      return model.contains(key.substr(6)) ||
             std::any_of(assignments.begin(), assignments.end(), assigns);
    });
  }
  of_file("published.", [&] { experiment.published.Validate(experiment.task.info()); });
}

// Values of `over` replace those of `base`; objects are merged.
void MergeTrees(Json& base, const Json& over) {
  for (const auto& [key, value] : over.items()) {
    if (value.is_object() && base.contains(key) && base[key].is_object()) {
      MergeTrees(base[key], value);
    } else {
      base[key] = value;
    }
  }
}

// A key of [task] stands for the chosen task's own table: it replaces what a file below says there.
void MergeFiles(Json& base, const Json& over) {
  if (over.contains("task") && over["task"].is_object() && base.contains("task") &&
      base["task"].is_object()) {
    for (const auto& said : over["task"].items()) {
      if (said.value().is_object()) continue;
      for (auto& table : base["task"]) {
        if (table.is_object()) table.erase(said.key());
      }
    }
  }
  MergeTrees(base, over);
}

constexpr int kMostFiles =
    256;  // that one experiment extends: two that each name two are four, ...

// A file with all that it extends. `files`: those that are being read, to see a circle; `read`: how
// many were.
Json ReadExperimentTree(const std::string& file, std::vector<std::string> files, int* read) {
  if (++*read > kMostFiles)
    FailUsage(files[0], ": extends more than ", kMostFiles, " files, through other files");
  const std::filesystem::path path(file);
  std::error_code ignored;
  const std::string canonical = std::filesystem::weakly_canonical(path, ignored).string();
  if (std::find(files.begin(), files.end(), canonical) != files.end())
    FailUsage(file, ": extends itself, through other files");
  files.push_back(canonical);
  Json tree = file.ends_with(".json") ? ReadCheckedJson(file, "the run may be another")
                                      : ReadTomlFile(file);
  if (!tree.is_object() || !tree.contains("extends")) return tree;
  const Json bases = tree["extends"].is_array() ? tree["extends"] : Json::array({tree["extends"]});
  tree.erase("extends");
  Json whole = Json::object();
  for (const Json& name : bases) {
    if (!name.is_string())
      FailUsage(file, ": extends must be the path of a file, or a list of them, got ", name.dump());
    const std::string base = (path.parent_path() / name.get<std::string>()).string();
    if (!std::filesystem::exists(base, ignored))
      FailUsage(file, ": extends ", base, ", which does not exist");
    MergeFiles(whole, ReadExperimentTree(base, files, read));
  }
  MergeFiles(whole, tree);
  return whole;
}

// The same, null of no file.
Json TreeOf(const std::string& file) {
  if (file.empty()) return {};
  try {
    int read = 0;
    return ReadExperimentTree(file, {}, &read);
  } catch (const UsageError&) {
    throw;
  } catch (const Error& e) {  // a configuration that cannot be read is wrong use, before any work
    throw UsageError(e.what());
  }
}

}  // namespace

void ReadRunExperiment(Experiment& experiment, const std::string& folder,
                       const std::vector<std::string>& assignments) {
  const auto newest = NewestCheckpoint(folder);
  if (!newest) return ReadExperiment(experiment, folder + "/experiment.json", assignments);
  const Json begun = ReadRunState(*newest).experiment;
  ReadTree(experiment, begun, *newest + "/trainer.json", assignments);
  if (experiment.dtype == "auto") experiment.dtype = begun.value("dtype", "float32");
}

void ReadExperiment(Experiment& experiment, const std::string& file,
                    const std::vector<std::string>& assignments) {
  ReadTree(experiment, TreeOf(file), file, assignments);
}

std::string NamedTask(const std::string& file, const std::vector<std::string>& assignments) {
  const Json tree = TreeOf(file);
  const std::string kind = Said(tree, Plain(assignments), "task", "kind");
  if (kind.empty()) return kind;
  try {
    return FindTask(kind).name;
  } catch (const UsageError& e) {
    if (Said(tree, {}, "task", "kind") != kind) throw;
    throw UsageError(file + ": " + e.what());
  }
}

std::string PlainAssignment(const std::string& assignment) {
  const size_t equals = assignment.find('=');
  if (equals == assignment.npos) return assignment;
  return AssignedKey(assignment) + assignment.substr(equals);
}

std::string AssignedValue(const std::string& assignment) {
  const size_t equals = assignment.find('=');
  return equals == assignment.npos ? "" : AssignedText(assignment.substr(equals + 1));
}

std::string AssignedKey(const std::string& assignment) {
  std::string key = assignment.substr(0, assignment.find('='));
  std::erase(key, ' ');
  return key;
}

std::string DottedKey(std::string pointer) {
  std::replace(pointer.begin(), pointer.end(), '/', '.');
  return pointer.substr(1);
}

std::vector<std::string> DataAssignments(const std::string& task, const std::string& data) {
  std::vector<std::string> set;
  if (task.empty() && data.empty()) return set;
  const TaskInfo& info = task.empty() ? TaskOfData(data) : FindTask(task);
  set.push_back("task.kind=" + info.name);
  if (data.empty()) return set;
  if (info.data.empty()) FailUsage("the task ", info.name, " generates its own data; omit --data");
  set.push_back("task." + info.name + "." + info.data + "=" + AsAssigned(data));
  return set;
}

namespace {

std::string TomlValue(const Json& value) {
  if (value.is_object()) {
    std::string inner;
    for (const auto& [key, v] : value.items())
      inner += (inner.empty() ? " " : ", ") + key + " = " + TomlValue(v);
    return "{" + inner + (inner.empty() ? "}" : " }");
  }
  if (value.is_array()) {
    std::string inner;
    for (const auto& v : value) inner += (inner.empty() ? "" : ", ") + TomlValue(v);
    return "[" + inner + "]";
  }
  return value.dump();
}

// The values of a table, then the tables in it, each under its whole name.
void WriteTable(const std::string& name, const Json& table, std::string* text) {
  for (const auto& [key, value] : table.items()) {
    if (!value.is_object() || value.empty()) *text += key + " = " + TomlValue(value) + "\n";
  }
  for (const auto& [key, value] : table.items()) {
    if (!value.is_object() || value.empty()) continue;
    const std::string inner = name.empty() ? key : name + "." + key;
    *text += "\n[" + inner + "]\n";
    WriteTable(inner, value, text);
  }
}

}  // namespace

std::string ExperimentToml(Experiment& experiment) {
  std::string text;
  WriteTable("", experiment.Write(), &text);
  return text;
}

namespace {

// The tokens that the run's model knows, where the task reads text.
void TakeTokenizer(Task& task, const std::string& run) {
  const std::string path = run + "/tokenizer.json";
  if (!std::filesystem::exists(path)) return;
  if (task.TakeTokenizer(LoadTokenizer(path))) Note("using the tokenizer of " + run);
}

// What the folder of a run says of its experiment; empty where it does not: it is no part of the
// model.
Json RecordOf(const std::string& run) {
  const std::string path = run + "/experiment.json";
  std::error_code ignored;
  if (!std::filesystem::exists(path, ignored)) return Json::object();
  try {
    Json record = ReadJsonFile(path);
    return record.is_object() ? record : Json::object();
  } catch (const Error&) {
    return Json::object();
  }
}

std::string TaskOf(const Json& record) {
  const Json task = record.value("task", Json::object());
  return task.is_object() ? task.value("kind", std::string()) : "";
}

// UsageError where rows of the embedding would stand for something else here, whatever their
// number.
void RefuseOtherIds(const Json& data, const Json& record, const std::string& from) {
  const auto ids = [](const Json& summary) {
    return summary.is_object() ? summary.value("ids", std::string()) : std::string();
  };
  const std::string mine = ids(data), theirs = ids(record.value("data", Json()));
  if (!mine.empty() && !theirs.empty() && mine != theirs)
    FailUsage("the token ids of ", from, " are ", theirs, ", and here they are ", mine,
              "; the two must read the same tokens");
}

// A note where the head that is taken was made for other classes, though as many: it is taken by
// their order.
std::string OtherClasses(const Json& data, const Json& record, const std::string& from) {
  if (!data.contains("classes")) return "";
  const auto names = [](const Json& summary) {
    std::string all;
    if (!summary.is_object() || !summary.contains("classes")) return all;
    if (!summary["classes"].is_object()) return all;
    for (const auto& [name, count] : summary["classes"].items())
      all += (all.empty() ? "" : ", ") + name;
    return all;
  };
  const std::string theirs = record.contains("data") ? names(record["data"]) : "",
                    mine = names(data);
  if (theirs.empty() || theirs == mine) return "";
  return StrCat("the classes of ", from, " are ", theirs, ", and here they are ", mine,
                "; where the head was taken, it was by their order: --new-head initializes it");
}

// Error where weights that were taken are not finite. Those that a model begins with itself are.
void RequireFiniteWeights(const Model& model, const std::string& from) {
  const auto check = [&from](const std::string& name, const at::Tensor& value) {
    if (value.is_floating_point() && !at::isfinite(value).all().item<bool>())
      Fail(from, "/model.safetensors: tensor '", name, "' holds numbers that are not finite; ",
           "nothing can be trained from it");
  };
  for (const auto& p : model.named_parameters()) check(p.key(), p.value());
  for (const auto& b : model.named_buffers()) check(b.key(), b.value());
}

}  // namespace

std::string FolderOfRecord(const std::string& from) {
  namespace fs = std::filesystem;
  std::error_code ignored;
  if (!fs::exists(from + "/trainer.json", ignored) ||
      fs::exists(from + "/experiment.json", ignored))
    return from;
  const std::string run = fs::canonical(from, ignored).parent_path().string();
  if (!fs::exists(run + "/experiment.json", ignored))
    FailUsage(from, " is a checkpoint, and ", run, ", where its run would be, has no ",
              "experiment.json, which says what its weights know; copy the run's experiment.json ",
              "(and its tokenizer.json, if it has one) into the checkpoint");
  return run;
}

ShapesOnly::ShapesOnly() : before_(ActiveDevice()) { SetActiveDevice(at::kMeta); }
ShapesOnly::~ShapesOnly() { SetActiveDevice(before_); }

DtypeChoice ChooseDtype(const Experiment& e, const Task& task) {
  constexpr double kLeast = 1e8, kMost = 2e9;  // operations of a product that is worth measuring
  if (ActiveDevice() != at::Device(at::kCPU))
    return {"float32", "on " + ActiveDevice().str() + " bfloat16 has to be asked for"};
  if (!e.published.source.empty()) return {"float32", "published settings are in it"};
  const LayerStack stack = e.model.Stack(e.model.info().forms[0]);
  const int64_t dim = stack.dim(), hidden = stack.ffn_dim(),
                all_rows = task.rows_of_batch(e.train.batch) * task.tokens_per_row();
  const double row = 2.0 * double(dim) * double(hidden);
  if (double(all_rows) * row < kLeast)
    return {"float32", "the matrix products are too small to gain from bfloat16"};
  if (!HasBFloat16()) return {"float32", "this processor has no bfloat16 products"};
  if (row > kMost) return {"float32", "products of this size are not measured"};
  const int64_t rows = std::min(all_rows, std::max<int64_t>(16, int64_t(kMost / row)));
  const ProductSpeed speed = MeasureProducts(rows, dim, hidden);
  return {speed.PrefersBFloat16() ? "bfloat16" : "float32",
          StrCat("matrix products here: ", Fixed(speed.float32, 0), " GFLOP/s in float32, ",
                 Fixed(speed.bfloat16, 0), " in bfloat16")};
}

namespace {

// Only what predicts tokens reads them; another kind does while it is trained on its inputs first.
void RefuseIdleOutput(const ModelConfig& model) {
  const ModelConfig unset;
  const char* key = model.tie_embeddings != unset.tie_embeddings ? "tie_embeddings"
                    : model.head_bias                            ? "head_bias"
                    : model.scale_logits                         ? "scale_logits"
                                                                 : nullptr;
  if (key && !model.info().predicts_tokens)
    FailUsage("model.", key, " has no effect on a model of kind ", model.kind,
              ", which has no output over a vocabulary; leave it out");
}

}  // namespace

Trained TrainExperiment(Experiment experiment, const std::string& folder, bool resume,
                        const std::shared_ptr<Processes>& processes) {
  experiment.model.Validate();
  experiment.train.Validate();
  const bool pretrains = experiment.pretrain.objective != SelfObjective::kNone;
  experiment.pretrain.Validate(experiment.train);
  if (pretrains && !experiment.from.empty())
    FailUsage("from=", experiment.from,
              " and pretrain.objective=", NameOf(experiment.pretrain.objective, SelfObjectives()),
              " both say which weights the run starts with; give one of them");
  if (!resume && (HoldsRun(folder) || HoldsPretraining(folder))) {
    FailUsage(folder, " already holds a run; give another --out, or --resume to continue it");
  }
  if (!resume) RefuseOtherFiles(folder);
  if (resume && !HoldsRun(folder)) {
    if (!HoldsPretraining(folder)) Note(folder + " holds no checkpoint yet; the run starts again");
    resume = false;
  }
  if (!resume && !pretrains) RefuseIdleOutput(experiment.model);
  Trained out;
  out.task = experiment.task.Make();
  if (resume) out.task->LoadAssets(folder);
  const bool taking = !resume && !experiment.from.empty();
  const std::string parent = taking ? FolderOfRecord(experiment.from) : "";
  if (taking) TakeTokenizer(*out.task, parent);
  if (out.task->CompletesFirst()) {
    ModelConfig config = experiment.model;
    out.task->Complete(config);
    const ShapesOnly shapes;
    MakeModel(config, uint64_t(experiment.seed));
  }
  out.task->Prepare();
  const Json data = out.task->DataSummary();
  if (taking) RefuseOtherIds(data, RecordOf(parent), experiment.from);
  if (data.contains("notes")) {
    for (const Json& note : data["notes"]) Note(note.get<std::string>());
  }
  out.config = experiment.model;
  out.task->Complete(out.config);
  // A run of an earlier version goes on with the biases that its weights have.
  if (const auto newest = resume ? NewestCheckpoint(folder) : std::nullopt)
    KeepBiases(out.config, SafetensorsFile(*newest + "/model.safetensors"));
  if (const int64_t said = experiment.model.vocab_size; said > 0 && said != out.config.vocab_size)
    Note(StrCat("model.vocab_size=", said, " was asked for; the data has ", out.config.vocab_size));
  CheckMemory(out.config, out.task->rows_of_batch(experiment.train.batch),
              out.task->tokens_per_row(), experiment.dtype == "float64" ? 8 : 4, experiment.train,
              0, *processes);
  std::string why;  // this dtype
  const bool chosen = experiment.dtype == "auto";
  if (chosen) {
    const DtypeChoice choice = ChooseDtype(experiment, *out.task);
    experiment.dtype = choice.dtype;
    why = choice.why;
    Note(StrCat("dtype auto: ", choice.dtype, " (", why, "); --dtype ", choice.dtype,
                " trains the same elsewhere"));
  }
  const std::string of_first = processes->OfFirst(experiment.dtype);
  if (chosen) experiment.dtype = of_first;
  out.model = MakeModel(out.config, uint64_t(experiment.seed));
  if (experiment.dtype == "float64") out.model->to(at::kDouble);
  if (taking) {
    const Json theirs = RecordOf(parent);
    const TransferReport report = TakeWeights(
        *out.model, experiment.from,
        {experiment.new_head, experiment.swap_attention, out.task->HasFirstIdsOf(TaskOf(theirs))});
    RequireFiniteWeights(*out.model, experiment.from);
    Note(StrCat("from ", experiment.from, ": ", report.Summary()));
    for (const std::string& note : report.notes) Note(note);
    const std::string classes =
        experiment.new_head ? "" : OtherClasses(data, theirs, experiment.from);
    if (!classes.empty()) Note(classes);
  }
  experiment.model = out.config;
  Json record = experiment.Write();
  record["data"] = data;
  record["environment"] = {{"threads", NumThreads()}};
  if (const auto newest = resume ? NewestCheckpoint(folder) : std::nullopt) {
    const Json begun = ReadRunState(*newest).experiment.value("environment", Json::object());
    if (begun.contains("dtype")) record["environment"]["dtype"] = begun["dtype"];
  }
  if (!why.empty()) record["environment"]["dtype"] = StrCat(experiment.dtype, ": ", why);
  if (!resume && HoldsPretraining(folder)) {  // resumed before its second training
    const Json begun = ReadCheckedJson(folder + "/experiment.json");
    for (const std::string& change : CompareRuns(record, begun, RunDefaults(record), folder)) {
      if (change.starts_with("train.")) Note("resumed with " + change);  // the others: Pretrain
    }
  }
  if (pretrains && (!resume || HoldsPretraining(folder))) {
    const Pretrained before =
        Pretrain(*out.task, *out.model, experiment.train, experiment.pretrain,
                 uint64_t(experiment.seed), experiment.dtype, folder, record, processes);
    if (before.run.interrupted) {
      out.result = before.run;
      return out;
    }
    out.pretrained = before.Summary(experiment.pretrain.objective);
  }
  Trainer trainer(out.model, *out.task, experiment.train, uint64_t(experiment.seed), folder, record,
                  experiment.dtype == "bfloat16", processes);
  if (experiment.train.log_memory)
    trainer.Observe(MemoryObserver(out.model, *out.task, uint64_t(experiment.seed), folder));
  if (resume) trainer.Resume();
  out.result = trainer.Run();
  return out;
}

}  // namespace cistern::cli
