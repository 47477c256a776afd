#pragma once
// Text to token ids and back. Two kinds: bytes (256 ids) and byte-level BPE, both saved as Hugging Face tokenizer.json.
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace cistern {

class Tokenizer {
 public:
  virtual ~Tokenizer() = default;
  virtual std::string kind() const = 0;  // "bytes" or "bpe"
  virtual int64_t vocab_size() const = 0;
  // Any bytes can be encoded, valid UTF-8 or not; Decode(Encode(text)) == text always.
  virtual std::vector<int32_t> Encode(std::string_view text) const = 0;
  // The bytes of one token.
  virtual std::string_view Bytes(int32_t id) const = 0;
  virtual void Save(const std::string& path) const = 0;  // tokenizer.json
  std::string Decode(const std::vector<int32_t>& ids) const;
};

std::unique_ptr<Tokenizer> MakeByteTokenizer();

// Learns merges from text by pair counts over pre-tokens (GPT-2's split: letters, digits, punctuation with a leading space, white space).
// `next` returns pieces of the text and an empty view at the end. Deterministic. vocab_size >= 256 (the 256 bytes come first).
std::unique_ptr<Tokenizer> TrainBpe(const std::function<std::string_view()>& next, int64_t vocab_size,
                                    const std::function<void(int64_t done, int64_t total)>& progress = nullptr);

// Reads tokenizer.json (ours, or another byte-level BPE such as GPT-2's). A broken file is an Error that names the file and the place.
std::unique_ptr<Tokenizer> LoadTokenizer(const std::string& path);

// Holds back bytes until they form whole UTF-8 characters, so that a stream never shows half a character. Invalid bytes pass as U+FFFD.
class Utf8Stream {
 public:
  std::string Push(std::string_view bytes);
  std::string Finish();

 private:
  std::string held_;
};

}  // namespace cistern
