// Counted one token at a time, against the formulas.
#include "cistern/attention/operations.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>

namespace cistern {
namespace {

TEST(Operations, PairsAsTheyAreSeen) {
  for (const int64_t tokens : {1, 2, 7, 20}) {
    for (const int64_t before : {0, 1, 5, 30}) {
      for (const int64_t window : {0, 1, 3, 8, 50}) {
        int64_t causal = 0, all = 0;
        for (int64_t t = 0; t < tokens; ++t) {
          for (int64_t s = -before; s <= t; ++s) causal += window == 0 || t - s < window;
          for (int64_t s = 0; s < tokens; ++s) all += window == 0 || std::abs(t - s) < window;
        }
        EXPECT_EQ(SeenPairs(Form::kCausal, tokens, before, window), double(causal))
            << tokens << " after " << before << ", window " << window;
        EXPECT_EQ(SeenPairs(Form::kBidirectional, tokens, 0, window), double(all))
            << tokens << ", window " << window;
      }
    }
  }
  EXPECT_EQ(SeenPairs(Form::kCross, 5, 0), 25);
}

LeastOperations Of(const std::string& name, const Json& options, Form form, int64_t tokens,
                   int64_t before = 0) {
  AttentionDims dims;
  dims.heads = 8, dims.dim = 8 * 64, dims.max_length = 4096;
  const auto m = FindMechanism(name).Make(options, dims);
  const auto* counts = dynamic_cast<const CountsOperations*>(m.get());
  return counts == nullptr ? LeastOperations{} : counts->Operations(form, tokens, before);
}

// n = d = 64, 8 heads: per token and head 8 d n and 28 d n (forward + backward) for ABC, 4 d n and
// 14 d n for Latte, 4 d^2 and 14 d^2 for linear attention.
TEST(Operations, RecurrencesOfThePapers) {
  const double unit = 8 * 64 * 64 * 100.0;
  const auto expect = [&](const std::string& name, const Json& options, double forward,
                          double both) {
    const LeastOperations got = Of(name, options, Form::kCausal, 100);
    EXPECT_DOUBLE_EQ(got.forward, forward * unit) << name;
    EXPECT_DOUBLE_EQ(got.forward + got.backward, both * unit) << name;
  };
  expect("abc_mlp", {{"slots", 64}}, 8, 28);
  expect("gated_slots", {{"slots", 64}}, 8, 28);
  expect("linformer", {{"slots", 64}}, 8, 28);
  expect("latte", {{"latents", 512}}, 4, 14);
  expect("efficient", Json::object(), 4, 14);
  expect("linear", Json::object(), 4, 14);
  expect("t2r", {{"features", 64}}, 4, 14);
  expect("rfa", {{"features", 32}}, 4, 14);
  expect("performer", {{"features", 64}}, 4, 14);
  // Two products of 64 with every key that is seen.
  EXPECT_DOUBLE_EQ(Of("softmax", Json::object(), Form::kCausal, 100).forward, 8 * 4 * 64 * 5050.0);
  EXPECT_DOUBLE_EQ(Of("softmax", Json::object(), Form::kBidirectional, 100).forward,
                   8 * 4 * 64 * 10000.0);
  EXPECT_DOUBLE_EQ(Of("softmax", Json::object(), Form::kCausal, 1, 99).forward, 8 * 4 * 64 * 100.0);
  EXPECT_DOUBLE_EQ(Of("window", {{"window", 1}}, Form::kCausal, 100).forward, 8 * 4 * 64 * 100.0);
}

// What derives from a mechanism and does other work does not inherit its count.
TEST(Operations, NothingIsSaidOfOthers) {
  for (const char* name : {"reuse", "perceiver", "dilated", "nystrom"})
    EXPECT_EQ(Of(name, Json::object(), Form::kBidirectional, 100).forward, 0) << name;
}

}  // namespace
}  // namespace cistern
