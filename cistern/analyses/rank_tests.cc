#include "cistern/analyses/rank_tests.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/special_gammaincc.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <numeric>

#include "cistern/base/error.h"
#include "cistern/base/random.h"

namespace cistern {
namespace {

// Of the exact distributions, some seconds at most.
constexpr size_t kMostStates = 1'000'000;
constexpr double kMostSteps = 6e6;  // states times orders of a block
constexpr double kSlack = 1e-9;     // statistics that differ by rounding are equal

// Midranks, doubled so that they are whole; and sum of t^3 - t over groups of equal values.
std::vector<int64_t> DoubledRanks(const std::vector<double>& values, double* ties) {
  std::vector<size_t> order(values.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::sort(order.begin(), order.end(), [&](size_t a, size_t b) { return values[a] < values[b]; });
  std::vector<int64_t> ranks(values.size());
  for (size_t i = 0; i < order.size();) {
    size_t end = i;
    while (end < order.size() && values[order[end]] == values[order[i]]) ++end;
    for (size_t j = i; j < end; ++j) ranks[order[j]] = int64_t(i + 1 + end);
    const auto t = double(end - i);
    *ties += t * t * t - t;
    i = end;
  }
  return ranks;
}

void CheckFinite(const Samples& values) {
  for (const auto& row : values) {
    for (const double x : row)
      CISTERN_CHECK(std::isfinite(x), "[statistics] a value is not a finite number");
  }
}

// States and in how many ways they are reached.
using States = std::map<std::vector<int64_t>, double>;

// The share of states whose `statistic` is at least `observed`.
template <class F>
double TailOf(const States& states, double observed, F&& statistic) {
  double all = 0, tail = 0;
  for (const auto& entry : states) {
    all += entry.second;
    if (statistic(entry.first) >= observed * (1 - kSlack) - kSlack) tail += entry.second;
  }
  return tail / all;
}

double Factorial(double n) { return std::tgamma(n + 1); }

// Distinct orders of sorted values.
double OrdersOf(const std::vector<int64_t>& sorted) {
  double log = std::lgamma(double(sorted.size()) + 1);  // of 171 and more, n! is infinite
  for (auto begin = sorted.begin(); begin != sorted.end();) {
    const auto end = std::upper_bound(begin, sorted.end(), *begin);
    log -= std::lgamma(double(end - begin) + 1);
    begin = end;
  }
  return std::exp(log);
}

}  // namespace

double ChiSquareTail(double x, double degrees) {
  if (x <= 0) return 1;
  const auto number = [](double value) { return at::scalar_tensor(value, at::kDouble); };
  return at::special_gammaincc(number(degrees / 2), number(x / 2)).item<double>();
}

TestResult Friedman(const Samples& blocks) {
  const size_t n = blocks.size(), k = n > 0 ? blocks[0].size() : 0;
  CISTERN_CHECK(n >= 1 && k >= 2, "[statistics] Friedman's test needs a block and two treatments");
  CheckFinite(blocks);
  double ties = 0;
  std::vector<std::vector<int64_t>> ranks;
  std::vector<int64_t> sums(k, 0);
  for (const auto& block : blocks) {
    CISTERN_CHECK(block.size() == k, "[statistics] a block has ", block.size(),
                  " values, the first one ", k);
    ranks.push_back(DoubledRanks(block, &ties));
    for (size_t j = 0; j < k; ++j) sums[j] += ranks.back()[j];
  }
  const auto dn = double(n), dk = double(k);
  const double scale = 1 - ties / (dn * dk * (dk * dk - 1));
  const auto statistic = [&](const std::vector<int64_t>& doubled) {
    double squares = 0;
    for (const int64_t r : doubled) squares += double(r) * double(r) / 4;
    return std::max(0.0, (12 / (dn * dk * (dk + 1)) * squares - 3 * dn * (dk + 1)) / scale);
  };
  TestResult out;
  out.floor = ChiSquareTail(dn * (dk - 1), dk - 1);
  out.exact_floor = std::pow(Factorial(dk), 1 - dn);
  if (scale < kSlack) {  // every block is one tie
    out.exact = 1;
    return out;
  }
  out.statistic = statistic(sums);
  out.p = ChiSquareTail(out.statistic, dk - 1);
  out.effect = out.statistic / (dn * (dk - 1));
  // All distinct orders of a block are equally likely, so that it makes no difference which
  // treatment has which sum of ranks: a state is the sums, sorted, and the first block has one
  // order.
  for (auto& block : ranks) std::sort(block.begin(), block.end());
  States states = {{ranks[0], 1}};
  double steps = 0;
  for (size_t i = 1; i < n; ++i) {
    std::vector<int64_t>& block = ranks[i];
    steps += double(states.size()) * OrdersOf(block);
    if (steps > kMostSteps) return out;
    States next;
    do {
      for (const auto& entry : states) {
        std::vector<int64_t> sum = entry.first;
        for (size_t j = 0; j < k; ++j) sum[j] += block[j];
        std::sort(sum.begin(), sum.end());
        next[sum] += entry.second;
      }
    } while (std::next_permutation(block.begin(), block.end()));
    states = std::move(next);
  }
  out.exact = TailOf(states, out.statistic, statistic);
  return out;
}

TestResult KruskalWallis(const Samples& groups) {
  const size_t k = groups.size();
  CISTERN_CHECK(k >= 2, "[statistics] Kruskal and Wallis' test needs two groups");
  CheckFinite(groups);
  std::vector<double> all;
  for (const auto& group : groups) {
    CISTERN_CHECK(!group.empty(), "[statistics] a group has no values");
    all.insert(all.end(), group.begin(), group.end());
  }
  const auto total = double(all.size());
  double ties = 0;
  const std::vector<int64_t> ranks = DoubledRanks(all, &ties);
  const double scale = 1 - ties / (total * total * total - total);
  const auto statistic = [&](const std::vector<int64_t>& doubled) {
    double sum = 0;
    for (size_t j = 0; j < k; ++j)
      sum += double(doubled[j]) * double(doubled[j]) / 4 / double(groups[j].size());
    return std::max(0.0, (12 / (total * (total + 1)) * sum - 3 * (total + 1)) / scale);
  };
  TestResult out;
  // The largest H without ties: groups that do not overlap, in any order. Of the ranks' sum of
  // squares, (N^3 - N)/12, ranks in a row leave each group the least within it, (n^3 - n)/12.
  double within = 0, orders = std::lgamma(double(k) + 1) - std::lgamma(total + 1);
  for (const auto& group : groups) {
    const auto n = double(group.size());
    within += n * n * n - n;
    orders += std::lgamma(n + 1);
  }
  out.floor =
      ChiSquareTail((total - 1) * (1 - within / (total * total * total - total)), double(k) - 1);
  out.exact_floor = std::exp(orders);  // k! of N! / (n_1! ... n_k!) ways
  if (scale < kSlack) {                // all values are equal
    out.exact = out.own_floor = 1;
    return out;
  }
  std::vector<int64_t> sums(k, 0);
  size_t at = 0;
  for (size_t j = 0; j < k; ++j) {
    for (size_t i = 0; i < groups[j].size(); ++i) sums[j] += ranks[at++];
  }
  out.statistic = statistic(sums);
  out.p = ChiSquareTail(out.statistic, double(k) - 1);
  out.floor = std::min(out.floor, out.p);  // with ties H may be larger
  out.effect = out.statistic / (total - 1);
  // State: how many values each group has, then its sum of doubled ranks.
  States states = {{std::vector<int64_t>(2 * k, 0), 1}};
  for (const int64_t rank : ranks) {
    States next;
    for (const auto& entry : states) {
      for (size_t j = 0; j < k; ++j) {
        if (entry.first[j] == int64_t(groups[j].size())) continue;
        std::vector<int64_t> state = entry.first;
        ++state[j];
        state[k + j] += rank;
        next[state] += entry.second;
      }
      if (next.size() > kMostStates) return out;
    }
    states = std::move(next);
  }
  const auto of_state = [&](const std::vector<int64_t>& state) {
    return statistic({state.begin() + int64_t(k), state.end()});
  };
  out.exact = TailOf(states, out.statistic, of_state);
  double largest = 0;
  for (const auto& entry : states) largest = std::max(largest, of_state(entry.first));
  out.own_floor = TailOf(states, largest, of_state);
  out.exact_floor = std::min(out.exact_floor, out.own_floor);
  return out;
}

std::vector<double> Holm(const std::vector<double>& p) {
  std::vector<size_t> order(p.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::sort(order.begin(), order.end(), [&](size_t a, size_t b) { return p[a] < p[b]; });
  std::vector<double> out(p.size());
  double last = 0;
  for (size_t i = 0; i < order.size(); ++i) {
    last = std::max(last, std::min(1.0, double(p.size() - i) * p[order[i]]));
    out[order[i]] = last;
  }
  return out;
}

double CliffDelta(const std::vector<double>& a, const std::vector<double>& b) {
  CISTERN_CHECK(!a.empty() && !b.empty(), "[statistics] a group has no values");
  int64_t balance = 0;
  for (const double x : a) {
    for (const double y : b) balance += (x > y ? 1 : 0) - (x < y ? 1 : 0);
  }
  return double(balance) / (double(a.size()) * double(b.size()));
}

Interval BootstrapMean(const std::vector<double>& values, double level, int64_t draws,
                       uint64_t seed) {
  CISTERN_CHECK(!values.empty() && draws > 0 && level > 0 && level < 1,
                "[statistics] a bootstrap needs values, draws and a level between 0 and 1");
  constexpr uint64_t kStream = 0xb007;
  std::vector<double> means;
  Random random(seed, kStream);
  for (int64_t d = 0; d < draws; ++d) {
    double sum = 0;
    for (size_t i = 0; i < values.size(); ++i)
      sum += values[size_t(random.Below(int64_t(values.size())))];
    means.push_back(sum / double(values.size()));
  }
  std::sort(means.begin(), means.end());
  const auto at = [&](double share) {
    const double place = share * double(draws - 1);
    const auto below = size_t(place);
    const double part = place - double(below);
    return below + 1 < means.size() ? means[below] * (1 - part) + means[below + 1] * part
                                    : means[below];
  };
  return {at((1 - level) / 2), at((1 + level) / 2)};
}

}  // namespace cistern
