#pragma once
// From logits to the next token. The draw depends on (seed, row, step) alone, so a prompt in a
// batch draws what it draws alone.
#include <cstdint>
#include <deque>
#include <span>
#include <vector>

namespace cistern {

struct SamplerOptions {
  double temperature = 0;  // 0: greedy, the likeliest token (of equals the lowest id)
  int64_t top_k = 0;       // draw among the k likeliest; 0: all
  double top_p = 1;        // draw among the fewest likeliest tokens that hold this much probability
                           // (after temperature and top_k)
  double repetition_penalty = 1;  // of tokens seen, positive logits are divided by it and negative
                                  // ones multiplied (Keskar et al. 2019)
  int64_t repetition_window = 0;  // the last N tokens count as seen; 0: all, the prompt included
  uint64_t seed = 1;

  void Validate() const;  // UsageError naming the option, its value and what is allowed
};

// Which tokens occurred among the last `window` (0: ever). Memory: the vocabulary and the window,
// however long the text.
class SeenTokens {
 public:
  SeenTokens(int64_t vocab_size, int64_t window) : counts_(size_t(vocab_size)), window_(window) {}
  void Push(int32_t token);
  bool Has(int64_t token) const { return counts_[size_t(token)] > 0; }

 private:
  std::vector<int64_t> counts_;
  std::deque<int32_t> recent_;
  int64_t window_;
};

struct TokenLogprob {
  int32_t token = 0;
  double logprob = 0;
};

// Log-probabilities are the model's own: before penalty, temperature and filters.
struct Choice {
  int32_t token = 0;
  double logprob = 0;
  std::vector<TokenLogprob> top;  // the likeliest, best first
};

class Sampler {
 public:
  explicit Sampler(const SamplerOptions& options);  // validates
  // `seen` may be null when there is no penalty. NaN, +infinity, or no finite logit at all: an
  // Error.
  Choice Choose(std::span<const double> logits, const SeenTokens* seen, int64_t row, int64_t step,
                int64_t top = 0) const;
  const SamplerOptions& options() const { return options_; }

 private:
  SamplerOptions options_;
};

}  // namespace cistern
