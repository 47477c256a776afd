#pragma once
// A core that is linear in its values, given everything else, is run with slices of the identity in
// their place: what it gives, or keeps in its state, are then weights. One copy of a row gives d of
// them.
#include <vector>

#include "cistern/analyses/captured_layers.h"

namespace cistern {

// `count` copies of a row, which share memory.
at::Tensor Copies(const at::Tensor& x, int64_t count);
std::vector<at::Tensor> Copies(const std::vector<at::Tensor>& x, int64_t count);
ops::Mask Copies(const ops::Mask& mask, int64_t count);
Handles Copies(const Handles& handles, int64_t count);

// The places of the values among the projections of the tokens, or among those of what was packed,
// which are counted by themselves.
std::vector<size_t> ValuesOf(const Mechanism& m, bool packed);

// A mechanism whose keys are also its values (tie_kv), untied; null: the layer's core has values of
// its own. UsageError where it has no values at all.
std::shared_ptr<Mechanism> UntiedCore(const CapturedLayer& layer);
// Tensors in the order of `tied` as tensors in the order of `untied`, which has more projections of
// a side: the last of the side stands for those that are missing.
std::vector<at::Tensor> Untied(const Mechanism& tied, const Mechanism& untied,
                               const std::vector<at::Tensor>& x, bool packed);

// For values like `like` [1,H,S,d]: [ceil(count/d),H,S,d] where channel c of copy i holds 1 at
// source begin + i d + c, and 0 elsewhere.
at::Tensor IdentityValues(const at::Tensor& like, int64_t begin, int64_t count);
// What such values became, [copies,H,T,d], as [H,T,count].
at::Tensor AsColumns(const at::Tensor& y, int64_t count);

// |got - want| / |want| by the Frobenius norm; the norm of the difference where want is zero.
double RelativeError(const at::Tensor& got, const at::Tensor& want);

}  // namespace cistern
