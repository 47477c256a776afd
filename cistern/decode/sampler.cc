#include "cistern/decode/sampler.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "cistern/base/error.h"
#include "cistern/base/random.h"
#include "cistern/kernels/exp_sum.h"

namespace cistern {
namespace {

// Ids ordered by score, best first; equal scores by id. Only the first `count` are in order.
std::vector<int32_t> Likeliest(std::span<const double> scores, int64_t count) {
  std::vector<int32_t> ids(scores.size());
  std::iota(ids.begin(), ids.end(), 0);
  const auto better = [&](int32_t a, int32_t b) {
    return scores[size_t(a)] != scores[size_t(b)] ? scores[size_t(a)] > scores[size_t(b)] : a < b;
  };
  std::partial_sort(ids.begin(), ids.begin() + std::min<int64_t>(count, int64_t(ids.size())),
                    ids.end(), better);
  return ids;
}

// log(sum(exp(logits))), after the checks.
double LogSumExp(std::span<const double> logits, int64_t step) {
  const auto count = int64_t(logits.size());
  const double max = Largest(count, logits.data());
  if (std::isnan(max) || max == std::numeric_limits<double>::infinity()) {
    const auto broken = std::find_if(logits.begin(), logits.end(), [](double x) {
      return std::isnan(x) || x == std::numeric_limits<double>::infinity();
    });
    Fail("[sampler] the logit of token ", broken - logits.begin(), " is ", *broken, " at step ",
         step, "; the model's weights or state are broken");
  }
  CISTERN_CHECK(std::isfinite(max), "[sampler] no logit of ", logits.size(), " is finite at step ",
                step);
  return max + std::log(ExpSum(count, logits.data(), max, 1, nullptr));
}

}  // namespace

void SamplerOptions::Validate() const {
  if (!(temperature >= 0 && std::isfinite(temperature)))
    FailUsage("temperature must be 0 (greedy) or above, got ", temperature);
  if (top_k < 0) FailUsage("top-k must be 0 (all tokens) or above, got ", top_k);
  if (!(top_p > 0 && top_p <= 1)) FailUsage("top-p must be above 0 and at most 1, got ", top_p);
  if (!(repetition_penalty > 0 && std::isfinite(repetition_penalty))) {
    FailUsage("repetition-penalty must be above 0 (1: none), got ", repetition_penalty);
  }
  if (repetition_window < 0)
    FailUsage("repetition-window must be 0 (all tokens) or above, got ", repetition_window);
}

void SeenTokens::Push(int32_t token) {
  ++counts_.at(size_t(token));
  if (window_ == 0) return;
  recent_.push_back(token);
  if (int64_t(recent_.size()) > window_) {
    --counts_[size_t(recent_.front())];
    recent_.pop_front();
  }
}

Sampler::Sampler(const SamplerOptions& options) : options_(options) { options_.Validate(); }

Choice Sampler::Choose(std::span<const double> logits, const SeenTokens* seen, int64_t row,
                       int64_t step, int64_t top) const {
  const double total = LogSumExp(logits, step);
  const int64_t vocab = int64_t(logits.size());
  Choice choice;
  if (top > 0) {
    const std::vector<int32_t> ids = Likeliest(logits, top);
    for (int64_t i = 0; i < std::min(top, vocab); ++i)
      choice.top.push_back({ids[size_t(i)], logits[size_t(ids[size_t(i)])] - total});
  }

  std::vector<double> scores(logits.begin(), logits.end());
  if (seen && options_.repetition_penalty != 1) {
    for (int64_t i = 0; i < vocab; ++i) {
      double& x = scores[size_t(i)];
      if (seen->Has(i))
        x = x > 0 ? x / options_.repetition_penalty : x * options_.repetition_penalty;
    }
  }
  const double best = Largest(vocab, scores.data());
  if (!std::isfinite(best)) {
    FailUsage("repetition-penalty=", options_.repetition_penalty,
              " takes a score beyond the range of numbers; take one nearer to 1");
  }
  if (options_.temperature == 0) {
    choice.token = int32_t(std::find(scores.begin(), scores.end(), best) - scores.begin());
  } else {
    // Candidates in a fixed order with their unnormalised probabilities; one uniform number walks
    // along them.
    const bool filtered = options_.top_p < 1 || (options_.top_k > 0 && options_.top_k < vocab);
    int64_t count = options_.top_k > 0 ? std::min(options_.top_k, vocab) : vocab;
    std::vector<int32_t> ids;  // none: all, in their order
    std::vector<double> weights = scores;
    if (filtered) {
      ids = Likeliest(scores, count);
      weights.resize(size_t(count));
      for (size_t i = 0; i < weights.size(); ++i) weights[i] = scores[size_t(ids[i])];
    }
    double sum = ExpSum(count, weights.data(), best, options_.temperature, weights.data());
    if (options_.top_p < 1) {
      double kept = 0;
      int64_t n = 0;
      while (n < count && kept < options_.top_p * sum) kept += weights[size_t(n++)];
      count = n;
      sum = kept;
    }
    Random random(options_.seed, uint64_t(row));
    random.set_position(2 * uint64_t(step));
    double left = random.Uniform() * sum;
    int64_t chosen = -1;
    for (int64_t i = 0; i < count && left >= 0;
         ++i) {  // rounding may leave a crumb: then the last possible token
      if (weights[size_t(i)] > 0) chosen = i;
      left -= weights[size_t(i)];
    }
    choice.token = filtered ? ids[size_t(chosen)] : int32_t(chosen);
  }
  choice.logprob = logits[size_t(choice.token)] - total;
  return choice;
}

}  // namespace cistern
