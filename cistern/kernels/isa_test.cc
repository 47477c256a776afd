#include "cistern/kernels/isa.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>

#include "cistern/base/error.h"
#include "cistern/kernels/dispatch.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cistern/kernels/isa_test.cc"
#include "hwy/foreach_target.h"

#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace cistern {
namespace HWY_NAMESPACE {
int64_t WhichTarget() { return HWY_TARGET; }
}  // namespace HWY_NAMESPACE
}  // namespace cistern
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace cistern {
namespace {

HWY_EXPORT(WhichTarget);

bool Has(const std::vector<std::string>& names, const std::string& name) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

// In a process of its own, before anything has been dispatched.
TEST(Isa, WhatIsForcedBeforeTheFirstDispatchStays) {
  EXPECT_EXIT(
      {
        ForceIsa("portable");
        CISTERN_DISPATCH(WhichTarget)();
        std::exit(ActiveIsa() == "portable" ? 0 : 1);
      },
      ::testing::ExitedWithCode(0), "");
}

// Nothing has been dispatched in this process yet, so the environment must be read on the way.
TEST(Isa, EnvironmentIsReadBeforeTheFirstDispatch) {
  setenv("CISTERN_ISA", "nonsense", 1);
  EXPECT_THROW(CISTERN_DISPATCH(WhichTarget)(), UsageError);
  setenv("CISTERN_ISA", "portable", 1);
  EXPECT_EQ(CISTERN_DISPATCH(WhichTarget)() & (HWY_SCALAR | HWY_EMU128),
            CISTERN_DISPATCH(WhichTarget)());
  EXPECT_EQ(ActiveIsa(), "portable");
  unsetenv("CISTERN_ISA");
  ForceIsa("");
  EXPECT_EQ(ActiveIsa(), SupportedIsas().front());
}

TEST(Isa, EveryForcedTargetRuns) {
  std::vector<std::pair<int64_t, bool>> seen;
  for (const std::string& isa : SupportedIsas()) {
    ForceIsa(isa);
    EXPECT_EQ(ActiveIsa(), isa);
    const std::pair target(CISTERN_DISPATCH(WhichTarget)(), UsesAmx());
    EXPECT_EQ(std::count(seen.begin(), seen.end(), target), 0) << isa;
    seen.push_back(target);
  }
  ForceIsa("");
  EXPECT_EQ(CISTERN_DISPATCH(WhichTarget)(), seen.front().first);
}

TEST(Isa, CompiledTargets) {
  EXPECT_EQ(CompiledIsas().back(), "portable");
#if HWY_ARCH_X86
  for (const char* isa : {"avx512_amx", "avx512", "avx2", "sse4"})
    EXPECT_TRUE(Has(CompiledIsas(), isa) || CISTERN_LEFT_OUT_TARGETS != 0) << isa;
#endif
  EXPECT_THROW(ForceIsa("avx3"), UsageError);
}

}  // namespace
}  // namespace cistern
#endif  // HWY_ONCE
