// Attention layers that read another stream than their own: every mechanism with a cross form.
#include "cistern/attention/testing_mechanisms.h"
#include "cistern/base/error.h"
#include "cistern/nn/block.h"

namespace cistern {
namespace {

using namespace cistern::testing;
using ops::ImplName;
using ops::ImplScope;

constexpr int64_t kModel = 12;

AttentionLayerOptions CrossOptions(const MechanismInfo& info, const Json& options) {
  AttentionLayerOptions o;
  o.mechanism = info.name;
  o.mechanism_options = options;
  o.dims.dim = kModel, o.dims.heads = 2, o.dims.max_length = 64;
  o.form = Form::kCross;
  o.bias = true;
  o.init_std = o.out_std = 0.5;
  return o;
}

std::shared_ptr<AttentionLayer> Make(const AttentionLayerOptions& options) {
  at::manual_seed(4);
  const auto layer = MakeAttentionLayer(options);
  at::NoGradGuard guard;
  layer->to(at::kDouble);
  layer->eval();
  for (at::Tensor& p : layer->parameters()) p.normal_(0, 0.5);
  return layer;
}

Stream MakeStream(const at::Tensor& x, const ops::Mask& mask = {}) {
  return {x, mask, at::arange(x.size(1), at::kLong).unsqueeze(0)};
}

at::Tensor Cross(AttentionLayer& layer, const at::Tensor& target, const at::Tensor& source,
                 const ops::Mask& mask = {}) {
  State state = layer.EmptyState(source.size(0), source.options().requires_grad(false));
  layer.Write(MakeStream(source, mask), state);
  return layer.Read(MakeStream(target), state);
}

template <class F>
void ForEachCrossLayer(F&& f) {
  for (const MechanismInfo* info : Mechanisms()) {
    if (!info->Supports(Form::kCross) || !info->verbs) continue;
    for (const Json& options : info->cases) {
      const AttentionLayerOptions o = CrossOptions(*info, options);
      if (!info->Make(options, o.dims)->FormRefusal(Form::kCross).empty()) continue;
      const auto layer = Make(o);
      for (const ops::Impl impl : kImpls) {
        ImplScope scope(impl);
        f(*layer, std::max(1.0, info->tolerance / 1e-6),
          info->name + options.dump() + " " + ImplName(impl));
      }
    }
  }
}

TEST(CrossAttention, IsTheDefinitionOfTheProjections) {
  ForEachCrossLayer([](AttentionLayer& layer, double wide, const std::string& what) {
    // Those of a memory are projected from it (nn/memory_stream_test.cc).
    for (const Projection& p : layer.mechanism().Projections()) {
      if (!p.OfTokens()) return;
    }
    at::NoGradGuard guard;
    const at::Tensor target = Normal({2, 5, kModel}), source = Normal({2, 9, kModel});
    const auto all = layer.named_parameters();
    const auto project = [&](const at::Tensor& x) {
      std::vector<at::Tensor> out;
      for (const Projection& p : layer.mechanism().Projections()) {
        const at::Tensor* bias = all.find(p.name + "_proj.bias");  // a map may have none
        EXPECT_EQ(bias != nullptr, !p.identity && p.bias.value_or(true)) << what << " " << p.name;
        const at::Tensor y = p.identity ? x
                                        : at::linear(x, all[p.name + "_proj.weight"],
                                                     bias ? std::optional(*bias) : std::nullopt);
        out.push_back(
            y.view({x.size(0), x.size(1), p.heads > 0 ? p.heads : 2, -1}).transpose(1, 2));
      }
      return out;
    };
    const at::Tensor heads =
        layer.mechanism().Definition(Form::kCross, project(target), project(source));
    const at::Tensor want = at::linear(heads.transpose(1, 2).reshape({2, 5, kModel}),
                                       all["o_proj.weight"], all["o_proj.bias"]);
    ExpectClose(Cross(layer, target, source), want, 1e-11 * wide, what);
  });
}

TEST(CrossAttention, PaddingOfTheSourceIsNotSeenAndRowsAreAlone) {
  ForEachCrossLayer([](AttentionLayer& layer, double wide, const std::string& what) {
    const at::Tensor target = Normal({3, 5, kModel}), source = Leaf(Normal({3, 9, kModel})),
                     g = Normal({3, 5, kModel});
    const std::vector<int64_t> lengths = {9, 4, 1};
    const at::Tensor got = Cross(layer, target, source, {Lengths(lengths), {}});
    const at::Tensor gradient = Gradients((got * g).sum(), {source})[0];
    for (int64_t b = 0; b < 3; ++b) {
      const at::Tensor alone = Leaf(source.narrow(0, b, 1).narrow(1, 0, lengths[size_t(b)]));
      const at::Tensor want = Cross(layer, target.narrow(0, b, 1), alone);
      ExpectClose(got.narrow(0, b, 1), want, 1e-11 * wide, what);
      const at::Tensor want_g = Gradients((want * g.narrow(0, b, 1)).sum(), {alone})[0];
      const at::Tensor row = gradient.narrow(0, b, 1), real = row.narrow(1, 0, lengths[size_t(b)]);
      EXPECT_LE((real - want_g).norm().item<double>(),
                1e-9 * wide * (want_g.norm().item<double>() + 1))
          << what;
      EXPECT_EQ(
          row.narrow(1, lengths[size_t(b)], 9 - lengths[size_t(b)]).abs().sum().item<double>(), 0)
          << what;
    }
  });
}

TEST(CrossAttention, ReadsAreIndependentAndLeaveTheStateAsItIs) {
  ForEachCrossLayer([](AttentionLayer& layer, double wide, const std::string& what) {
    at::NoGradGuard guard;
    const at::Tensor target = Normal({2, 7, kModel}), source = Normal({2, 9, kModel});
    const at::Tensor whole = Cross(layer, target, source);
    State state = layer.EmptyState(2, source.options());
    layer.Write(MakeStream(source), state);
    for (int64_t t = 0; t < 7; ++t)
      ExpectClose(layer.Read(MakeStream(target.narrow(1, t, 1)), state), whole.narrow(1, t, 1),
                  1e-11 * wide, what);
  });
}

TEST(CrossAttention, RefusesWithAReason) {
  ExpectContains(Thrown([] { Make(CrossOptions(FindMechanism("gated_slots"), Json::object())); }),
                 {"gated_slots", "no cross"});
}

TEST(CrossAttention, AMapOfTheSourceAndTheMemoryNeedsOneWidth) {
  const auto options = [](const char* sharing, int64_t width) {
    AttentionLayerOptions o = CrossOptions(FindMechanism("luna"), Json{{"sharing", sharing}});
    o.source_dim = width;
    return o;
  };
  at::NoGradGuard guard;
  const at::Tensor target = Normal({2, 5, kModel});
  for (const char* sharing : {"all", "query_key"}) {
    ExpectContains(Thrown([&] { Make(options(sharing, 16)); }),
                   {"[luna]", "width 16", "dim=12", "sharing=none"});
    Cross(*Make(options(sharing, kModel)), target, Normal({2, 9, kModel}));
  }
  EXPECT_EQ(Cross(*Make(options("none", 16)), target, Normal({2, 9, 16})).sizes(), target.sizes());
}

TEST(CrossAttention, BlocksReadBetweenAttentionAndFeedForward) {
  for (const std::string norm : {"pre", "post"}) {
    BlockOptions o;
    o.attention = CrossOptions(FindMechanism("latte"), Json{{"latents", 4}});
    o.attention.form = Form::kCausal;
    o.cross = CrossOptions(FindMechanism("softmax"), Json::object());
    o.norm = ValueOf(norm, NormPlaces());
    const auto block = std::make_shared<Block>(o);
    at::NoGradGuard guard;
    block->to(at::kDouble);
    block->eval();
    for (at::Tensor& p : block->parameters()) p.normal_(0, 0.5);
    const at::Tensor x = Normal({2, 6, kModel}), source = Normal({2, 4, kModel});
    State state = block->EmptyState(2, x.options()), own = state.Clone(),
          written = block->cross().EmptyState(2, x.options());
    block->cross().Write(MakeStream(source), written);
    const auto p = block->named_parameters();
    const auto sublayer = [&](const at::Tensor& y, const std::string& name, auto&& f) {
      const auto normed = [&](const at::Tensor& z) {
        return at::layer_norm(z, {kModel}, p[name + ".weight"], p[name + ".bias"], 1e-5);
      };
      return norm == "pre" ? y + f(normed(y)) : normed(y + f(y));
    };
    at::Tensor want = sublayer(x, "attention_norm", [&](const at::Tensor& y) {
      return const_cast<AttentionLayer&>(block->attention()).Extend(MakeStream(y), own);
    });
    want = sublayer(want, "cross_attention_norm", [&](const at::Tensor& y) {
      return block->cross().Read(MakeStream(y), written);
    });
    want = sublayer(want, "ffn_norm", [&](const at::Tensor& y) {
      return at::linear(at::gelu(at::linear(y, p["ffn.up_proj.weight"])),
                        p["ffn.down_proj.weight"]);
    });
    ExpectClose(block->Extend(MakeStream(x), state, &written).x, want, 1e-12, norm);
    ExpectContains(Thrown([&] { block->Extend(MakeStream(x), state); }),
                   {"cross attention", "source"});
  }
}

}  // namespace
}  // namespace cistern
