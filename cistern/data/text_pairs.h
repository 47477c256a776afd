#pragma once
// Pairs of texts and whether they belong together: AAN's TSV (Radev et al. 2013, as Long Range
// Arena distributes it; spec 3.3), read in place, or halves of documents, paired by a rule.
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "cistern/io/table_reader.h"

namespace cistern {

class TextPairs {
 public:
  virtual ~TextPairs() = default;
  virtual int64_t size() const = 0;
  virtual int Label(int64_t pair) const = 0;     // 0 or 1
  virtual int64_t Line(int64_t pair) const = 0;  // of the file, or the pair's number, from 1
  // The first `limit` bytes of both texts. Error where the file has changed since it was opened.
  // Safe from any thread.
  virtual void Read(int64_t pair, int64_t limit, std::string* first, std::string* second) const = 0;
  virtual uint64_t Hash() const = 0;    // XXH64 of what was read
  virtual int64_t skipped() const = 0;  // rows that could not be read
};

struct PairFileOptions {
  bool labelled = true;   // else the first column may be anything, and every label is 0
  bool skip_bad = false;  // rows that cannot be read are counted and passed over
};

// A file of lines with five columns between tabs: label (0 or 1, also as 1.0), two ids, two texts;
// no header, no quoting. One pass notes where the texts lie (48 bytes a row in memory); Read takes
// them from the file, so its size does not matter. Error "pairs.tsv:12: ..." where a line has
// another number of columns or another label; UsageError for a compressed file.
std::unique_ptr<TextPairs> OpenPairFile(const std::string& path, const PairFileOptions& options);

// new_aan_pairs.{train,eval,test}.tsv
bool IsAanFolder(const std::string& path);
std::string AanFile(const std::string& folder, const std::string& part);  // train, eval, test

// Documents, each cut in the middle: of both halves the first `limit` bytes.
struct Documents {
  std::string bytes;  // first and second half of each document, end to end
  std::vector<int64_t> offsets = {0};
  int64_t too_short = 0, repeated = 0;  // those that were left out
  int64_t skipped = 0;                  // rows of a table that could not be read
  std::vector<std::string> notes;       // of a folder: what in it was not read

  int64_t size() const { return int64_t(offsets.size() - 1) / 2; }
  std::string_view Half(int64_t document, int half) const {
    const auto i = size_t(2 * document + half);
    return std::string_view(bytes).substr(size_t(offsets[i]), size_t(offsets[i + 1] - offsets[i]));
  }
};

struct DocumentOptions {
  int64_t limit = 4000;
  int64_t least_bytes = 64;  // shorter ones are left out
  std::string column;        // of a table; empty: "text", or the only one
  TableOptions::Header header = TableOptions::Header::kAuto;
  bool skip_bad = false;
};

// The files of a folder, and of its folders, each a document; or the rows of a table (.jsonl, .tsv,
// .csv, also compressed). A document that occurred before is left out. Error where none is left.
Documents ReadDocuments(const std::string& path, const DocumentOptions& options);

// Two pairs of each document d_k of `chosen`, in the order of a shuffle by the seed: its first half
// with its own second half (1), and with the second half of d_{k+1}, the last with that of d_0 (0).
// So each half occurs once with each label: neither text alone says anything of it. At least two
// documents.
std::unique_ptr<TextPairs> HalvesOf(std::shared_ptr<const Documents> documents,
                                    std::vector<int64_t> chosen, uint64_t seed);

}  // namespace cistern
