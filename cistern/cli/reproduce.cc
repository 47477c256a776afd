// cistern reproduce: a table of a paper, all of its runs, from one command.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <filesystem>
#include <map>

#include "cistern/base/error.h"
#include "cistern/base/format.h"
#include "cistern/base/hash.h"
#include "cistern/base/interrupt.h"
#include "cistern/base/parallel.h"
#include "cistern/base/progress.h"
#include "cistern/base/subprocess.h"
#include "cistern/base/terminal.h"
#include "cistern/cli/compare_report.h"
#include "cistern/cli/reproduce_report.h"
#include "cistern/io/atomic_file.h"
#include "cistern/io/checked_json.h"
#include "cistern/io/file_lock.h"
#include "cistern/kernels/isa.h"

namespace cistern::cli {
namespace {

struct ReproduceArguments {
  Common common;
  std::string table, out;
  std::vector<std::string> rows, columns, data, set;
  int64_t seeds = 0;
  bool list = false, small = false, resume = false, retry = false, estimate = false;
};

int ListTables(bool as_json) {
  Json all = Json::array();
  for (const std::string& name : PaperTableNames()) {
    const PaperTable table = ReadPaperTable(name);
    std::string columns, rows;
    for (const TableColumn& c : table.columns) columns += (columns.empty() ? "" : ", ") + c.name;
    Json row_names = Json::array(), column_names = Json::array();
    for (const TableColumn& c : table.columns) column_names.push_back(c.name);
    for (const TableRow& row : table.rows) {
      const bool runs = std::any_of(row.cells.begin(), row.cells.end(),
                                    [](const TableCell& c) { return !c.file.empty(); });
      rows += StrCat(rows.empty() ? "" : ", ", row.name, runs ? "" : " (quoted)");
      row_names.push_back(row.name);
    }
    all.push_back({{"name", name},
                   {"title", table.title},
                   {"source", table.source},
                   {"seeds", table.seeds},
                   {"columns", column_names},
                   {"rows", row_names}});
    if (!as_json)
      std::printf("%s: %s; %ld seed%s\n  columns: %s\n  rows: %s\n", name.c_str(),
                  table.title.c_str(), long(table.seeds), table.seeds == 1 ? "" : "s",
                  columns.c_str(), rows.c_str());
  }
  if (as_json) std::printf("%s\n", JsonLine(all).c_str());
  return 0;
}

// The cells of a table: files, printed figures, and what they do otherwise.
int ListCells(const Reproduction& r, bool as_json) {
  Json all = Json::array();
  for (const ReproducedCell& cell : r.cells) {
    const TableCell& of = r.table.rows[cell.row].cells[cell.column];
    all.push_back({{"cell", cell.name},
                   {"file", of.file},
                   {"published", of.published ? Json(*of.published) : Json()},
                   {"set", cell.set},
                   {"changes", cell.changes}});
    if (as_json) continue;
    std::printf(
        "%s: %s%s\n", cell.name.c_str(), of.file.c_str(),
        of.published ? StrCat(", ", r.table.source, ": ", Fixed(*of.published, 2)).c_str() : "");
    for (const std::string& change : cell.changes) std::printf("  %s\n", change.c_str());
  }
  if (as_json) std::printf("%s\n", JsonLine(all).c_str());
  return 0;
}

// What a reproduction's folder was begun with: what may not change when it is resumed. The settings
// themselves, not the files that they came from: these may have moved, and may have been edited.
Json Begun(const ReproduceArguments& a, const Reproduction& r) {
  Json cells = Json::object();
  for (const ReproducedCell& cell : r.cells) cells[cell.folder] = cell.settings;
  return {{"table", r.table.name},   {"small", a.small},          {"seed", r.first_seed},
          {"threads", NumThreads()}, {"device", a.common.device}, {"cells", std::move(cells)}};
}

std::map<std::string, std::string> SettingsIn(const Json& cell, const std::string& out) {
  std::map<std::string, std::string> settings;
  for (const auto& [key, value] : cell.items()) {
    if (!value.is_string() || key == "experiment")
      FailUsage(out,
                " was begun by an earlier version of cistern, which did not note the settings "
                "of its runs; give another --out");
    settings[key] = value.get<std::string>();
  }
  return settings;
}

// UsageError where the folder holds another reproduction. Cells may be added, and seeds.
void CheckResumed(const Json& begun, const Json& now, const std::string& out) {
  for (const char* key : {"table", "small", "seed"}) {
    if (begun.value(key, Json()) != now.at(key))
      FailUsage(out, " was begun with ", key, " ", begun.value(key, Json()).dump(), ", not ",
                now.at(key).dump(), "; give another --out");
  }
  for (const char* key : {"threads", "device"}) {
    const Json was = begun.value(key, Json()), is = now.at(key);
    if (was.is_null() || was == is) continue;  // null: an earlier version did not say it
    const auto word = [](const Json& value) {
      return value.is_string() ? value.get<std::string>() : value.dump();
    };
    FailUsage(out, " was begun with ", key, " ", word(was), ", not ", word(is),
              ": its runs could not be compared with the new ones; give --", key, " ", word(was),
              ", or another --out");
  }
  for (const auto& cell : now.at("cells").items()) {
    if (!begun.at("cells").contains(cell.key())) continue;
    std::string changed;
    for (const std::string& change : ChangedSettings(SettingsIn(begun.at("cells")[cell.key()], out),
                                                     SettingsIn(cell.value(), out)))
      changed += (changed.empty() ? "" : "; ") + change;
    if (!changed.empty())
      FailUsage(out, ": ", cell.key(), " was begun with other settings: ", changed,
                "; leave them as they were, or give another --out");
  }
}

// What is in the folder of the cells' experiments and is none of them; empty: nothing.
std::string OtherExperiment(const Reproduction& r) {
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator(r.out + "/experiments", error)) {
    const auto of = [&](const ReproducedCell& cell) {  // or what a killed process left of it
      return entry.path().string().starts_with(CellFile(r.out, cell));
    };
    if (std::none_of(r.cells.begin(), r.cells.end(), of))
      return "experiments/" + entry.path().filename().string();
  }
  return "";
}

// UsageError where the folder has something else than what a reproduction leaves that was ended
// before its record was written.
void CheckReproductionFolder(const Reproduction& r) {
  const std::string& out = r.out;
  std::error_code error, ignored;
  if (std::filesystem::exists(out + "/cost.json", ignored)) return;
  std::filesystem::directory_iterator entry(out, error), end;
  for (; !error && entry != end; entry.increment(error)) {
    const std::string name = entry->path().filename().string(),
                      other = name == "experiments" ? OtherExperiment(r) : name;
    if (name != "lock" && !other.empty() && !name.starts_with("cost.tmp-"))
      FailUsage("--out ", out, " has files of something else in it (", other,
                "); name a new folder");
  }
}

// Cells of the folder that this call leaves out stay its own.
Json MergedRecord(Json begun, const Json& now) {
  if (begun.is_null()) return now;
  for (const auto& cell : now.at("cells").items()) begun["cells"][cell.key()] = cell.value();
  return begun;
}

std::string SeedFolder(const Reproduction& r, const ReproducedCell& cell, int64_t seed) {
  return StrCat(r.out, "/", cell.folder, "/seed-", seed);
}

double SteadyNow() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// What the cost of a cell depends on, as a hash.
std::string CostKey(const ReproduceArguments& a, const ReproducedCell& cell) {
  return HexText(XxHash64(JsonLine(
      {{"settings", cell.settings}, {"threads", NumThreads()}, {"device", a.common.device}})));
}

// The estimates, of this call or of an earlier one of the same folder that would have run the same.
// False: interrupted.
bool EstimateCosts(const ReproduceArguments& a, Reproduction* r, bool quiet) {
  const std::string path = r->out + "/cost.json";
  std::error_code ignored;
  Json known = Json::object();
  if (std::filesystem::exists(path, ignored)) known = ReadCheckedJson(path);
  for (ReproducedCell& cell : r->cells) {
    const std::string key = CostKey(a, cell);
    const Json before = known.value(cell.folder, Json());
    if (before.is_object() && before.value("of", Json()) == key &&
        before.value("seconds", Json()).is_number()) {
      cell.estimate = before["seconds"].get<double>();
    } else {
      try {
        MeasureCost(r->out, a.common, &cell);
      } catch (const InterruptedRun&) {
        return false;
      }
      if (cell.unmeasured.empty()) known[cell.folder] = {{"seconds", cell.estimate}, {"of", key}};
      WriteCheckedJson(path, known);
    }
    if (quiet) continue;
    if (cell.unmeasured.empty()) {
      std::printf("  %-36s about %s a run\n", cell.name.c_str(), Seconds(cell.estimate).c_str());
    } else {
      std::printf("  %-36s not known: %s\n", cell.name.c_str(), cell.unmeasured.c_str());
    }
    std::fflush(stdout);
  }
  return true;
}

// One run, and its line.
void RunCell(const ReproduceArguments& a, Reproduction* r, ReproducedCell* cell, int64_t seed) {
  ChildSettings child;
  child.folder = SeedFolder(*r, *cell, seed);
  child.file = CellFile(r->out, *cell);
  child.set = cell->set;
  child.set.push_back(StrCat("seed=", seed));
  child.threads = a.common.threads;
  child.device = a.common.device;
  child.resume = true;  // the folder's own check has been made
  child.keep_failures = true;
  if (a.retry) {
    ChildRun before;
    std::error_code ignored;
    if (ReadChildRun(child.folder, &before) && !before.failed.empty())
      std::filesystem::remove(child.folder + "/result.json", ignored);
  }
  cell->runs.push_back(RunTraining(child));
}

std::string RunLine(const Reproduction& r, const ReproducedCell& cell, int64_t seed) {
  const ChildRun& run = cell.runs.back();
  const std::string name = StrCat(cell.name, ", seed ", seed, ": ");
  if (!run.failed.empty()) return name + (run.diverged ? "diverged: " : "failed: ") + run.failed;
  ReproducedCell alone;
  alone.runs = {run};
  const CellSummary s = Summarize(alone, r.table.metric);
  if (s.finished == 0) return name + "no " + r.table.metric;
  const auto& published = r.table.rows[cell.row].cells[cell.column].published;
  return StrCat(name, r.table.metric, " ", Fixed(s.mean, 2),
                published ? StrCat(" (", r.table.source, ": ", Fixed(*published, 2), ")") : "",
                ", ", Seconds(s.seconds), run.kept ? ", kept" : "");
}

// All runs that are not there yet, a seed of every cell before the next seed.
void RunAll(const ReproduceArguments& a, Reproduction* r, bool quiet) {
  const size_t total = r->cells.size() * size_t(r->seeds);
  double expected_left = 0, expected_done = 0, spent = 0;
  for (const ReproducedCell& cell : r->cells) expected_left += cell.estimate * double(r->seeds);
  size_t number = 0;
  for (int64_t i = 0; i < r->seeds; ++i) {
    for (ReproducedCell& cell : r->cells) {
      const double begin = SteadyNow();
      RunCell(a, r, &cell, r->first_seed + i);
      if (Interrupted()) throw InterruptedRun();
      ++number;
      expected_left -= cell.estimate;
      if (!cell.runs.back().kept) {
        spent += SteadyNow() - begin;
        expected_done += cell.estimate;
      }
      if (quiet) continue;
      const double left = expected_done > 0 ? expected_left * spent / expected_done : expected_left;
      std::printf(
          "[%zu/%zu] %s%s\n", number, total,
          Printable(RunLine(*r, cell, r->first_seed + i)).c_str(),
          number < total ? StrCat("; about ", Seconds(std::max(left, 0.0)), " left").c_str() : "");
      std::fflush(stdout);
    }
  }
}

int RunReproduce(CLI::App& command, ReproduceArguments a) {
  ApplyCommon(a.common);
  if (a.retry && !a.resume)
    FailUsage("--retry tries the failed runs of a folder again; give --resume with it");
  if (a.list && a.table.empty()) return ListTables(a.common.json);
  if (a.table.empty())
    FailUsage("name the table; cistern reproduce --list shows those that there are");
  Reproduction r;
  r.table = ReadPaperTable(a.table);
  KeepRows(&r.table, a.rows);
  KeepColumns(&r.table, a.columns);
  r.small = a.small;
  r.seeds = a.seeds > 0 ? a.seeds : a.small && !r.table.statistics ? 1 : r.table.seeds;
  r.first_seed = int64_t(a.common.seed);
  r.out = !a.out.empty() ? a.out : StrCat("runs/reproduce-", r.table.name, a.small ? "-small" : "");
  for (const std::string& s : a.set) {
    if (AssignedKey(s) == "seed")
      FailUsage("--set ", s,
                ": the runs of a cell have the seeds --seed, --seed + 1, ...; give --seed");
  }
  r.command = CommandLine(
      command, {"--out", "--resume", "--retry", "--estimate", "--list", "--json", "--quiet"});
  r.machine = StrCat(NumThreads(), NumThreads() == 1 ? " thread, " : " threads, ", ActiveIsa(),
                     ", version ", CISTERN_VERSION);
  PlanOptions plan{a.small, a.data, a.set, true};
  if (command.count("--dtype") > 0) plan.set.push_back("dtype=" + a.common.dtype);
  plan.need_data = !a.list;
  r.cells = PlanCells(r.table, plan);
  if (a.list) return ListCells(r, a.common.json);

  const std::string record = r.out + "/reproduce.json";
  std::error_code ignored;
  const bool begun = std::filesystem::exists(record, ignored);
  if (begun && !a.resume && !a.estimate)
    FailUsage(r.out, " already holds a reproduction; --resume continues it, or give another --out");
  const Json now = Begun(a, r), before = begun ? ReadCheckedJson(record) : Json();
  if (begun) {
    CheckResumed(before, now, r.out);
  } else {
    CheckReproductionFolder(r);
  }
  EnsureDirectory(r.out + "/experiments");
  const FileLock lock(r.out + "/lock", "the reproduction in " + r.out);
  RemoveLeftovers(r.out);
  SameData data;
  for (const ReproducedCell& cell : r.cells) {
    for (int64_t i = 0; i < r.seeds; ++i)
      data.Require(SeedFolder(r, cell, r.first_seed + i), cell.experiment.task);
    WriteFileAtomically(CellFile(r.out, cell), cell.text);
  }
  const bool quiet = Quiet() || a.common.json;
  if (!quiet) {
    std::printf("%s: %zu cells, %ld seed%s each: %zu runs, in %s\n", r.table.title.c_str(),
                r.cells.size(), long(r.seeds), r.seeds == 1 ? "" : "s",
                r.cells.size() * size_t(r.seeds), r.out.c_str());
    std::printf("measuring a few steps of each\n");
    std::fflush(stdout);
  }
  const auto stopped = [&] {
    std::fprintf(stderr, "cistern: interrupted; to continue: %s --out %s --resume\n",
                 r.command.c_str(), ShellWord(r.out).c_str());
    return 130;
  };
  if (!EstimateCosts(a, &r, quiet)) return stopped();
  double total = 0;
  for (const ReproducedCell& cell : r.cells) total += cell.estimate * double(r.seeds);
  if (!quiet) std::printf("about %s in all, on %s\n", Seconds(total).c_str(), r.machine.c_str());
  if (a.estimate) {
    if (a.common.json) std::printf("%s\n", JsonLine({{"seconds", total}}).c_str());
    return 0;
  }
  WriteCheckedJson(record, MergedRecord(before, now));
  try {
    RunAll(a, &r, quiet);
  } catch (const InterruptedRun&) {
    WriteReproduction(r);
    return stopped();
  } catch (const Error&) {  // a run could not be started; the others are results
    WriteReproduction(r);
    throw;
  }
  const std::string tested = WriteReproduction(r);
  const bool any = std::any_of(r.cells.begin(), r.cells.end(), [&](const ReproducedCell& cell) {
    return Summarize(cell, r.table.metric).finished > 0;
  });
  if (a.common.json) {
    std::printf("%s\n", JsonLine(ReadJsonFile(r.out + "/results.json")).c_str());
    return any ? 0 : 1;
  }
  std::printf("\n");
  PrintTable(OverviewTable(r));
  std::printf("\n");
  for (const std::string& line : Remarks(r)) std::printf("%s\n", Printable(line).c_str());
  if (!tested.empty()) std::printf("\n%s", tested.c_str());
  std::printf("\nreport: %s/report.html, for docs: %s/table.md, runs: %s/runs.csv\n", r.out.c_str(),
              r.out.c_str(), r.out.c_str());
  CISTERN_CHECK(any, "no run has finished; FOLDER/log.txt of each says why");
  return 0;
}

}  // namespace

