#include "cistern/cli/statistics.h"

#include <algorithm>
#include <cmath>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <set>

#include "cistern/analyses/rank_tests.h"
#include "cistern/base/error.h"
#include "cistern/base/format.h"
#include "cistern/cli/command.h"
#include "cistern/io/atomic_file.h"
#include "cistern/io/html_report.h"
#include "cistern/io/json_text.h"
#include "cistern/io/table_reader.h"

namespace cistern::cli {
namespace {

struct StatisticsCommand {
  Common common;
  std::vector<std::string> files, cells;
  std::string method = "method", seed = "seed", value = "value", out;
  double alpha = 0.05;
  int64_t draws = 10'000;
};

void AddName(std::vector<std::string>* names, const std::string& name) {
  if (std::find(names->begin(), names->end(), name) == names->end()) names->push_back(name);
}

// Of `cistern reproduce` (runs.csv): a run without a result.
bool IsUnfinished(const std::string& outcome) {
  return outcome == "diverged" || outcome == "failed";
}

struct ResultRow {
  std::string where, cell, method, seed, value, outcome;  // outcome: empty where no column has it
};

std::vector<ResultRow> ReadRows(const StatisticsCommand& c) {
  std::vector<ResultRow> rows;
  for (const std::string& path : c.files) {
    TableReader reader(path);
    const size_t method = reader.Column(c.method), seed = reader.Column(c.seed),
                 value = reader.Column(c.value);
    std::vector<size_t> names;
    for (const std::string& cell : c.cells) names.push_back(reader.Column(cell));
    for (const size_t column : names) reader.Require(column);
    for (const size_t column : {method, seed}) reader.Require(column);
    const auto& columns = reader.columns();
    const auto outcome = std::find(columns.begin(), columns.end(), "outcome");
    std::vector<std::string> row;
    while (reader.Next(&row)) {
      std::string cell;
      for (const size_t i : names) cell += (cell.empty() ? "" : ", ") + row[i];
      rows.push_back({StrCat(path, ":", reader.line()), cell, row[method], row[seed], row[value],
                      outcome == columns.end() ? "" : row[size_t(outcome - columns.begin())]});
    }
  }
  return rows;
}

std::string In(const std::string& cell) { return cell.empty() ? "" : " in " + cell; }

// `left_out`: the methods of a cell of which not every run has finished, in words.
ResultCells ReadResults(const StatisticsCommand& c, std::vector<std::string>* left_out) {
  const std::vector<ResultRow> rows = ReadRows(c);
  std::set<std::pair<std::string, std::string>> unfinished;  // cell, method
  for (const ResultRow& row : rows) {
    if (!IsUnfinished(row.outcome)) continue;
    unfinished.emplace(row.cell, row.method);
    left_out->push_back(StrCat("Left out: ", c.method, " ", row.method, In(row.cell), ", whose ",
                               c.seed, " ", row.seed, " has ", row.outcome, "."));
  }
  ResultCells cells;
  for (const ResultRow& row : rows) {
    if (unfinished.contains({row.cell, row.method})) continue;
    char* end = nullptr;
    const double number = std::strtod(row.value.c_str(), &end);
    CISTERN_CHECK(!row.value.empty() && *end == 0 && std::isfinite(number), row.where, ": ",
                  c.value, " is '", row.value, "', not a finite number");
    auto found = std::find_if(cells.begin(), cells.end(),
                              [&](const auto& entry) { return entry.first == row.cell; });
    if (found == cells.end()) found = cells.insert(cells.end(), {row.cell, {}});
    ResultCell& cell = found->second;
    AddName(&cell.methods, row.method);
    AddName(&cell.seeds, row.seed);
    CISTERN_CHECK(cell.values.emplace(std::pair(row.method, row.seed), number).second, row.where,
                  ": a second value of ", c.method, " ", row.method, " and ", c.seed, " ", row.seed,
                  In(row.cell), "; name the columns that tell them apart with --cell");
  }
  std::erase_if(cells, [&](const auto& entry) {
    const bool alone = entry.second.methods.size() < 2 &&
                       std::any_of(unfinished.begin(), unfinished.end(),
                                   [&](const auto& of) { return of.first == entry.first; });
    if (alone)
      left_out->push_back(StrCat("Nothing to compare", In(entry.first), ": ", c.method, " ",
                                 entry.second.methods[0], " alone has finished."));
    return alone;
  });
  std::string files;
  for (const std::string& path : c.files) files += (files.empty() ? "" : ", ") + path;
  CISTERN_CHECK(!rows.empty(), files, ": no rows");
  if (cells.empty()) {
    std::string why;
    for (const std::string& line : *left_out) why += "\n" + line;
    Fail(files, ": no cell has two values of ", c.method, " whose runs have all finished", why);
  }
  for (const auto& entry : cells) {
    const std::string in = In(entry.first);
    CISTERN_CHECK(entry.second.methods.size() >= 2, files, ": there is one ", c.method, " alone",
                  in, "; nothing to compare");
    for (const std::string& m : entry.second.methods) {
      for (const std::string& s : entry.second.seeds)
        CISTERN_CHECK(entry.second.values.count({m, s}) == 1, files, ": ", c.method, " ", m,
                      " has no value of ", c.seed, " ", s, in,
                      "; Friedman's test needs every method with every seed");
    }
  }
  return cells;
}

constexpr size_t kPictures = 24;  // cells that have one

Json NumberOrNull(double x) { return x < 0 ? Json() : Json(x); }

// What decides: by permutations, where they were counted.
double LeastP(const TestResult& t) { return t.exact < 0 ? t.floor : t.exact_floor; }

double LeastOfOwn(const TestResult& t) { return t.own_floor < 0 ? LeastP(t) : t.own_floor; }

// The least p of every cell after Holm over all of them. No data give less: it grows with each p.
std::vector<double> HolmOfLeast(const std::vector<TestResult>& tests,
                                double (*least_of)(const TestResult&)) {
  std::vector<double> least;
  for (const TestResult& t : tests) least.push_back(least_of(t));
  return Holm(least);
}

std::string AboveAlpha(double floor, double holm, size_t cells, double alpha) {
  return StrCat(Significant(floor, 3), ", after Holm over ", cells,
                cells == 1 ? " cell " : " cells ", Significant(holm, 3), ", above ",
                Significant(alpha, 3));
}

// What the floor of a test says before any data is looked at.
std::string PowerNote(const std::string& test, double floor, double holm, size_t cells,
                      double alpha) {
  if (holm <= alpha) return "";
  return StrCat(test, ": with so few runs the least p that any data can give is ",
                AboveAlpha(floor, holm, cells, alpha),
                ": it could not reject whatever the data, so that it did not says nothing.");
}

// The same of the values that are there.
std::string TiesNote(const std::string& test, double floor, double holm, size_t cells,
                     double alpha) {
  if (holm <= alpha) return "";
  return StrCat(test, ": these values, in any order, give at least p = ",
                AboveAlpha(floor, holm, cells, alpha), "; ties are part of it.");
}

}  // namespace

Figures TestMethods(const ResultCells& cells, const MethodTests& c) {
  std::vector<TestResult> friedman, kruskal;
  std::vector<double> asymptotic, exact, ranks;
  for (const auto& entry : cells) {
    const ResultCell& cell = entry.second;
    Samples blocks, groups;
    for (const std::string& s : cell.seeds) {
      blocks.emplace_back();
      for (const std::string& m : cell.methods) blocks.back().push_back(cell.values.at({m, s}));
    }
    for (const std::string& m : cell.methods) {
      groups.emplace_back();
      for (const std::string& s : cell.seeds) groups.back().push_back(cell.values.at({m, s}));
    }
    friedman.push_back(Friedman(blocks));
    kruskal.push_back(KruskalWallis(groups));
    asymptotic.push_back(friedman.back().p);
    exact.push_back(friedman.back().exact < 0 ? friedman.back().p : friedman.back().exact);
    ranks.push_back(kruskal.back().exact < 0 ? kruskal.back().p : kruskal.back().exact);
  }
  const std::vector<double> holm = Holm(asymptotic), holm_exact = Holm(exact),
                            holm_ranks = Holm(ranks);
  Figures f;
  f.Fact("cells", int64_t(cells.size())).Fact("alpha", c.alpha);
  f.Text(
      StrCat("Do the methods differ? Friedman's test ranks the methods within each seed; where "
             "runs of one seed have nothing in common the pairing is arbitrary, and the test of "
             "Kruskal and Wallis, which ranks all runs together, is the one to read. p after "
             "Holm over ",
             cells.size(), cells.size() == 1 ? " cell." : " cells."));
  Figures::Table tests{
      "tests",
      "Per cell; exact: by all permutations (empty: too many to count)",
      {"cell", "methods", "runs", "test", "rejected", "statistic", "effect", "p chi-square", "Holm",
       "p exact", "Holm exact", "least p", "least p exact"},
      {}};
  std::vector<std::string> notes;
  const auto add = [&](size_t i, const char* name, const TestResult& t, const Json& adjusted,
                       double adjusted_exact, double least, double least_exact, double own) {
    const std::string verdict = adjusted_exact <= c.alpha ? "yes"
                                : least_exact > c.alpha   ? "cannot"
                                                          : "no";
    tests.rows.push_back(
        {cells[i].first.empty() ? "all" : cells[i].first, int64_t(cells[i].second.methods.size()),
         int64_t(cells[i].second.seeds.size()), name, verdict, t.statistic, t.effect, t.p, adjusted,
         NumberOrNull(t.exact), adjusted_exact, t.floor, NumberOrNull(t.exact_floor)});
    const auto note = [&](const std::string& text) {
      if (!text.empty()) AddName(&notes, text);
    };
    note(PowerNote(StrCat(name, " by the chi-square approximation"), t.floor, least, cells.size(),
                   c.alpha));
    if (t.exact < 0) return;
    const std::string test = StrCat(name, " by permutations");
    note(least_exact > c.alpha ? PowerNote(test, t.exact_floor, least_exact, cells.size(), c.alpha)
                               : TiesNote(test, LeastOfOwn(t), own, cells.size(), c.alpha));
  };
  const auto floor = [](const TestResult& t) { return t.floor; };
  const std::vector<double> least = HolmOfLeast(friedman, floor),
                            least_exact = HolmOfLeast(friedman, LeastP),
                            least_ranks = HolmOfLeast(kruskal, floor),
                            least_ranks_exact = HolmOfLeast(kruskal, LeastP),
                            own_ranks = HolmOfLeast(kruskal, LeastOfOwn);
  for (size_t i = 0; i < cells.size(); ++i) {
    add(i, "Friedman", friedman[i], holm[i], holm_exact[i], least[i], least_exact[i],
        least_exact[i]);
    add(i, "Kruskal-Wallis", kruskal[i], Json(), holm_ranks[i], least_ranks[i],
        least_ranks_exact[i], own_ranks[i]);
  }
  f.Add(std::move(tests));
  f.Text(
      "Effect: Kendall's W for Friedman (1: every seed ranks the methods alike), epsilon squared "
      "for Kruskal-Wallis; 0: no difference.");
  for (const std::string& note : notes) f.Text(note);
  f.Fact("notes", notes);
  Figures::Table means{"methods",
                       "Means over runs, with 95 % bootstrap intervals",
                       {"cell", "method", "runs", "mean", "deviation", "low", "high"},
                       {}};
  Figures::Table pairs{"pairs",
                       "Cliff's delta: share of pairs of runs in which the first is larger, minus "
                       "that in which it is smaller",
                       {"cell", "first", "second", "difference of means", "delta"},
                       {}};
  for (size_t number = 0; number < cells.size(); ++number) {
    const ResultCell& cell = cells[number].second;
    const std::string name = cells[number].first.empty() ? "all" : cells[number].first;
    DotChart chart{.title = name, .x_label = c.value, .groups = {}};
    std::vector<std::vector<double>> groups;
    std::vector<double> averages;
    for (const std::string& m : cell.methods) {
      std::vector<double> values;
      double sum = 0, squares = 0;
      for (const std::string& s : cell.seeds) values.push_back(cell.values.at({m, s}));
      const auto n = double(values.size());
      for (const double x : values) sum += x;
      for (const double x : values) squares += (x - sum / n) * (x - sum / n);
      const Interval interval = BootstrapMean(values, 0.95, c.draws, c.seed);
      means.rows.push_back({name, m, int64_t(values.size()), sum / n,
                            n > 1 ? Json(std::sqrt(squares / (n - 1))) : Json(), interval.low,
                            interval.high});
      chart.groups.push_back({m, values, sum / n, interval.low, interval.high});
      groups.push_back(std::move(values));
      averages.push_back(sum / n);
    }
    if (number < kPictures)
      f.Add(StrCat("runs-", number + 1), chart,
            number > 0 ? "" : "Runs (rings), their mean (stroke) and its 95 % interval (bar).");
    for (size_t a = 0; a < groups.size(); ++a) {
      for (size_t b = a + 1; b < groups.size(); ++b)
        pairs.rows.push_back({name, cell.methods[a], cell.methods[b], averages[a] - averages[b],
                              CliffDelta(groups[a], groups[b])});
    }
  }
  if (cells.size() > kPictures)
    f.Text(StrCat("The first ", kPictures, " of ", cells.size(),
                  " cells are drawn; the tables have all of them."));
  f.Add(std::move(means)).Add(std::move(pairs));
  return f;
}

namespace {

int RunStatistics(const StatisticsCommand& c) {
  // It writes at its end alone, so that a signal may end it anywhere.
  std::signal(SIGINT, SIG_DFL);
  std::signal(SIGTERM, SIG_DFL);
  ApplyCommon(c.common);
  if (!(c.alpha > 0 && c.alpha < 1)) FailUsage("--alpha must be between 0 and 1, got ", c.alpha);
  if (c.draws < 100 || c.draws > 10'000'000)
    FailUsage("--draws must be from 100 to 10,000,000, got ", c.draws);
  if (!c.out.empty()) {
    std::error_code ignored;
    const bool earlier = std::filesystem::exists(c.out + "/statistics.json", ignored);
    RefuseForeignFiles(c.out, [&](const std::string& name) {
      return name.starts_with("statistics") || (earlier && name == "report.html");
    });
  }
  std::vector<std::string> left_out;
  const ResultCells cells = ReadResults(c, &left_out);
  Figures f = TestMethods(cells, {c.alpha, c.draws, c.common.seed, c.value});
  for (const std::string& line : left_out) f.Text(line);
  f.Fact("left_out", left_out);
  if (!c.out.empty()) {
    EnsureDirectory(c.out);
    f.Write(c.out, "statistics");
    HtmlReport page("Do the methods differ?", StrCat(c.value, " by ", c.method, " and ", c.seed));
    f.AddTo(page);
    page.Write(c.out + "/report.html");
  }
  std::printf("%s%s", (c.common.json ? JsonLine(f.ToJson()) : f.Plain()).c_str(),
              c.common.json ? "\n" : "");
  if (!c.out.empty() && !c.common.json) std::printf("report: %s/report.html\n", c.out.c_str());
  return 0;
}

}  // namespace

void AddStatistics(CLI::App& app, Run& run) {
  auto c = std::make_shared<StatisticsCommand>();
  CLI::App* sub =
      app.add_subcommand("statistics", "test whether methods differ over runs of several seeds");
  sub->add_option("results", c->files, "tables of results (.csv, .tsv, .jsonl), one run a row")
      ->required()
      ->type_name("FILE");
  sub->add_option("--method", c->method, "the column that names the method")->capture_default_str();
  sub->add_option("--seed-column", c->seed, "the column that names the run's seed")
      ->capture_default_str();
  sub->add_option("--value", c->value, "the column of the result")->capture_default_str();
  sub->add_option("--cell", c->cells, "columns that divide the runs into cells, such as model,task")
      ->delimiter(',');
  sub->add_option("--alpha", c->alpha, "level of the tests, over all cells")->capture_default_str();
  sub->add_option("--draws", c->draws, "samples of the bootstrap")->capture_default_str();
  sub->add_option("--out", c->out, "folder for report.html, CSV and JSON")->type_name("FOLDER");
  AddCommon(*sub, c->common);
  sub->footer(
      "Examples:\n"
      "  cistern statistics results.csv                           columns method, seed, value\n"
      "  cistern statistics lra.csv --cell model,task --method slots --value accuracy --out "
      "tested\n"
      "\nEvery method needs a value of every seed in each cell. A test that could not reject "
      "whatever the data\nis named: that it did not reject then says nothing.");
  sub->callback([c, &run] { run = [c] { return RunStatistics(*c); }; });
}

}  // namespace cistern::cli
