#include "cistern/train/trainer.h"

#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <iterator>
#include <limits>
#include <numeric>

#include "cistern/base/error.h"
#include "cistern/base/progress.h"
#include "cistern/base/random.h"
#include "cistern/io/atomic_file.h"
#include "cistern/io/jsonl.h"
#include "cistern/io/tfevents.h"
#include "cistern/train/checkpoint.h"

namespace cistern {
namespace {

double Now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// Linear maps in bfloat16 while it lives; sums, norms and the cores stay in float32.
class BFloat16Scope {
 public:
  explicit BFloat16Scope(bool on) : on_(on) {
    if (!on_) return;
    at::autocast::set_autocast_enabled(at::kCPU, true);
    at::autocast::set_autocast_dtype(at::kCPU, at::kBFloat16);
    at::autocast::increment_nesting();
  }
  ~BFloat16Scope() {
    if (!on_) return;
    if (at::autocast::decrement_nesting() == 0) at::autocast::clear_cache();
    at::autocast::set_autocast_enabled(at::kCPU, false);
  }

 private:
  bool on_;
};

// Shares of a budget of time after which the number of steps is estimated.
constexpr double kEstimates[] = {0.03, 0.1, 0.3, 0.6, 0.9};

double Median(std::vector<double> x) {
  if (x.empty()) return 0;
  std::nth_element(x.begin(), x.begin() + int64_t(x.size() / 2), x.end());
  return x[x.size() / 2];
}

// What is left after numbers went wrong, and what helps.
std::string Advice(const std::string& folder) {
  const auto kept = NewestCheckpoint(folder);
  return StrCat(
      kept ? "The last good checkpoint is kept: " + *kept : "No checkpoint had been written yet",
      ". A lower train.lr, a longer train.warmup or train.clip usually helps");
}

void RequireFinite(const AdamW& optimizer, int64_t step, const std::string& folder) {
  const std::string broken = optimizer.FirstNonFinite(false);
  if (!broken.empty())
    Fail("the update at step ", step, " left parameters that are not finite, the first of them ",
         broken, ". ", Advice(folder));
}

std::string Short(double x) {
  char text[32];
  std::snprintf(text, sizeof text, "%.4g", NanUnsigned(x));
  return text;
}

}  // namespace

Fields TrainOptions::Describe() {
  Fields f;
  f.Add("steps", &steps, "updates; with seconds = 0 as well: 1000", {0, int64_t{1} << 40});
  f.Add("seconds", &seconds, "budget of training time, turned into steps after a short calibration",
        {0.0, 1e9});
  f.Add("batch", &batch, "rows of a step", {1, 1 << 20});
  f.Add("accumulate", &accumulate, "steps whose gradients are added up before an update",
        {1, 1 << 20});
  f.Add("lr", &lr, "peak learning rate", {0.0, 1e3});
  f.Add("min_lr", &min_lr, "where cosine and linear schedules end", {0.0, 1e3});
  f.Add("schedule", &schedule, "learning-rate schedule after the warm-up", ScheduleKinds());
  f.Add("warmup", &warmup, "linear warm-up: steps, or a share of the run below 1", {0.0, 1e12});
  f.Add("beta1", &adamw.beta1, "AdamW", {0.0, 0.99999});
  f.Add("beta2", &adamw.beta2, "AdamW", {0.0, 0.9999999});
  f.Add("eps", &adamw.eps, "AdamW", {0.0, 1.0});
  f.Add("weight_decay", &adamw.weight_decay, "decoupled, on matrices only", {0.0, 100.0});
  f.Add("clip", &clip, "largest global gradient norm; 0: no clipping", {0.0, 1e9});
  f.Add("label_smoothing", &label_smoothing, "share of the target spread over all classes",
        {0.0, 0.999});
  f.Add("eval_every", &eval_every, "steps between evaluations; 0: ten in a run",
        {0, int64_t{1} << 40});
  f.Add("eval_tokens", &eval_tokens, "tokens of the validation split at each of them; 0: all",
        {0, int64_t{1} << 40});
  f.Add("checkpoint_every", &checkpoint_every, "steps between checkpoints; 0: at each evaluation",
        {0, int64_t{1} << 40});
  f.Add("log_every", &log_every, "steps between logged lines", {1, int64_t{1} << 40});
  f.Add("patience", &patience,
        "evaluations without a better metric before stopping; 0: never stop early", {0, 1 << 30});
  f.Add("final_test", &final_test, "evaluate the best model on the test split at the end");
  return f;
}

Trainer::Trainer(std::shared_ptr<Model> model, const Task& task, const TrainOptions& options,
                 uint64_t seed, const std::string& folder, const Json& experiment, bool bfloat16)
    : model_(std::move(model)),
      task_(task),
      options_(options),
      seed_(seed),
      folder_(folder),
      experiment_(experiment),
      bfloat16_(bfloat16),
      optimizer_(*model_, options.adamw) {
  if (options_.steps == 0 && options_.seconds == 0) options_.steps = 1000;
  if (options_.steps > 0 && options_.seconds > 0)
    FailUsage("give train.steps or train.seconds, not both");
  total_steps_ = options_.steps;
  EnsureDirectory(folder_);
}

void Trainer::Resume() {
  const auto newest = NewestCheckpoint(folder_);
  CISTERN_CHECK(newest, folder_, ": no complete checkpoint to resume from");
  const Json t = ReadCheckpoint(*newest, *model_, optimizer_);
  try {
    step_ = t.at("step").get<int64_t>();
    total_steps_ = t.at("total_steps").get<int64_t>();
    if (options_.steps > total_steps_) total_steps_ = options_.steps;  // a longer run was asked for
    trained_seconds_ = t.at("trained_seconds").get<double>();
    has_best_ = t.at("has_best").get<bool>();
    best_ = t.at("best").get<double>();
    best_metrics_ = t.at("best_metrics");
    evals_without_better_ = t.at("evals_without_better").get<int64_t>();
  } catch (const nlohmann::json::exception& e) {
    Fail(*newest, "/trainer.json is broken: ", e.what());
  }
}

ScheduleOptions Trainer::Schedule() const {
  ScheduleOptions s;
  s.kind = options_.schedule;
  s.lr = options_.lr;
  s.min_lr = options_.min_lr;
  s.steps = total_steps_ > 0 ? total_steps_ : std::numeric_limits<int64_t>::max();
  s.warmup = options_.warmup >= 1
                 ? int64_t(options_.warmup)
                 : std::max<int64_t>(1, int64_t(options_.warmup * double(total_steps_)));
  if (total_steps_ == 0)
    s.warmup = options_.warmup >= 1 ? int64_t(options_.warmup)
                                    : 1000;  // calibrating: the foot of a long warm-up
  return s;
}

Trainer::StepOutcome Trainer::Step() {
  model_->train();
  at::manual_seed(Philox(
      seed_, 0xd40,
      uint64_t(step_))[0]);  // dropout is a function of (seed, step): a resumed run draws the same
  StepOutcome out = {0, 0, LearningRate(Schedule(), step_), 0};
  for (int64_t micro = 0; micro < options_.accumulate; ++micro) {
    const Batch batch = *batches_->Next();
    at::Tensor loss;
    {
      BFloat16Scope scope(bfloat16_);
      loss = task_.Loss(*model_, batch, options_.label_smoothing);
    }
    const double value = loss.item<double>();
    if (!std::isfinite(value)) FailNonFinite("loss", value);
    (options_.accumulate > 1 ? loss / double(options_.accumulate) : loss).backward();
    out.loss += value / double(options_.accumulate);
    out.tokens += batch.tokens;
  }
  out.grad_norm = optimizer_.Step(out.lr, options_.clip);
  if (!std::isfinite(out.grad_norm)) FailNonFinite("gradient norm", out.grad_norm);
  ++step_;
  return out;
}

void Trainer::FailNonFinite(const char* what, double value) {
  const std::string parameter = optimizer_.FirstNonFinite(false),
                    gradient = optimizer_.FirstNonFinite(true);
  std::string place =
      !parameter.empty() ? StrCat("the first parameter that is not finite is ", parameter)
      : !gradient.empty()
          ? StrCat("all parameters are finite; the first gradient that is not is that of ",
                   gradient)
          : "all parameters and gradients so far are finite: it arose in this step's forward pass";
  Fail("the ", what, " is ", value, " at step ", step_ + 1, "; ", place, ". ", Advice(folder_));
}

void Trainer::Estimate(double step_seconds) {
  const double left = std::max(0.0, options_.seconds - trained_seconds_);
  total_steps_ = std::max<int64_t>(step_ + 1, step_ + int64_t(left / step_seconds));
  log_({{"event", "calibrated"},
        {"step_seconds", step_seconds},
        {"seconds", options_.seconds},
        {"total_steps", total_steps_}});
}

void Trainer::Evaluate() {
  EvalOptions eval;
  eval.max_tokens = options_.eval_tokens;
  eval.interrupted = &Interrupted();
  RequireFinite(optimizer_, step_, folder_);
  Json metrics;
  try {
    metrics = task_.Evaluate(*model_, Split::kValid, eval);
  } catch (const Error& e) {
    Fail("evaluation at step ", step_, ": ", e.what(), ". ", Advice(folder_));
  }
  if (Interrupted()) return;  // a partial evaluation decides nothing
  const double value = metrics.at(task_.metric()).get<double>();
  Json line = {{"event", "valid"}, {"step", step_}};
  line.update(metrics);
  log_(line);
  const bool better = !has_best_ || (task_.lower_is_better() ? value < best_ : value > best_);
  evals_without_better_ = better ? 0 : evals_without_better_ + 1;
  if (better && std::isfinite(value)) {
    has_best_ = true;
    best_ = value;
    best_metrics_ = metrics;
    SaveModel(*model_, folder_);
  }
}

void Trainer::SaveCheckpoint() {
  RequireFinite(optimizer_, step_, folder_);
  WriteCheckpoint(folder_, step_, *model_, optimizer_,
                  {{"step", step_},
                   {"total_steps", total_steps_},
                   {"trained_seconds", trained_seconds_},
                   {"has_best", has_best_},
                   {"best", best_},
                   {"best_metrics", best_metrics_},
                   {"evals_without_better", evals_without_better_},
                   {"seed", seed_}});
}

TrainResult Trainer::Run() {
  JsonlWriter jsonl(folder_ + "/metrics.jsonl");
  TfEventsWriter events(folder_);
  log_ = [&](const Json& line) {
    jsonl.Write(line);
    const std::string group = line.at("event") == "valid" ? "valid/" : "train/";
    if (!line.contains("step")) return;
    for (const auto& [key, value] : line.items()) {
      if (value.is_number() && key != "step")
        events.AddScalar(group + key, value.get<double>(), line["step"].get<int64_t>());
    }
  };
  WriteFileAtomically(folder_ + "/experiment.json", experiment_.dump(2) + "\n");
  task_.SaveAssets(folder_);
  batches_ = std::make_unique<Prefetcher<Batch>>(
      [this, index = step_ * options_.accumulate]() mutable {
        return std::optional(task_.TrainBatch(seed_, index++, options_.batch));
      },
      4);
  ResetPeakMemory();
  ProgressBar bar({total_steps_, "train", "steps", step_, 0});
  std::vector<double> rates, calibration;
  double window_seconds = 0, window_loss = 0;
  int64_t window_tokens = 0, window_steps = 0;
  const int64_t first_step = step_;
  while (total_steps_ == 0 || step_ < total_steps_) {
    const double begin = Now();
    const StepOutcome out = Step();
    const double seconds = Now() - begin;
    trained_seconds_ += seconds;
    if (total_steps_ == 0) {
      // The first steps warm caches and threads up: they count as time, not as a measure.
      if (step_ > 3) calibration.push_back(seconds);
      if (calibration.size() >= 8 &&
          (trained_seconds_ > kEstimates[0] * options_.seconds || calibration.size() >= 200)) {
        Estimate(std::accumulate(calibration.begin(), calibration.end(), 0.0) /
                 double(calibration.size()));
      }
      if (trained_seconds_ >= options_.seconds && total_steps_ == 0) total_steps_ = step_;
    } else if (options_.seconds > 0 && step_ < total_steps_ &&
               std::any_of(std::begin(kEstimates), std::end(kEstimates), [&](double share) {
                 return trained_seconds_ >= share * options_.seconds &&
                        trained_seconds_ - seconds < share * options_.seconds;
               })) {
      Estimate(trained_seconds_ / double(step_));
    }
    bar.SetTotal(total_steps_);
    window_seconds += seconds;
    window_tokens += out.tokens;
    window_loss += out.loss;
    if (++window_steps == options_.log_every || step_ == total_steps_) {
      const double rate = double(window_tokens) / window_seconds;
      if (step_ - first_step > 3 || rates.empty()) rates.push_back(rate);
      log_({{"event", "step"},
            {"step", step_},
            {"loss", window_loss / double(window_steps)},
            {"lr", out.lr},
            {"grad_norm", out.grad_norm},
            {"tokens_per_s", rate},
            {"seconds", trained_seconds_}});
      window_seconds = window_loss = 0;
      window_tokens = window_steps = 0;
    }
    bar.Update(step_, "loss " + Short(out.loss) +
                          (has_best_ ? "  best " + task_.metric() + " " + Short(best_) : ""));
    const int64_t every =
        options_.eval_every > 0 ? options_.eval_every : std::max<int64_t>(1, total_steps_ / 10);
    const bool last = total_steps_ > 0 && step_ >= total_steps_;
    const bool evaluate = total_steps_ > 0 && (step_ % every == 0 || last);
    if (evaluate && !Interrupted()) Evaluate();
    const bool checkpoint =
        options_.checkpoint_every > 0 ? step_ % options_.checkpoint_every == 0 : evaluate;
    if (checkpoint || last || Interrupted()) SaveCheckpoint();
    if (Interrupted()) break;
    if (options_.patience > 0 && evals_without_better_ >= options_.patience) {
      log_({{"event", "stopped"},
            {"step", step_},
            {"why", "no better metric in " + std::to_string(options_.patience) + " evaluations"}});
      break;
    }
  }
  bar.Finish();
  TrainResult result;
  result.steps = step_;
  result.parameters = model_->ParameterCount();
  result.seconds = trained_seconds_;
  if (rates.empty() && window_steps > 0)
    rates.push_back(double(window_tokens) / window_seconds);  // interrupted before the first line
  result.tokens_per_second = Median(rates);
  result.peak_bytes = PeakBytes();
  result.valid = best_metrics_;
  result.interrupted = Interrupted();
  if (!result.interrupted && has_best_) LoadWeights(*model_, folder_ + "/model.safetensors");
  if (!result.interrupted && options_.final_test) {
    EvalOptions eval;
    eval.interrupted = &Interrupted();
    result.test = task_.Evaluate(*model_, Split::kTest, eval);
    Json line = {{"event", "test"}};
    line.update(result.test);
    log_(line);
  }
  if (!has_best_) SaveModel(*model_, folder_);
  return result;
}

}  // namespace cistern
