// Dropout of softmax attention's probabilities in training: one seed drops the same, whatever
// computes it.
#include "cistern/attention/testing_mechanisms.h"

namespace cistern {
namespace {

using namespace cistern::testing;

TEST(Dropout, EveryImplementationDropsTheSame) {
  int64_t checked = 0;
  for (const char* name : {"softmax", "window", "dilated", "luna", "conv_luna", "perceiver",
                           "shared_workspace", "set_transformer", "nystrom", "reuse"}) {
    const MechanismInfo& info = FindMechanism(name);
    for (const Json& options : info.cases) {
      AttentionDims dims;
      dims.dim = kDim, dims.heads = kHeads, dims.max_length = 64, dims.dropout = 0.4;
      at::manual_seed(3);
      const auto m = info.Make(options, dims);
      m->to(at::kDouble);
      const int64_t length = 23;
      const std::vector<at::Tensor> x = Inputs(*m, 2, length);
      const ops::Mask masks[] = {{}, {Lengths({length, 14}), {}}};
      for (const Form form : {Form::kBidirectional, Form::kCausal}) {
        if (!info.Supports(form) || !m->FormRefusal(form).empty()) continue;
        for (const ops::Mask& mask : masks) {
          m->eval();
          const at::Tensor whole = form == Form::kCausal ? ExtendPieces(*m, x, {0, length}, mask)
                                                         : m->Bidirectional(x, mask);
          m->train();
          const at::Tensor g = at::randn_like(whole);
          std::vector<at::Tensor> want;
          for (const ops::Impl impl : kImpls) {
            const ops::ImplScope scope(impl);
            at::manual_seed(5);
            const auto got = GradientsAndOutput(*m, form, x, mask, g);
            if (want.empty()) want = got;
            for (size_t i = 0; i < got.size(); ++i)
              ExpectClose(got[i], want[i], 1e-11,
                          StrCat(name, " ", options.dump(), " ", FormName(form), " ",
                                 ops::ImplName(impl), " ", i));
          }
          EXPECT_GT(RelRms(want.back(), whole), 0.05) << name << ": nothing was dropped";
          ++checked;
        }
      }
    }
  }
  EXPECT_GT(checked, 40);
}

}  // namespace
}  // namespace cistern
