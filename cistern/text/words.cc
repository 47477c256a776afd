#include "cistern/text/words.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <unordered_map>
#include <utility>

#include "cistern/base/error.h"
#include "cistern/io/json_text.h"
#include "cistern/text/utf8.h"

namespace cistern {
namespace {

using nlohmann::json;

constexpr const char *kLineEnd = "</s>", *kUnknown = "<unk>";
constexpr size_t kMultiple = 8;

// Calls word(text) for each word and end() for each line end.
template <class Word, class End>
void Split(std::string_view text, Word&& word, End&& end) {
  size_t begin = 0, i = 0;
  const auto flush = [&] {
    if (i > begin) word(text.substr(begin, i - begin));
  };
  while (i < text.size()) {
    const auto c = uint8_t(text[i]);
    const Utf8Char wide = c < 0x80 ? Utf8Char{int32_t(c), 1} : DecodeUtf8(text, i);
    const bool space =
        c < 0x80 ? c == ' ' || (c >= '\t' && c <= '\r') : ClassOf(wide.code) == CharClass::kSpace;
    if (space) {
      flush();
      if (c == '\n') end();
      begin = i + size_t(wide.length);
    }
    i += size_t(wide.length);
  }
  flush();
}

class Words : public Tokenizer {
 public:
  Words(std::vector<std::string> words, const std::string& where) : words_(std::move(words)) {
    for (size_t id = 0; id < words_.size(); ++id) {
      size_t parts = 0;
      Split(
          words_[id], [&](std::string_view) { ++parts; }, [&] { parts += 2; });
      CISTERN_CHECK(parts == 1 && words_[id].find_first_of(" \t\r\n\v\f") == std::string::npos,
                    where, ": the word of id ", id, ", '", words_[id],
                    "', is empty or has white space");
      CISTERN_CHECK(ids_.emplace(words_[id], int32_t(id)).second, where, ": the word '", words_[id],
                    "' is there twice");
    }
    for (const char* needed : {kLineEnd, kUnknown})
      CISTERN_CHECK(ids_.count(needed) == 1, where, ": the vocabulary lacks ", needed);
    line_end_ = ids_.at(kLineEnd), unknown_ = ids_.at(kUnknown);
    for (const std::string& word : words_) bytes_.push_back(word + " ");
    bytes_[size_t(line_end_)] = "\n";
  }

  TokenizerKind kind() const override { return TokenizerKind::kWords; }
  int64_t vocab_size() const override { return int64_t(words_.size()); }
  std::vector<int32_t> Encode(std::string_view text) const override {
    std::vector<int32_t> ids;
    Split(
        text,
        [&](std::string_view word) {
          const auto found = ids_.find(word);
          ids.push_back(found == ids_.end() ? unknown_ : found->second);
        },
        [&] { ids.push_back(line_end_); });
    return ids;
  }
  std::string_view Bytes(int32_t id) const override {
    CISTERN_CHECK(id >= 0 && size_t(id) < bytes_.size(), "there is no token of id ", id,
                  "; the vocabulary has ", bytes_.size());
    return bytes_[size_t(id)];
  }
  std::string ToJson() const override {
    std::string out =
        "{\n  \"version\": \"1.0\",\n  \"truncation\": null,\n  \"padding\": null,\n  "
        "\"added_tokens\": [],\n  \"normalizer\": {\"type\": \"Replace\", \"pattern\": "
        "{\"String\": \"\\n\"}, \"content\": \" </s> \"},\n  \"pre_tokenizer\": {\"type\": "
        "\"WhitespaceSplit\"},\n  \"post_processor\": null,\n  \"decoder\": null,\n  \"model\": "
        "{\n    \"type\": \"WordLevel\", \"unk_token\": \"<unk>\",\n    \"vocab\": {";
    for (size_t id = 0; id < words_.size(); ++id) {
      out += StrCat(id == 0 ? "" : ",", "\n      ",
                    json(words_[id]).dump(-1, ' ', false, json::error_handler_t::strict), ": ", id);
    }
    return out + "\n    }\n  }\n}\n";
  }
  int32_t AddedToken(std::string_view) const override { return -1; }

