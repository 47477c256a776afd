#include "cistern/cli/reproduce_report.h"

#include <algorithm>
#include <cmath>
#include <map>

#include "cistern/base/cpu_share.h"
#include "cistern/base/error.h"
#include "cistern/base/format.h"
#include "cistern/cli/statistics.h"
#include "cistern/io/atomic_file.h"
#include "cistern/io/json_text.h"

namespace cistern::cli {
namespace {

double Figure(const Json& result, const char* key) {
  return result.contains(key) && result[key].is_number() ? result[key].get<double>() : 0;
}

double TestFigure(const Json& result, const std::string& metric) {
  if (!result.contains("test") || !result["test"].is_object()) return std::nan("");
  const Json& test = result["test"];
  return test.contains(metric) && test[metric].is_number() ? test[metric].get<double>()
                                                           : std::nan("");
}

std::string WithDeviation(double mean, double deviation, bool known) {
  return StrCat(Fixed(mean, 2), known ? " ± " + Fixed(deviation, 2) : "");
}

std::string Printed(const TableCell& cell) {
  if (!cell.published) return "";
  return WithDeviation(*cell.published, cell.spread.value_or(0), cell.spread.has_value());
}

// As the tasks have it; PlanCells has found the metric in each of them.
bool LowerIsBetter(const Reproduction& r) {
  for (const ReproducedCell& cell : r.cells) {
    for (const Metric& m : cell.experiment.task.info().metrics) {
      if (m.name == r.table.metric) return m.lower_is_better;
    }
  }
  return false;
}

const ReproducedCell* CellAt(const Reproduction& r, size_t row, size_t column) {
  for (const ReproducedCell& cell : r.cells) {
    if (cell.row == row && cell.column == column) return &cell;
  }
  return nullptr;
}

std::string RunsText(const CellSummary& s) {
  std::string text = std::to_string(s.finished);
  if (s.failed > 0)
    text +=
        StrCat(" of ", s.finished + s.failed, ", ",
               s.diverged == s.failed ? StrCat(s.failed, " diverged")
               : s.diverged == 0      ? StrCat(s.failed, " failed")
                                 : StrCat(s.failed, " failed, ", s.diverged, " of them diverged"));
  return text;
}

// A baseline's figure on the rows of the test: the same in every run of a column.
double BaselineOf(const Reproduction& r, size_t column, const std::string& name) {
  for (const ReproducedCell& cell : r.cells) {
    if (cell.column != column) continue;
    for (const ChildRun& run : cell.runs) {
      const double value = TestFigure(run.result, name);
      if (!std::isnan(value)) return value;
    }
  }
  return std::nan("");
}

std::string BaselineTitle(std::string name) {
  std::replace(name.begin(), name.end(), '_', ' ');
  return "baseline: " + name;
}

// Names of all baselines, in the order of the columns.
std::vector<std::string> BaselineNames(const Reproduction& r) {
  std::vector<std::string> names;
  for (const TableColumn& c : r.table.columns) {
    for (const std::string& name : c.baselines) {
      if (std::find(names.begin(), names.end(), name) == names.end()) names.push_back(name);
    }
  }
  return names;
}

bool LowShare(const Reproduction& r, double* least) {
  *least = 1;
  for (const ReproducedCell& cell : r.cells)
    *least = std::min(*least, Summarize(cell, r.table.metric).least_share);
  return *least < kBusyShare;
}

// "key a -> b" of a column, with the rows that it is of unless that is all of them.
std::vector<std::string> ColumnChanges(const Reproduction& r, size_t column) {
  std::vector<std::string> order;
  std::map<std::string, std::vector<std::string>> rows;
  size_t count = 0;
  for (const ReproducedCell& cell : r.cells) {
    if (cell.column != column) continue;
    ++count;
    for (const std::string& change : cell.changes) {
      if (rows.count(change) == 0) order.push_back(change);
      rows[change].push_back(r.table.rows[cell.row].name);
    }
  }
  std::vector<std::string> lines;
  for (const std::string& change : order) {
    std::string of;
    for (const std::string& name : rows[change]) of += (of.empty() ? "" : ", ") + name;
    lines.push_back(rows[change].size() == count ? change : StrCat(change, " (", of, ")"));
  }
  return lines;
}

// What a run of a column does, and not its note: the source's may be another.
bool ValidatesOnTest(const Reproduction& r, size_t column) {
  return std::any_of(r.cells.begin(), r.cells.end(), [&](const ReproducedCell& cell) {
    return cell.column == column &&
           std::any_of(cell.settings.begin(), cell.settings.end(), [](const auto& setting) {
             return setting.first.ends_with("valid_from") && setting.second == "test";
           });
  });
}

ResultCells StatisticsCells(const Reproduction& r, std::vector<std::string>* left_out) {
  ResultCells cells;
  for (size_t c = 0; c < r.table.columns.size(); ++c) {
    std::vector<std::string> groups;
    for (const TableRow& row : r.table.rows) {
      if (!row.group.empty() && std::find(groups.begin(), groups.end(), row.group) == groups.end())
        groups.push_back(row.group);
    }
    for (const std::string& group : groups) {
      ResultCell cell;
      for (int64_t i = 0; i < r.seeds; ++i) cell.seeds.push_back(std::to_string(r.first_seed + i));
      bool whole = true;
      for (size_t row = 0; row < r.table.rows.size(); ++row) {
        if (r.table.rows[row].group != group) continue;
        const ReproducedCell* const of = CellAt(r, row, c);
        if (!of) continue;
        cell.methods.push_back(r.table.rows[row].variant);
        for (size_t i = 0; i < cell.seeds.size(); ++i) {
          const double value =
              i < of->runs.size() ? TestFigure(of->runs[i].result, r.table.metric) : std::nan("");
          whole = whole && std::isfinite(value);
          cell.values[{cell.methods.back(), cell.seeds[i]}] = value;
        }
      }
      const std::string name = StrCat(group, ", ", r.table.columns[c].name);
      if (cell.methods.size() < 2) continue;
      if (whole) {
        cells.emplace_back(name, std::move(cell));
      } else {
        left_out->push_back(name);
      }
    }
  }
  return cells;
}

std::string RunsCsv(const Reproduction& r) {
  std::string text =
      StrCat("column,row,group,variant,seed,", r.table.metric,
             ",published,parameters,tokens_per_s,peak_bytes,seconds,steps,outcome\n");
  for (const ReproducedCell& cell : r.cells) {
    const TableRow& row = r.table.rows[cell.row];
    const auto& published = row.cells[cell.column].published;
    for (size_t i = 0; i < cell.runs.size(); ++i) {
      const ChildRun& run = cell.runs[i];
      const auto number = [&](const char* key) {
        return run.failed.empty() && run.result.contains(key) ? run.result[key].dump() : "";
      };
      const double value = TestFigure(run.result, r.table.metric);
      text += StrCat(CsvCell(r.table.columns[cell.column].name), ",", CsvCell(row.name), ",",
                     CsvCell(row.group), ",", CsvCell(row.variant), ",", r.first_seed + int64_t(i),
                     ",", std::isnan(value) ? "" : Json(value).dump(), ",",
                     published ? Json(*published).dump() : "", ",", number("parameters"), ",",
                     number("tokens_per_s"), ",", number("peak_bytes"), ",", number("seconds"), ",",
                     number("steps"), ",",
                     run.failed.empty() ? "finished"
                     : run.diverged     ? "diverged"
                                        : "failed",
                     "\n");
    }
  }
  return text;
}

Json ResultsJson(const Reproduction& r) {
  Json json = {{"table", r.table.name}, {"small", r.small},     {"metric", r.table.metric},
               {"command", r.command},  {"machine", r.machine}, {"cells", Json::array()}};
  for (const ReproducedCell& cell : r.cells) {
    const CellSummary s = Summarize(cell, r.table.metric);
    const TableCell& of = r.table.rows[cell.row].cells[cell.column];
    Json one = {{"row", r.table.rows[cell.row].name},
                {"column", r.table.columns[cell.column].name},
                {"mean", s.finished > 0 ? Json(s.mean) : Json()},
                {"deviation", s.finished > 1 ? Json(s.deviation) : Json()},
                {"published", of.published ? Json(*of.published) : Json()},
                {"spread", of.spread ? Json(*of.spread) : Json()},
                {"gap", of.published && s.finished > 0 ? Json(s.mean - *of.published) : Json()},
                {"changes", cell.changes},
                {"runs", Json::array()}};
    for (size_t i = 0; i < cell.runs.size(); ++i) {
      const ChildRun& run = cell.runs[i];
      Json result = run.failed.empty() ? run.result
                                       : Json({{"failed", run.failed}, {"diverged", run.diverged}});
      result["seed"] = r.first_seed + int64_t(i);
      one["runs"].push_back(std::move(result));
    }
    json["cells"].push_back(std::move(one));
  }
  return json;
}

LineChart CurvesOf(const Reproduction& r, size_t column) {
  LineChart chart{r.table.columns[column].name, "step", r.table.metric + " (validation)", {}};
  for (const ReproducedCell& cell : r.cells) {
    if (cell.column != column || cell.runs.empty()) continue;
    const TableRow& row = r.table.rows[cell.row];
    chart.series.push_back(RunCurve(StrCat(r.out, "/", cell.folder, "/seed-", r.first_seed),
                                    row.name + (row.steps.empty() ? "" : ", here"), "valid", "step",
                                    r.table.metric));
    if (!row.steps.empty() && cell.changes.empty())
      chart.series.push_back({row.name + ", " + r.table.source, row.steps, row.at});
  }
  return chart;
}

}  // namespace

CellSummary Summarize(const ReproducedCell& cell, const std::string& metric) {
  CellSummary s;
  double sum = 0, squares = 0;
  std::vector<double> values;
  for (const ChildRun& run : cell.runs) {
    const double value = TestFigure(run.result, metric);
    if (!run.failed.empty() || std::isnan(value)) {
      ++s.failed;
      s.diverged += run.diverged;
      continue;
    }
    values.push_back(value);
    sum += value;
    s.parameters = Figure(run.result, "parameters");
    s.tokens_per_second += Figure(run.result, "tokens_per_s");
    s.peak_bytes = std::max(s.peak_bytes, Figure(run.result, "peak_bytes"));
    s.seconds += Figure(run.result, "seconds");
    if (run.result.contains("cpu_share"))
      s.least_share = std::min(s.least_share, Figure(run.result, "cpu_share"));
  }
  s.finished = int64_t(values.size());
  if (s.finished == 0) return s;
  const auto n = double(s.finished);
  s.mean = sum / n;
  s.tokens_per_second /= n;
  s.seconds /= n;
  for (const double v : values) squares += (v - s.mean) * (v - s.mean);
  if (s.finished > 1) s.deviation = std::sqrt(squares / (n - 1));
  return s;
}

HtmlTable OverviewTable(const Reproduction& r) {
  HtmlTable table;
  const bool averages = r.table.columns.size() > 1;
  table.header = {"row"};
  for (const TableColumn& c : r.table.columns) table.header.push_back(c.name);
  if (averages) table.header.push_back("average");
  const bool lower = LowerIsBetter(r);
  double best = 0;
  for (size_t row = 0; row < r.table.rows.size(); ++row) {
    const TableRow& of = r.table.rows[row];
    std::vector<std::string> cells = {of.name};
    double sum = 0;
    bool whole = true;
    for (size_t c = 0; c < r.table.columns.size(); ++c) {
      const ReproducedCell* const cell = CellAt(r, row, c);
      const CellSummary s = cell ? Summarize(*cell, r.table.metric) : CellSummary();
      const std::string printed = Printed(of.cells[c]);
      std::string text = s.finished > 0 ? WithDeviation(s.mean, s.deviation, s.finished > 1)
                         : s.failed > 0 ? (s.diverged > 0 ? "diverged" : "failed")
                                        : "";
      if (!printed.empty()) text += StrCat(text.empty() ? "" : " ", "(", printed, ")");
      cells.push_back(text.empty() ? "-" : text);
      whole = whole && s.finished > 0;
      sum += s.mean;
    }
    if (averages) {
      const double average = sum / double(r.table.columns.size());
      std::string text = whole ? Fixed(average, 2) : "";
      if (of.average) text += StrCat(text.empty() ? "" : " ", "(", Fixed(*of.average, 2), ")");
      cells.push_back(text.empty() ? "-" : text);
    }
    if (whole && (table.best_row < 0 || (lower ? sum < best : sum > best))) {
      best = sum;
      table.best_row = int(table.rows.size());
    }
    table.rows.push_back(std::move(cells));
  }
  const auto add = [&](const std::string& name, const auto& value) {
    std::vector<std::string> cells = {name};
    bool any = false;
    for (size_t c = 0; c < r.table.columns.size(); ++c) {
      const double x = value(c);
      cells.push_back(std::isnan(x) ? "-" : Fixed(x, 2));
      any = any || !std::isnan(x);
    }
    if (averages) cells.push_back("-");
    if (any) table.rows.push_back(std::move(cells));
  };
  for (const std::string& name : BaselineNames(r))
    add(BaselineTitle(name), [&](size_t c) { return BaselineOf(r, c, name); });
  add("chance", [&](size_t c) {
    const double chance = r.table.columns[c].chance;
    return chance < 0 ? std::nan("") : chance;
  });
  return table;
}

HtmlTable ColumnTable(const Reproduction& r, size_t column) {
  HtmlTable table;
  table.header = {"row",        "runs",     r.table.metric, r.table.source, "gap",
                  "parameters", "tokens/s", "peak memory",  "training, s"};
  const size_t width = table.header.size();
  const bool lower = LowerIsBetter(r);
  double best = 0;
  for (size_t row = 0; row < r.table.rows.size(); ++row) {
    const TableCell& of = r.table.rows[row].cells[column];
    const ReproducedCell* const cell = CellAt(r, row, column);
    if (!cell && !of.published) continue;
    const CellSummary s = cell ? Summarize(*cell, r.table.metric) : CellSummary();
    std::vector<std::string> cells = {r.table.rows[row].name,
                                      cell ? RunsText(s) : "not run: quoted"};
    if (s.finished > 0) {
      const std::string gap = of.published ? StrCat(s.mean >= *of.published ? "+" : "",
                                                    Fixed(s.mean - *of.published, 2))
                                           : "";
      for (const std::string& text :
           {WithDeviation(s.mean, s.deviation, s.finished > 1), Printed(of), gap,
            Thousands(int64_t(s.parameters)), Thousands(std::llround(s.tokens_per_second)),
            ByteCount(s.peak_bytes), Fixed(s.seconds, 0)})
        cells.push_back(text);
      if (table.best_row < 0 || (lower ? s.mean < best : s.mean > best)) {
        best = s.mean;
        table.best_row = int(table.rows.size());
      }
    } else {
      cells.push_back("");
      cells.push_back(Printed(of));
      cells.resize(width);
    }
    table.rows.push_back(std::move(cells));
  }
  const auto add = [&](const std::string& name, double value) {
    if (std::isnan(value) || value < 0) return;
    std::vector<std::string> cells = {name, "", Fixed(value, 2)};
    cells.resize(width);
    table.rows.push_back(std::move(cells));
  };
  for (const std::string& name : r.table.columns[column].baselines)
    add(BaselineTitle(name), BaselineOf(r, column, name));
  add("chance", r.table.columns[column].chance);
  return table;
}

std::string MarkdownTable(const HtmlTable& table) {
  const auto line = [](const std::vector<std::string>& cells) {
    std::string text = "|";
    for (const std::string& cell : cells) {
      std::string escaped;
      for (const char c : cell) escaped += c == '|' ? std::string("\\|") : std::string(1, c);
      text += " " + escaped + (cell.empty() ? "|" : " |");
    }
    return text + "\n";
  };
  std::string text = line(table.header) + "|";
  for (size_t i = 0; i < table.header.size(); ++i) text += "---|";
  text += "\n";
  for (const auto& row : table.rows) text += line(row);
  return text;
}

std::vector<std::string> Remarks(const Reproduction& r) {
  std::vector<std::string> lines = {
      StrCat("Printed by the source (", r.table.source, r.table.place.empty() ? "" : ", ",
             r.table.place, ") in parentheses; ± is the deviation of a sample over seeds.")};
  if (r.seeds == 1) lines.push_back("One seed: small differences between rows say nothing.");
  for (size_t c = 0; c < r.table.columns.size(); ++c) {
    std::string all;
    for (const std::string& change : ColumnChanges(r, c)) all += (all.empty() ? "" : "; ") + change;
    if (!all.empty())
      lines.push_back(StrCat(r.table.columns[c].name, ", otherwise than the source's: ", all, "."));
  }
  for (size_t c = 0; c < r.table.columns.size(); ++c) {
    const TableColumn& column = r.table.columns[c];
    if (!column.note.empty()) lines.push_back(column.name + ": " + column.note);
    if (ValidatesOnTest(r, c))
      lines.push_back(column.name +
                      ": the test rows choose the best model here, so its test is not honest.");
  }
  for (const TableRow& row : r.table.rows) {
    if (!row.note.empty()) lines.push_back(row.name + ": " + row.note);
  }
  lines.insert(lines.end(), r.table.notes.begin(), r.table.notes.end());
  for (const ReproducedCell& cell : r.cells) {
    for (size_t i = 0; i < cell.runs.size(); ++i) {
      if (!cell.runs[i].failed.empty())
        lines.push_back(
            StrCat(cell.name, ", seed ", r.first_seed + int64_t(i),
                   cell.runs[i].diverged ? " diverged: " : " failed: ", cell.runs[i].failed));
    }
  }
  if (double least = 1; LowShare(r, &least))
    lines.push_back(StrCat("The machine was busy: a run got as little as ", Fixed(100 * least, 0),
                           " % of the processor time that it was ready to use. Speeds and seconds "
                           "are not reliable."));
  return lines;
}

std::string WriteReproduction(const Reproduction& r) {
  const std::string title = StrCat(r.table.title, r.small ? " (small)" : "");
  const HtmlTable overview = OverviewTable(r);
  HtmlReport page(title, StrCat(r.command, "; ", r.machine));
  std::string text = StrCat("# ", title, "\n\n`", r.command, "`, ", r.machine, ".\n\n");
  page.Table(overview);
  text += MarkdownTable(overview) + "\n";
  for (const std::string& line : Remarks(r)) {
    page.Paragraph(line);
    text += "- " + line + "\n";
  }
  for (size_t c = 0; c < r.table.columns.size(); ++c) {
    const HtmlTable table = ColumnTable(r, c);
    page.Heading(r.table.columns[c].name).Table(table);
    text += StrCat("\n## ", r.table.columns[c].name, "\n\n", MarkdownTable(table));
    const LineChart chart = CurvesOf(r, c);
    if (std::any_of(chart.series.begin(), chart.series.end(),
                    [](const Series& s) { return !s.x.empty(); }))
      page.Svg(RenderSvg(chart), "Learning curves of the first seed");
  }
  std::string tested;
  if (r.table.statistics) {
    std::vector<std::string> left_out;
    const ResultCells cells = r.seeds > 1 ? StatisticsCells(r, &left_out) : ResultCells();
    if (!cells.empty()) {
      const Figures figures = TestMethods(cells, {});
      figures.Write(r.out, "statistics");
      page.Heading("Do the variants differ?");
      figures.AddTo(page);
      tested = figures.Plain();
      text += StrCat("\n## Do the variants differ?\n\n```\n", tested, "```\n");
    } else if (left_out.empty()) {
      tested = r.seeds > 1
                   ? "No statistics: they need two variants or more of a group.\n"
                   : "No statistics: they need two seeds or more of every variant of a group "
                     "(--seeds).\n";
      page.Paragraph(tested);
      text += "\n" + tested;
    }
    for (const std::string& name : left_out) {
      const std::string line = name + " is not tested: not every run of it has finished.";
      page.Paragraph(line);
      text += "\n" + line + "\n";
      tested += line + "\n";
    }
  }
  WriteFileAtomically(r.out + "/table.md", text);
  WriteFileAtomically(r.out + "/runs.csv", RunsCsv(r));
  WriteFileAtomically(r.out + "/results.json", JsonFileText(ResultsJson(r)));
  page.Write(r.out + "/report.html");
  return tested;
}

}  // namespace cistern::cli
