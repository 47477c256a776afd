// Parts of layers as single sources have them: heads that together are not as wide as the model,
// RMSNorm, GEGLU, sinusoids in halves, perceiver's own heads, padding that reads.
#include <cmath>
#include <set>

#include "cistern/attention/testing_mechanisms.h"
#include "cistern/base/error.h"
#include "cistern/nn/block.h"
#include "cistern/nn/positions.h"
#include "cistern/ops/draws.h"

namespace cistern {
namespace {

using namespace cistern::testing;
using ops::ImplName;
using ops::ImplScope;

constexpr int64_t kModel = 10, kWide = 12, kLayerHeads = 2;

AttentionLayerOptions Options(const std::string& mechanism, const Json& options, Form form) {
  AttentionLayerOptions o;
  o.mechanism = mechanism;
  o.mechanism_options = options;
  o.dims.dim = kWide, o.dims.heads = kLayerHeads, o.dims.max_length = 64, o.dims.model = kModel;
  o.form = form;
  o.bias = true;
  return o;
}

template <class M>
std::shared_ptr<M> Ready(std::shared_ptr<M> module) {
  at::NoGradGuard guard;
  module->to(at::kDouble);
  module->eval();
  at::manual_seed(4);
  for (at::Tensor& p : module->parameters()) p.normal_(0, 0.5);
  return module;
}

Stream StreamOf(const at::Tensor& x, const ops::Mask& mask = {}) {
  return {x, mask, at::arange(x.size(1), at::kLong).unsqueeze(0)};
}

// Every mechanism without a memory: projections from D to another width, the core's definition,
// and back to D.
TEST(Widths, EveryMechanismIsItsDefinitionAtAnotherWidth) {
  int ran = 0;
  for (const MechanismInfo* info : Mechanisms()) {
    for (const Form form : {Form::kBidirectional, Form::kCausal, Form::kCross}) {
      if (!info->Supports(form)) continue;
      if (info->memory != MemoryUse::kNone) {
        if (!info->MakesLatents())
          ExpectContains(Thrown([&] { MakeMechanism(Options(info->name, {}, form)); }),
                         {info->name, "memory", "qkv_dim=12", "dim=10"});
        continue;
      }
      if (!info->verbs && form != Form::kBidirectional) continue;
      for (const Json& options : info->cases) {
        const auto core = info->Make(options, {kModel, 2, 64, 0, 0});
        if (!core->FormRefusal(form).empty()) continue;
        const auto layer = Ready(MakeAttentionLayer(Options(info->name, options, form)));
        at::NoGradGuard guard;
        const at::Tensor x = Normal({2, 7, kModel}),
                         queries = form == Form::kCross ? Normal({2, 5, kModel}) : x;
        const auto all = layer->named_parameters();
        const auto project = [&](const at::Tensor& y) {
          std::vector<at::Tensor> out;
          for (const Projection& p : layer->mechanism().Projections()) {
            const std::string map = (p.map.empty() ? p.name : p.map) + "_proj.";
            const at::Tensor* bias = all.find(map + "bias");  // a map may have none
            const at::Tensor given =
                p.normalised ? y / at::linalg_vector_norm(y, 2, {-1}, true) : y;
            at::Tensor z = at::matmul(given, all[map + "weight"].t());
            if (bias) z = z + *bias;
            out.push_back(
                z.view({2, y.size(1), p.heads > 0 ? p.heads : kLayerHeads, -1}).transpose(1, 2));
          }
          return out;
        };
        const at::Tensor heads = layer->mechanism().Definition(form, project(queries), project(x));
        ASSERT_EQ(heads.size(3), kWide / kLayerHeads) << info->name;
        const at::Tensor want =
            at::matmul(heads.transpose(1, 2).reshape({2, queries.size(1), kWide}),
                       all["o_proj.weight"].t()) +
            all["o_proj.bias"];
        State state = layer->EmptyState(2, x.options());
        at::Tensor got;
        if (form == Form::kBidirectional) got = layer->Bidirectional(StreamOf(x)).tokens;
        if (form == Form::kCausal) got = layer->Extend(StreamOf(x), state);
        if (form == Form::kCross) {
          layer->Write(StreamOf(x), state);
          got = layer->Read(StreamOf(queries), state);
        }
        ExpectClose(got, want, 1e-11 * std::max(1.0, info->tolerance / 1e-6),
                    info->name + options.dump() + FormName(form));
        ++ran;
      }
    }
  }
  EXPECT_GT(ran, 40);
}

TEST(Norms, RmsByItsFormula) {
  const auto norm = Ready(std::make_shared<LayerNorm>(5, 1e-3, NormKind::kRms));
  EXPECT_EQ(norm->parameters().size(), 1u);
  const at::Tensor x = Normal({3, 5}), got = norm->Forward(x);
  for (int64_t r = 0; r < 3; ++r) {
    double sum = 0;
    for (int64_t i = 0; i < 5; ++i) sum += std::pow(x[r][i].item<double>(), 2);
    for (int64_t i = 0; i < 5; ++i) {
      EXPECT_NEAR(
          got[r][i].item<double>(),
          x[r][i].item<double>() / std::sqrt(sum / 5 + 1e-3) * norm->weight[i].item<double>(),
          1e-14);
    }
  }
}

TEST(FeedForward, GegluByItsFormula) {
  const auto ffn = Ready(std::make_shared<FeedForward>(4, 3, Activation::kGeglu, true, 0.02, 0.02));
  const auto p = ffn->named_parameters();
  EXPECT_EQ(p["up_proj.weight"].sizes(), at::IntArrayRef({6, 4}));
  EXPECT_EQ(p["down_proj.weight"].sizes(), at::IntArrayRef({4, 3}));
  const at::Tensor x = Normal({4}), got = (ffn->Forward(x.unsqueeze(0), x.unsqueeze(0)) - x)[0];
  const auto row = [&](int64_t i) {
    return (p["up_proj.weight"][i] * x).sum().item<double>() + p["up_proj.bias"][i].item<double>();
  };
  for (int64_t o = 0; o < 4; ++o) {
    double want = p["down_proj.bias"][o].item<double>();
    for (int64_t i = 0; i < 3; ++i) {
      const double gate = row(3 + i), gelu = gate * 0.5 * (1 + std::erf(gate / std::sqrt(2.0)));
      want += p["down_proj.weight"][o][i].item<double>() * row(i) * gelu;
    }
    EXPECT_NEAR(got[o].item<double>(), want, 1e-13);
  }
}

// fairseq's: angles t 10000^(-i/(D/2 - 1)), all sines, then all cosines.
TEST(Positions, SinusoidsInHalvesByTheirFormula) {
  const PositionEmbedding embedding(PositionKind::kSinusoidalHalves, 6, 4, 0.02);
  const at::Tensor positions = at::tensor({0, 3, 1000}, at::kLong).unsqueeze(0),
                   got = embedding.Forward(at::zeros({1, 3, 6}, at::kDouble), positions);
  for (int64_t t = 0; t < 3; ++t) {
    for (int64_t i = 0; i < 3; ++i) {
      const double angle =
          double(positions[0][t].item<int64_t>()) * std::pow(10000.0, -double(i) / 2);
      EXPECT_NEAR(got[0][t][i].item<double>(), std::sin(angle), 1e-12);
      EXPECT_NEAR(got[0][t][3 + i].item<double>(), std::cos(angle), 1e-12);
    }
  }
  ExpectContains(Thrown([] { PositionEmbedding(PositionKind::kSinusoidalHalves, 5, 4, 0.02); }),
                 {"sinusoidal", "even", "5"});
}

// lucidrains' perceiver: one head across, of a width of its own.
TEST(Latents, CrossAttentionMayHaveHeadsOfItsOwn) {
  at::NoGradGuard guard;
  for (const bool mapped : {true, false}) {
    BlockOptions o;
    const int64_t width = mapped ? 7 : kModel;
    o.attention = Options("perceiver",
                          {{"latents", 3},
                           {"heads", 1},
                           {"head_dim", width},
                           {"queries", mapped ? "mapped" : "latents"}},
                          Form::kBidirectional);
    o.attention.dims.dim = kModel, o.attention.dims.model = 0;
    o.norm = NormPlace::kPost;
    const auto block = Ready(MakeBlock(o));
    const auto p = block->named_parameters();
    EXPECT_EQ(p.contains("attention.q_proj.weight"), mapped);
    EXPECT_EQ(p["attention.k_proj.weight"].sizes(), at::IntArrayRef({width, kModel}));
    EXPECT_EQ(p["attention.o_proj.weight"].sizes(), at::IntArrayRef({kModel, width}));
    const auto map = [&](const std::string& name, const at::Tensor& y) {
      return at::matmul(y, p["attention." + name + ".weight"].t()) +
             p["attention." + name + ".bias"];
    };
    const at::Tensor x = Normal({2, 5, kModel}), latents = p["attention.core.latents"];
    const at::Tensor q = mapped ? map("q_proj", latents) : latents;
    const at::Tensor scores =
        at::matmul(q, map("k_proj", x).transpose(1, 2)) / std::sqrt(double(width));
    at::Tensor z = latents + map("o_proj", at::matmul(at::softmax(scores, 2), map("v_proj", x)));
    const auto norm = [&](const std::string& name, const at::Tensor& y) {
      return at::layer_norm(y, {kModel}, p[name + ".weight"], p[name + ".bias"]);
    };
    z = norm("attention_norm", z);
    const at::Tensor hidden = at::gelu(at::matmul(z, p["ffn.up_proj.weight"].t()));
    z = norm("ffn_norm", z + at::matmul(hidden, p["ffn.down_proj.weight"].t()));
    ExpectClose(block->Bidirectional(StreamOf(x)).x, z, 1e-12, mapped ? "mapped" : "latents");
  }
  ExpectContains(Thrown([&] {
                   MakeMechanism(Options("perceiver", {{"heads", 5}}, Form::kBidirectional));
                 }),
                 {"[perceiver]", "heads=5", "12", "head_dim"});
  ExpectContains(
      Thrown([&] {
        MakeMechanism(Options("perceiver", {{"queries", "latents"}}, Form::kBidirectional));
      }),
      {"[perceiver]", "queries=latents", "10", "12"});
}

// Long Range Arena: padding attends to the tokens, and no one to it. Where a mechanism has no such
// reading it is refused, never computed in another way.
TEST(Padding, ReadsTheTokensWhereItIsToldTo) {
  at::NoGradGuard guard;
  std::set<std::string> ran, refused;
  for (const MechanismInfo* info : Mechanisms()) {
    if (!info->Supports(Form::kBidirectional) || info->MakesLatents()) continue;
    for (const Json& options : info->cases) {
      AttentionLayerOptions o = Options(info->name, options, Form::kBidirectional);
      if (info->memory != MemoryUse::kNone) o.dims.dim = kModel, o.dims.model = 0;
      if (!info->Make(options, o.dims)->FormRefusal(Form::kBidirectional).empty()) continue;
      std::shared_ptr<AttentionLayer> layer;
      try {
        layer = Ready(MakeAttentionLayer(o));
      } catch (const UsageError&) {  // options of tokens as they are, where the layer is wider
        o.dims.dim = kModel, o.dims.model = 0;
        layer = Ready(MakeAttentionLayer(o));
      }
      const at::Tensor x = Normal({1, 9, kModel});
      Stream stream = StreamOf(x, {Lengths({4}), {}});
      const at::Tensor masked = layer->Bidirectional(stream).tokens;
      stream.padding_reads = true;
      at::Tensor got;
      try {
        got = layer->Bidirectional(stream).tokens;
      } catch (const UsageError& e) {
        ExpectContains(e.what(), {"padding=reads", info->name, "use softmax"});
        refused.insert(info->name);
        continue;
      }
      ran.insert(info->name);
      const auto all = layer->named_parameters();
      const auto project = [&](const at::Tensor& y) {
        std::vector<at::Tensor> out;
        for (const Projection& p : layer->mechanism().Projections()) {
          const std::string map = (p.map.empty() ? p.name : p.map) + "_proj.";
          at::Tensor z = p.normalised ? y / y.norm(2, {2}, true) : y;
          if (!p.identity) {
            z = at::matmul(z, all[map + "weight"].t());
            if (all.contains(map + "bias")) z = z + all[map + "bias"];
          }
          out.push_back(
              z.view({1, y.size(1), p.heads > 0 ? p.heads : kLayerHeads, -1}).transpose(1, 2));
        }
        return out;
      };
      const at::Tensor heads =
          layer->mechanism().Definition(Form::kCross, project(x), project(x.narrow(1, 0, 4)));
      const at::Tensor want =
          at::matmul(heads.transpose(1, 2).reshape({1, 9, -1}), all["o_proj.weight"].t()) +
          all["o_proj.bias"];
      const std::string what = info->name + " " + options.dump();
      const double wide = std::max(1.0, info->tolerance / 1e-6);
      ExpectClose(got, want, 1e-11 * wide, what);
      ExpectClose(masked.narrow(1, 0, 4), want.narrow(1, 0, 4), 1e-11 * wide, what + ": tokens");
      ExpectClose(masked.narrow(1, 4, 5), all["o_proj.bias"].expand({1, 5, -1}), 1e-15, what);
    }
  }
  for (const char* name : {"softmax", "reuse", "latte", "linear", "abc_mlp", "performer", "t2r"})
    EXPECT_TRUE(ran.count(name)) << name;
  for (const char* name : {"window", "dilated", "nystrom", "luna", "conv_luna", "abc_cluster"})
    EXPECT_TRUE(refused.count(name)) << name;
}

// P000's code has no masks: padding is packed, and reads.
TEST(Padding, ConvLunaWithoutMasksTakesItForTokens) {
  at::NoGradGuard guard;
  for (const char* name : {"conv_luna", "only_scaling", "only_filtering"}) {
    AttentionLayerOptions o = Options(name, {{"slots", 3}, {"mask", "none"}}, Form::kBidirectional);
    o.dims.dim = kModel, o.dims.model = 0;
    const auto layer = Ready(MakeAttentionLayer(o));
    const at::Tensor x = Normal({2, 9, kModel});
    const auto masked = layer->Bidirectional(StreamOf(x, {Lengths({9, 4}), {}})),
               whole = layer->Bidirectional(StreamOf(x));
    EXPECT_TRUE(at::equal(masked.tokens, whole.tokens)) << name;
    EXPECT_TRUE(at::equal(masked.packed, whole.packed)) << name;
    o.mechanism_options["mask"] = "tokens";
    EXPECT_GT(RelRms(Ready(MakeAttentionLayer(o))
                         ->Bidirectional(StreamOf(x, {Lengths({9, 4}), {}}))
                         .packed[1],
                     whole.packed[1]),
              1e-3)
        << name;
  }
}

TEST(MemoryStream, TheInitialMemoryIsDroppedInTraining) {
  AttentionLayerOptions o =
      Options("luna", {{"slots", 200}, {"dropout", 0.25}}, Form::kBidirectional);
  o.dims.dim = kModel, o.dims.model = 0;
  const auto layer = Ready(MakeAttentionLayer(o));
  const Mechanism& core = layer->mechanism();
  const at::Tensor memory = layer->named_parameters()["core.memory"];
  EXPECT_TRUE(at::equal(core.InitialMemory(), memory));
  layer->train();
  at::manual_seed(1);
  const at::Tensor dropped = core.InitialMemory(), kept = dropped != 0;
  EXPECT_NEAR(kept.to(at::kDouble).mean().item<double>(), 0.75, 0.04);  // of 2,000: 4 deviations
  ExpectClose(dropped, memory / 0.75 * kept, 1e-15, "what is kept");
  // Rows by draws of their own, by their number in the whole batch.
  const auto from = [&](int64_t first_row, int64_t rows) {
    const ops::DrawScope draws(7, first_row);
    return layer->InitialMemory(rows);
  };
  const at::Tensor all = from(0, 4);
  EXPECT_FALSE(at::equal(all[0], all[1]));
  EXPECT_TRUE(at::equal(all.narrow(0, 2, 2), from(2, 2)));
}

}  // namespace
}  // namespace cistern
