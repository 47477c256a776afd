#include "cistern/decode/sampler.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "cistern/base/error.h"
#include "cistern/base/random.h"

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
  double max = -std::numeric_limits<double>::infinity();
  for (size_t i = 0; i < logits.size(); ++i) {
    if (std::isnan(logits[i]) || logits[i] == std::numeric_limits<double>::infinity()) {
      Fail("[sampler] the logit of token ", i, " is ", logits[i], " at step ", step,
           "; the model's weights or state are broken");
    }
    max = std::max(max, logits[i]);
  }
  CISTERN_CHECK(std::isfinite(max), "[sampler] no logit of ", logits.size(), " is finite at step ",
                step);
  double sum = 0;
  for (const double x : logits) sum += std::exp(x - max);
  return max + std::log(sum);
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
  const double best = *std::max_element(scores.begin(), scores.end());
  if (options_.temperature == 0) {
    choice.token = int32_t(std::max_element(scores.begin(), scores.end()) - scores.begin());
  } else {
    // Candidates in a fixed order with their unnormalised probabilities; one uniform number walks
    // along them.
    const bool filtered = options_.top_p < 1 || (options_.top_k > 0 && options_.top_k < vocab);
    int64_t count = options_.top_k > 0 ? std::min(options_.top_k, vocab) : vocab;
    std::vector<int32_t> ids;
    if (filtered) {
      ids = Likeliest(scores, count);
    } else {
      ids.resize(size_t(vocab));
      std::iota(ids.begin(), ids.end(), 0);
    }
    std::vector<double> weights(static_cast<size_t>(count));
    double sum = 0;
    for (int64_t i = 0; i < count; ++i)
      sum += weights[size_t(i)] =
          std::exp((scores[size_t(ids[size_t(i)])] - best) / options_.temperature);
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
    choice.token = ids[size_t(chosen)];
  }
  choice.logprob = logits[size_t(choice.token)] - total;
  return choice;
}

}  // namespace cistern
