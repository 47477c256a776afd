#include "cistern/bench/papers_models.h"

#include <malloc.h>

#include <algorithm>
#include <chrono>
#include <exception>

#include "cistern/base/format.h"
#include "cistern/base/memory.h"
#include "cistern/bench/model.h"
#include "cistern/train/trainer.h"

namespace cistern::bench {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int64_t kRounds = 3;

// An arm at one length, and what was measured of it so far.
struct Contender {
  ModelConfig config;
  ModelSettings settings;
  std::vector<double> milliseconds;
  int64_t peak_bytes = 0, parameters = 0, tokens = 0;
};

// What a step holds at its highest, about.
int64_t NeededBytes(const Protocol& p, const Contender& c) {
  const ModelSettings& s = c.settings;
  const bool both = s.target_length > 0;
  const int64_t length = both ? s.target_length : s.length, source = both ? s.length : 0;
  if (p.whole->work == ModelWork::kTraining) {
    TrainOptions options;
    options.optimizer = s.optimizer, options.parallel = s.parallel;
    return EstimateRunBytes(c.config, s.batch, length, 4, options, source);
  }
  // The weights, and what training keeps of one layer.
  const int64_t weights = EstimateTrainingBytes(c.config, 0, length, source, 4, 1),
                all = EstimateTrainingBytes(c.config, s.batch, length, source, 4, 1);
  return weights + (all - weights) / c.config.layers;
}

Contender ContenderOf(const Protocol& p, const Arm& arm, int64_t length, uint64_t seed) {
  Contender c;
  c.config = ConfigOf(p, arm, length);
  c.settings.batch = p.batch, c.settings.length = length;
  c.settings.target_length =
      p.whole->work == ModelWork::kTranslation ? length : p.whole->target_length;
  c.settings.optimizer = p.whole->optimizer, c.settings.clip = p.whole->clip;
  c.settings.seed = seed;
  return c;
}

// Makes the model and times at least `runs` of its steps and `seconds` of them.
template <class Work>
void Turn(const MeasureSettings& settings, int64_t runs, double seconds, Contender* c) {
  const auto stopped = [&] { return settings.stop && settings.stop(); };
  const int64_t before = ResidentBytes();
  const std::shared_ptr<Model> model = MakeModel(c->config, settings.seed);
  Work work(model, c->settings);
  malloc_trim(0);
  ResetPeakMemory();
  work.Run();
  const int64_t peak = PeakBytes();
  if (settings.memory && c->peak_bytes == 0 && before > 0 && peak > before)
    c->peak_bytes = peak - before;
  c->parameters = model->ParameterCount(), c->tokens = work.tokens();
  const auto began = Clock::now();
  for (int64_t i = 0; (i < runs || SecondsSince(began) < seconds) && i < settings.timer.most; ++i) {
    if (stopped()) break;
    const auto step = Clock::now();
    work.Run();
    c->milliseconds.push_back(1e3 * SecondsSince(step));
  }
}

// An empty reason, or why the arm is not measured.
std::string Measured(const Protocol& p, const MeasureSettings& settings, int64_t rounds,
                     Contender* c) {
  try {
    malloc_trim(0);
    const int64_t need = NeededBytes(p, *c), have = AvailableBytes();
    if (have > 0 && need > have)
      return StrCat("would need about ", ByteCount(double(need)), " of memory, and ",
                    ByteCount(double(have)), " are free; lower --scale");
    const int64_t runs = (settings.timer.runs + rounds - 1) / rounds;
    const double seconds = settings.timer.seconds / double(rounds);
    switch (p.whole->work) {
      case ModelWork::kTraining:
        Turn<TrainingStep>(settings, runs, seconds, c);
        break;
      case ModelWork::kInference:
        Turn<Inference>(settings, runs, seconds, c);
        break;
      case ModelWork::kTranslation:
        Turn<Translation>(settings, runs, seconds, c);
        break;
    }
    return "";
  } catch (...) {
    return ReasonOf(std::current_exception(), false);
  }
}

Json What(const Protocol& p, const Arm& arm, int64_t length, const Case& like) {
  Json what = {{"figure", p.name},
               {"arm", arm.name},
               {"mechanism", arm.mechanism},
               {"options", arm.options},
               {"pass", NameOf(p.whole->work, ModelWorks())},
               {"length", length}};
  if (p.whole->target_length > 0) what["target_length"] = p.whole->target_length;
  what.update(Json{{"batch", p.batch},
                   {"dtype", "float32"},
                   {"implementation", ops::ImplName(like.implementation)},
                   {"isa", like.isa},
                   {"threads", like.threads}});
  return what;
}

void Finish(const Contender& c, Row* row) {
  if (!row->skipped.empty()) return;
  if (c.milliseconds.empty()) {
    row->skipped = "interrupted";
    return;
  }
  row->ms = SpreadOf(c.milliseconds);
  row->figures = {{"tokens_per_s", 1e3 * double(c.tokens) / row->ms.median},
                  {"steps_per_s", 1e3 / row->ms.median},
                  {"parameters", c.parameters}};
  if (c.peak_bytes > 0) row->figures["peak_bytes"] = c.peak_bytes;
}

}  // namespace

const EnumNames<ModelWork>& ModelWorks() {
  static const EnumNames<ModelWork> names = {{ModelWork::kTraining, "training step"},
                                             {ModelWork::kInference, "inference"},
                                             {ModelWork::kTranslation, "translation"}};
  return names;
}

ModelConfig ConfigOf(const Protocol& p, const Arm& arm, int64_t length) {
  Json model = p.whole->model;
  model["attention"] = arm.mechanism;
  if (!arm.options.empty()) model["attention_options"] = {{arm.mechanism, arm.options}};
  const ModelInfo& info = FindModel(model.value("kind", ""));
  if (info.Has(Form::kCross) && arm.mechanism != "softmax")  // which it has by default
    model["cross"] = {{"attention", arm.mechanism}};
  model.update(arm.model);
  ModelConfig config = ReadModelConfig(model, StrCat(p.name, ", ", arm.name));
  config.max_length = std::max(config.max_length, length);
  return config;
}

std::vector<Row> MeasureWholeModels(const Protocol& p, const Case& like,
                                    const MeasureSettings& settings) {
  const Setting setting(like);
  const auto stopped = [&] { return settings.stop && settings.stop(); };
  const int64_t rounds = std::min(kRounds, settings.timer.runs);
  std::vector<Row> rows;
  for (const int64_t length : p.lengths) {
    const size_t first = rows.size(), count = p.arms.size();
    std::vector<Contender> contenders;
    for (const Arm& arm : p.arms) {
      contenders.push_back(ContenderOf(p, arm, length, settings.seed));
      rows.emplace_back();
      rows.back().what = What(p, arm, length, like);
    }
    for (int64_t round = 0; round < rounds; ++round) {
      for (size_t i = 0; i < count && !stopped(); ++i) {
        const size_t which = round % 2 == 0 ? i : count - 1 - i;
        Row& row = rows[first + which];
        if (!row.skipped.empty()) continue;
        if (settings.progress) {
          Case next = like;
          next.length = length;
          const int64_t turns = round * int64_t(count) + int64_t(i);
          settings.progress(next, int64_t(first) + turns / rounds);
        }
        row.skipped = Measured(p, settings, rounds, &contenders[which]);
      }
    }
    for (size_t i = 0; i < count; ++i) Finish(contenders[i], &rows[first + i]);
  }
  return rows;
}

}  // namespace cistern::bench
