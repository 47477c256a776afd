#include "cistern/analyses/implied_weights.h"

#include <cmath>

#include "cistern/ops/testing.h"

namespace cistern {
namespace {

using testing::ExpectClose;
using testing::ExpectContains;
using testing::Thrown;

constexpr int64_t kDim = 8, kHeads = 2, kLength = 9, kBatch = 2;

AttentionLayerOptions LayerOptions(const std::string& mechanism, const Json& options, Form form) {
  AttentionLayerOptions o;
  o.mechanism = mechanism;
  o.mechanism_options = options;
  o.dims.dim = kDim, o.dims.heads = kHeads, o.dims.max_length = 16;
  o.form = form;
  return o;
}

// A layer in double with weights that make attention anything but uniform, and one pass of it.
struct Ran {
  std::shared_ptr<AttentionLayer> layer;
  CapturedLayer captured;
};
Ran RunLayer(const AttentionLayerOptions& options, const ops::Mask& mask = {}) {
  at::manual_seed(7);
  const at::NoGradGuard guard;
  Ran ran{MakeAttentionLayer(options), {}};
  for (at::Tensor& p : ran.layer->parameters()) p.normal_(0, 0.5);
  ran.layer->to(at::kDouble);
  ran.layer->eval();
  Stream stream;
  stream.x = testing::Normal({kBatch, kLength, kDim});
  stream.mask = mask;
  stream.positions = at::arange(kLength, at::kLong).unsqueeze(0);
  LayerCapture capture;
  if (options.form == Form::kCausal) {
    State state = ran.layer->EmptyState(kBatch, stream.x.options());
    ran.layer->Extend(stream, state);
  } else {
    ran.layer->Bidirectional(stream);
  }
  std::vector<CapturedLayer> all = capture.Take();
  EXPECT_EQ(all.size(), 1u);
  ran.captured = all.at(0);
  return ran;
}

using Matrix = std::vector<std::vector<double>>;

// |W - want| over all queries and sources of a head.
void ExpectWeights(const at::Tensor& w, const Matrix& want, double tolerance,
                   const std::string& what) {
  ASSERT_EQ(w.dim(), 2);
  const at::Tensor got = w.to(at::kDouble).contiguous();
  const auto number = got.accessor<double, 2>();
  for (size_t t = 0; t < want.size(); ++t) {
    for (size_t s = 0; s < want[t].size(); ++s)
      EXPECT_NEAR(number[int64_t(t)][int64_t(s)], want[t][s], tolerance)
          << what << ", query " << t << ", source " << s;
  }
}

double Dot(const at::Tensor& a, const at::Tensor& b) {
  double sum = 0;
  for (int64_t i = 0; i < a.size(0); ++i) sum += a[i].item<double>() * b[i].item<double>();
  return sum;
}

// Rows of positive numbers, divided by their sums over what is seen.
Matrix Normalised(const Matrix& scores) {
  Matrix out = scores;
  for (auto& row : out) {
    double sum = 0;
    for (const double x : row) sum += x;
    for (double& x : row) x /= sum;
  }
  return out;
}

TEST(ImpliedWeights, SoftmaxIsSoftmax) {
  for (const Form form : {Form::kBidirectional, Form::kCausal}) {
    for (const char* scale : {"sqrt", "unit"}) {
      const Ran ran = RunLayer(LayerOptions("softmax", Json{{"scale", scale}}, form));
      const at::Tensor w = ImpliedWeights(ran.captured, 1).All();
      for (int64_t h = 0; h < kHeads; ++h) {
        Matrix want(kLength, std::vector<double>(kLength, 0));
        for (int64_t t = 0; t < kLength; ++t) {
          for (int64_t s = 0; s < (form == Form::kCausal ? t + 1 : kLength); ++s)
            want[t][s] = std::exp(Dot(ran.captured.x[0][1][h][t], ran.captured.x[1][1][h][s]) /
                                  (std::string(scale) == "unit" ? 1 : 2));
        }
        ExpectWeights(w[h], Normalised(want), 1e-12, FormName(form));
      }
    }
  }
}

TEST(ImpliedWeights, WindowIsABand) {
  const Ran ran = RunLayer(LayerOptions("window", Json{{"window", 3}}, Form::kCausal));
  const at::Tensor w = ImpliedWeights(ran.captured, 0).All();
  Matrix want(kLength, std::vector<double>(kLength, 0));
  for (int64_t t = 0; t < kLength; ++t) {
    for (int64_t s = std::max<int64_t>(0, t - 2); s <= t; ++s)
      want[t][s] = std::exp(Dot(ran.captured.x[0][0][0][t], ran.captured.x[1][0][0][s]) / 2);
  }
  ExpectWeights(w[0], Normalised(want), 1e-12, "window");
}

// Blocks of columns, which begin from the state before them, in any order.
TEST(ImpliedWeights, CausalBlocksAreTheWhole) {
  const at::NoGradGuard guard;
  int64_t looked_at = 0;
  for (const MechanismInfo* info : Mechanisms()) {
    if (!info->Supports(Form::kCausal)) continue;
    const Ran ran = RunLayer(LayerOptions(info->name, Json::object(), Form::kCausal));
    try {
      const ImpliedWeights weights(ran.captured, 1);
      const at::Tensor all = weights.All();
      ++looked_at;
      for (const auto& [begin, count] :
           std::vector<std::pair<int64_t, int64_t>>{{0, 2}, {5, 4}, {2, 3}, {8, 1}, {4, 5}}) {
        const at::Tensor part = weights.Columns(begin, count);
        ExpectClose(part, all.narrow(2, begin, count), 1e-10,
                    info->name + " from " + std::to_string(begin), 1);
        EXPECT_EQ(part.narrow(1, 0, begin).abs().sum().item<double>(), 0) << info->name;
      }
    } catch (const Error& e) {
      ExpectContains(e.what(), {info->name});  // one that has no weights says so
    }
  }
  EXPECT_GE(looked_at, 15);
}

TEST(ImpliedWeights, LinearAttention) {
  for (const Form form : {Form::kBidirectional, Form::kCausal}) {
    const Ran ran = RunLayer(LayerOptions("linear", Json::object(), form));
    const at::Tensor w = ImpliedWeights(ran.captured, 1).All();
    const auto phi = [](const at::Tensor& x) { return at::elu(x) + 1; };
    for (int64_t h = 0; h < kHeads; ++h) {
      Matrix want(kLength, std::vector<double>(kLength, 0));
      for (int64_t t = 0; t < kLength; ++t) {
        for (int64_t s = 0; s < (form == Form::kCausal ? t + 1 : kLength); ++s)
          want[t][s] = Dot(phi(ran.captured.x[0][1][h][t]), phi(ran.captured.x[1][1][h][s]));
      }
      ExpectWeights(w[h], Normalised(want), 1e-6, FormName(form));
    }
  }
}

// P004 eq. 8: sum over latents of p(l|t) p(s|l), the second a softmax over the tokens seen.
TEST(ImpliedWeights, Latte) {
  const int64_t latents = 6, each = latents / kHeads;
  const Ran ran = RunLayer(LayerOptions("latte", Json{{"latents", latents}}, Form::kCausal));
  const at::Tensor w = ImpliedWeights(ran.captured, 0).All();
  for (int64_t h = 0; h < kHeads; ++h) {
    const at::Tensor q = ran.captured.x[0][0][h], k = ran.captured.x[1][0][h];
    Matrix want(kLength, std::vector<double>(kLength, 0));
    for (int64_t t = 0; t < kLength; ++t) {
      double read = 0;
      for (int64_t l = 0; l < each; ++l) read += std::exp(q[t][l].item<double>());
      for (int64_t l = 0; l < each; ++l) {
        double written = 0;
        for (int64_t s = 0; s <= t; ++s) written += std::exp(k[s][l].item<double>());
        for (int64_t s = 0; s <= t; ++s)
          want[t][s] +=
              std::exp(q[t][l].item<double>()) / read * std::exp(k[s][l].item<double>()) / written;
      }
    }
    ExpectWeights(w[h], want, 1e-10, "latte");
  }
}

// Every mechanism and all of its options: the definition, given the values that pick out one source
// at a time, is the same weights. Those whose keys are their values, and those with a learned
// memory (whose maps belong to the layer), have no such definition; the check against the layer's
// own output is in All.
TEST(ImpliedWeights, EveryMechanismAgreesWithItsDefinition) {
  int compared = 0, untied = 0, refused = 0;
  for (const MechanismInfo* info : Mechanisms()) {
    for (const Json& options : info->cases) {
      for (const Form form : {Form::kBidirectional, Form::kCausal}) {
        if (!info->Supports(form) || info->MakesLatents()) continue;
        const std::string what = StrCat(info->name, " ", options.dump(), " ", FormName(form));
        SCOPED_TRACE(what);
        AttentionLayerOptions layer = LayerOptions(info->name, options, form);
        if (!info->Make(options, layer.dims)->FormRefusal(form).empty()) continue;
        const Ran ran = RunLayer(layer);
        const Mechanism& core = ran.layer->mechanism();
        std::string refusal;
        at::Tensor w;
        const at::NoGradGuard guard;
        refusal = Thrown([&] { w = ImpliedWeights(ran.captured, 1).All(); });
        if (refusal != "no error") {
          const bool expected = core.SeesBatch() || options.value("filter", "") == "maxpool";
          EXPECT_TRUE(expected) << refusal;
          ++refused;
          continue;
        }
        size_t v = core.Projections().size();
        for (size_t i = 0; i < core.Projections().size(); ++i) {
          if (core.Projections()[i].name == "v") v = i;
        }
        if (ran.captured.core != &core || core.InitialMemory().defined() ||
            v == core.Projections().size()) {
          ++untied;
          continue;
        }
        std::vector<at::Tensor> x;
        for (const at::Tensor& t : ran.captured.x)
          x.push_back(t.size(0) == 1 ? t : t.narrow(0, 1, 1));
        for (int64_t s = 0; s < kLength; ++s) {
          x[v] = at::zeros_like(x[v]);
          x[v].select(2, s).fill_(1);
          const at::Tensor column = core.Definition(form, x, x);  // [1,H,T,d]
          ExpectClose(w.select(2, s), column[0].select(2, 0), 1e-5 + 10 * info->tolerance,
                      StrCat(what, ", source ", s), 1);
        }
        ++compared;
      }
    }
  }
  EXPECT_GT(compared, 60);
  EXPECT_GT(untied, 10);
  EXPECT_GE(refused, 2);
}

// Two attentions after each other, from the tensors that the layer had.
TEST(ImpliedWeights, LunaPacksAndUnpacks) {
  const Ran ran = RunLayer(LayerOptions("luna", Json{{"slots", 3}}, Form::kBidirectional));
  const CapturedLayer& c = ran.captured;
  const ImpliedWeights weights(c, 1);
  const at::Tensor w = weights.All();
  const auto& names = ran.layer->mechanism().Projections();
  ASSERT_EQ(names[0].name, "q");
  ASSERT_EQ(names[1].name, "pc");
  ASSERT_EQ(names[2].name, "pq");
  std::vector<Matrix> packing, unpacking;
  for (int64_t h = 0; h < kHeads; ++h) {
    Matrix p(3, std::vector<double>(kLength)), u(kLength, std::vector<double>(3));
    for (int64_t m = 0; m < 3; ++m) {
      for (int64_t s = 0; s < kLength; ++s)
        p[m][s] = std::exp(Dot(c.x[2][0][h][m], c.x[1][1][h][s]) / 2);
      for (int64_t t = 0; t < kLength; ++t)
        u[t][m] = std::exp(Dot(c.x[0][1][h][t], c.read[0][1][h][m]) / 2);
    }
    packing.push_back(Normalised(p));
    unpacking.push_back(Normalised(u));
    ExpectWeights(weights.Packing()[h], packing.back(), 1e-10, "packing");
    ExpectWeights(weights.Unpacking()[h], unpacking.back(), 1e-10, "unpacking");
  }
  Matrix want(kLength, std::vector<double>(kLength, 0));
  for (int64_t t = 0; t < kLength; ++t) {
    for (int64_t s = 0; s < kLength; ++s) {
      for (int64_t m = 0; m < 3; ++m)
        want[t][s] += unpacking[1][t][m] * (packing[0][m][s] + packing[1][m][s]) / 2;
    }
  }
  ExpectWeights(w[1], want, 1e-10, "both");
}

TEST(ImpliedWeights, PaddingIsNotSeen) {
  for (const char* mechanism : {"softmax", "latte", "abc_mlp", "conv_luna", "linformer"}) {
    const Ran ran = RunLayer(LayerOptions(mechanism, Json::object(), Form::kBidirectional),
                             {testing::Lengths({kLength, 5}), {}});
    EXPECT_EQ(ran.captured.RealQueries(1), 5);
    const at::Tensor w = ImpliedWeights(ran.captured, 1).All();
    EXPECT_EQ(w.narrow(2, 5, 4).abs().max().item<double>(), 0) << mechanism;
    EXPECT_EQ(w.narrow(1, 5, 4).abs().max().item<double>(), 0) << mechanism;
  }
}

TEST(ImpliedWeights, ColumnsArePartsOfTheWhole) {
  const Ran ran = RunLayer(LayerOptions("latte", Json{{"latents", 6}}, Form::kCausal));
  const ImpliedWeights weights(ran.captured, 1);
  const at::Tensor whole = weights.All();
  // 4 channels a head: 3 columns are a part of one copy, 7 more than one.
  for (const auto& range : std::vector<std::pair<int64_t, int64_t>>{{0, 3}, {2, 7}, {8, 1}})
    ExpectClose(weights.Columns(range.first, range.second),
                whole.narrow(2, range.first, range.second), 1e-13, StrCat(range.first));
}

TEST(ImpliedWeights, WhatIsNotLinearIsRefused) {
  const Ran ran = RunLayer(
      LayerOptions("conv_luna", Json{{"filter", "maxpool"}, {"kernel", 3}}, Form::kBidirectional));
  ExpectContains(Thrown([&] { ImpliedWeights(ran.captured, 0).All(); }),
                 {"not linear in its values", "filter=conv"});
  const Ran batch =
      RunLayer(LayerOptions("nystrom", Json{{"start", "batch"}}, Form::kBidirectional));
  ExpectContains(Thrown([&] { ImpliedWeights(batch.captured, 0).All(); }), {"start=head"});
}

// Weights that are not those of the layer do not pass.
TEST(ImpliedWeights, TheOutputIsTheCheck) {
  Ran ran = RunLayer(LayerOptions("linear", Json::object(), Form::kCausal));
  ran.captured.y = ran.captured.y * 1.01;
  ExpectContains(Thrown([&] { ImpliedWeights(ran.captured, 0).All(); }), {"misses its output"});
}

TEST(LayerCapture, OneAtATimeAndNothingWithout) {
  const LayerCapture capture;
  ExpectContains(Thrown([] { LayerCapture another; }), {"another one is active"});
}

}  // namespace
}  // namespace cistern
