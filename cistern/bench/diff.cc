#include "cistern/bench/diff.h"

#include <algorithm>
#include <cmath>

#include "cistern/base/format.h"

namespace cistern::bench {

const EnumNames<Verdict>& Verdicts() {
  static const EnumNames<Verdict> names = {{Verdict::kFaster, "faster"},
                                           {Verdict::kSlower, "slower"},
                                           {Verdict::kSame, "same"},
                                           {Verdict::kOnlyBefore, "only before"},
                                           {Verdict::kOnlyAfter, "only after"},
                                           {Verdict::kNotMeasured, "-"}};
  return names;
}

namespace {

// What a row is matched by. Of other machines' files the row with all threads and the best target
// of one is that with all threads and the best target of the other.
Json Key(const Record& record, const Row& row, bool any_machine) {
  Json what = row.what;
  if (any_machine && what.value("isa", Json()) == Json(record.machine.isa)) what.erase("isa");
  if (any_machine && what.value("threads", Json()) == Json(record.machine.threads))
    what.erase("threads");
  return what;
}

const Row* Find(const Record& record, const Json& key, bool any_machine) {
  for (const Row& row : record.rows) {
    if (Key(record, row, any_machine) == key) return &row;
  }
  return nullptr;
}

Change Compared(const Row& before, const Row& after, double threshold) {
  Change c;
  c.what = after.what;
  if (!before.skipped.empty() || !after.skipped.empty()) {
    const bool both = !before.skipped.empty() && !after.skipped.empty();
    c.verdict = both                     ? Verdict::kNotMeasured
                : before.skipped.empty() ? Verdict::kOnlyBefore
                                         : Verdict::kOnlyAfter;
    c.note = after.skipped.empty() ? "before: " + before.skipped : after.skipped;
    if (before.skipped.empty()) c.before = before.ms.median;
    if (after.skipped.empty()) c.after = after.ms.median;
    return c;
  }
  const Spread &a = before.ms, &b = after.ms;
  c.before = a.median, c.after = b.median, c.ratio = b.median / a.median;
  c.noise = std::max(threshold, std::hypot(a.Relative(), b.Relative()));
  // Symmetric: twice as fast is as far from 1 as half as fast.
  const double distance = std::max(c.ratio, 1 / c.ratio) - 1;
  const bool apart = b.high < a.low || a.high < b.low;
  if (distance > c.noise && apart) c.verdict = c.ratio < 1 ? Verdict::kFaster : Verdict::kSlower;
  if (std::min(a.runs, b.runs) < 5)
    c.note = StrCat("only ", std::min(a.runs, b.runs), " runs: the spread is not known well");
  return c;
}

std::string WhatText(const Json& what) {
  std::string text;
  for (const auto& [key, value] : what.items()) {
    if (value.is_object() && value.empty()) continue;
    text += (text.empty() ? "" : ", ") + key + " " +
            (value.is_string() ? value.get<std::string>() : value.dump());
  }
  return text;
}

}  // namespace

std::vector<Change> Diff(const Record& before, const Record& after, const DiffSettings& settings) {
  if (before.kind != after.kind)
    FailUsage("one file is of bench ", before.kind, ", the other of bench ", after.kind,
              ": they measure different things");
  if (const std::string why = Difference(before.machine, after.machine);
      !why.empty() && !settings.any_machine)
    FailUsage(why,
              " differ: the figures are not comparable; --any-machine compares them all the "
              "same");
  const std::string busy = !before.Busy().empty()  ? "before: the machine was busy"
                           : !after.Busy().empty() ? "after: the machine was busy"
                                                   : "";
  std::vector<Change> changes;
  for (const Row& row : after.rows) {
    const Json key = Key(after, row, settings.any_machine);
    if (const Row* old = Find(before, key, settings.any_machine)) {
      changes.push_back(Compared(*old, row, settings.threshold));
      std::string& note = changes.back().note;
      if (!busy.empty()) note += (note.empty() ? "" : "; ") + busy;
    } else {
      changes.push_back({row.what, Verdict::kOnlyAfter, 0, row.ms.median, 0, 0, row.skipped});
    }
  }
  for (const Row& row : before.rows) {
    if (Find(after, Key(before, row, settings.any_machine), settings.any_machine) == nullptr)
      changes.push_back({row.what, Verdict::kOnlyBefore, row.ms.median, 0, 0, 0, row.skipped});
  }
  return changes;
}

HtmlTable DiffTable(const std::vector<Change>& changes) {
  // What all rows share says nothing here.
  std::vector<std::string> shared;
  if (changes.size() > 1) {
    for (const auto& entry : changes[0].what.items()) {
      const std::string key = entry.key();
      const Json value = entry.value();
      if (key != "mechanism" && std::all_of(changes.begin(), changes.end(), [&](const Change& c) {
            return c.what.contains(key) && c.what[key] == value;
          }))
        shared.push_back(key);
    }
  }
  HtmlTable table;
  table.header = {"row", "before ms", "after ms", "after/before", "noise", "verdict", "note"};
  const auto number = [](double x) { return x > 0 ? TimeText(x) : std::string("-"); };
  for (const Change& c : changes) {
    Json what = c.what;
    for (const std::string& key : shared) what.erase(key);
    table.rows.push_back({WhatText(what), number(c.before), number(c.after),
                          c.ratio > 0 ? Fixed(c.ratio, 3) : "-",
                          c.ratio > 0 ? Fixed(100 * c.noise, 0) + " %" : "-",
                          NameOf(c.verdict, Verdicts()), c.note});
  }
  return table;
}

Json DiffJson(const std::vector<Change>& changes) {
  Json all = Json::array();
  for (const Change& c : changes) {
    all.push_back({{"what", c.what},
                   {"verdict", NameOf(c.verdict, Verdicts())},
                   {"before_ms", c.before},
                   {"after_ms", c.after},
                   {"ratio", c.ratio},
                   {"noise", c.noise},
                   {"note", c.note}});
  }
  return all;
}

}  // namespace cistern::bench
