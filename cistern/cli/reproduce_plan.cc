#include "cistern/cli/reproduce_plan.h"

#include <algorithm>
#include <cctype>
#include <filesystem>
#include <set>

#include "cistern/base/error.h"
#include "cistern/io/atomic_file.h"
#include "cistern/io/checked_json.h"
#include "cistern/io/file_lock.h"
#include "cistern/io/scratch_folder.h"
#include "cistern/train/run_state.h"

namespace cistern::cli {
namespace {

namespace fs = std::filesystem;

constexpr int kProbeSteps = 3;
constexpr double kForwardShare = 1.0 / 3;  // of a training step: a forward pass alone

// "Luna-16, L = D" lies in luna-16-l-d.
std::string Slug(const std::string& name) {
  std::string slug;
  for (const char c : name) {
    if (std::isalnum(static_cast<unsigned char>(c))) {
      slug += char(std::tolower(static_cast<unsigned char>(c)));
    } else if (!slug.empty() && slug.back() != '-') {
      slug += '-';
    }
  }
  while (!slug.empty() && slug.back() == '-') slug.pop_back();
  return slug.empty() ? "x" : slug;
}

// Where the data sets are, by name.
class DataPlaces {
 public:
  DataPlaces(std::vector<DataSet> sets, const std::vector<std::string>& said)
      : sets_(std::move(sets)) {
    std::vector<std::string> names;
    for (const DataSet& set : sets_) names.push_back(set.name);
    for (const std::string& entry : said) {
      const size_t sign = entry.find('=');
      std::error_code ignored;
      const std::string path = sign == entry.npos ? entry : entry.substr(sign + 1);
      if (!fs::exists(path, ignored)) FailUsage("--data ", entry, ": ", path, " does not exist");
      if (sign == entry.npos) {
        folders_.push_back(path);
        continue;
      }
      const std::string name = entry.substr(0, sign);
      if (std::find(names.begin(), names.end(), name) == names.end())
        throw UsageError(UnknownName("--data: data set", name, names));
      paths_[name] = fs::absolute(path).lexically_normal().string();
    }
  }

  // Empty where it is nowhere.
  std::string Find(const std::string& name) const {
    if (const auto said = paths_.find(name); said != paths_.end()) return said->second;
    for (const std::string& folder : folders_) {
      for (const std::string& place : Of(name).places) {
        const fs::path path = fs::path(folder) / place;
        std::error_code ignored;
        if (fs::exists(path, ignored)) return fs::absolute(path).lexically_normal().string();
      }
    }
    return "";
  }

  const DataSet& Of(const std::string& name) const {
    for (const DataSet& set : sets_) {
      if (set.name == name) return set;
    }
    FailUsage("the data set ", name, " is not described beside the table");
  }

