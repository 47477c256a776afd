#include "cistern/verify/long_run.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <chrono>
#include <cmath>

#include "cistern/attention/head_groups.h"
#include "cistern/ops/impl.h"
#include "cistern/verify/outcome.h"
#include "cistern/verify/subject.h"

namespace cistern::verify {
namespace {

std::vector<int64_t> Checkpoints(int64_t tokens) {
  std::vector<int64_t> points;
  for (int64_t t = 1000; t < tokens; t *= 10) points.push_back(t);
  points.push_back(tokens);
  return points;
}

// The same sequence in both precisions.
class Pair {
 public:
  Pair(const MechanismInfo& info, const Json& options, const LongSettings& settings)
      : fast_(info, options, settings.seed, IsHeadGroups(info.name) ? 0 : 1, settings.tokens),
        plain_(fast_.Again()),
        fast_state_(fast_.In(at::kFloat).EmptyState(1, at::kFloat)),
        plain_state_(plain_.In(at::kDouble).EmptyState(1, at::kDouble)) {
    at::manual_seed(settings.seed);
    mean_ = at::randn({kHidden});
    for (const at::Tensor& like : fast_.Inputs(1, 0))
      maps_.push_back(at::randn({like.size(1), kHidden, like.size(3)}) / std::sqrt(kHidden));
  }

  // [1,H,count,w] each, projections of the same hidden numbers, as a layer makes them: what is
  // written goes with how it is weighted.
  Tensors Next(int64_t count) const {
    const at::Tensor hidden = at::randn({1, 1, count, kHidden}) + mean_;
    Tensors x;
    for (const at::Tensor& map : maps_) x.push_back(at::matmul(hidden, map));
    return x;
  }
  at::Tensor Fast(const Tensors& x) { return fast_.In(at::kFloat).Extend(x, fast_state_, {}); }
  at::Tensor FastCopy(const Tensors& x) {
    State copy = fast_state_.Clone();
    return fast_.In(at::kFloat).Extend(x, copy, {});
  }
  at::Tensor Plain(const Tensors& x) {
    const ops::ImplScope reference(ops::Impl::kReference);
    return plain_.In(at::kDouble).Extend(Cast(x, at::kDouble), plain_state_, {});
  }

 private:
  static constexpr int64_t kHidden = 8;
  Subject fast_, plain_;
  State fast_state_, plain_state_;
  at::Tensor mean_;  // [kHidden]
  Tensors maps_;     // [H,kHidden,w]
};

}  // namespace

bool LongResult::failed() const {
  return points.empty() || std::any_of(points.begin(), points.end(),
                                       [](const Point& p) { return !(p.error <= kLongTolerance); });
}

bool DecodesForEver(const MechanismInfo& info) {
  return info.bounded && info.verbs && info.Supports(Form::kCausal);
}

LongResult RunLong(const MechanismInfo& info, const Json& options, const LongSettings& settings,
                   const std::function<bool(int64_t)>& done) {
  at::NoGradGuard guard;
  const auto begin = std::chrono::steady_clock::now();
  LongResult result{info.name, options, {}, 0};
  Pair pair(info, options, settings);
  const int64_t block = std::max<int64_t>(settings.piece, 1024);  // tokens drawn at once
  int64_t t = 0;
  for (const int64_t point : Checkpoints(settings.tokens)) {
    const int64_t steps = std::min(settings.steps, point - t);
    while (t < point - steps) {
      const int64_t count = std::min(block, point - steps - t);
      const Tensors x = pair.Next(count);
      for (int64_t i = 0; i < count; i += settings.piece)
        pair.Fast(Narrow(x, i, std::min(settings.piece, count - i)));
      pair.Plain(x);
      t += count;
      if (done && !done(t)) return result;
    }
    const Tensors x = pair.Next(steps);
    const at::Tensor want = pair.Plain(x), piece = pair.FastCopy(x);
    Tensors single;
    for (int64_t i = 0; i < steps; ++i) single.push_back(pair.Fast(Narrow(x, i, 1)));
    t = point;
    result.points.push_back(
        {t, std::max(RelativeRms(piece, want), RelativeRms(at::cat(single, 2), want))});
  }
  result.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  return result;
}

}  // namespace cistern::verify
