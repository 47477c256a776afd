// cistern analyze: what can be seen inside a trained model, on any data that it takes.
#include <algorithm>
#include <cstdio>
#include <exception>
#include <filesystem>

#include "cistern/analyses/analysis.h"
#include "cistern/base/error.h"
#include "cistern/base/terminal.h"
#include "cistern/cli/analysis_log.h"
#include "cistern/cli/analysis_rows.h"
#include "cistern/cli/child_run.h"
#include "cistern/cli/command.h"
#include "cistern/data/made_folder.h"
#include "cistern/io/atomic_file.h"
#include "cistern/io/checked_json.h"
#include "cistern/io/file_lock.h"
#include "cistern/io/html_report.h"
#include "cistern/io/json_text.h"

namespace cistern::cli {
namespace {

struct AnalyzeCommand : AnalysisRows {
  Common common;
  std::string folder, out;
  std::vector<std::string> beside, of, set;
  bool list = false;
};

constexpr const char* kIndex = "analyze.json";  // says that a folder is an analysis' own
constexpr const char* kLock = "lock";

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
std::vector<const AnalysisInfo*> Wanted(const AnalyzeCommand& c, const std::string& folder,
                                        const ModelConfig& config) {
  std::vector<const AnalysisInfo*> wanted;
  std::string refusals;
  for (const std::string& name : c.of) {
    const AnalysisInfo& info = FindAnalysis(name);
    const std::string refusal = info.refusal(config);
    if (!refusal.empty()) FailUsage(name, " does not fit ", folder, ": ", refusal);
    if (std::find(wanted.begin(), wanted.end(), &info) != wanted.end())
      FailUsage("--of names ", name, " twice");
    wanted.push_back(&info);
  }
  if (!c.of.empty()) return wanted;
  for (const AnalysisInfo* info : Analyses()) {
    const std::string refusal = info->refusal(config);
    // Figures that are there to be compared with need another model.
    if (refusal.empty() && c.beside.empty() && info->for_comparison &&
        info->for_comparison(config)) {
      refusals += "\n  " + info->name +
                  ": nothing but what other models are compared with; name it "
                  "with --of";
      continue;
    }
    if (refusal.empty()) wanted.push_back(info);
    refusals += refusal.empty() ? "" : "\n  " + info->name + ": " + refusal;
  }
  if (wanted.empty()) FailUsage("no analysis fits ", folder, refusals);
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
  const bool earlier = std::filesystem::exists(out + "/" + kIndex, ignored);
  RefuseForeignFiles(out, [&](const std::string& name) { return earlier || name == kLock; });
}

// The figures that an earlier analysis of the folder lists, and the folders of its models: those of
// other rows or models must not lie among the new ones. Error, before any work, where the list
// cannot be read.
struct Earlier {
  std::vector<std::filesystem::path> files, folders;
  void Remove() const {
    std::error_code ignored;
    for (const auto& file : files) std::filesystem::remove(file, ignored);
    for (const auto& folder : folders)  // where nothing else is in it
      std::filesystem::remove(folder, ignored);
  }
};
Earlier EarlierFigures(const std::string& out) {
  Earlier earlier;
  std::error_code ignored;
  const std::string path = out + "/" + kIndex;
  if (!std::filesystem::exists(path, ignored)) return earlier;
  const Json index = ReadCheckedJson(path);
  const auto check = [&](bool right) {
    CISTERN_CHECK(right, path, " is not what an analysis writes; remove it, or name another --out");
  };
  // Names of files in the folder itself: nothing outside is ever removed.
  const auto is_name = [](const std::filesystem::path& p) {
    return p.has_filename() && p == p.filename() && p != "." && p != "..";
  };
  const auto object = [&](const Json& of, const char* key) {
    Json value = of.contains(key) ? of[key] : Json::object();
    check(value.is_object());
    return value;
  };
  const auto take = [&](const std::filesystem::path& folder, const Json& analyses) {
    for (const auto& entry : analyses.items()) {
      check(entry.value().is_object() && entry.value().contains("files") &&
            entry.value()["files"].is_array());
      for (const Json& file : entry.value()["files"]) {
        check(file.is_string() && is_name(file.get<std::string>()));
        earlier.files.push_back(folder / file.get<std::string>());
      }
    }
  };
  check(index.is_object());
  take(out, object(index, "analyses"));
  take(out, object(index, "together"));
  for (const Json models = object(index, "models"); const auto& model : models.items()) {
    check(is_name(model.key()) && model.value().is_object());
    earlier.folders.push_back(std::filesystem::path(out) / model.key());
    take(earlier.folders.back(), object(model.value(), "analyses"));
  }
  return earlier;
}

// One model with what was found in it.
struct Inside {
  Inside() = default;
  Inside(Inside&&) = default;  // analyses have one owner
  std::string folder, label;   // label: of its own folder among several; empty: the only one
  std::vector<const AnalysisInfo*> wanted;
  std::vector<Json> options;
  std::vector<std::unique_ptr<Analysis>> analyses;
  std::vector<Figures> figures;
  std::vector<std::string> left_out;  // why one of `wanted` shows nothing; empty: it does
  std::exception_ptr error;           // of the last one that was left out
  std::string summary;
  RowsDone done;