 private:
  std::vector<DataSet> sets_;
  std::vector<std::string> folders_;
  std::map<std::string, std::string> paths_;
};

void RefuseMissing(const PaperTable& table, const PlanOptions& options, const DataPlaces& places) {
  std::string missing, rest;
  std::set<std::string> named;
  for (size_t i = 0; i < table.columns.size(); ++i) {
    const TableColumn& c = table.columns[i];
    if (std::none_of(table.rows.begin(), table.rows.end(),
                     [&](const TableRow& row) { return !row.cells[i].file.empty(); }))
      continue;
    const std::string& data = options.small ? c.small_data : c.data;
    if (data.empty() || !places.Find(data).empty()) {
      rest += (rest.empty() ? "" : ",") + c.name;
      continue;
    }
    if (!named.insert(data).second) continue;
    const DataSet& set = places.Of(data);
    missing += StrCat("\n  ", c.name, ": ", set.what, "; --data ", data, "=PATH");
    for (const std::string& place : set.places)
      missing += StrCat(place == set.places.front() ? ", or --data FOLDER with " : " or ",
                        "FOLDER/", place);
  }
  if (missing.empty()) return;
  FailUsage(table.name, " needs data that are not at hand:", missing,
            rest.empty() ? "" : "\nwithout them: --columns " + rest);
}

// Every number and text of a tree, by its dotted key.
void Flatten(const Json& tree, const std::string& prefix, std::map<std::string, std::string>* all) {
  if (tree.is_object() && !tree.empty()) {
    for (const auto& entry : tree.items())
      Flatten(entry.value(), prefix.empty() ? entry.key() : prefix + "." + entry.key(), all);
    return;
  }
  (*all)[prefix] = tree.is_string() ? tree.get<std::string>() : tree.dump();
}

// What a run does, by its keys, but for its seed, where its data lie and what the source printed.
std::map<std::string, std::string> SettingsOf(Experiment experiment) {
  std::map<std::string, std::string> all;
  Flatten(experiment.Write(), "", &all);
  std::erase_if(all, [](const auto& entry) {
    const std::string& key = entry.first;
    return key == "seed" || key.starts_with("published.") || IsPlaceOfData(key);
  });
  return all;
}

// Removed at the end, however that comes.
struct RemovedFolder {
  std::string path;
  ~RemovedFolder() {
    std::error_code ignored;
    fs::remove_all(path, ignored);
  }
};

double MedianOf(std::vector<double> x) {
  std::sort(x.begin(), x.end());
  return x[x.size() / 2];
}

// Seconds of a run: its steps, and its evaluations.
double EstimateOf(const TrainOptions& train, const Json& record, double step_seconds,
                  double token_seconds, double row_tokens) {
  if (train.seconds > 0) return train.seconds;
  const int64_t steps = train.steps > 0 ? train.steps : 1000,
                evaluations = train.eval_every > 0
                                  ? (steps + train.eval_every - 1) / train.eval_every
                                  : std::min<int64_t>(steps, 10);
  const auto rows = [&](const char* split) {
    const Json& data = record.at("data");
    return data.contains(split) && data[split].is_number() ? data[split].get<double>() : 0;
  };
  double valid = rows("valid") * row_tokens;
  if (train.eval_tokens > 0) valid = std::min(valid, double(train.eval_tokens));
  const double evaluated =
      double(evaluations) * valid + (train.final_test ? rows("test") * row_tokens : 0);
  return double(steps) * step_seconds + evaluated * token_seconds * kForwardShare;
}

}  // namespace

std::vector<std::string> ChangedSettings(const std::map<std::string, std::string>& before,
                                         const std::map<std::string, std::string>& after) {
  std::vector<std::string> changes;
  for (const auto& [key, is] : after) {
    const auto found = before.find(key);
    const std::string was = found == before.end() ? "unset" : found->second;
    if (was != is) changes.push_back(StrCat(key, " ", was, " -> ", is));
  }
  for (const auto& [key, was] : before) {
    if (!after.contains(key)) changes.push_back(StrCat(key, " ", was, " -> unset"));
  }
  return changes;
}

std::string CellFile(const std::string& out, const ReproducedCell& cell) {
  std::string name = cell.folder;
  std::replace(name.begin(), name.end(), '/', '-');
  return StrCat(out, "/experiments/", name, ".toml");
}

std::vector<ReproducedCell> PlanCells(const PaperTable& table, const PlanOptions& options) {
  const DataPlaces places(ReadDataSets(table), options.data);
  if (options.need_data) RefuseMissing(table, options, places);
  const ScratchFolder scratch;
  const std::string copy = scratch.path() + "/experiment.toml";
  const fs::path folder = fs::absolute(table.path).parent_path().lexically_normal();
  std::vector<ReproducedCell> cells;
  std::set<std::string> folders;
  for (size_t r = 0; r < table.rows.size(); ++r) {
    const TableRow& row = table.rows[r];
    for (size_t c = 0; c < table.columns.size(); ++c) {
      const TableColumn& column = table.columns[c];
      if (row.cells[c].file.empty()) continue;
      ReproducedCell cell;
      cell.row = r;
      cell.column = c;
      cell.name = StrCat(row.name, ", ", column.name);
      cell.folder = StrCat(Slug(row.name), "/", Slug(column.name));
      if (!folders.insert(cell.folder).second)
        FailUsage(table.path, ": two cells would lie in ", cell.folder, "; give them other names");
      Json files = {row.cells[c].file};
      if (options.small) {
        if (column.small.empty())
          FailUsage(table.name, " has no small version of the column ", column.name,
                    "; leave it out with --columns, or omit --small");
        files.push_back((folder / column.small).lexically_normal().string());
      }
      Experiment published;
      ReadExperiment(published, row.cells[c].file, row.set);
      cell.set = row.set;
      if (options.small)
        cell.set.insert(cell.set.end(), row.small_set.begin(), row.small_set.end());
      const TaskInfo& task = published.task.info();
      const std::string& data = options.small ? column.small_data : column.data;
      if (!data.empty() && options.need_data)
        cell.set.push_back(
            StrCat("task.", task.name, ".", task.data, "=", AsAssigned(places.Find(data))));
      cell.set.insert(cell.set.end(), options.set.begin(), options.set.end());
      WriteFileAtomically(copy, StrCat("extends = ", files.dump(), "\n"));
      try {
        ReadExperiment(cell.experiment, copy, cell.set);
        cell.experiment.model.Validate();
        cell.experiment.train.Validate();
        cell.experiment.task.Make();
        const std::vector<Metric>& metrics = cell.experiment.task.info().metrics;
        if (std::none_of(metrics.begin(), metrics.end(),
                         [&](const Metric& m) { return m.name == table.metric; }))
          FailUsage("the task ", task.name, " has no metric ", table.metric);
      } catch (const UsageError& e) {
        FailUsage(cell.name, ": ", e.what());
      }
      cell.text = StrCat("# ", cell.name, " of ", table.name, options.small ? ", small" : "", ".\n",
                         ExperimentToml(cell.experiment));
      cell.settings = SettingsOf(cell.experiment);
      cell.changes = ChangedSettings(SettingsOf(published), cell.settings);
      if (options.small && column.small_data != column.data)
        cell.changes.push_back(StrCat("data ", column.data.empty() ? "generated" : column.data,
                                      " -> ",
                                      column.small_data.empty() ? "generated" : column.small_data));
      cells.push_back(std::move(cell));
    }
  }
  if (cells.empty())
    FailUsage("nothing of ", table.name, " is left to run: these rows are only quoted");
  return cells;
}

void MeasureCost(const std::string& out, const Common& common, ReproducedCell* cell) {
  const TrainOptions& train = cell->experiment.train;
  ChildSettings child;
  const std::string scratch = TemporaryName(out + "/cost");
  child.folder = scratch + "/" + cell->folder;
  child.file = CellFile(out, *cell);
  child.set = cell->set;
  child.threads = common.threads;
  child.device = common.device;
  child.keep_failures = true;
  for (const std::string& s :
       {StrCat("train.steps=", kProbeSteps), std::string("train.seconds=0"),
        std::string("train.log_every=1"), std::string("train.eval_every=1000000"),
        std::string("train.eval_tokens=1"), std::string("train.final_test=false")})
    child.set.push_back(s);
  if (train.schedule_steps == 0 && train.warmup >= 1) child.set.push_back("train.warmup=1");
  const RemovedFolder removed{scratch};
  const ChildRun run = RunTraining(child);
  if (!run.failed.empty()) {
    cell->unmeasured = run.failed;
  } else {
    const Series seconds = RunCurve(child.folder, "", "step", "step", "seconds"),
                 speed = RunCurve(child.folder, "", "step", "step", "tokens_per_s");
    std::vector<double> steps;
    for (size_t i = 1; i < seconds.y.size(); ++i) steps.push_back(seconds.y[i] - seconds.y[i - 1]);
    if (steps.empty() || speed.y.empty()) {
      cell->unmeasured = "the first steps left no times";
    } else {
      const double step = MedianOf(steps), tokens = MedianOf(speed.y);
      const double rows = double(train.batch * train.accumulate);
      cell->estimate = EstimateOf(train, ReadCheckedJson(child.folder + "/experiment.json"), step,
                                  1 / tokens, tokens * step / rows);
    }
  }
}

}  // namespace cistern::cli
