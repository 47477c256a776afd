#include "cistern/data/token_cache.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>

#include "cistern/base/error.h"
#include "cistern/text/files.h"

namespace cistern {
namespace {

namespace fs = std::filesystem;

class TokenCacheTest : public testing::Test {
 protected:
  void SetUp() override {
    folder_ = (fs::path(testing::TempDir()) / StrCat("cistern_cache_", getpid())).string();
    fs::remove_all(folder_);
    fs::create_directories(folder_);
    for (int i = 0; i < 2000; ++i) text_ += StrCat("the ", i, "th line of the text\n");
    text_path_ = folder_ + "/text";
    WriteFileAtomic(text_path_, text_);
  }
  void TearDown() override { fs::remove_all(folder_); }
  static std::vector<int32_t> All(const TokenFile& file) {
    std::vector<int32_t> ids(file.size());
    file.Copy(0, file.size(), ids.data());
    return ids;
  }
  std::string ErrorOf(const std::string& contents, bool verify = false) {
    const std::string path = folder_ + "/broken.tok";
    WriteFileAtomic(path, contents);
    try {
      const TokenFile file(path);
      if (verify) file.Verify();
    } catch (const Error& e) {
      return std::string(e.what()).substr(path.size());
    }
    return "fine";
  }
  std::string folder_, text_, text_path_;
};

TEST_F(TokenCacheTest, HoldsTheTokensOfEachSplit) {
  const TextSource source(text_path_);
  const TextSplits parts = SplitText(source);
  const auto tokenizer = TrainBpeOn(source, parts.train, 300);
  const TokenSplits splits = OpenTokenSplits(source, *tokenizer, folder_ + "/cache");
  EXPECT_FALSE(splits.reused);
  EXPECT_EQ(splits.train.header().width, 2u);
  EXPECT_EQ(splits.train.bytes() + splits.valid.bytes() + splits.test.bytes(), source.bytes());
  EXPECT_EQ(All(splits.train), tokenizer->Encode(text_.substr(0, parts.train.end)));
  EXPECT_EQ(tokenizer->Decode(All(splits.valid)),
            text_.substr(parts.valid.begin, parts.valid.size()));
  EXPECT_EQ(tokenizer->Decode(All(splits.test)), text_.substr(parts.test.begin));
  EXPECT_EQ(splits.test[0], All(splits.test)[0]);
  std::vector<int64_t> wide(5);
  splits.train.Copy(7, 5, wide.data());
  EXPECT_EQ(wide[4], splits.train[11]);
  EXPECT_THROW(splits.train.Copy(splits.train.size() - 4, 5, wide.data()), Error);
  EXPECT_THROW(splits.train.Copy(-1, 5, wide.data()), Error);
}

TEST_F(TokenCacheTest, IsReusedUntilSomethingChanges) {
  const std::string cache = folder_ + "/cache";
  const auto bytes = MakeByteTokenizer();
  int64_t last = 0, total = 0;
  const auto progress = [&](int64_t done, int64_t all) {
    EXPECT_GE(done, last);
    last = done;
    total = all;
  };
  EXPECT_FALSE(OpenTokenSplits(TextSource(text_path_), *bytes, cache, progress).reused);
  EXPECT_EQ(last, int64_t(text_.size()));
  EXPECT_EQ(total, last);
  EXPECT_TRUE(OpenTokenSplits(TextSource(text_path_), *bytes, cache).reused);

  const TextSource source(text_path_);
  const auto bpe = TrainBpeOn(source, SplitText(source).train, 300);
  const TokenSplits other = OpenTokenSplits(source, *bpe, cache);
  EXPECT_FALSE(other.reused);
  ASSERT_EQ(other.notes.size(), 3u);
  EXPECT_EQ(other.notes[0], "made " + cache + "/train.tok anew: the tokenizer has changed");

  WriteFileAtomic(text_path_, text_ + "more\n");
  const TokenSplits grown = OpenTokenSplits(TextSource(text_path_), *bpe, cache);
  EXPECT_FALSE(grown.reused);
  EXPECT_EQ(grown.notes[0], "made " + cache + "/train.tok anew: the text has changed");

  std::string damaged = ReadWholeFile(cache + "/valid.tok");
  damaged[200] ^= 1;
  WriteFileAtomic(cache + "/valid.tok", damaged);
  const TokenSplits repaired = OpenTokenSplits(TextSource(text_path_), *bpe, cache);
  ASSERT_EQ(repaired.notes.size(), 1u);
  EXPECT_NE(repaired.notes[0].find("valid.tok is damaged: its tokens do not fit their checksum"),
            std::string::npos)
      << repaired.notes[0];
  EXPECT_TRUE(OpenTokenSplits(TextSource(text_path_), *bpe, cache).reused);
  for (const auto& entry : fs::directory_iterator(cache))
    EXPECT_EQ(entry.path().extension(), ".tok");
}

TEST_F(TokenCacheTest, BrokenFilesAreNamed) {
  const std::string path = folder_ + "/a.tok";
  const TextSource source(text_path_);
  BuildTokenFile(source, {0, 1000}, *MakeByteTokenizer(), path);
  const std::string good = ReadWholeFile(path);
  EXPECT_EQ(ErrorOf(good, true), "fine");
  EXPECT_EQ(ErrorOf(""), " is no token file: it has only 0 bytes");
  EXPECT_EQ(ErrorOf(std::string(100, 'x')), " is no token file: it does not begin with CISTTOK1");
  EXPECT_EQ(ErrorOf(good.substr(0, good.size() - 1)),
            " is damaged: 1000 tokens of 2 bytes are announced, 1999 bytes are there");
  std::string header = good;
  header[24] ^= 1;
  EXPECT_EQ(ErrorOf(header), " is damaged: its header does not fit its checksum");
  EXPECT_THROW(TokenFile(folder_ + "/none"), Error);
  EXPECT_THROW(TokenFile{folder_}, Error);
  EXPECT_THROW(BuildTokenFile(source, {0, 10}, *MakeByteTokenizer(), folder_ + "/no/such"), Error);
}

TEST_F(TokenCacheTest, TinyTextsHaveEmptySplits) {
  WriteFileAtomic(text_path_, "x");
  const TokenSplits splits =
      OpenTokenSplits(TextSource(text_path_), *MakeByteTokenizer(), folder_ + "/cache");
  EXPECT_EQ(splits.train.size() + splits.valid.size() + splits.test.size(), 1);
  splits.train.Verify();
}

TEST_F(TokenCacheTest, MovesKeepTheMap) {
  const std::string path = folder_ + "/a.tok";
  BuildTokenFile(TextSource(text_path_), {0, 1000}, *MakeByteTokenizer(), path);
  TokenFile a(path);
  TokenFile b(std::move(a));
  EXPECT_EQ(b[0], 't');
  a = std::move(b);
  EXPECT_EQ(a[1], 'h');
  EXPECT_EQ(a.size(), 1000);
}

}  // namespace
}  // namespace cistern
