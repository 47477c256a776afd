#include "cistern/io/line_reader.h"

#include "cistern/base/error.h"

namespace cistern {
namespace {

constexpr size_t kLongestLine = size_t{1} << 30;

}  // namespace

bool LineReader::Fill() {
  if (ended_) return false;
  buffer_.erase(0, begin_);
  begin_ = 0;
  CISTERN_CHECK(buffer_.size() <= kLongestLine, path(), ":", number_ + 1,
                ": a line of more than 1 GiB; is this a text file?");
  try {
    ended_ = !source_.Append(&buffer_);
  } catch (const Error& e) {
    Fail(e.what(), ", after line ", number_);
  }
  return true;
}

bool LineReader::Next(std::string* line) {
  size_t searched = begin_;
  for (;;) {
    const size_t end = buffer_.find('\n', searched);
    if (end != std::string::npos) {
      line->assign(buffer_, begin_, end - begin_);
      begin_ = end + 1;
      break;
    }
    searched = buffer_.size() - begin_;
    if (Fill()) continue;
    if (begin_ == buffer_.size()) return false;
    line->assign(buffer_, begin_, std::string::npos);
    begin_ = buffer_.size();
    break;
  }
  if (++number_ == 1) line->erase(0, line->size() - WithoutMark(*line).size());
  if (line->ends_with('\r')) line->pop_back();
  return true;
}

}  // namespace cistern