  bool shows() const {
    return std::find(left_out.begin(), left_out.end(), std::string()) != left_out.end();
  }
};

// Whether an Error of an analysis costs that one alone: where all that fit are looked at. What was
// asked for by its name, or a setting of it that is wrong, is the whole command's.
bool LeavesOut(const AnalyzeCommand& c, const AnalysisInfo& info, const Error& error) {
  if (!c.of.empty()) return false;
  const bool set = std::any_of(c.set.begin(), c.set.end(), [&](const std::string& assignment) {
    return assignment.starts_with(info.name + ".");
  });
  return !set || dynamic_cast<const UsageError*>(&error) == nullptr;
}

// Reads the model and checks that all fits, before any work.
struct Opened {
  RunFolder run;
  Inside inside;
};
Opened Open(const AnalyzeCommand& c, const std::string& folder) {
  Opened o;
  o.run = OpenRun(folder);
  o.inside.folder = folder;
  o.inside.wanted = Wanted(c, folder, o.run.config);
  o.inside.options = OptionsOf(c, o.inside.wanted);
  o.inside.summary = o.run.config.Summary();
  if (c.data.empty() && !o.run.recorded)
    FailUsage(folder, " has no experiment.json, which would name the run's own data; give a file");
  return o;
}

void Look(const AnalyzeCommand& c, Opened* o) {
  if (c.data.empty()) o->run.Prepare();
  const AnalysisContext context = ContextOf(o->run, c.common.dtype, c.common.seed);
  Inside& in = o->inside;
  const size_t count = in.wanted.size();
  in.analyses.resize(count), in.figures.resize(count), in.left_out.resize(count);
  const LeaveOut leave_out = [&](size_t i, const Error& e) {
    if (!LeavesOut(c, *in.wanted[i], e)) return false;
    in.left_out[i] = e.what();
    in.error = std::current_exception();
    Note(StrCat(in.wanted[i]->name, in.label.empty() ? "" : " of " + in.label,
                " is left out: ", e.what()));
    return true;
  };
  const auto attempt = [&](size_t i, const auto& work) {
    try {
      work();
    } catch (const Error& e) {
      if (!leave_out(i, e)) throw;
    }
  };
  for (size_t i = 0; i < count; ++i)
    attempt(i, [&] { in.analyses[i] = in.wanted[i]->make(in.options[i], context); });
  in.done = AddRows(c, o->run, context, in.analyses, leave_out);
  if (in.done.rows == 0 && in.shows()) {
    if (in.done.complete) Fail("the data has no rows");
    return;
  }
  for (size_t i = 0; i < count; ++i) {
    if (in.left_out[i].empty()) attempt(i, [&] { in.figures[i] = in.analyses[i]->Report(); });
  }
}

// Names for folders beside each other: the last part of each path, with its number where two have
// the same.
void Label(std::vector<Opened>* all) {
  if (all->size() == 1) return;
  for (size_t i = 0; i < all->size(); ++i) {
    std::filesystem::path path((*all)[i].inside.folder);
    if (!path.has_filename()) path = path.parent_path();
    std::string label = path.filename().string();
    for (size_t j = 0; j < i; ++j) {
      if ((*all)[j].inside.label == label) label += StrCat("-", i + 1);
    }
    (*all)[i].inside.label = label;
  }
}

// What the training of a folder ended in (ComparedModel::result).
Json ResultOf(const RunFolder& run) {
  if (!run.recorded) return Json::object();
  const Metric& metric = run.task->metric();
  const Series test = RunCurve(run.folder, "", "test", metric.name, metric.name),
               valid = RunCurve(run.folder, "", "valid", "step", metric.name);
  Json result = {{"label", metric.label},
                 {"lower_is_better", metric.lower_is_better},
                 {"steps", valid.x},
                 {"values", valid.y}};
  if (!test.y.empty()) {
    result["value"] = test.y.back();
  } else if (!valid.y.empty()) {
    result["value"] = valid.y.back();
  }
  return result;
}

// What an analysis says of all models together; no parts where it has nothing.
Figures Together(const AnalysisInfo& info, const std::vector<Opened>& all) {
  std::vector<ComparedModel> models;
  for (const Opened& o : all) {
    for (size_t i = 0; i < o.inside.wanted.size(); ++i) {
      if (o.inside.wanted[i] == &info && o.inside.left_out[i].empty())
        models.push_back(
            {o.inside.label, o.inside.analyses[i].get(), &o.run.config, ResultOf(o.run)});
    }
  }
  return info.compare && models.size() > 1 ? info.compare(models) : Figures();
}

// What the command leaves: the page, the figures beside it, their list, and what is printed.
class Output {
 public:
  // first: a model that shows something, whose rows are named; complete: no model was interrupted.
  Output(const AnalyzeCommand& c, const std::vector<Opened>& all, const Inside& first,
         bool complete);
  // One analysis of each model that it looked at, one after the other, then of all together.
  void Add(const AnalysisInfo& info);
  void Finish();

