// cistern bench model: training steps and decoding of a whole model, on made-up tokens.
#include <ATen/Parallel.h>

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <map>

#include "cistern/base/format.h"
#include "cistern/base/interrupt.h"
#include "cistern/base/parallel.h"
#include "cistern/bench/model.h"
#include "cistern/bench/profile.h"
#include "cistern/cli/bench_command.h"
#include "cistern/cli/experiment.h"

namespace cistern::cli {
namespace {

struct ModelArguments {
  BenchOptions options;
  std::string what, dtype = "float32";
  std::vector<std::string> set;
  bench::ModelSettings settings;
  int64_t threads = 0, lines = 15;
  bool profile = false;
};

constexpr int64_t kVocab = 2048, kClasses = 10;  // where no data says how many there are
constexpr size_t kProfiled = 5;                  // steps, of which the median is shown

// UsageError where a step on made-up data, or a token, is the same whatever KEY of --set says.
void RequireEffects(const std::vector<std::string>& set) {
  Fields of_update;
  OptimizerOptions().AddTo(of_update);
  std::vector<std::string> effective = {"task.kind", "from", "train.clip", "train.parallel"};
  for (const std::string& name : of_update.Names()) effective.push_back("train." + name);
  const std::map<std::string, std::string> instead = {
      {"batch", "--batch"},     {"length", "--length"}, {"target_length", "--target-length"},
      {"seconds", "--seconds"}, {"steps", "--runs"},    {"vocab_size", "--set model.vocab_size"},
      {"seed", "--seed"},       {"dtype", "--dtype"}};
  for (const std::string& assignment : set) {
    const std::string key = AssignedKey(assignment);
    if (key.starts_with("model.") ||
        std::find(effective.begin(), effective.end(), key) != effective.end())
      continue;
    const auto other = instead.find(key.substr(key.rfind('.') + 1));
    FailUsage("--set ", key, " has no effect on what is measured here, on made-up data; ",
              other == instead.end() ? "leave it out" : "give " + other->second);
  }
}

// Of a model folder, or of an experiment with random weights.
std::shared_ptr<Model> TheModel(const ModelArguments& a, bench::ModelSettings* settings) {
  std::error_code ignored;
  std::shared_ptr<Model> model;
  if (std::filesystem::is_directory(a.what, ignored)) {
    if (!a.set.empty()) FailUsage("--set is for experiments; ", a.what, " is a model folder");
    model = LoadModel(a.what);
    if (settings->train) bench::CheckStepMemory(model->config(), *settings);
  } else {
    Experiment experiment;
    ReadExperiment(experiment, a.what, a.set);
    RequireEffects(a.set);
    ModelConfig config = experiment.model;
    if (config.vocab_size == 0) config.vocab_size = kVocab;
    if (config.classes == 0 && config.info().classifies) config.classes = kClasses;
    config.Validate();
    settings->optimizer = experiment.train.optimizer, settings->clip = experiment.train.clip;
    settings->parallel = experiment.train.parallel;
    settings->optimizer.Validate();
    if (settings->train) bench::CheckStepMemory(config, *settings);
    model = MakeModel(config, a.options.seed);
  }
  if (a.dtype == "float64") model->to(at::kDouble);
  return model;
}

Json ProfileJson(const bench::Profile& profile) {
  Json operations = Json::array();
  for (const bench::OperationTime& o : profile.operations)
    operations.push_back({{"name", o.name}, {"calls", o.calls}, {"ms", o.milliseconds}});
  return {
      {"ms", profile.milliseconds}, {"outside_ms", profile.Outside()}, {"operations", operations}};
}

void PrintProfile(const bench::Profile& profile, int64_t lines) {
  HtmlTable table;
  table.header = {"operation", "calls", "ms", "share"};
  const auto add = [&](const std::string& name, int64_t calls, double ms) {
    table.rows.push_back({name, calls > 0 ? Thousands(calls) : "-", bench::TimeText(ms),
                          Fixed(100 * ms / profile.milliseconds, 1) + " %"});
  };
  double rest = 0;
  int64_t rest_calls = 0, shown = 0;
  for (const bench::OperationTime& o : profile.operations) {
    if (++shown <= lines) {
      add(o.name, o.calls, o.milliseconds);
    } else {
      rest += o.milliseconds, rest_calls += o.calls;
    }
  }
  if (rest_calls > 0)
    add(StrCat(int64_t(profile.operations.size()) - lines, " others"), rest_calls, rest);
  add("outside operations", 0, profile.Outside());
  std::printf(
      "\nthe median of %zu training steps, by operation, each without those that it calls (all "
      "threads share each operation):\n",
      kProfiled);
  bench::PrintTable(table);
}

int RunBenchModel(const ModelArguments& a) {
  ApplyBenchOptions(a.options);
  if (a.threads > 0) {
    at::set_num_threads(int(a.threads));
    SetNumThreads(int(a.threads));
  }
  bench::ModelSettings settings = a.settings;
  settings.dtype =
      ValueOf(a.dtype,
              EnumNames<std::string>{
                  {"float32", "float32"}, {"float64", "float64"}, {"bfloat16", "bfloat16"}},
              "dtype");
  std::erase(settings.sequences, 0);
  settings.timer = a.options.Timer();
  settings.seed = a.options.seed;
  settings.stop = [] { return Interrupted().load(); };
  if (a.profile && !settings.train) FailUsage("--profile is of the training step; omit --no-train");
  const std::shared_ptr<Model> model = TheModel(a, &settings);
  bench::Record record;
  record.kind = "model";
  record.machine = bench::ThisMachine(CISTERN_VERSION);
  record.settings = {
      {"seconds", a.options.seconds}, {"runs", a.options.runs}, {"seed", a.options.seed}};
  ModelConfig config = model->config();
  record.settings["model"] = config.Describe().Write();
  {
    const bench::LoadWatch watch;
    record.rows = bench::MeasureModel(model, settings, &record.peaks);
    watch.Leave(&record);
  }
  record.interrupted = Interrupted();
  bench::Profile profile;
  if (a.profile && !record.interrupted) {
    settings.parallel = ThreadsTake::kOperations;  // whose times do not overlap
    bench::TrainingStep step(model, settings);
    for (int i = 0; i < 3; ++i) step.Run();  // until memory is at hand for such steps
    std::vector<bench::Profile> profiles(kProfiled);
    for (bench::Profile& one : profiles) one = bench::ProfileWork([&] { step.Run(); });
    std::nth_element(profiles.begin(), profiles.begin() + kProfiled / 2, profiles.end(),
                     [](const auto& a, const auto& b) { return a.milliseconds < b.milliseconds; });
    profile = profiles[kProfiled / 2];
    record.settings["profile"] = ProfileJson(profile);
  }
  return FinishBench(record, bench::ModelColumns(), a.options, [&] {
    if (a.profile && !record.interrupted) PrintProfile(profile, a.lines);
  });
}

}  // namespace

void AddBenchModel(CLI::App& bench, Run& run) {
  auto a = std::make_shared<ModelArguments>();
  CLI::App* command = bench.add_subcommand("model",
                                           "a whole model on made-up tokens or values: training "
                                           "steps and "
                                           "tokens/s, decoding and its state against "
                                           "the context, memory");
  command->footer(
      "A training step is loss, gradients, clipping and update. Decoding is one token of one "
      "sequence and its logits.\nWhat data would decide is 2,048 tokens, 10 classes; --set "
      "model.vocab_size=... says otherwise. A model of real values says so itself: --set "
      "task.kind=classify --set model.encoder_classifier.input=values --set "
      "model.encoder_classifier.channels=3.\n"
      "Examples:\n"
      "  cistern bench model --set model.attention=latte --length 1024\n"
      "  cistern bench model configs/listops-latte.toml --batch 32 --length 2000 --profile\n"
      "  cistern bench model configs/P001/vit/base.toml --batch 1 --length 576\n"
      "  cistern bench model runs/mine --no-train --positions 0,1000,10000,100000");
  command->add_option("what", a->what,
                      "model folder, or experiment file (.toml); none: the default experiment");
  command->add_option("--set", a->set, "KEY=VALUE of the experiment; may be repeated")
      ->take_all()
      ->allow_extra_args(false);
  command->add_option("--batch", a->settings.batch, "rows of a training step")
      ->check(CLI::Range(1, 1 << 20))
      ->capture_default_str();
  command->add_option("--length", a->settings.length, "tokens of a row")
      ->check(CLI::Range(2, 1 << 24))
      ->capture_default_str();
  command
      ->add_option("--target-length", a->settings.target_length,
                   "of an encoder_decoder: tokens of a target, whose source has --length; 0: as "
                   "many")
      ->check(CLI::Range(0, 1 << 24))
      ->capture_default_str();
  command
      ->add_option("--positions", a->settings.positions,
                   "tokens before, where decoding is measured; ascending")
      ->delimiter(',')
      ->allow_extra_args(false)
      ->check(CLI::Range(int64_t{0}, int64_t{1} << 30))
      ->capture_default_str();
  command->add_option("--decoded", a->settings.decoded, "tokens timed at each position")
      ->check(CLI::Range(1, 1 << 20))
      ->capture_default_str();
  command
      ->add_option("--sequences", a->settings.sequences,
                   "batches of sequences that decode from the start, beside one sequence; 0: none")
      ->delimiter(',')
      ->allow_extra_args(false)
      ->check(CLI::Range(0, 1 << 16))
      ->capture_default_str();
  command->add_flag("!--no-train", a->settings.train, "omit the training step");
  command->add_flag("!--no-decode", a->settings.decode, "omit decoding");
  command->add_flag(
      "--profile", a->profile,
      "name every operation of a training step, with its share: of the median of five");
  command
      ->add_option("--profile-lines", a->lines, "operations that --profile prints; the rest in one")
      ->check(CLI::Range(1, 10000))
      ->capture_default_str();
  command->add_option(
      "--dtype", a->dtype,
      "float32, float64, or bfloat16 (linear maps in bfloat16, the rest in float32)");
  command->add_option("--threads", a->threads, "threads to use; 0: all cores")
      ->check(CLI::Range(0, 1024));
  AddBenchOptions(*command, a->options);
  command->callback([a, &run] { run = [a] { return RunBenchModel(*a); }; });
}

}  // namespace cistern::cli
