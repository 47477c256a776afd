#include "cistern/verify/paths.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <chrono>

#include "cistern/nn/head_loss.h"
#include "cistern/ops/gelu.h"
#include "cistern/ops/softmax_attention.h"
#include "cistern/tensors/torch_error.h"

namespace cistern::verify {

const Paths& OurPaths() {
  static const Paths paths = {ops::ExactAttention,
                              [](const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                 double scale, const ops::Mask& mask, const at::Tensor& key_valid) {
                                ops::SoftmaxOptions options;
                                options.scale = scale;
                                return ops::SoftmaxAttention(q, k, v, options, mask, key_valid);
                              },
                              ops::LinearAttention, ops::Gelu, HeadLoss};
  return paths;
}

const std::vector<PathCheck>& PathChecks() {
  static const std::vector<PathCheck> all = [] {
    std::vector<PathCheck> checks = AttentionPathChecks();
    for (const auto& more : {SlotPathChecks(), LinearPathChecks(), RowPathChecks()})
      checks.insert(checks.end(), more.begin(), more.end());
    return checks;
  }();
  return all;
}

std::vector<std::string> PathNames() {
  std::vector<std::string> names;
  for (const PathCheck& c : PathChecks()) {
    if (names.empty() || names.back() != c.path) names.push_back(c.path);
  }
  return names;
}

bool IsPath(const std::string& name) {
  const std::vector<std::string> names = PathNames();
  return std::find(names.begin(), names.end(), name) != names.end();
}

Outcome RunPathCheck(const PathCheck& check, const Paths& paths, ops::Impl impl,
                     const Settings& settings) {
  const ops::ImplScope scope(impl);
  at::manual_seed(settings.seed);
  try {
    return check.check(paths, settings);
  } catch (const std::exception& e) {
    Outcome outcome;
    outcome.kind = Outcome::Kind::kFail;
    outcome.reason = FirstLine(e);
    return outcome;
  }
}

namespace {

// visit(check, implementation) -> whether to go on.
template <class Visit>
void EachCheck(const std::vector<std::string>& paths,
               const std::vector<const Property*>& properties, const Settings& settings,
               Visit&& visit) {
  for (const PathCheck& check : PathChecks()) {
    const bool wanted = std::find(paths.begin(), paths.end(), check.path) != paths.end() &&
                        std::any_of(properties.begin(), properties.end(),
                                    [&](const Property* p) { return p->name == check.property; });
    if (!wanted) continue;
    for (const ops::Impl impl : settings.implementations) {
      if (impl != ops::Impl::kKernel && check.scope == Property::Scope::kMachine) continue;
      if (!visit(check, impl)) return;
    }
  }
}

}  // namespace

std::vector<Result> RunPaths(const std::vector<std::string>& paths,
                             const std::vector<const Property*>& properties,
                             const Settings& settings,
                             const std::function<bool(const Result&)>& done) {
  std::vector<Result> results;
  EachCheck(paths, properties, settings, [&](const PathCheck& check, ops::Impl impl) {
    const auto begin = std::chrono::steady_clock::now();
    Result result{check.path, Json::object(), check.property, impl,
                  RunPathCheck(check, OurPaths(), impl, settings)};
    result.seconds =
        std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    results.push_back(std::move(result));
    return !done || done(results.back());
  });
  return results;
}

int64_t CountPathChecks(const std::vector<std::string>& paths,
                        const std::vector<const Property*>& properties, const Settings& settings) {
  int64_t count = 0;
  EachCheck(paths, properties, settings, [&](const PathCheck&, ops::Impl) { return ++count > 0; });
  return count;
}

}  // namespace cistern::verify
