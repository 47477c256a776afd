#include "cistern/decode/text_output.h"

#include <algorithm>
#include <utility>

#include "cistern/base/error.h"

namespace cistern {

StopFilter::StopFilter(std::vector<std::string> stops) : stops_(std::move(stops)) {
  for (const std::string& stop : stops_) {
    if (stop.empty()) FailUsage("a stop string must not be empty");
  }
}

std::string StopFilter::Push(std::string_view bytes) {
  if (stopped_) return {};
  held_ += bytes;
  // The stop that ends first, and of those the longest: what a byte at a time would find.
  size_t end = std::string::npos, begin = 0;
  for (const std::string& stop : stops_) {
    const size_t at = held_.find(stop);
    if (at == std::string::npos) continue;
    if (at + stop.size() < end || (at + stop.size() == end && at < begin)) {
      begin = at;
      end = at + stop.size();
    }
  }
  size_t shown = held_.size();
  if (end != std::string::npos) {
    stopped_ = true;
    shown = begin;
  } else {
    for (const std::string& stop : stops_) {
      for (size_t n = std::min(stop.size() - 1, held_.size()); n > 0; --n) {
        if (std::string_view(held_).substr(held_.size() - n) ==
            std::string_view(stop).substr(0, n)) {
          shown = std::min(shown, held_.size() - n);
          break;
        }
      }
    }
  }
  std::string out = held_.substr(0, shown);
  held_.erase(0, shown);
  return out;
}

std::string StopFilter::Finish() { return stopped_ ? std::string() : std::exchange(held_, {}); }

std::string TextOutput::Finish() {
  std::string out = characters_.Push(filter_.Finish());
  return out += characters_.Finish();
}

}  // namespace cistern
