#include "cistern/decode/decode_threads.h"

#include <algorithm>

#include "cistern/base/parallel.h"

namespace cistern {
namespace {

constexpr size_t kBlockTokens = 8;
constexpr double kBlockSeconds = 0.02;  // looking takes some 0.1 ms
constexpr size_t kProbeTokens = 3;

}  // namespace

void ThreadChoice::Took(double seconds, double share) {
  const auto change = [this](int threads, bool again) {
    threads_ = threads, blocks_ = 0;
    patience_ = again ? std::min(kMostPatience, 2 * patience_) : patience_;
  };
  const bool probe = probing();
  ++blocks_;
  if (threads_ == 1) {
    of_one_ = seconds;
    const bool slower = of_one_ > of_all_;
    if (slower || blocks_ >= patience_) change(all_, slower);
    return;
  }
  of_all_ = seconds;
  if (probe && of_all_ > of_one_) return change(1, true);
  if (share >= kBusyShare) {
    patience_ = kPatience;
  } else if (of_one_ == 0 || blocks_ >= patience_) {
    change(1, false);
  }
}

DecodeThreads::DecodeThreads(int64_t rows)
    : before_(NumThreads()), chooses_(before_ > 1 && rows <= kRows), choice_(before_) {}

DecodeThreads::~DecodeThreads() {
  if (NumThreads() != before_) SetNumThreads(before_);
}

void DecodeThreads::Token(double seconds) {
  if (!chooses_) return;
  of_one_ += choice_.threads() == 1 ? 1 : 0;
  block_.push_back(seconds);
  block_seconds_ += seconds;
  if (block_.size() < (choice_.probing() ? kProbeTokens : kBlockTokens) ||
      block_seconds_ < kBlockSeconds)
    return;
  const auto middle = block_.begin() + std::ptrdiff_t(block_.size() / 2);
  std::nth_element(block_.begin(), middle, block_.end());
  choice_.Took(*middle, share_.Value());
  if (choice_.threads() != NumThreads()) SetNumThreads(choice_.threads());
  block_.clear();
  block_seconds_ = 0;
  share_ = CpuShare();
}

}  // namespace cistern
