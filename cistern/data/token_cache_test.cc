#include "cistern/data/token_cache.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>

#include "cistern/base/error.h"
#include "cistern/io/atomic_file.h"
#include "cistern/io/test_folder.h"

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
    WriteFileAtomically(text_path_, text_);
  }
  void TearDown() override { fs::remove_all(folder_); }
  static TokenSplits Open(const TextSource& source, const Tokenizer& tokenizer,
                          const std::string& folder, const TextProgress& progress = nullptr) {
    return OpenTokenSplits(source, SplitText(source), tokenizer, folder, progress);
  }
  static std::vector<int32_t> All(const TokenFile& file) {
    std::vector<int32_t> ids(file.size());
    file.Copy(0, file.size(), ids.data());
    return ids;
  }
  std::string ErrorOf(const std::string& contents, bool verify = false) {
    const std::string path = folder_ + "/broken.tok";
    WriteFileAtomically(path, contents);
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
  const auto tokenizer = TrainTokenizerOn(TokenizerKind::kBpe, source, parts.train, 300);
  const TokenSplits splits = Open(source, *tokenizer, folder_ + "/cache");
  EXPECT_FALSE(splits.reused);
  EXPECT_EQ(splits.train.header().width, 2u);
  EXPECT_EQ(splits.train.bytes() + splits.valid.bytes() + splits.test.bytes(), source.bytes());
  EXPECT_EQ(All(splits.train), tokenizer->Encode(text_.substr(0, parts.train[0].end)));
  EXPECT_EQ(tokenizer->Decode(All(splits.valid)),
            text_.substr(parts.valid[0].begin, Size(parts.valid)));
  EXPECT_EQ(tokenizer->Decode(All(splits.test)), text_.substr(parts.test[0].begin));
  std::vector<int64_t> wide(5);
  splits.train.Copy(7, 5, wide.data());
  EXPECT_EQ(wide[4], All(splits.train)[11]);
  EXPECT_THROW(splits.train.Copy(splits.train.size() - 4, 5, wide.data()), Error);
  EXPECT_THROW(splits.train.Copy(-1, 5, wide.data()), Error);
}

// Each range is tokenized for itself: no token spans a border, and none of another range is there.
TEST_F(TokenCacheTest, RangesAreTokenizedApart) {
  const TextSource source(text_path_);
  const auto tokenizer =
      TrainTokenizerOn(TokenizerKind::kBpe, source, {{0, 20000}, {30000, 50000}}, 300);
  const ByteRanges ranges = {{5, 1003}, {1003, 1004}, {2000, 2000}, {40001, 45000}};
  const std::string path = folder_ + "/a.tok";
  BuildTokenFile(source, ranges, *tokenizer, path);
  TokenFile file(path);
  file.Verify();
  ASSERT_EQ(file.pieces().size(), ranges.size());
  EXPECT_EQ(file.bytes(), Size(ranges));
  const std::vector<int32_t> all = All(file);
  int64_t begin = 0;
  for (size_t i = 0; i < ranges.size(); ++i) {
    const TokenPiece& piece = file.pieces()[i];
    EXPECT_EQ(piece.begin, ranges[i].begin);
    EXPECT_EQ(piece.end, ranges[i].end);
    EXPECT_EQ(std::vector<int32_t>(all.begin() + begin, all.begin() + piece.tokens_end),
              tokenizer->Encode(text_.substr(size_t(ranges[i].begin), size_t(ranges[i].size()))));
    begin = piece.tokens_end;
  }
  EXPECT_EQ(begin, file.size());
  TokenFile moved(std::move(file));
  EXPECT_EQ(moved.bytes(), Size(ranges));
  const std::string good = ReadFile(path);
  std::string damaged = good;
  damaged[good.size() - 20] ^= 1;
  EXPECT_EQ(ErrorOf(damaged), " is damaged: its pieces do not fit their checksum");
  EXPECT_NE(ErrorOf(good.substr(0, good.size() - 8)).find("bytes are announced"),
            std::string::npos);
}

