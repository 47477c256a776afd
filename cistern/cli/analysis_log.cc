#include "cistern/cli/analysis_log.h"

#include <filesystem>
#include <map>
#include <optional>

#include "cistern/analyses/analysis.h"
#include "cistern/base/error.h"
#include "cistern/base/terminal.h"
#include "cistern/decode/eval_scope.h"
#include "cistern/io/metrics_csv.h"
#include "cistern/train/checkpoint.h"

namespace cistern::cli {
namespace {

constexpr int64_t kLoggedRows = 8;

// The numbers of a table after its column `model`, by layer and memory.
void AddNumbers(const Figures::Table& table, const std::string& group, Json* out) {
  std::map<std::string, size_t> at;
  for (size_t i = 0; i < table.columns.size(); ++i) at[table.columns[i]] = i;
  for (const auto& row : table.rows) {
    const bool random = row[at.at("model")] == "random";
    const std::string memory =
        at.contains("memory") ? row[at.at("memory")].get<std::string>() : "packing";
    const std::string name = StrCat(group, random ? "_random/" : "/",
                                    row[at.at("layer")].get<std::string>(), "/", memory, "/");
    for (size_t i = at.at("model") + 1; i < row.size(); ++i) {
      if (row[i].is_number_float()) (*out)[name + table.columns[i]] = row[i];
    }
  }
}

// Whether the run's log has figures of random weights.
bool HasReference(const std::string& folder, const std::string& analysis) {
  bool has = false;
  ForEachLogLine(folder, [&](const Json& line) {
    for (const auto& entry : line.items())
      has = has || entry.key().starts_with(analysis + "_random/");
  });
  return has;
}

}  // namespace

std::function<Json(Model& model)> MemoryObserver(std::shared_ptr<Model> model, const Task& task,
                                                 uint64_t seed, const std::string& folder) {
  const AnalysisInfo& info = FindAnalysis("memory");
  if (const std::string refusal = info.refusal(model->config()); !refusal.empty())
    FailUsage("train.log_memory: ", refusal);
  ReadOptions read;
  read.rows = kLoggedRows;
  std::optional<Batch> batch = task.Read(Split::kValid, read)->Next();
  CISTERN_CHECK(batch, "train.log_memory: the validation split is empty");
  bool first = true;
  return [=, rows = std::move(*batch)](Model&) mutable {
    AnalysisContext context;
    context.model = model;
    context.config = model->config();
    context.seed = seed;
    const EvalScope scope(*model);
    const bool reference = first && !HasReference(folder, info.name);
    first = false;
    const auto analysis = info.make(Json{{"reference", reference}}, context);
    const Batch there = rows.To(model->options().device());
    analysis->Add(there, RunLayers(*model, there));
    const Figures figures = analysis->Report();
    Json numbers = Json::object();
    for (const char* table : {"slots", "packing"})
      AddNumbers(figures.table(table), info.name, &numbers);
    return numbers;
  };
}

Figures OverTraining(const std::string& folder, const std::string& analysis) {
  Figures f;
  std::error_code ignored;
  const std::string path = folder + "/metrics.jsonl", own = analysis + "/",
                    random = analysis + "_random/";
  if (!std::filesystem::exists(path, ignored)) return f;
  if (const std::string problem = LogProblem(folder); !problem.empty()) Note(problem);
  // Of each figure: of each layer and memory a curve, and the level of random weights.
  std::map<std::string, std::map<std::string, Series>> curves;
  std::map<std::string, std::map<std::string, double>> levels;
  ForEachLogLine(folder, [&](const Json& line) {
    if (line.value("event", Json()) != "valid") return;
    if (const Json step = line.value("step", Json()); !step.is_number())
      Fail(path, ": a line of an evaluation has no step");
    for (const auto& [key, value] : line.items()) {
      const bool is_random = key.starts_with(random);
      if ((!is_random && !key.starts_with(own)) || !value.is_number()) continue;
      const std::string rest = key.substr((is_random ? random : own).size());
      const size_t layer = rest.find('/'), memory = rest.find('/', layer + 1);
      if (layer == std::string::npos || memory == std::string::npos) continue;
      const std::string figure = rest.substr(memory + 1),
                        name = rest.substr(0, layer) + ", " +
                               rest.substr(layer + 1, memory - layer - 1);
      if (is_random) {
        levels[figure][name] = value.get<double>();
        continue;
      }
      Series& series = curves[figure][name];
      series.name = name;
      series.x.push_back(line["step"].get<double>());
      series.y.push_back(value.get<double>());
    }
  });
  if (curves.empty()) return f;
  f.Heading("Over training");
  Figures::Table table{
      "training",
      "Over training; random: of a model of this config with random weights, on the same rows",
      {"figure", "layer and memory", "random", "first", "last"},
      {}};
  int number = 0;
  for (const auto& by_figure : curves) {
    LineChart chart{by_figure.first, "step", by_figure.first, {}};
    for (const auto& by_name : by_figure.second) {
      const Series& series = by_name.second;
      chart.series.push_back(series);
      const auto& known = levels[by_figure.first];
      const auto level = known.find(by_name.first);
      table.rows.push_back({by_figure.first, by_name.first,
                            level == known.end() ? Json() : Json(level->second), series.y.front(),
                            series.y.back()});
      // Level lines of few memories can still be told apart.
      if (level != known.end() && by_figure.second.size() <= 4)
        chart.series.push_back({by_name.first + " (random)",
                                {series.x.front(), series.x.back()},
                                {level->second, level->second}});
    }
    f.Add(StrCat("training-", ++number), chart,
          "A curve that leaves the level of random weights is what training did to the memory.");
  }
  f.Add(std::move(table));
  return f;
}

}  // namespace cistern::cli
