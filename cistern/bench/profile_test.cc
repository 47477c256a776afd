#include "cistern/bench/profile.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <map>
#include <string>

#include "cistern/ops/norm.h"

namespace cistern::bench {
namespace {

// Operations of torch and of ours, functions of autograd among them, by the names that they have
// in the code.
TEST(Profile, NamesOperations) {
  const at::Tensor x = at::randn({64, 32}).requires_grad_(), weight = at::ones({32});
  const Profile profile = ProfileWork([&] {
    const at::Tensor y = ops::AddNorm(x, x, {weight, {}, 1e-5}).norm;
    at::mm(y.t(), y).sum().backward();
  });
  std::map<std::string, int64_t> calls;
  double sum = profile.Outside();
  for (const OperationTime& o : profile.operations) calls[o.name] += o.calls, sum += o.milliseconds;
  EXPECT_EQ(calls["cistern::norm"], 1);
  EXPECT_EQ(calls["cistern::norm_backward"], 1);
  EXPECT_EQ(calls["aten::mm"], 3);
  EXPECT_NEAR(sum, profile.milliseconds, 1e-3 * profile.milliseconds);
  for (const auto& [name, count] : calls) {
    EXPECT_EQ(name.find("CppNode"), std::string::npos) << name;
    EXPECT_EQ(name.find("anonymous"), std::string::npos) << name;
  }
}

}  // namespace
}  // namespace cistern::bench