// The blocks of a spread split are of the cache like the tail, and one is rebuilt for the other.
TEST_F(TokenCacheTest, SpreadSplits) {
  std::string text;
  for (int i = 0; text.size() < 400000; ++i) text += StrCat("the ", i, "th line of the text\n");
  WriteFileAtomically(text_path_, text);
  const TextSource source(text_path_);
  const TextSplits spread = SplitText(source), tail = SplitText(source, TextSplit::kTail);
  ASSERT_EQ(spread.valid.size(), 2u);
  const auto bytes = MakeByteTokenizer();
  const std::string cache = folder_ + "/cache";
  const TokenSplits made = OpenTokenSplits(source, spread, *bytes, cache);
  EXPECT_EQ(made.train.bytes() + made.valid.bytes() + made.test.bytes(), source.bytes());
  std::string valid;
  for (const ByteRange& r : spread.valid) valid += text.substr(size_t(r.begin), size_t(r.size()));
  EXPECT_EQ(bytes->Decode(All(made.valid)), valid);
  EXPECT_TRUE(OpenTokenSplits(source, spread, *bytes, cache).reused);
  const TokenSplits other = OpenTokenSplits(source, tail, *bytes, cache);
  EXPECT_FALSE(other.reused);
  EXPECT_EQ(other.train.pieces().size(), 1u);
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
  EXPECT_FALSE(Open(TextSource(text_path_), *bytes, cache, progress).reused);
  EXPECT_EQ(last, int64_t(text_.size()));
  EXPECT_EQ(total, last);
  EXPECT_TRUE(Open(TextSource(text_path_), *bytes, cache).reused);

  const TextSource source(text_path_);
  const auto bpe = TrainTokenizerOn(TokenizerKind::kBpe, source, SplitText(source).train, 300);
  const TokenSplits other = Open(source, *bpe, cache);
  EXPECT_FALSE(other.reused);
  ASSERT_EQ(other.notes.size(), 3u);
  EXPECT_EQ(other.notes[0], "made " + cache + "/train.tok anew: the tokenizer has changed");

  WriteFileAtomically(text_path_, text_ + "more\n");
  const TokenSplits grown = Open(TextSource(text_path_), *bpe, cache);
  EXPECT_FALSE(grown.reused);
  EXPECT_EQ(grown.notes[0], "made " + cache + "/train.tok anew: the text has changed");

  std::string damaged = ReadFile(cache + "/valid.tok");
  damaged[200] ^= 1;
  WriteFileAtomically(cache + "/valid.tok", damaged);
  const TokenSplits repaired = Open(TextSource(text_path_), *bpe, cache);
  ASSERT_EQ(repaired.notes.size(), 1u);
  EXPECT_NE(repaired.notes[0].find("valid.tok is damaged: its tokens do not fit their checksum"),
            std::string::npos)
      << repaired.notes[0];
  EXPECT_TRUE(Open(TextSource(text_path_), *bpe, cache).reused);
  for (const auto& entry : fs::directory_iterator(cache))
    EXPECT_EQ(entry.path().extension(), ".tok");
}

// Another text under the same name, with the same size and time, is another text; the same text
// under another name is not.
TEST_F(TokenCacheTest, ContentDecides) {
  const std::string cache = folder_ + "/cache", other = folder_ + "/copy";
  const auto bytes = MakeByteTokenizer();
  Open(TextSource(text_path_), *bytes, cache);
  WriteFileAtomically(other, text_);
  EXPECT_TRUE(Open(TextSource(other), *bytes, cache).reused);
  const auto time = fs::last_write_time(text_path_);
  std::string changed = text_;
  changed[10] = 'X';
  WriteFileAtomically(text_path_, changed);
  fs::last_write_time(text_path_, time);
  const TokenSplits splits = Open(TextSource(text_path_), *bytes, cache);
  EXPECT_FALSE(splits.reused);
  EXPECT_EQ(All(splits.train)[10], 'X');
}

TEST_F(TokenCacheTest, ATextThatChangesWhileItIsReadIsRefused) {
  const TextSource source(text_path_);
  WriteFileAtomically(text_path_, text_ + "more\n");
  try {
    Open(source, *MakeByteTokenizer(), folder_ + "/cache");
    FAIL();
  } catch (const Error& e) {
    EXPECT_NE(std::string(e.what()).find("text changed while it was read"), std::string::npos)
        << e.what();
  }
  EXPECT_TRUE(fs::is_empty(folder_ + "/cache"));
}

// With a map this would end the process (SIGBUS).
TEST_F(TokenCacheTest, AFileCutShortWhileItIsOpenIsAnError) {
  const std::string path = folder_ + "/a.tok";
  BuildTokenFile(TextSource(text_path_), {{0, 30000}}, *MakeByteTokenizer(), path);
  const TokenFile file(path);
  fs::resize_file(path, 1000);
  const std::string said = ErrorMessage([&] { All(file); });
  EXPECT_TRUE(said.starts_with(path + ": the file ends at byte 1000; expected ")) << said;
}

TEST_F(TokenCacheTest, IdsOutsideTheVocabularyAreNotHandedOut) {
  const std::string path = folder_ + "/a.tok";
  BuildTokenFile(TextSource(text_path_), {{0, 1000}}, *MakeByteTokenizer(), path);
  std::string changed = ReadFile(path);
  changed[80 + 2 * 7 + 1] = 1;
  WriteFileAtomically(path, changed);
  const TokenFile file(path);
  EXPECT_EQ(ErrorMessage([&] { All(file); }).rfind(path + " is damaged: token 7 has id ", 0), 0u);
}

