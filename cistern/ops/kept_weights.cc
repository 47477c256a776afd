#include "cistern/ops/kept_weights.h"

#include <unordered_map>

#include "cistern/base/error.h"

namespace cistern::ops {
namespace {

struct Kept {
  at::Tensor weight;  // held, so that its address means nothing else
  int64_t version;
  at::Tensor bfloat16;
};

struct Keeper {
  int64_t scopes = 0;
  std::unordered_map<const c10::TensorImpl*, Kept> kept;
};

Keeper& OfThisThread() {
  thread_local Keeper keeper;
  return keeper;
}

int64_t VersionOf(const at::Tensor& x) { return x.is_inference() ? 0 : x._version(); }

}  // namespace

KeptWeightsScope::KeptWeightsScope(bool on) : on_(on) { OfThisThread().scopes += on_; }

KeptWeightsScope::~KeptWeightsScope() {
  Keeper& keeper = OfThisThread();
  keeper.scopes -= on_;
  if (keeper.scopes == 0) keeper.kept.clear();
}

size_t KeptWeights() { return OfThisThread().kept.size(); }

bool KeepsWeights() { return OfThisThread().scopes > 0; }

at::Tensor KeptInBFloat16(const at::Tensor& weight) {
  Keeper& keeper = OfThisThread();
  CISTERN_CHECK(keeper.scopes > 0, "[kept weights] no scope keeps them");
  Kept& kept = keeper.kept[weight.unsafeGetTensorImpl()];
  const int64_t version = VersionOf(weight);
  if (!kept.bfloat16.defined() || kept.version != version)
    kept = {weight, version, weight.detach().to(at::kBFloat16).contiguous()};
  return kept.bfloat16;
}

}  // namespace cistern::ops
