// cistern compare: trains one model per mechanism with equal size and time, on the data of any
// task; measures quality, speed, memory and, of language models, decoding; writes a report.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <ctime>
#include <filesystem>

#include "cistern/attention/head_groups.h"
#include "cistern/base/error.h"
#include "cistern/base/format.h"
#include "cistern/base/interrupt.h"
#include "cistern/base/progress.h"
#include "cistern/base/subprocess.h"
#include "cistern/base/terminal.h"
#include "cistern/bench/timer.h"
#include "cistern/cli/child_run.h"
#include "cistern/cli/command.h"
#include "cistern/cli/compare_decide.h"
#include "cistern/cli/compare_folder.h"
#include "cistern/cli/compare_report.h"
#include "cistern/cli/experiment.h"
#include "cistern/cli/run_folder.h"
#include "cistern/decode/generate.h"
#include "cistern/decode/lm_folder.h"
#include "cistern/io/atomic_file.h"
#include "cistern/io/file_lock.h"
#include "cistern/io/json_text.h"
#include "cistern/tasks/evaluate.h"

namespace cistern::cli {
namespace {

// What all runs are trained with, as assignments; the user's own win.
std::vector<std::string> Assignments(CLI::App& command, const CompareArguments& a,
                                     const TaskInfo& task) {
  std::vector<std::string> set;
  for (const std::string& s : a.set) {
    const std::string key = AssignedKey(s);
    if ((key == "train.steps" || key == "train.seconds") && AssignedValue(s) != "0")
      FailUsage("--set ", s, ": each mechanism is trained for the same time; give --seconds");
    if (key == "model.attention")
      FailUsage("--set ", s, ": each model has another mechanism; name them with --mechanisms");
  }
  if (a.file.empty()) set = task.defaults;
  if (!a.data.empty() || !a.task.empty()) {
    const auto named = DataAssignments(task.name, a.data);
    set.insert(set.end(), named.begin(), named.end());
  }
  set.insert(set.end(), a.set.begin(), a.set.end());
  set.push_back(StrCat("train.seconds=", a.seconds));
  set.push_back("train.steps=0");
  if (command.count("--seed") > 0) set.push_back("seed=" + std::to_string(a.common.seed));
  if (command.count("--dtype") > 0) {
    set.push_back("dtype=" + a.common.dtype);
  }
  return set;
}

// One dtype for all runs, chosen once where the experiment leaves it open. Empty: as the experiment
// says.
std::string CommonDtype(const CompareArguments& a, const Experiment& e, const Task& task,
                        std::string* why) {
  if (e.dtype != "auto") return "";
  if (const std::string begun = a.resume ? BegunDtype(a) : ""; !begun.empty()) return begun;
  const DtypeChoice choice = ChooseDtype(e, task);
  *why =
      StrCat(choice.why, "; the linear maps train in ", choice.dtype, " (--dtype overrides this)");
  return choice.dtype;
}

// Every mechanism in a model of these settings, before any work.
// UsageError where no layer has the mechanism of model.attention, since each stack names its own.
void RequireUsed(const ModelConfig& config, const std::string& mechanism) {
  const std::vector<Form>& forms = config.info().forms;
  std::string named;
  for (const Form form : forms) {
    const std::vector<std::string> used = config.Stack(form).options().attention;
    if (std::find(used.begin(), used.end(), mechanism) != used.end()) return;
    named += StrCat(named.empty() ? "" : ", ", "model.", GroupName(form), ".attention");
  }
  FailUsage("no layer would have ", mechanism, " of --mechanisms: the settings name ", named,
            "; leave that out");
}

// latte of latte:2: one group has all heads.
std::string WithoutSoleGroup(const std::string& mechanism) {
  const std::vector<const MechanismInfo*> all = MechanismsOf(mechanism);
  return all.size() == 1 ? all[0]->name : mechanism;
}

void CheckMechanisms(const Experiment& experiment, const std::vector<std::string>& mechanisms) {
  for (size_t i = 0; i < mechanisms.size(); ++i) {
    for (size_t j = 0; j < i; ++j) {
      const std::string &one = mechanisms[i], &other = mechanisms[j];
      if (FolderName(one) == FolderName(other)) FailUsage("--mechanisms names ", one, " twice");
      if (WithoutSoleGroup(one) == WithoutSoleGroup(other))
        FailUsage("--mechanisms: ", one, " and ", other,
                  " are the same model, with one mechanism on all heads; leave one of them out");
    }
    Experiment each = experiment;
    each.model.attention = {mechanisms[i]};
    each.model.Validate();
    RequireUsed(each.model, mechanisms[i]);
  }
}

// Every mechanism that fits a model of these settings.
std::vector<std::string> FittingMechanisms(const Experiment& experiment) {
  std::vector<std::string> fit;
  std::string left_out;
  for (const MechanismInfo* info : Mechanisms()) {
    Experiment each = experiment;
    each.model.attention = {info->name};
    try {
      each.model.Validate();
      fit.push_back(info->name);
    } catch (const UsageError& e) {
      left_out += StrCat("\n  ", info->name, ": ", e.what());
    }
  }
  if (fit.empty()) FailUsage("--mechanisms all: none fits these settings", left_out);
  if (!left_out.empty()) Note("left out, for they do not fit:" + left_out);
  return fit;
}

// Named by the time, and made: another comparison may begin in the same second.
std::string NewFolder() {
  char stamp[32];
  const std::time_t now = std::time(nullptr);
  std::strftime(stamp, sizeof stamp, "%Y%m%d-%H%M%S", std::localtime(&now));
  const std::string name = StrCat("runs/compare-", stamp);
  EnsureDirectory("runs");
  std::string folder = name;
  std::error_code error;
  for (int n = 2; !std::filesystem::create_directory(folder, error) && !error; ++n)
    folder = StrCat(name, "-", n);
  return folder;
}

// Of a text, where it lies now: the model of a finished run on the test split in long blocks, at
// most a million tokens of it. Null where the task is none of texts or learned positions end
// before.
Json MeasureLongBlocks(const ChildSettings& child) {
  RunFolder run = OpenRun(child.folder);
  Fields fields;
  fields.Group("task", run.options.Describe());
  for (const std::string& place : PlacesOfData(child)) fields.Set(place);
  run.task = run.options.Make();
  run.task->LoadAssets(run.folder);
  const int64_t length = kLongFactor * run.task->tokens_per_row();
  if (!run.config.info().extends || run.config.info().encodes) return nullptr;
  if (length > run.config.PositionLimit(Form::kCausal)) return nullptr;
  run.Prepare();
  if (!run.task->Text(Split::kTest)) return nullptr;
  EvalOptions options;
  options.read.rows = 1, options.read.length = length, options.read.context = 0;
  options.read.max_tokens = 1 << 20;
  options.interrupted = &Interrupted();
  const auto model = LoadRunModel(run, "");
  const Evaluation done = Evaluate(*run.task, *model, Split::kTest, options);
  if (!done.complete) throw InterruptedRun();
  Json json = run.task->Metrics(done.score);
  json["length"] = length;
  return json;
}

// What was trained stays, whatever can be measured of it: a mechanism may know no position so far.
template <class Measure>
void MeasureOrSay(const char* what, CompareRow* row, Measure&& measure) {
  try {
    measure();
  } catch (const Error& e) {
    const std::string said = StrCat(what, " not measured: ", e.what());
    if (std::count(row->unmeasured.begin(), row->unmeasured.end(), said) == 0)
      row->unmeasured.push_back(said);
  }
}

// All seeds of a row: trained; with --resume, continued or reused.
CompareRow TrainRow(const CompareArguments& a, const std::vector<std::string>& set,
                    const std::string& mechanism, int64_t length) {
  CompareRow row;
  row.mechanism = mechanism;
  row.bounded = FindMechanism(mechanism).bounded;
  row.length = length;
  row.folder = RunPlace(a, mechanism, length, int64_t(a.common.seed));
  for (int64_t i = 0; i < a.seeds; ++i) {
    const int64_t seed = int64_t(a.common.seed) + i;
    ChildSettings child{RunPlace(a, mechanism, length, seed),
                        a.file,
                        set,
                        a.common.threads,
                        a.common.device,
                        a.resume};
    child.set.push_back("model.attention=" + mechanism);
    if (length > 0) child.set.push_back(StrCat("task.length=", length));
    child.set.push_back(StrCat("seed=", seed));
    try {
      ChildRun run = RunTraining(child);
      if (run.failed.empty()) {
        MeasureOrSay("longer blocks were", &row, [&] {
          if (Json longer = MeasureLongBlocks(child); !longer.is_null())
            run.result[kLongBlocks] = std::move(longer);
        });
        if (row.results.empty()) {
          row.result = run.result;
          row.folder = child.folder;
          row.seed = seed;
        }
        row.results.push_back(run.result);
      } else {
        row.failures.push_back(StrCat("seed ", seed, ": ", run.failed));
      }
    } catch (const Error& e) {
      row.failures.push_back(StrCat("seed ", seed, ": ", e.what()));
    }
  }
  if (row.results.empty()) row.failed = row.failures.front();
  return row;
}

void MeasureDecodingOf(const CompareArguments& a, CompareRow* row) {
  const auto model = std::dynamic_pointer_cast<LanguageModel>(LoadModel(row->folder));
  model->eval();
  const std::vector<int64_t> positions = {0, a.decode_tokens / 4, a.decode_tokens / 2,
                                          a.decode_tokens};
  // What is timed at a position stands before the next.
  const int64_t timed = std::min<int64_t>(64, a.decode_tokens / 4);
  row->decode = MeasureDecoding(*model, positions, timed, &Interrupted());
  if (row->decode.size() < positions.size() && !Interrupted())
    row->unmeasured.push_back(StrCat(
        "decoding was ",
        row->decode.empty() ? "not measured"
                            : StrCat("measured up to position ", row->decode.back().position),
        ": learned positions end at ", model->config().PositionLimit(Form::kCausal)));
  if (row->decode.empty()) return;
  constexpr int64_t kMany = 256, kSteps = 16;
  row->limits = MeasureDecodeLimits(*model);
  ModelState state = model->EmptyState(kMany);
  const auto stop = [] { return Interrupted().load(); };
  TimeDecodeSteps(*model, state, 2, stop);  // the first are slow
  if (const std::vector<double> times = TimeDecodeSteps(*model, state, kSteps, stop);
      !times.empty()) {
    row->many = kMany;
    row->many_milliseconds = bench::SpreadOf(times).median;
  }
}

void WriteSample(const CompareArguments& a, Comparison* c) {
  const CompareRow* best = c->Best();
  if (!best || best->decode.empty()) return;
  // Generated tasks have no tokenizer, and no text.
  if (!std::filesystem::exists(best->folder + "/tokenizer.json")) return;
  try {
    const LmFolder lm = OpenLmFolder(best->folder);
    Generator generator(lm.model, lm.tokenizer);
    GenerateOptions generate;
    // One token begins the text.
    generate.max_tokens =
        std::min<int64_t>(a.sample_tokens, lm.model->config().LengthLimit(Form::kCausal) - 1);
    generate.sampler.temperature = 0.8;
    generate.sampler.top_p = 0.95;
    generate.sampler.seed = a.common.seed;
    c->sample = generator.Run("", generate).text;
    c->sample_title = "Written by " + best->Name();
  } catch (const Error& e) {
    c->rows[size_t(best - c->rows.data())].unmeasured.push_back(
        StrCat("no text was written: ", e.what()));
  }
}

void PrintRow(const Comparison& c, const CompareRow& row) {
  if (row.failed.empty()) {
    std::printf("  %-16s %s %s, %s tokens/s%s, %s parameters\n", row.Name().c_str(),
                c.ValueText(row).c_str(), c.metric.label.c_str(),
                Thousands(std::llround(row.TokensPerSecond())).c_str(),
                BusyNote(row.CpuShare()).c_str(),
                Thousands(row.result["parameters"].get<int64_t>()).c_str());
  } else {
    std::printf("  %-16s failed: %s\n", row.Name().c_str(), row.failed.c_str());
  }
  std::fflush(stdout);
}

// Every length is one that the task has and the model takes, before any work.
void CheckLengths(const Experiment& experiment, const std::vector<int64_t>& lengths) {
  for (size_t i = 0; i < lengths.size(); ++i) {
    if (std::count(lengths.begin(), lengths.begin() + int64_t(i), lengths[i]) > 0)
      FailUsage("--lengths names ", lengths[i], " twice");
    Experiment each = experiment;
    const std::string task = each.task.kind;
    try {
      each.Describe().Set(StrCat("task.", task, ".length=", lengths[i]));
    } catch (const UsageError& e) {
      FailUsage("--lengths: the task ", task, ": ", e.what());
    }
  }
}

int RunCompare(CLI::App& command, CompareArguments a) {
  ApplyCommon(a.common.OrAuto());
  if (a.data.empty() && a.file.empty() && a.task.empty())
    FailUsage("give a text file or folder to learn from, or --task (cistern info --tasks)");
  if (a.resume && a.out.empty()) FailUsage("--resume needs --out, the folder to continue");
  const TaskInfo* claims = a.data.empty() ? nullptr : TaskClaiming(a.data);
  const std::string asked = !a.task.empty() ? a.task : NamedTask(a.file, a.set);
  const TaskInfo& named = !asked.empty() ? FindTask(asked) : claims ? *claims : FindTask("lm");
  std::vector<std::string> set = Assignments(command, a, named);
  Comparison c;
  ReadExperiment(c.experiment, a.file, set);
  a.common.seed = uint64_t(c.experiment.seed);
  const TaskInfo& task = c.experiment.task.info();
  if (!c.experiment.train.final_test)
    FailUsage("train.final_test=false: models are compared by their test; leave it out");
  c.experiment.train.Validate();
  c.experiment.pretrain.Validate(c.experiment.train);
  if (a.skip_bad_rows) set.push_back(c.experiment.task.SkipBadRows());
  if (a.mechanisms.empty()) a.mechanisms = task.mechanisms;
  if (std::find(a.mechanisms.begin(), a.mechanisms.end(), "all") != a.mechanisms.end()) {
    if (a.mechanisms.size() > 1)
      FailUsage("--mechanisms all stands alone: it names every mechanism");
    a.mechanisms = FittingMechanisms(c.experiment);
  }
  if (a.efficiency != 0 && a.efficiency < 128)
    FailUsage("--efficiency ", a.efficiency, ": lengths double from 64 to it; give 128 or more");
  c.lengths = a.lengths;
  if (a.lengths.empty()) a.lengths = {0};  // as the experiment says
  if (a.resume) {
    const std::vector<std::string> begun = BegunTaskOptions(a, task);
    set.insert(set.begin(), begun.begin(), begun.end());
    if (!begun.empty()) ReadExperiment(c.experiment, a.file, set);
  }
  CheckMechanisms(c.experiment, a.mechanisms);
  CheckLengths(c.experiment, c.lengths);
  c.seeds = a.seeds;
  const std::unique_ptr<Task> made = c.experiment.task.Make();
  c.metric = made->metric();
  std::string why;
  if (const std::string dtype = CommonDtype(a, c.experiment, *made, &why); !dtype.empty()) {
    set.push_back("dtype=" + dtype);
    c.experiment.dtype = dtype;
  }
  c.seconds = a.seconds;
  c.data = a.data.empty() ? task.name : a.data;
  std::error_code ignored;
  if (!a.resume && !a.out.empty() &&
      (HoldsRuns(a.out) || std::filesystem::exists(a.out + "/compare.json", ignored)))
    FailUsage(a.out, " already holds runs; --resume continues a comparison, or give another --out");
  // Data that cannot be read end the comparison, before any of its runs; what was made of them is
  // in the cache then.
  if (!a.resume) c.experiment.task.Make()->Prepare();
  if (Interrupted()) return 130;
  if (a.out.empty()) a.out = NewFolder();
  EnsureDirectory(a.out);
  const FileLock lock(a.out + "/lock", "the comparison in " + a.out);
  KeepSettings(a.out, c.experiment, a.common.device);
  for (const int64_t length : a.lengths) RequireSameData(a, c.experiment, length);
  if (!Quiet() && !a.common.json) {
    std::printf("%s: %s s for each of %zu mechanisms%s%s, results in %s\n", c.data.c_str(),
                Trimmed(a.seconds, 3).c_str(), a.mechanisms.size(),
                a.lengths.size() > 1 ? StrCat(" and ", a.lengths.size(), " lengths").c_str() : "",
                a.seeds > 1 ? StrCat(", ", a.seeds, " seeds").c_str() : "", a.out.c_str());
    if (!why.empty()) std::printf("%s\n", why.c_str());
    std::fflush(stdout);
  }
  const auto stopped = [&] {
    std::fprintf(stderr, "cistern: interrupted; to continue: %s --out %s --resume\n",
                 CommandLine(command, {"--out", "--resume"}).c_str(), ShellWord(a.out).c_str());
    return 130;
  };
  try {
    for (const std::string& mechanism : a.mechanisms) {
      for (const int64_t length : a.lengths) {
        CompareRow row = TrainRow(a, set, mechanism, length);
        const ModelInfo& kind = c.experiment.model.info();
        if (row.failed.empty() && kind.extends && !kind.encodes) {
          MeasureOrSay("decoding was", &row, [&] { MeasureDecodingOf(a, &row); });
        }
        if (Interrupted()) throw InterruptedRun();
        if (!Quiet() && !a.common.json) PrintRow(c, row);
        c.rows.push_back(std::move(row));
      }
    }
  } catch (const InterruptedRun&) {
    return stopped();
  }
  if (a.efficiency > 0) {
    c.efficiency =
        EfficiencyOf(c.experiment.model, a.mechanisms, a.efficiency, uint64_t(a.common.seed));
  }
  // The runs are all there, so the report is written, without what was cut short.
  const bool interrupted = Interrupted();
  if (interrupted) {
    c.efficiency.clear();
  } else {
    WriteSample(a, &c);
  }
  const std::string page = a.out + "/report.html";
  WriteReport(c, page);
  Json json = {{"out", a.out}, {"report", page}};
  json.update(CompareJson(c));
  if (interrupted) json["interrupted"] = true;
  WriteFileAtomically(a.out + "/compare.json", JsonFileText(json));
  const CompareRow* best = c.Best();
  if (a.common.json) {
    std::printf("%s\n", JsonLine(json).c_str());
    return interrupted ? stopped() : best ? 0 : 1;
  }
  std::printf("\n");
  PrintTable(CompareTable(c));
  std::printf("\n");
  for (const std::string& line : Fairness(c)) std::printf("%s\n", line.c_str());
  if (const Decision decision = Decide(c); !decision.recommended.empty()) {
    std::printf("\nrecommended: %s\n", decision.recommended.c_str());
    for (const std::string& reason : decision.reasons) std::printf("  %s\n", reason.c_str());
  }
  if (!c.sample.empty()) std::printf("\n%s:\n%s\n", c.sample_title.c_str(), c.sample.c_str());
  std::printf("\nreport: %s\n", page.c_str());
  CISTERN_CHECK(best, "every training run failed, the first because: ", c.rows[0].failed);
  const bool text =
      !best->decode.empty() && std::filesystem::exists(best->folder + "/tokenizer.json");
  std::printf(
      "models: cistern %s\n",
      !text ? ("eval " + ShellWord(best->folder)).c_str()
            : ("generate " + ShellWord(best->folder) + " --prompt \"In the beginning\"").c_str());
  return interrupted ? stopped() : 0;
}

}  // namespace

void AddCompare(CLI::App& app, Run& run) {
  auto a = std::make_shared<CompareArguments>();
  CLI::App* command = app.add_subcommand(
      "compare", "train one model per mechanism, equal in size and time, and report");
  command->footer(
      "Examples:\n"
      "  cistern compare my.txt --seconds 60\n"
      "  cistern compare my.txt --mechanisms latte,abc_mlp --set model.dim=256 --set "
      "task.length=1024\n"
      "  cistern compare --task listops --seconds 600\n"
      "  cistern compare my.txt --seconds 60 --seeds 3 --lengths 256,512,1024\n"
      "Every key of cistern train --list can be set, and holds for all mechanisms, but for "
      "model.attention, the length of the run and train.final_test=false.");
  command->add_option("data", a->data, "a text file or folder, or data of another task");
  command->add_option(
      "--task", a->task,
      "what to learn (cistern info --tasks); without it the data's name decides, and "
      "anything else is a text");
  AddSkipBadRows(*command, &a->skip_bad_rows);
  command->add_option("--experiment", a->file, "TOML file to start from");
  command
      ->add_option("--mechanisms", a->mechanisms,
                   "mechanisms to compare, or all: every one that fits; none: the task's choice")
      ->delimiter(',');
  command
      ->add_option("--seconds", a->seconds,
                   "training time of each, whatever an experiment file says")
      ->multi_option_policy(CLI::MultiOptionPolicy::TakeLast)
      ->check(CheckSeconds());
  command
      ->add_option("--seeds", a->seeds,
                   "runs of each, with the seeds --seed (without it the experiment's), that + 1, "
                   "...: the table then has means with 95 % intervals")
      ->check(CLI::Range(1, 1000));
  command
      ->add_option("--lengths", a->lengths,
                   "a sweep: each mechanism with rows of each of these lengths (task.length)")
      ->delimiter(',')
      ->check(CLI::Range(int64_t{1}, int64_t{1} << 30));
  command->add_option("--out", a->out, "folder for the models and report.html");
  command->add_flag("--resume", a->resume,
                    "continue in --out: keeps finished runs and resumes the interrupted one");
  command->add_option("--set", a->set, "KEY=VALUE for all of them; may be repeated")
      ->take_all()
      ->allow_extra_args(false);
  command
      ->add_option("--sample-tokens", a->sample_tokens,
                   "tokens of sample text generated at the end")
      ->check(CLI::Range(0, 1 << 20));
  command
      ->add_option("--decode-tokens", a->decode_tokens, "position of the last decoding measurement")
      ->check(CLI::Range(4, 1 << 24));
  command
      ->add_option("--efficiency", a->efficiency,
                   "also measure from which length on each takes less time and memory than exact "
                   "softmax, at lengths up to this (cistern bench efficiency); 0: do not")
      ->check(CLI::Range(int64_t{0}, int64_t{1} << 24));
  AddCommon(*command, a->common);
  AddDtype(*command, a->common, Dtypes::kTraining);
  AddDevice(*command, a->common);
  command->callback(
      [a, command, &run] { run = [a, command] { return RunCompare(*command, *a); }; });
}

}  // namespace cistern::cli