TEST_F(TokenCacheTest, ALearnedTokenizerIsKeptAndHealed) {
  const TextSource source(text_path_);
  const std::string path = folder_ + "/bpe";
  std::vector<std::string> notes;
  const ByteRanges range = SplitText(source).train;
  const uint64_t hash =
      OpenTokenizer(TokenizerKind::kBpe, source, range, 300, path, &notes)->Hash();
  const std::string good = ReadFile(path);
  const auto never = [](int64_t, int64_t) { FAIL() << "learned again"; };
  EXPECT_EQ(OpenTokenizer(TokenizerKind::kBpe, source, range, 300, path, &notes, never)->Hash(),
            hash);
  EXPECT_TRUE(notes.empty());
  for (const size_t at : {size_t(3), size_t(16), good.size() / 2, good.size() - 1}) {
    std::string damaged = good;
    damaged[at] ^= 1;
    WriteFileAtomically(path, damaged);
    notes.clear();
    EXPECT_EQ(OpenTokenizer(TokenizerKind::kBpe, source, range, 300, path, &notes)->Hash(), hash);
    ASSERT_EQ(notes.size(), 1u);
    EXPECT_EQ(notes[0].rfind("made " + path + " anew: ", 0), 0u) << notes[0];
    EXPECT_EQ(ReadFile(path), good);
  }
}

// Eight processes at once: each has the right tokens, and nothing is left over.
TEST_F(TokenCacheTest, SeveralProcessesMayMakeIt) {
  const std::string cache = folder_ + "/cache";
  const auto bytes = MakeByteTokenizer();
  std::vector<pid_t> children;
  for (int i = 0; i < 8; ++i) {
    const pid_t child = fork();
    if (child == 0) {
      int code = 1;
      try {
        const TextSource source(text_path_);
        std::vector<std::string> notes;
        const auto bpe = OpenTokenizer(TokenizerKind::kBpe, source, SplitText(source).train, 300,
                                       folder_ + "/bpe", &notes);
        const TokenSplits splits = Open(source, *bytes, cache);
        code = bpe->vocab_size() == 300 && notes.empty() &&
                       bytes->Decode(All(splits.train)) + bytes->Decode(All(splits.valid)) +
                               bytes->Decode(All(splits.test)) ==
                           text_
                   ? 0
                   : 2;
      } catch (const Error& e) {
        std::fprintf(stderr, "%s\n", e.what());
      }
      _exit(code);
    }
    children.push_back(child);
  }
  for (const pid_t child : children) {
    int status = 0;
    waitpid(child, &status, 0);
    EXPECT_EQ(status, 0);
  }
  EXPECT_EQ(std::distance(fs::directory_iterator(cache), fs::directory_iterator()), 3);
}

TEST_F(TokenCacheTest, BrokenFilesAreNamed) {
  const std::string path = folder_ + "/a.tok";
  const TextSource source(text_path_);
  BuildTokenFile(source, {{0, 1000}}, *MakeByteTokenizer(), path);
  const std::string good = ReadFile(path);
  EXPECT_EQ(ErrorOf(good, true), "fine");
  EXPECT_EQ(ErrorOf(""), " is not a token file: it has only 0 bytes");
  EXPECT_EQ(ErrorOf(std::string(100, 'x')),
            " is not a token file: it does not begin with CISTTOK2");
  EXPECT_EQ(ErrorOf(good.substr(0, good.size() - 1)),
            " is damaged: 1000 tokens of 2 bytes are announced, 1999 bytes are there");
  std::string header = good;
  header[24] ^= 1;
  EXPECT_EQ(ErrorOf(header), " is damaged: its header does not fit its checksum");
  EXPECT_THROW(TokenFile(folder_ + "/none"), Error);
  EXPECT_THROW(TokenFile{folder_}, Error);
  EXPECT_THROW(BuildTokenFile(source, {{0, 10}}, *MakeByteTokenizer(), folder_ + "/no/such"),
               Error);
}

TEST_F(TokenCacheTest, TinyTextsHaveEmptySplits) {
  WriteFileAtomically(text_path_, "x");
  const TokenSplits splits = Open(TextSource(text_path_), *MakeByteTokenizer(), folder_ + "/cache");
  EXPECT_EQ(splits.train.size() + splits.valid.size() + splits.test.size(), 1);
  splits.train.Verify();
}

TEST_F(TokenCacheTest, MovesKeepTheFile) {
  const std::string path = folder_ + "/a.tok";
  BuildTokenFile(TextSource(text_path_), {{0, 1000}}, *MakeByteTokenizer(), path);
  TokenFile a(path);
  TokenFile b(std::move(a));
  EXPECT_EQ(All(b)[0], 't');
  a = std::move(b);
  EXPECT_EQ(All(a)[1], 'h');
  EXPECT_EQ(a.size(), 1000);
}

}  // namespace
}  // namespace cistern
