#include "cistern/bench/efficiency.h"

#include <algorithm>

#include "cistern/base/format.h"

namespace cistern::bench {

std::string Bracket::Text() const {
  if (from == 0) return "above " + Thousands(longest);
  return (below == 0 ? Thousands(from) + " or less" : Thousands(below) + " to " + Thousands(from)) +
         (behind_later ? " (not steadily)" : "");
}

Bracket BracketOf(const std::vector<Meeting>& meetings) {
  CISTERN_CHECK(!meetings.empty(), "[bench] a bracket of no lengths");
  Bracket b;
  b.longest = meetings.back().length;
  bool ever = false;
  for (const Meeting& m : meetings) {
    if (m.Ahead()) {
      if (b.from == 0) b.from = m.length;
      ever = true;
    } else {
      b.behind_later = ever;
      b.below = m.length, b.from = 0;
    }
  }
  return b;
}

bool EfficiencyRow::Settled(const std::vector<Meeting>& m) {
  const size_t n = m.size();
  return n >= 2 && m[n - 1].Ahead() && m[n - 2].Ahead();
}

namespace {

double MemoryOf(const Row& row, Way way) {
  const char* key = way == Way::kDecode ? "state_bytes" : "peak_bytes";
  return row.figures.contains(key) ? row.figures[key].get<double>() : 0;
}

void Meet(const Row& own, const Row& other, int64_t length, EfficiencyRow* row) {
  row->time.push_back({length, own.ms.low, own.ms.high, other.ms.low, other.ms.high});
  const double a = MemoryOf(own, row->way), b = MemoryOf(other, row->way);
  if (a > 0 && b > 0) row->bytes.push_back({length, a, a, b, b});
}

// One way and pass, at all lengths.
void Ladder(const Sweep& sweep, const EfficiencySettings& settings, Way way, Pass pass,
            Peaks& peaks, Record* record, std::vector<EfficiencyRow>* rows) {
  const size_t first = rows->size();
  for (const auto& [info, options] : sweep.mechanisms) {
    if (info == settings.against && options.empty()) continue;
    EfficiencyRow row;
    row.mechanism = info->name, row.options = options, row.way = way, row.pass = pass;
    rows->push_back(std::move(row));
  }
  for (int64_t length = settings.shortest; length <= settings.longest; length *= 2) {
    Sweep one = sweep;
    one.ways = {way}, one.passes = {pass}, one.lengths = {length};
    one.mechanisms = {{settings.against, Json::object()}};
    std::vector<EfficiencyRow*> asked;
    size_t i = first;
    for (const auto& mechanism : sweep.mechanisms) {
      if (mechanism.first == settings.against && mechanism.second.empty()) continue;
      EfficiencyRow& row = (*rows)[i++];
      const bool known = row.TimeDone() && (row.BytesDone() || row.bytes.empty());
      if (!row.skipped.empty() || (known && !settings.every)) continue;
      one.mechanisms.push_back(mechanism);
      asked.push_back(&row);
    }
    if (asked.empty()) return;
    const std::vector<Row> measured = Measure(one.Cases(), settings.measure, peaks);
    record->rows.insert(record->rows.end(), measured.begin(), measured.end());
    if (settings.measure.stop && settings.measure.stop()) return;
    for (size_t j = 0; j < asked.size(); ++j) {
      const Row &other = measured[0], &own = measured[j + 1];
      if (!own.skipped.empty() || !other.skipped.empty()) {
        if (asked[j]->time.empty() || own.wrong)
          asked[j]->skipped =
              own.skipped.empty() ? settings.against->name + ": " + other.skipped : own.skipped;
      } else {
        Meet(own, other, length, asked[j]);
      }
    }
    if (!measured[0].skipped.empty()) return;
  }
}

}  // namespace

std::vector<EfficiencyRow> MeasureEfficiency(const Sweep& sweep, const EfficiencySettings& settings,
                                             Peaks& peaks, Record* record) {
  Sweep first = sweep;
  const auto one = [](auto& list, const char* what) {
    if (list.size() != 1)
      FailUsage("efficiency lengths take one of the ", what, ", got ", list.size());
  };
  one(first.batches, "batches"), one(first.heads, "heads"), one(first.widths, "widths");
  one(first.threads, "threads"), one(first.dtypes, "dtypes"), one(first.isas, "isas");
  one(first.implementations, "implementations"), one(first.layouts, "layouts");
  std::vector<EfficiencyRow> rows;
  for (const Way way : sweep.ways) {
    for (const Pass pass : sweep.passes) {
      if (way == Way::kDecode && pass == Pass::kBoth) continue;
      if (settings.measure.stop && settings.measure.stop()) break;
      Ladder(first, settings, way, pass, peaks, record, &rows);
    }
  }
  for (EfficiencyRow& row : rows) {
    if (row.skipped.empty() && row.time.empty()) row.skipped = "interrupted";
  }
  return rows;
}

HtmlTable EfficiencyTable(const std::vector<EfficiencyRow>& rows) {
  HtmlTable table;
  table.header = {"mechanism",        "form",    "pass",  "less time from",
                  "less memory from", "time at", "ratio", "note"};
  for (const EfficiencyRow& r : rows) {
    const std::string name = r.mechanism + (r.options.empty() ? "" : " " + r.options.dump());
    std::vector<std::string> cells = {name, NameOf(r.way, Ways()), NameOf(r.pass, Passes())};
    if (!r.skipped.empty()) {
      cells.insert(cells.end(), {"-", "-", "-", "-", r.skipped});
    } else {
      const Meeting& last = r.time.back();
      cells.insert(cells.end(),
                   {BracketOf(r.time).Text(), r.bytes.empty() ? "-" : BracketOf(r.bytes).Text(),
                    Thousands(last.length),
                    Fixed((last.low + last.high) / (last.other_low + last.other_high), 3), ""});
    }
    table.rows.push_back(std::move(cells));
  }
  return table;
}

namespace {

Json BracketJson(const std::vector<Meeting>& meetings) {
  if (meetings.empty()) return {};
  const Bracket b = BracketOf(meetings);
  Json points = Json::array();
  for (const Meeting& m : meetings)
    points.push_back({{"length", m.length},
                      {"low", m.low},
                      {"high", m.high},
                      {"other_low", m.other_low},
                      {"other_high", m.other_high}});
  return {{"below", b.below},
          {"from", b.from},
          {"longest", b.longest},
          {"steady", !b.behind_later},
          {"points", points}};
}

}  // namespace

Json EfficiencyJson(const std::vector<EfficiencyRow>& rows) {
  Json all = Json::array();
  for (const EfficiencyRow& r : rows) {
    Json row = {{"mechanism", r.mechanism},
                {"options", r.options},
                {"form", NameOf(r.way, Ways())},
                {"pass", NameOf(r.pass, Passes())}};
    if (r.skipped.empty()) {
      row["time"] = BracketJson(r.time), row["memory"] = BracketJson(r.bytes);
    } else {
      row["skipped"] = r.skipped;
    }
    all.push_back(std::move(row));
  }
  return all;
}

}  // namespace cistern::bench
