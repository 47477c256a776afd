#pragma once
// The tables of the papers that `cistern reproduce` runs, as data: configs/tables/NAME.toml says
// what the rows and columns are, which experiment file each cell is, and what is known beside it.
// What a cell's source printed stands in that file's own [published] table; a row repeats it only
// where its settings are those of another row's file, or where nothing here runs it.
#include <cmath>
#include <optional>
#include <string>
#include <vector>

namespace cistern::cli {

// Data that somebody has to bring (configs/tables/data.toml).
struct DataSet {
  std::string name, what;           // what: what it is, and what to put where
  std::vector<std::string> places;  // below the folder of --data, the first that exists
};

struct TableColumn {
  std::string name, note;
  std::string folder;                  // stands for {folder} in the rows' files
  std::string data, small_data;        // names of data sets; empty: generated, as without --small
  std::string small;                   // file of --small's overrides, beside the table
  double chance = -1;                  // of a blind guess, in percent; below 0: not said
  std::vector<std::string> baselines;  // figures that the task computes on the rows of the test
};

struct TableCell {
  std::string file;  // empty: nothing to run, only what is printed
  std::optional<double> published, spread;
};

struct TableRow {
  std::string name, note;
  std::string group, variant;          // of the statistics: does `variant` matter within a group?
  std::vector<std::string> set;        // KEY=VALUE on top of the files
  std::vector<std::string> small_set;  // and of --small's
  std::optional<double> average;
  std::vector<TableCell> cells;   // as the table's columns
  std::vector<double> steps, at;  // a published curve: the metric at these steps; one column
};

struct PaperTable {
  std::string name, path;            // path: the file
  std::string title, source, place;  // place: where specification and paper print it
  std::string metric = "accuracy", data_set_file;
  int64_t seeds = 1;
  bool statistics = false;  // do variants differ within a group: Friedman, Holm
  std::vector<std::string> notes;
  std::vector<TableColumn> columns;
  std::vector<TableRow> rows;
};

// The folder configs/: $CISTERN_CONFIGS, or the first that is found above the program, in its
// installation or the current folder. Error where there is none.
std::string ConfigsFolder();
std::vector<std::string> PaperTableNames();
// By name, or by the path of a .toml file. UsageError with the nearest name, or naming the file and
// the key where it is not such a table.
PaperTable ReadPaperTable(const std::string& name);
std::vector<DataSet> ReadDataSets(const PaperTable& table);

// Only what is asked for, in the table's order; empty: all. UsageError with the nearest name.
void KeepRows(PaperTable* table, const std::vector<std::string>& names);
void KeepColumns(PaperTable* table, const std::vector<std::string>& names);

}  // namespace cistern::cli
