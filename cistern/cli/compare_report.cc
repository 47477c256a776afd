#include "cistern/cli/compare_report.h"

#include <algorithm>
#include <cmath>
#include <cstdio>

#include "cistern/base/cpu_share.h"
#include "cistern/base/error.h"
#include "cistern/base/format.h"
#include "cistern/base/parallel.h"
#include "cistern/cli/child_run.h"
#include "cistern/cli/compare_decide.h"
#include "cistern/io/svg_plot.h"
#include "cistern/kernels/isa.h"

namespace cistern::cli {
namespace {

bool Decodes(const Comparison& c) {
  return std::any_of(c.rows.begin(), c.rows.end(),
                     [](const CompareRow& row) { return !row.decode.empty(); });
}

// " (20 blocks spread over the text)" of a task that can split its data in several ways.
std::string SplitOf(const Comparison& c) {
  for (const CompareRow& row : c.rows) {
    if (row.failed.empty() && row.result.contains("split"))
      return StrCat(" (", row.result["split"].get<std::string>(), ")");
  }
  return "";
}

double Number(const Json& result, const char* key) { return result.at(key).get<double>(); }

// 97.5 % point of Student's t with so many degrees of freedom, to three digits.
double StudentQuantile(size_t degrees) {
  constexpr double kPoints[] = {12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306,
                                2.262,  2.228, 2.201, 2.179, 2.160, 2.145, 2.131, 2.120,
                                2.110,  2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064,
                                2.060,  2.056, 2.052, 2.048, 2.045, 2.042};
  constexpr size_t kKnown = sizeof kPoints / sizeof *kPoints;
  return degrees <= kKnown ? kPoints[degrees - 1] : 1.96 + 2.46 / double(degrees);
}

// Of the seeds that finished.
std::vector<double> Values(const CompareRow& row, const std::string& part,
                           const std::string& metric) {
  std::vector<double> values;
  for (const Json& result : row.results) {
    if (!result.contains(part)) continue;
    const Json& value = result.at(part).at(metric);
    if (value.is_number()) values.push_back(value.get<double>());
  }
  return values;
}

bool HasLongBlocks(const Comparison& c) {
  return std::any_of(c.rows.begin(), c.rows.end(),
                     [&](const CompareRow& row) { return !std::isnan(c.Value(row, kLongBlocks)); });
}

// Of the rows that did not get the processor time they asked for.
std::string Busy(const Comparison& c) {
  double least = 1;
  for (const CompareRow& row : c.rows) least = std::min(least, row.CpuShare());
  if (least >= kBusyShare) return "";
  return StrCat(
      "The machine was busy: a run got as little as ", Fixed(100 * least, 0),
      " % of the processor time that it was ready to use. Speeds, and the results reached "
      "in that time, are not reliable.");
}

// Over the lengths of a sweep, a line for each mechanism: the metric, or tokens per second.
LineChart LengthChart(const Comparison& c, bool metric) {
  LineChart chart{metric ? c.metric.label : "Speed of training",
                  "tokens of a row",
                  metric ? c.metric.label : "tokens/s",
                  {}};
  chart.log_x = true;
  for (const CompareRow& row : c.rows) {
    if (chart.series.empty() || chart.series.back().name != row.mechanism)
      chart.series.push_back({row.mechanism, {}, {}});
    if (!row.failed.empty()) continue;
    chart.series.back().x.push_back(double(row.length));
    chart.series.back().y.push_back(metric ? c.Value(row) : row.TokensPerSecond());
  }
  return chart;
}

}  // namespace

std::string CompareRow::Name() const {
  return length > 0 ? StrCat(mechanism, ", ", length, " tokens") : mechanism;
}

double CompareRow::TokensPerSecond() const {
  if (results.empty()) return std::nan("");
  double sum = 0;
  for (const Json& r : results) sum += Number(r, "tokens_per_s");
  return sum / double(results.size());
}

double CompareRow::PeakBytes() const {
  if (results.empty()) return std::nan("");
  double most = 0;
  for (const Json& r : results) most = std::max(most, Number(r, "peak_bytes"));
  return most;
}

double CompareRow::CpuShare() const {
  double least = 1;
  for (const Json& r : results) least = std::min(least, Number(r, "cpu_share"));
  return least;
}

double Comparison::Value(const CompareRow& row, const std::string& part) const {
  const std::vector<double> values = Values(row, part, metric.name);
  if (values.empty()) return std::nan("");
  double sum = 0;
  for (const double v : values) sum += v;
  return sum / double(values.size());
}

double Comparison::HalfWidth(const CompareRow& row, const std::string& part) const {
  const std::vector<double> values = Values(row, part, metric.name);
  const size_t n = values.size();
  if (n < 2) return std::nan("");
  const double mean = Value(row, part);
  double squares = 0;
  for (const double v : values) squares += (v - mean) * (v - mean);
  return StudentQuantile(n - 1) * std::sqrt(squares / double(n - 1) / double(n));
}

std::string Comparison::ValueText(const CompareRow& row, const std::string& part) const {
  const int digits = metric.lower_is_better ? 3 : 2;
  const double value = Value(row, part), half = HalfWidth(row, part);
  if (std::isnan(value)) return "-";
  return StrCat(Fixed(value, digits), std::isnan(half) ? "" : " ± " + Fixed(half, digits));
}

bool Comparison::Better(const CompareRow& a, const CompareRow& b) const {
  const double x = Value(a), y = Value(b);
  if (std::isnan(x) || std::isnan(y)) return !std::isnan(x) && std::isnan(y);
  return metric.lower_is_better ? x < y : x > y;
}

const CompareRow* Comparison::Best() const {
  const CompareRow* best = nullptr;
  for (const CompareRow& row : rows) {
    if (!row.failed.empty()) continue;
    if (!best || (row.bounded && !best->bounded) ||
        (row.bounded == best->bounded && Better(row, *best)))
      best = &row;
  }
  return best;
}

HtmlTable CompareTable(const Comparison& c) {
  const bool decodes = Decodes(c), longer = HasLongBlocks(c);
  HtmlTable table;
  table.header = {"mechanism", c.metric.label};
  if (longer) table.header.push_back(StrCat("in blocks ", kLongFactor, " x longer"));
  table.header.insert(table.header.end(), {"parameters", "tokens/s", "peak memory"});
  int64_t later = 0;
  for (const CompareRow& row : c.rows) {
    if (row.decode.size() > 1) later = row.decode.back().position;
  }
  if (decodes) {
    for (const char* what : {"state ", "ms/token "}) {
      table.header.push_back(StrCat(what, "at start"));
      if (later > 0) table.header.push_back(StrCat(what, "at ", later));
    }
  }
  const CompareRow* best = nullptr;
  for (const CompareRow& row : c.rows) {
    std::vector<std::string> cells = {row.Name()};
    if (row.failed.empty()) {
      cells.push_back(c.ValueText(row));
      if (longer) cells.push_back(c.ValueText(row, kLongBlocks));
      cells.push_back(Thousands(row.result.at("parameters").get<int64_t>()));
      cells.push_back(Thousands(std::llround(row.TokensPerSecond())));
      cells.push_back(ByteCount(row.PeakBytes()));
    }
    if (decodes && !row.decode.empty()) {
      const DecodePoint &first = row.decode.front(), &last = row.decode.back();
      const bool reaches = row.decode.size() > 1;
      cells.push_back(ByteCount(double(first.state_bytes)));
      if (later > 0) cells.push_back(reaches ? ByteCount(double(last.state_bytes)) : "-");
      cells.push_back(Fixed(first.milliseconds, 3));
      if (later > 0) cells.push_back(reaches ? Fixed(last.milliseconds, 3) : "-");
    }
    while (cells.size() < table.header.size()) cells.push_back(cells.size() == 1 ? "failed" : "-");
    if (row.failed.empty() && (!best || c.Better(row, *best))) {
      best = &row;
      table.best_row = int(table.rows.size());
    }
    table.rows.push_back(std::move(cells));
  }
  return table;
}

void PrintTable(const HtmlTable& table) {
  std::vector<size_t> widths(table.header.size());
  auto widen = [&](const std::vector<std::string>& cells) {
    for (size_t i = 0; i < cells.size(); ++i) widths[i] = std::max(widths[i], cells[i].size());
  };
  widen(table.header);
  for (const auto& row : table.rows) widen(row);
  auto print = [&](const std::vector<std::string>& cells) {
    for (size_t i = 0; i < cells.size(); ++i)
      std::printf(i == 0 ? "%-*s" : "  %*s", int(widths[i]), cells[i].c_str());
    std::printf("\n");
  };
  print(table.header);
  for (const auto& row : table.rows) print(row);
}

std::vector<std::string> Fairness(const Comparison& c) {
  const Experiment& e = c.experiment;
  int64_t fewest = INT64_MAX, most = 0;
  for (const CompareRow& row : c.rows) {
    if (!row.failed.empty()) continue;
    const int64_t parameters = row.result.at("parameters").get<int64_t>();
    fewest = std::min(fewest, parameters);
    most = std::max(most, parameters);
  }
  std::vector<std::string> lines = {
      StrCat("Equal for all: the data, ", e.model.layers, " layers of width ", e.model.dim,
             " with ", e.model.heads, " heads",
             e.model.conv > 0
                 ? StrCat(", a causal convolution of ", e.model.conv, " taps on every projection")
                 : std::string(),
             ", batch ", e.train.batch, ", optimizer and schedule, ",
             c.seeds > 1 ? StrCat(c.seeds, " seeds") : std::string("seed"), ", ",
             Trimmed(c.seconds, 3), " s of training time on ", NumThreads(),
             NumThreads() == 1 ? " thread (" : " threads (", ActiveIsa(), "), ",
             e.dtype == "bfloat16" ? "linear maps in bfloat16, the rest in float32."
                                   : StrCat("dtype ", e.dtype, "."))};
  if (most > 0) {
    lines.push_back(StrCat("Parameters differ by ",
                           Fixed(100.0 * (double(most) / double(fewest) - 1.0), 1),
                           " %. Only training is timed, not evaluation."));
  }
  lines.push_back(StrCat(
      c.metric.label, ": on the test split", SplitOf(c), ", ", c.metric.summary, ".",
      c.seeds > 1 ? StrCat(" The mean of ", c.seeds, " seeds, ± half of Student's 95 % interval.")
      : c.metric.scatter > 0 ? StrCat(" With one seed, ignore differences below about ",
                                      Significant(c.metric.scatter, 2), ".")
                             : ""));
  if (c.seeds > 1) {
    std::string others;  // whose first seed failed
    for (const CompareRow& row : c.rows) {
      if (row.failed.empty() && row.seed != c.experiment.seed)
        others += StrCat(others.empty() ? "" : ", ", row.Name(), ": seed ", row.seed);
    }
    lines.push_back(
        StrCat("tokens/s is the mean of the seeds, peak memory the most of them; "
               "decoding, curves and the confusion matrix are those of seed ",
               c.experiment.seed, others.empty() ? "" : StrCat(" (", others, ")"), "."));
  }
  if (HasLongBlocks(c)) {
    lines.push_back(StrCat("In blocks ", kLongFactor,
                           " x longer: the same text and models, each block read with one memory "
                           "far beyond the length of a training row."));
  }
  for (const CompareRow& row : c.rows) {
    if (!row.failed.empty()) {
      lines.push_back(row.Name() + " failed: " + row.failed);
      continue;
    }
    for (const std::string& failure : row.failures)
      lines.push_back(StrCat(row.Name(), " failed with ", failure));
    for (const std::string& unmeasured : row.unmeasured)
      lines.push_back(StrCat(row.Name(), ": ", unmeasured));
  }
  if (const std::string busy = Busy(c); !busy.empty()) lines.push_back(busy);
  return lines;
}

Json CompareJson(const Comparison& c) {
  const CompareRow* best = c.Best();
  const Decision decision = Decide(c);
  Json front = Json::array();
  for (size_t i = 0; i < decision.front.size(); ++i) {
    if (decision.front[i]) front.push_back(c.rows[i].Name());
  }
  Json json = {{"metric", c.metric.name},
               {"best_bounded", best && best->bounded ? Json(best->Name()) : Json()},
               {"recommended", best ? Json(decision.recommended) : Json()},
               {"reasons", decision.reasons},
               {"pareto_front", std::move(front)}};
  if (!c.efficiency.empty()) json["efficiency"] = bench::EfficiencyJson(c.efficiency);
  for (const CompareRow& row : c.rows) {
    Json r = row.result;
    if (!row.failed.empty()) {
      r = {{"failed", row.failed}};
    } else {
      r["tokens_per_s"] = row.TokensPerSecond(), r["peak_bytes"] = int64_t(row.PeakBytes());
    }
    for (const DecodePoint& p : row.decode) {
      r["decode"].push_back({{"position", p.position},
                             {"ms_per_token", p.milliseconds},
                             {"state_bytes", p.state_bytes}});
    }
    if (row.many > 0) {
      r["decode_speed"] = {
          {"gb_per_s", row.limits.gb_per_s},
          {"gflops", row.limits.gflops},
          {"weight_bytes", row.limits.weight_bytes},
          {"of_memory_limit", row.limits.MemoryMilliseconds() / row.decode.front().milliseconds},
          {"sequences", row.many},
          {"tokens_per_s", 1e3 * double(row.many) / row.many_milliseconds},
          {"of_fma_peak", row.limits.PeakMilliseconds(row.many) / row.many_milliseconds}};
    }
    if (!row.unmeasured.empty()) r["unmeasured"] = row.unmeasured;
    if (row.length > 0) r["length"] = row.length;
    if (c.seeds > 1) {
      r["mean"] = c.Value(row);
      r["half_width_95"] = c.HalfWidth(row);
      if (r.contains(kLongBlocks)) {
        r[kLongBlocks]["mean"] = c.Value(row, kLongBlocks);
        r[kLongBlocks]["half_width_95"] = c.HalfWidth(row, kLongBlocks);
      }
      r["seeds"] = row.results;
      r["failures"] = row.failures;
    }
    json["mechanisms"][row.Name()] = r;
  }
  return json;
}

namespace {

void AddDecision(const Comparison& c, HtmlReport* report) {
  const Decision decision = Decide(c);
  if (decision.recommended.empty()) return;
  report->Heading("Recommended: " + decision.recommended);
  for (const std::string& reason : decision.reasons) report->Paragraph(reason);
  for (const std::string& svg : DecisionPictures(c))
    report->Svg(svg,
                "The line joins those that no other beats in both. What lies off it is beaten by a "
                "mechanism on it.");
}

// Accuracy by how much is to be remembered, of tasks that measure it.
void AddCapacity(const Comparison& c, HtmlReport* report) {
  LineChart chart{"Capacity", "", c.metric.label, {}};
  for (const CompareRow& row : c.rows) {
    if (!row.failed.empty() || !row.result.at("test").contains("capacity")) continue;
    const Json& capacity = row.result["test"]["capacity"];
    chart.x_label = capacity["x"].get<std::string>();
    Series series{row.mechanism, {}, {}};
    for (const Json& point : capacity["points"]) {
      series.x.push_back(point[0].get<double>());
      series.y.push_back(point[1].get<double>());
    }
    chart.series.push_back(std::move(series));
  }
  if (chart.series.empty()) return;
  chart.log_x = true;
  chart.y_from_zero = true;
  report->Heading("What each memory holds")
      .Svg(RenderSvg(chart),
           "Where a curve falls, the memory is full. Exact softmax, which keeps every token, is "
           "the ceiling for a model of this size and training.");
}

}  // namespace

// How near decoding comes to what the machine can do.
HtmlTable DecodingTable(const Comparison& c) {
  const auto share = [](double x) { return Fixed(100 * x, 0) + " %"; };
  HtmlTable table;
  table.header = {"mechanism", "tokens/s, one sequence", "of the memory limit"};
  table.caption =
      "Memory limit: the time to read all weights at the bandwidth measured here. Weights that fit "
      "the caches may beat it.";
  for (const CompareRow& row : c.rows) {
    if (row.many == 0) continue;
    if (table.header.size() == 3) {
      table.header.push_back(StrCat("tokens/s, ", row.many, " sequences"));
      table.header.push_back("of the multiply-add peak");
    }
    const double one = row.decode.front().milliseconds, many = row.many_milliseconds;
    table.rows.push_back({row.Name(), Thousands(std::llround(1e3 / one)),
                          share(row.limits.MemoryMilliseconds() / one),
                          Thousands(std::llround(1e3 * double(row.many) / many)),
                          share(row.limits.PeakMilliseconds(row.many) / many)});
  }
  return table;
}

void WriteReport(const Comparison& c, const std::string& path) {
  HtmlReport report("Attention mechanisms compared",
                    StrCat(c.data, ", ", Trimmed(c.seconds, 3), " s each"));
  report.Table(CompareTable(c));
  for (const std::string& line : Fairness(c)) report.Paragraph(line);
  AddDecision(c, &report);
  AddCapacity(c, &report);
  if (!c.efficiency.empty()) {
    report.Heading("Efficiency length")
        .Table(bench::EfficiencyTable(c.efficiency))
        .Paragraph(
            "From which length on a mechanism takes less time, and less memory, than exact "
            "softmax: its attention alone, with the heads and widths of these models, at lengths "
            "that double. '1,024 to 2,048': less at 2,048 and at every longer length, not at "
            "1,024. Memory is the peak of one run beyond the inputs; of decoding, the state.");
  }
  LineChart valid{"Learning curve", "seconds of training", c.metric.label + " (validation)", {}};
  // Of predicted numbers the mean square, else a likelihood.
  const bool numbers = c.metric.name.ends_with("rmse");
  LineChart loss{"Training loss", "step", numbers ? "loss" : "nats", {}};
  LineChart time{"Decoding time", "tokens before", "ms per token", {}};
  LineChart state{"Decoding state", "tokens before", "bytes", {}};
  state.log_y = true;
  time.y_from_zero = true;
  for (const CompareRow& row : c.rows) {
    Series t{row.Name(), {}, {}}, s = t;
    loss.series.push_back(RunCurve(row.folder, row.Name(), "step", "step", "loss"));
    valid.series.push_back(RunCurve(row.folder, row.Name(), "valid", "seconds", c.metric.name));
    for (const DecodePoint& p : row.decode) {
      t.x.push_back(double(p.position));
      t.y.push_back(p.milliseconds);
      s.x.push_back(double(p.position));
      s.y.push_back(double(p.state_bytes));
    }
    time.series.push_back(t);
    state.series.push_back(s);
  }
  if (c.lengths.size() > 1) {
    report.Heading("Length")
        .Svg(RenderSvg(LengthChart(c, true)))
        .Svg(RenderSvg(LengthChart(c, false)));
  }
  report.Heading("Learning").Svg(RenderSvg(valid)).Svg(RenderSvg(loss));
  if (Decodes(c)) {
    report.Heading("Decoding").Svg(RenderSvg(time)).Svg(RenderSvg(state));
    if (const HtmlTable speed = DecodingTable(c); !speed.rows.empty()) report.Table(speed);
  }
  if (const CompareRow* best = c.Best(); best && best->result.at("test").contains("confusion")) {
    const Json& test = best->result.at("test");
    HtmlTable table;
    table.caption = "Rows: what was expected; columns: what the model said";
    table.header = {""};
    for (const Json& name : test["classes"]) table.header.push_back(name.get<std::string>());
    for (size_t i = 0; i < test["classes"].size(); ++i) {
      std::vector<std::string> cells = {test["classes"][i].get<std::string>()};
      for (const Json& n : test["confusion"][i]) cells.push_back(Thousands(n.get<int64_t>()));
      table.rows.push_back(std::move(cells));
    }
    report.Heading("Confusion matrix of " + best->Name()).Table(table);
  }
  if (!c.sample.empty()) report.Heading(c.sample_title).Preformatted(c.sample);
  Experiment copy = c.experiment;
  report.Details("The experiment", ExperimentToml(copy));
  report.Write(path);
}

}  // namespace cistern::cli
