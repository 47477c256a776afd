// Nystrom attention: its inverses, its landmarks, its convolution, its memory.
#include "cistern/attention/mechanisms/nystrom.h"

#include <sys/resource.h>

#include "cistern/attention/testing_mechanisms.h"
#include "cistern/base/error.h"

namespace cistern {
namespace {

using namespace cistern::testing;

std::shared_ptr<Mechanism> Make(const Json& options) {
  AttentionDims dims;
  dims.dim = kDim, dims.heads = kHeads;
  at::manual_seed(1);
  const auto m = FindMechanism("nystrom").Make(options, dims);
  m->eval();
  m->to(at::kDouble);
  return m;
}

at::Tensor SoftmaxMatrices(int64_t count, int64_t size) {
  return at::softmax(Normal({count, size, size}), -1);
}

// The largest entry of A Z A - A.
double InverseError(const at::Tensor& A, const at::Tensor& Z) {
  return (at::matmul(A, at::matmul(Z, A)) - A).abs().max().item<double>();
}

TEST(Nystrom, InversesOfSoftmaxMatrices) {
  at::manual_seed(2);
  const at::Tensor A = SoftmaxMatrices(20, 16);
  const std::pair<int64_t, double> bounds[] = {{6, 2e-2}, {12, 2e-3}, {30, 1e-12}};
  double before = 1;
  for (const auto& [iterations, bound] : bounds) {
    const double error = InverseError(A, IterativePseudoInverse(A, iterations));
    EXPECT_LT(error, bound) << iterations << " iterations";
    EXPECT_LT(error, before / 3) << iterations << " iterations";
    before = error;
  }
  EXPECT_LT(InverseError(A, SvdPseudoInverse(A)), 1e-12);
  ExpectClose(IterativePseudoInverse(A, 60), at::linalg_inv(A), 1e-8, "the inverse itself");

  // Rows and columns that are not there stay so, and the rest does not notice.
  const at::Tensor padded = at::constant_pad_nd(A, {0, 3, 0, 3}, 0);
  for (const bool svd : {false, true}) {
    auto inverse = [&](const at::Tensor& x) {
      return svd ? SvdPseudoInverse(x) : IterativePseudoInverse(x, 6);
    };
    ExpectClose(inverse(padded), at::constant_pad_nd(inverse(A), {0, 3, 0, 3}, 0), 1e-11,
                svd ? "svd" : "iterative");
    EXPECT_EQ(inverse(at::zeros({2, 4, 4}, at::kDouble)).abs().max().item<double>(), 0);
    const at::Tensor g = Normal({20, 16, 16}),
                     regular = at::softmax(Normal({20, 16, 16}) + 4 * at::eye(16, at::kDouble), -1);
    ExpectGradientsMatchDifferences(
        [&](const std::vector<at::Tensor>& x) { return (inverse(x[0]) * g).sum(); }, {regular},
        svd ? "svd" : "iterative");
  }
}

TEST(Nystrom, ALandmarkForEachTokenIsSoftmaxAttention) {
  const int64_t T = 16;
  const auto softmax = Small(FindMechanism("softmax"));
  auto error = [&](const Json& options) {
    const auto m = Make(options);
    at::manual_seed(3);
    auto x = Inputs(*m, 2, T);
    x[0] = x[0] * 3, x[1] = x[1] * 3;  // far apart, so that the landmarks' attention has an inverse
    return RelRms(m->Bidirectional(x, {}), softmax->Definition(Form::kBidirectional, x, x));
  };
  for (const int64_t landmarks : {T, 2 * T}) {
    EXPECT_LT(error({{"landmarks", landmarks}, {"inverse", "svd"}}),
              1e-5);  // it drops 16 2^-23 of the largest
    EXPECT_LT(error({{"landmarks", landmarks}, {"iterations", 40}}), 1e-5);
    EXPECT_LT(error({{"landmarks", landmarks}}), 0.2);
    EXPECT_GT(error({{"landmarks", landmarks}}),
              error({{"landmarks", landmarks}, {"iterations", 12}}) * 1.5);
  }
  EXPECT_GT(error({{"landmarks", 2}, {"inverse", "svd"}}), 0.1);
}

TEST(Nystrom, ErrorFallsWithTheLandmarks) {
  // A smooth sequence, as landmarks want it: neighbours are alike.
  const int64_t T = 128;
  at::manual_seed(4);
  std::vector<at::Tensor> x;
  for (int i = 0; i < 3; ++i) x.push_back(Normal({1, kHeads, T, kWidth}).cumsum(2) / 4);
  const at::Tensor want = Small(FindMechanism("softmax"))->Definition(Form::kBidirectional, x, x);
  double before = 1e300;
  for (const int64_t landmarks : {4, 16, 64, 128}) {
    const double error =
        RelRms(Make({{"landmarks", landmarks}, {"inverse", "svd"}})->Bidirectional(x, {}), want);
    EXPECT_LT(error, before / 1.5) << landmarks << " landmarks";
    before = error;
  }
}

TEST(Nystrom, LandmarksAreMeansOfEqualSegmentsWhereTheyCanBe) {
  // The formula of the paper, for a length that the number of landmarks divides.
  const int64_t T = 24, count = 4;
  const auto m = Make({{"landmarks", count}, {"inverse", "svd"}});
  at::manual_seed(5);
  const auto x = Inputs(*m, 2, T);
  auto mean = [&](const at::Tensor& y) {
    return y.reshape({2, kHeads, count, T / count, kWidth}).mean(3);
  };
  auto attention = [](const at::Tensor& a, const at::Tensor& b) {
    return at::softmax(at::matmul(a, b.transpose(2, 3)) / std::sqrt(double(kWidth)), 3);
  };
  const at::Tensor ql = mean(x[0]), kl = mean(x[1]);
  const at::Tensor want = at::matmul(
      attention(x[0], kl),
      at::matmul(at::linalg_inv(attention(ql, kl)), at::matmul(attention(ql, x[1]), x[2])));
  ExpectClose(m->Bidirectional(x, {}), want, 1e-10, "segments of 6");
  // Seven tokens more than fit: the segments' lengths differ by one at most, in the padded batch
  // too.
  const auto longer = Inputs(*m, 2, T + 7);
  const at::Tensor whole = m->Bidirectional(longer, {});
  ExpectClose(whole, m->Definition(Form::kBidirectional, longer, longer), 1e-10,
              "segments of 7 and 8");
  std::vector<at::Tensor> padded;
  for (const at::Tensor& y : longer) padded.push_back(at::constant_pad_nd(y, {0, 0, 0, 40}, 1e3));
  ExpectClose(m->Bidirectional(padded, {Lengths({T + 7, T + 7}), {}}).narrow(2, 0, T + 7), whole,
              1e-12, "padded with large numbers");
}

// lucidrains' way by plain loops, its masks included: the rows of one batch are padded in front to
// a multiple of m, sums of a segment are divided by its tokens, three softmaxes are masked with the
// lowest number. One segment of the second row has no token.
TEST(Nystrom, PaddedInFrontWithMasks) {
  const int64_t T = 18, m = 5, l = 4, more = m * l - T;
  const auto made = Make({{"landmarks", m}, {"inverse", "svd"}, {"padding", "front_masked"}});
  at::manual_seed(5);
  const auto x = Inputs(*made, 2, T);
  const std::vector<int64_t> lengths = {T, 13};
  const at::Tensor out = made->Bidirectional(x, {Lengths(lengths), {}});
  const double lowest = -std::numeric_limits<double>::max(), root = std::sqrt(double(kWidth));
  for (int64_t b = 0; b < 2; ++b) {
    for (int64_t h = 0; h < kHeads; ++h) {
      const int64_t N = T + more;
      const auto real = [&](int64_t place) {
        return place >= more && place - more < lengths[size_t(b)];
      };
      std::vector<at::Tensor> padded;  // q, k, v: [N,d] with zeros
      for (const at::Tensor& y : x) {
        const at::Tensor p = at::zeros({N, kWidth}, at::kDouble);
        for (int64_t place = 0; place < N; ++place) {
          if (real(place)) p[place].copy_(y[b][h][place - more]);
        }
        padded.push_back(p);
      }
      const at::Tensor ql = at::zeros({m, kWidth}, at::kDouble), kl = at::zeros_like(ql);
      std::vector<int64_t> tokens(size_t(m), 0);
      for (int64_t place = 0; place < N; ++place) {
        tokens[size_t(place / l)] += real(place) ? 1 : 0;
        ql[place / l] += padded[0][place];
        kl[place / l] += padded[1][place];
      }
      if (b == 1) {
        ASSERT_EQ(tokens, (std::vector<int64_t>{2, 4, 4, 3, 0}));
      }
      for (int64_t j = 0; j < m; ++j) {
        ql[j] /= double(tokens[size_t(j)]) + 1e-8;
        kl[j] /= double(tokens[size_t(j)]) + 1e-8;
      }
      const auto softmax = [&](const at::Tensor& a, const at::Tensor& c, auto&& row,
                               auto&& column) {
        const at::Tensor s = at::matmul(a, c.t()) / root;
        for (int64_t i = 0; i < s.size(0); ++i) {
          for (int64_t j = 0; j < s.size(1); ++j) {
            if (!row(i) || !column(j)) s[i][j] = lowest;
          }
        }
        return at::softmax(s, 1);
      };
      const auto there = [&](int64_t j) { return tokens[size_t(j)] > 0; };
      const at::Tensor F = softmax(padded[0], kl, real, there), A = softmax(ql, kl, there, there),
                       B = softmax(ql, padded[1], there, real);
      const at::Tensor want =
          at::matmul(F, at::matmul(at::linalg_pinv(A, 1e-15), at::matmul(B, padded[2])));  // [N,d]
      const int64_t count = lengths[size_t(b)];
      ExpectClose(out[b][h].narrow(0, 0, count), want.narrow(0, more, count), 1e-6,
                  StrCat("row ", b));
    }
  }
  // Where m divides the length and nothing is padded, it is the paper's own.
  const auto y = Inputs(*made, 2, 20);
  ExpectClose(made->Bidirectional(y, {}),
              Make({{"landmarks", m}, {"inverse", "svd"}})->Bidirectional(y, {}), 1e-12, "no pads");
}

TEST(Nystrom, Convolution) {
  at::NoGradGuard guard;
  const auto m = Make({{"landmarks", 4}, {"conv", 35}}), plain = Make({{"landmarks", 4}});
  const at::Tensor filter = m->named_parameters()["filter"];
  EXPECT_EQ(filter.sizes(), at::IntArrayRef({kHeads, 1, 35, 1}));
  EXPECT_EQ(plain->parameters().size(), 0u);
  at::manual_seed(6);
  const auto x = Inputs(*m, 2, 20);
  ExpectClose(m->Bidirectional(x, {}), m->Definition(Form::kBidirectional, x, x), 1e-11,
              "shorter than the filter");
  // The tap before the middle gives every head's tokens their neighbour to the left, times what the
  // head says.
  filter.zero_();
  filter.select(2, 16).copy_(at::tensor({2.0, -3.0}, at::kDouble).view({2, 1, 1}));
  const at::Tensor left = at::constant_pad_nd(x[2], {0, 0, 1, -1}, 0);
  const at::Tensor added = m->Bidirectional(x, {}) - plain->Bidirectional(x, {});
  ExpectClose(added.select(1, 0), left.select(1, 0) * 2, 1e-12, "first head");
  ExpectClose(added.select(1, 1), left.select(1, 1) * -3, 1e-12, "second head");
  EXPECT_LE(Make({{"conv", 9}})->named_parameters()["filter"].abs().max().item<double>(), 1 / 3.0);
}

// A filter longer than the rows, of the one head there is: where the library's own gradient fails.
TEST(Nystrom, GradientByTheFilterOfOneHead) {
  AttentionDims dims;
  dims.dim = 16, dims.heads = 1;
  at::manual_seed(1);
  const auto m = FindMechanism("nystrom").Make({{"landmarks", 4}, {"conv", 33}}, dims);
  const auto gradient = [&](const std::vector<at::Tensor>& x) {
    const at::Tensor y = m->Bidirectional(x, {});
    return torch::autograd::grad({y.square().sum()}, {m->named_parameters()["filter"]})[0];
  };
  for (const int64_t length : {14, 16, 17}) {
    std::vector<at::Tensor> x;
    for (int i = 0; i < 3; ++i) x.push_back(Normal({2, 1, length, 16}).to(at::kFloat));
    m->to(at::kFloat);
    const at::Tensor got = gradient(x);
    m->to(at::kDouble);
    ExpectClose(got.to(at::kDouble), gradient(To(x, at::kDouble)), 1e-4, StrCat("length ", length));
  }
}

TEST(Nystrom, NothingOfLengthTimesLengthIsFormed) {
  const auto m = Make({{"landmarks", 8}});
  m->to(at::kFloat);
  auto peak = [] {
    rusage usage{};
    getrusage(RUSAGE_SELF, &usage);
    return usage.ru_maxrss / 1024;  // MiB
  };
  auto run = [&](int64_t length) {
    const auto x = Leaves(To(Inputs(*m, 1, length), at::kFloat));
    Gradients(m->Bidirectional(x, {Lengths({length - 5}), {}}).sum(), x);
  };
  run(1000);
  const long before = peak();
  run(40000);  // a [T,T] of a head would be 6 GB, one of bytes 1.5 GB
  EXPECT_LT(peak() - before, 400);
}

TEST(Nystrom, RefusesWithAReason) {
  auto text = [](auto&& f) {
    try {
      f();
    } catch (const UsageError& e) {
      return std::string(e.what());
    }
    return std::string("no UsageError");
  };
  const MechanismInfo& info = FindMechanism("nystrom");
  ExpectContains(text([&] { RequireForm(info, Form::kCausal); }),
                 {"[nystrom]", "causal", "later tokens", "latte"});
  ExpectContains(text([&] { RequireForm(info, Form::kCross); }),
                 {"[nystrom]", "cross", "linformer"});
  ExpectContains(text([] { Make({{"conv", 34}}); }), {"[nystrom]", "conv=34", "odd"});
  ExpectContains(text([] {
                   Make({{"inverse", "svd"}, {"iterations", 3}});
                 }),
                 {"[nystrom]", "iterations=3", "inverse=svd"});
  const auto m = Make({{"landmarks", 4}});
  const auto x = Inputs(*m, 1, 3);
  State state = m->EmptyState(1, x[0].options());
  EXPECT_TRUE(state.tensors.empty());
  for (const std::string& message :
       {Thrown([&] { m->Extend(x, state, {}); }), Thrown([&] { m->Write(x, state, {}); }),
        Thrown([&] { m->Read(x, state); })})
    ExpectContains(message, {"[nystrom]", "no state", "Bidirectional"});
}

TEST(Nystrom, ARowThatIsNotFiniteIsItsOwn) {
  at::manual_seed(8);
  for (const char* inverse : {"iterative", "svd"}) {
    const auto m = Make({{"landmarks", 4}, {"inverse", inverse}});
    const auto x = Inputs(*m, 3, 13);
    const at::Tensor want = m->Bidirectional(x, {});
    for (size_t i = 0; i < 3; ++i) {
      auto broken = x;
      broken[i] = x[i].clone();
      broken[i][1][0][5].fill_(std::nan(""));
      const auto leaves = Leaves(broken);
      const at::Tensor got = m->Bidirectional(leaves, {});
      EXPECT_TRUE(got[1][0].isnan().any().item<bool>()) << inverse;
      for (const int64_t row : {0, 2}) ExpectClose(got[row], want[row], 1e-12, inverse);
      const auto g = Gradients((got[0].square().sum() + got[2].square().sum()), leaves);
      for (const at::Tensor& d : g) EXPECT_TRUE(d[0].isfinite().all().item<bool>()) << inverse;
    }
  }
}

TEST(Nystrom, NothingHasAGraph) {
  const auto m = Make({{"landmarks", 4}});
  for (const auto& [batch, length] : {std::pair<int64_t, int64_t>{2, 0}, {0, 5}}) {
    const auto x = Leaves(Inputs(*m, batch, length));
    const at::Tensor out = m->Bidirectional(x, {});
    EXPECT_EQ(out.sizes(), x[2].sizes());
    for (const at::Tensor& g : torch::autograd::grad({out.sum()}, x))
      EXPECT_EQ(g.sizes(), x[0].sizes());
  }
}

}  // namespace
}  // namespace cistern
