// Verdicts on made-up times; every row of the table on tiny shapes.
#include "cistern/bench/papers.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <set>

#include "cistern/io/atomic_file.h"
#include "cistern/io/test_folder.h"
#include "cistern/kernels/isa.h"

namespace cistern::bench {
namespace {

using Kind = Claim::Kind;
using Verdict = Finding::Verdict;

Protocol Made(const std::vector<Claim>& claims) {
  return {"made", "a source", "a setup", Way::kCausal,   Pass::kForward,
          1,      1,          8,         {64, 128, 256}, {{"a", "latte", {}}, {"b", "softmax", {}}},
          claims};
}

// Times of the arms at 64, 128, 256; quartiles at 10 %.
std::vector<Row> Rows(const std::vector<double>& a, const std::vector<double>& b) {
  std::vector<Row> rows;
  for (size_t i = 0; i < a.size(); ++i) {
    for (const bool second : {false, true}) {
      const double t = second ? b[i] : a[i];
      Row row;
      row.what = {{"figure", "made"}, {"arm", second ? "b" : "a"}, {"length", 64 << i}};
      row.ms = {t, 0.9 * t, 1.1 * t, 9};
      row.figures = {{"peak_bytes", second ? 1000 : 500}};
      rows.push_back(row);
    }
  }
  return rows;
}

Finding One(const Claim& claim, const std::vector<double>& a, const std::vector<double>& b) {
  return Findings(Made({claim}), Rows(a, b)).at(0);
}

TEST(Papers, VerdictsOnOrders) {
  const Claim faster = {Kind::kFaster, "a", "b", 256, 1.5}, slower = {Kind::kSlower, "a", "b", 256};
  EXPECT_EQ(One(faster, {1, 1, 1}, {1, 1, 2}).verdict, Verdict::kAgrees);
  EXPECT_EQ(One(faster, {1, 1, 1}, {1, 1, 2}).here, "2.00 x");
  EXPECT_EQ(One(faster, {1, 1, 1}, {1, 1, 2}).paper, "1.50 x");
  EXPECT_EQ(One(faster, {1, 1, 2}, {1, 1, 1}).verdict, Verdict::kDiffers);
  EXPECT_EQ(One(faster, {1, 1, 1}, {1, 1, 1.1}).verdict, Verdict::kLevel);
  EXPECT_EQ(One(slower, {1, 1, 2}, {1, 1, 1}).verdict, Verdict::kAgrees);
  EXPECT_EQ(One(slower, {1, 1, 1}, {1, 1, 2}).verdict, Verdict::kDiffers);
  EXPECT_EQ(One({Kind::kFaster, "a", "b", 512}, {1, 1, 1}, {1, 1, 2}).verdict,
            Verdict::kNotMeasured);
  EXPECT_EQ(One({Kind::kLevel, "a", "b", 64}, {1, 1, 1}, {1.05, 1, 2}).verdict, Verdict::kAgrees);
  EXPECT_EQ(One({Kind::kLevel, "a", "b", 64}, {1, 1, 1}, {1.2, 1, 2}).verdict, Verdict::kDiffers);
  EXPECT_EQ(One({Kind::kMemory, "a", "b", 64, 0.6}, {1}, {1}).verdict, Verdict::kAgrees);
  EXPECT_EQ(One({Kind::kMemory, "b", "a", 64, 0.6}, {1}, {1}).verdict, Verdict::kDiffers);
}

TEST(Papers, VerdictsOnCurves) {
  const Claim linear = {Kind::kSlope, "a", "", 0, 1}, square = {Kind::kSlope, "a", "", 0, 2};
  EXPECT_EQ(One(linear, {1, 2, 4}, {1, 1, 1}).verdict, Verdict::kAgrees);
  EXPECT_EQ(One(linear, {1, 2, 8}, {1, 1, 1}).verdict, Verdict::kDiffers);
  EXPECT_EQ(One(square, {1, 2, 8}, {1, 1, 1}).verdict, Verdict::kAgrees);
  EXPECT_EQ(One(square, {1, 2, 8}, {1, 1, 1}).here, "T^2.00");
  EXPECT_EQ(One(linear, {1}, {1}).verdict, Verdict::kNotMeasured);
  const Claim flat = {Kind::kFlat, "a"};
  EXPECT_EQ(One(flat, {1, 1.1, 1.2}, {1, 1, 1}).verdict, Verdict::kAgrees);
  EXPECT_EQ(One(flat, {1, 1.1, 1.3}, {1, 1, 1}).verdict, Verdict::kDiffers);
  const Claim crossing = {Kind::kCrossing, "a", "b", 0, 100};
  EXPECT_EQ(One(crossing, {4, 4, 4}, {2, 8, 16}).verdict, Verdict::kAgrees);
  EXPECT_EQ(One(crossing, {4, 4, 4}, {2, 8, 16}).here, "64 to 128");
  EXPECT_EQ(One(crossing, {4, 4, 40}, {2, 8, 16}).verdict, Verdict::kDiffers);
}

TEST(Papers, ScalingChangesLengthsAndWhatIsClaimedAtThem) {
  Protocol p = Made({{Kind::kFaster, "a", "b", 128, 1.5}, {Kind::kCrossing, "a", "b", 0, 100}});
  p.batch = 8;
  const Protocol half = Scaled(p, 0.5, false), tiny = Scaled(p, 0.01, true);
  EXPECT_EQ(half.lengths, (std::vector<int64_t>{32, 64, 128}));
  EXPECT_EQ(half.claims[0].length, 64);
  EXPECT_EQ(half.claims[1].paper, 100);
  EXPECT_EQ(half.batch, 8);
  EXPECT_EQ(tiny.lengths, (std::vector<int64_t>{16}));
  EXPECT_EQ(tiny.batch, 1);
  p.whole = WholeModel{};
  EXPECT_EQ(Scaled(p, 0.5, false).whole->target_length, 0);
  p.whole->target_length = 100;
  EXPECT_EQ(Scaled(p, 0.5, false).whole->target_length, 50);
}

TEST(Papers, FiguresAreChosenByNameOrSort) {
  const size_t cores = ChosenProtocols({"cores"}).size(),
               models = ChosenProtocols({"models"}).size();
  EXPECT_EQ(cores + models, Protocols().size());
  EXPECT_EQ(ChosenProtocols({}).size(), cores);
  for (const Protocol& p : ChosenProtocols({"cores"})) EXPECT_FALSE(p.whole) << p.name;
  EXPECT_EQ(ChosenProtocols({"abc-fig1", "cores", "abc-fig1"}).size(), cores);
  EXPECT_EQ(ChosenProtocols({"reuse-table6"}).at(0).name, "reuse-table6");
  EXPECT_THROW(ChosenProtocols({"cores", "ucu-fig3"}), UsageError);
}

// A model of the same layers and heads that takes no time.
void Shrink(WholeModel* whole) {
  Json& model = whole->model;
  model["dim"] = 2 * model["heads"].get<int64_t>(), model["ffn_dim"] = 8;
  if (model.contains("vocab_size")) model["vocab_size"] = 40;
  if (model.contains("classes")) model["classes"] = 3;
  if (model.contains("encoder_classifier")) model["encoder_classifier"]["channels"] = 5;
}

// Every arm exists, its options fit, it runs, and every claim is about arms and lengths of its
// figure.
TEST(Papers, EveryRowOfTheTableRuns) {
  const TestFolder folder;
  MeasureSettings settings;
  settings.timer.seconds = 0, settings.timer.runs = 1, settings.timer.shortest = 0;
  Case like;
  like.isa = ActiveIsa();
  Peaks peaks;
  Record record;
  std::vector<Protocol> scaled;
  std::vector<Finding> findings;
  std::set<std::string> names;
  for (const Protocol& p : Protocols()) {
    EXPECT_TRUE(names.insert(p.name).second) << p.name;
    std::set<std::string> arms;
    for (const Arm& arm : p.arms) EXPECT_TRUE(arms.insert(arm.name).second) << arm.name;
    for (const Claim& c : p.claims) {
      EXPECT_TRUE(arms.count(c.arm)) << p.name << ": " << c.arm;
      EXPECT_TRUE(c.than.empty() || arms.count(c.than)) << p.name << ": " << c.than;
      EXPECT_TRUE(c.length == 0 ||
                  std::find(p.lengths.begin(), p.lengths.end(), c.length) != p.lengths.end())
          << p.name << ": " << c.length;
    }
    Protocol tiny = Scaled(p, 0.016, true);
    tiny.batch = 1;
    if (tiny.whole) Shrink(&*tiny.whole);
    const std::vector<Row> rows = MeasureProtocol(tiny, like, settings, peaks);
    EXPECT_EQ(rows.size(), tiny.lengths.size() * tiny.arms.size());
    for (const Row& row : rows) EXPECT_EQ(row.skipped, "") << row.what;
    record.rows.insert(record.rows.end(), rows.begin(), rows.end());
    const auto found = Findings(tiny, rows);
    EXPECT_EQ(found.size(), p.claims.size());
    for (size_t i = 0; i < found.size(); ++i) {
      // So little memory may have been there already.
      const bool measured = !tiny.whole || tiny.claims[i].kind != Kind::kMemory;
      if (tiny.lengths.size() > 1 && measured) {
        EXPECT_NE(found[i].verdict, Verdict::kNotMeasured)
            << found[i].figure << ": " << found[i].claim;
      }
    }
    findings.insert(findings.end(), found.begin(), found.end());
    scaled.push_back(tiny);
  }
  WritePapersReport(scaled, record, findings, 0.016, folder / "report.html");
  const std::string html = ReadFile(folder / "report.html");
  for (const Protocol& p : Protocols()) EXPECT_NE(html.find(p.source), std::string::npos) << p.name;
  EXPECT_NE(html.find("<svg"), std::string::npos);
  EXPECT_NE(html.find("steps/s"), std::string::npos);
}

}  // namespace
}  // namespace cistern::bench
