#include "cistern/bench/papers.h"

#include <algorithm>
#include <cmath>
#include <iterator>

#include "cistern/base/format.h"
#include "cistern/bench/efficiency.h"
#include "cistern/bench/papers_models.h"
#include "cistern/io/svg_plot.h"

namespace cistern::bench {

std::vector<Protocol> ChosenProtocols(const std::vector<std::string>& names) {
  const std::vector<Protocol>& all = Protocols();
  std::vector<std::string> known = {"cores", "models"};
  for (const Protocol& p : all) known.push_back(p.name);
  for (const std::string& name : names) {
    if (std::find(known.begin(), known.end(), name) == known.end())
      throw UsageError(UnknownName("figure", name, known));
  }
  const auto chosen = [&](const Protocol& p) {
    const char* const sort = p.whole ? "models" : "cores";
    return names.empty() ? !p.whole
                         : std::any_of(names.begin(), names.end(), [&](const std::string& name) {
                             return name == p.name || name == sort;
                           });
  };
  std::vector<Protocol> out;
  std::copy_if(all.begin(), all.end(), std::back_inserter(out), chosen);
  return out;
}

const EnumNames<Finding::Verdict>& FindingVerdicts() {
  static const EnumNames<Finding::Verdict> names = {
      {Finding::Verdict::kAgrees, "agrees"},
      {Finding::Verdict::kDiffers, "differs"},
      {Finding::Verdict::kLevel, "level"},
      {Finding::Verdict::kNotMeasured, "not measured"}};
  return names;
}

namespace {

int64_t ScaledLength(int64_t length, double scale) {
  return std::max<int64_t>(16, std::llround(double(length) * scale));
}

}  // namespace

Protocol Scaled(const Protocol& protocol, double scale, bool scale_batch) {
  Protocol p = protocol;
  for (int64_t& length : p.lengths) length = ScaledLength(length, scale);
  p.lengths.erase(std::unique(p.lengths.begin(), p.lengths.end()), p.lengths.end());
  for (Claim& c : p.claims) {
    if (c.length > 0) c.length = ScaledLength(c.length, scale);
  }
  if (p.whole && p.whole->target_length > 0)
    p.whole->target_length = ScaledLength(p.whole->target_length, scale);
  if (scale_batch)
    p.batch = std::max<int64_t>(1, std::llround(double(p.batch) * std::min(1.0, scale)));
  return p;
}

std::vector<Row> MeasureProtocol(const Protocol& p, const Case& like,
                                 const MeasureSettings& settings, Peaks& peaks) {
  if (p.whole) return MeasureWholeModels(p, like, settings);
  std::vector<Case> cases;
  std::vector<std::string> arms;
  for (const int64_t length : p.lengths) {
    for (const Arm& arm : p.arms) {
      Case c = like;
      c.info = &FindMechanism(arm.mechanism), c.options = arm.options;
      c.way = p.way, c.pass = p.pass;
      c.length = length, c.batch = p.batch, c.heads = p.heads, c.width = p.width;
      cases.push_back(c);
      arms.push_back(arm.name);
    }
  }
  std::vector<Row> rows = Measure(cases, settings, peaks);
  for (size_t i = 0; i < rows.size(); ++i) {
    Json what = {{"figure", p.name}, {"arm", arms[i]}};
    what.update(rows[i].what);
    rows[i].what = std::move(what);
  }
  return rows;
}

namespace {

// The rows of one arm, by length; those that were measured.
std::vector<const Row*> Curve(const Protocol& p, const std::vector<Row>& rows,
                              const std::string& arm) {
  std::vector<const Row*> curve;
  for (const Row& row : rows) {
    if (row.what["figure"] == p.name && row.what["arm"] == arm && row.skipped.empty())
      curve.push_back(&row);
  }
  return curve;
}

const Row* At(const std::vector<const Row*>& curve, int64_t length) {
  for (const Row* row : curve) {
    if (row->what["length"] == length) return row;
  }
  return nullptr;
}

int64_t LengthOf(const Row& row) { return row.what["length"].get<int64_t>(); }

std::string Times(double factor) { return Fixed(factor, 2) + " x"; }

// arm faster (or slower) than the other: both rows at one length.
void CompareTimes(const Claim& c, const Row& arm, const Row& than, Finding* f) {
  const bool faster = c.kind == Claim::Kind::kFaster;
  const double factor = than.ms.median / arm.ms.median;
  f->paper = c.paper > 0 ? Times(c.paper) : faster ? "faster" : "slower";
  f->here = Times(factor);
  const bool ahead = arm.ms.high < than.ms.low, behind = than.ms.high < arm.ms.low;
  if (!ahead && !behind) {
    f->verdict = Finding::Verdict::kLevel;
  } else {
    f->verdict = ahead == faster ? Finding::Verdict::kAgrees : Finding::Verdict::kDiffers;
  }
}

void CompareMemory(const Claim& c, const Row& arm, const Row& than, Finding* f) {
  if (!arm.figures.contains("peak_bytes") || !than.figures.contains("peak_bytes")) return;
  const double share =
      arm.figures["peak_bytes"].get<double>() / than.figures["peak_bytes"].get<double>();
  f->paper = Times(c.paper), f->here = Times(share);
  f->verdict =
      (share < 1) == (c.paper < 1) ? Finding::Verdict::kAgrees : Finding::Verdict::kDiffers;
}

void Slope(const Claim& c, const std::vector<const Row*>& curve, Finding* f) {
  if (curve.size() < 2) return;
  const Row &a = *curve[curve.size() - 2], &b = *curve.back();
  const double power =
      std::log(b.ms.median / a.ms.median) / std::log(double(LengthOf(b)) / double(LengthOf(a)));
  f->paper = "T^" + Trimmed(c.paper, 1), f->here = "T^" + Fixed(power, 2);
  f->verdict =
      std::abs(power - c.paper) < 0.35 ? Finding::Verdict::kAgrees : Finding::Verdict::kDiffers;
}

void Flat(const std::vector<const Row*>& curve, Finding* f) {
  if (curve.size() < 2) return;
  double least = curve[0]->ms.median, most = least;
  for (const Row* row : curve) {
    least = std::min(least, row->ms.median), most = std::max(most, row->ms.median);
  }
  f->paper = "flat", f->here = "longest " + Times(most / least) + " shortest time";
  f->verdict = most / least < 1.25 ? Finding::Verdict::kAgrees : Finding::Verdict::kDiffers;
}

void Crossing(const Claim& c, const std::vector<const Row*>& arm,
              const std::vector<const Row*>& than, Finding* f) {
  std::vector<Meeting> meetings;
  for (const Row* row : arm) {
    if (const Row* other = At(than, LengthOf(*row)))
      meetings.push_back(
          {LengthOf(*row), row->ms.low, row->ms.high, other->ms.low, other->ms.high});
  }
  if (meetings.size() < 2) return;
  const Bracket bracket = BracketOf(meetings);
  f->paper = c.paper > 0 ? "from " + Thousands(int64_t(c.paper)) : "from some length on";
  f->here = bracket.Text();
  f->verdict = bracket.from > 0 ? Finding::Verdict::kAgrees : Finding::Verdict::kDiffers;
}

std::string Words(const Claim& c) {
  const std::string at = c.length > 0 ? StrCat(" at ", Thousands(c.length)) : "";
  switch (c.kind) {
    case Claim::Kind::kFaster:
      return c.arm + " faster than " + c.than + at;
    case Claim::Kind::kSlower:
      return c.arm + " slower than " + c.than + at;
    case Claim::Kind::kMemory:
      return "memory of " + c.arm + " beside " + c.than + at;
    case Claim::Kind::kSlope:
      return c.arm + ": growth with the length";
    case Claim::Kind::kFlat:
      return c.arm + ": the same at every length";
    case Claim::Kind::kCrossing:
      return c.arm + " overtakes " + c.than;
    case Claim::Kind::kLevel:
      return c.arm + " as fast as " + c.than + at;
  }
  return "";
}

}  // namespace

std::vector<Finding> Findings(const Protocol& p, const std::vector<Row>& rows) {
  std::vector<Finding> findings;
  for (const Claim& c : p.claims) {
    Finding f;
    f.figure = p.name, f.claim = Words(c);
    f.paper = f.here = "-";
    const auto curve = Curve(p, rows, c.arm), other = Curve(p, rows, c.than);
    const Row *arm = At(curve, c.length), *than = At(other, c.length);
    const bool both = arm != nullptr && than != nullptr;
    switch (c.kind) {
      case Claim::Kind::kFaster:
      case Claim::Kind::kSlower:
        if (both) CompareTimes(c, *arm, *than, &f);
        break;
      case Claim::Kind::kLevel:
        if (both) {
          const double factor = than->ms.median / arm->ms.median;
          f.paper = "1 x", f.here = Times(factor);
          f.verdict = std::max(factor, 1 / factor) < 1.1 ? Finding::Verdict::kAgrees
                                                         : Finding::Verdict::kDiffers;
        }
        break;
      case Claim::Kind::kMemory:
        if (both) CompareMemory(c, *arm, *than, &f);
        break;
      case Claim::Kind::kSlope:
        Slope(c, curve, &f);
        break;
      case Claim::Kind::kFlat:
        Flat(curve, &f);
        break;
      case Claim::Kind::kCrossing:
        Crossing(c, curve, other, &f);
        break;
    }
    findings.push_back(std::move(f));
  }
  return findings;
}

const std::vector<Column>& PapersColumns() {
  static const std::vector<Column> columns = [] {
    std::vector<Column> all = OpsColumns();
    const auto tokens = std::find_if(all.begin(), all.end(),
                                     [](const Column& c) { return c.key == "tokens_per_s"; });
    all.insert(tokens + 1, {"steps_per_s", "steps/s", Column::Kind::kRate});
    all.push_back({"parameters", "parameters", Column::Kind::kCount});
    return all;
  }();
  return columns;
}

HtmlTable FindingTable(const std::vector<Finding>& findings) {
  HtmlTable table;
  table.header = {"figure", "claim", "paper", "here", "verdict"};
  for (const Finding& f : findings)
    table.rows.push_back(
        {f.figure, f.claim, f.paper, f.here, NameOf(f.verdict, FindingVerdicts())});
  return table;
}

Json FindingJson(const std::vector<Finding>& findings) {
  Json all = Json::array();
  for (const Finding& f : findings) {
    all.push_back({{"figure", f.figure},
                   {"claim", f.claim},
                   {"paper", f.paper},
                   {"here", f.here},
                   {"verdict", NameOf(f.verdict, FindingVerdicts())}});
  }
  return all;
}

void WritePapersReport(const std::vector<Protocol>& protocols, const Record& record,
                       const std::vector<Finding>& findings, double scale,
                       const std::string& path) {
  HtmlReport report("Efficiency experiments of the papers", record.machine.Line());
  report.Paragraph(StrCat("Lengths are those of the papers times ", Trimmed(scale, 4), "."));
  if (const std::string busy = record.Busy(); !busy.empty()) report.Paragraph(busy);
  for (const Protocol& p : protocols) {
    report.Heading(p.source).Paragraph(p.setup);
    const bool steps = p.whole.has_value();
    LineChart chart{
        p.source, p.way == Way::kDecode ? "tokens before" : "tokens", steps ? "steps/s" : "ms", {}};
    chart.log_x = chart.log_y = true;
    if (p.lengths.size() > 1) {
      for (const Arm& arm : p.arms) {
        Series series{arm.name, {}, {}};
        for (const Row* row : Curve(p, record.rows, arm.name)) {
          series.x.push_back(double(LengthOf(*row)));
          series.y.push_back(steps ? 1e3 / row->ms.median : row->ms.median);
        }
        chart.series.push_back(std::move(series));
      }
      report.Svg(RenderSvg(chart));
    }
    std::vector<Finding> own;
    std::copy_if(findings.begin(), findings.end(), std::back_inserter(own),
                 [&](const Finding& f) { return f.figure == p.name; });
    report.Table(FindingTable(own));
    Record rows = record;
    rows.rows.clear();
    for (const Row& row : record.rows) {
      if (row.what["figure"] == p.name) rows.rows.push_back(row);
    }
    if (!rows.rows.empty()) report.Table(RecordTable(rows, PapersColumns()));
  }
  report.Write(path);
}

}  // namespace cistern::bench
