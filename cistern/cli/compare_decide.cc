#include "cistern/cli/compare_decide.h"

#include <algorithm>
#include <cmath>

#include "cistern/base/format.h"
#include "cistern/base/interrupt.h"
#include "cistern/base/progress.h"
#include "cistern/cli/bench_command.h"
#include "cistern/io/svg_plot.h"

namespace cistern::cli {

std::vector<Criterion> Criteria(const Comparison& c) {
  std::vector<Criterion> all = {
      {"quality", c.metric.label, c.metric.lower_is_better, {}},
      {"speed", "training, tokens/s", false, {}},
      {"memory", "peak memory of training, MB", true, {}},
      {"state", "state of one text, bytes", true, {}},
      {"decoding", "decoding, ms per token", true, {}},
  };
  const double none = std::nan("");
  for (const CompareRow& row : c.rows) {
    const bool decodes = row.failed.empty() && !row.decode.empty();
    all[0].values.push_back(c.Value(row));
    all[1].values.push_back(row.TokensPerSecond());
    all[2].values.push_back(row.PeakBytes());
    all[3].values.push_back(decodes ? double(row.decode.back().state_bytes) : none);
    all[4].values.push_back(decodes ? row.decode.back().milliseconds : none);
  }
  std::erase_if(all, [](const Criterion& criterion) {
    return std::all_of(criterion.values.begin(), criterion.values.end(),
                       [](double x) { return std::isnan(x); });
  });
  return all;
}

Decision Decide(const Comparison& c) {
  if (c.lengths.size() > 1) return {};  // figures of different lengths do not compare
  std::vector<Candidate> candidates;
  int64_t state_at = 0;
  for (const CompareRow& row : c.rows) {
    candidates.push_back({row.Name(), row.bounded});
    if (!row.decode.empty()) state_at = row.decode.back().position;
  }
  Decision decision = cistern::Decide(candidates, Criteria(c), c.metric.scatter, state_at);
  if (!decision.recommended.empty()) {
    decision.reasons.push_back(
        StrCat("This is ", c.seeds == 1 ? "one seed" : StrCat(c.seeds, " seeds"), ", one size and ",
               Trimmed(c.seconds, 3), " s of training.",
               c.efficiency.empty()
                   ? " From which length on a mechanism beats exact softmax in time and memory: "
                     "--efficiency 4096, or cistern bench efficiency."
                   : ""));
    for (const std::string& sentence : EfficiencySentences(c.efficiency, decision.recommended))
      decision.reasons.push_back(sentence);
  }
  return decision;
}

std::vector<bench::EfficiencyRow> EfficiencyOf(const ModelConfig& config,
                                               const std::vector<std::string>& mechanisms,
                                               int64_t longest, uint64_t seed) {
  const LayerStack stack = config.Stack(config.info().forms[0]);
  const bool causal = stack.form() == Form::kCausal;
  SweepOptions words;
  words.forms = causal ? std::vector<std::string>{"causal", "decode"}
                       : std::vector<std::string>{"bidirectional"};
  words.heads = {stack.options().heads};
  const int64_t width = stack.options().qkv_dim > 0 ? stack.options().qkv_dim : stack.dim();
  words.widths = {width / stack.options().heads};
  words.mechanisms = mechanisms;
  bench::Sweep sweep = SweepOf(words);
  std::erase_if(sweep.mechanisms, [](const auto& m) { return m.first->name == "softmax"; });
  if (sweep.mechanisms.empty()) return {};
  for (auto& mechanism : sweep.mechanisms) {
    ModelConfig own = config;
    own.attention = {mechanism.first->name};
    mechanism.second = own.Stack(stack.form()).Options(0);
  }
  bench::EfficiencySettings settings;
  settings.against = &FindMechanism("softmax");
  settings.longest = longest;
  settings.measure.timer.seconds = 0.05;
  settings.measure.timer.runs = 5;
  settings.measure.seed = seed;
  settings.measure.stop = [] { return Interrupted().load(); };
  bench::Record record;
  bench::Peaks peaks;
  ProgressBar bar({.total = 0, .label = "efficiency", .unit = "rows"});
  settings.measure.progress = [&](const bench::Case& c, int64_t) {
    bar.Update(int64_t(record.rows.size()), StrCat(c.info->name, " T=", c.length));
  };
  return bench::MeasureEfficiency(sweep, settings, peaks, &record);
}

std::vector<std::string> EfficiencySentences(const std::vector<bench::EfficiencyRow>& rows,
                                             const std::string& mechanism) {
  std::vector<std::string> out;
  for (const bench::EfficiencyRow& r : rows) {
    if (r.mechanism != mechanism) continue;
    const std::string what = r.way == bench::Way::kDecode   ? "decoding"
                             : r.pass == bench::Pass::kBoth ? "training (forward and backward)"
                                                            : "the forward pass";
    if (!r.skipped.empty()) {
      out.push_back(StrCat("Efficiency length in ", what, ": not known, ", r.skipped, "."));
      continue;
    }
    out.push_back(StrCat(
        "On this machine ", mechanism, " takes less time than softmax in ", what,
        " from a length of ", bench::BracketOf(r.time).Text(),
        r.bytes.empty() ? "" : ", less memory from " + bench::BracketOf(r.bytes).Text(), "."));
  }
  return out;
}

std::vector<std::string> DecisionPictures(const Comparison& c) {
  std::vector<std::string> pictures;
  const std::vector<Criterion> criteria = Criteria(c);
  const auto quality =
      std::find_if(criteria.begin(), criteria.end(),
                   [](const Criterion& criterion) { return criterion.name == "quality"; });
  if (quality == criteria.end()) return pictures;
  for (const Criterion& cost : criteria) {
    if (&cost == &*quality) continue;
    const double unit = cost.name == "memory" ? 1e6 : 1;
    LineChart chart{"Quality against " + cost.name, cost.label, quality->label, {}};
    double least = 0, most = 0;  // of the axis
    for (const double x : cost.values) {
      if (!(x > 0)) continue;
      least = least > 0 ? std::min(least, x) : x;
      most = std::max(most, x);
    }
    chart.log_x = most > 4 * least;  // equal steps say more on a shorter one
    const std::vector<bool> front = ParetoFront({*quality, cost});
    std::vector<std::pair<double, double>> line;
    for (size_t i = 0; i < front.size(); ++i) {
      if (front[i]) line.emplace_back(cost.values[i] / unit, quality->values[i]);
    }
    std::sort(line.begin(), line.end());
    Series best{"Pareto front", {}, {}};
    for (const auto& point : line) best.x.push_back(point.first), best.y.push_back(point.second);
    chart.series.push_back(best);
    for (size_t i = 0; i < c.rows.size(); ++i)
      chart.series.push_back({c.rows[i].Name(), {cost.values[i] / unit}, {quality->values[i]}});
    pictures.push_back(RenderSvg(chart));
  }
  return pictures;
}

}  // namespace cistern::cli
