#include "cistern/io/series_file.h"

#include <gtest/gtest.h>

#include <cmath>

#include "cistern/base/error.h"
#include "cistern/io/atomic_file.h"
#include "cistern/io/test_folder.h"

namespace cistern {
namespace {

class SeriesFileTest : public ::testing::Test {
 protected:
  std::string File(const std::string& text) {
    const std::string path = folder_ / "a.ts";
    WriteFileAtomically(path, text);
    return path;
  }
  // The message that a file ends in.
  std::string Message(const std::string& text, bool skip_bad = false) {
    try {
      ReadSeriesFile(File(text), skip_bad);
    } catch (const Error& e) {
      return e.what();
    }
    return "read";
  }
  static void Says(const std::string& message, const std::string& part) {
    EXPECT_NE(message.find(part), message.npos) << "no '" << part << "' in " << message;
  }
  TestFolder folder_;
};

TEST_F(SeriesFileTest, ChannelsStandBesideEachOther) {
  const SeriesFile f = ReadSeriesFile(
      File("# words\n@problemName X\n@dimensions 2\n@equalLength false\n@classLabel true up down\n"
           "@data\n1,2,3:4,?,6:up\r\n\n +5 : nan :down\n"),
      false);
  ASSERT_EQ(f.size(), 2);
  EXPECT_EQ(f.channels, 2);
  EXPECT_EQ(f.Steps(0), 3);
  EXPECT_EQ(f.Steps(1), 1);
  const float want[] = {1, 4, 2, NAN, 3, 6};
  for (int i = 0; i < 6; ++i) {
    if (std::isnan(want[i])) {
      EXPECT_TRUE(std::isnan(f.At(0)[i])) << i;
    } else {
      EXPECT_EQ(f.At(0)[i], want[i]) << i;
    }
  }
  EXPECT_EQ(f.At(1)[0], 5);
  EXPECT_TRUE(std::isnan(f.At(1)[1]));
  EXPECT_EQ(f.missing, 2);
  EXPECT_EQ(f.labels, (std::vector<std::string>{"up", "down"}));
  EXPECT_EQ(f.lines, (std::vector<int64_t>{7, 9}));
  EXPECT_EQ(f.classes, f.labels);
}

TEST_F(SeriesFileTest, BadFilesAreRefusedWithTheirLine) {
  const std::string head = "@univariate true\n@classLabel true a b\n@data\n";
  Says(Message(head + "1,2:a\n1,x:b\n"), "a.ts:5: value 2 is 'x'");
  Says(Message(head + "1,2:c\n"), "a.ts:4: the label 'c' is no class");
  Says(Message(head + "1:2:a\n"), "a.ts:4: expected 1 channels and a label");
  Says(Message(head + "1,1e999:a\n"), "value 2 is '1e999'");
  Says(Message(head + "1,,3:a\n"), "value 2 is ''");
  Says(Message(head), "no series after @data");
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
  Says(Message("@targetLabel true\n@data\n1:a\n"), "not a finite number");
}

TEST_F(SeriesFileTest, BadSeriesAreSkippedWhereAsked) {
  const SeriesFile f = ReadSeriesFile(
      File("@dimensions 2\n@classLabel true a b\n@data\n1,2:3:a\n7:?:b\n1:2:c\n8:9:a\n"), true);
  EXPECT_EQ(f.skipped, 2);
  EXPECT_EQ(f.missing, 1);
  ASSERT_EQ(f.size(), 2);
  EXPECT_EQ(f.At(0)[0], 7);
  EXPECT_EQ(f.At(1)[1], 9);
  Says(Message("@classLabel true a b\n@data\nx:a\n", true), "that can be read (1 skipped)");
}

}  // namespace
}  // namespace cistern
