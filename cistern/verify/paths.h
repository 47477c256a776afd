#pragma once
// Fused paths: kernels that many mechanisms and models share, each checked as a path of its own.
// The definitions are plain loops in double and share nothing with what they are compared with.
#include "cistern/kernels/dropout.h"
#include "cistern/ops/exact_attention.h"
#include "cistern/ops/linear_attention.h"
#include "cistern/verify/suite.h"

namespace cistern::verify {

// What is checked; paths_test.cc puts wrong ones in their places.
struct Paths {
  std::function<at::Tensor(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                           double scale, const ops::SeenKeys& seen, const DropoutDraw& dropout)>
      exact;
  // Of few keys or few queries; the mask is of the keys.
  std::function<at::Tensor(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                           double scale, const ops::Mask& mask, const at::Tensor& key_valid)>
      slots;
  std::function<ops::SumResult(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                               const at::Tensor& memory, const LinearRule& rule,
                               const ops::Mask& mask)>
      linear;
  std::function<at::Tensor(const at::Tensor& x)> gelu;
  std::function<at::Tensor(const at::Tensor& hidden, const at::Tensor& weight,
                           const at::Tensor& bias, const at::Tensor& targets, double smoothing)>
      loss;
};
const Paths& OurPaths();

struct PathCheck {
  std::string path;      // exact_attention, attention_of_slots, and so on: PathNames()
  std::string property;  // the same names as those of mechanisms (suite.h)
  Outcome (*check)(const Paths& paths, const Settings& settings);
  Property::Scope scope = Property::Scope::kNumbers;
};
const std::vector<PathCheck>& PathChecks();
bool IsPath(const std::string& name);
std::vector<std::string> PathNames();

// Seeds torch, so that it can be repeated alone. An exception is a failure with its message.
Outcome RunPathCheck(const PathCheck& check, const Paths& paths, ops::Impl impl,
                     const Settings& settings);

// The checks of these paths that are of one of these properties; as RunSuite.
std::vector<Result> RunPaths(const std::vector<std::string>& paths,
                             const std::vector<const Property*>& properties,
                             const Settings& settings,
                             const std::function<bool(const Result&)>& done = nullptr);
int64_t CountPathChecks(const std::vector<std::string>& paths,
                        const std::vector<const Property*>& properties, const Settings& settings);

// path_attention.cc, path_slots.cc, path_linear.cc, path_rows.cc
std::vector<PathCheck> AttentionPathChecks();
std::vector<PathCheck> SlotPathChecks();
std::vector<PathCheck> LinearPathChecks();
std::vector<PathCheck> RowPathChecks();

}  // namespace cistern::verify
