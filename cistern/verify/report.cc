#include "cistern/verify/report.h"

#include <algorithm>
#include <cstdio>
#include <limits>
#include <map>
#include <utility>

namespace cistern::verify {
namespace {

using Kind = Outcome::Kind;

double Badness(const Outcome& o) {
  if (o.failed()) return std::numeric_limits<double>::infinity();
  return o.tolerance > 0 ? o.error / o.tolerance : 0;
}

// The worst of several outcomes: a failure, else the nearest to its tolerance, else why none
// applies.
const Outcome& Worst(const std::vector<const Outcome*>& outcomes) {
  return **std::max_element(outcomes.begin(), outcomes.end(),
                            [](const Outcome* a, const Outcome* b) {
                              const auto rank = [](const Outcome* o) {
                                return std::make_pair(o->kind == Kind::kNotApplicable ? 0
                                                      : o->kind == Kind::kPass        ? 1
                                                                                      : 2,
                                                      Badness(*o));
                              };
                              return rank(a) < rank(b);
                            });
}

// "2e-13/1e-12": the error and its tolerance; "0" where every bit agrees.
std::string CellText(const Outcome& o) {
  if (o.failed()) return "FAIL";
  return o.error == 0 ? "0" : ErrorText(o.error) + "/" + ErrorText(o.tolerance);
}

std::string Padded(const std::string& text, size_t width) {
  return text.size() < width ? std::string(width - text.size(), ' ') + text : text;
}

std::string Coloured(const std::string& text, Kind kind, bool colour) {
  if (!colour) return text;
  const char* code = kind == Kind::kPass   ? "\033[32m"
                     : kind == Kind::kFail ? "\033[1;31m"
                                           : "\033[2m";
  return code + text + "\033[0m";
}

constexpr const char* kCellsAre =
    "error/tolerance of the comparison that came closest to its tolerance; 0: every bit agrees.\n"
    "Errors are relative, in root mean square: |got - wanted| / |wanted|.\n\n";

// The row of a result: its mechanism and the form.
std::string RowOf(const Result& r) {
  return r.form ? r.mechanism + " " + FormName(*r.form) : r.mechanism;
}

template <class T>
void AddOnce(std::vector<T>& all, const T& one) {
  if (std::find(all.begin(), all.end(), one) == all.end()) all.push_back(one);
}

// a, b, ..., z, aa, ab, ...
std::string Letter(size_t i) { return (i >= 26 ? Letter(i / 26 - 1) : "") + char('a' + i % 26); }

}  // namespace

std::string ErrorText(double error) {
  if (error == 0) return "0";
  char text[32];
  std::snprintf(text, sizeof text, "%.0e", NanUnsigned(error));
  return text;
}

std::string FailureText(const Outcome& o) {
  if (!o.reason.empty()) return o.reason;
  return StrCat("error ", ErrorText(o.error), ", tolerance ", ErrorText(o.tolerance), ", at ",
                o.where);
}

std::string MatrixText(const std::vector<Result>& results, const MatrixStyle& style) {
  std::vector<std::string> mechanisms, properties, reasons;
  std::map<std::pair<std::string, std::string>, std::vector<const Outcome*>> cells;
  for (const Result& r : results) {
    AddOnce(mechanisms, RowOf(r));
    AddOnce(properties, r.property);
    cells[{RowOf(r), r.property}].push_back(&r.outcome);
  }
  size_t first = 0;
  for (const std::string& m : mechanisms) first = std::max(first, m.size());
  // A column is as wide as its name and its widest cell.
  std::map<std::string, size_t> widths;
  for (const auto& [key, outcomes] : cells) {
    size_t& width = widths[key.second];
    width = std::max({width, key.second.size(), size_t{5}, CellText(Worst(outcomes)).size()});
  }

  std::string out = kCellsAre;
  for (size_t begin = 0; begin < properties.size();) {
    size_t end = begin, width = first;
    while (end < properties.size()) {
      const size_t more = widths[properties[end]] + 2;
      if (end > begin && width + more > size_t(style.columns)) break;
      width += more;
      ++end;
    }
    out += std::string(first, ' ');
    for (size_t p = begin; p < end; ++p) out += "  " + Padded(properties[p], widths[properties[p]]);
    out += "\n";
    for (const std::string& m : mechanisms) {
      out += m + std::string(first - m.size(), ' ');
      for (size_t p = begin; p < end; ++p) {
        const size_t column = widths[properties[p]];
        const auto cell = cells.find({m, properties[p]});
        if (cell == cells.end()) {
          out += "  " + Padded("", column);
          continue;
        }
        const Outcome& worst = Worst(cell->second);
        std::string text = CellText(worst);
        if (worst.kind == Kind::kNotApplicable) {
          AddOnce(reasons, worst.reason);
          text = "-" + Letter(size_t(std::find(reasons.begin(), reasons.end(), worst.reason) -
                                     reasons.begin()));
        }
        out += "  " + Coloured(Padded(text, column), worst.kind, style.colour);
      }
      out += "\n";
    }
    out += "\n";
    begin = end;
  }
  for (size_t i = 0; i < reasons.size(); ++i) out += StrCat("-", Letter(i), "  ", reasons[i], "\n");
  if (!reasons.empty()) out += "\n";
  for (const Result& r : results) {
    if (!r.outcome.failed()) continue;
    out += Coloured("FAIL", Kind::kFail, style.colour) +
           StrCat("  ", RowOf(r), " ", r.options.dump(), ", ", r.property, ", ",
                  ops::ImplName(r.implementation), ": ", FailureText(r.outcome), "\n");
  }
  return out;
}

int64_t Failures(const std::vector<Result>& results) {
  return std::count_if(results.begin(), results.end(),
                       [](const Result& r) { return r.outcome.failed(); });
}

Json OutcomeJson(const Outcome& o) {
  static const char* const kNames[] = {"pass", "fail", "not applicable"};
  Json json = {{"outcome", kNames[int(o.kind)]}};
  if (!o.reason.empty()) json["reason"] = o.reason;
  if (o.kind == Kind::kNotApplicable) return json;
  json["error"] = o.error;  // infinite: null
  json["tolerance"] = o.tolerance;
  json["comparisons"] = o.comparisons;
  json["where"] = o.where;
  return json;
}

Json ResultsJson(const std::vector<Result>& results) {
  Json all = Json::array();
  for (const Result& r : results) {
    Json row = {{"mechanism", r.mechanism},
                {"options", r.options},
                {"property", r.property},
                {"implementation", ops::ImplName(r.implementation)}};
    if (r.form) row["form"] = FormName(*r.form);
    row.update(OutcomeJson(r.outcome));
    row["seconds"] = r.seconds;
    all.push_back(std::move(row));
  }
  return all;
}

}  // namespace cistern::verify
