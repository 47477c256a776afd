// The [train] table: its keys, and what single fields cannot say.
#include "cistern/base/error.h"
#include "cistern/train/trainer.h"

namespace cistern {

const EnumNames<BatchOrder>& BatchOrders() {
  static const EnumNames<BatchOrder> names = {{BatchOrder::kEndless, "endless"},
                                              {BatchOrder::kDropLast, "drop_last"},
                                              {BatchOrder::kReplay, "replay_all"},
                                              {BatchOrder::kReplayDropLast, "replay"}};
  return names;
}

Fields TrainOptions::Describe() {
  Fields f;
  f.Add("steps", &steps, "updates; with seconds = 0 as well: 1000", {0, int64_t{1} << 40});
  f.Add("seconds", &seconds, "budget of training time, evaluation not counted", {0.0, 1e9});
  f.Add("batch", &batch, "rows of a step", {1, 1 << 20});
  f.Add("accumulate", &accumulate, "batches of an update, as one: the mean over all their targets",
        {1, 1 << 20});
  f.Add("order", &order,
        "of a task's rows: endless (a batch may span two epochs), drop_last (an epoch's last, "
        "smaller batch is left out), replay (all epochs have the batches of the first, without the "
        "smaller one: P000's matching), replay_all (with it: P000's text and ListOps)",
        BatchOrders());
  f.Add("parallel", &parallel,
        "how threads share a step: each takes some rows of the batch, or all share each operation; "
        "auto: rows where they divide, no random numbers are drawn and each thread's own gradients "
        "are small",
        ThreadsTakeNames());
  f.Add("lr", &lr, "peak learning rate; of rsqrt, rsqrt_flat and t2t the base", {0.0, 1e3});
  f.Add("min_lr", &min_lr,
        "where cosine, linear and polynomial schedules end, and the first period of restarts",
        {0.0, 1e3});
  f.Add("schedule", &schedule, "learning-rate schedule after the warm-up", ScheduleKinds());
  f.Add("warmup", &warmup, "linear warm-up: steps, or a share of the run below 1", {0.0, 1e12});
  f.Add("warmup_init", &warmup_init, "rate that the warm-up begins at", {0.0, 1e3});
  f.Add("schedule_from", &schedule_from,
        "number of the first update: 1, or 0, at which a warm-up has the rate 0 (torch's LambdaLR, "
        "optax, fairseq)",
        {0, 1});
  f.Add("schedule_steps", &schedule_steps,
        "update at which cosine, linear and polynomial end, of which `warmup` is a share; 0: the "
        "last of the run. steps * accumulate is optax's schedule within MultiSteps",
        {0, int64_t{1} << 40});
  f.Add("schedule_every", &schedule_every,
        "updates for which the rate is held: those of an epoch, where it is stepped per epoch; 0: "
        "none",
        {0, int64_t{1} << 40});
  f.Add("schedule_power", &schedule_power, "of polynomial", {0.01, 100.0});
  f.Add("schedule_period", &schedule_period, "cosine_restarts: updates of the first period",
        {0, int64_t{1} << 40});
  f.Add("schedule_growth", &schedule_growth, "cosine_restarts: each period to the one before",
        {1.0, 100.0});
  f.Add("schedule_shrink", &schedule_shrink, "cosine_restarts: its rates to those before",
        {0.0, 1.0});
  optimizer.AddTo(f);
  f.Add("clip", &clip, "largest global gradient norm; 0: no clipping", {0.0, 1e9});
  f.Add("clip_each", &clip_each,
        "clip the gradients of each of the accumulated batches, not their mean (optax's "
        "chain(clip_by_global_norm, MultiSteps(...)))");
  f.Add("ema", &ema,
        "decay of a moving average of the weights, which is evaluated and saved; 0: none",
        {0.0, 0.9999999});
  f.Add("label_smoothing", &label_smoothing, "share of the target spread over all classes",
        {0.0, 0.999});
  f.Add("eval_every", &eval_every, "steps between evaluations; 0: ten in a run",
        {0, int64_t{1} << 40});
  f.Add("eval_tokens", &eval_tokens,
        "tokens of the validation split at each of them, in rows spread evenly over it (of a text, "
        "the "
        "first rows of each of its blocks); 0: all rows",
        {0, int64_t{1} << 40});
  f.Add("eval_drop_last", &eval_drop_last,
        "evaluate batches of `batch` rows and leave out a split's last, smaller one, as P000 does "
        "for matching and CIFAR: the metrics are of fewer rows");
  f.Add("checkpoint_every", &checkpoint_every, "steps between checkpoints; 0: at each evaluation",
        {0, int64_t{1} << 40});
  f.Add("checkpoint_seconds", &checkpoint_seconds,
        "seconds between checkpoints at most (the first one after 30); 0: by steps alone",
        {0.0, 1e9});
  f.Add("log_every", &log_every, "steps between logged lines", {1, int64_t{1} << 40});
  f.Add("log_memory", &log_memory,
        "at each evaluation, log whether the slots of the memory differ, on a few rows of the "
        "validation split (docs/analyses.md); of models with slots");
  f.OmitWhen(false);
  f.Add("patience", &patience,
        "evaluations without a better metric before stopping; 0: never stop early", {0, 1 << 30});
  f.Add("average_last", &average_last,
        "the final model is the mean of the weights at the last so many evaluations (fairseq's "
        "averaging of checkpoints), not the best one; 0: the best one",
        {0, 1000});
  f.Add("final_test", &final_test, "evaluate the best model on the test split at the end");
  return f;
}

void TrainOptions::Validate() const {
  if (steps > 0 && seconds > 0) FailUsage("give train.steps or train.seconds, not both");
  if (seconds > 0 && seconds < 0.001)
    FailUsage("train.seconds=", seconds, " is no time to train; give 0.001 or more");
  ValidateSchedule();
  optimizer.Validate();
  if (average_last > 0 && ema > 0)
    FailUsage("train.average_last and train.ema both average weights; give one of them");
  if (clip_each && accumulate == 1)
    FailUsage("train.clip_each has no effect with train.accumulate=1; leave it out");
  if (clip_each && clip == 0)
    FailUsage("train.clip_each has no effect with train.clip=0; leave it out");
}

void TrainOptions::ValidateSchedule() const {
  const std::string& name = NameOf(schedule, ScheduleKinds());
  const auto refuse = [&](const char* key, bool given, bool fits, const char* needs) {
    if (given && !fits)
      FailUsage("train.", key, " has no effect with train.schedule=", name, "; it needs ", needs);
  };
  const bool restarts = schedule == ScheduleKind::kCosineRestarts;
  refuse("warmup_init", warmup_init != 0, PeaksAtLr(schedule),
         "a schedule whose warm-up ends at lr, not a base rate");
  refuse("min_lr", min_lr != 0, HasEnd(schedule) || restarts,
         "cosine, linear, polynomial or cosine_restarts");
  refuse("schedule_power", schedule_power != 1, schedule == ScheduleKind::kPolynomial,
         "polynomial");
  refuse("schedule_steps", schedule_steps != 0, HasEnd(schedule), "cosine, linear or polynomial");
  refuse("schedule_period", schedule_period != 0, restarts, "cosine_restarts");
  refuse("schedule_growth", schedule_growth != 1, restarts, "cosine_restarts");
  refuse("schedule_shrink", schedule_shrink != 1, restarts, "cosine_restarts");
  if (warmup_init != 0 && warmup == 0)
    FailUsage("train.warmup_init has no effect with train.warmup=0; leave it out");
  if (warmup_init > lr)
    FailUsage("train.warmup_init=", warmup_init, " is above train.lr=", lr,
              ", to which the warm-up rises");
  if (min_lr > lr)
    FailUsage("train.min_lr=", min_lr, " is above train.lr=", lr, ", from which ", name,
              " goes down to it");
  if (restarts && schedule_period == 0)
    FailUsage("train.schedule=cosine_restarts needs train.schedule_period, the updates of its ",
              "first period");
  if (seconds > 0 && (restarts || schedule_steps > 0 || schedule_every > 0))
    FailUsage(
        "train.",
        restarts             ? "schedule=cosine_restarts"
        : schedule_steps > 0 ? "schedule_steps"
                             : "schedule_every",
        " counts updates, and a run of train.seconds has no number of them; give train.steps");
}

int64_t TrainOptions::NumbersPerParameter() const {
  const bool two = optimizer.kind == OptimizerKind::kAdamW ||
                   optimizer.kind == OptimizerKind::kAdam || optimizer.kind == OptimizerKind::kMuon,
             none = optimizer.kind == OptimizerKind::kSgd && optimizer.momentum == 0;
  return 2 + (two ? 2 : none ? 0 : 1) + (ema > 0 ? 1 : 0) + (clip_each ? 1 : 0);
}

}  // namespace cistern
