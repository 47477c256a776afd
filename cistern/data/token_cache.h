#pragma once
// Tokens of a text on disk: made once by streaming, read in pieces afterwards, rebuilt when the
// text or the tokenizer changes. The content of the text decides, not its name or time. Several
// processes may share a folder: one makes what is missing, the others wait.
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "cistern/text/text_source.h"
#include "cistern/text/tokenizer.h"

namespace cistern {

// A range of the source and its tokens, which know nothing of what is before or behind it.
struct TokenPiece {
  int64_t begin, end;  // bytes of the source
  int64_t tokens_end;  // the first token behind the piece; it begins where the one before ends
};

// The beginning of a token file; little-endian. The ids follow, uint16 for vocabularies up to
// 65,536, else uint32. Where the file is of several ranges, the TokenPieces and their XXH64 follow.
struct TokenHeader {
  char magic[8];    // "CISTTOK2"
  uint32_t width;   // bytes per id: 2 or 4
  uint32_t pieces;  // ranges of the source; 0: one
  uint64_t vocab_size, count;
  uint64_t begin, end;                   // from the first range's begin to the last one's end
  uint64_t source_hash, tokenizer_hash;  // TextSource::Hash, Tokenizer::Hash
  uint64_t checksum;                     // XXH64 of the ids as they are in the file
  uint64_t header_checksum;              // XXH64 of all above
};
static_assert(sizeof(TokenHeader) == 80);

// A token file, open for reading; safe from any thread. Nothing is mapped: a file that is cut short
// while it is open is an Error, where a map would end the process.
class TokenFile {
 public:
  // Checks magic, header and size, not the ids. An Error names the file and says what is broken.
  // O(1).
  explicit TokenFile(const std::string& path);
  ~TokenFile();
  TokenFile(TokenFile&& other) noexcept;
  TokenFile& operator=(TokenFile&& other) noexcept;

  const std::string& path() const { return path_; }
  const TokenHeader& header() const { return header_; }
  int64_t size() const { return int64_t(header_.count); }            // tokens
  const std::vector<TokenPiece>& pieces() const { return pieces_; }  // at least one
  int64_t bytes() const;                                             // of text they stand for
  // out[i] = token begin+i as int32_t or int64_t; an Error when the range is not within the file,
  // or holds an id outside the vocabulary.
  template <class Int>
  void Copy(int64_t begin, int64_t count, Int* out) const;
  // Reads everything: an Error when the ids do not fit the checksum.
  void Verify() const;

 private:
  void Read(int64_t begin, int64_t count, void* out) const;  // as they are in the file
  std::string ReadPieces();                                  // what is wrong with them, or ""
  void Close();

  std::string path_;
  TokenHeader header_{};
  std::vector<TokenPiece> pieces_;
  int fd_ = -1;
};

using TextProgress = std::function<void(int64_t done, int64_t total)>;  // in bytes

// Tokenizes ranges of a source, each from its own beginning, into `path`, which appears only when
// complete. Its folder must exist. Progress is in bytes of the ranges.
void BuildTokenFile(const TextSource& source, const ByteRanges& ranges, const Tokenizer& tokenizer,
                    const std::string& path, const TextProgress& progress = nullptr);

// A tokenizer (BPE or words) learned from ranges of a source: the training part, so that nothing
// from the rest leaks. Progress is in tokens.
std::unique_ptr<Tokenizer> TrainTokenizerOn(TokenizerKind kind, const TextSource& source,
                                            const ByteRanges& ranges, int64_t vocab_size,
                                            const TextProgress& progress = nullptr);

// The same, kept in a file `path` that is made when it is missing or damaged, with a note then.
std::unique_ptr<Tokenizer> OpenTokenizer(TokenizerKind kind, const TextSource& source,
                                         const ByteRanges& ranges, int64_t vocab_size,
                                         const std::string& path, std::vector<std::string>* notes,
                                         const TextProgress& progress = nullptr);

struct TokenSplits {
  TokenFile train, valid, test;
  bool reused;                     // all three were there and current
  std::vector<std::string> notes;  // why existing files were rebuilt
};

// A split: ranges of a source, which outlives the call.
struct TextPart {
  const TextSource* source;
  ByteRanges ranges;
};

// train.tok, valid.tok and test.tok in `folder` (made if missing). Files whose source, tokenizer
// and ranges agree are used as they are (their checksum is verified up to 1 GiB); others, and
// broken ones, are rebuilt, with a note. A split may be empty: what is too short is the caller's to
// say.
TokenSplits OpenTokenSplits(const TextPart& train, const TextPart& valid, const TextPart& test,
                            const Tokenizer& tokenizer, const std::string& folder,
                            const TextProgress& progress = nullptr);
// The same for splits of one source.
TokenSplits OpenTokenSplits(const TextSource& source, const TextSplits& splits,
                            const Tokenizer& tokenizer, const std::string& folder,
                            const TextProgress& progress = nullptr);

}  // namespace cistern
