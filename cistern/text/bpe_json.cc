#include <algorithm>
#include <array>
#include <map>
#include <unordered_map>

#include <nlohmann/json.hpp>

#include "cistern/base/error.h"
#include "cistern/io/atomic_file.h"
#include "cistern/io/json_text.h"
#include "cistern/text/bpe.h"
#include "cistern/text/utf8.h"
#include "cistern/text/words.h"

namespace cistern {
namespace {

using nlohmann::json;

// GPT-2's alphabet: printable Latin-1 stands for itself, the other 68 bytes for U+0100 and up, in
// order.
struct Alphabet {
  std::array<int32_t, 256> code;
  std::unordered_map<int32_t, uint8_t> byte;
  Alphabet() {
    int32_t next = 0x100;
    for (int b = 0; b < 256; ++b) {
      const bool printable = (b >= '!' && b <= '~') || (b >= 0xA1 && b <= 0xAC) || b >= 0xAE;
      code[b] = printable ? b : next++;
      byte[code[b]] = uint8_t(b);
    }
  }
};
const Alphabet& TheAlphabet() {
  static const Alphabet alphabet;
  return alphabet;
}

// Reads the parts of one file; errors say where.
class Reader {
 public:
  explicit Reader(std::string path) : path_(std::move(path)) {}

  template <class... Args>
  [[noreturn]] void Bad(const Args&... args) const {
    Fail(path_, ": ", args...);
  }

  const json& Member(const json& object, const char* key, const std::string& where) const {
    if (!object.is_object() || !object.contains(key)) Bad("no '", where, key, "'");
    return object[key];
  }

  int32_t Id(const json& value, const std::string& where) const {
    if (!value.is_number_integer() || value < 0 || value > 1 << 30)
      Bad(where, " has the id ", value.dump().substr(0, 80),
          "; expected a whole number of at least 0");
    return value.get<int32_t>();
  }

  // Null, absent, false, 0 and "" all mean "not in use".
  void RefuseSetting(const json& object, const char* key, const std::string& where) const {
    if (!object.contains(key)) return;
    const json& v = object[key];
    if (v.is_null() || v == false || v == 0 || v == "") return;
    Bad(where, key, " = ", v.dump().substr(0, 80),
        " is not supported (byte-level BPE as GPT-2's is)");
  }

  void Vocabulary(const json& vocab, const std::string& where) {
    if (!vocab.is_object()) Bad(where, " is not an object of token: id");
    for (const auto& [name, id] : vocab.items())
      Place(Id(id, StrCat(where, " '", name, "'")), name, "");
  }

  // The token `name`, whose bytes are `raw`, or to be decoded from the name later when raw is
  // empty.
  void Place(int32_t id, const std::string& name, const std::string& raw) {
    const auto [slot, fresh] = names_.emplace(id, std::pair(name, raw));
    if (!fresh) Bad("the id ", id, " belongs to both '", slot->second.first, "' and '", name, "'");
    if (!ids_.emplace(name, id).second) Bad("the token '", name, "' is there twice");
  }

  void Added(const json& list) {
    if (!list.is_array()) Bad("added_tokens is not a list");
    for (size_t i = 0; i < list.size(); ++i) {
      const std::string where = StrCat("added_tokens[", i, "]");
      const json& entry = list[i];
      const int32_t id = Id(Member(entry, "id", where + "."), where);
      const json& content = Member(entry, "content", where + ".");
      if (!content.is_string() || content.get_ref<const std::string&>().empty())
        Bad(where, ".content is not a text");
      const std::string text = content;
      for (const char* flag : {"single_word", "lstrip", "rstrip"})
        RefuseSetting(entry, flag, where + ".");
      if (text.find_first_of(" \t\r\n\v\f") != text.npos)
        Bad(where, ".content '", text, "' has white space, which is not supported");
      const auto same = ids_.find(text);
      const bool in_vocab = same != ids_.end();
      if (in_vocab && same->second != id)
        Bad(where, " '", text, "' has id ", id, ", but ", same->second, " in the vocabulary");
      if (in_vocab) {
        names_[id].second = text;
      } else {
        Place(id, text, text);
      }
      const bool special = entry.contains("special") && entry["special"] == true;
      model_.added.push_back({text, id, special, in_vocab});
    }
  }

