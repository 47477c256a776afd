#pragma once
// What `cistern reproduce` has to run: the cells of a table with their experiments, the data that
// they need, what they do otherwise than the source, and what they will cost.
#include <map>
#include <string>
#include <vector>

#include "cistern/cli/child_run.h"
#include "cistern/cli/command.h"
#include "cistern/cli/experiment.h"
#include "cistern/cli/paper_table.h"

namespace cistern::cli {

struct ReproducedCell {
  size_t row = 0, column = 0;    // of the table
  std::string name, folder;      // "Luna-16, Text"; luna-16/text
  std::string text;              // of its experiment file
  std::vector<std::string> set;  // KEY=VALUE on top of the table's files, without the seed
  Experiment experiment;         // as read with them
  // What it does, by its keys, but for the seed and where the data lie.
  std::map<std::string, std::string> settings;
  std::vector<std::string> changes;  // "train.steps 25000 -> 600": otherwise than in the table
  double estimate = 0;               // seconds of a run; 0: not known
  std::string unmeasured;            // why it is not known
  std::vector<ChildRun> runs;        // those that have ended, by seed
};

struct PlanOptions {
  bool small = false;
  std::vector<std::string> data;  // NAME=PATH, or a folder of data sets
  std::vector<std::string> set;
  bool need_data = true;  // false: the plan is only to be looked at
};

// All cells of the table that run, checked. UsageError where data are missing (which, and what to
// put where), where there is no small version, where an experiment is wrong.
std::vector<ReproducedCell> PlanCells(const PaperTable& table, const PlanOptions& options);

// "train.steps 25000 -> 600", for every key that differs; "unset" where one side lacks it.
std::vector<std::string> ChangedSettings(const std::map<std::string, std::string>& before,
                                         const std::map<std::string, std::string>& after);

// The experiment file of a cell below a reproduction's folder.
std::string CellFile(const std::string& out, const ReproducedCell& cell);

// Sets `estimate`, or `unmeasured`: trains a few steps of the cell in OUT/cost.tmp-<pid>-<n>, which
// is removed again. Evaluation is taken as a third of a training step for each token.
void MeasureCost(const std::string& out, const Common& common, ReproducedCell* cell);

}  // namespace cistern::cli
