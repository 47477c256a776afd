// Gates of the slot memories of means, against the recurrence that they stand for, by plain loops.
#include "cistern/attention/decay.h"

#include <cmath>

#include "cistern/attention/testing_mechanisms.h"
#include "cistern/base/error.h"

namespace cistern {
namespace {

using namespace cistern::testing;

std::shared_ptr<Mechanism> Make(const char* name, const Json& options) {
  AttentionDims dims;
  dims.dim = kDim, dims.heads = kHeads;
  at::manual_seed(1);
  const auto m = FindMechanism(name).Make(options, dims);
  m->eval();
  m->to(at::kDouble);
  return m;
}

double At(const at::Tensor& x, int64_t h, int64_t t, int64_t i) {
  return x[0][h][t][i].item<double>();
}

// num = g num + e^s v, den = g den + e^s, M = num / den; latte: y = sum_l softmax_l(q) M_l.
at::Tensor LatteByHand(const std::vector<at::Tensor>& x, int64_t slots, double temperature) {
  const int64_t length = x[0].size(2);
  const at::Tensor out = at::zeros({1, kHeads, length, kWidth}, at::kDouble);
  for (int64_t h = 0; h < kHeads; ++h) {
    std::vector<std::vector<double>> num(size_t(slots), std::vector<double>(kWidth, 0.0));
    std::vector<double> den(size_t(slots), 0.0);
    for (int64_t t = 0; t < length; ++t) {
      double sum = 0;
      for (int64_t l = 0; l < slots; ++l) sum += std::exp(At(x[0], h, t, l));
      for (int64_t l = 0; l < slots; ++l) {
        const double logit = At(x[3], h, t, x[3].size(3) > 1 ? l : 0),
                     gate = std::pow(1 / (1 + std::exp(-logit)), 1 / temperature),
                     weight = std::exp(At(x[1], h, t, l));
        den[size_t(l)] = gate * den[size_t(l)] + weight;
        for (int64_t c = 0; c < kWidth; ++c) {
          double& n = num[size_t(l)][size_t(c)];
          n = gate * n + weight * At(x[2], h, t, c);
          out[0][h][t][c] += std::exp(At(x[0], h, t, l)) / sum * n / den[size_t(l)];
        }
      }
    }
  }
  return out;
}

TEST(Decay, LatteIsItsRecurrence) {
  for (const char* gate : {"head", "slot"}) {
    const auto m = Make("latte", {{"latents", 6}, {"gate", gate}, {"gate_temperature", 2.0}});
    const auto x = Inputs(*m, 1, 40);
    ASSERT_EQ(x[3].size(3), std::string(gate) == "slot" ? 3 : 1);
    const at::Tensor want = LatteByHand(x, 3, 2.0);
    for (const std::vector<int64_t>& cuts :
         {std::vector<int64_t>{0, 40}, std::vector<int64_t>{0, 13, 40}, EachToken(40)})
      ExpectClose(ExtendPieces(*m, x, cuts), want, 1e-12, gate);
  }
}

// One slot's softmax is one, so what is read is the slot: of two tokens with weights of 1 and a
// gate of 1/3, (v_1 / 3 + v_2) / (1 / 3 + 1).
TEST(Decay, AbcByHand) {
  AttentionDims dims;
  dims.dim = 2, dims.heads = 1;
  const auto m = FindMechanism("abc_mlp").Make(
      {{"slots", 1}, {"gate", "slot"}, {"gate_temperature", 1.0}}, dims);
  m->eval();
  const at::Tensor v = at::tensor({8., 16., 4., 2.}, at::kDouble).view({1, 1, 2, 2}),
                   control = at::zeros({1, 1, 2, 1}, at::kDouble), gate = control - std::log(2.0);
  ExpectClose(ExtendPieces(*m, {v, v, v, control, gate}, {0, 2}),
              at::tensor({8., 16., 5., 5.5}, at::kDouble).view({1, 1, 2, 2}), 1e-15, "by hand");
}

TEST(Decay, OpenGatesAreNone) {
  for (const char* name : {"latte", "abc_mlp"}) {
    const Json size = {{name == std::string("latte") ? "latents" : "slots", 4}};
    Json with = size;
    with["gate"] = "head";
    const auto plain = Make(name, size), gated = Make(name, with);
    auto x = Inputs(*gated, 2, 30);
    x.back().fill_(800);
    const std::vector<at::Tensor> without(x.begin(), x.end() - 1);
    ExpectClose(ExtendPieces(*gated, x, {0, 11, 30}), ExtendPieces(*plain, without, {0, 30}), 1e-12,
                name);
  }
}

// After thousands of tokens the sum of the gates' logarithms is in the thousands: in float nothing
// would be left of a weight's digits.
TEST(Decay, LongPiecesInFloat) {
  const int64_t length = 6000;
  const auto m = Make("latte", {{"latents", 6}, {"gate", "slot"}, {"gate_temperature", 1.0}});
  const auto x = To(Inputs(*m, 1, length), at::kFloat);
  at::NoGradGuard guard;
  m->to(at::kFloat);
  const at::Tensor once = ExtendPieces(*m, x, {0, length});
  m->to(at::kDouble);
  const at::Tensor want = ExtendPieces(*m, To(x, at::kDouble), {0, 1000, 2000, 3000, 4000, length});
  ExpectClose(once, want, 1e-6, "float at once, double in pieces");
}

TEST(Decay, RefusesWithAReason) {
  const auto text = [](auto&& f) {
    try {
      f();
    } catch (const UsageError& e) {
      return std::string(e.what());
    }
    return std::string("no UsageError");
  };
  for (const char* name : {"latte", "abc_mlp"}) {
    ExpectContains(text([&] {
                     Make(name, {{"gate_temperature", 2.0}});
                   }),
                   {name, "gate_temperature=2", "gate=head"});
    const auto m = Make(name, {{"gate", "slot"}});
    EXPECT_EQ(m->FormRefusal(Form::kCausal), "");
    ExpectContains(m->FormRefusal(Form::kBidirectional), {"bidirectional", "gate=none"});
    ExpectContains(m->FormRefusal(Form::kCross), {"cross", "gate=none"});
  }
  ExpectContains(text([&] { Make("abc_random", {{"gate", "slot"}}); }), {"gate"});
}

}  // namespace
}  // namespace cistern