  void Merge(const std::string& left, const std::string& right, const std::string& where) {
    const auto l = ids_.find(left), r = ids_.find(right);
    if (l == ids_.end()) Bad(where, ": '", left, "' is not in the vocabulary");
    if (r == ids_.end()) Bad(where, ": '", right, "' is not in the vocabulary");
    model_.merges.emplace_back(l->second, r->second);
  }

  void Merges(const json& list) {
    if (!list.is_array()) Bad("model.merges is not a list");
    for (size_t i = 0; i < list.size(); ++i) {
      const std::string where = StrCat("model.merges[", i, "]");
      const json& merge = list[i];
      if (merge.is_array() && merge.size() == 2 && merge[0].is_string() && merge[1].is_string()) {
        Merge(merge[0], merge[1], where);
      } else if (merge.is_string()) {
        MergeLine(merge.get_ref<const std::string&>(), where);
      } else {
        Bad(where, " is neither \"left right\" nor [\"left\", \"right\"]");
      }
    }
  }

  void MergeLine(const std::string& line, const std::string& where) {
    const size_t space = line.find(' ');
    if (space == line.npos || line.find(' ', space + 1) != line.npos)
      Bad(where, ": '", line, "' is not two tokens");
    Merge(line.substr(0, space), line.substr(space + 1), where);
  }

  std::unique_ptr<Tokenizer> Finish() {
    int32_t next = 0;
    for (const auto& [id, token] : names_) {  // in order of ids
      if (id != next)
        Bad("ids must run from 0 to ", names_.size() - 1, " without gaps; ", next, " is missing");
      ++next;
      std::string bytes = token.second;
      if (bytes.empty() && !NameToBytes(token.first, &bytes))
        Bad("token ", id, " '", token.first, "' has characters outside GPT-2's byte alphabet");
      model_.tokens.push_back(std::move(bytes));
    }
    return MakeBpe(std::move(model_), path_);
  }

