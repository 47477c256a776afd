// cistern eval: how good a trained model is, on the data of its task or on a file.
#include <algorithm>
#include <cstdio>

#include "cistern/base/error.h"
#include "cistern/base/format.h"
#include "cistern/base/interrupt.h"
#include "cistern/base/progress.h"
#include "cistern/cli/eval_command.h"
#include "cistern/io/json_text.h"
#include "cistern/tasks/evaluate.h"

namespace cistern::cli {

Split ParseSplit(const std::string& name) {
  return name == "train" ? Split::kTrain : name == "valid" ? Split::kValid : Split::kTest;
}

namespace {

void Print(const EvalCommand& c, const Json& result) {
  if (c.common.json) {
    std::printf("%s\n", JsonLine(result).c_str());
    return;
  }
  for (const auto& [key, value] : result.items()) {
    if (key == "confusion" || key == "classes") continue;
    const std::string text = value.is_number_float() ? Fixed(value.get<double>(), 4)
                             : value.is_string()     ? value.get<std::string>()
                                                     : value.dump();
    std::printf("%-16s %s\n", key.c_str(), text.c_str());
  }
}

// Rows are what was expected, columns what the model said.
void PrintConfusion(const Json& result) {
  if (!result.contains("confusion")) return;
  size_t width = 8;
  for (const Json& name : result["classes"])
    width = std::max(width, name.get<std::string>().size() + 2);
  std::printf("\n%-*s predicted\n%-*s", int(width), "expected", int(width), "");
  for (const Json& name : result["classes"])
    std::printf("%*s", int(width), name.get<std::string>().c_str());
  std::printf("\n");
  for (size_t i = 0; i < result["classes"].size(); ++i) {
    std::printf("%-*s", int(width), result["classes"][i].get<std::string>().c_str());
    for (const Json& n : result["confusion"][i])
      std::printf("%*lld", int(width), static_cast<long long>(n.get<int64_t>()));
    std::printf("\n");
  }
}

int EvaluateRows(const EvalCommand& c, const RunFolder& run) {
  if (c.data.empty() && !run.recorded) {
    FailUsage(c.folder,
              " has no experiment.json, which would name the run's own data; give a file");
  }
  if (c.data.empty()) run.Prepare();
  const auto model = LoadRunModel(run, c.common.dtype);
  EvalOptions options;
  options.read = {c.batch, c.max_tokens, c.length, c.context};
  if (c.context >= 0 && run.options.kind != "lm")
    FailUsage("--context is of language models' blocks of text, and ", c.folder, " is of the task ",
              run.options.kind, "; leave it out");
  if (c.length == 0 && !run.recorded) {
    const LayerStack reads = run.config.Stack(run.config.info().forms[0]);
    options.read.length = std::min<int64_t>(reads.options().max_length, 1024);
  }
  options.interrupted = &Interrupted();
  const auto reader = c.data.empty() ? run.task->Read(ParseSplit(c.split), options.read)
                                     : run.task->ReadFile(c.data, true, options.read);
  if (c.length > 0 && !reader->Facts().contains("length"))
    FailUsage("--length is of blocks of text, and the rows of the task ", run.options.kind,
              " have lengths of their own; leave it out");
  ProgressBar bar({.total = reader->total(), .label = "eval", .unit = reader->unit()});
  options.progress = [&](const BatchReader& r) { bar.Update(r.done()); };
  const Evaluation done = Evaluate(*run.task, *model, *reader, options);
  bar.Finish();
  NoteSkipped(*reader, c.data.empty() ? c.split : c.data);
  Json result = {{"task", run.options.kind}};
  result["data"] = c.data.empty() ? c.split : c.data;
  if (const std::string how = run.task->SplitSummary(); c.data.empty() && !how.empty())
    result["split"] = how;
  result.update(reader->Facts());
  if (reader->skipped() > 0) result["skipped_rows"] = reader->skipped();
  if (done.complete && done.rows == 0) Fail(result.value("data", ""), ": no row to measure");
  if (done.rows > 0) result.update(run.task->Metrics(done.score));
  if (!done.complete) result["interrupted"] = true;
  Print(c, result);
  if (!c.common.json) PrintConfusion(result);
  return done.complete ? 0 : 130;
}

// Options that would change nothing.
void RefuseIdle(const CLI::App& command, const EvalCommand& c) {
  const auto given = [&](const char* option) { return command.count(option) > 0; };
  for (const char* option : {"--length", "--batch", "--context"}) {
    if (c.by_position && given(option))
      FailUsage("--by-position carries the state on, without blocks; leave out ", option);
  }
  for (const char* option : {"--rows", "--buckets"}) {
    if (!c.by_position && given(option))
      FailUsage(option, " is of the table of --by-position; give both");
  }
  if (!c.data.empty() && given("--split"))
    FailUsage("--split is of the model's own data, and ", c.data,
              " is measured whole; give one of the two");
}

int RunEval(const CLI::App& command, const EvalCommand& c) {
  ApplyCommon(c.common);
  if (c.max_tokens < 0) FailUsage("--max-tokens must be 0 (all) or above, got ", c.max_tokens);
  if (c.length < 0) FailUsage("--length must be 1 or above, got ", c.length);
  if (c.context < -1) FailUsage("--context must be 0 or above, got ", c.context);
  if (c.batch < 0) FailUsage("--batch must be 0 (the task's choice) or above, got ", c.batch);
  if (c.rows < 1) FailUsage("--rows must be 1 or above, got ", c.rows);
  if (c.buckets < 0) FailUsage("--buckets must be 0 or above, got ", c.buckets);
  if (!c.svg.empty() && !c.by_position)
    FailUsage("--svg draws the table of --by-position; give both");
  RefuseIdle(command, c);
  if (!c.svg.empty()) CheckWritable(c.svg);
  const RunFolder run = OpenRun(c.folder, c.skip_bad_rows, c.set);
  return c.by_position ? EvaluatePositions(c, run) : EvaluateRows(c, run);
}

}  // namespace

void AddEval(CLI::App& app, Run& run) {
  auto c = std::make_shared<EvalCommand>();
  CLI::App* sub =
      app.add_subcommand("eval", "measure a trained model on its own data or on a file");
  sub->add_option("model", c->folder, "folder of a trained model")->required()->type_name("FOLDER");
  sub->add_option("data", c->data,
                  "a file of the task's kind, such as a text; none: the data it was trained on")
      ->type_name("DATA");
  AddSkipBadRows(*sub, &c->skip_bad_rows);
  AddSetOfUse(*sub, &c->set);
  sub->add_option("--split", c->split, "which part of the model's own data")
      ->check(CLI::IsMember({"train", "valid", "test"}))
      ->capture_default_str();
  sub->add_option("--length", c->length,
                  "tokens of a block of text, each from the empty state; 0: as in training")
      ->capture_default_str();
  sub->add_option("--context", c->context,
                  "of them read and not measured, so that each measured token has at least so many "
                  "before it; -1: as task.lm.context says");
  sub->add_option("--max-tokens", c->max_tokens,
                  "stop after N tokens; of a split, in rows spread evenly over it (of a text, the "
                  "first rows of each of its blocks; `part` of the result says which); 0: all rows")
      ->capture_default_str();
  sub->add_option("--batch", c->batch, "rows at a time; 0: the task's choice")
      ->capture_default_str();
  sub->add_flag(
      "--by-position", c->by_position,
      "bits per byte against position, with the state carried far beyond the training length");
  sub->add_option("--rows", c->rows, "--by-position: starting points, evenly spread over the text")
      ->capture_default_str();
  sub->add_option("--buckets", c->buckets,
                  "--by-position: N equal buckets; 0: each twice as long as the previous one")
      ->capture_default_str();
  sub->add_option("--svg", c->svg, "--by-position: also draw it")->type_name("FILE");
  AddCommon(*sub, c->common);
  AddDtype(*sub, c->common, Dtypes::kExact);
  AddDevice(*sub, c->common);
  sub->footer(
      "Examples:\n"
      "  cistern eval runs/kjv/latte                             the test split, in blocks of the "
      "training length\n"
      "  cistern eval runs/kjv/latte my.txt --json               any text, also one the model "
      "never saw\n"
      "  cistern eval runs/kjv/latte --by-position --rows 1      does the model still gain from a "
      "longer past?\n"
      "  cistern eval runs/wiki --context 480                    each token with at least 480 "
      "before "
      "it, in its block (P003)\n"
      "\nBlocks of length + 1 tokens begin at every multiple of the length, without carried "
      "context, so that every token but the first is\n"
      "predicted once; with --context N at every multiple of length - N. Bits per byte divide by "
      "the bytes of the predicted tokens, so they compare "
      "across tokenizers.");
  sub->callback([c, sub, &run] { run = [c, sub] { return RunEval(*sub, *c); }; });
}

}  // namespace cistern::cli
