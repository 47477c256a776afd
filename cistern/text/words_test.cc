// Words as tokens: the split, ids by frequency, files and their errors.
#include "cistern/text/words.h"

#include <gtest/gtest.h>

#include "cistern/base/error.h"

namespace cistern {
namespace {

using Ids = std::vector<int32_t>;

std::unique_ptr<Tokenizer> Train(const std::string& text, int64_t vocab, size_t piece) {
  size_t at = 0;
  return TrainWords(
      [&]() -> std::string_view {
        const std::string_view out = std::string_view(text).substr(at, piece);
        at += out.size();
        return out;
      },
      vocab);
}

std::string ErrorOf(const std::string& json) {
  try {
    ParseTokenizer(json, "words.json");
  } catch (const Error& e) {
    return e.what();
  }
  return "no error";
}

// A thin space (U+2009) and a tab part words as a space does; "\n" is a token.
const char* const kText =
    " = Title = \n \n the cat sat on the mat , <unk> the\tdog\xE2\x80\x89sat\ncaf\xC3\xA9 the\n";

TEST(Words, AreWhatStandsBetweenWhiteSpace) {
  for (const size_t piece : {1, 2, 7, 1000}) {
    const auto t = Train(kText, 1000, piece);
    // the 4; = 2, sat 2; then once each, by their bytes: ',' Title café cat dog mat on.
    const std::vector<std::string> want = {
        "<s> ",   "<pad> ",       "\n",   "<unk> ", "the ", "= ",  "sat ",         ", ",
        "Title ", "caf\xC3\xA9 ", "cat ", "dog ",   "mat ", "on ", "madeupword0 ", "madeupword1 "};
    ASSERT_EQ(t->vocab_size(), int64_t(want.size())) << piece;  // a multiple of 8
    for (int32_t id = 0; id < t->vocab_size(); ++id) EXPECT_EQ(t->Bytes(id), want[size_t(id)]);
    EXPECT_EQ(t->Encode(" = Title = \n \nthe zebra\xE2\x80\x89sat"), (Ids{5, 8, 5, 2, 2, 4, 3, 6}));
    EXPECT_EQ(t->Decode({5, 8, 5, 2, 4, 3}), "= Title = \nthe <unk> ");
    EXPECT_EQ(t->kind(), TokenizerKind::kWords);
  }
}

TEST(Words, TheMostFrequentAreKept) {
  const auto t = Train(kText, 7, 1000);
  EXPECT_EQ(t->vocab_size(), 8);  // seven, and one more to a multiple of 8
  EXPECT_EQ(t->Encode("the = sat on"), (Ids{4, 5, 6, 3}));
  EXPECT_THROW(Train(kText, 3, 1000), UsageError);
}

TEST(Words, APieceMayEndAnywhere) {
  const auto t = Train(kText, 1000, 1000);
  const Ids whole = t->Encode(kText);
  for (size_t piece = 1; piece < 20; ++piece) {
    StreamEncoder stream(*t);
    Ids ids;
    const std::string text = kText;
    for (size_t at = 0; at < text.size(); at += piece) {
      for (const int32_t id : stream.Push(std::string_view(text).substr(at, piece)))
        ids.push_back(id);
    }
    for (const int32_t id : stream.Finish()) ids.push_back(id);
    EXPECT_EQ(ids, whole) << piece;
  }
}

TEST(Words, FilesRoundTripAndBrokenOnesAreNamed) {
  const auto t = Train(kText, 1000, 1000);
  const std::string json = t->ToJson();
  const auto loaded = ParseTokenizer(json, "words.json");
  EXPECT_EQ(loaded->ToJson(), json);
  EXPECT_EQ(loaded->Hash(), t->Hash());
  EXPECT_EQ(loaded->Encode(kText), t->Encode(kText));
  const auto with = [&](const std::string& from, const std::string& to) {
    std::string changed = json;
    return ErrorOf(changed.replace(changed.find(from), from.size(), to));
  };
  EXPECT_NE(with("\"the\": 4", "\"the\": 40").find("'the' has the id 40"), std::string::npos);
  EXPECT_NE(with("\"the\": 4", "\"the\": 5").find("belongs to both"), std::string::npos);
  EXPECT_NE(with("\"the\": 4", "\"t e\": 4").find("white space"), std::string::npos);
  EXPECT_NE(with("\"<unk>\": 3", "\"<unc>\": 3").find("lacks <unk>"), std::string::npos);
  EXPECT_NE(with("WhitespaceSplit", "ByteLevel").find("WhitespaceSplit"), std::string::npos);
  EXPECT_NE(with(" </s> ", "</s>").find("normalizer"), std::string::npos);
}

}  // namespace
}  // namespace cistern
