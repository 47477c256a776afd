// cistern train: one model, from an experiment file and --set.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <filesystem>

#include "cistern/base/error.h"
#include "cistern/base/format.h"
#include "cistern/base/progress.h"
#include "cistern/base/subprocess.h"
#include "cistern/base/terminal.h"
#include "cistern/cli/analysis_rows.h"
#include "cistern/cli/command.h"
#include "cistern/cli/experiment.h"
#include "cistern/io/json_text.h"
#include "cistern/tasks/task.h"
#include "cistern/text/tokenizer.h"
#include "cistern/train/checkpoint.h"
#include "cistern/train/processes.h"
#include "cistern/train/shared_run.h"

namespace cistern::cli {
namespace {

struct TrainArguments {
  Common common;
  std::string file, out = "runs/train", text, data, task, from, pretrain;
  std::vector<std::string> set;
  bool print_config = false, resume = false, list = false;
  bool new_head = false, swap_attention = false, skip_bad_rows = false;
  bool part = false;  // of a comparison or reproduction, which says how to continue
  int64_t steps = 0;
  double seconds = 0;
};

void PrintMetrics(const char* title, const Json& metrics) {
  std::printf("%s:", title);
  for (const auto& [key, value] : metrics.items()) {
    if (value.is_structured()) continue;  // tables: cistern eval shows them
    const std::string text =
        value.is_number_float() ? Significant(value.get<double>(), 4) : value.dump();
    std::printf("  %s %s", key.c_str(), text.c_str());
  }
  std::printf("\n");
}

// model.attention=reuse:recommended, or reuse:recommended:SIMILARITY, as the settings it stands
// for.
void ExpandRecommended(const TrainArguments& a, std::vector<std::string>* set) {
  const std::string asked = "model.attention=reuse:recommended";
  for (size_t i = 0; i < set->size(); ++i) {
    const std::string given = (*set)[i];
    if (!given.starts_with(asked)) continue;
    const std::string rest = given.substr(asked.size());
    double threshold = -1;
    if (!rest.empty()) {
      char* end = nullptr;
      threshold = rest[0] == ':' ? std::strtod(rest.c_str() + 1, &end) : -1;
      if (rest.size() < 2 || !end || *end != '\0' || !(threshold >= 0 && threshold <= 1))
        FailUsage(given,
                  ": expected reuse:recommended, or reuse:recommended:S with the least "
                  "similarity S of a copied head, from 0 to 1");
    }
    if (a.from.empty())
      FailUsage(given, " needs --from FOLDER, the softmax model whose heads are compared");
    std::vector<std::string> settings = RecommendedReuse(a.from, threshold);
    std::string text;
    for (const std::string& s : settings) text += " " + s;
    Note(StrCat(a.from, " recommends", text));
    settings.push_back("swap_attention=true");
    set->erase(set->begin() + int64_t(i));
    set->insert(set->begin() + int64_t(i), settings.begin(), settings.end());
    return;
  }
}

// What the task of --data is: that of --task, else of --set or of the experiment, of the run in
// `folder` where it is resumed; empty: the look of the data decides.
std::string TaskOf(const TrainArguments& a, const std::string& folder) {
  if (!a.task.empty() || a.data.empty()) return a.task;
  const std::string begun = folder + "/experiment.json";
  return NamedTask(a.resume && std::filesystem::exists(begun) ? begun : a.file, a.set);
}

// The weights of `from` know the tokens of their folder: others cannot be asked for.
void CheckTokens(const std::string& from, const std::vector<std::string>& set) {
  const std::string path = FolderOfRecord(from) + "/tokenizer.json";
  if (!std::filesystem::exists(path)) return;
  const auto tokenizer = LoadTokenizer(path);
  for (const std::string& s : set) {
    const std::string key = AssignedKey(s), value = AssignedValue(s);
    if (!key.starts_with("task.")) continue;
    const bool other =
        (key.ends_with(".tokenizer") && value != NameOf(tokenizer->kind(), TokenizerKinds())) ||
        (key.ends_with(".vocab_size") && value != std::to_string(tokenizer->vocab_size()));
    if (other)
      FailUsage("--set ", s, ": the run takes the tokens that the weights of ", from,
                " know, those of its tokenizer.json; leave it out");
  }
}

void CheckFrom(const Experiment& experiment, const std::vector<std::string>& set) {
  if (!experiment.from.empty()) return CheckTokens(experiment.from, set);
  if (experiment.new_head || experiment.swap_attention)
    FailUsage("new_head and swap_attention need a folder to start from: --from FOLDER");
}

// Whether one of the assignments gives `key` a number that is not 0.
bool Sets(const std::vector<std::string>& assignments, const std::string& key) {
  return std::any_of(assignments.begin(), assignments.end(), [&](const std::string& s) {
    return AssignedKey(s) == key && AssignedValue(s) != "0";
  });
}

// As ReadExperiment; where the file may be data, its UsageErrors say how data are given.
void ReadNamedExperiment(Experiment& experiment, const std::string& file,
                         const std::vector<std::string>& set) {
  if (file.empty() || file.ends_with(".toml") || file.ends_with(".json"))
    return ReadExperiment(experiment, file, set);
  const char* data = "an experiment file is TOML; data are given by --data, a text also by --text";
  if (TaskClaiming(file)) FailUsage(file, " looks like data: ", data);
  try {
    ReadExperiment(experiment, file, set);
  } catch (const UsageError& e) {
    FailUsage(e.what(), "; ", data);
  }
}

// Whether anything says what to learn from.
bool SaysTask(const TrainArguments& a) {
  const auto of_task = [](const std::string& s) { return AssignedKey(s).starts_with("task."); };
  return !a.file.empty() || !a.text.empty() || !a.data.empty() || !a.task.empty() ||
         std::any_of(a.set.begin(), a.set.end(), of_task);
}

int RunTrain(CLI::App& command, const TrainArguments& a) {
  ApplyCommon(a.common.OrAuto());
  Experiment experiment;
  if (a.list) {
    if (a.common.json) FailUsage("--list prints text; leave out --json");
    std::printf("%s", experiment.Describe().Help().c_str());
    return 0;
  }
  const std::shared_ptr<Processes> processes = Processes::FromEnvironment();
  if (!processes->first()) SetQuiet(true);
  // By these they would not even wait for each other.
  const std::vector<std::string> flags = processes->Gather(
      StrCat(a.resume ? "--resume " : "", a.print_config ? "--print-config" : ""));
  for (const std::string& f : flags) {
    if (f != flags[0])
      FailUsage(
          "some of the processes have --resume or --print-config and others do not; give all ",
          "the same arguments");
  }
  const RunCopy run(*processes, a.out, a.resume);
  if (a.resume && !a.file.empty())
    FailUsage(
        "--resume continues the experiment in --out; omit the file (--set may still "
        "change train.steps)");
  if (!a.text.empty() && !(a.task.empty() && a.data.empty()))
    FailUsage("--text is --task lm --data; give one of the two");
  const std::string data = a.text.empty() ? a.data : a.text,
                    named = a.text.empty() ? TaskOf(a, run.path()) : "lm";
  std::vector<std::string> set = DataAssignments(named, data);
  if (!set.empty() && a.file.empty() && !a.resume) {  // the settings that suit the task
    const TaskInfo& task = named.empty() ? TaskOfData(data) : FindTask(named);
    std::vector<std::string> defaults = task.defaults;
    defaults.insert(defaults.begin(), "task.kind=" + task.name);
    // Their time is for those who name no steps.
    if (Sets(a.set, "train.steps")) defaults.push_back("train.seconds=0");
    ReadExperiment(experiment, "", defaults);
  }
  if (a.resume && (!a.from.empty() || a.new_head || a.swap_attention))
    FailUsage("--resume continues with the weights of the run in --out; omit --from, --new-head ",
              "and --swap-attention");
  if (!a.from.empty()) set.push_back("from=" + AsAssigned(a.from));
  if (a.new_head) set.push_back("new_head=true");
  if (a.swap_attention) set.push_back("swap_attention=true");
  if (!a.pretrain.empty()) set.push_back("pretrain.objective=" + a.pretrain);
  set.insert(set.end(), a.set.begin(), a.set.end());
  if (!a.resume) ExpandRecommended(a, &set);
  const bool steps = command.count("--steps") > 0, seconds = command.count("--seconds") > 0;
  if ((steps && seconds) || (seconds && Sets(a.set, "train.steps")) ||
      (steps && Sets(a.set, "train.seconds")))
    FailUsage("give a number of steps or seconds, not both");
  if (steps)
    set.push_back("train.steps=" + std::to_string(a.steps)), set.push_back("train.seconds=0");
  if (seconds) set.push_back(StrCat("train.seconds=", a.seconds)), set.push_back("train.steps=0");
  if (command.count("--seed") > 0) set.push_back("seed=" + std::to_string(a.common.seed));
  if (command.count("--dtype") > 0) set.push_back("dtype=" + a.common.dtype);
  if (a.resume) {
    std::error_code unknown;
    CISTERN_CHECK(std::filesystem::exists(run.path() + "/experiment.json", unknown) || unknown ||
                      NewestCheckpoint(run.path()),
                  "there is no run in ", a.out, " to resume; --out names its folder");
    ReadRunExperiment(experiment, run.path(), set);
  } else {
    ReadNamedExperiment(experiment, a.file, set);
    CheckFrom(experiment, a.set);
  }
  if (a.skip_bad_rows) experiment.task.SkipBadRows();
  if (a.print_config) {
    if (!processes->first()) return 0;
    std::printf("%s", ExperimentToml(experiment).c_str());
    return 0;
  }
  if (!a.resume && !SaysTask(a))
    FailUsage(
        "nothing to learn from: give a text (--text my.txt), data (--data rows.csv), a --task that "
        "generates its own (cistern info --tasks), or an experiment file");
  const Trained trained = TrainExperiment(experiment, run.path(), a.resume, processes);
  const TrainResult& r = trained.result;
  if (!processes->first()) return r.interrupted ? 130 : 0;
  if (r.interrupted) {
    const std::string threads =  // the last bits depend on them
        command.count("--threads") > 0 ? StrCat(" --threads ", a.common.threads) : "";
    std::fprintf(stderr, "cistern: interrupted after step %ld; saved in %s", long(r.steps),
                 a.out.c_str());
    if (!a.part)
      std::fprintf(stderr, "; to continue: cistern train --resume --out %s%s",
                   ShellWord(a.out).c_str(), threads.c_str());
    std::fprintf(stderr, "\n");
    return 130;
  }
  const std::string split = trained.task->SplitSummary();
  if (r.had_ended)
    Note(StrCat("this run had ended at step ", r.steps, "; ",
                r.out_of_patience ? "a higher train.patience continues it"
                                  : "--steps or --seconds above what it was given continue it"));
  if (a.common.json) {
    Json line = {{"out", a.out},
                 {"steps", r.steps},
                 {"seconds", r.seconds},
                 {"tokens_per_s", r.tokens_per_second},
                 {"parameters", r.parameters},
                 {"peak_bytes", r.peak_bytes},
                 {"cpu_share", r.cpu_share},
                 {"input_share", r.input_share},
                 {"processes", processes->count()},
                 {"valid", r.valid},
                 {"test", r.test}};
    if (!split.empty()) line["split"] = split;
    if (!trained.pretrained.is_null()) line["pretrained"] = trained.pretrained;
    std::printf("%s\n", JsonLine(line).c_str());
    return 0;
  }
  if (const Json& p = trained.pretrained; !p.is_null()) {
    std::printf("pretrained (%s): %ld steps in %.0f s, %.0f tokens/s\n",
                p["objective"].get<std::string>().c_str(), long(p["steps"].get<int64_t>()),
                p["seconds"].get<double>(), p["tokens_per_s"].get<double>());
    if (!p["valid"].is_null()) PrintMetrics("  inputs of the validation rows", p["valid"]);
  }
  const std::string shared =
      processes->alone() ? "" : StrCat(" by ", processes->count(), " processes");
  std::printf("%s, %ld parameters: %ld steps in %.0f s%s, %.0f tokens/s, input %.1f %% of it%s\n",
              trained.config.Summary().c_str(), long(r.parameters), long(r.steps), r.seconds,
              shared.c_str(), r.tokens_per_second, 100 * r.input_share,
              BusyNote(r.cpu_share).c_str());
  if (!r.valid.is_null()) PrintMetrics("valid", r.valid);
  if (!r.test.is_null()) PrintMetrics("test", r.test);
  if (!split.empty()) std::printf("valid and test: %s\n", split.c_str());
  if (const std::string line = experiment.published.Line(); !line.empty())
    std::printf("%s\n", line.c_str());
  std::printf("saved in %s\n", a.out.c_str());
  return 0;
}

}  // namespace

void AddTrain(CLI::App& app, Run& run) {
  auto a = std::make_shared<TrainArguments>();
  CLI::App* command = app.add_subcommand("train", "train one model");
  command->footer(
      "Examples:\n"
      "  cistern train --text my.txt --out runs/mine --seconds 120\n"
      "  cistern train --task listops --out runs/listops --steps 200\n"
      "  cistern train configs/listops-latte.toml --out runs/listops --set model.attention=abc_mlp "
      "--set train.lr=1e-3\n"
      "  cistern train --data reviews.tsv --from runs/mlm --out runs/reviews\n"
      "  cistern train --task listops --pretrain masked --out runs/listops --steps 200\n"
      "  cistern train --text my.txt --from runs/softmax --set model.attention=reuse:recommended "
      "--out runs/reuse\n"
      "  cistern train --resume --out runs/mine            continues after Ctrl-C\n"
      "  torchrun --nproc-per-node 2 --no-python cistern train --text my.txt --out runs/mine\n"
      "  cistern train --list                              every key, its type, default and "
      "meaning");
  command->add_option("experiment", a->file, "TOML file with [task], [model] and [train] tables");
  command->add_option("--task", a->task, "what to learn: cistern info --tasks lists the tasks");
  command->add_option("--data", a->data,
                      "the task's data; its name decides the task where neither --task nor the "
                      "experiment file does");
  command->add_option("--text", a->text,
                      "text file or folder to learn a language model from: --task lm --data");
  AddSkipBadRows(*command, &a->skip_bad_rows);
  command->add_option("--from", a->from,
                      "model folder to start from: its weights, tokenizer and settings");
  command->add_flag("--new-head", a->new_head,
                    "with --from: initialize what follows the layers from scratch");
  command->add_flag("--swap-attention", a->swap_attention,
                    "with --from: allow another attention; of its weights, take those that fit");
  command->add_option("--pretrain", a->pretrain,
                      "first train on the task's own inputs: masked or causal "
                      "(pretrain.objective; cistern train --list has the other keys)");
  command->add_option("--out", a->out, "run folder");
  command->add_option("--set", a->set, "KEY=VALUE, such as model.dim=256; may be repeated")
      ->take_all()
      ->allow_extra_args(false);
  command->add_option("--steps", a->steps, "updates (train.steps)")
      ->check(CLI::Range(int64_t{1}, int64_t{1} << 40));
  command->add_option("--seconds", a->seconds, "budget of training time (train.seconds)")
      ->check(CheckSeconds());
  command->add_flag("--print-config", a->print_config, "print the experiment as TOML and stop");
  command->add_flag("--list", a->list, "print every key and stop");
  command->add_flag("--resume", a->resume, "continue from the newest checkpoint in --out");
  command->add_flag("--part", a->part)->group("");  // not in the help: by cli/child_run.cc
  AddCommon(*command, a->common);
  AddDtype(*command, a->common, Dtypes::kTraining);
  AddDevice(*command, a->common);
  command->callback([a, command, &run] { run = [a, command] { return RunTrain(*command, *a); }; });
}

}  // namespace cistern::cli
