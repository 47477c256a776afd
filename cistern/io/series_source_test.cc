#include "cistern/io/series_source.h"

#include <gtest/gtest.h>

#include <cmath>

#include "cistern/base/error.h"
#include "cistern/io/atomic_file.h"
#include "cistern/io/test_folder.h"

namespace cistern {
namespace {

struct WholeSeries {
  std::vector<float> values;
  int64_t steps = 0, line = 0;
  std::string label, name;
};

class SeriesSourceTest : public ::testing::Test {
 protected:
  std::string File(const std::string& text, const std::string& name = "a.ts") {
    const std::string path = folder_ / name;
    WriteFileAtomically(path, text);
    return path;
  }
  // All series of a file; `source_` is left at its end.
  std::vector<WholeSeries> Read(const std::string& path) {
    source_ = OpenSeries(path, format_);
    std::vector<WholeSeries> all;
    for (SeriesPiece piece; source_->Next(&piece);) {
      if (piece.first) all.push_back({{}, 0, piece.line, piece.label, piece.name});
      EXPECT_EQ(piece.values.size(), size_t(piece.steps) * source_->channels().size());
      all.back().steps += piece.steps;
      all.back().values.insert(all.back().values.end(), piece.values.begin(), piece.values.end());
    }
    return all;
  }
  // The message that a file ends in.
  std::string Message(const std::string& text, const std::string& name = "a.ts") {
    try {
      if (Read(File(text, name)).empty()) return "empty";
    } catch (const Error& e) {
      return e.what();
    }
    return "read";
  }
  static void Says(const std::string& message, const std::string& part) {
    EXPECT_NE(message.find(part), message.npos) << "no '" << part << "' in " << message;
  }
  static void Are(const std::vector<float>& values, const std::vector<float>& want) {
    ASSERT_EQ(values.size(), want.size());
    for (size_t i = 0; i < want.size(); ++i) {
      if (std::isnan(want[i])) {
        EXPECT_TRUE(std::isnan(values[i])) << i;
      } else {
        EXPECT_EQ(values[i], want[i]) << i;
      }
    }
  }
  SeriesFormat format_;
  std::unique_ptr<SeriesSource> source_;
  TestFolder folder_;
};

TEST_F(SeriesSourceTest, ChannelsOfTsStandBesideEachOther) {
  const auto all = Read(
      File("# words\n@problemName X\n@dimensions 2\n@equalLength false\n@classLabel true up down\n"
           "@data\n1,2,3:4,?,6:up\r\n\n +5 : nan :down\n"));
  ASSERT_EQ(all.size(), 2u);
  EXPECT_EQ(source_->channels().size(), 2u);
  EXPECT_EQ(all[0].steps, 3);
  Are(all[0].values, {1, 4, 2, NAN, 3, 6});
  Are(all[1].values, {5, NAN});
  EXPECT_EQ(source_->missing(), 2);
  EXPECT_EQ(all[0].label, "up");
  EXPECT_EQ(all[1].label, "down");
  EXPECT_EQ(all[0].line, 7);
  EXPECT_EQ(all[1].line, 9);
  EXPECT_EQ(source_->classes(), (std::vector<std::string>{"up", "down"}));
}

TEST_F(SeriesSourceTest, BadFilesAreRefusedWithTheirLine) {
  const std::string head = "@univariate true\n@classLabel true a b\n@data\n";
  Says(Message(head + "1,2:a\n1,x:b\n"), "a.ts:5: value 2 is 'x'");
  Says(Message(head + "1,2:c\n"), "a.ts:4: the label 'c' is no class");
  Says(Message(head + "1:2:a\n"), "a.ts:4: expected 1 channels and a label");
  Says(Message(head + "1,1e999:a\n"), "value 2 is '1e999'");
  Says(Message(head + "1,,3:a\n"), "value 2 is ''");
  EXPECT_EQ(Message(head), "empty");
  Says(Message("1,2:a\n"), "a.ts:1: expected a line of # or @");
  Says(Message("@classLabel true a b\n"), "expected a line @data");
  Says(Message("@data\n1:a\n"), "expected @classLabel true");
  Says(Message("@classLabel true a\n@data\n1:a\n"), "two classes");
  Says(Message("@timeStamps true\n"), "timestamps are not read");
  Says(Message("@dimensions 2.5\n"), "whole number from 1");
  Says(Message("@equalLength true\n@seriesLength 2\n@classLabel true a b\n@data\n1,2,3:a\n"),
       "expected 2 values");
  Says(Message("@dimensions 2\n@classLabel true a b\n@data\n1,2:3:a\n"),
       "channel 2 has 1 values, channel 1 2");
  Says(Message("@targetLabel true\n@data\n1:a\n"), "task.series.regression=true");
  format_.labels = SeriesFormat::Labels::kNumbers;
  Says(Message("@targetLabel true\n@data\n1:a\n"), "not a finite number");
  Says(Message("@classLabel true a b\n@data\n1:a\n"), "task.series.regression=false");
}

TEST_F(SeriesSourceTest, BadSeriesAreSkippedWhereAsked) {
  format_.skip_bad = true;
  const auto all =
      Read(File("@dimensions 2\n@classLabel true a b\n@data\n1,2:3:a\n7:?:b\n1:2:c\n8:9:a\n"));
  EXPECT_EQ(source_->skipped(), 2);
  EXPECT_EQ(source_->missing(), 1);
  ASSERT_EQ(all.size(), 2u);
  EXPECT_EQ(all[0].values[0], 7);
  EXPECT_EQ(all[1].values[1], 9);
}

TEST_F(SeriesSourceTest, WithoutLabelsOfTs) {
  format_.labels = SeriesFormat::Labels::kNone;
  const auto all = Read(File("@classLabel false\n@data\n1,2:3,4\n5:6\n"));
  ASSERT_EQ(all.size(), 2u);
  Are(all[0].values, {1, 3, 2, 4});
  format_.labels = SeriesFormat::Labels::kClasses;
  format_.need_labels = false;  // of a class that is not listed: nobody looks at it
  EXPECT_EQ(Read(File("@classLabel true a b\n@data\n1,2:?\n")).size(), 1u);
}

// A row a series: every column but the label's is a step, and empty cells at the end are none.
TEST_F(SeriesSourceTest, RowsOfTables) {
  const auto all =
      Read(File("label,t0,t1,t2\na,1,2,3\nb,4,,\na, 5 ,?,-6e0\nb,,NaN,\n", "rows.csv"));
  ASSERT_EQ(all.size(), 4u);
  EXPECT_EQ(source_->channels().size(), 1u);
  Are(all[0].values, {1, 2, 3});
  Are(all[1].values, {4});
  Are(all[2].values, {5, NAN, -6});
  Are(all[3].values, {NAN, NAN});
  EXPECT_EQ(all[1].label, "b");
  EXPECT_EQ(all[3].line, 5);
  EXPECT_EQ(source_->missing(), 3);
  // Steps with numbers for names, as pandas writes them.
  EXPECT_EQ(Read(File("label,0,1\na,5,6\n", "numbered.csv")).size(), 1u);
  // Without a header the label's column has a number for a name; JSON lines.
  Says(Message("1,2,3\n", "bare.csv"), "task.label_column=1");
  format_.label_column = "1";
  Are(Read(File("7\t2\t3\n8\t4\t5\n", "bare.tsv"))[1].values, {4, 5});
  Are(Read(File("1\t2\t3\n8\t4\t5\n", "bare.tsv"))[0].values, {2, 3});  // no header
  format_.label_column = "";
  Are(Read(File("{\"a\":1,\"class\":\"x\",\"b\":null,\"c\":2}\n", "rows.jsonl"))[0].values,
      {1, NAN, 2});
}

// Of a model: a file to predict has its columns, with names in any order.
TEST_F(SeriesSourceTest, RowsOfAnotherTable) {
  format_.need_labels = false;
  format_.known_columns = {"t0", "t1", "t2"}, format_.label_column = "label";
  Are(Read(File("t2,t0,t1\n3,1,2\n", "rows.csv"))[0].values, {1, 2, 3});
  Are(Read(File("t1,label,t0\n2,a,1\n", "rows.csv"))[0].values, {1, 2});          // shorter
  Are(Read(File("t1,t0,t2,t3\n2,1,3,4\n", "rows.csv"))[0].values, {1, 2, 3, 4});  // longer
  Says(Message("id,t0,t1\n7,1,2\n", "rows.csv"), "the column 'id' was not in the training table");
  Says(Message("t0,t2\n1,3\n", "rows.csv"), "there is no column 't1', a step of the training");
  Says(Message("t0,t1,t3\n1,2,4\n", "rows.csv"), "there is no column 't2', a step of the");
  // Without names they are told by their number.
  format_.known_columns = {};
  format_.unnamed_columns = 4, format_.label_column = "2";
  Are(Read(File("1,9,2,3\n", "bare.csv"))[0].values, {1, 2, 3});
  Are(Read(File("1,2,3\n", "bare.csv"))[0].values, {1, 2, 3});
  Are(Read(File("a,label,b,c\n1,9,2,3\n", "named.csv"))[0].values, {1, 2, 3});
  format_.ignore = {"3"};
  Are(Read(File("1,2,3\n", "bare.csv"))[0].values, {1, 3});
  Says(Message("1,2\n", "bare.csv"), "2 columns, and the training table, which names none, had 4");
  format_.layout = SeriesFormat::Layout::kSteps, format_.channels = {"4"};
  Are(Read(File("1,2,3\n", "bare.csv"))[0].values, {3});
}

// A row a step: columns are channels, in the order that was learned.
TEST_F(SeriesSourceTest, StepsOfTables) {
  const std::string text = "series,date,x,y,label\none,mon,1,2,a\none,tue,3,,a\ntwo,mon,5,6,b\n";
  auto all = Read(File(text, "steps.csv"));
  ASSERT_EQ(all.size(), 2u);
  EXPECT_EQ(source_->channels(), (std::vector<std::string>{"x", "y"}));
  Are(all[0].values, {1, 2, 3, NAN});
  Are(all[1].values, {5, 6});
  EXPECT_EQ(all[0].label, "a");
  EXPECT_EQ(all[1].name, "two");
  EXPECT_EQ(all[1].line, 4);
  ASSERT_EQ(source_->notes().size(), 1u);
  Says(source_->notes()[0], "column date: not read");
  format_.channels = {"y", "x"};
  format_.need_labels = false;
  Are(Read(File("x,series,y\n1,q,2\n", "other.csv"))[0].values, {2, 1});
  Says(Message("x,series\n1,q\n", "other.csv"), "there is no column 'y', a channel that the model");
  // One series without a series' column; a long one comes in pieces.
  format_ = {};
  format_.labels = SeriesFormat::Labels::kNone;
  std::string longer = "u,v\n";
  for (int t = 0; t < 40000; ++t) longer += StrCat(t, ",", -t, "\n");
  all = Read(File(longer, "long.csv"));
  ASSERT_EQ(all.size(), 1u);
  EXPECT_EQ(all[0].steps, 40000);
  EXPECT_EQ(all[0].values[2 * 39999 + 1], -39999);
  EXPECT_EQ(all[0].values[2 * 20000], 20000);
}

TEST_F(SeriesSourceTest, BadTablesAreRefusedWithTheirLine) {
  Says(Message("label,a\nx,1\ny,two\n", "t.csv"), "t.csv:3: column a is 'two'");
  Says(Message("label,a\nx,1\ny,inf\n", "t.csv"), "t.csv:3: column a is 'inf'");
  Says(Message("label,a\nx,1e60\n", "t.csv"), "t.csv:2: column a is '1e60'");
  Says(Message("label,a\nx,1\ny\n", "t.csv"), "t.csv:3: 1 cells, and 2 columns");
  Says(Message("label,a\nx,\n", "t.csv"), "t.csv:2: the row has no values");
  Says(Message("label,a\n,1\n", "t.csv"), "t.csv:2: the label is empty");
  Says(Message("kind,a\nx,1\n", "t.csv"), "which column is the label? Its columns are kind, a");
  const std::string unnamed = Message(",kind,a\n0,x,1\n", "t.csv");
  Says(unnamed, "which column is the label? Its columns are kind, a; name it: ");
  Says(unnamed, "task.header=no");
  Says(Message("series,label,a\n1,x,1\n1,y,1\n", "t.csv"), "t.csv:3: the label is 'y'");
  Says(Message("series,label,a\n1,x,1\n2,x,1\n1,x,1\n", "t.csv"),
       "t.csv:4: the series '1' has ended before");
  Says(Message("series,label,a\n,x,1\n", "t.csv"), "t.csv:2: the series' name is empty");
  format_.ignore = {"b"};
  Says(Message("label,a\nx,1\n", "t.csv"), "column 'b'");
  format_.channels = {"1"};  // of a model: its new rows may be without
  EXPECT_EQ(Read(File("label,a\nx,1\n", "t.csv")).size(), 1u);
  Says(Message("x", "t.txt"), "a file of series ends in");
  format_ = {};
  format_.skip_bad = true;
  EXPECT_EQ(Read(File("label,a\nx,1\ny,two\ny\nz,3\n", "t.csv")).size(), 2u);
  EXPECT_EQ(source_->skipped(), 2);
  EXPECT_EQ(Read(File("series,label,a,b\n1,x,1,2\n1,x,q,3\n1,x,4,5\n2,x,6,?\n", "t.csv"))[0].steps,
            2);
  EXPECT_EQ(source_->skipped(), 1);
  EXPECT_EQ(source_->missing(), 1);
}

TEST_F(SeriesSourceTest, ALabelIsNoValueWhereNoneIsAskedFor) {
  format_.labels = SeriesFormat::Labels::kNone;
  const auto all = Read(File("series,label,x,target\n1,7,1,2\n1,7,3,4\n2,8,5,6\n", "t.csv"));
  ASSERT_EQ(all.size(), 2u);
  EXPECT_EQ(source_->channels(), (std::vector<std::string>{"x", "target"}));
  Are(all[0].values, {1, 2, 3, 4});
  ASSERT_EQ(source_->notes().size(), 1u);
  Says(source_->notes()[0], "column label: not read");
  File(",x\n0,5\n1,6\n", "pandas.csv");
  Are(Read(folder_ / "pandas.csv")[0].values, {5, 6});
  Says(source_->notes()[0], "without a name");
  format_.channels = {"x", "label"};  // of a model that was trained on it
  Are(Read(folder_ / "t.csv")[1].values, {5, 8});
}

// What NumPy writes, byte by byte.
std::string Npy(const std::string& descr, const std::string& shape, const std::string& data) {
  std::string header =
      "{'descr': '" + descr + "', 'fortran_order': False, 'shape': " + shape + ", }";
  header.resize((10 + header.size()) / 64 * 64 + 53, ' ');
  header += '\n';
  return std::string("\x93NUMPY\x01\0", 8) + char(header.size() & 255) + char(header.size() >> 8) +
         header + data;
}

template <class T>
std::string Bytes(const std::vector<T>& x) {
  return {reinterpret_cast<const char*>(x.data()), x.size() * sizeof(T)};
}

TEST_F(SeriesSourceTest, Npy) {
  File(Npy("<i8", "(2,)", Bytes<int64_t>({7, -1})), "y_train.npy");
  auto all =
      Read(File(Npy("<f4", "(2, 3, 2)", Bytes<float>({1, 2, 3, 4, 5, 6, 7, 8, NAN, 9, 1, 2})),
                "X_train.npy"));
  ASSERT_EQ(all.size(), 2u);
  Are(all[0].values, {1, 2, 3, 4, 5, 6});
  Are(all[1].values, {7, 8, NAN, 9, 1, 2});
  EXPECT_EQ(all[0].label, "7");
  EXPECT_EQ(all[1].label, "-1");
  EXPECT_EQ(all[1].line, 2);
  EXPECT_EQ(source_->channels().size(), 2u);
  EXPECT_EQ(source_->missing(), 1);
  const std::string doubles = File(Npy("<f8", "(2, 2)", Bytes<double>({1, 2, 3, 4})), "d.npy");
  Says(ErrorMessage([&] { Read(doubles); }), "expected its labels in");
  File(Npy("<f8", "(2,)", Bytes<double>({.5, 2})), "d_labels.npy");
  Says(ErrorMessage([&] { Read(doubles); }), "task.series.regression=true");
  File(Npy("<i8", "(2,)", Bytes<int64_t>({1, (int64_t{1} << 53) + 1})), "d_labels.npy");
  Says(ErrorMessage([&] { Read(doubles); }), "label of row 2 is not below 2^53");
  File(Npy("<f8", "(2,)", Bytes<double>({.5, 2})), "d_labels.npy");
  format_.labels = SeriesFormat::Labels::kNumbers;
  EXPECT_EQ(Read(doubles)[0].label, "0.5");
  File(Npy("<f8", "(3,)", Bytes<double>({.5, 2, 3})), "d_labels.npy");
  Says(ErrorMessage([&] { Read(doubles); }), "one number for each row");
  File(Npy("<f8", "(2,)", Bytes<double>({.5, NAN})), "d_labels.npy");
  Says(ErrorMessage([&] { Read(doubles); }), "row 2");
  format_.labels = SeriesFormat::Labels::kNone;
  EXPECT_EQ(Read(File(Npy("|u1", "(5,)", "\1\2\3\4\5"), "one.npy"))[0].steps, 5);
  File(Npy("<f8", "(2, 1)", Bytes<double>({1, INFINITY})), "inf.npy");
  Says(ErrorMessage([&] { Read(folder_ / "inf.npy"); }), "number 2 is inf");
  const std::string large = File(Npy("<f8", "(1, 1)", Bytes<double>({1e39})), "large.npy");
  Says(ErrorMessage([&] { Read(large); }), "not finite in float32");
  const std::string ticks = File(Npy("<i8", "(1, 1)", Bytes<int64_t>({int64_t{1} << 60})), "t.npy");
  Are(Read(ticks)[0].values, {0x1p60f});
  format_.skip_bad = true;
  EXPECT_EQ(Read(folder_ / "inf.npy").size(), 1u);
  EXPECT_EQ(source_->skipped(), 1);
}

}  // namespace
}  // namespace cistern