void AddReproduce(CLI::App& app, Run& run) {
  auto a = std::make_shared<ReproduceArguments>();
  CLI::App* command = app.add_subcommand(
      "reproduce", "run a table of a paper, and print it beside the source's figures");
  command->footer(
      "Examples:\n"
      "  cistern reproduce --list\n"
      "  cistern reproduce P000-T1 --small --columns ListOps\n"
      "  cistern reproduce P000-Fig2 --small --columns Text --data imdb=aclImdb\n"
      "  cistern reproduce LRA --rows Transformer,Latte-40 --columns Pathfinder --estimate\n"
      "A table is a file in configs/tables; a path to one of your own works as well.");
  command->add_option("table", a->table, "name of a table (--list), or its file");
  command->add_flag("--list", a->list,
                    "print the tables; of one table its cells, and what is otherwise in them");
  command->add_flag("--small", a->small,
                    "the same protocol with less data, smaller models and fewer steps; the report "
                    "says what is otherwise");
  command
      ->add_option(
          "--seeds", a->seeds,
          "runs of each cell; else the table's, with --small 1 but for tables with statistics")
      ->check(CLI::Range(1, 1000));
  command->add_option("--rows", a->rows, "rows to run; none: all")->delimiter(',');
  command->add_option("--columns", a->columns, "columns to run; none: all")->delimiter(',');
  command
      ->add_option("--data", a->data,
                   "NAME=PATH of a data set, or a folder that holds data sets; may be repeated")
      ->take_all()
      ->allow_extra_args(false);
  command->add_option("--set", a->set, "KEY=VALUE for all runs; may be repeated")
      ->take_all()
      ->allow_extra_args(false);
  command->add_option("--out", a->out, "folder for the runs and the report");
  command->add_flag("--resume", a->resume,
                    "continue in --out: keeps what has ended, failed runs too, and goes on");
  command->add_flag("--retry", a->retry, "with --resume: try failed runs again");
  command->add_flag("--estimate", a->estimate, "print what it will cost, and stop");
  AddCommon(*command, a->common);
  AddDtype(*command, a->common, Dtypes::kAny);
  AddDevice(*command, a->common);
  command->callback(
      [a, command, &run] { run = [a, command] { return RunReproduce(*command, *a); }; });
}

}  // namespace cistern::cli
