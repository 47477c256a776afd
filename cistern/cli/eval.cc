#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <iostream>
#include <memory>
#include <optional>

#include "cistern/base/error.h"
#include "cistern/base/progress.h"
#include "cistern/cli/command.h"
#include "cistern/data/token_cache.h"
#include "cistern/decode/lm_folder.h"
#include "cistern/io/atomic_file.h"
#include "cistern/io/json_text.h"
#include "cistern/io/svg_plot.h"
#include "cistern/tasks/lm_eval.h"
#include "cistern/tasks/task.h"
#include "cistern/train/trainer.h"

namespace cistern::cli {
namespace {

struct EvalCommand {
  Common common;
  std::string folder, text, split = "test", svg;
  int64_t max_tokens = 0, length = 0, batch = 8, rows = 4, buckets = 0;
  bool by_position = false;
};

// The [task] table the model was trained with.
std::optional<TaskOptions> RunTask(const std::string& folder) {
  const std::string path = folder + "/experiment.json";
  if (!std::filesystem::exists(path)) return std::nullopt;
  const Json experiment = ReadJsonFile(path);
  CISTERN_CHECK(experiment.is_object() && experiment.contains("task"), path, " has no \"task\"");
  TaskOptions options;
  options.Describe().Read(experiment["task"], path + ": task");
  return options;
}

// A token file of its own in the temporary folder, gone at the end.
class TemporaryTokens {
 public:
  TemporaryTokens(const TextSource& source, ByteRange range, const Tokenizer& tokenizer)
      : path_((std::filesystem::temp_directory_path() / StrCat("cistern-eval-", ::getpid(), ".tok"))
                  .string()) {
    ProgressBar bar({.total = range.size(), .label = "tokenise", .unit = "bytes"});
    BuildTokenFile(source, range, tokenizer, path_,
                   [&](int64_t done, int64_t) { bar.Update(done); });
    file_.emplace(path_);
    std::error_code ignored;
    std::filesystem::remove(path_, ignored);  // the mapping keeps it alive
  }
  const TokenFile& file() const { return *file_; }

