#include "cistern/decode/sampler.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "cistern/io/test_folder.h"

namespace cistern {
namespace {

const std::vector<double> kLogits = {std::log(0.5), std::log(0.25), std::log(0.15), std::log(0.1)};

std::vector<double> Shares(const SamplerOptions& options, int64_t draws = 20000) {
  const Sampler sampler(options);
  std::vector<double> shares(kLogits.size());
  for (int64_t i = 0; i < draws; ++i)
    shares[size_t(sampler.Choose(kLogits, nullptr, 3, i).token)] += 1.0 / double(draws);
  return shares;
}

TEST(Sampler, DrawsByProbability) {
  const auto plain = Shares({.temperature = 1});
  for (size_t i = 0; i < 4; ++i) EXPECT_NEAR(plain[i], std::exp(kLogits[i]), 0.012);
  const auto cold = Shares({.temperature = 0.5});  // squares: 0.25, 0.0625, 0.0225, 0.01 of 0.345
  EXPECT_NEAR(cold[0], 0.25 / 0.345, 0.012);
  EXPECT_NEAR(cold[3], 0.01 / 0.345, 0.006);
}

TEST(Sampler, FiltersKeepTheLikeliest) {
  const auto k = Shares({.temperature = 1, .top_k = 2});
  EXPECT_NEAR(k[0], 2.0 / 3, 0.012);
  EXPECT_EQ(k[2] + k[3], 0);
  const auto p =
      Shares({.temperature = 1, .top_p = 0.8});  // 0.5 + 0.25 are not enough, the third crosses
  EXPECT_NEAR(p[2], 0.15 / 0.9, 0.012);
  EXPECT_EQ(p[3], 0);
  EXPECT_EQ(Shares({.temperature = 1, .top_p = 1e-9})[0],
            Shares({.temperature = 1, .top_k = 1})[0]);
  EXPECT_EQ(Shares({.temperature = 1e-300})[0], Shares({.temperature = 0})[0]);
}

TEST(Sampler, DependsOnSeedRowAndStepAlone) {
  const Sampler a({.temperature = 1, .seed = 7}), b({.temperature = 1, .seed = 7}),
      other({.temperature = 1, .seed = 8});
  int same_row = 0, same_seed = 0;
  for (int64_t i = 0; i < 400; ++i) {
    const int32_t token = a.Choose(kLogits, nullptr, 1, i).token;
    EXPECT_EQ(token, b.Choose(kLogits, nullptr, 1, i).token);
    same_row += token == a.Choose(kLogits, nullptr, 2, i).token;
    same_seed += token == other.Choose(kLogits, nullptr, 1, i).token;
  }
  for (const int same : {same_row, same_seed})
    EXPECT_NEAR(same / 400.0, 0.345, 0.12);  // independent: the sum of squares
}

TEST(Sampler, GreedyAndLogprobs) {
  const std::vector<double> logits = {1, 3, 3, -2};
  const Choice choice = Sampler({}).Choose(logits, nullptr, 0, 0, 9);
  EXPECT_EQ(choice.token, 1);  // the lowest id of equals
  const double total = std::log(std::exp(1) + 2 * std::exp(3) + std::exp(-2));
  EXPECT_NEAR(choice.logprob, 3 - total, 1e-12);
  ASSERT_EQ(choice.top.size(), 4u);
  EXPECT_EQ(choice.top[1].token, 2);
  EXPECT_EQ(choice.top[3].token, 3);
  double sum = 0;
  for (const TokenLogprob& t : choice.top) sum += std::exp(t.logprob);
  EXPECT_NEAR(sum, 1, 1e-12);
}

TEST(Sampler, PenaltyTurnsAwayFromSeenTokens) {
  const std::vector<double> logits = {2, 1.5, -1};
  SeenTokens seen(3, 2);
  seen.Push(0);
  const Sampler sampler({.repetition_penalty = 2});
  const Choice choice = sampler.Choose(logits, &seen, 0, 0);
  EXPECT_EQ(choice.token, 1);
  EXPECT_NEAR(choice.logprob, Sampler({}).Choose(logits, nullptr, 0, 0, 2).top[1].logprob,
              1e-12);  // the model's own
  seen.Push(1);
  seen.Push(1);  // the window of 2 has forgotten token 0
  EXPECT_FALSE(seen.Has(0));
  EXPECT_EQ(sampler.Choose(logits, &seen, 0, 0).token, 0);
}

TEST(Sampler, Errors) {
  EXPECT_NE(ErrorMessage([] { Sampler({.temperature = -1}); }).find("temperature must be 0"),
            std::string::npos);
  EXPECT_NE(ErrorMessage([] { Sampler({.top_k = -1}); }).find("top-k"), std::string::npos);
  EXPECT_NE(ErrorMessage([] { Sampler({.top_p = 0}); }).find("top-p"), std::string::npos);
  EXPECT_NE(ErrorMessage([] {
              Sampler({.repetition_penalty = std::nan("")});
            }).find("repetition-penalty"),
            std::string::npos);
  const double inf = std::numeric_limits<double>::infinity();
  SeenTokens seen(2, 0);
  seen.Push(0);
  seen.Push(1);
  const auto penalised = [&](double penalty, std::vector<double> logits, double temperature) {
    const Sampler sampler({.temperature = temperature, .repetition_penalty = penalty});
    return ErrorMessage([&] { sampler.Choose(logits, &seen, 0, 0); });
  };
  for (const double temperature : {0.0, 1.0}) {
    EXPECT_NE(penalised(1e-320, {5, 1}, temperature).find("repetition-penalty="),
              std::string::npos);
    EXPECT_NE(penalised(1e300, {-1e10, -1e10}, temperature).find("repetition-penalty="),
              std::string::npos);
    EXPECT_EQ(penalised(1e-300, {5, 1}, temperature), "no error");
  }
  for (const std::vector<double>& bad :
       {std::vector<double>{0, std::nan("")}, {0, inf}, {-inf, -inf}}) {
    EXPECT_NE(ErrorMessage([&] { Sampler({}).Choose(bad, nullptr, 0, 5); }).find("at step 5"),
              std::string::npos);
  }
  EXPECT_EQ(
      Sampler({.temperature = 1}).Choose(std::vector<double>{-inf, 0, -inf}, nullptr, 0, 0).token,
      1);
}

}  // namespace
}  // namespace cistern
