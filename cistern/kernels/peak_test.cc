#include "cistern/kernels/peak.h"

#include <gtest/gtest.h>

#include "cistern/base/parallel.h"
#include "cistern/kernels/isa.h"

namespace cistern {
namespace {

// No more than that every target measures a rate of this world: speeds are not asserted.
TEST(Peak, EveryTargetHasOne) {
  SetNumThreads(1);
  for (const std::string& isa : SupportedIsas()) {
    ForceIsa(isa);
    const double narrow = MultiplyAddPeak<float>(0.01), wide = MultiplyAddPeak<double>(0.01);
    EXPECT_GT(narrow, 0.05) << isa;
    EXPECT_LT(narrow, 1000) << isa;
    EXPECT_GT(wide, 0.05) << isa;
    EXPECT_LT(wide, 1000) << isa;
  }
  ForceIsa("");
}

TEST(Peak, BandwidthIsOfThisWorld) {
  const double rate = TriadBandwidth(1 << 20, 0.01);
  EXPECT_GT(rate, 0.05);
  EXPECT_LT(rate, 5000);
}

}  // namespace
}  // namespace cistern