 private:
  std::vector<std::string> words_, bytes_;
  std::unordered_map<std::string_view, int32_t> ids_;  // of words_
  int32_t line_end_ = 0, unknown_ = 0;
};

}  // namespace

std::unique_ptr<Tokenizer> MakeWords(std::vector<std::string> words, const std::string& where) {
  return std::make_unique<Words>(std::move(words), where);
}

std::unique_ptr<Tokenizer> TrainWords(const std::function<std::string_view()>& next,
                                      int64_t vocab_size) {
  std::vector<std::string> words = {"<s>", "<pad>", kLineEnd, kUnknown};
  if (vocab_size < int64_t(words.size()))
    FailUsage("a vocabulary of words needs vocab_size of at least ", words.size(), ", got ",
              vocab_size);
  std::unordered_map<std::string, int64_t> counts;
  std::string held;  // a word that may go on in the next piece
  const auto count = [&](std::string_view text) {
    Split(
        text, [&](std::string_view word) { ++counts[std::string(word)]; }, [] {});
  };
  for (std::string_view piece = next(); !piece.empty(); piece = next()) {
    held += piece;
    const size_t cut = held.find_last_of(" \n");
    if (cut == std::string::npos) continue;
    count(std::string_view(held).substr(0, cut));
    held.erase(0, cut);
  }
  count(held);
  for (const std::string& special : words) counts.erase(special);
  std::vector<std::pair<int64_t, std::string>> found;
  for (const auto& [word, number] : counts) {
    if (IsUtf8(word)) found.emplace_back(-number, word);
  }
  std::sort(found.begin(), found.end());
  for (size_t i = 0; i < found.size() && int64_t(words.size()) < vocab_size; ++i)
    words.push_back(found[i].second);
  for (size_t number = 0; words.size() % kMultiple != 0; ++number) {
    const std::string name = StrCat("madeupword", number);
    if (counts.count(name) == 0) words.push_back(name);
  }
  return MakeWords(std::move(words), "words");
}

std::unique_ptr<Tokenizer> ParseWords(std::string_view text, const std::string& name) {
  const json file = ParseSortedJson(text, name);
  const auto at = [&](const char* key) { return file.value(key, json()); };
  const json normalizer = {
      {"type", "Replace"}, {"pattern", {{"String", "\n"}}}, {"content", " </s> "}};
  CISTERN_CHECK(at("normalizer") == normalizer, name,
                ": a WordLevel model needs the normalizer that replaces line ends by </s>: ",
                normalizer.dump());
  CISTERN_CHECK(at("pre_tokenizer").is_object() &&
                    at("pre_tokenizer").value("type", json()) == "WhitespaceSplit",
                name, ": a WordLevel model needs a pre_tokenizer of type WhitespaceSplit");
  const json model = at("model");
  CISTERN_CHECK(model.value("unk_token", json()) == kUnknown, name,
                ": model.unk_token must be \"<unk>\"");
  const json added = at("added_tokens");
  CISTERN_CHECK(added.is_null() || (added.is_array() && added.empty()), name,
                ": added_tokens are not supported with WordLevel");
  const json vocabulary = model.value("vocab", json());
  CISTERN_CHECK(vocabulary.is_object(), name, ": model.vocab is not an object of word: id");
  std::vector<std::string> words(vocabulary.size());
  for (const auto& [word, id] : vocabulary.items()) {
    CISTERN_CHECK(id.is_number_integer() && id >= 0 && id < int64_t(words.size()), name,
                  ": the word '", word, "' has the id ", id.dump().substr(0, 80),
                  "; ids must run from 0 to ", int64_t(words.size()) - 1, " without gaps");
    std::string& place = words[id.get<size_t>()];
    CISTERN_CHECK(place.empty(), name, ": the id ", id.dump(), " belongs to both '", place,
                  "' and '", word, "'");
    place = word;
  }
  return MakeWords(std::move(words), name);
}

}  // namespace cistern
