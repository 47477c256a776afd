// Pairs of texts: AAN's file read in place, and halves of documents.
#include "cistern/data/text_pairs.h"

#include <gtest/gtest.h>
#include <zlib.h>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <map>
#include <numeric>
#include <set>

#include "cistern/base/error.h"
#include "cistern/base/random.h"
#include "cistern/io/test_folder.h"

namespace cistern {
namespace {

void WriteGzip(const std::string& path, const std::string& bytes) {
  const gzFile file = gzopen(path.c_str(), "wb");
  ASSERT_EQ(gzwrite(file, bytes.data(), unsigned(bytes.size())), int(bytes.size()));
  gzclose(file);
}

void WriteBytes(const std::string& path, const std::string& bytes) {
  std::ofstream(path, std::ios::binary) << bytes;
}

void ExpectSays(const std::string& message, std::initializer_list<const char*> phrases) {
  for (const char* phrase : phrases)
    EXPECT_NE(message.find(phrase), std::string::npos) << message << "\n  lacks: " << phrase;
}

TEST(TextPairs, AanIsReadInPlace) {
  const TestFolder folder;
  const std::string path = folder / "new_aan_pairs.train.tsv";
  // Quotes are bytes like any others, an empty text is one; the third line ends as on Windows, the
  // last has no end. A text longer than the pieces in which the file is read.
  const std::string longer(3'000'000, 'x');
  WriteBytes(path,
             "0.0\tA1\tB1\ta \"quoted\tsecond\" text\n"
             "1.0\tA2\tB2\t\tonly the second\n"
             "1\tA3\tB3\tthird\tends\r\n"
             "0\tA4\tB4\t" +
                 longer + "\ty" + longer);
  EXPECT_TRUE(IsAanFolder(folder.path()));
  const auto pairs = OpenPairFile(path, {});
  ASSERT_EQ(pairs->size(), 4);
  const auto texts = [&](int64_t pair, int64_t limit) {
    std::string first, second;
    pairs->Read(pair, limit, &first, &second);
    return std::pair(first, second);
  };
  EXPECT_EQ(texts(0, 4000), std::pair(std::string("a \"quoted"), std::string("second\" text")));
  EXPECT_EQ(texts(1, 4000), std::pair(std::string(), std::string("only the second")));
  EXPECT_EQ(texts(2, 4000), std::pair(std::string("third"), std::string("ends")));
  EXPECT_EQ(texts(2, 3), std::pair(std::string("thi"), std::string("end")));
  EXPECT_EQ(texts(3, 4000).second, "y" + longer.substr(0, 3999));
  EXPECT_EQ(texts(3, 1 << 30).first, longer);
  EXPECT_EQ(pairs->Label(0), 0);
  EXPECT_EQ(pairs->Label(1), 1);
  EXPECT_EQ(pairs->Label(2), 1);
  EXPECT_EQ(pairs->Line(3), 4);
  const uint64_t hash = pairs->Hash();
  WriteBytes(folder / "other.tsv", "0\ta\tb\tc\td\n");
  EXPECT_NE(OpenPairFile(folder / "other.tsv", {})->Hash(), hash);
  std::filesystem::resize_file(path, 100);
  ExpectSays(ErrorMessage([&] { texts(3, 4000); }), {":4:", "the file ends at byte"});
}

TEST(TextPairs, AFileThatChangedInPlaceIsAnError) {
  const TestFolder folder;
  const std::string path = folder / "p.tsv";
  WriteBytes(path, "1\ta\tb\tfirst\tsecond\n");
  const auto pairs = OpenPairFile(path, {});
  std::string first, second;
  pairs->Read(0, 40, &first, &second);
  EXPECT_EQ(second, "second");
  const auto modified = std::filesystem::last_write_time(path);
  WriteBytes(path, "1\ta\tb\tother\tthings\n");  // of the same size
  std::filesystem::last_write_time(path, modified + std::chrono::seconds(1));
  ExpectSays(ErrorMessage([&] { pairs->Read(0, 40, &first, &second); }),
             {"p.tsv changed after it was opened"});
}

TEST(TextPairs, ErrorsNameTheLine) {
  const TestFolder folder;
  const std::string path = folder / "p.tsv", good = "1\ta\tb\tc\td\n";
  const auto message = [&](const std::string& text, const PairFileOptions& options = {}) {
    WriteBytes(path, text);
    return ErrorMessage([&] { OpenPairFile(path, options); });
  };
  EXPECT_EQ(message(good), "no error");
  EXPECT_EQ(message("\xef\xbb\xbf" + good), "no error");
  ExpectSays(message(good + "1\ta\tb\tc\n"), {"p.tsv:2:", "4 columns; expected 5"});
  ExpectSays(message(good + "1\ta\tb\tc\td\te\n"), {"p.tsv:2:", "6 columns"});
  ExpectSays(message(good + "\n" + good), {"p.tsv:2:", "1 columns"});
  ExpectSays(message(good + good + "0.5\ta\tb\tc\td\n"), {"p.tsv:3:", "0 or 1", "'0.5'"});
  ExpectSays(message("label\tid1\tid2\ttext1\ttext2\n"), {"p.tsv:1:", "'label'"});
  ExpectSays(message("\ta\tb\tc\td\n"), {"p.tsv:1:", "got ''"});
  ExpectSays(message(std::string("1\0\ta\tb\tc\td\n", 11)), {"p.tsv:1:", "0 or 1"});
  ExpectSays(message(""), {"no pairs"});
  ExpectSays(message("\x1f\x8b" + good), {"compressed", "decompress"});
  ExpectSays(ErrorMessage([&] { OpenPairFile(folder.path(), {}); }), {"folder"});
  EXPECT_EQ(message("?\ta\tb\tc\td\n", {.labelled = false}), "no error");
  WriteBytes(path, good + "bad\n" + good + "2\ta\tb\tc\td\n");
  const auto pairs = OpenPairFile(path, {.skip_bad = true});
  EXPECT_EQ(pairs->size(), 2);
  EXPECT_EQ(pairs->skipped(), 2);
  EXPECT_EQ(pairs->Line(1), 3);
}

// Cut or changed anywhere, the file is read (and every text lies within it) or is an Error.
TEST(TextPairs, TruncatedAndMutatedFiles) {
  const TestFolder folder;
  const std::string path = folder / "p.tsv";
  std::string good;
  for (int i = 0; i < 6; ++i)
    good += std::to_string(i % 2) + "\tP1\tP2\tfirst " + std::to_string(i) + "\tsecond\r\n";
  Random random(2);
  int read = 0, failed = 0;
  for (int trial = 0; trial < 600; ++trial) {
    std::string text = good.substr(0, size_t(random.Below(int64_t(good.size()) + 1)));
    for (int64_t k = random.Below(3); k > 0 && !text.empty(); --k) {
      const char bytes[] = {'\t', '\n', '\r', '\0', '1', 'x'};
      text[size_t(random.Below(int64_t(text.size())))] = bytes[random.Below(6)];
    }
    WriteBytes(path, text);
    const std::string said = ErrorMessage([&] {
      const auto pairs = OpenPairFile(path, {});
      int64_t bytes = 0;
      for (int64_t i = 0; i < pairs->size(); ++i) {
        std::string a, b;
        pairs->Read(i, 1 << 20, &a, &b);
        EXPECT_EQ((a + b).find('\n'), std::string::npos);
        EXPECT_EQ((a + b).find('\t'), std::string::npos);
        bytes += int64_t(a.size() + b.size());
      }
      EXPECT_LT(bytes, int64_t(text.size()));
    });
    (said == "no error" ? read : failed) += 1;
  }
  EXPECT_GT(read, 50);
  EXPECT_GT(failed, 50);
}

std::string Document(int i) {
  std::string text;
  while (text.size() < 101) text += "document " + std::to_string(i) + " word, ";
  return text;
}

TEST(TextPairs, HalvesOccurOnceWithEachLabel) {
  const TestFolder folder;
  std::filesystem::create_directories(folder / "docs/deep");
  for (int i = 0; i < 9; ++i) {
    WriteBytes(folder / ((i % 2 ? "docs/deep/" : "docs/") + std::to_string(i) + ".txt"),
               Document(i));
  }
  WriteBytes(folder / "docs/again.txt", "\xef\xbb\xbf" + Document(4));
  WriteGzip(folder / "docs/packed.txt.gz", Document(4));
  WriteBytes(folder / "docs/short.txt", "short");
  WriteBytes(folder / "docs/.hidden", Document(99));
  std::filesystem::create_symlink(folder / "docs/deep", folder / "docs/linked");
  std::filesystem::create_symlink("none", folder / "docs/gone");
  DocumentOptions options;
  options.limit = 40;
  const auto documents = std::make_shared<const Documents>(ReadDocuments(folder / "docs", options));
  ASSERT_EQ(documents->size(), 9);
  EXPECT_EQ(documents->repeated, 2);  // also where it is compressed
  EXPECT_EQ(documents->too_short, 1);
  EXPECT_EQ(documents->notes,
            (std::vector<std::string>{"skipped 1 hidden file: " + (folder / "docs/.hidden"),
                                      "skipped 1 linked folder: " + (folder / "docs/linked"),
                                      "skipped 1 broken link: " + (folder / "docs/gone")}));
  std::map<std::string, int> first_of, second_of;  // halves by the document that they are of
  for (int i = 0; i < 9; ++i) {
    const std::string text = Document(i);
    first_of[text.substr(0, text.size() / 2).substr(0, 40)] = i;
    second_of[text.substr(text.size() / 2).substr(0, 40)] = i;
  }
  std::vector<int64_t> all(9);
  std::iota(all.begin(), all.end(), 0);
  const auto pairs = HalvesOf(documents, all, 5);
  ASSERT_EQ(pairs->size(), 18);
  std::set<std::pair<int, int>> firsts, seconds;
  for (int64_t i = 0; i < 18; ++i) {
    std::string a, b;
    pairs->Read(i, 40, &a, &b);
    ASSERT_EQ(first_of.count(a), 1u);
    ASSERT_EQ(second_of.count(b), 1u);
    EXPECT_EQ(pairs->Label(i), first_of[a] == second_of[b]);
    firsts.insert({first_of[a], pairs->Label(i)});
    seconds.insert({second_of[b], pairs->Label(i)});
  }
  EXPECT_EQ(firsts.size(), 18u);
  EXPECT_EQ(seconds.size(), 18u);
  EXPECT_EQ(HalvesOf(documents, all, 5)->Hash(), pairs->Hash());
  EXPECT_NE(HalvesOf(documents, all, 6)->Hash(), pairs->Hash());
  ExpectSays(ErrorMessage([&] { HalvesOf(documents, {3}, 5); }), {"two documents"});
  WriteBytes(folder / "docs/packed.txt", Document(5));
  ExpectSays(ErrorMessage([&] { ReadDocuments(folder / "docs", options); }),
             {"docs/packed.txt and ", "docs/packed.txt.gz would both be read"});
}

TEST(TextPairs, DocumentsOfTables) {
  const TestFolder folder;
  const std::string path = folder / "d.jsonl";
  std::string lines;
  for (int i = 0; i < 5; ++i)
    lines += "{\"id\": " + std::to_string(i) + ", \"text\": \"" + Document(i) + "\"}\n";
  WriteBytes(path, lines);
  EXPECT_EQ(ReadDocuments(path, {}).size(), 5);
  const std::string table = folder / "d.tsv";
  WriteBytes(table, "name\tbody\nx\t" + Document(1) + "\ny\t" + Document(2) + "\n");
  ExpectSays(ErrorMessage([&] { ReadDocuments(table, {}); }), {"text_column=name", "body"});
  DocumentOptions options;
  options.column = "body";
  EXPECT_EQ(ReadDocuments(table, options).size(), 2);
  const std::string pandas = folder / "pandas.tsv";  // whose index has no name
  WriteBytes(pandas, "\tbody\n0\t" + Document(1) + "\n1\t" + Document(2) + "\n");
  EXPECT_EQ(ReadDocuments(pandas, {}).size(), 2);
  options.least_bytes = 1000;
  ExpectSays(ErrorMessage([&] { ReadDocuments(table, options); }), {"1000", "2 shorter"});
}

}  // namespace
}  // namespace cistern
