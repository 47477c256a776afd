#include "cistern/text/text_source.h"

#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>

#include "cistern/base/error.h"
#include "cistern/io/atomic_file.h"

namespace cistern {
namespace {

namespace fs = std::filesystem;

class TextSourceTest : public testing::Test {
 protected:
  void SetUp() override {
    folder_ = (fs::path(testing::TempDir()) / StrCat("cistern_source_", getpid())).string();
    fs::remove_all(folder_);
    fs::create_directories(folder_);
  }
  void TearDown() override { fs::remove_all(folder_); }
  std::string Write(const std::string& name, const std::string& text) {
    const std::string path = folder_ + "/" + name;
    fs::create_directories(fs::path(path).parent_path());
    WriteFileAtomically(path, text);
    return path;
  }
  static std::string ErrorOf(const std::string& path) {
    try {
      TextSource source(path);
    } catch (const Error& e) {
      return e.what();
    }
    return "";
  }
  static std::string All(const TextSource& source, int64_t piece) {
    TextReader reader(source, {0, source.bytes()}, piece);
    std::string out;
    for (auto part = reader.Next(); !part.empty(); part = reader.Next()) {
      EXPECT_LE(int64_t(part.size()), piece);
      out += part;
    }
    return out;
  }
  std::string folder_;
};

TEST_F(TextSourceTest, AFileInPieces) {
  const TextSource source(Write("a.txt", "hello\nworld"));
  EXPECT_EQ(source.bytes(), 11);
  EXPECT_TRUE(source.notes().empty());
  for (const int64_t piece : {1, 3, 11, 100}) EXPECT_EQ(All(source, piece), "hello\nworld");
  EXPECT_EQ(source.Read(4, 3), "o\nw");
  EXPECT_EQ(source.Read(9, 30), "ld");
}

TEST_F(TextSourceTest, AFolderIsOneTextInOrderOfPaths) {
  Write("b.txt", "2");
  Write("a/z.txt", "1");
  Write("c.txt", "33");
  Write(".hidden", "x");
  Write(".git/config", "x");
  Write("binary", std::string("ab\0c", 4));
  Write("empty", "");
  const TextSource source(folder_);
  EXPECT_EQ(source.files().size(), 3u);
  EXPECT_EQ(All(source, 10), "1233");
  EXPECT_EQ(source.Read(1, 2), "23");
  ASSERT_EQ(source.notes().size(), 3u);
  EXPECT_NE(source.notes()[0].find("skipped 2 hidden files: "), std::string::npos)
      << source.notes()[0];
  EXPECT_EQ(source.notes()[1], "skipped 1 binary file: " + folder_ + "/binary");
  EXPECT_EQ(source.notes()[2], "skipped 1 empty file: " + folder_ + "/empty");
}

TEST_F(TextSourceTest, LinksAreReadOrNoted) {
  const std::string big = Write("big/1.txt", "big"), folder = folder_ + "/texts";
  Write("texts/a.txt", "a");
  fs::create_symlink(big, folder + "/b.txt");
  fs::create_symlink("../big", folder + "/rest");
  fs::create_symlink("none", folder + "/gone.txt");
  const TextSource source(folder);
  EXPECT_EQ(All(source, 10), "abig");
  EXPECT_EQ(source.notes(), (std::vector<std::string>{
                                "skipped 1 linked folder: " + folder + "/rest",
                                "skipped 1 broken link: " + folder + "/gone.txt",
                            }));
}

TEST_F(TextSourceTest, WhatCannotBeText) {
  EXPECT_EQ(ErrorOf(folder_ + "/none"), folder_ + "/none does not exist");
  EXPECT_EQ(ErrorOf(Write("e", "")), folder_ + "/e is empty; text is expected");
  EXPECT_EQ(ErrorOf(Write("n", std::string("abc\0", 4))),
            folder_ + "/n looks binary (NUL byte at offset 3); text is expected");
  for (const auto& [magic, unpack] :
       {std::pair("\x1f\x8b\x08", "gunzip"), std::pair("\xfd\x37zXZ", "unxz"),
        std::pair("\x28\xb5\x2f\xfd", "unzstd")}) {
    Write("packed", magic);
    const std::string path = folder_ + "/packed";
    EXPECT_EQ(ErrorOf(path),
              path +
                  " is compressed, and training reads a text from everywhere in it; unpack it: " +
                  unpack + " -k " + path);
    fs::remove(path);
  }
  EXPECT_EQ(ErrorOf("/dev/null"), "/dev/null is neither a file nor a folder");
  ASSERT_EQ(mkfifo((folder_ + "/pipe").c_str(), 0600), 0);
  EXPECT_EQ(ErrorOf(folder_ + "/pipe"), folder_ +
                                            "/pipe is a pipe, and a text is read several "
                                            "times; write it to a file, and give that");
  fs::remove(folder_ + "/pipe");
  fs::remove(folder_ + "/e");
  EXPECT_NE(ErrorOf(folder_).find("holds no text files; skipped 1 binary file"), std::string::npos)
      << ErrorOf(folder_);
  if (geteuid() != 0) {
    chmod(Write("secret", "x").c_str(), 0);
    EXPECT_NE(ErrorOf(folder_ + "/secret").find("cannot open"), std::string::npos);
  }
}

TEST_F(TextSourceTest, ScanNotesBadUtf8AndCrlf) {
  TextSource source(Write("a", "ab\xC3\xA9\r\nx\r\ny\xFFz\xFE"));
  EXPECT_THROW(source.Scan([](int64_t, int64_t) { throw Error("stopped"); }), Error);
  EXPECT_TRUE(source.notes().empty());
  source.Scan();
  source.Scan();
  ASSERT_EQ(source.notes().size(), 2u);
  EXPECT_EQ(source.notes()[0],
            folder_ + "/a is not UTF-8 from byte offset 10 on; treated as raw bytes");
  EXPECT_EQ(source.notes()[1],
            folder_ + "/a has 2 CRLF line ends; they are kept and counted as two bytes");
  TextSource cut(Write("b", "ab\xE4\xB8"));
  cut.Scan();
  ASSERT_EQ(cut.notes().size(), 1u);
  EXPECT_NE(cut.notes()[0].find("offset 2 "), std::string::npos);
  std::string text((1 << 20) - 1, 'x');  // a character across two pieces
  TextSource across(Write("c", text + "\xC3\xA9"));
  across.Scan();
  EXPECT_TRUE(across.notes().empty());
}

TEST_F(TextSourceTest, ByteOrderMarksAreNoPartOfTheText) {
  const std::string mark = "\xEF\xBB\xBF";
  Write("a/1", mark + "one\n");
  Write("a/2", mark + "t" + mark + "wo\xFF");
  Write("a/3", mark);
  TextSource source(folder_ + "/a");
  EXPECT_EQ(All(source, 5), "one\nt" + mark + "wo\xFF");
  EXPECT_EQ(source.Read(3, 2), "\nt");
  source.Scan();
  source.CheckUnchanged();
  ASSERT_EQ(source.notes().size(), 2u);
  EXPECT_EQ(source.notes()[0], "skipped 1 empty file: " + folder_ + "/a/3");
  EXPECT_NE(source.notes()[1].find("2 is not UTF-8 from byte offset 9 on"), std::string::npos);
  EXPECT_NE(ErrorOf(folder_ + "/a/3").find("is empty"), std::string::npos);
  EXPECT_EQ(TextSource(folder_ + "/a/1").Hash(), TextSource(Write("b", "one\n")).Hash());
}

TEST_F(TextSourceTest, HashChangesWithTheFiles) {
  const std::string path = Write("a", "one");
  const uint64_t before = TextSource(path).Hash();
  EXPECT_EQ(TextSource(path).Hash(), before);
  Write("a", "three");
  EXPECT_NE(TextSource(path).Hash(), before);
}

TEST_F(TextSourceTest, AFileThatShrinksIsAnError) {
  const std::string path = Write("a", "one two three");
  const TextSource source(path);
  Write("a", "one");
  EXPECT_THROW(All(source, 100), Error);
  EXPECT_THROW(TextReader(source, {0, 14}), Error);
}

TEST_F(TextSourceTest, SplitsBeginAtLines) {
  std::string text;
  for (int i = 0; i < 1000; ++i) text += StrCat("line ", i, "\n");
  const TextSource source(Write("a", text));
  const TextSplits s = SplitText(source, TextSplit::kTail), spread = SplitText(source);
  ASSERT_EQ(s.train.size(), 1u);
  EXPECT_EQ(s.train[0].begin, 0);
  EXPECT_EQ(s.train[0].end, s.valid[0].begin);
  EXPECT_EQ(s.valid[0].end, s.test[0].begin);
  EXPECT_EQ(s.test[0].end, source.bytes());
  EXPECT_EQ(text[s.train[0].end - 1], '\n');
  EXPECT_EQ(text[s.valid[0].end - 1], '\n');
  EXPECT_NEAR(double(Size(s.train)) / double(text.size()), .90, .01);
  EXPECT_NEAR(double(Size(s.test)) / double(text.size()), .05, .01);
  EXPECT_EQ(spread.train, s.train);  // a text this short is one part
  EXPECT_EQ(spread.test, s.test);
}

// Every byte is in one block of one split; the blocks of each lie evenly over the text.
TEST_F(TextSourceTest, ASpreadSplitHasBlocksFromEverywhere) {
  for (const auto& [bytes, parts] : std::vector<std::pair<int64_t, size_t>>{
           {160 << 10, 1}, {500 << 10, 3}, {3277 << 10, 20}, {5000 << 10, 20}}) {
    std::string text;
    for (int i = 0; int64_t(text.size()) < bytes; ++i) text += StrCat("line ", i, "\n");
    const TextSource source(Write("a", text));
    const TextSplits s = SplitText(source);
    ASSERT_EQ(s.train.size(), parts) << bytes;
    ASSERT_EQ(s.valid.size(), parts);
    ASSERT_EQ(s.test.size(), parts);
    int64_t at = 0;
    for (size_t i = 0; i < parts; ++i) {
      const double part = double(text.size()) / double(parts);
      for (const auto& [range, share] :
           {std::pair{s.train[i], .90}, std::pair{s.valid[i], .05}, std::pair{s.test[i], .05}}) {
        EXPECT_EQ(range.begin, at);
        EXPECT_NEAR(double(range.size()), share * part, 16) << bytes << " part " << i;
        EXPECT_EQ(text[size_t(range.end - 1)], '\n');
        at = range.end;
      }
      EXPECT_NEAR(double(at), double(i + 1) * part, 16);
    }
    EXPECT_EQ(at, source.bytes());
    EXPECT_EQ(Size(s.train) + Size(s.valid) + Size(s.test), source.bytes());
    EXPECT_EQ(SplitText(TextSource(Write("b", text))).test, s.test);  // of the text alone
  }
}

TEST_F(TextSourceTest, SplitsWithoutLinesBeginAtCharacters) {
  std::string text;
  for (int i = 0; i < 40000; ++i) text += "\xE4\xB8\xAD";
  text = "x" + text;
  const TextSplits s = SplitText(TextSource(Write("a", text)));
  EXPECT_EQ(text[size_t(s.valid[0].begin)], '\xE4');
  EXPECT_EQ(text[size_t(s.test[0].begin)], '\xE4');
  EXPECT_NEAR(double(Size(s.valid)) / double(text.size()), .05, .001);
  const TextSplits tiny = SplitText(TextSource(Write("b", "x")));
  EXPECT_EQ(Size(tiny.train) + Size(tiny.valid) + Size(tiny.test), 1);
}

}  // namespace
}  // namespace cistern
