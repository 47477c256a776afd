// cistern eval --by-position.
#include <algorithm>
#include <cmath>
#include <cstdio>

#include "cistern/base/error.h"
#include "cistern/base/format.h"
#include "cistern/base/interrupt.h"
#include "cistern/base/progress.h"
#include "cistern/cli/eval_command.h"
#include "cistern/io/atomic_file.h"
#include "cistern/io/json_text.h"
#include "cistern/io/svg_plot.h"
#include "cistern/tasks/by_position.h"

namespace cistern::cli {
namespace {

// One bucket with the metrics of its tokens.
struct Bucket {
  PositionBucket place;
  Json metrics;
  double bits;
};

// A row for each bucket, with a bar between the best and the worst.
void PrintBuckets(const std::vector<Bucket>& buckets) {
  double low = INFINITY, high = -INFINITY;
  for (const Bucket& b : buckets) {
    low = std::min(low, b.bits);
    high = std::max(high, b.bits);
  }
  std::printf("%21s %9s %14s %12s\n", "position", "tokens", "bits per byte", "state bytes");
  for (const Bucket& b : buckets) {
    const double share = high > low ? (b.bits - low) / (high - low) : 0;
    std::printf("%9lld .. %8lld %9lld %14s %12lld  %s\n", static_cast<long long>(b.place.begin),
                static_cast<long long>(b.place.end - 1),
                static_cast<long long>(b.metrics["tokens"].get<int64_t>()),
                Fixed(b.bits, 4).c_str(), static_cast<long long>(b.place.state_bytes),
                std::string(size_t(1 + std::lround(39 * share)), '#').c_str());
  }
}

void WriteSvg(const EvalCommand& c, const ModelConfig& config, const std::vector<Bucket>& buckets) {
  LineChart chart;
  chart.title = StrCat("Bits per byte by position: ", config.Summary());
  chart.x_label = "position in the text (middle of the bucket)";
  chart.y_label = "bits per byte";
  chart.log_x = c.buckets == 0;
  Series series{config.attention[0], {}, {}};
  for (const Bucket& b : buckets) {
    series.x.push_back(0.5 * double(b.place.begin + b.place.end));
    series.y.push_back(b.bits);
  }
  chart.series.push_back(std::move(series));
  WriteFileAtomically(c.svg, RenderSvg(chart));
}

}  // namespace

int EvaluatePositions(const EvalCommand& c, const RunFolder& run) {
  if (c.data.empty()) run.Prepare();
  const auto text = c.data.empty() ? run.task->Text(ParseSplit(c.split)) : run.task->Text(c.data);
  const auto model = LoadRunModel(run, c.common.dtype);
  auto* lm = dynamic_cast<LanguageModel*>(model.get());
  if (!text || !lm) {
    FailUsage("--by-position carries a state along a text, and ", c.folder,
              " holds a model of kind ", run.config.kind, " for the task ", run.options.kind,
              "; omit it to measure the model on its own data");
  }
  ByPositionOptions options;
  options.rows = c.rows;
  options.buckets = c.buckets;
  const StartingPoints start(*text, c.rows);
  const auto begun = int64_t(start.begins.size());
  const int64_t limit = run.config.LengthLimit(Form::kCausal);
  options.max_positions =
      c.max_tokens > 0 ? std::clamp<int64_t>(c.max_tokens / begun, 1, limit) : 0;
  options.interrupt = &Interrupted();
  ProgressBar bar(
      {.total = std::min(start.positions, limit), .label = "eval", .unit = "positions"});
  options.progress = [&](int64_t done, int64_t) { bar.Update(done); };
  std::vector<Bucket> buckets;
  for (PositionBucket& b : EvaluateByPosition(*lm, *text, options)) {
    const Json metrics = run.task->Metrics(b.score);
    buckets.push_back({std::move(b), metrics, metrics["bits_per_byte"].get<double>()});
  }
  bar.Finish();
  const std::string how = c.data.empty() ? run.task->SplitSummary() : "";
  const int64_t trained = run.recorded ? text->trained_length : 0;
  if (c.common.json) {
    Json rows = Json::array();
    for (const Bucket& b : buckets) {
      Json row = {
          {"begin", b.place.begin}, {"end", b.place.end}, {"state_bytes", b.place.state_bytes}};
      row.update(b.metrics);
      rows.push_back(std::move(row));
    }
    Json line = {{"trained_length", trained}, {"positions", rows}};
    if (!how.empty()) line["split"] = how;
    std::printf("%s\n", JsonLine(line).c_str());
  } else {
    if (!how.empty()) std::printf("%s: %s\n", c.split.c_str(), how.c_str());
    PrintBuckets(buckets);
    const int64_t end = buckets.empty() ? 0 : buckets.back().place.end;
    if (trained > 0) {
      std::printf("\ntrained on %lld tokens at a time%s\n", static_cast<long long>(trained),
                  end > trained ? "; the state was carried further" : "");
    }
    if (end == limit && limit < start.positions) {
      std::printf("the positions of the model end at %lld: what follows is not measured\n",
                  static_cast<long long>(limit));
    }
    if (!text->ends.empty()) {
      std::printf(
          "each starting point stays in one of %zu blocks of the text; a file (cistern eval MODEL "
          "TEXT) goes further\n",
          text->ends.size());
    }
  }
  std::fflush(stdout);
  if (!c.svg.empty()) WriteSvg(c, run.config, buckets);
  return Interrupted() ? 130 : 0;
}

}  // namespace cistern::cli
