#include "cistern/train/trainer.h"

#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <csignal>
#include <ctime>
#include <filesystem>

#include "cistern/base/cpu_share.h"
#include "cistern/base/error.h"
#include "cistern/base/format.h"
#include "cistern/base/hash.h"
#include "cistern/base/interrupt.h"
#include "cistern/base/memory.h"
#include "cistern/base/progress.h"
#include "cistern/base/random.h"
#include "cistern/base/terminal.h"
#include "cistern/io/atomic_file.h"
#include "cistern/io/checked_json.h"
#include "cistern/io/metrics_csv.h"
#include "cistern/io/tfevents.h"
#include "cistern/tasks/evaluate.h"
#include "cistern/tensors/device.h"
#include "cistern/train/checkpoint.h"
#include "cistern/train/shared_run.h"

namespace cistern {
namespace {

double Now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

double ThreadSeconds() {
  timespec t{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
  return double(t.tv_sec) + 1e-9 * double(t.tv_nsec);
}

double Median(std::vector<double> x) {
  if (x.empty()) return 0;
  std::nth_element(x.begin(), x.begin() + int64_t(x.size() / 2), x.end());
  return x[x.size() / 2];
}

// What is left after a run failed. An empty folder: the first process tells.
std::string WhatIsKept(const std::string& folder) {
  if (folder.empty()) return "";
  const auto newest = NewestCheckpoint(folder);
  if (!newest) return ". No checkpoint had been written yet";
  const std::string problem = CheckpointProblem(*newest);
  return problem.empty() ? ". The last good checkpoint is kept: " + *newest
                         : ". The last checkpoint is not good: " + problem;
}

// The same after numbers went wrong, and what helps.
std::string Advice(const std::string& folder) {
  return WhatIsKept(folder) +
         ". A lower train.lr, a longer train.warmup or train.clip usually helps";
}

void RequireFinite(const Model& model, const Optimizer& optimizer, const WeightAverage& average,
                   int64_t step, const std::string& folder) {
  std::string broken = optimizer.FirstNonFinite(false);
  if (broken.empty()) broken = optimizer.FirstNonFiniteMoment();
  if (broken.empty()) broken = average.FirstNonFinite();
  for (const auto& b : model.named_buffers()) {
    if (broken.empty() && b.value().is_floating_point() &&
        !at::isfinite(b.value()).all().item<bool>())
      broken = b.key();
  }
  if (!broken.empty())
    Fail("the update at step ", step, " left parameters that are not finite, the first of them ",
         broken, Advice(folder));
}

void ScaleGradients(const Model& model, double factor) {
  const at::NoGradGuard guard;
  std::vector<at::Tensor> gradients;
  for (const at::Tensor& p : model.parameters()) {
    if (p.grad().defined()) gradients.push_back(p.grad());
  }
  if (!gradients.empty()) at::_foreach_mul_(gradients, factor);
}

// Set when the process goes on after SIGSTOP or Ctrl-Z.
std::atomic<bool> continued{false};

// Seconds until the first checkpoint by the clock: a short run that fails should lose little.
constexpr double kFirstCheckpoint = 30;

// Of a pause, in seconds: SIGCONT comes without one, too, as by timeout(1).
constexpr double kLeastPause = 0.5;

}  // namespace

void CheckSuits(const TrainOptions& options, const Task& task, const Model& model) {
  if (options.eval_drop_last && task.train_rows() == 0)
    FailUsage("train.eval_drop_last needs a task whose data are rows, such as listops or classify");
  for (const Split split : {Split::kValid, Split::kTest}) {
    if (!options.eval_drop_last || (split == Split::kTest && !options.final_test)) continue;
    if (task.Read(split, {})->total() < options.batch)
      FailUsage("train.eval_drop_last leaves nothing of the ", SplitName(split),
                " split: it has fewer rows than a batch of ", options.batch,
                "; lower train.batch or leave it out");
  }
  if (options.order != BatchOrder::kEndless && task.train_rows() < options.batch) {
    const std::string key = "train.order=" + NameOf(options.order, BatchOrders());
    if (task.train_rows() == 0)
      FailUsage(key, " needs a task whose training data are rows, such as listops or classify; ",
                "this one has no epochs: train.order=endless");
    FailUsage(key, ": a batch of ", options.batch, " is more than the ", task.train_rows(),
              " rows of an epoch; lower train.batch");
  }
  if (options.label_smoothing > 0) {
    const std::string why = task.WhyNoSmoothing(model);
    if (!why.empty()) FailUsage("train.label_smoothing ", why, "; leave it out");
  }
}

Trainer::Trainer(std::shared_ptr<Model> model, const Task& task, const TrainOptions& options,
                 uint64_t seed, const std::string& folder, const Json& experiment, bool bfloat16,
                 std::shared_ptr<Processes> processes)
    : model_(std::move(model)),
      task_(task),
      options_(options),
      seed_(seed),
      folder_(folder),
      experiment_(experiment),
      bfloat16_(bfloat16),
      processes_(std::move(processes)),
      optimizer_(MakeOptimizer(*model_, options.optimizer)),
      average_(*model_, options.ema),
      recent_(folder, options.average_last) {
  options_.Validate();
  CheckSuits(options_, task_, *model_);
  const int64_t rows = task_.rows_of_batch(options_.batch), count = processes_->count();
  CheckProcesses(count, *model_, rows);
  parts_ = RowParts(options_.parallel, *model_, rows / count);
  experiment_["environment"]["threads_take"] = parts_ > 1 ? "rows" : "operations";
  experiment_["environment"]["processes"] = count;
  if (options_.steps == 0 && options_.seconds == 0) options_.steps = 1000;
  state_.total_steps = options_.steps;
  state_.seed = int64_t(seed_);
  state_.experiment = experiment_;
  EnsureDirectory(folder_);
  lock_ = std::make_unique<FileLock>(folder_ + "/lock", "the run folder " + folder_);
  RemoveLeftovers(folder_);
}

double Trainer::Spent() const {
  if (options_.seconds > 0) return std::min(1.0, state_.trained_seconds / options_.seconds);
  return double(state_.step) / double(state_.total_steps);
}

int64_t Trainer::Expected() const {
  if (options_.seconds == 0) return state_.total_steps;
  return state_.trained_seconds > 0 ? int64_t(double(state_.step) / Spent()) : 0;
}

double Trainer::Rate() const {
  if (options_.seconds > 0) {
    TimedScheduleOptions s{options_.schedule, options_.lr, options_.min_lr, options_.warmup};
    s.first = options_.schedule_from;
    s.warmup_init = options_.warmup_init;
    s.power = options_.schedule_power;
    s.width = Width();
    return LearningRate(s, state_.step, Spent());
  }
  ScheduleOptions s;
  s.kind = options_.schedule;
  s.lr = options_.lr;
  s.min_lr = options_.min_lr;
  s.steps = options_.schedule_steps > 0 ? options_.schedule_steps : state_.total_steps;
  // Counted from 1, the only update of the shortest warm-up has the whole rate.
  s.warmup =
      options_.warmup >= 1 || options_.warmup == 0
          ? int64_t(options_.warmup)
          : std::max<int64_t>(options_.schedule_from, int64_t(options_.warmup * double(s.steps)));
  s.first = options_.schedule_from;
  s.every = options_.schedule_every;
  s.warmup_init = options_.warmup_init;
  s.power = options_.schedule_power;
  s.period = double(options_.schedule_period);
  s.growth = options_.schedule_growth;
  s.shrink = options_.schedule_shrink;
  s.width = Width();
  return LearningRate(s, state_.step);
}

double Trainer::Width() const {
  const ModelConfig& config = model_->config();
  return double(config.Stack(config.info().forms[0]).dim());
}

Batch Trainer::TrainBatch(int64_t index) const {
  if (options_.order == BatchOrder::kEndless) return task_.TrainBatch(seed_, index, options_.batch);
  constexpr uint64_t kEpochs = 0xe90c;
  const int64_t whole = task_.train_rows() / options_.batch,
                rest =
                    options_.order == BatchOrder::kReplay ? task_.train_rows() % options_.batch : 0,
                batches = whole + (rest > 0 ? 1 : 0), epoch = index / batches;
  uint64_t seed = seed_;
  if (options_.order == BatchOrder::kDropLast && epoch > 0) {
    const auto words = Philox(seed_, kEpochs, uint64_t(epoch));
    seed = uint64_t(words[0]) << 32 | words[1];
  }
  const Batch batch = task_.TrainBatch(seed, index % batches, options_.batch);
  return index % batches < whole ? batch : batch.Rows(0, rest).WithoutPadding();
}

Trainer::StepOutcome Trainer::Step() {
  model_->train();
  // What is drawn is a function of (seed, step): a resumed run draws the same.
  constexpr uint64_t kDraws = 0xd40;
  const auto words = Philox(seed_, kDraws, uint64_t(state_.step));
  at::manual_seed(words[0]);
  StepOutcome out = {0, 0, Rate(), 0, 0};
  // A loss is the mean over the terms of its batch (Task::Terms): weighted by their numbers, those
  // of the accumulated batches are that of one batch with all their rows. Those that are clipped
  // one by one count alike, as in optax's MultiSteps.
  const bool alike = options_.accumulate == 1 || options_.clip_each;
  double weights = 0;
  for (int64_t micro = 0; micro < options_.accumulate; ++micro) {
    const MadeBatch made = *batches_->Next();
    const Batch batch = made.batch.To(model_->options().device());
    out.input_seconds += made.seconds;
    const double weight = alike ? 1.0 / double(options_.accumulate) : task_.Terms(made.batch);
    const double value = AddGradients(
        *model_, LossOf(task_, *model_, options_.label_smoothing), batch, weight, bfloat16_, parts_,
        (uint64_t{words[1]} << 32 | words[2]) + uint64_t(micro), *processes_);
    if (!std::isfinite(value)) FailNonFinite("loss", value);
    out.loss += value * weight;
    weights += weight;
    out.tokens += batch.tokens;
    if (!options_.clip_each) continue;
    const double norm = optimizer_->SetAside(options_.clip / double(options_.accumulate));
    if (!std::isfinite(norm)) FailNonFinite("gradient norm", norm);
  }
  if (!alike && weights > 0) {  // 0: batches that ask nothing
    out.loss /= weights;
    ScaleGradients(*model_, 1 / weights);
  }
  {
    const BFloat16Scope scope(bfloat16_, model_->options().device());
    out.grad_norm = optimizer_->Step(out.lr, options_.clip_each ? 0 : options_.clip);
  }
  if (!std::isfinite(out.grad_norm)) FailNonFinite("gradient norm", out.grad_norm);
  average_.Update();
  ++state_.step;
  return out;
}

void Trainer::FailNonFinite(const char* what, double value) {
  const std::string parameter = optimizer_->FirstNonFinite(false),
                    gradient = optimizer_->FirstNonFinite(true);
  std::string place =
      !parameter.empty() ? StrCat("the first parameter that is not finite is ", parameter)
      : !gradient.empty()
          ? StrCat("all parameters are finite; the first gradient that is not is that of ",
                   gradient)
          : "all parameters and gradients so far are finite: it arose in this step's forward pass";
  Fail("the ", what, " is ", value, " at step ", state_.step + 1, "; ", place, Advice(RunFolder()));
}

Json Trainer::Measure(Split split, int64_t max_tokens) {
  EvalOptions options;
  options.read.max_tokens = max_tokens;
  options.interrupted = &Interrupted();
  options.whole_batches = options_.eval_drop_last;
  if (options_.eval_drop_last) options.read.rows = options_.batch;
  options.share = processes_->rank(), options.of = processes_->count();
  Evaluation done = cistern::Evaluate(task_, *model_, split, options);
  if (processes_->Any(!done.complete)) return Json();
  if (!processes_->alone()) {
    Score all;
    for (const std::string& score : processes_->Gather(done.score.Write().dump()))
      all.Merge(Score::Read(Json::parse(score)));
    done.score = std::move(all);
  }
  return task_.Metrics(done.score);
}

void Trainer::Evaluate() {
  // Processors of another kind may have rounded otherwise.
  processes_->TakeFirst(model_->parameters());
  RequireFinite(*model_, *optimizer_, average_, state_.step, RunFolder());
  const WeightAverage::Use average(average_);
  Json metrics;
  try {
    metrics = Measure(Split::kValid, options_.eval_tokens);
  } catch (const Error& e) {
    Fail("evaluation at step ", state_.step, ": ", e.what(), WhatIsKept(RunFolder()));
  }
  if (metrics.is_null()) return;  // a partial evaluation decides nothing; it is due when resumed
  state_.evaluation_due = false;
  state_.measured_step = state_.step;
  recent_.Save(*model_, state_.step);
  const double value = metrics.at(task_.metric().name).get<double>();
  Json line = {{"event", "valid"}, {"step", state_.step}, {"seconds", state_.trained_seconds}};
  line.update(metrics);
  if (observer_) line.update(observer_(*model_));
  log_(line);
  const bool lower = task_.metric().lower_is_better, finite = std::isfinite(value),
             better = finite &&
                      (!state_.has_best || (lower ? value < state_.best : value > state_.best));
  state_.evals_without_better = better ? 0 : state_.evals_without_better + 1;
  // Of equals the later one: it has been trained for longer.
  if (better || value == state_.best) TakeBest(metrics);
  if (!finite)
    Note(StrCat("at step ", state_.step, " the metric of the validation split, ",
                task_.metric().name, ", is ", value, ": that is no better one"));
}

void Trainer::TakeBest(const Json& metrics) {
  state_.has_best = true;
  state_.best = metrics.at(task_.metric().name).get<double>();
  state_.best_metrics = metrics;
  SaveBest();
}

void Trainer::SaveBest() {
  lock_->Check();
  SaveModel(*model_, folder_);
  state_.best_file = HexText(HashFile(folder_ + "/model.safetensors"));
  best_is_newer_ = false;
}

void Trainer::SaveCheckpoint() {
  lock_->Check();
  RequireFinite(*model_, *optimizer_, average_, state_.step, RunFolder());
  state_.peak_bytes = std::max(state_.peak_bytes, PeakBytes());
  if (processes_->first()) {
    lines_->Sync();
    state_.log_bytes = lines_->Bytes();
    state_.log_xxh64 = HexText(HashFile(folder_ + "/metrics.jsonl"));
    WriteCheckpoint(folder_, *model_, *optimizer_, state_, &average_);
  }
  last_save_ = Now();
  ++saves_;
}

bool Trainer::OutOfPatience() const {
  return options_.patience > 0 && state_.evals_without_better >= options_.patience;
}

void Trainer::LogStep(const StepOutcome* last) {
  const double rate = double(state_.window_tokens) / state_.window_seconds;
  if (state_.step - first_step_ > 3 || rates_.empty()) rates_.push_back(rate);
  Json line = {{"event", "step"},
               {"step", state_.step},
               {"loss", state_.window_loss / double(state_.window_steps)}};
  if (last) {
    line["lr"] = last->lr;
    line["grad_norm"] = last->grad_norm;
  }
  line["tokens_per_s"] = rate;
  if (last) line["input_share"] = window_input_ / window_seconds_;
  line["seconds"] = state_.trained_seconds;
  log_(line);
  window_input_ = window_seconds_ = 0;
  state_.window_seconds = state_.window_loss = 0;
  state_.window_tokens = state_.window_steps = 0;
}

void Trainer::TakeRates() {
  ForEachLogLine(folder_, [&](const Json& line) {
    if (line.value("event", Json()) != "step") return;
    const Json rate = line.value("tokens_per_s", Json());
    if (rate.is_number()) rates_.push_back(rate.get<double>());
  });
}

std::string Trainer::RunFolder() const { return processes_->first() ? folder_ : ""; }

void Trainer::Agree() {
  interrupted_ = Interrupted();
  if (processes_->alone()) return;
  const at::Tensor numbers = at::tensor(
      {interrupted_ ? 1.0 : 0.0, processes_->first() ? state_.trained_seconds : 0.0}, at::kDouble);
  processes_->Sum({numbers});
  interrupted_ = numbers[0].item<double>() > 0;
  state_.trained_seconds = numbers[1].item<double>();
}

TrainResult Trainer::Run() {
  CISTERN_CHECK(observer_ || !options_.log_memory, "[train] log_memory without an observer");
  if (!resumed_) Begin();
  WriteCheckedJson(folder_ + "/experiment.json", experiment_);  // first: it says whose folder it is
  if (const std::string problem = resumed_ ? LogProblem(folder_) : ""; !problem.empty())
    Note(problem);
  lines_ = std::make_unique<JsonlWriter>(folder_ + "/metrics.jsonl");
  bool averaged_is_there = false;  // in TensorBoard's files: of a run that had ended
  const int64_t resumed_at = state_.step;
  if (resumed_) {
    ForEachLogLine(folder_, [&](const Json& line) {
      averaged_is_there = averaged_is_there || (line.value("event", Json()) == "averaged" &&
                                                line.value("step", Json()) == state_.step);
    });
    lines_->Cut(state_.log_bytes);
    TakeRates();
  }
  TfEventsWriter events(folder_);
  if (resumed_) events.AddStart(state_.step + 1);
  log_ = [&](const Json& line) {
    lines_->Write(line);
    const std::string event = line.at("event");
    const std::string group = event == "valid" || event == "averaged" ? event + "/" : "train/";
    if (!line.contains("step") ||
        (event == "averaged" && averaged_is_there && line["step"] == resumed_at))
      return;
    for (const auto& [key, value] : line.items()) {
      if (value.is_number() && key != "step")
        events.AddScalar(group + key, value.get<double>(), line["step"].get<int64_t>());
    }
  };
  task_.SaveAssets(folder_);
  if (!processes_->alone()) {
    // Whose files lie elsewhere may have dropped the best model of a resumed run.
    if (processes_->Any(!state_.has_best)) state_.has_best = false;
    RequireSameRun(*processes_, experiment_, TrainBatch(state_.step * options_.accumulate));
    processes_->TakeFirst(model_->parameters());
  }
  batches_ = std::make_unique<Prefetcher<MadeBatch>>(
      [this, index = state_.step * options_.accumulate]() mutable {
        const double begin = ThreadSeconds();
        Batch batch = TrainBatch(index++);
        return std::optional(MadeBatch{std::move(batch), ThreadSeconds() - begin});
      },
      4);
  ResetPeakMemory();
  const CpuShare share;
  ProgressBar bar({Expected(), "train", "steps", state_.step, 0});
  first_step_ = state_.step;
  last_save_ = Now();
  Agree();
  if (!interrupted_) MeasureBest();
  // A run of so many steps ends with a logged line and an evaluation.
  if (resumed_ && Spent() >= 1 && state_.window_steps > 0) LogStep(nullptr);
  if (resumed_ && Spent() >= 1 && (!state_.has_best || state_.measured_step < state_.step))
    state_.evaluation_due = true;
  // A run that has begun can be resumed: the first checkpoint comes before the first step, and so
  // does that of a resumed run with its new settings.
  bool save = !resumed_ || state_.evaluation_due || settings_changed_;
  std::signal(SIGCONT, [](int) { continued = true; });
  double seconds = 0;  // of the last step, and of one in which there was a pause
  for (;;) {
    if (state_.evaluation_due && !interrupted_) {
      bar.Clear();
      Evaluate();
    }
    interrupted_ = interrupted_ || state_.evaluation_due;  // its rows were not all measured
    const bool ends = OutOfPatience() && state_.step > first_step_;
    if (save || interrupted_ || ends) SaveCheckpoint();
    if (interrupted_) break;
    if (OutOfPatience()) {
      log_({{"event", "stopped"},
            {"step", state_.step},
            {"why", "no better metric in " + std::to_string(options_.patience) + " evaluations"}});
      break;
    }
    if (Spent() >= 1) break;
    const double spent = Spent();
    continued = false;
    const double begin = Now();
    const StepOutcome out = Step();
    const double taken = Now() - begin, paused = taken - seconds;
    const bool pause =
        continued && step_seconds_ > 0 && paused > std::max(kLeastPause, 2 * seconds);
    if (!pause) seconds = taken;
    state_.trained_seconds += seconds;
    if (pause) {
      log_({{"event", "paused"}, {"step", state_.step}, {"paused_seconds", paused}});
      Note(StrCat("paused for ", Fixed(paused, 1), " s at step ", state_.step,
                  ", which are not counted"));
    }
    Agree();
    input_seconds_ += out.input_seconds, window_input_ += out.input_seconds;
    step_seconds_ += seconds, window_seconds_ += seconds;
    bar.SetTotal(Expected());
    const bool last = Spent() >= 1;
    state_.window_seconds += seconds;
    state_.window_tokens += out.tokens;
    state_.window_loss += out.loss;
    if (++state_.window_steps >= options_.log_every || last) LogStep(&out);
    bar.Update(state_.step, "loss " + Significant(out.loss, 4) +
                                (state_.has_best ? "  best " + task_.metric().name + " " +
                                                       Significant(state_.best, 4)
                                                 : ""));
    const auto tenth = [](double share) { return int64_t(10 * share); };
    if (options_.eval_every > 0) {
      state_.evaluation_due = state_.step % options_.eval_every == 0;
    } else {
      state_.evaluation_due = tenth(Spent()) > tenth(spent);
    }
    state_.evaluation_due = state_.evaluation_due || last;
    save = last || (options_.checkpoint_every > 0 ? state_.step % options_.checkpoint_every == 0
                                                  : state_.evaluation_due);
    const double longest = saves_ <= 1 ? std::min(kFirstCheckpoint, options_.checkpoint_seconds)
                                       : options_.checkpoint_seconds;
    save = save || (longest > 0 && Now() - last_save_ >= longest);
  }
  bar.Finish();
  TrainResult result;
  result.steps = state_.step;
  result.had_ended = resumed_ && state_.step == first_step_;
  result.out_of_patience = OutOfPatience();
  result.parameters = model_->ParameterCount();
  result.seconds = state_.trained_seconds;
  if (rates_.empty() && state_.window_steps > 0 && state_.window_seconds > 0)
    rates_.push_back(double(state_.window_tokens) /
                     state_.window_seconds);  // before the first line
  result.tokens_per_second = Median(rates_);
  result.peak_bytes = std::max(state_.peak_bytes, PeakBytes());
  result.cpu_share = share.Value();
  result.input_share = step_seconds_ > 0 ? input_seconds_ / step_seconds_ : 0;
  if (!interrupted_) AverageLast();
  if (!interrupted_ && processes_->Any(best_is_newer_)) {
    Note(StrCat(folder_,
                "/model.safetensors was saved after the checkpoint, and did not come again"));
    state_.best_file.clear();
    MeasureBest();
  }
  result.valid = state_.best_metrics;
  result.interrupted = interrupted_;
  std::optional<WeightAverage::Use> average;
  if (!state_.has_best) {
    average.emplace(average_);
    SaveBest();
  }
  if (!result.interrupted) FinalTest(&result);
  lock_->Check();
  WriteMetricsCsv(folder_);
  processes_->Any(false);  // none ends before all are done: torchrun would end those that are not
  return result;
}

void Trainer::AverageLast() {
  if (options_.average_last == 0) return;
  const int64_t count = recent_.Average(*model_);
  if (count == 0) return;
  if (count < options_.average_last)
    Note(StrCat("train.average_last=", options_.average_last, ": the run has ", count,
                " evaluations only; the model is the mean of those"));
  const Json metrics = Measure(Split::kValid, options_.eval_tokens);
  if (metrics.is_null()) {  // --resume averages again
    interrupted_ = true;
    return;
  }
  Json line = {{"event", "averaged"}, {"step", state_.step}, {"evaluations", count}};
  line.update(metrics);
  log_(line);
  TakeBest(metrics);
}

void Trainer::FinalTest(TrainResult* result) {
  const std::string best = folder_ + "/model.safetensors";
  if (state_.has_best) {
    CISTERN_CHECK(HexText(HashFile(best)) == state_.best_file, best,
                  " is not the best model that this run saved: another program has changed it");
    LoadWeights(*model_, best);
  }
  if (!options_.final_test) return;
  const Json metrics = Measure(Split::kTest, 0);
  if (metrics.is_null()) {  // a part of the test split is no result; --resume tests again
    result->interrupted = true;
    return;
  }
  result->test = metrics;
  Json line = {{"event", "test"}};
  line.update(metrics);
  log_(line);
  lines_->Sync();
}

}  // namespace cistern
