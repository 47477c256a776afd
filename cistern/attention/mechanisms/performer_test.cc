// The random features of the Performer: unbiased, orthogonal, and an error that falls as the root
// of their number (spec 2.6, 2.18).
#include "cistern/attention/mechanisms/performer.h"

#include "cistern/attention/testing_mechanisms.h"

namespace cistern {
namespace {

using namespace cistern::testing;

std::shared_ptr<Mechanism> Make(const Json& options, int64_t dim = kDim) {
  AttentionDims dims;
  dims.dim = dim, dims.heads = kHeads;
  const auto m = FindMechanism("performer").make(options, dims);
  m->eval();
  return m;
}

TEST(Performer, FeaturesAreOrthogonalInBlocks) {
  for (const int64_t scaling : {0, 1}) {
    const at::Tensor w = OrthogonalFeatures(20, 8, scaling, 3, 1).to(at::kDouble);
    for (int64_t begin = 0; begin < 20; begin += 8) {
      const at::Tensor block = w.narrow(0, begin, std::min<int64_t>(8, 20 - begin)),
                       gram = at::matmul(block, block.t());
      EXPECT_LT((gram - gram.diagonal().diag()).abs().max().item<double>(), 1e-5);
      const at::Tensor squares = gram.diagonal();
      if (scaling == 1) {
        EXPECT_LT((squares - 8).abs().max().item<double>(), 1e-5);
      } else {
        EXPECT_GT(squares.std().item<double>(), 0.1);
      }
    }
    EXPECT_GT(at::matmul(w.narrow(0, 0, 8), w.narrow(0, 8, 8).t()).abs().max().item<double>(), 0.1);
  }
  ExpectSameBits(OrthogonalFeatures(20, 8, 0, 3, 1), OrthogonalFeatures(20, 8, 0, 3, 1),
                 "the same seed");
  EXPECT_FALSE(at::equal(OrthogonalFeatures(20, 8, 0, 3, 1), OrthogonalFeatures(20, 8, 0, 3, 2)));
}

// Without the signs of R's diagonal the mean is 2.34 at d = 8 and 2.15 at d = 32. A draw of d
// features has a standard deviation of 20 d^-1/2, and the tolerance is three times that of the
// mean.
TEST(Performer, TheKernelIsUnbiased) {
  for (const auto& [d, draws] : std::vector<std::pair<int64_t, int64_t>>{{8, 10000}, {32, 2500}}) {
    const at::Tensor x = at::zeros({d}, at::kDouble);
    x[0].fill_(1.0);  // x . x = 1
    double sum = 0;
    for (int64_t i = 0; i < draws; ++i) {
      const at::Tensor w = OrthogonalFeatures(d, d, 0, 11, uint64_t(i)).to(at::kDouble);
      sum += (2 * at::mv(w, x) - 1).exp().mean().item<double>();
    }
    EXPECT_NEAR(sum / double(draws), std::exp(1.0), 3 * 20 / std::sqrt(double(d * draws)))
        << "d=" << d;
  }
}

TEST(Performer, TheErrorFallsAsTheRootOfTheFeatures) {
  const auto softmax = [] {
    AttentionDims dims;
    dims.dim = 16, dims.heads = kHeads;
    return FindMechanism("softmax").make(Json::object(), dims);
  }();
  at::manual_seed(4);
  std::vector<at::Tensor> x;
  for (int i = 0; i < 3; ++i) x.push_back(Normal({2, kHeads, 50, 8}, i < 2 ? 0.3 : 1.0));
  const at::Tensor want = ExtendPieces(*softmax, x, {0, 50});
  std::vector<double> errors;
  for (const int64_t features : {16, 256, 4096}) {
    double squares = 0;
    for (int64_t seed = 0; seed < 12; ++seed) {
      const auto m = Make(Json{{"features", features}, {"seed", seed}}, 16);
      squares += std::pow(RelRms(ExtendPieces(*m, x, {0, 50}), want), 2);
    }
    errors.push_back(std::sqrt(squares / 12));
  }
  for (size_t i = 0; i + 1 < errors.size(); ++i) {
    EXPECT_GT(errors[i] / errors[i + 1], 3.0) << errors[i] << " and " << errors[i + 1];
    EXPECT_LT(errors[i] / errors[i + 1], 5.5) << errors[i] << " and " << errors[i + 1];
  }
  EXPECT_LT(errors[2], 0.05);
}

TEST(Performer, NoStabiliserIsNeeded) {
  // Keys of length hundreds: exp(-|k|^2 / 2) is 0 in any precision, the quotient is not.
  const auto m = Make(Json{{"features", 16}});
  at::manual_seed(5);
  auto x = Inputs(*m, 2, 40);
  for (const double scale : {1.0, 30.0, 300.0}) {
    const std::vector<at::Tensor> y = {x[0], x[1] * scale, x[2]};
    ExpectClose(ExtendPieces(*m, y, {0, 17, 40}), m->Definition(Form::kCausal, y, y), 1e-8,
                "causal");
    ExpectClose(m->Bidirectional(y, {}), m->Definition(Form::kBidirectional, y, y), 1e-8,
                "bidirectional");
  }
}

TEST(Performer, FeaturesAreDrawnAnewWhereSequencesBegin) {
  const auto m = Make(Json{{"features", 8}, {"redraw", 2}});
  auto projection = [&] { return m->named_buffers()["projection"].clone(); };
  const auto x = Inputs(*m, 1, 6);
  const at::Tensor first = projection();
  for (int i = 0; i < 5; ++i) ExtendPieces(*m, x, {0, 6});
  ExpectSameBits(projection(), first, "evaluation");
  m->train();
  std::vector<at::Tensor> seen;
  for (int i = 0; i < 5; ++i) {
    ExtendPieces(*m, x, {0, 2, 3, 6});
    seen.push_back(projection());
  }
  ExpectSameBits(seen[1], first, "the first two sequences");
  EXPECT_FALSE(at::equal(seen[2], first));
  ExpectSameBits(seen[3], seen[2], "the next two");
  EXPECT_FALSE(at::equal(seen[4], seen[2]));
  // The gradient of a sequence belongs to the features it was computed with, though others have
  // been drawn since.
  m->train();
  const auto leaves = Leaves(To(x, at::kFloat));
  const at::Tensor sixth = ExtendPieces(*m, leaves, {0, 6}).square().sum();
  const at::Tensor features = projection();
  ExtendPieces(*m, leaves, {0, 6});
  EXPECT_FALSE(at::equal(projection(), features));
  const auto got = Gradients(sixth, leaves);
  m->eval();
  m->named_buffers()["projection"].copy_(features);
  const auto want = Gradients(ExtendPieces(*m, leaves, {0, 6}).square().sum(), leaves);
  for (size_t i = 0; i < leaves.size(); ++i) ExpectSameBits(got[i], want[i], "gradient");
}

}  // namespace
}  // namespace cistern
