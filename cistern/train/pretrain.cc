#include "cistern/train/pretrain.h"

#include <ATen/ATen.h>

#include <filesystem>

#include "cistern/base/error.h"
#include "cistern/base/terminal.h"
#include "cistern/io/atomic_file.h"
#include "cistern/io/checked_json.h"
#include "cistern/io/file_lock.h"
#include "cistern/models/transfer.h"
#include "cistern/train/checkpoint.h"

namespace cistern {
namespace {

constexpr char kPretrainFolder[] = "/pretrain", kPretrainResult[] = "/result.json";

// The schedule is a cosine of its own; what else belongs to the labels is left out.
TrainOptions PretrainingRun(const TrainOptions& train, const PretrainOptions& options) {
  TrainOptions run;
  run.steps = options.steps;
  run.seconds = options.seconds;
  if (run.steps == 0 && run.seconds == 0) {
    run.steps = train.steps;
    run.seconds = train.seconds;
  }
  run.batch = train.batch;
  run.accumulate = train.accumulate;
  run.parallel = train.parallel;
  run.optimizer = train.optimizer;
  run.clip = train.clip;
  run.lr = options.lr > 0 ? options.lr : train.lr;
  run.eval_tokens = train.eval_tokens;
  run.checkpoint_seconds = train.checkpoint_seconds;
  run.log_every = train.log_every;
  run.final_test = false;
  return run;
}

// Refuses, before any training, weights that would not fit afterwards.
void CheckFits(const Model& pretrained, Model& model, const std::string& folder) {
  const std::string scratch = TemporaryName(folder);
  std::error_code ignored;
  EnsureDirectory(scratch);
  try {
    SaveModel(pretrained, scratch);
    TakeWeights(model, scratch, {.new_head = true});
  } catch (const Error&) {
    std::filesystem::remove_all(scratch, ignored);
    std::filesystem::remove(std::filesystem::path(folder).parent_path(), ignored);  // if empty
    throw;
  }
  std::filesystem::remove_all(scratch, ignored);
}

}  // namespace

Fields PretrainOptions::Describe() {
  Fields f;
  f.Add("objective", &objective,
        "train on the task's inputs first: none; masked, tokens hidden from the model; causal, the "
        "next token (mechanisms that have both forms)",
        SelfObjectives())
      .OmitWhen("none");
  f.Add("steps", &steps, "updates of it; with seconds = 0 as well: as long as the task's own",
        {0, int64_t{1} << 40})
      .OmitWhen(0);
  f.Add("seconds", &seconds, "budget of time of it", {0.0, 1e9}).OmitWhen(0.0);
  f.Add("lr", &lr, "peak of its cosine schedule; 0: train.lr", {0.0, 1e3}).OmitWhen(0.0);
  f.Add("mask_share", &mask_share, "of masked: tokens of a row that are chosen", {0.001, 1.0})
      .OmitWhen(0.15);
  return f;
}

void PretrainOptions::Validate(const TrainOptions& train) const {
  if (objective == SelfObjective::kNone) {
    if (steps > 0 || seconds > 0 || lr > 0 || mask_share != PretrainOptions().mask_share)
      FailUsage("pretrain.objective is none, so the other keys of [pretrain] have no effect; set ",
                "it to masked or causal, or leave them out");
    return;
  }
  if (steps > 0 && seconds > 0) FailUsage("give pretrain.steps or pretrain.seconds, not both");
  if (objective == SelfObjective::kCausal && mask_share != PretrainOptions().mask_share)
    FailUsage("pretrain.mask_share has no effect with pretrain.objective=causal; leave it out");
  if (lr == 0 && !PeaksAtLr(train.schedule))
    FailUsage("train.lr is the base of train.schedule=", NameOf(train.schedule, ScheduleKinds()),
              ", not a peak that pretraining could take; give pretrain.lr, such as 1e-3");
}

ModelConfig PretrainingConfig(const ModelConfig& config, SelfObjective objective) {
  const ModelConfig unset;
  ModelConfig c = config;
  c.kind = objective == SelfObjective::kMasked ? "masked_lm" : "decoder_lm";
  c.classes = unset.classes;
  c.pooling = unset.pooling;
  c.cls_place = unset.cls_place;
  c.padding = unset.padding;
  c.norm_pooled = unset.norm_pooled;
  c.head = unset.head;
  c.head_dims = unset.head_dims;
  c.head_dropout = unset.head_dropout;
  c.own = unset.own;
  c.init.head = unset.init.head;
  c.init.head_bias = unset.init.head_bias;
  c.init.cls = unset.init.cls;
  c.init.values_std = unset.init.values_std;
  c.init.values_bias_std = unset.init.values_bias_std;
  c.init.zero_pad_row = unset.init.zero_pad_row;
  return c;
}

Json Pretrained::Summary(SelfObjective objective) const {
  return {{"objective", NameOf(objective, SelfObjectives())},
          {"steps", run.steps},
          {"seconds", run.seconds},
          {"tokens_per_s", run.tokens_per_second},
          {"valid", run.valid}};
}

bool HoldsPretraining(const std::string& folder) { return HoldsRun(folder + kPretrainFolder); }

Pretrained Pretrain(const Task& task, Model& model, const TrainOptions& train,
                    const PretrainOptions& options, uint64_t seed, const std::string& dtype,
                    const std::string& folder, const Json& record,
                    std::shared_ptr<Processes> processes) {
  const std::string own = folder + kPretrainFolder, done = own + kPretrainResult;
  const SelfTask self(task, options.objective, options.mask_share, model.config().vocab_size);
  const ModelConfig config = PretrainingConfig(model.config(), options.objective);
  config.Validate();
  const TrainOptions run = PretrainingRun(train, options);
  run.Validate();
  Json own_record = record;
  own_record["model"] = ModelConfig(config).Describe().Write();
  own_record["train"] = TrainOptions(run).Describe().Write();
  Pretrained out;
  std::error_code ignored;
  if (std::filesystem::exists(done, ignored)) {
    const Json json = ReadCheckedJson(done);
    out.kept = true;
    if (const auto newest = NewestCheckpoint(own)) {
      const auto changes =
          CompareRuns(own_record, ReadRunState(*newest).experiment, RunDefaults(own_record), own);
      for (const std::string& change : changes)
        Note(StrCat(own, " had ended, and is kept as it was, without ", change));
    }
    try {
      out.run.steps = json.at("steps").get<int64_t>();
      out.run.seconds = json.at("seconds").get<double>();
      out.run.tokens_per_second = json.at("tokens_per_s").get<double>();
      out.run.valid = json.at("valid");
    } catch (const nlohmann::json::exception& e) {
      Fail(done, " is broken: ", e.what());
    }
  } else {
    CheckSuits(train, task, model);  // of what follows: not after all of the pretraining
    CheckMemory(config, run.batch, task.tokens_per_row(), dtype == "float64" ? 8 : 4, run, 0,
                *processes);
    std::shared_ptr<Model> pretrained = MakeModel(config, seed);
    if (dtype == "float64") pretrained->to(at::kDouble);
    CheckFits(*pretrained, model, own);
    EnsureDirectory(own);
    const FileLock lock(folder + "/lock", "the run folder " + folder);
    WriteCheckedJson(folder + "/experiment.json", record);  // for --resume
    Trainer trainer(pretrained, self, run, seed, own, own_record, dtype == "bfloat16",
                    std::move(processes));
    if (HoldsRun(own)) trainer.Resume();
    out.run = trainer.Run();
    if (out.run.interrupted) return out;
    WriteCheckedJson(done, out.Summary(options.objective));
  }
  const TransferReport report = TakeWeights(model, own, {.new_head = true});
  if (model.config().init.zero_pad_row) {
    const at::NoGradGuard guard;
    for (const auto& p : model.named_parameters()) {
      if (p.key().ends_with("embed_tokens.weight")) p.value().select(0, 0).zero_();
    }
  }
  Note(StrCat("pretrained: ", report.Summary()));
  return out;
}

}  // namespace cistern
