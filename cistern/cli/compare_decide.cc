#include "cistern/cli/compare_decide.h"

#include <algorithm>
#include <cmath>

#include "cistern/base/format.h"
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
    const bool done = row.failed.empty(), decodes = done && !row.decode.empty();
    const auto number = [&](const char* key) {
      return done && row.result.contains(key) ? row.result.at(key).get<double>() : none;
    };
    all[0].values.push_back(c.Value(row));
    all[1].values.push_back(number("tokens_per_s"));
    all[2].values.push_back(number("peak_bytes"));
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
               Fixed(c.seconds, 0),
               " s of training. From which length on a mechanism beats exact softmax in time and "
               "memory: cistern bench efficiency."));
  }
  return decision;
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
    chart.log_x = most > 4 * least;  // a shorter logarithmic axis may have no ticks
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
