#pragma once
// Tests of whether methods differ, over runs of several seeds (P000 App. A; spec 5), and what they
// are able to find at all.
#include <cstdint>
#include <vector>

namespace cistern {

// Upper tail of the chi-square distribution.
double ChiSquareTail(double x, double degrees);

// Values [blocks n][treatments k], or groups [k][values]: larger values get larger ranks, equal
// ones the mean of theirs (midranks).
using Samples = std::vector<std::vector<double>>;

struct TestResult {
  double statistic = 0;
  double p = 1;                        // by the chi-square approximation, k-1 degrees
  double exact = -1;                   // by all permutations; -1: too many
  double effect = 0;                   // Kendall's W; epsilon squared
  double floor = 1, exact_floor = -1;  // the least p that any data of this size can give
  // That these values can give in any order, by permutations; more than the floor for their ties.
  // -1: not counted.
  double own_floor = -1;
};

// chi2 = 12/(n k (k+1)) sum_j R_j^2 - 3 n (k+1), divided by 1 - sum (t^3 - t)/(n k (k^2-1)) for
// ties (Friedman 1937); exact: each block's ranks permuted by themselves, all (k!)^n equally
// likely, summed over distinct rank sums. W = chi2 / (n (k-1)). All ties: statistic 0, p 1. Error
// for fewer than 2 treatments or 1 block, blocks of different sizes, values that are not finite.
TestResult Friedman(const Samples& blocks);

// H = 12/(N(N+1)) sum_j R_j^2/n_j - 3(N+1), divided by 1 - sum (t^3 - t)/(N^3 - N) (Kruskal and
// Wallis 1952); exact: all ways to give the ranks to groups of these sizes. Effect: H/(N-1). Least
// p: both floors are of data without ties, or of these values where those give less.
TestResult KruskalWallis(const Samples& groups);

// Holm (1979): adj_i = max_{j <= i} min(1, (m-j+1) p_j) over sorted p; in the order given.
std::vector<double> Holm(const std::vector<double>& p);

// Cliff's delta: share of pairs with a > b minus that with a < b; in [-1,1].
double CliffDelta(const std::vector<double>& a, const std::vector<double>& b);

struct Interval {
  double low = 0, high = 0;
};
// Percentile bootstrap of the mean: `draws` samples with replacement, a function of the seed.
Interval BootstrapMean(const std::vector<double>& values, double level, int64_t draws,
                       uint64_t seed);

}  // namespace cistern
