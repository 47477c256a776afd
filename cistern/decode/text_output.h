#pragma once
// From tokens to text that may be shown: stop strings are cut out, whole characters only.
#include <string>
#include <string_view>
#include <vector>

#include "cistern/text/tokenizer.h"

namespace cistern {

// Passes bytes on until the first stop string ends, no matter where the pieces are cut. Bytes that
// may begin a stop string are held back.
class StopFilter {
 public:
  explicit StopFilter(std::vector<std::string> stops);  // an empty one is a UsageError
  std::string Push(std::string_view bytes);             // what may be shown now
  std::string Finish();                                 // what was held back, when no stop came
  bool stopped() const { return stopped_; }

 private:
  std::vector<std::string> stops_;
  std::string held_;
  bool stopped_ = false;
};

// StopFilter, then Utf8Stream.
class TextOutput {
 public:
  explicit TextOutput(std::vector<std::string> stops) : filter_(std::move(stops)) {}
  std::string Push(std::string_view bytes) { return characters_.Push(filter_.Push(bytes)); }
  std::string Finish();
  bool stopped() const { return filter_.stopped(); }

 private:
  StopFilter filter_;
  Utf8Stream characters_;
};

}  // namespace cistern