 private:
  std::string path_;
  std::map<int32_t, std::pair<std::string, std::string>> names_;
  std::unordered_map<std::string, int32_t> ids_;
  BpeModel model_;
};

std::string Quoted(const std::string& text) { return json(text).dump(); }

}  // namespace

std::string BytesToName(std::string_view bytes) {
  std::string name;
  for (const char c : bytes) AppendUtf8(TheAlphabet().code[uint8_t(c)], &name);
  return name;
}

bool NameToBytes(std::string_view name, std::string* bytes) {
  bytes->clear();
  for (size_t i = 0; i < name.size();) {
    const Utf8Char c = DecodeUtf8(name, i);
    const auto byte = TheAlphabet().byte.find(c.code);
    if (byte == TheAlphabet().byte.end()) return false;
    *bytes += char(byte->second);
    i += c.length;
  }
  return !bytes->empty();
}

std::string BpeJson(const BpeModel& model) {
  std::vector<std::string> names;
  for (const std::string& token : model.tokens) names.push_back(BytesToName(token));
  std::vector<bool> outside(names.size(), false);
  std::string added;
  for (const BpeAdded& token : model.added) {
    names[token.id] = token.content;
    outside[token.id] = !token.in_vocab;
    added += StrCat(added.empty() ? "" : ",", "\n    {\"id\": ", token.id,
                    ", \"content\": ", Quoted(token.content),
                    ", \"single_word\": false, \"lstrip\": false, \"rstrip\": false, "
                    "\"normalized\": false, \"special\": ",
                    token.special ? "true" : "false", "}");
  }
  const std::string level =
      R"({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true})";
  std::string out = StrCat(
      "{\n  \"version\": \"1.0\",\n  \"truncation\": null,\n  \"padding\": null,\n  "
      "\"added_tokens\": [",
      added, "],\n  \"normalizer\": null,\n  \"pre_tokenizer\": ", level,
      ",\n  \"post_processor\": null,\n  \"decoder\": ", level,
      ",\n  \"model\": {\n    \"type\": \"BPE\", \"dropout\": null, \"unk_token\": null, "
      "\"continuing_subword_prefix\": null, "
      "\"end_of_word_suffix\": null, \"fuse_unk\": false, \"byte_fallback\": false, "
      "\"ignore_merges\": false,\n"
      "    \"vocab\": {");
  const char* comma = "";
  for (size_t id = 0; id < names.size(); ++id) {
    if (outside[id]) continue;
    out += StrCat(comma, "\n      ", Quoted(names[id]), ": ", id);
    comma = ",";
  }
  out += "\n    },\n    \"merges\": [";
  comma = "";
  for (const auto& [left, right] : model.merges) {
    out += StrCat(comma, "\n      ", Quoted(names[left] + " " + names[right]));
    comma = ",";
  }
  return out + "\n    ]\n  }\n}\n";
}

std::unique_ptr<Tokenizer> LoadTokenizer(const std::string& path) {
  return ParseTokenizer(ReadFile(path), path);
}

std::unique_ptr<Tokenizer> ParseTokenizer(std::string_view text, const std::string& name) {
  const json file = ParseSortedJson(text, name);
  Reader reader(name);
  const json& model = reader.Member(file, "model", "");
  const json& type = reader.Member(model, "type", "model.");
  if (type == "WordLevel") return ParseWords(text, name);
  if (type != "BPE")
    reader.Bad("model.type is ", type.dump().substr(0, 80),
               "; only \"BPE\" and \"WordLevel\" are supported");
  for (const char* key : {"dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix",
                          "byte_fallback", "ignore_merges"}) {
    reader.RefuseSetting(model, key, "model.");
  }
  reader.RefuseSetting(file, "normalizer", "");
  const json& split = reader.Member(file, "pre_tokenizer", "");
  if (!split.is_object() || split.value("type", json()) != "ByteLevel") {
    reader.Bad("pre_tokenizer is not of type ByteLevel, the only one supported: ",
               split.dump().substr(0, 80));
  }
  // Absent means true to Python's library.
  if (split.value("add_prefix_space", json(true)) != false)
    reader.Bad("pre_tokenizer.add_prefix_space must be false");
  if (split.value("use_regex", json(true)) != true)
    reader.Bad("pre_tokenizer.use_regex must be true");
  if (file.contains("post_processor") && !file["post_processor"].is_null()) {
    const json& post = file["post_processor"];
    if (!post.is_object() || post.value("type", json()) != "ByteLevel") {
      reader.Bad("post_processor is not of type ByteLevel, the only one supported: ",
                 post.dump().substr(0, 80));
    }
  }
  reader.Vocabulary(reader.Member(model, "vocab", "model."), "model.vocab");
  if (file.contains("added_tokens") && !file["added_tokens"].is_null())
    reader.Added(file["added_tokens"]);
  reader.Merges(reader.Member(model, "merges", "model."));
  return reader.Finish();
}

std::unique_ptr<Tokenizer> LoadGpt2(const std::string& encoder, const std::string& merges) {
  return ParseGpt2(ReadFile(encoder), encoder, ReadFile(merges), merges);
}

std::unique_ptr<Tokenizer> ParseGpt2(std::string_view encoder, const std::string& encoder_name,
                                     std::string_view merges, const std::string& merges_name) {
  Reader reader(encoder_name);
  const json vocabulary = ParseSortedJson(encoder, encoder_name);
  reader.Vocabulary(vocabulary, "the vocabulary");
  if (vocabulary.contains("<|endoftext|>")) {
    reader.Added(
        {{{"id", vocabulary["<|endoftext|>"]}, {"content", "<|endoftext|>"}, {"special", true}}});
  }
  int64_t number = 0;
  for (size_t begin = 0; begin < merges.size();) {
    const size_t end = std::min(merges.find('\n', begin), merges.size());
    std::string line(merges.substr(begin, end - begin));
    if (!line.empty() && line.back() == '\r') line.pop_back();
    begin = end + 1;
    ++number;
    if (line.empty() || (number == 1 && line.starts_with("#version"))) continue;
    reader.MergeLine(line, StrCat("with ", merges_name, " line ", number));
  }
  return reader.Finish();
}

}  // namespace cistern
