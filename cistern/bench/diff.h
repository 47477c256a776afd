#pragma once
// `cistern bench diff`: what changed between two records, as far as their noise lets one say.
#include "cistern/bench/record.h"

namespace cistern::bench {

enum class Verdict { kFaster, kSlower, kSame, kOnlyBefore, kOnlyAfter, kNotMeasured };
const EnumNames<Verdict>& Verdicts();  // faster, slower, same, only before, only after, -

struct Change {
  Json what;
  Verdict verdict = Verdict::kSame;
  double before = 0, after = 0;  // ms; 0: none
  double ratio = 0;              // after / before
  double noise = 0;              // a ratio within 1 +- noise says nothing
  std::string note;
};

struct DiffSettings {
  double threshold = 0.03;   // smaller changes are none, however quiet the machine
  bool any_machine = false;  // compares figures of different machines and threads all the same
};

// A row is faster or slower where the ratio of the medians is further from 1 than the threshold and
// than the root of the sum of the squares of both spreads (the distance of the quartiles of each,
// relative), and the quartiles do not overlap. Rows are matched by what they measured, with
// any_machine without the number of threads and the SIMD target where these are those of the
// record's machine; those of a record that measured on a busy machine say so in their note.
// UsageError where the records are of different kinds, or of different machines (machine.h) without
// any_machine.
std::vector<Change> Diff(const Record& before, const Record& after, const DiffSettings& settings);

HtmlTable DiffTable(const std::vector<Change>& changes);
Json DiffJson(const std::vector<Change>& changes);

}  // namespace cistern::bench
