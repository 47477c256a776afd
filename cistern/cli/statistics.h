#pragma once
// Do methods differ, over runs of several seeds? (P000 App. A; spec 5): tests, means and pairs as
// tables. `cistern statistics` reads the runs from files, `cistern reproduce` has made them.
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "cistern/analyses/figures.h"

namespace cistern::cli {

// Values of a cell (such as a model and a task): (method, seed) -> value, one for every pair.
struct ResultCell {
  std::vector<std::string> methods, seeds;  // in the order in which they came
  std::map<std::pair<std::string, std::string>, double> values;
};

using ResultCells = std::vector<std::pair<std::string, ResultCell>>;  // by name

struct MethodTests {
  double alpha = 0.05;          // level, over all cells
  int64_t draws = 10'000;       // samples of the bootstrap
  uint64_t seed = 1;            // of the bootstrap
  std::string value = "value";  // what the runs' numbers are
};

// Friedman and Kruskal-Wallis in each cell with Holm's adjustment over them, what each can find at
// all, means with intervals, Cliff's delta of all pairs; a picture of each of the first cells.
Figures TestMethods(const ResultCells& cells, const MethodTests& options);

}  // namespace cistern::cli
