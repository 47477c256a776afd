// Random batches by RapidCheck: shapes, padding, document starts, cuts and precision. The seed is
// printed; RC_PARAMS="seed=N max_success=N" repeats or extends a run, and a failure is shrunk to a
// small batch before it is shown.
#include <gtest/gtest.h>
#include <rapidcheck.h>

#include <algorithm>
#include <cstdlib>
#include <iostream>

#include "cistern/ops/testing.h"
#include "cistern/verify/properties.h"

namespace cistern::verify {
namespace {

const bool kFewByDefault = (::setenv("RC_PARAMS", "max_success=12", 0), true);

RandomCase AnyCase() {
  RandomCase c;
  c.batch = *rc::gen::inRange<int64_t>(1, 4);
  c.length = *rc::gen::inRange<int64_t>(1, 100);
  if (*rc::gen::arbitrary<bool>())
    c.lengths = *rc::gen::container<std::vector<int64_t>>(
        size_t(c.batch), rc::gen::inRange<int64_t>(0, c.length + 1));
  const auto token =
      rc::gen::pair(rc::gen::inRange<int64_t>(0, c.batch), rc::gen::inRange<int64_t>(0, c.length));
  c.starts = *rc::gen::container<std::vector<std::pair<int64_t, int64_t>>>(
      size_t(*rc::gen::inRange(0, 5)), token);
  c.cuts = *rc::gen::container<std::vector<int64_t>>(size_t(*rc::gen::inRange(0, 5)),
                                                     rc::gen::inRange<int64_t>(0, c.length + 1));
  c.cuts.push_back(0);
  c.cuts.push_back(c.length);
  std::sort(c.cuts.begin(), c.cuts.end());
  c.heads_last = *rc::gen::arbitrary<bool>();
  c.in_float = *rc::gen::arbitrary<bool>();
  c.seed = uint64_t(*rc::gen::inRange(0, 1 << 30));
  return c;
}

class Shapes : public ::testing::TestWithParam<const MechanismInfo*> {};

TEST_P(Shapes, AnyBatchIsItsDocumentsAlone) {
  const MechanismInfo& info = *GetParam();
  for (const Json& options : info.cases) {
    Subject subject(info, options, 1);
    for (const ops::Impl impl : {ops::Impl::kKernel, ops::Impl::kComposite}) {
      const ops::ImplScope scope(impl);
      const bool holds = rc::check(StrCat(subject.Name(), ", ", ops::ImplName(impl)), [&] {
        const RandomCase c = AnyCase();
        const Outcome outcome = CheckCase(subject, {}, c);
        RC_LOG() << Describe(c) << ": error " << outcome.error << ", tolerance "
                 << outcome.tolerance << ", at " << outcome.where << "\n";
        RC_ASSERT(!outcome.failed());
      });
      EXPECT_TRUE(holds) << subject.Name() << ", " << ops::ImplName(impl);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, Shapes, ::testing::ValuesIn(Mechanisms()),
                         [](const auto& row) { return row.param->name; });

}  // namespace
}  // namespace cistern::verify
