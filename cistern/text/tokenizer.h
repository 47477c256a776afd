#pragma once
// Text to token ids and back. Three kinds: bytes (256 ids), byte-level BPE, and words (words.h),
// all saved as Hugging Face tokenizer.json.
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "cistern/io/fields.h"

namespace cistern {

enum class TokenizerKind { kBpe, kBytes, kWords };
const EnumNames<TokenizerKind>& TokenizerKinds();  // bpe, bytes, words

class Tokenizer {
 public:
  virtual ~Tokenizer() = default;
  virtual TokenizerKind kind() const = 0;
  virtual int64_t vocab_size() const = 0;
  // Any bytes can be encoded, valid UTF-8 or not; Decode(Encode(text)) == text always, but for
  // words: white space other than line ends becomes one space, and unknown words <unk>.
  virtual std::vector<int32_t> Encode(std::string_view text) const = 0;
  // The bytes of one token.
  virtual std::string_view Bytes(int32_t id) const = 0;
  // What Save writes: the text of a Hugging Face tokenizer.json.
  virtual std::string ToJson() const = 0;
  void Save(const std::string& path) const;
  // The id of a token added by name, such as "<|endoftext|>"; -1 when there is none.
  virtual int32_t AddedToken(std::string_view content) const = 0;
  // An id out of range is an Error.
  std::string Decode(const std::vector<int32_t>& ids) const;
  // XXH64 of ToJson(): two tokenizers with one hash give the same ids.
  uint64_t Hash() const;
};

std::unique_ptr<Tokenizer> MakeByteTokenizer();

// Of one text, or each a text, such as a row of a table: then no pre-token goes from one into the
// next.
enum class TextPieces { kOfOneText, kTexts };

// Learns merges from text by pair counts over pre-tokens (GPT-2's split: letters, digits,
// punctuation with a leading space, white space). `next` returns pieces of the text, or texts, and
// an empty view at the end. Deterministic. vocab_size >= 256 (ids 0..255 are the bytes), else a
// UsageError. Stops early, with a smaller vocabulary, when no pair occurs twice. Of two equally
// frequent pairs the one of lower ids wins. Memory grows with the number of different pre-tokens;
// time is about linear in it (4.4 MB of English to 2,048 tokens: under a second).
std::unique_ptr<Tokenizer> TrainBpe(
    const std::function<std::string_view()>& next, int64_t vocab_size,
    const std::function<void(int64_t done, int64_t total)>& progress = nullptr,
    TextPieces pieces = TextPieces::kOfOneText);

// Words by frequency, ties by their bytes, up to vocab_size with the four ids before them
// (words.h); UsageError where that is below 4. What is no UTF-8 is left out. `next` as of TrainBpe.
std::unique_ptr<Tokenizer> TrainWords(const std::function<std::string_view()>& next,
                                      int64_t vocab_size);

// Reads tokenizer.json (ours, or another byte-level BPE such as GPT-2's). A broken file is an Error
// that names the file and the place, and so is one that asks for what we would not do the same way
// (normalizers, other splits, prefixes). Truncation and padding are ignored.
std::unique_ptr<Tokenizer> LoadTokenizer(const std::string& path);
std::unique_ptr<Tokenizer> ParseTokenizer(std::string_view json, const std::string& name);

// GPT-2's two published files: encoder.json (or vocab.json) and vocab.bpe (or merges.txt).
std::unique_ptr<Tokenizer> LoadGpt2(const std::string& encoder, const std::string& merges);
std::unique_ptr<Tokenizer> ParseGpt2(std::string_view encoder, const std::string& encoder_name,
                                     std::string_view merges, const std::string& merges_name);

// Encodes a text that comes in pieces; all ids together are those of the whole text.
class StreamEncoder {
 public:
  explicit StreamEncoder(const Tokenizer& tokenizer);  // which must outlive it
  ~StreamEncoder();
  std::vector<int32_t> Push(std::string_view bytes);
  std::vector<int32_t> Finish();

 private:
  const Tokenizer& tokenizer_;
  std::unique_ptr<class PreTokenStream> cut_;
};

// Holds back bytes until they form whole UTF-8 characters, so that a stream never shows half a
// character. Invalid bytes pass as U+FFFD.
class Utf8Stream {
 public:
  std::string Push(std::string_view bytes);
  std::string Finish();

 private:
  std::string held_;  // the beginning of one character, at most 3 bytes
};

}  // namespace cistern