 private:
  std::string path_;
  std::optional<TokenFile> file_;
};

Split ParseSplit(const std::string& name) {
  return name == "train" ? Split::kTrain : name == "valid" ? Split::kValid : Split::kTest;
}

void Print(const EvalCommand& c, const Json& result) {
  if (c.common.json) {
    std::cout << JsonLine(result) << std::endl;
    return;
  }
  for (const auto& [key, value] : result.items()) {
    char number[64];
    if (value.is_number_float()) {
      std::snprintf(number, sizeof number, "%.4f", NanUnsigned(value.get<double>()));
    } else {
      std::snprintf(number, sizeof number, "%s",
                    value.is_string() ? value.get<std::string>().c_str() : value.dump().c_str());
    }
    std::printf("%-16s %s\n", key.c_str(), number);
  }
}

// Any other kind of model: its task knows its data and its metric.
int EvaluateTask(const EvalCommand& c, const ModelConfig& config) {
  if (!c.text.empty() || c.by_position || c.length > 0) {
    FailUsage(c.folder, " holds a model of kind ", config.kind,
              ", which is measured on the data it was trained for; TEXT, --length and ",
              "--by-position are for a decoder_lm");
  }
  const auto options = RunTask(c.folder);
  CISTERN_CHECK(options, c.folder,
                " has no experiment.json, which says what the model was trained for");
  const auto task = MakeTask(*options);
  task->Prepare();
  const auto model = LoadModel(c.folder);
  if (c.common.dtype == "float64") model->to(at::kDouble);
  EvalOptions eval;
  eval.max_tokens = c.max_tokens;
  eval.interrupted = &Interrupted();
  Print(c, task->Evaluate(*model, ParseSplit(c.split), eval));
  return Interrupted() ? 130 : 0;
}

Json ScoreJson(const LmScore& s) {
  return {{"bits_per_byte", s.bits_per_byte()},
          {"nats_per_token", s.nats_per_token()},
          {"perplexity", s.perplexity()},
          {"accuracy", 100 * s.accuracy()},
          {"tokens", s.tokens},
          {"bytes", s.bytes}};
}

// A row for each bucket, with a bar between the best and the worst.
void PrintBuckets(const std::vector<PositionBucket>& buckets) {
  double low = INFINITY, high = -INFINITY;
  for (const PositionBucket& b : buckets) {
    low = std::min(low, b.score.bits_per_byte());
    high = std::max(high, b.score.bits_per_byte());
  }
  std::printf("%21s %9s %14s %12s\n", "position", "tokens", "bits per byte", "state bytes");
  for (const PositionBucket& b : buckets) {
    const double share = high > low ? (b.score.bits_per_byte() - low) / (high - low) : 0;
    std::printf("%9lld .. %8lld %9lld %14.4f %12lld  %s\n", static_cast<long long>(b.begin),
                static_cast<long long>(b.end - 1), static_cast<long long>(b.score.tokens),
                b.score.bits_per_byte(), static_cast<long long>(b.state_bytes),
                std::string(size_t(1 + std::lround(39 * share)), '#').c_str());
  }
}

void WriteSvg(const EvalCommand& c, const ModelConfig& config,
              const std::vector<PositionBucket>& buckets) {
  LineChart chart;
  chart.title = StrCat("Bits per byte by position: ", config.Summary());
  chart.x_label = "position in the text (middle of the bucket)";
  chart.y_label = "bits per byte";
  chart.log_x = c.buckets == 0;
  Series series{config.Mechanism(0), {}, {}};
  for (const PositionBucket& b : buckets) {
    series.x.push_back(0.5 * double(b.begin + b.end));
    series.y.push_back(b.score.bits_per_byte());
  }
  chart.series.push_back(std::move(series));
  WriteFileAtomically(c.svg, RenderSvg(chart));
}

void EvaluatePositions(const EvalCommand& c, const LmFolder& lm, const TokenReader& read,
                       const TokenFile& tokens, int64_t trained) {
  ByPositionOptions options;
  options.rows = c.rows;
  options.buckets = c.buckets;
  options.max_positions = c.max_tokens > 0 ? std::max<int64_t>(1, c.max_tokens / c.rows) : 0;
  options.interrupt = &Interrupted();
  ProgressBar bar({.total = tokens.size() / c.rows, .label = "eval", .unit = "positions"});
  options.progress = [&](int64_t done, int64_t) { bar.Update(done); };
  const std::vector<PositionBucket> buckets =
      EvaluateByPosition(*lm.model, read, tokens.size(), TokenBytes(*lm.tokenizer), options);
  bar.Finish();
  if (!c.svg.empty()) WriteSvg(c, lm.model->config(), buckets);
  if (!c.common.json) {
    PrintBuckets(buckets);
    if (trained > 0)
      std::printf("\ntrained on %lld tokens at a time; the state was carried on from there\n",
                  static_cast<long long>(trained));
    return;
  }
  Json rows = Json::array();
  for (const PositionBucket& b : buckets) {
    Json row = {{"begin", b.begin}, {"end", b.end}, {"state_bytes", b.state_bytes}};
    row.update(ScoreJson(b.score));
    rows.push_back(std::move(row));
  }
  std::cout << JsonLine({{"trained_length", trained}, {"positions", rows}}) << std::endl;
}

int EvaluateText(const EvalCommand& c) {
  const LmFolder lm = OpenLmFolder(c.folder, c.common.dtype);
  const auto trained = RunTask(c.folder);
  if (c.text.empty() && !trained)
    FailUsage(c.folder,
              " has no experiment.json, which would name the run's own text; give a TEXT");
  const TextSource source(c.text.empty() ? trained->text : c.text);
  const TextSplits splits = SplitText(source);
  ByteRange range{0, source.bytes()};
  if (c.text.empty())
    range = c.split == "train" ? splits.train : c.split == "valid" ? splits.valid : splits.test;
  const TemporaryTokens temporary(source, range, *lm.tokenizer);
  const TokenFile& tokens = temporary.file();
  CISTERN_CHECK(tokens.size() >= 2, source.path(), " is too short: ", tokens.size(),
                " tokens to measure; at least 2 are needed");
  const TokenReader read = [&](int64_t begin, int64_t count, int64_t* out) {
    tokens.Copy(begin, count, out);
  };
  if (c.by_position) {
    EvaluatePositions(c, lm, read, tokens, trained ? trained->length : 0);
    return Interrupted() ? 130 : 0;
  }
  LmEvalOptions options;
  options.length = c.length > 0 ? c.length
                   : trained    ? trained->length
                                : std::min<int64_t>(lm.model->config().max_length, 1024);
  options.batch = c.batch;
  options.max_tokens = c.max_tokens;
  options.interrupt = &Interrupted();
  ProgressBar bar({.total = tokens.size(), .label = "eval", .unit = "tokens"});
  options.progress = [&](int64_t done, int64_t) { bar.Update(done); };
  const LmScore score =
      EvaluateBlocks(*lm.model, read, tokens.size(), TokenBytes(*lm.tokenizer), options);
  bar.Finish();
  Json result = {{"text", source.path()}};
  if (c.text.empty()) result["split"] = c.split;
  result["length"] = options.length;
  result.update(ScoreJson(score));
  if (score.interrupted) result["interrupted"] = true;
  if (score.tokens > 0) Print(c, result);
  return Interrupted() ? 130 : 0;
}

int RunEval(const EvalCommand& c) {
  ApplyCommon(c.common);
  if (c.max_tokens < 0) FailUsage("--max-tokens must be 0 (all) or above, got ", c.max_tokens);
  if (c.length < 0) FailUsage("--length must be 1 or above, got ", c.length);
  if (c.batch < 1 || c.rows < 1) FailUsage("--batch and --rows must be 1 or above");
  if (c.buckets < 0) FailUsage("--buckets must be 0 or above, got ", c.buckets);
  if (c.common.dtype == "bfloat16")
    FailUsage("eval measures in float32 or float64, got dtype bfloat16");
  if (!c.svg.empty() && !c.by_position)
    FailUsage("--svg draws the table of --by-position; give both");
  const ModelConfig config = ReadFolderConfig(c.folder);
  return config.kind == "decoder_lm" ? EvaluateText(c) : EvaluateTask(c, config);
}

}  // namespace

void AddEval(CLI::App& app, Run& run) {
  auto c = std::make_shared<EvalCommand>();
  CLI::App* sub =
      app.add_subcommand("eval", "Measure a trained model on its own test data or on any text");
  sub->add_option("model", c->folder,
                  "model folder: config.json, model.safetensors, tokenizer.json")
      ->required()
      ->type_name("FOLDER");
  sub->add_option("text", c->text, "a text file or folder; none: the data the model was trained on")
      ->type_name("TEXT");
  sub->add_option("--split", c->split, "which part of the model's own data")
      ->check(CLI::IsMember({"train", "valid", "test"}))
      ->capture_default_str();
  sub->add_option("--length", c->length,
                  "tokens of a block, each from the empty state; 0: as in training")
      ->capture_default_str();
  sub->add_option("--max-tokens", c->max_tokens, "predict the first N tokens; 0: all")
      ->capture_default_str();
  sub->add_option("--batch", c->batch, "blocks at a time")->capture_default_str();
  sub->add_flag(
      "--by-position", c->by_position,
      "bits per byte against position, the state carried on far beyond the training length");
  sub->add_option("--rows", c->rows, "--by-position: starting points, evenly spread over the text")
      ->capture_default_str();
  sub->add_option("--buckets", c->buckets,
                  "--by-position: N equal buckets; 0: each twice as long as the one before")
      ->capture_default_str();
  sub->add_option("--svg", c->svg, "--by-position: also draw it")->type_name("FILE");
  AddCommon(*sub, c->common);
  sub->footer(
      "Examples:\n"
      "  cistern eval runs/kjv/latte                             the test split, in blocks of the "
      "training length\n"
      "  cistern eval runs/kjv/latte my.txt --json               any text, also one the model "
      "never saw\n"
      "  cistern eval runs/kjv/latte --by-position --rows 1      does the model still gain from a "
      "longer past?\n"
      "\nBlocks of length + 1 tokens begin at every multiple of the length, without carried "
      "context, so that every token but the first is\n"
      "predicted once. Bits per byte divide by the bytes of the predicted tokens, so they compare "
      "across tokenizers.");
  sub->callback([c, &run] { run = [c] { return RunEval(*c); }; });
}

}  // namespace cistern::cli
