#pragma once
// How much variety a memory of slots has (P000 sec. 2 and App. C; spec 5, "memory degradation").
#include <ATen/core/Tensor.h>

namespace cistern {

// Of a memory [M,D] whose rows are its slots, each divided by its length; those of length 0 are
// empty and left out. `centred`: after the mean of these rows is taken away, which a common offset
// of all slots would otherwise hide. Where fewer than two are left there is nothing to compare:
// NaN, but for the ranks themselves.
struct SlotStats {
  double empty = 0;          // share of the M slots
  double cosine = 0;         // mean over pairs of slots; 1: all slots point the same way
  double rank = 0;           // effective rank e^H(sigma / sum sigma), 1 .. min(M, D)
  double participation = 0;  // (sum sigma^2)^2 / sum sigma^4, likewise
  double centred_rank = 0, centred_participation = 0;  // 0: all slots are the same
  // Clusters of slots joined by a cosine above 0.95 (single linkage), and rank, divided by the
  // slots that are not empty.
  double unique = 0, rank_share = 0;
};

// O(M^2 D + M^2 min(M, D)).
SlotStats StatsOfSlots(const at::Tensor& memory);

// Mean cosine over pairs of rows of x [n,D] that are not of length 0, in O(n D); NaN for fewer than
// two.
double MeanCosine(const at::Tensor& x);

// Mean over pairs of rows of P [M,S], which are probabilities, of 1 - total variation; NaN for
// M < 2.
double MeanLikeness(const at::Tensor& p);

}  // namespace cistern
