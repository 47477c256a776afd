#include "cistern/cli/paper_table.h"

#include <algorithm>
#include <cstdlib>
#include <filesystem>

#include "cistern/base/error.h"
#include "cistern/base/subprocess.h"
#include "cistern/cli/experiment.h"

namespace cistern::cli {
namespace {

namespace fs = std::filesystem;

constexpr char kTablesFolder[] = "/tables", kDataSets[] = "data.toml";

bool IsThere(const std::string& path) {
  std::error_code ignored;
  return fs::exists(path, ignored);
}

std::string Replaced(std::string text, const std::string& what, const std::string& by) {
  for (size_t at = text.find(what); at != std::string::npos; at = text.find(what, at + by.size()))
    text.replace(at, what.size(), by);
  return text;
}

Json ReadTableFile(const std::string& path) {
  try {
    return ReadTomlFile(path);
  } catch (const UsageError&) {
    throw;
  } catch (const Error& e) {  // a file that cannot be read is wrong use, before any work
    throw UsageError(e.what());
  }
}

// A name that --rows and --columns can give in a list.
void CheckName(const std::string& name, const std::string& what, const std::string& where) {
  if (name.empty()) FailUsage(where, ": a ", what, " needs a name");
  if (name.find(',') != std::string::npos)
    FailUsage(where, ": the name of the ", what, " '", name,
              "' has a comma, which separates names in --", what, "s; leave it out");
}

TableColumn ReadColumn(const Json& json, const std::string& where) {
  TableColumn c;
  Fields f;
  f.Add("name", &c.name, "of the column");
  f.Add("note", &c.note, "what is to be known of it");
  f.Add("folder", &c.folder, "stands for {folder} in the rows' files");
  f.Add("data", &c.data, "the data set");
  f.Add("small_data", &c.small_data, "the data set of --small");
  f.Add("small", &c.small, "file of the overrides of --small");
  f.Add("chance", &c.chance, "accuracy of a blind guess, in percent", {0.0, 100.0});
  f.Add("baselines", &c.baselines, "figures of the test that are baselines");
  f.Read(json, where);
  CheckName(c.name, "column", where);
  if (!json.contains("small_data")) c.small_data = c.data;
  return c;
}

std::optional<double> NumberOf(const Json& values, const std::string& column,
                               const std::string& where) {
  if (!values.contains(column)) return std::nullopt;
  if (!values[column].is_number())
    FailUsage(where, ": ", column, " must be a number, not ", values[column].dump());
  return values[column].get<double>();
}

// Keys of an object by column, each a column of the table.
void CheckKeys(const Json& values, const PaperTable& table, const std::string& where) {
  if (!values.is_object()) FailUsage(where, " must be a table with the columns as keys");
  std::vector<std::string> names;
  for (const TableColumn& c : table.columns) names.push_back(c.name);
  for (const auto& entry : values.items()) {
    if (std::find(names.begin(), names.end(), entry.key()) == names.end())
      throw UsageError(UnknownName(where + ": column", entry.key(), names));
  }
}

// What the file itself says that its source printed.
void TakePublished(const PaperTable& table, TableCell* cell) {
  Experiment experiment;
  ReadExperiment(experiment, cell->file, {});
  const Published& p = experiment.published;
  if (p.results.contains(table.metric)) cell->published = p.results[table.metric].get<double>();
  if (p.spread.contains(table.metric)) cell->spread = p.spread[table.metric].get<double>();
}

TableRow ReadTableRow(const Json& json, const PaperTable& table, const std::string& where) {
  TableRow row;
  std::string file;
  std::vector<std::string> columns;
  double average = -1;
  const Json none = Json::object();
  Json files = none, published = none, spread = none, curve = none;
  Fields f;
  f.Add("name", &row.name, "of the row");
  f.Add("note", &row.note, "what is to be known of it");
  f.Add("group", &row.group, "of the statistics");
  f.Add("variant", &row.variant, "of the statistics: what differs within the group");
  f.Add("set", &row.set, "KEY=VALUE on top of the files");
  f.Add("small_set", &row.small_set, "KEY=VALUE on top of the overrides of --small");
  f.Add("file", &file, "the experiment of each column, with {folder} for the column's");
  f.Add("files", &files, "of single columns");
  f.Add("columns", &columns, "those that run; empty: all");
  f.Add("published", &published, "by column, where the file does not say it");
  f.Add("spread", &spread, "of those");
  f.Add("average", &average, "over the columns, as printed", {0.0, 100.0});
  f.Add("curve", &curve, "steps and values of a published curve");
  f.Read(json, where);
  CheckName(row.name, "row", where);
  const std::string at = where + ": " + row.name;
  for (const auto& [key, values] : {std::pair("files", &files), std::pair("published", &published),
                                    std::pair("spread", &spread)})
    CheckKeys(*values, table, at + ", " + key);
  for (const std::string& column : columns) CheckKeys({{column, ""}}, table, at + ", columns");
  if (json.contains("average")) row.average = average;
  if (!curve.empty()) {
    try {
      row.steps = curve.at("steps").get<std::vector<double>>();
      row.at = curve.at("values").get<std::vector<double>>();
    } catch (const nlohmann::json::exception&) {
      FailUsage(at, ": curve must have steps and values, two lists of numbers");
    }
    if (row.steps.size() != row.at.size())
      FailUsage(at, ": curve has ", row.steps.size(), " steps and ", row.at.size(), " values");
  }
  const fs::path folder = fs::path(table.path).parent_path();
  for (const TableColumn& c : table.columns) {
    TableCell cell;
    const bool runs =
        columns.empty() || std::find(columns.begin(), columns.end(), c.name) != columns.end();
    std::string name = files.contains(c.name) ? files[c.name].get<std::string>()
                       : runs                 ? Replaced(file, "{folder}", c.folder)
                                              : "";
    if (!name.empty()) {
      cell.file = fs::absolute(folder / name).lexically_normal().string();
      if (!IsThere(cell.file)) FailUsage(at, ": ", cell.file, " does not exist");
      if (row.set.empty()) TakePublished(table, &cell);
    }
    if (const auto said = NumberOf(published, c.name, at + ", published")) {
      cell.published = said;
      cell.spread.reset();
    }
    if (const auto said = NumberOf(spread, c.name, at + ", spread")) cell.spread = said;
    row.cells.push_back(std::move(cell));
  }
  return row;
}

// The statistics compare the variants of a group, each of which is one row.
void CheckVariants(const PaperTable& table) {
  for (size_t i = 0; i < table.rows.size(); ++i) {
    const TableRow& row = table.rows[i];
    if (row.group.empty()) continue;
    if (row.variant.empty())
      FailUsage(table.path, ": ", row.name, " is of the group ", row.group,
                " of the statistics and needs a variant: what it has otherwise than the others");
    for (size_t j = 0; j < i; ++j) {
      if (table.rows[j].group == row.group && table.rows[j].variant == row.variant)
        FailUsage(table.path, ": ", table.rows[j].name, " and ", row.name, " are both the variant ",
                  row.variant, " of the group ", row.group,
                  "; the statistics compare variants, so give each its own");
    }
  }
}

template <class Item>
std::vector<size_t> Chosen(const std::vector<Item>& items, const std::vector<std::string>& names,
                           const std::string& what) {
  std::vector<std::string> known;
  for (const Item& item : items) known.push_back(item.name);
  for (const std::string& name : names) {
    if (std::find(known.begin(), known.end(), name) == known.end())
      throw UsageError(UnknownName(what, name, known));
  }
  std::vector<size_t> chosen;
  for (size_t i = 0; i < items.size(); ++i) {
    if (names.empty() || std::find(names.begin(), names.end(), known[i]) != names.end())
      chosen.push_back(i);
  }
  return chosen;
}

}  // namespace

std::string ConfigsFolder() {
  if (const char* said = std::getenv("CISTERN_CONFIGS"); said && *said) {
    if (!IsThere(StrCat(said, kTablesFolder)))
      FailUsage("$CISTERN_CONFIGS is ", said, ", which has no folder tables");
    return said;
  }
  std::vector<fs::path> places;
  for (fs::path p = fs::path(ThisProgram()).parent_path(); p.has_relative_path();
       p = p.parent_path()) {
    places.push_back(p / "configs");
    places.push_back(p / "share/cistern/configs");
  }
  places.emplace_back("configs");
  for (const fs::path& place : places) {
    if (IsThere(place.string() + kTablesFolder)) return place.string();
  }
  Fail("the folder configs/ with the published experiments is not beside ", ThisProgram(),
       " or here; name it in $CISTERN_CONFIGS");
}

std::vector<std::string> PaperTableNames() {
  std::vector<std::string> names;
  for (const auto& entry : fs::directory_iterator(ConfigsFolder() + kTablesFolder)) {
    if (entry.path().extension() == ".toml" && entry.path().filename() != kDataSets)
      names.push_back(entry.path().stem().string());
  }
  std::sort(names.begin(), names.end());
  return names;
}

PaperTable ReadPaperTable(const std::string& name) {
  PaperTable table;
  if (name.ends_with(".toml")) {
    table.path = name;
    table.name = fs::path(name).stem().string();
    if (!IsThere(name)) FailUsage("no table of experiments ", name);
  } else {
    const std::vector<std::string> names = PaperTableNames();
    if (std::find(names.begin(), names.end(), name) == names.end())
      throw UsageError(UnknownName("table", name, names));
    table.name = name;
    table.path = StrCat(ConfigsFolder(), kTablesFolder, "/", name, ".toml");
  }
  const Json json = ReadTableFile(table.path);
  Json columns = Json::array(), rows = Json::array();
  Fields f;
  f.Add("title", &table.title, "of the report");
  f.Add("source", &table.source, "what it reproduces: P000 Table 1");
  f.Add("place", &table.place, "where its figures are printed");
  f.Add("metric", &table.metric, "of the test, that is compared");
  f.Add("seeds", &table.seeds, "runs of each cell", {1, 1000});
  f.Add("statistics", &table.statistics, "tests of whether variants differ within a group");
  f.Add("notes", &table.notes, "what is to be known of the table");
  f.Add("data_sets", &table.data_set_file, "another file of data sets than data.toml");
  f.Add("column", &columns, "the columns");
  f.Add("row", &rows, "the rows");
  f.Read(json, table.path);
  if (!columns.is_array() || columns.empty() || !rows.is_array() || rows.empty())
    FailUsage(table.path, ": a table needs [[column]] and [[row]]");
  for (const Json& c : columns) table.columns.push_back(ReadColumn(c, table.path));
  for (const Json& r : rows) table.rows.push_back(ReadTableRow(r, table, table.path));
  if (table.statistics) CheckVariants(table);
  return table;
}

std::vector<DataSet> ReadDataSets(const PaperTable& table) {
  const std::string path =
      (fs::path(table.path).parent_path() /
       (table.data_set_file.empty() ? std::string(kDataSets) : table.data_set_file))
          .string();
  std::vector<DataSet> sets;
  if (table.data_set_file.empty() && !IsThere(path)) return sets;
  const Json json = ReadTableFile(path);
  for (const auto& entry : json.items()) {
    DataSet set;
    set.name = entry.key();
    Fields f;
    f.Add("what", &set.what, "what to put where");
    f.Add("places", &set.places, "below the folder of --data");
    f.Read(entry.value(), path + ": " + entry.key());
    sets.push_back(std::move(set));
  }
  return sets;
}

void KeepRows(PaperTable* table, const std::vector<std::string>& names) {
  std::vector<TableRow> rows;
  for (const size_t i : Chosen(table->rows, names, "row of " + table->name))
    rows.push_back(table->rows[i]);
  table->rows = std::move(rows);
}

void KeepColumns(PaperTable* table, const std::vector<std::string>& names) {
  const std::vector<size_t> kept = Chosen(table->columns, names, "column of " + table->name);
  std::vector<TableColumn> columns;
  for (const size_t i : kept) columns.push_back(table->columns[i]);
  for (TableRow& row : table->rows) {
    std::vector<TableCell> cells;
    for (const size_t i : kept) cells.push_back(row.cells[i]);
    row.cells = std::move(cells);
    if (kept.size() < table->columns.size()) row.average.reset();
  }
  table->columns = std::move(columns);
}

}  // namespace cistern::cli
