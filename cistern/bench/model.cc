#include "cistern/bench/model.h"

#include <ATen/ATen.h>
#include <malloc.h>

#include <algorithm>
#include <array>
#include <chrono>

#include "cistern/base/error.h"
#include "cistern/base/hash.h"
#include "cistern/base/memory.h"
#include "cistern/base/parallel.h"
#include "cistern/base/random.h"
#include "cistern/decode/eval_scope.h"
#include "cistern/decode/measure.h"
#include "cistern/io/json_text.h"
#include "cistern/kernels/isa.h"
#include "cistern/models/encoder_classifier.h"
#include "cistern/models/forecaster.h"
#include "cistern/models/model_state_file.h"
#include "cistern/ops/impl.h"
#include "cistern/tensors/device.h"
#include "cistern/train/trainer.h"

namespace cistern::bench {
namespace {

constexpr double kRate = 1e-5;  // of the updates: the work is the same at any

at::Tensor Ids(int64_t vocab, at::IntArrayRef sizes, const Model& model) {
  return at::randint(vocab, sizes, at::kLong).to(model.options().device());
}

// Real numbers of each token of such a model; 0: it reads ids.
int64_t Channels(const ModelConfig& config) {
  if (config.kind == "forecaster") return OwnOptions<Forecaster>(config).inputs;
  if (config.kind != "encoder_classifier") return 0;
  const auto own = OwnOptions<EncoderClassifier>(config);
  return own.input == EncoderClassifier::Input::kValues ? own.channels : 0;
}

at::Tensor Targets(const Model& model, int64_t batch, int64_t length) {
  const ModelConfig& config = model.config();
  if (config.kind == "forecaster")
    return at::randn({batch, length, OwnOptions<Forecaster>(config).outputs})
        .to(model.options().device());
  return model.info().classifies ? Ids(config.classes, {batch}, model)
                                 : Ids(config.TargetVocabSize(), {batch, length}, model);
}

// Of the stack that reads so many tokens.
void RequireLength(const ModelConfig& config, Form form, int64_t length, const char* what) {
  const int64_t limit = config.PositionLimit(form);
  if (length > limit)
    FailUsage(what, " ", length, " is more than the ", limit,
              " tokens up to which the model's positions are learned (max_length=", limit, ")");
}

bool HasTwoTexts(const ModelInfo& info) {
  return std::find(info.inputs.begin(), info.inputs.end(), "second_ids") != info.inputs.end();
}

// What this kind of model trains on.
Batch MadeUp(const Model& model, const ModelSettings& s) {
  const ModelConfig& config = model.config();
  const ModelInfo& info = model.info();
  if (s.target_length > 0 && !info.encodes)
    FailUsage("--target-length is for models of a source and a target (encoder_decoder); a ",
              config.kind, " reads one sequence, of --length");
  const int64_t channels = Channels(config),
                target = s.target_length > 0 ? s.target_length : s.length;
  RequireLength(config, info.forms[0], s.length, "--length");
  if (info.encodes) RequireLength(config, Form::kCausal, target, "--target-length");
  at::manual_seed(s.seed);
  NamedTensors batch;
  const at::Device device = model.options().device();
  for (const std::string& input : info.inputs) {
    const bool optional = input.ends_with("?");
    const std::string name = optional ? input.substr(0, input.size() - 1) : input;
    if (name == "values" && channels > 0) {
      batch.Set(name, at::randn({s.batch, s.length, channels}).to(device));
    } else if (name.ends_with("ids") && channels == 0) {
      const bool of_target = name == "ids" && info.encodes;
      batch.Set(name, Ids(of_target ? config.TargetVocabSize() : config.vocab_size,
                          {s.batch, of_target ? target : s.length}, model));
    } else if (name == "source") {
      batch.Set(name, Ids(config.vocab_size, {s.batch, s.length}, model));
    } else if (name.ends_with("lengths") && !optional) {
      batch.Set(name, at::full({s.batch}, s.length, at::kLong).to(device));
    } else if (!optional) {
      FailUsage("bench makes up tokens and values; a ", config.kind, " reads ", name,
                " as well: use cistern train --steps, which prints its tokens/s");
    }
  }
  batch.Set("targets", Targets(model, s.batch, target));
  const int64_t tokens = info.encodes        ? s.length + target
                         : HasTwoTexts(info) ? 2 * s.length
                                             : s.length;
  return {batch, s.batch, s.batch * tokens};
}

// Tells models apart of which Summary() says the same.
std::string ConfigHash(const ModelConfig& config) {
  return HexText(XxHash64(JsonLine(ChangedSettings(config))));
}

// "adamw", "muon, muon.momentum 0.9", "adamw, clip 0.5"
std::string OptimizerText(OptimizerOptions options, double clip) {
  const auto written = [](OptimizerOptions& o) {
    Fields fields;
    o.AddTo(fields);
    return fields.Write();
  };
  OptimizerOptions usual;
  usual.kind = options.kind;
  const Json all = written(options).flatten(), defaults = written(usual).flatten();
  std::string text = NameOf(options.kind, OptimizerKinds());
  for (const auto& [key, value] : all.items()) {
    std::string dotted = key.substr(1);
    std::replace(dotted.begin(), dotted.end(), '/', '.');
    if (value != defaults.value(key, Json())) text += StrCat(", ", dotted, " ", value.dump());
  }
  if (clip != ModelSettings().clip) text += StrCat(", clip ", clip);
  return text;
}

Json What(const Model& model, const ModelSettings& s, const std::string& phase) {
  return {{"phase", phase},
          {"model", model.config().Summary()},
          {"kind", model.config().kind},
          {"config", ConfigHash(model.config())},
          {"dtype", s.dtype},
          {"implementation", ops::ImplName(ops::ActiveImpl())}};
}

// The median: what malloc takes once because its blocks came to lie differently is no step's cost.
int64_t FaultsOfAStep(TrainingStep& step) {
  std::array<int64_t, 5> faults;
  for (int64_t& count : faults) {
    const int64_t before = PageFaults();
    step.Run();
    count = PageFaults() - before;
  }
  std::nth_element(faults.begin(), faults.begin() + 2, faults.end());
  return faults[2];
}

Row MeasureTraining(const std::shared_ptr<Model>& model, const ModelSettings& s) {
  TrainingStep step(model, s);
  Row row;
  row.what = What(*model, s, "train");
  row.what["batch"] = s.batch, row.what["length"] = s.length;
  if (s.target_length > 0) row.what["target_length"] = s.target_length;
  row.what["optimizer"] = OptimizerText(s.optimizer, s.clip);
  row.what["parallel"] = step.parts() > 1 ? "rows" : "operations";
  malloc_trim(0);
  ResetPeakMemory();
  const int64_t before = ResidentBytes();
  step.Run();
  const int64_t peak = PeakBytes();
  step.Run();
  row.figures["faults_per_step"] = FaultsOfAStep(step);
  row.ms = TimeAlternating({{[&] { step.Run(); }}}, s.timer, s.stop).at(0);
  if (row.ms.runs == 0) {
    row.skipped = "interrupted";
    return row;
  }
  row.figures["tokens_per_s"] = 1e3 * double(step.tokens()) / row.ms.median;
  row.figures["steps_per_s"] = 1e3 / row.ms.median;
  if (before > 0 && peak > before) row.figures["peak_bytes"] = peak - before;
  row.figures["parameters"] = model->ParameterCount();
  return row;
}

// `time` gives the milliseconds of each step. Where it raises an Error, for a mechanism that knows
// no position so far, the rows that were measured stay.
Row DecodeRow(const LanguageModel& model, const ModelSettings& s, const DecodeLimits& limits,
              int64_t sequences, int64_t position,
              const std::function<std::vector<double>()>& time) {
  Row row;
  row.what = What(model, s, "decode");
  row.what["sequences"] = sequences, row.what["position"] = position;
  row.what["decoded"] = s.decoded;
  try {
    const std::vector<double> times = time();
    if (times.empty())
      row.skipped = "interrupted";
    else
      row.ms = SpreadOf(times);
  } catch (const Error& e) {
    row.skipped = e.what();
  }
  if (!row.skipped.empty()) return row;
  row.figures = {{"tokens_per_s", 1e3 * double(sequences) / row.ms.median},
                 {"state_bytes", model.StateBytes(sequences, position)}};
  if (s.dtype != "float64") row.figures["of_memory"] = limits.MemoryMilliseconds() / row.ms.median;
  if (s.dtype == "float32")
    row.figures["of_peak"] = limits.PeakMilliseconds(sequences) / row.ms.median;
  return row;
}

std::vector<Row> MeasureDecodes(LanguageModel& model, const ModelSettings& s, Json* peaks) {
  constexpr int64_t kPiece = 1024;
  const DecodeScope scope(model);
  const BFloat16Decoding narrow(s.dtype == "bfloat16", model);
  const int64_t vocab = model.config().vocab_size;
  const DecodeLimits limits = MeasureDecodeLimits(model, s.dtype == "bfloat16");
  const int threads = NumThreads();
  peaks->push_back({{"threads", threads}, {"gb_per_s", limits.gb_per_s}});
  peaks->push_back({{"threads", threads},
                    {"isa", ActiveIsa()},
                    {"dtype", "float32"},
                    {"gflops", limits.gflops}});
  const auto warm = [&](int64_t sequences) {  // the first call of every operation is slow
    ModelState state = model.EmptyState(sequences);
    TimeDecodeSteps(model, state, 3, s.stop);
  };
  warm(1);
  ModelState state = model.EmptyState(1);
  std::vector<Row> rows;
  int64_t done = 0;
  for (const int64_t position : s.positions) {
    rows.push_back(DecodeRow(model, s, limits, 1, position, [&] {
      while (done < position && !(s.stop && s.stop())) {
        CheckStateGrowth(model.config(), state.Bytes(), done);
        const int64_t piece = std::min(kPiece, position - done);
        model.Hidden(Ids(vocab, {1, piece}, model), state);
        done += piece;
      }
      std::vector<double> times = TimeDecodeSteps(model, state, s.decoded, s.stop);
      done += int64_t(times.size());
      return times;
    }));
  }
  for (const int64_t sequences : s.sequences) {
    if (sequences == 1 && s.positions[0] == 0) continue;  // measured above
    rows.push_back(DecodeRow(model, s, limits, sequences, 0, [&] {
      warm(sequences);
      ModelState many = model.EmptyState(sequences);
      return TimeDecodeSteps(model, many, s.decoded, s.stop);
    }));
  }
  return rows;
}

}  // namespace

TrainingStep::TrainingStep(std::shared_ptr<Model> model, const ModelSettings& settings)
    : model_(std::move(model)), settings_(settings), batch_(MadeUp(*model_, settings)) {
  parts_ = RowParts(settings.parallel, *model_, settings.batch);
  optimizer_ = MakeOptimizer(*model_, settings.optimizer);
}

void TrainingStep::Run() {
  model_->train();
  const RowsLoss of = {[this](const Batch& rows) { return model_->TrainingLoss(rows.tensors); },
                       [](const Batch& rows) { return double(rows.rows); }};
  // What is dropped is drawn anew in each step, as a trainer does.
  const auto words = Philox(settings_.seed, 0, uint64_t(steps_++));
  AddGradients(*model_, of, batch_, 1, settings_.dtype == "bfloat16", parts_,
               uint64_t{words[0]} << 32 | words[1]);
  const BFloat16Scope scope(settings_.dtype == "bfloat16", model_->options().device());
  optimizer_->Step(kRate, settings_.clip);
}

Inference::Inference(std::shared_ptr<Model> model, const ModelSettings& settings)
    : model_(std::dynamic_pointer_cast<Classifier>(model)) {
  if (!model_) FailUsage("inference is timed of classifiers; not of a ", model->config().kind);
  batch_ = MadeUp(*model_, settings);
}

at::Tensor Inference::Run() {
  const EvalScope scope(*model_);
  return model_->Logits(batch_.tensors);
}

Translation::Translation(std::shared_ptr<Model> model, const ModelSettings& settings)
    : model_(std::dynamic_pointer_cast<LanguageModel>(model)),
      length_(settings.target_length > 0 ? settings.target_length : settings.length) {
  if (!model_ || !model->info().encodes)
    FailUsage("translation is timed of models with a source; not of a ", model->config().kind);
  RequireLength(model_->config(), Form::kBidirectional, settings.length, "--length");
  RequireLength(model_->config(), Form::kCausal, length_, "--target-length");
  source_ = Ids(model_->config().vocab_size, {settings.batch, settings.length}, *model_);
}

at::Tensor Translation::Run() {
  const DecodeScope scope(*model_);
  ModelState state = model_->Encode(source_, {});
  at::Tensor last = at::zeros({source_.size(0), 1}, source_.options());
  std::vector<at::Tensor> said;
  for (int64_t t = 0; t < length_; ++t) {
    last = model_->Extend(last, state).argmax(-1);
    said.push_back(last);
  }
  return at::cat(said, 1);
}

void CheckStepMemory(const ModelConfig& config, const ModelSettings& s) {
  TrainOptions options;
  options.optimizer = s.optimizer, options.parallel = s.parallel;
  const bool both = s.target_length > 0;
  const int64_t length = both                         ? s.target_length
                         : HasTwoTexts(config.info()) ? 2 * s.length
                                                      : s.length;
  CheckMemory(config, s.batch, length, s.dtype == "float64" ? 8 : 4, options, both ? s.length : 0);
}

std::vector<Row> MeasureModel(const std::shared_ptr<Model>& model, const ModelSettings& s,
                              Json* peaks) {
  if (!std::is_sorted(s.positions.begin(), s.positions.end()) ||
      std::adjacent_find(s.positions.begin(), s.positions.end()) != s.positions.end())
    FailUsage("--positions have to ascend");
  for (auto i = s.sequences.begin(); i != s.sequences.end(); ++i) {
    if (std::find(s.sequences.begin(), i, *i) != i)
      FailUsage("--sequences names ", *i, " twice; give every number once");
  }
  std::vector<Row> rows;
  auto* lm = dynamic_cast<LanguageModel*>(model.get());
  const bool decodes = s.decode && lm != nullptr && !model->info().encodes && !s.positions.empty();
  if (decodes) {
    for (size_t i = 0; i < s.positions.size(); ++i) {
      // The tokens decoded at one position stand before the next.
      const int64_t at =
          i == 0 ? s.positions[0] : std::max(s.positions[i], s.positions[i - 1] + s.decoded);
      if (at != s.positions[i])
        FailUsage("--positions ", s.positions[i - 1], " and ", s.positions[i],
                  " are less than the ", s.decoded, " tokens apart that are decoded at each");
      RequireLength(model->config(), Form::kCausal, s.positions[i] + s.decoded,
                    "--positions, with what is decoded there,");
    }
  }
  if (s.train) rows.push_back(MeasureTraining(model, s));
  if (decodes) {
    for (Row& row : MeasureDecodes(*lm, s, peaks)) rows.push_back(std::move(row));
  }
  if (rows.empty() && !s.decode) FailUsage("nothing to measure: omit --no-train or --no-decode");
  if (rows.empty())
    FailUsage("nothing to measure: a ", model->config().kind,
              !lm ? " does not decode" : " does not decode without a source", "; omit --no-train");
  return rows;
}

const std::vector<Column>& ModelColumns() {
  using Kind = Column::Kind;
  static const std::vector<Column> columns = {{"ms", "ms", Kind::kMilliseconds},
                                              {"spread", "spread", Kind::kShare},
                                              {"tokens_per_s", "tokens/s", Kind::kRate},
                                              {"steps_per_s", "steps/s", Kind::kRate},
                                              {"of_memory", "of memory limit", Kind::kShare},
                                              {"of_peak", "of FMA peak", Kind::kShare},
                                              {"peak_bytes", "memory", Kind::kBytes},
                                              {"state_bytes", "state", Kind::kBytes},
                                              {"faults_per_step", "page faults/step", Kind::kCount},
                                              {"parameters", "parameters", Kind::kCount}};
  return columns;
}

}  // namespace cistern::bench
