#include "cistern/analyses/slot_stats.h"

#include <ATen/ATen.h>

#include <cmath>
#include <limits>
#include <numeric>
#include <vector>

namespace cistern {
namespace {

constexpr double kSameSlot = 0.95;
// Singular values of centred slots below this share of the raw ones are rounding.
constexpr double kNoVariety = 1e-6;

at::Tensor OfLengthOne(const at::Tensor& x) {
  const at::Tensor y = x.to(at::kDouble);
  return y / at::linalg_vector_norm(y, 2, {1}, true).clamp_min(1e-30);
}

double EffectiveRank(const at::Tensor& sigma) {
  const at::Tensor p = sigma / sigma.sum();
  return std::exp(-(p * p.clamp_min(1e-300).log()).sum().item<double>());
}

double Participation(const at::Tensor& sigma) {
  const at::Tensor s = sigma / sigma.max(), squares = s * s;
  const double sum = squares.sum().item<double>();
  return sum * sum / (squares * squares).sum().item<double>();
}

}  // namespace

SlotStats StatsOfSlots(const at::Tensor& memory) {
  const at::Tensor whole = memory.cpu().to(at::kDouble),
                   m = OfLengthOne(whole.index({at::linalg_vector_norm(whole, 2, {1}) != 0}));
  const int64_t slots = m.size(0);
  SlotStats stats;
  stats.empty = 1 - double(slots) / double(whole.size(0));
  if (slots < 2) {
    stats.rank = stats.participation = double(slots);
    stats.cosine = stats.centred_rank = stats.centred_participation = stats.unique =
        stats.rank_share = std::numeric_limits<double>::quiet_NaN();
    return stats;
  }
  const at::Tensor sigma = at::linalg_svdvals(m);
  const double total = sigma.sum().item<double>();
  stats.rank = EffectiveRank(sigma), stats.participation = Participation(sigma);
  stats.rank_share = stats.rank / double(slots);
  const at::Tensor centred = at::linalg_svdvals(m - m.mean(0, true));
  if (centred.sum().item<double>() > kNoVariety * total) {
    stats.centred_rank = EffectiveRank(centred);
    stats.centred_participation = Participation(centred);
  }
  const at::Tensor cosines = at::matmul(m, m.t()).contiguous();
  stats.cosine = MeanCosine(m);
  const auto cosine = cosines.accessor<double, 2>();
  std::vector<int64_t> parent(static_cast<size_t>(slots));
  std::iota(parent.begin(), parent.end(), int64_t{0});
  const auto root = [&](int64_t i) {
    while (parent[size_t(i)] != i) i = parent[size_t(i)] = parent[size_t(parent[size_t(i)])];
    return i;
  };
  int64_t clusters = slots;
  for (int64_t i = 0; i < slots; ++i) {
    for (int64_t j = 0; j < i; ++j) {
      if (cosine[i][j] <= kSameSlot || root(i) == root(j)) continue;
      parent[size_t(root(i))] = root(j);
      --clusters;
    }
  }
  stats.unique = double(clusters) / double(slots);
  return stats;
}

double MeanCosine(const at::Tensor& x) {
  const at::Tensor y = OfLengthOne(x), sum = y.sum(0);
  const double squares = (y * y).sum().item<double>(), n = std::round(squares);
  if (n < 2) return std::numeric_limits<double>::quiet_NaN();
  return ((sum * sum).sum().item<double>() - squares) / (n * (n - 1));
}

double MeanLikeness(const at::Tensor& p) {
  const auto m = double(p.size(0));
  if (m < 2) return std::numeric_limits<double>::quiet_NaN();
  const at::Tensor q = p.to(at::kDouble);
  return 1 - 0.5 * at::cdist(q, q, 1).sum().item<double>() / (m * (m - 1));
}

}  // namespace cistern
