#include "cistern/ops/draws.h"

#include <ATen/ATen.h>

#include "cistern/base/random.h"

namespace cistern::ops {
namespace {

constexpr uint64_t kBelow = uint64_t{1} << 62;
thread_local DrawScope* innermost = nullptr;

}  // namespace

DrawScope::DrawScope(uint64_t seed, int64_t first_row)
    : seed_(seed), first_row_(first_row), outer_(innermost) {
  innermost = this;
}

DrawScope::~DrawScope() { innermost = outer_; }

Draw Draw::Next() {
  if (innermost == nullptr)
    return {uint64_t(at::randint(int64_t(kBelow), {}, at::kLong).item<int64_t>()), 0};
  const auto words = Philox(innermost->seed_, 0, innermost->count_++);
  return {(uint64_t{words[0]} << 32 | words[1]) % kBelow, innermost->first_row_};
}

DropoutDraw DrawDropout(double rate) {
  if (rate <= 0) return {};
  const Draw draw = Draw::Next();
  return {rate, draw.seed, draw.first_row};
}

}  // namespace cistern::ops
