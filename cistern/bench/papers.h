#pragma once
// `cistern bench papers`: the efficiency experiments of the papers (spec 6), run on this machine
// beside what the papers say. Absolute times of other hardware say nothing here; orderings, slopes
// and crossings do.
#include <optional>

#include "cistern/bench/ops.h"
#include "cistern/train/optimizer.h"

namespace cistern::bench {

// A curve of a figure, a row of a table.
struct Arm {
  std::string name;       // as the paper calls it
  std::string mechanism;  // ours; of a whole model in all its stacks, unless `model` says otherwise
  Json options = Json::object();
  Json model = Json::object();  // settings of a whole model that go over WholeModel::model
};

// What the paper says of its figure.
struct Claim {
  enum class Kind {
    kFaster,    // arm is faster than `than` at `length`; paper: how many times, 0: not said
    kSlower,    // it is slower
    kMemory,    // arm takes the share `paper` of `than`'s memory at `length`
    kSlope,     // time grows with the length to the power `paper`, at the two longest lengths
    kFlat,      // time does not depend on the length
    kCrossing,  // arm is faster than `than` from about the length `paper` on; 0: from some length
                // on
    kLevel      // arm takes as long as `than`, at `length`
  };
  Kind kind;
  std::string arm, than = {};
  int64_t length = 0;  // of the paper, before scaling
  double paper = 0;
};

// What a figure of whole models times: a step of training, the logits of rows, or sources read and
// as many tokens of a translation decoded, greedily and one by one.
enum class ModelWork { kTraining, kInference, kTranslation };
const EnumNames<ModelWork>& ModelWorks();  // "training step", "inference", "translation"

// The model of a figure, beside the mechanisms of its arms.
struct WholeModel {
  ModelWork work = ModelWork::kTraining;
  Json model;  // the table [model] of an experiment
  OptimizerOptions optimizer = {};
  double clip = 0;
  // Of an encoder_decoder; Protocol::lengths are those of its sources. Translations are as long.
  int64_t target_length = 0;
};

struct Protocol {
  std::string name;    // "ucu-fig3-d32"
  std::string source;  // "P002 Fig. 3, d = 32"
  std::string setup;   // what the paper measured, and how this differs
  Way way = Way::kBidirectional;
  Pass pass = Pass::kForward;
  int64_t batch = 1, heads = 1, width = 1;
  std::vector<int64_t> lengths = {};
  std::vector<Arm> arms = {};
  std::vector<Claim> claims = {};
  // Of whole models, which say way, pass, heads and width themselves; none: cores alone.
  std::optional<WholeModel> whole = {};
  double minutes = 0;  // of whole models: that it takes, about, on two cores
};

// All rows: those of papers_table.cc, then those of papers_models_table.cc.
const std::vector<Protocol>& Protocols();
std::vector<Protocol> WholeModelProtocols();
// By name; "cores" and "models" are all of either sort, and no names are the cores: whole models
// take minutes each. Each once, in the order of Protocols(). UsageError with the nearest name.
std::vector<Protocol> ChosenProtocols(const std::vector<std::string>& names);

// Lengths, those of targets too, times `scale`, at least 16; batch 1 or more, times `scale` too
// where scale_batch.
Protocol Scaled(const Protocol& protocol, double scale, bool scale_batch);
// Its cases; Row::what begins with "figure" and "arm".
std::vector<Row> MeasureProtocol(const Protocol& scaled, const Case& like,
                                 const MeasureSettings& settings, Peaks& peaks);

struct Finding {
  std::string figure, claim;  // in words
  std::string paper, here;    // what either says
  enum class Verdict { kAgrees, kDiffers, kLevel, kNotMeasured } verdict = Verdict::kNotMeasured;
};
const EnumNames<Finding::Verdict>& FindingVerdicts();  // agrees, differs, level, not measured

// Of the rows that MeasureProtocol gave for the same protocol. "agrees" for kFaster and
// kSlower needs quartiles that do not overlap, whatever the factor; level: they do.
std::vector<Finding> Findings(const Protocol& scaled, const std::vector<Row>& rows);

const std::vector<Column>& PapersColumns();
HtmlTable FindingTable(const std::vector<Finding>& findings);
Json FindingJson(const std::vector<Finding>& findings);
// A page with each figure redrawn, its verdicts and its rows.
void WritePapersReport(const std::vector<Protocol>& scaled, const Record& record,
                       const std::vector<Finding>& findings, double scale, const std::string& path);

}  // namespace cistern::bench
