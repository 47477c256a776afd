#pragma once
// Pairs of texts, a source and its target, from a user's own files: the rows of a table
// (io/table_reader.h), or the lines of two texts that correspond.
#include <memory>
#include <string>

#include "cistern/io/table_reader.h"

namespace cistern {

struct SentencePair {
  std::string source, target;
  int64_t line = 0;  // of the file, from 1
};

// Where pairs are. All but a table's columns of other names leave the last two empty.
struct PairFiles {
  std::string source;  // a table, or a text with a source on each line
  std::string target;  // empty: in the table; else a text with the target of each of these lines
  std::string source_column, target_column;  // of a table; empty: the first two
};

// A stream of pairs.
class PairSource {
 public:
  virtual ~PairSource() = default;
  virtual bool Next(SentencePair* pair) = 0;
  virtual int64_t skipped() const { return 0; }
  virtual int64_t done() const = 0;  // of total(), for progress
  virtual int64_t total() const = 0;
};

// With targets: UsageError where the files say of none. Without: sources alone, of a table's column
// or a text's lines. Errors name the file and the line; texts of different numbers of lines are
// one.
std::unique_ptr<PairSource> OpenPairs(const PairFiles& files, const TableOptions& options,
                                      bool targets);

}  // namespace cistern
