#pragma once
// What a benchmark leaves: rows of figures, with what they depend on. One form for all of `cistern
// bench`, as a table for people and as a file for `bench diff` and programs.
#include <string>
#include <utility>
#include <vector>

#include "cistern/base/cpu_share.h"
#include "cistern/base/other_load.h"
#include "cistern/bench/machine.h"
#include "cistern/bench/timer.h"
#include "cistern/io/html_report.h"

namespace cistern::bench {

struct Row {
  Json what = Json::object();  // was measured: {"mechanism": "latte", "length": 4096, ...}; no two
                               // rows of a record have the same
  std::string skipped;         // why it was not; empty: it was
  bool wrong = false;          // it was not because what it gave is not what it should give
  Spread ms;                   // of one run
  Json figures = Json::object();  // what follows from it: {"tokens_per_s": 1.2e6, ...}
};

struct Record {
  std::string kind;  // ops, model, ...
  Machine machine;
  Json settings = Json::object();  // of the whole run
  Json peaks = Json::array();      // {"threads", "isa", "dtype", "gflops"}, {"threads", "gb_per_s"}
  double cpu_share = 1;            // base/cpu_share.h, while it measured
  double other_cores = 0;          // base/other_load.h, while it measured
  bool interrupted = false;
  std::vector<Row> rows;

  // "the machine was busy: ..."; empty: it was not.
  std::string Busy() const;
};

inline constexpr int64_t kRecordVersion = 1;
Json RecordJson(const Record& record);
Record ReadRecord(const Json& json, const std::string& where);    // Error, with `where`
void WriteRecord(const Record& record, const std::string& path);  // "-": standard output, one line

// What others take of the machine while it lives.
class LoadWatch {
 public:
  void Leave(Record* record) const {
    record->cpu_share = share_.Value(), record->other_cores = load_.Cores();
  }

 private:
  CpuShare share_;
  OtherLoad load_;
};

// A column of the printed table.
struct Column {
  std::string key;    // of Row::figures, or "ms", "spread"
  std::string title;  // above it
  enum class Kind { kMilliseconds, kRate, kShare, kBytes, kCount } kind;
};

// Columns of `what` that all rows share are left to SharedText, and those without any figure are
// left out. A skipped row has its reason in place of a time.
HtmlTable RecordTable(const Record& record, const std::vector<Column>& columns);
std::string SharedText(const Record& record);  // "form causal, pass forward, batch 1"
void PrintTable(const HtmlTable& table);       // numbers to the right
std::string TimeText(double ms);               // three digits, of short times too

}  // namespace cistern::bench