 private:
  // With the figures that are there by now.
  void WriteIndex(bool complete);
  void Heading(const AnalysisInfo& info, const std::string& of);
  void AddModel(const AnalysisInfo& info, const Inside& in, size_t i);  // in.wanted[i] is `info`
  std::vector<std::string> WriteModel(const AnalysisInfo& info, const Inside& in, size_t i);
  void AddTogether(const AnalysisInfo& info);
  // As a part of the results, or in words.
  void Print(const AnalysisInfo& info, const std::string& of, const Figures& figures, Json* part);

  const AnalyzeCommand& c_;
  const std::vector<Opened>& all_;
  HtmlReport page_;
  Json index_, results_ = Json::object();
  bool complete_;
  bool headed_ = false;  // the page has the title of the analysis
};

std::string DataOf(const AnalyzeCommand& c) {
  std::string data = c.data.empty() ? "its own data, " + c.split : "";
  for (const std::string& path : c.data) data += (data.empty() ? "" : ", ") + path;
  return data;
}

std::string TitleOf(const AnalyzeCommand& c) {
  std::string title = "Inside " + c.folder;
  for (const std::string& folder : c.beside) title += ", " + folder;
  return title;
}

Output::Output(const AnalyzeCommand& c, const std::vector<Opened>& all, const Inside& first,
               bool complete)
    : c_(c),
      all_(all),
      page_(TitleOf(c),
            StrCat(first.summary, all.size() > 1 ? " and others" : "", "; ", first.done.rows,
                   " rows of ", DataOf(c), complete ? "" : ", then interrupted")),
      index_({{"model", c.folder},
              {"data", DataOf(c)},
              {"rows", first.done.rows},
              {"complete", complete},
              {"dtype", c.common.dtype}}),
      complete_(complete) {
  index_.update(first.done.facts);
  WriteIndex(false);  // before the first figure: where one cannot be written, the folder is ours
}

void Output::WriteIndex(bool complete) {
  index_["complete"] = complete;
  WriteCheckedJson(c_.out + "/" + kIndex, index_);
}

void Output::Heading(const AnalysisInfo& info, const std::string& of) {
  if (!headed_) page_.Heading(info.title).Paragraph(info.summary);
  headed_ = true;
  if (!of.empty()) page_.Heading(info.title + ": " + of);
}

void Output::Print(const AnalysisInfo& info, const std::string& of, const Figures& figures,
                   Json* part) {
  if (c_.common.json) {
    (*part)[info.name] = figures.ToJson();
  } else {
    std::printf("%s%s\n%s\n", info.title.c_str(), of.empty() ? "" : (": " + of).c_str(),
                figures.Plain().c_str());
  }
}

void Output::Add(const AnalysisInfo& info) {
  headed_ = false;
  for (const Opened& o : all_) {
    for (size_t i = 0; i < o.inside.wanted.size(); ++i) {
      if (o.inside.wanted[i] == &info) AddModel(info, o.inside, i);
    }
  }
  AddTogether(info);
  WriteIndex(false);
}

void Output::AddModel(const AnalysisInfo& info, const Inside& in, size_t i) {
  Heading(info, in.label);
  Json& of_model = in.label.empty() ? index_ : index_["models"][in.label];
  if (!in.label.empty()) of_model["model"] = in.folder, of_model["rows"] = in.done.rows;
  if (!in.left_out[i].empty()) {
    page_.Paragraph("Left out: " + in.left_out[i]);
    of_model["left_out"][info.name] = in.left_out[i];
    return;
  }
  of_model["analyses"][info.name] = {{"options", in.options[i]},
                                     {"files", WriteModel(info, in, i)}};
  Print(info, in.label, in.figures[i], in.label.empty() ? &results_ : &results_[in.label]);
}

// The figures of one model on the page and in files, with their curves over training: the names.
std::vector<std::string> Output::WriteModel(const AnalysisInfo& info, const Inside& in, size_t i) {
  const std::string folder = in.label.empty() ? c_.out : c_.out + "/" + in.label;
  EnsureDirectory(folder);
  std::vector<std::string> files = in.figures[i].Write(folder, info.name);
  in.figures[i].AddTo(page_);
  if (const Figures curves = OverTraining(in.folder, info.name); !curves.tables().empty()) {
    curves.AddTo(page_);
    for (const std::string& file : curves.Write(folder, info.name + "-log")) files.push_back(file);
  }
  return files;
}

void Output::AddTogether(const AnalysisInfo& info) {
  Figures together;
  try {
    together = Together(info, all_);
  } catch (const Error& e) {
    if (!LeavesOut(c_, info, e)) throw;
    Heading(info, "all models");
    page_.Paragraph(StrCat("Left out: ", e.what()));
    index_["left_out"][info.name] = e.what();
    Note(StrCat(info.name, " of all models together is left out: ", e.what()));
  }
  if (together.tables().empty()) return;
  Heading(info, "all models");
  together.AddTo(page_);
  index_["together"][info.name]["files"] = together.Write(c_.out, info.name + "-together");
  Print(info, "all models", together, &results_["together"]);
}

void Output::Finish() {
  const std::string report = c_.out + "/report.html";
  page_.Write(report);
  WriteIndex(complete_);
  if (c_.common.json) {
    index_["report"] = report;
    index_["results"] = std::move(results_);
    std::printf("%s\n", JsonLine(index_).c_str());
  } else {
    std::printf("report: %s\n", report.c_str());
  }
}

void Check(const CLI::App& command, const AnalyzeCommand& c) {
  if (c.folder.empty()) FailUsage("name the folder of a trained model (cistern analyze --help)");
  if (c.out.empty()) FailUsage("--out FOLDER: where the report and the figures go");
  if (c.rows < 0) FailUsage("--rows must be 0 (all) or above, got ", c.rows);
  if (c.batch < 0) FailUsage("--batch must be 0 (8 rows) or above, got ", c.batch);
  if (c.length < 0) FailUsage("--length must be 0 (as in training) or above, got ", c.length);
  if (!c.data.empty() && command.count("--split") > 0)
    FailUsage("--split is of the model's own data, and ", c.data[0],
              " is read as it is; give one of the two");
  CheckOut(c.out);
}

std::vector<Opened> OpenAll(const AnalyzeCommand& c) {
  std::vector<Opened> all;
  all.push_back(Open(c, c.folder));
  for (const std::string& folder : c.beside) all.push_back(Open(c, folder));
  Label(&all);
  return all;
}

int RunAnalyze(const CLI::App& command, const AnalyzeCommand& c) {
  if (c.list && c.common.json) FailUsage("--list prints text; leave out --json");
  if (c.list) return PrintAnalyses();
  ApplyCommon(c.common);
  Check(command, c);
  std::vector<Opened> all = OpenAll(c);
  const MadeFolder folder(c.out);
  const FileLock lock(c.out + "/" + kLock, "the analysis in " + c.out);
  const Earlier earlier = EarlierFigures(c.out);
  bool complete = true;
  for (Opened& o : all) {
    Look(c, &o);
    complete = complete && o.inside.done.complete;
    if (o.inside.done.rows == 0 && o.inside.shows()) {
      std::fprintf(stderr, "cistern: interrupted before the first rows were done\n");
      return 130;
    }
  }
  const auto shown =
      std::find_if(all.begin(), all.end(), [](const Opened& o) { return o.inside.shows(); });
  if (shown == all.end()) std::rethrow_exception(all.back().inside.error);
  lock.Check();
  earlier.Remove();
  Output output(c, all, shown->inside, complete);
  for (const AnalysisInfo* info : Analyses()) output.Add(*info);
  output.Finish();
  if (complete) return 0;
  std::fprintf(stderr, "cistern: interrupted; the figures in %s are of the %lld rows before\n",
               c.out.c_str(), static_cast<long long>(shown->inside.done.rows));
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
  sub->add_option("--beside", c->beside,
                  "another model on the same data, in the same page; may be repeated")
      ->type_name("FOLDER")
      ->take_all()
      ->allow_extra_args(false);
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
  AddDtype(*sub, c->common, Dtypes::kExact);
  AddDevice(*sub, c->common);
  sub->footer(
      "Examples:\n"
      "  cistern analyze runs/kjv/latte --out seen                     all analyses that fit, on "
      "the test split\n"
      "  cistern analyze runs/kjv/latte my.txt --of maps --out seen    the attention of each "
      "layer, "
      "on any text\n"
      "  cistern analyze runs/kjv/softmax my.txt --beside runs/kjv/latte --of maps,reach --out "
      "seen\n"
      "                                                                several models on one "
      "input\n"
      "  cistern analyze --list                                        what there is, and the "
      "options of each\n"
      "\nThe page seen/report.html needs nothing else to be read; its figures lie beside it as "
      "SVG, "
      "CSV and JSON.\n"
      "Ctrl-C ends with the figures of the rows that are done. docs/analyses.md says how to read "
      "each picture.");
  sub->callback([c, sub, &run] { run = [c, sub] { return RunAnalyze(*sub, *c); }; });
}

}  // namespace cistern::cli
