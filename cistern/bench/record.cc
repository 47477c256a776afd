#include "cistern/bench/record.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <set>

#include "cistern/base/format.h"
#include "cistern/io/atomic_file.h"
#include "cistern/io/checked_json.h"

namespace cistern::bench {
namespace {

std::string ValueText(const Json& value) {
  if (value.is_string()) return value.get<std::string>();
  if (value.is_object() && value.empty()) return "-";
  return value.dump();
}

std::string FigureText(const Json& value, Column::Kind kind) {
  if (!value.is_number()) return "-";
  const double x = value.get<double>();
  switch (kind) {
    case Column::Kind::kMilliseconds:
      return TimeText(x);
    case Column::Kind::kRate:
      return x >= 1e4 ? Tick(std::round(x / 10) * 10) : ThreeDigits(x);
    case Column::Kind::kShare:
      return Fixed(100 * x, 0) + " %";
    case Column::Kind::kBytes:
      return ByteCount(x);
    case Column::Kind::kCount:
      return Thousands(std::llround(x));
  }
  return "";
}

Json FigureOf(const Row& row, const std::string& key) {
  if (!row.skipped.empty()) return {};
  if (key == "ms") return row.ms.median;
  if (key == "spread") return row.ms.Relative();
  return row.figures.contains(key) ? row.figures[key] : Json();
}

// Keys of `what`, in the order in which the rows bring them.
std::vector<std::string> Keys(const Record& record) {
  std::vector<std::string> keys;
  for (const Row& row : record.rows) {
    for (const auto& [key, value] : row.what.items()) {
      if (std::find(keys.begin(), keys.end(), key) == keys.end()) keys.push_back(key);
    }
  }
  return keys;
}

bool Shared(const Record& record, const std::string& key) {
  return std::all_of(record.rows.begin(), record.rows.end(), [&](const Row& row) {
    return row.what.contains(key) && row.what[key] == record.rows[0].what[key];
  });
}

template <class T>
T Get(const Json& json, const char* key, const std::string& where) {
  CISTERN_CHECK(json.is_object() && json.contains(key), where, " lacks '", key, "'");
  try {
    return json[key].get<T>();
  } catch (const nlohmann::json::exception&) {
    Fail(where, ": '", key, "' has the wrong type: ", json[key].dump());
  }
}

Row ReadRow(const Json& json, const std::string& where) {
  Row row;
  row.what = Get<Json>(json, "what", where);
  CISTERN_CHECK(row.what.is_object(), where, ": 'what' is no object");
  if (json.contains("skipped")) {
    row.skipped = Get<std::string>(json, "skipped", where);
    CISTERN_CHECK(!row.skipped.empty(), where, ": a row that was skipped for no reason");
    row.wrong = Get<bool>(json, "wrong", where);
    return row;
  }
  row.ms = ReadSpread(Get<Json>(json, "ms", where));
  row.figures = Get<Json>(json, "figures", where);
  return row;
}

}  // namespace

std::string TimeText(double ms) { return ms < 0.1 ? Significant(ms, 3) : ThreeDigits(ms); }

std::string Record::Busy() const {
  std::vector<std::string> reasons;
  if (cpu_share < kBusyShare)
    reasons.push_back(StrCat("this process got ", Fixed(100 * cpu_share, 0),
                             " % of the processor time that it was ready to use"));
  if (other_cores > kBusyCores)
    reasons.push_back(StrCat("other processes kept ", Fixed(other_cores, 1), " of ", machine.cores,
                             machine.cores == 1 ? " core" : " cores", " busy"));
  if (reasons.empty()) return "";
  return "the machine was busy: " + reasons[0] + (reasons.size() > 1 ? "; " + reasons[1] : "") +
         "; measure again when it is quiet";
}

Json RecordJson(const Record& r) {
  Json rows = Json::array();
  for (const Row& row : r.rows) {
    Json json = {{"what", row.what}};
    if (row.skipped.empty()) {
      json["ms"] = SpreadJson(row.ms), json["figures"] = row.figures;
    } else {
      json["skipped"] = row.skipped, json["wrong"] = row.wrong;
    }
    rows.push_back(std::move(json));
  }
  return WithChecksum({{"cistern_bench", kRecordVersion},
                       {"kind", r.kind},
                       {"machine", MachineJson(r.machine)},
                       {"settings", r.settings},
                       {"peaks", r.peaks},
                       {"cpu_share", r.cpu_share},
                       {"other_cores", r.other_cores},
                       {"interrupted", r.interrupted},
                       {"rows", rows}});
}

Record ReadRecord(const Json& json, const std::string& where) {
  CISTERN_CHECK(json.is_object() && json.contains("cistern_bench"), where,
                " is no file of cistern bench --json");
  const auto version = Get<int64_t>(json, "cistern_bench", where);
  CISTERN_CHECK(version == kRecordVersion, where, " has version ", version,
                "; this program reads version ", kRecordVersion);
  Record r;
  r.kind = Get<std::string>(json, "kind", where);
  try {
    r.machine = ReadMachine(Get<Json>(json, "machine", where));
    r.settings = Get<Json>(json, "settings", where);
    r.peaks = Get<Json>(json, "peaks", where);
    r.cpu_share = Get<double>(json, "cpu_share", where);
    r.other_cores = Get<double>(json, "other_cores", where);
    r.interrupted = Get<bool>(json, "interrupted", where);
    const Json rows = Get<Json>(json, "rows", where);
    CISTERN_CHECK(rows.is_array(), "'rows' is no array");
    std::set<std::string> seen;
    for (const Json& row : rows) {
      r.rows.push_back(ReadRow(row, "a row"));
      CISTERN_CHECK(seen.insert(r.rows.back().what.dump()).second,
                    "two rows measure the same: ", r.rows.back().what.dump());
    }
  } catch (const Error& e) {
    const std::string what = e.what();
    if (what.starts_with(where)) throw;
    Fail(where, ": ", what);
  }
  return r;
}

void WriteRecord(const Record& record, const std::string& path) {
  const Json json = RecordJson(record);
  if (path == "-") {
    std::printf("%s\n", JsonLine(json).c_str());
  } else {
    WriteFileAtomically(path, JsonFileText(json));
  }
}

HtmlTable RecordTable(const Record& record, const std::vector<Column>& columns) {
  HtmlTable table;
  if (record.rows.empty()) return table;
  std::vector<std::string> keys;
  for (const std::string& key : Keys(record)) {
    if (key == "mechanism" || !Shared(record, key)) keys.push_back(key);
  }
  std::vector<Column> shown;
  for (const Column& c : columns) {
    const auto has = [&](const Row& row) { return FigureOf(row, c.key).is_number(); };
    if (std::any_of(record.rows.begin(), record.rows.end(), has)) shown.push_back(c);
  }
  const bool skips = std::any_of(record.rows.begin(), record.rows.end(),
                                 [](const Row& row) { return !row.skipped.empty(); });
  table.header = keys;
  for (const Column& c : shown) table.header.push_back(c.title);
  if (skips) table.header.push_back("note");
  for (const Row& row : record.rows) {
    std::vector<std::string> cells;
    for (const std::string& key : keys)
      cells.push_back(row.what.contains(key) ? ValueText(row.what[key]) : "-");
    for (const Column& c : shown) cells.push_back(FigureText(FigureOf(row, c.key), c.kind));
    if (skips) cells.push_back(row.skipped);
    table.rows.push_back(std::move(cells));
  }
  return table;
}

std::string SharedText(const Record& record) {
  std::string text;
  if (record.rows.empty()) return text;
  for (const std::string& key : Keys(record)) {
    if (key == "mechanism" || !Shared(record, key)) continue;
    const Json& value = record.rows[0].what[key];
    if (value.is_object() && value.empty()) continue;
    text += (text.empty() ? "" : ", ") + key + " " + ValueText(value);
  }
  return text;
}

void PrintTable(const HtmlTable& table) {
  std::vector<size_t> widths(table.header.size());
  std::vector<bool> right(table.header.size(), true);
  const auto number = [](const std::string& cell) {
    return cell.empty() || cell == "-" || (cell[0] >= '0' && cell[0] <= '9');
  };
  for (size_t i = 0; i < widths.size(); ++i) widths[i] = table.header[i].size();
  for (const auto& row : table.rows) {
    for (size_t i = 0; i < row.size(); ++i) {
      widths[i] = std::max(widths[i], row[i].size());
      right[i] = right[i] && number(row[i]);
    }
  }
  const auto print = [&](const std::vector<std::string>& cells) {
    std::string line;
    for (size_t i = 0; i < cells.size(); ++i) {
      const std::string space(widths[i] - cells[i].size(), ' ');
      line += (i > 0 ? "  " : "") + (right[i] ? space + cells[i] : cells[i] + space);
    }
    line.erase(line.find_last_not_of(' ') + 1);
    std::printf("%s\n", line.c_str());
  };
  print(table.header);
  for (const auto& row : table.rows) print(row);
}

}  // namespace cistern::bench
