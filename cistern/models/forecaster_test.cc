#include "cistern/models/forecaster.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cmath>

#include "cistern/models/testing_models.h"

namespace cistern {
namespace {

ModelConfig Config(const std::string& attention, bool residual = true) {
  ModelConfig c = testing::SmallLm({attention});
  c.kind = "forecaster", c.vocab_size = 0, c.positions = PositionKind::kSinusoidal;
  c.own["forecaster"] = Json{{"inputs", 4}, {"outputs", 3}, {"residual", residual}};
  return c;
}

TEST(Forecaster, SeesNothingOfTheFutureAndPiecesAreTheWhole) {
  for (const std::string attention : {"softmax", "latte", "abc_mlp"}) {
    const auto model = testing::Make<Forecaster>(Config(attention));
    const at::NoGradGuard guard;
    const at::Tensor x = at::randn({2, 20, 4}, at::kDouble);
    const at::Tensor y = model->Predict({{"values", x}});
    EXPECT_EQ(y.sizes(), (std::vector<int64_t>{2, 20, 3}));
    at::Tensor other = x.clone();
    other.narrow(1, 11, 9).normal_(0, 9);
    EXPECT_TRUE(at::equal(model->Predict({{"values", other}}).narrow(1, 0, 11), y.narrow(1, 0, 11)))
        << attention;
    ModelState state = model->EmptyState(2);
    std::vector<at::Tensor> pieces;
    for (int64_t at = 0; at < 20; at += 5)
      pieces.push_back(model->Extend(x.narrow(1, at, 5), state));
    EXPECT_LT((at::cat(pieces, 1) - y).abs().max().item<double>(), 1e-10) << attention;
    const at::Tensor padded =
        model->Predict({{"values", x}, {"lengths", at::tensor({7, 20}, at::kLong)}});
    EXPECT_LT((padded[0].narrow(0, 0, 7) - y[0].narrow(0, 0, 7)).abs().max().item<double>(), 1e-10);
  }
}

TEST(Forecaster, PaddingHasNoPartWhateverItHolds) {
  const auto model = testing::Make<Forecaster>(Config("latte"));
  const at::Tensor values = at::randn({2, 9, 4}, at::kDouble),
                   targets = at::randn({2, 9, 3}, at::kDouble);
  const at::Tensor valid = at::ones({2, 9}, at::kBool);
  valid[0].narrow(0, 5, 4).fill_(false);
  targets[0].narrow(0, 5, 4).fill_(NAN);
  for (const NamedTensor& mask :
       {NamedTensor{"lengths", at::tensor({5, 9}, at::kLong)}, NamedTensor{"valid", valid}}) {
    const auto gradients = [&](double held) {
      at::Tensor x = values.clone();
      x[0].narrow(0, 5, 4).fill_(held);
      return testing::Gradients(
          model->TrainingLoss({{"values", x}, {mask.name, mask.value}, {"targets", targets}}),
          model->parameters());
    };
    const auto got = gradients(NAN), want = gradients(0);
    for (size_t i = 0; i < got.size(); ++i) testing::ExpectSameBits(got[i], want[i], mask.name);
  }
}

TEST(Forecaster, ResidualIsTheStepItself) {
  const auto model = testing::Make<Forecaster>(Config("latte")),
             plain = testing::Make<Forecaster>(Config("latte", false));
  const at::NoGradGuard guard;
  for (const auto& p : model->named_parameters())
    plain->named_parameters()[p.key()].copy_(p.value());
  const at::Tensor x = at::randn({2, 9, 4}, at::kDouble);
  EXPECT_LT((model->Predict({{"values", x}}) - plain->Predict({{"values", x}}) - x.narrow(2, 0, 3))
                .abs()
                .max()
                .item<double>(),
            1e-12);
}

TEST(Forecaster, LossIsOverTheTargetsThatAreThere) {
  const auto model = testing::Make<Forecaster>(Config("latte"));
  const at::Tensor x = at::randn({2, 9, 4}, at::kDouble),
                   targets = at::randn({2, 9, 3}, at::kDouble);
  targets[0][3][1] = NAN;
  targets[1].narrow(0, 5, 4).fill_(NAN);
  const at::Tensor y = model->Predict({{"values", x}}).detach();
  double sum = 0, count = 0;
  for (int64_t i = 0; i < targets.numel(); ++i) {
    const double t = targets.data_ptr<double>()[i];
    if (std::isnan(t)) continue;
    const double e = y.contiguous().data_ptr<double>()[i] - t;
    sum += e * e, ++count;
  }
  EXPECT_EQ(count, 54 - 1 - 12);
  const at::Tensor loss = model->TrainingLoss({{"values", x}, {"targets", targets}});
  EXPECT_NEAR(loss.item<double>(), sum / count, 1e-12);
  loss.backward();
  for (const auto& p : model->named_parameters()) {
    ASSERT_TRUE(p.value().grad().defined()) << p.key();
    EXPECT_TRUE(at::isfinite(p.value().grad()).all().item<bool>()) << p.key();
  }
}

}  // namespace
}  // namespace cistern
