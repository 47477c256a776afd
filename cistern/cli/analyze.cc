// cistern analyze: what can be seen inside a trained model, on any data that it takes.
#include <algorithm>
#include <cstdio>
#include <filesystem>

#include "cistern/analyses/analysis.h"
#include "cistern/base/error.h"
#include "cistern/base/interrupt.h"
#include "cistern/base/progress.h"
#include "cistern/cli/command.h"
#include "cistern/cli/run_folder.h"
#include "cistern/io/atomic_file.h"
#include "cistern/io/html_report.h"
#include "cistern/io/json_text.h"
#include "cistern/text/tokenizer.h"

namespace cistern::cli {
namespace {

struct AnalyzeCommand {
  Common common;
  std::string folder, out, split = "test";
  std::vector<std::string> data, of, set;
  int64_t rows = 100, batch = 0, length = 0;
  bool list = false;
};

constexpr const char* kIndex = "analyze.json";  // says that a folder is an analysis' own

int PrintAnalyses() {
  for (const AnalysisInfo* info : Analyses()) {
    std::printf("%s: %s\n  %s\n  fits: %s\n", info->name.c_str(), info->title.c_str(),
                info->summary.c_str(), info->needs.c_str());
    Fields options;
    options.Group(info->name, info->options());
    std::printf("%s\n", options.Help(2).c_str());
  }
  return 0;
}

// Those that were asked for, or all that fit.
std::vector<const AnalysisInfo*> Wanted(const AnalyzeCommand& c, const ModelConfig& config) {
  std::vector<const AnalysisInfo*> wanted;
  std::string refusals;
  for (const std::string& name : c.of) {
    const AnalysisInfo& info = FindAnalysis(name);
    const std::string refusal = info.refusal(config);
    if (!refusal.empty()) FailUsage(name, " does not fit ", c.folder, ": ", refusal);
    if (std::find(wanted.begin(), wanted.end(), &info) != wanted.end())
      FailUsage("--of names ", name, " twice");
    wanted.push_back(&info);
  }
  if (!c.of.empty()) return wanted;
  for (const AnalysisInfo* info : Analyses()) {
    const std::string refusal = info->refusal(config);
    if (refusal.empty()) wanted.push_back(info);
    refusals += refusal.empty() ? "" : "\n  " + info->name + ": " + refusal;
  }
  if (wanted.empty()) FailUsage("no analysis fits ", c.folder, refusals);
  return wanted;
}

// --set NAME.KEY=VALUE of each analysis that runs, as the JSON of all its options.
std::vector<Json> OptionsOf(const AnalyzeCommand& c,
                            const std::vector<const AnalysisInfo*>& wanted) {
  Fields all;
  for (const AnalysisInfo* info : wanted) all.Group(info->name, info->options());
  for (const std::string& assignment : c.set) {
    const std::string name = assignment.substr(0, assignment.find('.'));
    const auto& known = Analyses();
    const bool runs = std::any_of(wanted.begin(), wanted.end(),
                                  [&](const AnalysisInfo* info) { return info->name == name; });
    const bool exists = std::any_of(known.begin(), known.end(),
                                    [&](const AnalysisInfo* info) { return info->name == name; });
    if (exists && !runs)
      FailUsage("--set ", assignment, ": the analysis ", name, " does not run; add it to --of");
    all.Set(assignment);
  }
  const Json written = all.Write();
  std::vector<Json> options;
  for (const AnalysisInfo* info : wanted)
    options.push_back(written.contains(info->name) ? written[info->name] : Json::object());
  return options;
}

// The folder may be new, empty, or one of an earlier analysis, whose files are replaced.
void CheckOut(const std::string& out) {
  std::error_code ignored;
  if (!std::filesystem::exists(out, ignored)) return;
  if (!std::filesystem::is_directory(out, ignored))
    FailUsage("--out ", out, " is a file; name a folder");
  if (std::filesystem::is_empty(out, ignored) ||
      std::filesystem::exists(out + "/" + kIndex, ignored))
    return;
  FailUsage("--out ", out, " has files of something else in it; name a new folder");
}

// What token ids stand for, where the model reads text.
std::function<std::string(int64_t)> TokenTexts(const RunFolder& run) {
  const std::string path = run.folder + "/tokenizer.json";
  if (!std::filesystem::exists(path)) return nullptr;
  const std::shared_ptr<const Tokenizer> tokenizer = LoadTokenizer(path);
  // Bytes may be counted from 1, with 0 for padding.
  RunFolder copy = run;
  const Json options = copy.options.Write();
  const bool shifted = options.contains(run.options.kind) &&
                       options[run.options.kind].value("byte_ids", std::string()) == "shifted";
  return [tokenizer, shifted](int64_t id) {
    id -= shifted ? 1 : 0;
    if (id < 0) return std::string("<pad>");
    if (id >= tokenizer->vocab_size()) return std::string("<mask>");
    return std::string(tokenizer->Bytes(int32_t(id)));
  };
}

struct Done {
  int64_t rows = 0;
  bool complete = true;
  Json facts = Json::object();
};

// All rows that were asked for, through the model once, into all analyses.
Done AddRows(const AnalyzeCommand& c, const RunFolder& run, const AnalysisContext& context,
             const std::vector<std::unique_ptr<Analysis>>& analyses) {
  Done done;
  const bool labelled = !run.config.info().classifies;
  ReadOptions read{c.batch > 0 ? c.batch : 8, 0, c.length};
  if (c.length == 0 && !run.recorded) read.length = std::min<int64_t>(run.config.max_length, 1024);
  if (c.rows > 0) read.rows = std::min(read.rows, c.rows);
  ProgressBar bar({.total = c.rows, .label = "analyze", .unit = "rows"});
  std::vector<std::string> paths = c.data;
  if (paths.empty()) paths.push_back("");
  for (const std::string& path : paths) {
    if (c.rows > 0 && done.rows >= c.rows) break;
    const auto reader = path.empty() ? run.task->Read(c.split == "train"   ? Split::kTrain
                                                      : c.split == "valid" ? Split::kValid
                                                                           : Split::kTest,
                                                      read)
                                     : run.task->ReadFile(path, labelled, read);
    done.facts.update(reader->Facts());
    while (c.rows == 0 || done.rows < c.rows) {
      if (Interrupted()) {
        done.complete = false;
        return done;
      }
      std::optional<Batch> batch = reader->Next();
      if (!batch) break;
      if (c.rows > 0 && done.rows + batch->rows > c.rows)
        batch = batch->Rows(0, c.rows - done.rows);
      const Batch there = batch->To(context.model->options().device());
      const at::NoGradGuard no_grad;
      const std::vector<CapturedLayer> layers = RunLayers(*context.model, there);
      for (const auto& analysis : analyses) analysis->Add(there, layers);
      done.rows += batch->rows;
      bar.Update(done.rows);
    }
  }
  bar.Finish();
  return done;
}

int RunAnalyze(const AnalyzeCommand& c) {
  if (c.list) return PrintAnalyses();
  ApplyCommon(c.common);
  if (c.folder.empty()) FailUsage("name the folder of a trained model (cistern analyze --help)");
  if (c.out.empty()) FailUsage("--out FOLDER: where the report and the figures go");
  if (c.rows < 0) FailUsage("--rows must be 0 (all) or above, got ", c.rows);
  if (c.batch < 0) FailUsage("--batch must be 0 (8 rows) or above, got ", c.batch);
  if (c.length < 0) FailUsage("--length must be 0 (as in training) or above, got ", c.length);
  CheckOut(c.out);
  const RunFolder run = OpenRun(c.folder);
  const std::vector<const AnalysisInfo*> wanted = Wanted(c, run.config);
  const std::vector<Json> options = OptionsOf(c, wanted);
  if (c.data.empty() && !run.recorded)
    FailUsage(c.folder,
              " has no experiment.json, which would name the run's own data; give a file");
  if (c.data.empty()) run.task->Prepare();

  AnalysisContext context;
  context.model = LoadRunModel(run, c.common.dtype);
  context.config = run.config;
  context.token = TokenTexts(run);
  context.seed = c.common.seed;
  std::vector<std::unique_ptr<Analysis>> analyses;
  for (size_t i = 0; i < wanted.size(); ++i)
    analyses.push_back(wanted[i]->make(options[i], context));
  const Done done = AddRows(c, run, context, analyses);
  if (done.rows == 0) {
    if (!done.complete) {
      std::fprintf(stderr, "cistern: interrupted before the first rows were done\n");
      return 130;
    }
    Fail("the data has no rows");
  }

  EnsureDirectory(c.out);
  std::string data = c.data.empty() ? "its own data, " + c.split : "";
  for (const std::string& path : c.data) data += (data.empty() ? "" : ", ") + path;
  Json index = {{"model", c.folder},
                {"data", data},
                {"rows", done.rows},
                {"complete", done.complete},
                {"dtype", c.common.dtype}};
  index.update(done.facts);
  HtmlReport page("Inside " + c.folder, StrCat(run.config.Summary(), "; ", done.rows, " rows of ",
                                               data, done.complete ? "" : ", then interrupted"));
  Json results = Json::object();
  for (size_t i = 0; i < wanted.size(); ++i) {
    const Figures figures = analyses[i]->Report();
    const std::vector<std::string> files = figures.Write(c.out, wanted[i]->name);
    index["analyses"][wanted[i]->name] = {{"options", options[i]}, {"files", files}};
    page.Heading(wanted[i]->title).Paragraph(wanted[i]->summary);
    figures.AddTo(page);
    if (c.common.json) {
      results[wanted[i]->name] = figures.ToJson();
    } else {
      std::printf("%s\n%s\n", wanted[i]->title.c_str(), figures.Plain().c_str());
    }
  }
  const std::string report = c.out + "/report.html";
  page.Write(report);
  WriteFileAtomically(c.out + "/" + kIndex, JsonFileText(index));
  if (c.common.json) {
    index["report"] = report;
    index["results"] = std::move(results);
    std::printf("%s\n", JsonLine(index).c_str());
  } else {
    std::printf("report: %s\n", report.c_str());
  }
  if (done.complete) return 0;
  std::fprintf(stderr, "cistern: interrupted; the figures in %s are of the %lld rows before\n",
               c.out.c_str(), static_cast<long long>(done.rows));
  return 130;
}

}  // namespace

void AddAnalyze(CLI::App& app, Run& run) {
  auto c = std::make_shared<AnalyzeCommand>();
  CLI::App* sub = app.add_subcommand("analyze", "see inside a trained model: figures and a report");
  sub->add_option("model", c->folder, "folder of a trained model")->type_name("FOLDER");
  sub->add_option("data", c->data,
                  "files of the task's kind, such as a text; none: the data it was trained on")
      ->type_name("DATA");
  sub->add_option("--of", c->of, "analyses, by name; none: all that fit the model")->delimiter(',');
  sub->add_option("--out", c->out, "folder for report.html, and each figure as SVG, CSV and JSON")
      ->type_name("FOLDER");
  sub->add_option("--rows", c->rows, "rows to read; 0: all")->capture_default_str();
  sub->add_option("--split", c->split, "which part of the model's own data")
      ->check(CLI::IsMember({"train", "valid", "test"}))
      ->capture_default_str();
  sub->add_option("--length", c->length, "tokens of a row of text; 0: as in training")
      ->capture_default_str();
  sub->add_option("--batch", c->batch, "rows at a time; 0: 8")->capture_default_str();
  sub->add_option("--set", c->set, "ANALYSIS.KEY=VALUE, such as maps.row=3; may be repeated")
      ->take_all()
      ->allow_extra_args(false);
  sub->add_flag("--list", c->list, "print every analysis with its options and stop");
  AddCommon(*sub, c->common);
  AddDevice(*sub, c->common);
  sub->footer(
      "Examples:\n"
      "  cistern analyze runs/kjv/latte --out seen                     all analyses that fit, on "
      "the test split\n"
      "  cistern analyze runs/kjv/latte my.txt --of maps --out seen    the attention of each "
      "layer, "
      "on any text\n"
      "  cistern analyze --list                                        what there is, and the "
      "options of each\n"
      "\nThe page seen/report.html needs nothing else to be read; its figures lie beside it as "
      "SVG, "
      "CSV and JSON.\n"
      "Ctrl-C ends with the figures of the rows that are done. docs/analyses.md says how to read "
      "each picture.");
  sub->callback([c, &run] { run = [c] { return RunAnalyze(*c); }; });
}

}  // namespace cistern::cli
