// Verdicts on made-up records, and records as files.
#include "cistern/bench/diff.h"

#include <gtest/gtest.h>

#include <cmath>

#include "cistern/io/atomic_file.h"
#include "cistern/io/test_folder.h"

namespace cistern::bench {
namespace {

Record Made(const std::vector<std::pair<std::string, Spread>>& rows) {
  Record r;
  r.kind = "ops";
  r.machine = {"A processor", 2, 2, "avx2", "2.15.0", "0.1.0", "abc"};
  for (const auto& [name, ms] : rows) {
    Row row;
    row.what = {{"mechanism", name}, {"length", 64}};
    row.ms = ms;
    row.figures = {{"tokens_per_s", 64e3 / ms.median}, {"state_bytes", 12}};
    r.rows.push_back(row);
  }
  return r;
}

Change One(const Spread& before, const Spread& after, const DiffSettings& settings = {}) {
  const auto changes = Diff(Made({{"m", before}}), Made({{"m", after}}), settings);
  EXPECT_EQ(changes.size(), 1u);
  return changes.at(0);
}

TEST(Diff, VerdictsKnowTheSpread) {
  // 10 +- 1 % against 12, 8, 10.2.
  const Spread quiet = {10, 9.95, 10.05, 20};
  EXPECT_EQ(One(quiet, {12, 11.9, 12.1, 20}).verdict, Verdict::kSlower);
  EXPECT_EQ(One(quiet, {8, 7.95, 8.05, 20}).verdict, Verdict::kFaster);
  EXPECT_EQ(One(quiet, {10.2, 10.15, 10.25, 20}).verdict, Verdict::kSame);  // below the threshold
  EXPECT_EQ(One(quiet, {10.2, 10.15, 10.25, 20}, {.threshold = 0.001}).verdict, Verdict::kSlower);
  // The same medians, but one of the two is known within a third only.
  EXPECT_EQ(One({10, 9, 12.5, 20}, {12, 11.9, 12.1, 20}).verdict, Verdict::kSame);
  EXPECT_EQ(One(quiet, {12, 10.01, 14, 20}).verdict, Verdict::kSame);
  // A wide spread that is far away all the same.
  EXPECT_EQ(One({10, 9, 12.5, 20}, {30, 28, 33, 20}).verdict, Verdict::kSlower);
  const Change c = One(quiet, {12, 11.7, 12.3, 20});
  EXPECT_DOUBLE_EQ(c.ratio, 1.2);
  EXPECT_NEAR(c.noise, std::hypot(0.01, 0.05), 1e-12);
  EXPECT_EQ(c.note, "");
  EXPECT_NE(One(quiet, {12, 11.9, 12.1, 3}).note.find("only 3 runs"), std::string::npos);
}

TEST(Diff, ShortTimesHaveThreeDigitsToo) {
  const auto changes = Diff(Made({{"m", {0.000696, 0.000695, 0.000697, 9}}}),
                            Made({{"m", {0.000679, 0.000678, 0.00068, 9}}}), {});
  const HtmlTable table = DiffTable(changes);
  EXPECT_EQ(table.rows[0][1], "0.000696");
  EXPECT_EQ(table.rows[0][2], "0.000679");
}

// Whichever way round: what is slower one way is faster the other.
TEST(Diff, IsSymmetric) {
  for (const double ratio : {1.01, 1.05, 1.09, 1.11, 1.3, 3.0}) {
    const Spread a = {10, 9.75, 10.25, 9}, b = {10 * ratio, 9.75 * ratio, 10.25 * ratio, 9};
    const Verdict there = One(a, b).verdict, back = One(b, a).verdict;
    EXPECT_EQ(there == Verdict::kSame, back == Verdict::kSame) << ratio;
    EXPECT_EQ(there == Verdict::kSlower, back == Verdict::kFaster) << ratio;
  }
}

TEST(Diff, RowsThatOnlyOneFileHas) {
  Record before = Made({{"a", {1, 1, 1, 9}}, {"b", {1, 1, 1, 9}}, {"c", {1, 1, 1, 9}}}),
         after = Made({{"b", {1, 1, 1, 9}}, {"d", {1, 1, 1, 9}}, {"c", {1, 1, 1, 9}}});
  after.rows[2].skipped = "not supported: why";
  const auto changes = Diff(before, after, {});
  ASSERT_EQ(changes.size(), 4u);
  EXPECT_EQ(changes[0].verdict, Verdict::kSame);
  EXPECT_EQ(changes[1].verdict, Verdict::kOnlyAfter);
  EXPECT_EQ(changes[2].verdict, Verdict::kOnlyBefore);
  EXPECT_EQ(changes[2].note, "not supported: why");
  EXPECT_EQ(changes[3].verdict, Verdict::kOnlyBefore);
  EXPECT_EQ(changes[3].what["mechanism"], "a");
  before.rows[2].skipped = "so";
  EXPECT_EQ(Diff(before, after, {})[2].verdict, Verdict::kNotMeasured);
}

TEST(Diff, OtherMachinesAreRefusedUnlessTold) {
  const Record before = Made({{"m", {1, 1, 1, 9}}});
  const auto refused = [&](const Record& after, const std::string& why) {
    try {
      Diff(before, after, {});
      ADD_FAILURE() << why;
    } catch (const UsageError& e) {
      EXPECT_NE(std::string(e.what()).find(why), std::string::npos) << e.what();
    }
    EXPECT_EQ(Diff(before, after, {.any_machine = true}).size(), 1u);
  };
  Record after = before;
  after.machine.processor = "Another";
  refused(after, "A processor and Another");
  after = before, after.machine.threads = 1;
  refused(after, "threads 2 and 1");
  after = before, after.machine.isa = "avx512";
  refused(after, "avx2 and avx512");
  after = before, after.machine.commit = "def", after.machine.torch = "3";
  EXPECT_EQ(Diff(before, after, {}).size(), 1u);
  after = before, after.kind = "model";
  EXPECT_THROW(Diff(before, after, {.any_machine = true}), UsageError);
  after = before, after.cpu_share = 0.5;
  EXPECT_NE(Diff(before, after, {})[0].note.find("busy"), std::string::npos);
}

// Rows of bench ops name their threads and target: those in use are matched with those in use, the
// others with their like.
TEST(Diff, RowsOfOtherMachinesAreMatched) {
  const auto made = [](const std::string& isa, int64_t threads, double ms) {
    Record r = Made({{"m", {ms, ms, ms, 9}}, {"m", {ms, ms, ms, 9}}});
    r.machine.isa = isa, r.machine.threads = threads;
    r.rows[0].what.update(Json{{"isa", isa}, {"threads", threads}});
    r.rows[1].what.update(Json{{"isa", "sse4"}, {"threads", 1}});
    return r;
  };
  const Record before = made("avx2", 2, 10);
  for (const Record& after : {made("avx512", 2, 5), made("avx2", 4, 5), made("avx512", 8, 5)}) {
    const auto changes = Diff(before, after, {.any_machine = true});
    ASSERT_EQ(changes.size(), 2u);
    for (const Change& c : changes) EXPECT_EQ(c.verdict, Verdict::kFaster) << c.what.dump();
    EXPECT_EQ(changes[0].what, after.rows[0].what);
  }
  // On one machine another target is another row.
  Record other = before;
  other.rows[0].what["isa"] = "portable";
  EXPECT_EQ(Diff(before, other, {}).size(), 3u);
}

TEST(Record, AFileGivesBackWhatWasWritten) {
  const TestFolder folder;
  Record r = Made({{"a", {3, 2, 4, 9}}, {"b", {1, 1, 1, 5}}});
  r.rows[1].skipped = "WRONG", r.rows[1].wrong = true;
  r.peaks = {{{"threads", 2}, {"gb_per_s", 31.5}}};
  r.settings = {{"seconds", 0.5}};
  r.other_cores = 0.75;
  WriteRecord(r, folder / "r.json");
  const Record back = ReadRecord(ReadJsonFile(folder / "r.json"), "r.json");
  EXPECT_EQ(RecordJson(back), RecordJson(r));
  EXPECT_EQ(back.rows[0].ms.high, 4);
  EXPECT_TRUE(back.rows[1].wrong);
  EXPECT_NE(back.Busy().find("0.8 of 2 cores"), std::string::npos) << back.Busy();
  EXPECT_EQ(Made({}).Busy(), "");
}

TEST(Record, WhatIsNoRecordIsRefused) {
  const Json good = RecordJson(Made({{"a", {3, 2, 4, 9}}}));
  const auto refused = [](const Json& json, const std::string& why) {
    try {
      ReadRecord(json, "file.json");
      ADD_FAILURE() << why;
    } catch (const Error& e) {
      EXPECT_NE(std::string(e.what()).find("file.json"), std::string::npos) << e.what();
      EXPECT_NE(std::string(e.what()).find(why), std::string::npos) << e.what();
    }
  };
  refused(Json::object(), "no file of cistern bench");
  refused(3, "no file of cistern bench");
  Json bad = good;
  bad["cistern_bench"] = 99;
  refused(bad, "version 99");
  bad = good, bad["machine"].erase("processor");
  refused(bad, "'processor'");
  bad = good, bad["rows"][0]["ms"]["low"] = 5;
  refused(bad, "quartiles");
  bad = good, bad["rows"].push_back(good["rows"][0]);
  refused(bad, "measure the same");
  bad = good, bad["rows"] = 3;
  refused(bad, "rows");
  bad = good, bad.erase("peaks");
  refused(bad, "'peaks'");
}

TEST(Record, TheTableSaysOnceWhatAllRowsShare) {
  Record r = Made({{"a", {3, 2, 4, 9}}, {"b", {1, 1, 1, 5}}});
  const std::vector<Column> columns = {{"ms", "ms", Column::Kind::kMilliseconds},
                                       {"spread", "spread", Column::Kind::kShare},
                                       {"gflops", "GFLOP/s", Column::Kind::kRate}};
  EXPECT_EQ(SharedText(r), "length 64");
  HtmlTable table = RecordTable(r, columns);
  EXPECT_EQ(table.header, (std::vector<std::string>{"mechanism", "ms", "spread"}));
  EXPECT_EQ(table.rows[0], (std::vector<std::string>{"a", "3.00", "67 %"}));
  r.rows[1].what["length"] = 128, r.rows[1].skipped = "why";
  table = RecordTable(r, columns);
  EXPECT_EQ(table.header,
            (std::vector<std::string>{"mechanism", "length", "ms", "spread", "note"}));
  EXPECT_EQ(table.rows[1], (std::vector<std::string>{"b", "128", "-", "-", "why"}));
  EXPECT_EQ(SharedText(r), "");
}

}  // namespace
}  // namespace cistern::bench
