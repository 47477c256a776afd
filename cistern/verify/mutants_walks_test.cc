// Tests of the tests: mechanisms whose fused walk has one defect, each caught by the property that
// is there for it.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cmath>

#include "cistern/attention/mechanisms/gated_slots.h"
#include "cistern/attention/mechanisms/linear.h"
#include "cistern/attention/mechanisms/performer.h"
#include "cistern/attention/mechanisms/rfa.h"
#include "cistern/base/error.h"
#include "cistern/ops/fourier_attention.h"
#include "cistern/ops/gated_slots.h"
#include "cistern/ops/linear_attention.h"
#include "cistern/ops/slot_attention.h"
#include "cistern/verify/suite.h"

namespace cistern::verify {
namespace {

// A memory of sums with zeros in its last column.
at::Tensor WithoutNormaliser(const at::Tensor& memory) {
  return at::constant_pad_nd(memory.narrow(3, 0, memory.size(3) - 1), {0, 1}, 0);
}

// Linear attention whose fused walk has one defect.
enum class WalkDefect { kNone, kOtherFeatures, kForgetsNormaliser, kLosesQueryGradient };
WalkDefect walk_defect = WalkDefect::kNone;

class WrongWalk : public LinearMechanism {
 public:
  using LinearMechanism::LinearMechanism;
  at::Tensor DoExtend(const Tensors& x, State& state, const ops::Mask& mask) override {
    const double eps = walk_defect == WalkDefect::kOtherFeatures ? 0 : 0.125;
    const at::Tensor before = state["memory"];
    const auto walk = [&](const at::Tensor& q) {
      return ops::LinearAttention(q, x[1], x[2], before,
                                  {FeatureMap::kEluPlusOne, eps, DivisorRule::kPlus, 1e-6}, mask);
    };
    const ops::SumResult result = walk(x[0]);
    state["memory"] = walk_defect == WalkDefect::kForgetsNormaliser
                          ? WithoutNormaliser(result.memory)
                          : result.memory;
    if (walk_defect != WalkDefect::kLosesQueryGradient) return result.out;
    return 0.5 * result.out + 0.5 * walk(x[0].detach()).out;
  }
};

// FAVOR+, with kernel=relu, whose fused walk has one defect.
enum class FavorDefect { kNone, kReadsWithoutZ, kForgetsZ, kLosesZGradient };
FavorDefect favor_defect = FavorDefect::kNone;

class WrongFavor : public PerformerMechanism {
 public:
  using PerformerMechanism::PerformerMechanism;
  at::Tensor DoExtend(const Tensors& x, State& state, const ops::Mask& mask) override {
    const auto features = [](const at::Tensor& y) { return (at::relu(y) + 1e-3).log(); };
    const at::Tensor q = features(x[0]), s = features(x[1]);
    const ops::SlotState before = {state["memory"], state["z"]};
    const bool latte = favor_defect == FavorDefect::kReadsWithoutZ;
    const ops::AttentionResult result =
        (latte ? ops::LatteAttention : ops::FavorAttention)(q, s, x[2], before, mask);
    state["memory"] = result.state.memory;
    state["z"] =
        favor_defect == FavorDefect::kForgetsZ ? at::zeros_like(result.state.z) : result.state.z;
    if (favor_defect != FavorDefect::kLosesZGradient) return result.out;
    return 0.5 * result.out + 0.5 * ops::FavorAttention(q, s.detach(), x[2], before, mask).out;
  }
};

// RFA whose fused walk has one defect.
enum class SinesDefect { kNone, kOtherDivisor, kForgetsNormaliser, kLosesScaleGradient };
SinesDefect sines_defect = SinesDefect::kNone;

class WrongSines : public RfaMechanism {
 public:
  using RfaMechanism::RfaMechanism;
  at::Tensor DoExtend(const Tensors& x, State& state, const ops::Mask& mask) override {
    const auto weight = [&](const std::string& name) {
      for (const CoreWeight& w : weights()) {
        if (w.name == name) return w.value->to(x[0].scalar_type());
      }
      throw Error(name);
    };
    const at::Tensor sigma = weight("sigma"), matrices = weight("matrices"),
                     before = state["memory"];
    const LinearRule rule = {FeatureMap::kFourier, 0, DivisorRule::kSignSafe,
                             sines_defect == SinesDefect::kOtherDivisor ? 4.0 : 1e-3};
    const auto walk = [&](const at::Tensor& scale) {
      const double factor = 1 / std::sqrt(double(matrices.size(1)));
      return ops::FourierAttention(x[0], x[1], x[2], before, {scale, matrices, true, factor}, rule,
                                   mask);
    };
    const ops::SumResult result = walk(sigma);
    state["memory"] = sines_defect == SinesDefect::kForgetsNormaliser
                          ? WithoutNormaliser(result.memory)
                          : result.memory;
    if (sines_defect != SinesDefect::kLosesScaleGradient) return result.out;
    return 0.5 * result.out + 0.5 * walk(sigma.detach()).out;
  }
};

// Gated slots whose fused walk has one defect.
enum class SlotsDefect { kNone, kOtherTemperature, kForgetsValues, kLosesGateGradient };
SlotsDefect slots_defect = SlotsDefect::kNone;

class WrongSlots : public GatedSlotsMechanism {
 public:
  using GatedSlotsMechanism::GatedSlotsMechanism;
  at::Tensor DoExtend(const Tensors& x, State& state, const ops::Mask& mask) override {
    const double scale = 1 / std::sqrt(double(x[0].size(3))),
                 temperature = slots_defect == SlotsDefect::kOtherTemperature ? 7 : 8;
    const at::Tensor keys = state["key_memory"], values = state["value_memory"];
    const auto walk = [&](const at::Tensor& logits) {
      return ops::GatedSlotsAttention(x[0], x[1], x[2], logits, keys, values, scale, temperature,
                                      mask);
    };
    const ops::GatedSlotsResult result = walk(x[3]);
    state["key_memory"] = result.keys;
    state["value_memory"] =
        slots_defect == SlotsDefect::kForgetsValues ? at::zeros_like(result.values) : result.values;
    if (slots_defect != SlotsDefect::kLosesGateGradient) return result.out;
    return 0.5 * result.out + 0.5 * walk(x[3].detach()).out;
  }
};

template <class Defect>
void ExpectCaught(const MechanismInfo& info, const Json& options, Defect& defect,
                  const std::vector<std::pair<Defect, const char*>>& caught_by) {
  for (const auto& [one, property] : caught_by) {
    Subject subject(info, options, 1);
    defect = Defect::kNone;
    EXPECT_FALSE(RunCheck(FindProperty(property), subject, ops::Impl::kKernel, {}).failed())
        << property;
    defect = one;
    EXPECT_TRUE(RunCheck(FindProperty(property), subject, ops::Impl::kKernel, {}).failed())
        << property;
  }
  defect = Defect::kNone;
}

TEST(MutantWalks, AreCaught) {
  MechanismInfo linear = FindMechanism("linear"), performer = FindMechanism("performer");
  linear.construct = InfoOf<WrongWalk>("linear").construct;
  ExpectCaught(linear, {{"eps", 1e-6}, {"map_eps", 0.125}}, walk_defect,
               {{WalkDefect::kOtherFeatures, "definition"},
                {WalkDefect::kForgetsNormaliser, "pieces"},
                {WalkDefect::kLosesQueryGradient, "gradient"}});
  performer.construct = InfoOf<WrongFavor>("performer").construct;
  ExpectCaught(performer, {{"kernel", "relu"}}, favor_defect,
               {{FavorDefect::kReadsWithoutZ, "definition"},
                {FavorDefect::kForgetsZ, "pieces"},
                {FavorDefect::kLosesZGradient, "gradient"}});
  MechanismInfo rfa = FindMechanism("rfa");
  rfa.construct = InfoOf<WrongSines>("rfa").construct;
  ExpectCaught(rfa, {{"variant", "paper"}, {"features", 32}}, sines_defect,
               {{SinesDefect::kOtherDivisor, "definition"},
                {SinesDefect::kForgetsNormaliser, "pieces"},
                {SinesDefect::kLosesScaleGradient, "gradient"}});
  MechanismInfo slots = FindMechanism("gated_slots");
  slots.construct = InfoOf<WrongSlots>("gated_slots").construct;
  ExpectCaught(slots, {{"slots", 3}}, slots_defect,
               {{SlotsDefect::kOtherTemperature, "definition"},
                {SlotsDefect::kForgetsValues, "pieces"},
                {SlotsDefect::kLosesGateGradient, "gradient"}});
}

}  // namespace
}  // namespace cistern::verify
