#pragma once
// Efficiency length: from which length on a mechanism needs less time, or less memory, than exact
// softmax. Measured at doubling lengths, so the answer is a bracket.
#include "cistern/bench/ops.h"

namespace cistern::bench {

// A mechanism beside the one it is compared with, at one length. Of a time: the quartiles; of
// memory: the same number twice.
struct Meeting {
  int64_t length = 0;
  double low = 0, high = 0;              // of the mechanism
  double other_low = 0, other_high = 0;  // of the other
  bool Ahead() const { return high < other_low; }
};

// It is ahead at `from` and at every longer length that was measured, and not at `below`, the
// longest measured length before. from 0: at none, or no longer at the longest; below 0: `from` is
// the shortest length. behind_later: it was ahead at some length and not at a longer one.
struct Bracket {
  int64_t below = 0, from = 0, longest = 0;
  bool behind_later = false;
  std::string Text() const;  // "1,024 to 2,048", "128 or less", "above 65,536"
};
Bracket BracketOf(const std::vector<Meeting>& meetings);  // ascending lengths; Error without any

struct EfficiencyRow {
  std::string mechanism;
  Json options;
  Way way;
  Pass pass;
  std::string skipped;               // why there is no answer; empty: there is
  std::vector<Meeting> time, bytes;  // bytes: of the peak beyond the inputs, or of the state
  bool TimeDone() const { return Settled(time); }
  bool BytesDone() const { return Settled(bytes); }

 private:
  static bool Settled(const std::vector<Meeting>& m);
};

struct EfficiencySettings {
  const MechanismInfo* against = nullptr;
  int64_t shortest = 64, longest = 16384;  // of the lengths: shortest, 2 shortest, 4 shortest, ...
  bool every = false;  // goes on to the longest length although a mechanism was clearly ahead at
                       // two lengths in a row
  MeasureSettings measure;
};

// For each way and pass of the sweep, with its first value of every other list; its lengths are not
// used. Times are of alternating runs. All rows that were measured are added to the record. A
// mechanism that is twice in a row ahead in time and in memory is left out of longer lengths.
std::vector<EfficiencyRow> MeasureEfficiency(const Sweep& sweep, const EfficiencySettings& settings,
                                             Peaks& peaks, Record* record);

HtmlTable EfficiencyTable(const std::vector<EfficiencyRow>& rows);
Json EfficiencyJson(const std::vector<EfficiencyRow>& rows);

}  // namespace cistern::bench
