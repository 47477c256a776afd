#pragma once
// Rows of data through a trained model once, into analyses.
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "cistern/analyses/analysis.h"
#include "cistern/base/error.h"
#include "cistern/cli/run_folder.h"

namespace cistern::cli {

struct AnalysisRows {
  std::vector<std::string> data;  // files of the task's kind; none: the data it was trained on
  std::string split = "test";     // of its own data
  int64_t rows = 100;             // 0: all
  int64_t batch = 0, length = 0;  // 0: 8 rows; tokens of a row as in training
};

// The model of a folder, in evaluation, and what its tokens stand for.
AnalysisContext ContextOf(const RunFolder& run, const std::string& dtype, uint64_t seed);

struct RowsDone {
  int64_t rows = 0;
  bool complete = true;  // false: interrupted
  Json facts = Json::object();
};
// Whether an analysis, by its place, whose Add threw is left out from there on; else the error
// stands. Called within the handler of the error.
using LeaveOut = std::function<bool(size_t analysis, const Error& error)>;
// All rows that were asked for, or as many as there was an analysis for. The task has its own data
// (Prepare) where no file is given. Analyses that are null are passed over.
RowsDone AddRows(const AnalysisRows& asked, const RunFolder& run, const AnalysisContext& context,
                 const std::vector<std::unique_ptr<Analysis>>& analyses,
                 const LeaveOut& leave_out = nullptr);

// What --set model.attention=reuse:recommended stands for: the settings of the Reuse model that the
// heads of the softmax model in `folder` ask for, judged by 100 rows of its own validation split
// (docs/analyses.md, similarity). `threshold`: the least similarity of a copied head, below 0 the
// analysis' own. UsageError where there is none, and where the model is another.
std::vector<std::string> RecommendedReuse(const std::string& folder, double threshold);

}  // namespace cistern::cli
