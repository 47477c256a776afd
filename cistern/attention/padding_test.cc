// What padding holds, be it finite, huge or NaN, has no part in any bit of what real tokens get.
#include "cistern/attention/testing_mechanisms.h"

namespace cistern {
namespace {

using namespace cistern::testing;

TEST(Padding, HasNoPartWhateverItHolds) {
  constexpr int64_t kLength = 21;
  const double inf = std::numeric_limits<double>::infinity();
  at::manual_seed(6);
  const ops::Mask mask = {Lengths({kLength, 13, 4}), {}};
  const at::Tensor pad = mask.HeadsPadding(kLength);
  int64_t checked = 0;
  for (const MechanismInfo* info : Mechanisms()) {
    for (size_t number = 0; number < info->cases.size(); ++number) {
      const auto m = Small(*info, number);
      if (m->SeesPadding()) continue;
      for (const Form form : {Form::kBidirectional, Form::kCausal}) {
        if (!info->Supports(form) || !m->FormRefusal(form).empty()) continue;
        const std::vector<at::Tensor> x = Inputs(*m, 3, kLength);
        const auto holding = [&](double value) {
          std::vector<at::Tensor> held;
          for (const at::Tensor& t : x) held.push_back(t.masked_fill(pad, value));
          return held;
        };
        for (const ops::Impl impl : kImpls) {
          const ops::ImplScope scope(impl);
          const at::Tensor g =
              at::randn_like(GradientsAndOutput(*m, form, x, mask, at::ones({})).back());
          const std::vector<at::Tensor> want = GradientsAndOutput(*m, form, holding(0), mask, g);
          for (const double value : {2.0, -1e14, 1e16, 1e200, inf, std::nan("")}) {
            const auto got = GradientsAndOutput(*m, form, holding(value), mask, g);
            for (size_t i = 0; i < want.size(); ++i) {
              EXPECT_TRUE(got[i].equal(want[i]))
                  << info->name << " " << info->cases[number].dump() << " " << FormName(form) << " "
                  << ops::ImplName(impl) << " " << value << " " << i;
              EXPECT_EQ(got[i].masked_fill(pad.logical_not(), 0.0).count_nonzero().item<int64_t>(),
                        0);
            }
            ++checked;
          }
        }
        // In float scores overflow sooner.
        m->to(at::kFloat);
        const auto of_float = [&](double value) {
          const std::vector<at::Tensor> held = Leaves(To(holding(value), at::kFloat));
          std::vector<at::Tensor> leaves = held;
          for (const at::Tensor& p : m->parameters()) leaves.push_back(p);
          const at::Tensor out = form == Form::kCausal ? ExtendPieces(*m, held, {0, kLength}, mask)
                                                       : m->Bidirectional(held, mask);
          return torch::autograd::grad({out.square().sum()}, leaves, {}, {}, false, true);
        };
        const auto want = of_float(0), got = of_float(1e10);
        for (size_t i = 0; i < want.size(); ++i)
          EXPECT_TRUE(!want[i].defined() || got[i].equal(want[i]))
              << info->name << " " << info->cases[number].dump() << " " << FormName(form) << " "
              << i;
        m->to(at::kDouble);
      }
    }
  }
  EXPECT_GT(checked, 500);
}

}  // namespace
}  // namespace cistern
