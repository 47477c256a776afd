// A signal ends the making of data where somebody asked for it, and nothing unfinished stays.
#include "cistern/data/interruptible.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <functional>
#include <iterator>

#include "cistern/base/interrupt.h"
#include "cistern/data/listops.h"
#include "cistern/data/pathfinder.h"
#include "cistern/data/token_cache.h"
#include "cistern/io/atomic_file.h"
#include "cistern/io/test_folder.h"

namespace cistern {
namespace {

namespace fs = std::filesystem;

class InterruptibleTest : public testing::Test {
 protected:
  void TearDown() override { Interrupted() = false; }

  // A progress that is the signal, once `after` are done.
  static std::function<void(int64_t, int64_t)> SignalAfter(int64_t after) {
    return [after](int64_t done, int64_t) {
      if (done >= after) Interrupted() = true;
    };
  }
  template <class F>
  static void ExpectInterrupted(F&& make) {
    Interrupted() = false;
    const InterruptibleData ends;
    EXPECT_THROW(make(), DataInterrupted);
  }

  TestFolder folder_;
};

TEST_F(InterruptibleTest, PathfinderLeavesNothing) {
  const PathfinderOptions options = {32, 6};
  const std::string packed = folder_ / "a.pathfinder", published = folder_ / "sub/pf";
  const auto write = [&](int64_t after) {
    WritePathfinderFolder(options, 4, 2000, published, SignalAfter(after));
  };
  ExpectInterrupted([&] { WritePackedPathfinder(options, 4, 600, packed, SignalAfter(1)); });
  ExpectInterrupted([&] { write(1100); });  // in the second folder of images
  EXPECT_EQ(folder_.Count(), 0);
  // What is not of this run stays.
  WriteFileAtomically(packed, "earlier");
  fs::create_directories(published + "/imgs");
  WriteFileAtomically(published + "/imgs/notes.txt", "mine");
  ExpectInterrupted([&] { WritePackedPathfinder(options, 4, 600, packed, SignalAfter(1)); });
  ExpectInterrupted([&] { write(1); });
  EXPECT_EQ(ReadFile(packed), "earlier");
  int files = 0;
  for (const auto& entry : fs::recursive_directory_iterator(published))
    files += entry.is_directory() ? 0 : 1;
  EXPECT_EQ(files, 1);
  EXPECT_FALSE(LooksLikePathfinder(published));
}

TEST_F(InterruptibleTest, ListOpsLeavesTheEarlierSet) {
  const ListOpsOptions options = {{600, 600, 600}, 20, 200, 10, 10};
  ExpectInterrupted([&] { GenerateListOps(options, 1, SignalAfter(1)); });
  Interrupted() = false;
  const ListOpsSplits small = GenerateListOps({{10, 5, 5}, 20, 200, 10, 10}, 1),
                      large = GenerateListOps(options, 2);
  const std::string earlier = folder_ / "earlier";
  WriteListOps(small, earlier);
  for (const int64_t after : {1, 1200}) {  // in the first file, and in the last
    ExpectInterrupted([&] { WriteListOps(large, folder_ / "new", SignalAfter(after)); });
    Interrupted() = false;
    EXPECT_FALSE(fs::exists(folder_ / "new"));
  }
  EXPECT_THROW(WriteListOps(large, earlier), UsageError);
  EXPECT_EQ(std::distance(fs::directory_iterator(earlier), fs::directory_iterator()), 3);
  EXPECT_EQ(HashListOps(ReadListOpsFolder(earlier)), HashListOps(small));
}

TEST_F(InterruptibleTest, TokensAndTokenizers) {
  const std::string path = folder_ / "text.txt", tokens = folder_ / "text.tok";
  std::string text;
  for (int i = 0; i < 2000; ++i) text += StrCat("the ", i, "th line of the text\n");
  WriteFileAtomically(path, text);
  const TextSource source(path);
  const ByteRanges all = {{0, source.bytes()}};
  const auto learn = [&](TokenizerKind kind) {
    return TrainTokenizerOn(kind, source, all, 400, SignalAfter(300));
  };
  ExpectInterrupted([&] { learn(TokenizerKind::kBpe); });
  const auto tokenizer = MakeByteTokenizer();
  {
    const InterruptibleData ends;  // the signal was there before
    EXPECT_THROW(learn(TokenizerKind::kWords), DataInterrupted);
    EXPECT_THROW(BuildTokenFile(source, all, *tokenizer, tokens), DataInterrupted);
  }
  EXPECT_EQ(folder_.Count(), 1);
  // Nobody asked for it any more: all is made, and a note says so.
  testing::internal::CaptureStderr();
  learn(TokenizerKind::kBpe);
  EXPECT_EQ(testing::internal::GetCapturedStderr(),
            "note: interrupted: the data at hand are made first; the same signal again ends at "
            "once\n");
  BuildTokenFile(source, all, *tokenizer, tokens);
  EXPECT_EQ(TokenFile(tokens).size(), int64_t(text.size()));
  WritePackedPathfinder({32, 6}, 4, 3, folder_ / "a.pathfinder");
  EXPECT_EQ(OpenPathfinder(folder_ / "a.pathfinder")->size(), 3);
}

}  // namespace
}  // namespace cistern
