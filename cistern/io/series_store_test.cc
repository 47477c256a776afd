#include "cistern/io/series_store.h"

#include <gtest/gtest.h>

#include <numeric>

#include "cistern/base/error.h"
#include "cistern/io/atomic_file.h"
#include "cistern/io/test_folder.h"

namespace cistern {
namespace {

TEST(NumberStore, GivesBackWhatWasWrittenInMemoryAndOnDisk) {
  constexpr int64_t kCount = 1000003;
  std::vector<double> all(kCount);
  std::iota(all.begin(), all.end(), 1e9 + 0.1);
  for (const int64_t limit : {kCount, int64_t{1000}}) {
    const TestFolder folder;
    NumberStore store(folder.path(), limit);
    for (int64_t at = 0; at < kCount; at += 7001)
      store.Append(all.data() + at, std::min<int64_t>(7001, kCount - at));
    EXPECT_EQ(store.size(), kCount);
    EXPECT_EQ(store.on_disk(), limit < kCount);
    EXPECT_EQ(folder.Count(), 0);  // the file has no name
    for (const auto& [begin, count] : std::vector<std::pair<int64_t, int64_t>>{
             {0, kCount}, {5, 3}, {700000, 300003}, {kCount, 0}, {kCount - 1, 1}}) {
      std::vector<double> out(size_t(count), -1);
      store.Read(begin, count, out.data());
      EXPECT_TRUE(std::equal(out.begin(), out.end(), all.begin() + begin)) << begin;
    }
    double x = 0;
    EXPECT_THROW(store.Read(kCount, 1, &x), Error);
  }
  NumberStore nowhere("/nonexistent/folder", 1);
  EXPECT_THROW(nowhere.Append(all.data(), 2), Error);
}

TEST(SeriesStore, ReadsAnyStepsOfAnySeries) {
  const TestFolder folder;
  WriteFileAtomically(
      folder / "a.csv",
      "series,label,x,y\n1,b,1,2\n1,b,3,4\n2,a,5,?\n3,b,7,8\n3,b,9,10\n3,b,11,12\n");
  for (const int64_t limit : {100, 2}) {
    const SeriesStore store(folder / "a.csv", {}, folder.path(), limit);
    EXPECT_EQ(store.on_disk(), limit == 2);
    ASSERT_EQ(store.size(), 3);
    EXPECT_EQ(store.Steps(2), 3);
    EXPECT_EQ(store.Longest(), 3);
    EXPECT_EQ(store.Line(1), 4);
    EXPECT_EQ(store.Name(2), "3");
    EXPECT_EQ(store.labels(), (std::vector<std::string>{"b", "a"}));
    EXPECT_EQ(store.Label(1), 1);
    EXPECT_EQ(store.Label(2), 0);
    EXPECT_EQ(store.missing(), 1);
    double out[4];
    store.Read(2, 1, 2, out);
    EXPECT_EQ(std::vector<double>(out, out + 4), (std::vector<double>{9, 10, 11, 12}));
    EXPECT_THROW(store.Read(1, 0, 2, out), Error);
  }
  // The hash tells contents apart: values, labels, where a series ends.
  const auto hash = [&](const std::string& text) {
    WriteFileAtomically(folder / "b.csv", text);
    return SeriesStore(folder / "b.csv", {}, folder.path()).hash();
  };
  const uint64_t one = hash("series,label,x\n1,a,1\n1,a,2\n2,a,3\n");
  EXPECT_EQ(one, hash("x,series,label\n1,1,a\n2,1,a\n3,2,a\n"));
  EXPECT_NE(one, hash("series,label,x\n1,a,1\n1,a,2\n2,a,4\n"));
  EXPECT_NE(one, hash("series,label,x\n1,a,1\n1,a,2\n2,b,3\n"));
  EXPECT_NE(one, hash("series,label,x\n1,a,1\n2,a,2\n2,a,3\n"));
  const auto exact = [&](const std::string& text) {
    WriteFileAtomically(folder / "b.csv", text);
    return SeriesStore(folder / "b.csv", {}, folder.path()).exact_hash();
  };
  const std::string near = "series,label,x\n1,a,1000000000.25\n",
                    far = "series,label,x\n1,a,1000000000.5\n";
  EXPECT_EQ(hash(near), hash(far));  // float32 knows no difference
  EXPECT_NE(exact(near), exact(far));
  EXPECT_NE(ErrorMessage([&] { hash("series,label,x\n"); }).find("no series"), std::string::npos);
}

}  // namespace
}  // namespace cistern
