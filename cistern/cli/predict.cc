// cistern predict: what a trained model says of each row of a file, as a stream.
#include <algorithm>
#include <cmath>
#include <cstdio>

#include "cistern/base/error.h"
#include "cistern/base/format.h"
#include "cistern/base/interrupt.h"
#include "cistern/base/progress.h"
#include "cistern/cli/command.h"
#include "cistern/cli/run_folder.h"
#include "cistern/decode/eval_scope.h"
#include "cistern/io/json_text.h"

namespace cistern::cli {
namespace {

struct PredictCommand {
  Common common;
  std::string folder, data;
  int64_t batch = 0;
  bool skip_bad_rows = false;
  std::vector<std::string> set;
};

std::string Cell(const Json& value) {
  if (value.is_number_float()) {
    // Of large numbers, such as forecasts of a counter, what follows the point as well.
    const double x = value.get<double>(), before = std::floor(std::log10(std::abs(x))) + 1;
    return Significant(x, std::isfinite(before) ? std::clamp(int(before) + 3, 6, 17) : 6);
  }
  std::string text = value.is_string() ? value.get<std::string>() : JsonLine(value);
  for (char& c : text) {
    if (c == '\t' || c == '\n' || c == '\r' || c == '\0') c = ' ';
  }
  return text;
}

// The columns of a row: nested objects (probabilities by class) become columns of their own.
void Columns(const Json& row, std::vector<std::string>* names, std::vector<std::string>* cells) {
  for (const auto& [key, value] : row.items()) {
    if (!value.is_object()) {
      names->push_back(key);
      cells->push_back(Cell(value));
      continue;
    }
    for (const auto& [inner, number] : value.items()) {
      names->push_back(key + "." + Cell(inner));
      cells->push_back(Cell(number));
    }
  }
}

void PrintLine(const std::vector<std::string>& cells) {
  std::string line;
  for (size_t i = 0; i < cells.size(); ++i) line += (i == 0 ? "" : "\t") + cells[i];
  line += '\n';
  std::fwrite(line.data(), 1, line.size(), stdout);
}

// Tabs, line ends and zero bytes of class names are shown as spaces: then two may be named alike.
void CheckNames(std::vector<std::string> names) {
  std::sort(names.begin(), names.end());
  const auto twin = std::adjacent_find(names.begin(), names.end());
  if (twin != names.end())
    FailUsage("two columns would be named '", *twin,
              "', for names of classes hold tabs, line ends or zero bytes; --json shows them as "
              "they are");
}

int RunPredict(const PredictCommand& c) {
  ApplyCommon(c.common);
  if (c.batch < 0) FailUsage("--batch must be 0 (the task's choice) or above, got ", c.batch);
  const RunFolder run = OpenRun(c.folder, c.skip_bad_rows, c.set);
  const auto reader = run.task->ReadFile(c.data, false, {c.batch, 0, 0});
  const auto model = LoadRunModel(run, c.common.dtype);
  const EvalScope scope(*model);
  ProgressBar bar({.total = reader->total(), .label = "predict", .unit = reader->unit()});
  bool header = false, any = false;
  while (const std::optional<Batch> batch = reader->Next()) {
    if (Interrupted()) break;
    bar.Clear();
    for (const Json& row : run.task->Predict(*model, batch->To(model->options().device()))) {
      any = true;
      if (c.common.json) {
        std::printf("%s\n", JsonLine(row).c_str());
        continue;
      }
      std::vector<std::string> names, cells;
      Columns(row, &names, &cells);
      if (!header) {
        CheckNames(names);
        PrintLine(names);
      }
      header = true;
      PrintLine(cells);
    }
    CISTERN_CHECK(std::fflush(stdout) == 0, "cannot write to standard output");
    bar.Update(reader->done());
  }
  bar.Finish();
  NoteSkipped(*reader, c.data);
  if (Interrupted()) return 130;
  if (!any) Fail(c.data, " has no rows", reader->skipped() > 0 ? " that could be read" : "");
  return 0;
}

}  // namespace

void AddPredict(CLI::App& app, Run& run) {
  auto c = std::make_shared<PredictCommand>();
  CLI::App* sub = app.add_subcommand("predict", "predict each row of a file with a trained model");
  sub->add_option("model", c->folder, "folder of a trained model")->required()->type_name("FOLDER");
  sub->add_option("data", c->data,
                  "a file of the task's kind; labels may be missing, but for a folder of "
                  "Pathfinder's images")
      ->required()
      ->type_name("DATA");
  sub->add_option("--batch", c->batch, "rows at a time; 0: the task's choice")
      ->capture_default_str();
  AddSkipBadRows(*sub, &c->skip_bad_rows);
  AddSetOfUse(*sub, &c->set);
  AddCommon(*sub, c->common);
  AddDtype(*sub, c->common, Dtypes::kExact);
  AddDevice(*sub, c->common);
  sub->footer(
      "Prints one line for each row, in order, as soon as it is known: tab-separated columns with "
      "a\n"
      "header, or JSON lines with --json. The file may be of any size.\n"
      "Examples:\n"
      "  cistern predict runs/listops data/listops/basic_test.tsv > predictions.tsv\n"
      "  cistern predict runs/listops data/listops/basic_test.tsv --json | head -n 3\n"
      "  cistern predict runs/translator new.en --set task.beam=5 > new.tsv");
  sub->callback([c, &run] { run = [c] { return RunPredict(*c); }; });
}

}  // namespace cistern::cli
