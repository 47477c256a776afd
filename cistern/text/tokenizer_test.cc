#include "cistern/text/tokenizer.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <thread>

#include "cistern/base/error.h"
#include "cistern/base/random.h"
#include "cistern/io/atomic_file.h"
#include "cistern/text/bpe.h"
#include "cistern/text/pretokenize.h"

namespace cistern {
namespace {

using Ids = std::vector<int32_t>;

std::string TempPath(const std::string& name) {
  return (std::filesystem::path(testing::TempDir()) / StrCat("cistern_tok_", getpid(), "_", name))
      .string();
}

std::unique_ptr<Tokenizer> Train(std::string text, int64_t vocab, size_t piece = 1 << 20) {
  size_t at = 0;
  return TrainBpe(
      [&]() -> std::string_view {
        const std::string_view out = std::string_view(text).substr(at, piece);
        at += out.size();
        return out;
      },
      vocab);
}

std::string RandomBytes(uint64_t seed, int64_t n, int64_t alphabet) {
  Random random(seed);
  std::string out;
  for (int64_t i = 0; i < n; ++i) out += char(random.Below(alphabet));
  return out;
}

std::string Sample() {
  std::string text;
  for (int i = 0; i < 50; ++i)
    text +=
        "It's the lower newest widest thing, isn't it?\r\n  We'll see 1999 tokens\t\tand "
        "caf\xC3\xA9s \xF0\x9F\x98\x80!\n\n";
  return text;
}

std::vector<std::string> Split(std::string_view text) {
  std::vector<std::string> out;
  for (size_t begin = 0, end; begin < text.size(); begin = end) {
    end = PreTokenEnd(text, begin);
    out.emplace_back(text.substr(begin, end - begin));
  }
  return out;
}

std::string LoadError(const std::string& json) {
  const std::string path = TempPath("broken.json");
  WriteFileAtomically(path, json);
  try {
    LoadTokenizer(path);
  } catch (const Error& e) {
    EXPECT_NE(std::string(e.what()).find(path), std::string::npos) << e.what();
    return e.what();
  }
  return "loaded";
}

std::string Replaced(std::string text, const std::string& from, const std::string& to) {
  const size_t at = text.find(from);
  EXPECT_NE(at, std::string::npos) << from;
  return text.replace(at, from.size(), to);
}

TEST(PreToken, SplitsAsGpt2Does) {
  using Strings = std::vector<std::string>;
  EXPECT_EQ(Split("Hello world's  end"), (Strings{"Hello", " world", "'s", " ", " end"}));
  EXPECT_EQ(Split("we'll 12ab!? 'x"), (Strings{"we", "'ll", " 12", "ab", "!?", " '", "x"}));
  EXPECT_EQ(Split("a \n\n b\t c  "), (Strings{"a", " \n\n", " b", "\t", " c", "  "}));
  EXPECT_EQ(Split("\r\nx\n"), (Strings{"\r", "\n", "x", "\n"}));
  EXPECT_EQ(Split("na\xC3\xAFve \xE4\xB8\xAD\xE6\x96\x87\xE3\x80\x80z"),
            (Strings{"na\xC3\xAFve", " \xE4\xB8\xAD\xE6\x96\x87", "\xE3\x80\x80", "z"}));
  EXPECT_EQ(Split("a\xFF\xC3"), (Strings{"a", "\xFF\xC3"}));
}

TEST(PreToken, PiecesOfAStreamGiveTheSplitOfTheWhole) {
  for (uint64_t seed = 0; seed < 300; ++seed) {
    Random random(seed);
    const std::vector<std::string> parts = {
        "a", "'", "ll", " ", "\n", "\xC2\xA0", "\xE2\x80\x83", "7", "\xFF", "\xC3\xA9", "!", "re"};
    std::string text;
    for (int i = 0; i < 60; ++i) text += parts[random.Below(int64_t(parts.size()))];
    PreTokenStream stream;
    std::vector<std::string> got;
    const auto add = [&](std::string_view piece) {
      for (auto& token : Split(piece)) got.push_back(token);
    };
    for (size_t at = 0; at < text.size();) {
      const size_t n = 1 + random.Below(5);
      add(stream.Push(std::string_view(text).substr(at, n)));
      at += n;
    }
    add(stream.Finish());
    ASSERT_EQ(got, Split(text)) << seed;
  }
}

TEST(ByteTokenizer, IsTheBytes) {
  const auto t = MakeByteTokenizer();
  EXPECT_EQ(t->kind(), TokenizerKind::kBytes);
  EXPECT_EQ(t->vocab_size(), 256);
  EXPECT_EQ(t->Encode("a\xFF"), (Ids{97, 255}));
  EXPECT_THROW(t->Bytes(256), Error);
  EXPECT_THROW(t->Decode({-1}), Error);
}

TEST(Bpe, LearnsTheMergesOfASmallText) {
  // Counts: "ab" 4, then with it "abc" 3 (of "ab"+"c").
  const auto t = Train("abc\nabc\nabc\nab\n", 259);
  EXPECT_EQ(t->Bytes(256), "ab");
  EXPECT_EQ(t->Bytes(257), "abc");
  EXPECT_EQ(t->vocab_size(), 258) << "nothing else occurs twice";
  EXPECT_EQ(t->Encode("abcabab"), (Ids{257, 256, 256}));
  EXPECT_EQ(Train("aaaaa aaaaa", 300)->Decode({256, 257}), "aaaaa");
  EXPECT_THROW(Train("x", 255), UsageError);
  EXPECT_EQ(Train("", 300)->vocab_size(), 256);
}

TEST(Bpe, IsDeterministicWhateverThePieces) {
  const std::string text = Sample();
  const auto whole = Train(text, 400);
  EXPECT_EQ(whole->ToJson(), Train(text, 400, 7)->ToJson());
  EXPECT_EQ(whole->Hash(), Train(text, 400, 1000)->Hash());
  EXPECT_NE(whole->Hash(), Train(text, 300)->Hash());
}

TEST(Bpe, TextsAreApart) {
  const auto learn = [](TextPieces pieces) {
    int left = 10;
    return TrainBpe([&] { return std::string_view(left-- > 0 ? "qq" : ""); }, 300, nullptr, pieces)
        ->vocab_size();
  };
  EXPECT_EQ(learn(TextPieces::kTexts), 257);  // nothing is longer than qq
  EXPECT_GT(learn(TextPieces::kOfOneText), 257);
}

TEST(Bpe, RoundTripsAnyBytes) {
  const auto t = Train(Sample(), 400);
  for (const int64_t alphabet : {2, 100, 256}) {
    for (uint64_t seed = 0; seed < 50; ++seed) {
      const std::string text = RandomBytes(seed, 300, alphabet);
      ASSERT_EQ(t->Decode(t->Encode(text)), text);
    }
  }
  EXPECT_EQ(t->Decode(t->Encode(Sample())), Sample());
  EXPECT_LT(t->Encode(Sample()).size(), Sample().size() / 3);
}

// The definition: again and again the pair of the lowest rank, the leftmost of equals.
std::vector<std::string> MergeByDefinition(const std::string& word,
                                           const std::map<std::string, int>& ranks) {
  std::vector<std::string> parts;
  for (const char c : word) parts.emplace_back(1, c);
  for (;;) {
    int best = int(ranks.size());
    size_t at = 0;
    for (size_t i = 0; i + 1 < parts.size(); ++i) {
      const auto rank = ranks.find(parts[i] + " " + parts[i + 1]);
      if (rank != ranks.end() && rank->second < best) best = rank->second, at = i;
    }
    if (best == int(ranks.size())) return parts;
    parts[at] += parts[at + 1];
    parts.erase(parts.begin() + at + 1);
  }
}

TEST(Bpe, ShortAndLongWordsFollowTheDefinition) {
  std::string text = RandomBytes(3, 3000, 3);
  for (char& c : text) c = char('a' + c);
  const auto t = Train(text, 400);
  std::map<std::string, int> ranks;
  const auto json = nlohmann::json::parse(t->ToJson());
  for (const auto& merge : json["model"]["merges"]) ranks.emplace(merge, int(ranks.size()));
  for (const size_t n : {1, 2, 3, 10, 20, 47, 48, 49, 50, 64, 65, 100, 400}) {
    const std::string word = text.substr(7, n);
    std::vector<std::string> got;
    for (const int32_t id : t->Encode(word)) got.emplace_back(t->Bytes(id));
    EXPECT_EQ(got, MergeByDefinition(word, ranks)) << n;
  }
}

TEST(Bpe, StreamGivesTheIdsOfTheWhole) {
  const auto t = Train(Sample(), 400);
  const std::string text = Sample() + RandomBytes(1, 500, 256);
  const Ids whole = t->Encode(text);
  for (const size_t piece : {1, 3, 64, 5000}) {
    StreamEncoder stream(*t);
    Ids ids;
    for (size_t at = 0; at < text.size(); at += piece) {
      const Ids part = stream.Push(std::string_view(text).substr(at, piece));
      ids.insert(ids.end(), part.begin(), part.end());
    }
    const Ids rest = stream.Finish();
    ids.insert(ids.end(), rest.begin(), rest.end());
    ASSERT_EQ(ids, whole) << piece;
  }
}

TEST(Bpe, ThreadsMayShareOne) {
  const auto t = Train(Sample(), 400);
  const Ids want = t->Encode(Sample());
  std::vector<std::thread> threads;
  std::vector<int> equal(4);
  for (int i = 0; i < 4; ++i)
    threads.emplace_back([&, i] { equal[i] = t->Encode(Sample()) == want; });
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(equal, (std::vector<int>{1, 1, 1, 1}));
}

TEST(TokenizerFile, LoadsWhatItSaved) {
  const std::string path = TempPath("bpe.json");
  const auto t = Train(Sample(), 400);
  t->Save(path);
  const auto loaded = LoadTokenizer(path);
  EXPECT_EQ(loaded->kind(), TokenizerKind::kBpe);
  EXPECT_EQ(loaded->Hash(), t->Hash());
  const std::string text = Sample() + RandomBytes(2, 500, 256);
  EXPECT_EQ(loaded->Encode(text), t->Encode(text));
  MakeByteTokenizer()->Save(path);
  EXPECT_EQ(LoadTokenizer(path)->kind(), TokenizerKind::kBytes);
  EXPECT_EQ(LoadTokenizer(path)->Encode("\x00\x80z"), MakeByteTokenizer()->Encode("\x00\x80z"));
}

TEST(TokenizerFile, AddedTokensAreFoundInText) {
  const std::string json =
      Replaced(MakeByteTokenizer()->ToJson(), "\"added_tokens\": []",
               R"("added_tokens": [{"id": 256, "content": "<|endoftext|>", "special": true}])");
  const std::string path = TempPath("added.json");
  WriteFileAtomically(path, json);
  const auto t = LoadTokenizer(path);
  EXPECT_EQ(t->vocab_size(), 257);
  EXPECT_EQ(t->AddedToken("<|endoftext|>"), 256);
  EXPECT_EQ(t->AddedToken("<pad>"), -1);
  EXPECT_EQ(t->Encode("a<|endoftext|><|e"), (Ids{97, 256, 60, 124, 101}));
  EXPECT_EQ(t->Decode(t->Encode("a<|endoftext|>b")), "a<|endoftext|>b");
  t->Save(path);
  EXPECT_EQ(LoadTokenizer(path)->Encode("x<|endoftext|>"), (Ids{120, 256}));
}

TEST(TokenizerFile, BrokenFilesAreNamedWithThePlace) {
  const auto has = [](const std::string& error, const std::string& part) {
    EXPECT_NE(error.find(part), std::string::npos) << error;
  };
  const std::string good = Train("abc\nabc\nabc\n", 258)->ToJson();
  has(LoadError("{"), ":1:2: not valid JSON");
  has(LoadError(""), ":1:1: not valid JSON");
  has(LoadError("[]"), "no 'model'");
  has(LoadError(Replaced(good, "\"BPE\"", "\"Unigram\"")), "model.type is \"Unigram\"");
  has(LoadError(Replaced(good, "\"abc\": 257", "\"abc\": 258")), "257 is missing");
  has(LoadError(Replaced(good, "\"abc\": 257", "\"abc\": 256")), "the id 256 belongs to both");
  has(LoadError(Replaced(good, "\"abc\": 257", "\"ab\": 257")),
      "key 'ab' is given twice in one object");
  has(LoadError(Replaced(good, "\"abc\": 257", "\"abc\": \"257\"")), "has the id \"257\"");
  has(LoadError(Replaced(good, "\"abc\": 257", "\"abc\": -1")), "has the id -1");
  has(LoadError(Replaced(good, "\"abc\": 257", "\"abc\": 1e99")), "has the id");
  has(LoadError(Replaced(good, "\"abc\": 257", "\"a\xE2\x82\xAC\": 257")),
      "outside GPT-2's byte alphabet");
  has(LoadError(Replaced(good, "\"a\": 97", "\"aa\": 97")), "not in the vocabulary");
  has(LoadError(Replaced(good, "\"ab c\"", "\"ab c d\"")),
      "model.merges[1]: 'ab c d' is not two tokens");
  has(LoadError(Replaced(good, "\"ab c\"", "7")), "model.merges[1] is neither");
  has(LoadError(Replaced(good, "\"ab c\"", "\"a b\"")), "merge 1 (a b) is there twice");
  has(LoadError(Replaced(good, "\"ab c\"", "\"ab d\"")),
      "gives a token that is not in the vocabulary");
  has(LoadError(Replaced(good, "\"normalizer\": null", "\"normalizer\": {\"type\": \"NFC\"}")),
      "normalizer");
  has(LoadError(Replaced(good, "\"add_prefix_space\": false", "\"add_prefix_space\": true")),
      "add_prefix_space");
  has(LoadError(Replaced(good, "\"dropout\": null", "\"dropout\": 0.1")), "model.dropout = 0.1");
  EXPECT_THROW(LoadTokenizer(TempPath("missing")), Error);
  EXPECT_THROW(LoadTokenizer(testing::TempDir()), Error);
}

TEST(TokenizerFile, MergesMayBePairs) {
  const std::string good = Train("abc\nabc\nabc\n", 258)->ToJson();
  EXPECT_EQ(LoadError(Replaced(good, "\"ab c\"", "[\"ab\", \"c\"]")), "loaded");
}

TEST(TokenizerFile, Gpt2) {
  const char* root = std::getenv("CISTERN_SOURCE_DIR");
  const std::string folder = StrCat(root ? root : ".", "/../shared/data/tokenizers/gpt2/");
  if (!std::filesystem::exists(folder)) GTEST_SKIP() << "no " << folder;
  const auto t = LoadGpt2(folder + "encoder.json", folder + "vocab.bpe");
  EXPECT_EQ(t->vocab_size(), 50257);
  EXPECT_EQ(t->AddedToken("<|endoftext|>"), 50256);
  EXPECT_EQ(t->Encode("Hello world"), (Ids{15496, 995}));
  EXPECT_EQ(t->Encode("Hello<|endoftext|>"), (Ids{15496, 50256}));
  const std::string path = TempPath("gpt2.json");
  t->Save(path);
  EXPECT_EQ(LoadTokenizer(path)->Encode(Sample()), t->Encode(Sample()));
}

TEST(Utf8Stream, NeverShowsHalfACharacter) {
  const std::string text = "a\xC3\xA9\xE4\xB8\xAD\xF0\x9F\x98\x80z";
  for (size_t piece = 1; piece < 6; ++piece) {
    Utf8Stream stream;
    std::string out;
    for (size_t at = 0; at < text.size(); at += piece) {
      const std::string part = stream.Push(text.substr(at, piece));
      EXPECT_TRUE(part.empty() || (uint8_t(part[0]) & 0xC0) != 0x80);

      out += part;
    }
    EXPECT_EQ(out + stream.Finish(), text);
  }
}

TEST(Utf8Stream, InvalidBytesBecomeReplacementCharacters) {
  const std::string r = "\xEF\xBF\xBD";
  Utf8Stream stream;
  EXPECT_EQ(stream.Push("\xF0\x9F"), "");
  EXPECT_EQ(stream.Push("x"), r + "x");
  EXPECT_EQ(stream.Push("\xFF\xC0\xAF"), r + r + r);
  EXPECT_EQ(stream.Push("\xED\xA0\x80"), r + r + r) << "a surrogate";
  EXPECT_EQ(stream.Push("\xE4\xB8"), "");
  EXPECT_EQ(stream.Finish(), r);
  EXPECT_EQ(stream.Finish(), "");
}

}  // namespace
}  // namespace cistern
