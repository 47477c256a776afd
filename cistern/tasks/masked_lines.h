#pragma once
// Lines of a file with gaps, written <mask>, for a model to fill in.
#include <cstdint>
#include <string>
#include <vector>

#include "cistern/io/line_reader.h"
#include "cistern/text/tokenizer.h"

namespace cistern {

struct MaskedLine {
  std::vector<std::vector<int32_t>> parts;  // tokens before, between and after the gaps
  int64_t number = 0;                       // of the line, from 1
};

class MaskedLines {
 public:
  MaskedLines(const std::string& path, const Tokenizer& tokenizer)
      : lines_(path), tokenizer_(tokenizer) {}
  // Up to `most` lines; none at the end. Empty lines are passed over; a line without <mask> is an
  // Error "gaps.txt:3: ...". A gap takes the space before it, as the tokens of BPE do.
  std::vector<MaskedLine> Next(int64_t most);
  int64_t bytes_total() const { return lines_.bytes_total(); }
  int64_t bytes_read() const { return lines_.bytes_read(); }

 private:
  LineReader lines_;
  const Tokenizer& tokenizer_;
};

}  // namespace cistern
