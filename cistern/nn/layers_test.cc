// The attention layer with and without convolution, positions, blocks.
#include <ATen/autocast_mode.h>

#include <set>

#include "cistern/attention/testing_mechanisms.h"
#include "cistern/base/error.h"
#include "cistern/nn/block.h"
#include "cistern/nn/positions.h"
#include "cistern/ops/exact_attention.h"
#include "cistern/ops/rotary.h"

namespace cistern {
namespace {

using namespace cistern::testing;
using ops::ImplName;
using ops::ImplScope;

constexpr int64_t kModel = 12;

AttentionLayerOptions LayerOptions(const std::string& mechanism, Form form, int64_t conv,
                                   const std::string& positions = "none") {
  AttentionLayerOptions o;
  o.mechanism = mechanism;
  for (const MechanismInfo* info : Mechanisms()) {
    if (info->name == mechanism) o.mechanism_options = info->cases[0];
  }
  o.dims.dim = kModel, o.dims.heads = 2, o.dims.max_length = 64;
  o.form = form;
  o.conv = conv;
  o.positions = ValueOf(positions, PositionKinds());
  o.bias = true;
  o.init_std = o.out_std = 0.5;
  return o;
}

// 1e-12, wider where a mechanism declares that it amplifies rounding.
double Tolerance(const MechanismInfo& info, double base = 1e-12) {
  return base * std::max(1.0, info.tolerance / 1e-6);
}

// In double and in evaluation, every parameter random.
template <class M>
std::shared_ptr<M> InDouble(std::shared_ptr<M> module) {
  at::NoGradGuard guard;
  module->to(at::kDouble);
  module->eval();
  for (at::Tensor& p : module->parameters()) p.normal_(0, 0.5);
  return module;
}

at::Tensor Positions(int64_t begin, int64_t count) {
  return at::arange(begin, begin + count, at::kLong).unsqueeze(0);
}

Stream MakeStream(const at::Tensor& x, const ops::Mask& mask = {}, int64_t begin = 0) {
  return {x, mask, Positions(begin, x.size(1))};
}

// All mechanisms x implementations x (plain, convolution, rotary where it fits).
template <class F>
void ForEachLayer(F&& f) {
  for (const MechanismInfo* info : Mechanisms()) {
    for (const auto& [conv, positions] : std::vector<std::pair<int64_t, std::string>>{
             {0, "none"}, {4, "none"}, {1, "none"}, {0, "rotary"}, {3, "rotary"}}) {
      if (!info->Fits(ValueOf(positions, PositionKinds()))) continue;
      if (!info->Supports(Form::kCausal)) continue;
      at::manual_seed(4);
      const auto layer =
          InDouble(MakeAttentionLayer(LayerOptions(info->name, Form::kCausal, conv, positions)));
      for (const ops::Impl impl : kImpls) {
        ImplScope scope(impl);
        f(*layer,
          info->name + " conv " + std::to_string(conv) + " " + positions + " " + ImplName(impl));
      }
    }
  }
}

at::Tensor ExtendLayer(AttentionLayer& layer, const at::Tensor& x, const std::vector<int64_t>& cuts,
                       const ops::Mask& mask = {}, const at::Tensor& positions = {}) {
  State state = layer.EmptyState(x.size(0), x.options().requires_grad(false));
  std::vector<at::Tensor> outs;
  for (size_t i = 0; i + 1 < cuts.size(); ++i) {
    const int64_t begin = cuts[i], count = cuts[i + 1] - begin;
    Stream s = MakeStream(x.narrow(1, begin, count), {}, begin);
    if (positions.defined()) s.positions = positions.narrow(1, begin, count);
    if (mask.lengths) s.mask.lengths = (*mask.lengths - begin).clamp(0, count);
    if (mask.starts) s.mask.starts = mask.starts->narrow(1, begin, count);
    outs.push_back(layer.Extend(s, state));
  }
  return at::cat(outs, 1);
}

TEST(FeedForward, DropoutComesAfterTheActivation) {
  at::NoGradGuard guard;
  const auto ffn = std::make_shared<FeedForward>(4, 4, Activation::kRelu, true, 0.02, 0.02, 0.25);
  auto p = ffn->named_parameters();
  p["up_proj.weight"].zero_();
  p["up_proj.bias"].copy_(at::tensor({-1.0, 1.0, 3.0, -2.0}));  // relu leaves 0, 1, 3, 0
  p["down_proj.weight"].copy_(at::eye(4));
  p["down_proj.bias"].fill_(10);
  const at::Tensor x = at::zeros({1, 10'000, 4}),
                   kept = at::tensor({10.0f, 11.0f, 13.0f, 10.0f}).expand_as(x);
  ffn->eval();
  ExpectSameBits(ffn->Forward(x, x), kept, "evaluation");
  ffn->train();
  at::manual_seed(1);
  const at::Tensor got = ffn->Forward(x, x) - 10, scaled = (kept - 10) / 0.75;
  EXPECT_LT(at::minimum((got - scaled).abs(), got.abs()).max().item<double>(), 1e-5)
      << "each is left out or grows by 1 / 0.75";
  for (const int64_t channel : {1, 2})
    EXPECT_NEAR((got.select(2, channel) == 0).to(at::kDouble).mean().item<double>(), 0.25, 0.02)
        << "channel " << channel;
}

TEST(AttentionLayer, SplitAnywhereEqualsWholeWithItsGradients) {
  ForEachLayer([](AttentionLayer& layer, const std::string& what) {
    const int64_t T = 37;
    const at::Tensor x = Leaf(Normal({2, T, kModel})), g = Normal({2, T, kModel});
    std::vector<at::Tensor> inputs = layer.parameters();
    inputs.push_back(x);
    const at::Tensor whole = ExtendLayer(layer, x, {0, T});
    const auto want = Gradients((whole * g).sum(), inputs);
    for (const int64_t cut : {0, 1, 2, 3, 4, 16, 36, 37, -1}) {
      const at::Tensor got =
          ExtendLayer(layer, x, cut < 0 ? EachToken(T) : std::vector<int64_t>{0, cut, T});
      ExpectClose(got, whole, Tolerance(layer.mechanism().info()),
                  what + " cut " + std::to_string(cut));
      const auto got_g = Gradients((got * g).sum(), inputs);
      for (size_t i = 0; i < inputs.size(); ++i) {
        // Softmax does not see a common shift of its keys, so the gradient of their bias is zero up
        // to rounding: hence the absolute 1e-10.
        EXPECT_LE(
            (got_g[i] - want[i]).norm().item<double>(),
            Tolerance(layer.mechanism().info(), 1e-11) * want[i].norm().item<double>() + 1e-10)
            << what << " gradient " << i;
      }
    }
    at::NoGradGuard guard;
    for (int64_t cut = 0; cut <= T; ++cut)
      ExpectClose(ExtendLayer(layer, x, {0, cut, T}), whole, Tolerance(layer.mechanism().info()),
                  what + " without gradient");
    ExpectClose(ExtendLayer(layer, x, EachToken(T)), whole, Tolerance(layer.mechanism().info()),
                what + " decoding");
  });
}

TEST(AttentionLayer, LastRowIsBidirectionalOverThePrefix) {
  for (const MechanismInfo* info : Mechanisms()) {
    if (!info->causal_is_prefix || !info->Supports(Form::kCausal) ||
        !info->Supports(Form::kBidirectional))
      continue;
    for (const std::string& positions : info->PositionNames()) {
      if (positions == "relative") continue;  // the forms have other buckets
      auto make = [&](Form form) {
        at::manual_seed(4);
        return InDouble(MakeAttentionLayer(LayerOptions(info->name, form, 0, positions)));
      };
      const auto causal = make(Form::kCausal), both = make(Form::kBidirectional);
      const at::Tensor x = Normal({2, 15, kModel}), rows = ExtendLayer(*causal, x, {0, 15});
      for (int64_t t = 0; t < 15; ++t) {
        ExpectClose(rows.select(1, t),
                    both->Bidirectional(MakeStream(x.narrow(1, 0, t + 1))).tokens.select(1, t),
                    Tolerance(*info), info->name + " " + positions);
      }
    }
  }
}

TEST(AttentionLayer, PaddingAndPackedRows) {
  ForEachLayer([](AttentionLayer& layer, const std::string& what) {
    const int64_t T = 19;
    const at::Tensor x = Leaf(Normal({3, T, kModel})), g = Normal({3, T, kModel});
    const ops::Mask mask = {Lengths({T, 13, 0}),
                            Starts(3, T, {{0, 0}, {0, 5}, {0, 6}, {1, 8}, {2, 0}})};
    const std::vector<Piece> documents = {{0, 0, 5}, {0, 5, 1}, {0, 6, 13}, {1, 0, 8}, {1, 8, 5}};
    at::Tensor positions = at::zeros({3, T}, at::kLong), real = at::zeros({3, T, 1}, at::kDouble);
    for (const Piece& d : documents) {
      positions[d.row].narrow(0, d.begin, d.count).copy_(at::arange(d.count, at::kLong));
      real[d.row].narrow(0, d.begin, d.count).fill_(1);
    }
    const auto part = [](const at::Tensor& whole, const Piece& d) {
      return whole.narrow(0, d.row, 1).narrow(1, d.begin, d.count);
    };
    std::vector<at::Tensor> want, want_g;  // each document alone
    for (const Piece& d : documents) {
      const at::Tensor alone = Leaf(part(x, d)), y = ExtendLayer(layer, alone, {0, d.count});
      want.push_back(y.detach());
      want_g.push_back(Gradients((y * part(g, d)).sum(), {alone})[0]);
    }
    for (int cut = -1; cut <= T; ++cut) {
      const at::Tensor got = ExtendLayer(
          layer, x, cut < 0 ? EachToken(T) : std::vector<int64_t>{0, cut, T}, mask, positions);
      const at::Tensor got_g = Gradients((got * g * real).sum(), {x})[0];
      const std::string name = what + " cut " + std::to_string(cut);
      EXPECT_EQ((got_g * (1 - real)).abs().sum().item<double>(), 0) << name;
      for (size_t i = 0; i < documents.size(); ++i) {
        ExpectClose(part(got, documents[i]), want[i], Tolerance(layer.mechanism().info()), name);
        ExpectClose(part(got_g, documents[i]), want_g[i],
                    Tolerance(layer.mechanism().info(), 1e-11), name + " gradient");
      }
    }
  });
}

// Products in bfloat16 while it lives, as in training with --dtype bfloat16.
class BFloat16Products {
 public:
  BFloat16Products() {
    at::autocast::set_autocast_dtype(at::kCPU, at::kBFloat16);
    at::autocast::set_autocast_enabled(at::kCPU, true);
  }
  ~BFloat16Products() {
    at::autocast::clear_cache();
    at::autocast::set_autocast_enabled(at::kCPU, false);
  }
};

TEST(AttentionLayer, BFloat16RoundsTheLinearMapsAlone) {
  for (const MechanismInfo* info : Mechanisms()) {
    const Form form = info->Supports(Form::kCausal) ? Form::kCausal : Form::kBidirectional;
    at::manual_seed(4);
    AttentionLayerOptions o = LayerOptions(info->name, form, 0);
    // Six features of relu are nearly all zero for some tokens, whose sums rounding decides.
    if (info->name == "t2r") o.mechanism_options["features"] = 64;
    const auto layer = InDouble(MakeAttentionLayer(o));
    layer->to(at::kFloat);
    const at::Tensor x = Leaf(Normal({2, 19, kModel}).to(at::kFloat)),
                     g = Normal({2, 19, kModel}).to(at::kFloat);
    const ops::Mask mask = {Lengths({19, 7}), {}};
    const auto run = [&] {
      State state = layer->EmptyState(2, x.options().requires_grad(false));
      const at::Tensor y = form == Form::kCausal ? layer->Extend(MakeStream(x, mask), state)
                                                 : layer->Bidirectional(MakeStream(x, mask)).tokens;
      return std::vector<at::Tensor>{y.to(at::kFloat), Gradients((y * g).sum(), {x})[0]};
    };
    const auto want = run();
    const BFloat16Products products;
    const auto got = run();
    ExpectClose(got[0], want[0], 0.05, info->name);
    ExpectClose(got[1], want[1], 0.15, info->name + " gradient");
    EXPECT_GT((got[0] - want[0]).abs().max().item<double>(), 0) << info->name;
  }
}

// A sequence that begins in one type and goes on in another: in pieces, token by token, and across
// documents.
TEST(AttentionLayer, BFloat16GoesOnFromFloatAndBack) {
  const int64_t T = 30;
  for (const std::string name :
       {"softmax", "window", "dilated", "latte", "efficient", "abc_mlp", "linear", "rfa",
        "window:1+latte:1", "softmax:1+gated_slots:1", "linformer", "luna_causal",
        "abc_compressive", "local_to_global"}) {
    at::manual_seed(4);
    const auto layer = InDouble(MakeAttentionLayer(LayerOptions(name, Form::kCausal, 0)));
    layer->to(at::kFloat);
    const at::Tensor x = Normal({2, T, kModel}).to(at::kFloat);
    const at::NoGradGuard no_gradients;
    const auto run = [&](const std::vector<int64_t>& ends, bool first, bool others) {
      State state = layer->EmptyState(2, x.options());
      std::vector<at::Tensor> pieces;
      int64_t begin = 0;
      for (const int64_t end : ends) {
        std::optional<BFloat16Products> products;
        if (begin == 0 ? first : others) products.emplace();
        const at::Tensor piece = x.narrow(1, begin, end - begin);
        pieces.push_back(layer->Extend(MakeStream(piece, {}), state).to(at::kFloat));
        begin = end;
      }
      return at::cat(pieces, 1);
    };
    const at::Tensor want = run({T}, false, false);
    ExpectClose(run({T}, true, true), want, 0.05, name);
    for (const auto& ends :
         {std::vector<int64_t>{13, 25, T}, std::vector<int64_t>{27, 28, 29, T}}) {
      ExpectClose(run(ends, true, true), want, 0.05, name + " bfloat16");
      ExpectClose(run(ends, true, false), want, 0.05, name + " bfloat16, then float");
      ExpectClose(run(ends, false, true), want, 0.05, name + " float, then bfloat16");
    }
    at::Tensor starts = at::zeros({2, T}, at::kBool);
    starts.select(1, 0).fill_(true), starts.select(1, 11).fill_(true);
    const auto packed = [&] {
      State state = layer->EmptyState(2, x.options());
      return layer->Extend(MakeStream(x, {{}, starts}), state).to(at::kFloat);
    };
    const at::Tensor want_packed = packed();
    const BFloat16Products products;
    ExpectClose(packed(), want_packed, 0.05, name + " documents");
  }
}

// The bidirectional form, with padding: what takes bfloat16 gives it back, near what float gives.
TEST(AttentionLayer, BFloat16BothWays) {
  for (const std::string name :
       {"latte", "efficient", "abc_mlp", "local_to_global", "linear", "abc_compressive", "rfa",
        "window:1+latte:1", "softmax", "window", "dilated", "luna", "conv_luna", "set_transformer",
        "reuse", "nystrom", "t2r", "linformer"}) {
    at::manual_seed(4);
    const auto layer = InDouble(MakeAttentionLayer(LayerOptions(name, Form::kBidirectional, 0)));
    layer->to(at::kFloat);
    EXPECT_TRUE(layer->mechanism().TakesBFloat16(Form::kBidirectional)) << name;
    const at::Tensor x = Leaf(Normal({2, 30, kModel}).to(at::kFloat)),
                     g = Normal({2, 30, kModel}).to(at::kFloat);
    for (const ops::Mask& mask : {ops::Mask{}, ops::Mask{Lengths({30, 11}), {}}}) {
      const auto run = [&] {
        const at::Tensor y = layer->Bidirectional(MakeStream(x, mask)).tokens.to(at::kFloat);
        return std::vector<at::Tensor>{y, Gradients((y * g).sum(), {x})[0]};
      };
      const auto want = run();
      const BFloat16Products products;
      const auto got = run();
      ExpectClose(got[0], want[0], 0.05, name);
      ExpectClose(got[1], want[1], 0.1, name + " gradient");
      const at::Tensor packed = layer->Bidirectional(MakeStream(x, mask)).packed;
      EXPECT_TRUE(!packed.defined() || packed.scalar_type() == at::kFloat) << name;
    }
  }
}

// A whole block, whose norms hand bfloat16 to the maps: what plain operations make of it, to
// bfloat16's rounding, and float for the next block.
TEST(Block, BFloat16BetweenNormsAndMaps) {
  for (const MechanismInfo* info : Mechanisms()) {
    const Form form = info->Supports(Form::kCausal) ? Form::kCausal : Form::kBidirectional;
    for (const NormKind kind : {NormKind::kLayer, NormKind::kRms}) {
      at::manual_seed(4);
      BlockOptions o;
      const bool conv = form == Form::kCausal && kind == NormKind::kRms;
      o.attention = LayerOptions(info->name, form, conv ? 3 : 0);
      o.norm_kind = kind;
      const auto block = MakeBlock(o);
      const at::Tensor x = Leaf(Normal({2, 19, kModel}).to(at::kFloat)),
                       g = Normal({2, 19, kModel}).to(at::kFloat);
      const BFloat16Products products;
      const auto run = [&] {
        at::manual_seed(5);
        State state = block->EmptyState(2, x.options().requires_grad(false));
        const at::Tensor y = form == Form::kCausal ? block->Extend(MakeStream(x, {}), state).x
                                                   : block->Bidirectional(MakeStream(x, {})).x;
        EXPECT_EQ(y.scalar_type(), at::kFloat) << info->name;
        return std::vector<at::Tensor>{y, Gradients((y * g.narrow(1, 0, y.size(1))).sum(), {x})[0]};
      };
      const auto got = run();
      const ops::ImplScope composite(ops::Impl::kComposite);
      const auto want = run();
      ExpectClose(got[0], want[0], 0.02, info->name);
      ExpectClose(got[1], want[1], 0.05, info->name + " gradient");
    }
  }
}

TEST(AttentionLayer, RefusesWithAReasonAndASuggestion) {
  auto text = [](const AttentionLayerOptions& o) {
    try {
      MakeAttentionLayer(o);
    } catch (const UsageError& e) {
      return std::string(e.what());
    }
    return std::string("no UsageError");
  };
  ExpectContains(text(LayerOptions("latte", Form::kCausal, 0, "rotary")),
                 {"rotary", "latte", "none, learned, sinusoidal"});
  ExpectContains(text(LayerOptions("sofmax", Form::kCausal, 0)),
                 {"sofmax", "did you mean 'softmax'?"});
  ExpectContains(text(LayerOptions("latte", Form::kBidirectional, 4)),
                 {"conv=4", "bidirectional", "conv=0"});
  ExpectContains(text(LayerOptions("latte", Form::kCross, 4)), {"conv=4", "cross", "conv=0"});
  auto o = LayerOptions("softmax", Form::kCausal, 0);
  o.dims.heads = 5;
  ExpectContains(text(o), {"dim=12", "heads=5"});
  o = LayerOptions("softmax", Form::kCausal, 0, "rotary");
  o.dims.heads = 4;
  ExpectContains(text(o), {"rotary", "even", "3"});
  o = LayerOptions("abc_mlp", Form::kCausal, 0);
  o.mechanism_options = Json{{"slot", 3}};
  ExpectContains(text(o), {"slot", "slots", "abc_mlp"});
}

TEST(AttentionLayer, NamesAndStates) {
  const auto made = MakeAttentionLayer(LayerOptions("abc_mlp", Form::kCausal, 4));
  const AttentionLayer& layer = *made;
  std::vector<std::string> names;
  for (const auto& p : layer.named_parameters()) names.push_back(p.key());
  std::sort(names.begin(), names.end());
  std::vector<std::string> want;
  for (const std::string p : {"control", "k", "q", "v"}) {
    want.insert(want.end(), {p + "_conv.weight", p + "_proj.weight"});
    if (p != "control") want.push_back(p + "_proj.bias");  // P003 eq. 7 has none
  }
  want.insert(want.end(), {"o_proj.bias", "o_proj.weight"});
  std::sort(want.begin(), want.end());
  EXPECT_EQ(names, want);
  EXPECT_EQ(layer.EmptyState(3, at::kFloat)["conv"].sizes(),
            at::IntArrayRef({3, 3, 3 * kModel + 2 * 3}));
  // A new filter is nearly the identity.
  for (const auto& p : layer.named_parameters()) {
    if (p.key().find("_conv") == std::string::npos) continue;
    EXPECT_NEAR(p.value().select(1, 3).mean().item<double>(), 1, 0.05);
    EXPECT_NEAR(p.value().narrow(1, 0, 3).mean().item<double>(), 0, 0.05);
  }
}

TEST(Positions, SinusoidalByItsFormula) {
  const PositionEmbedding embedding(PositionKind::kSinusoidal, 6, 4, 0.02);
  const at::Tensor positions =
      at::tensor({0, 3, 1000000}, at::kLong).unsqueeze(0);  // far beyond max_length
  const at::Tensor got = embedding.Forward(at::zeros({1, 3, 6}, at::kDouble), positions);
  for (int64_t t = 0; t < 3; ++t) {
    for (int64_t i = 0; i < 3; ++i) {
      const double angle =
          double(positions.index({0, t}).item<int64_t>()) * std::pow(10000.0, -2.0 * double(i) / 6);
      EXPECT_NEAR(got.index({0, t, 2 * i}).item<double>(), std::sin(angle), 1e-9);
      EXPECT_NEAR(got.index({0, t, 2 * i + 1}).item<double>(), std::cos(angle), 1e-9);
    }
  }
  ExpectContains(Thrown([] { PositionEmbedding(PositionKind::kSinusoidal, 5, 4, 0.02); }),
                 {"sinusoidal", "even", "5"});
  const PositionEmbedding learned(PositionKind::kLearned, 6, 4, 0.02);
  ExpectContains(Thrown([&] {
                   learned.Forward(at::zeros({1, 3, 6}), positions);
                 }),
                 {"1000000", "max_length=4", "sinusoidal"});
}

TEST(Positions, RotaryDependsOnDistanceAlone) {
  at::manual_seed(1);
  const at::Tensor q = Normal({1, 1, 1, 8}), k = Normal({1, 1, 1, 8});
  auto at_position = [](const at::Tensor& x, int64_t p) {
    return ops::Rotary(x, RotaryTable(Positions(p, 1), x.size(-1), x.scalar_type()));
  };
  const double want = (at_position(q, 5) * at_position(k, 2)).sum().item<double>();
  for (const int64_t shift : {1, 40, 5000}) {
    EXPECT_NEAR((at_position(q, 5 + shift) * at_position(k, 2 + shift)).sum().item<double>(), want,
                1e-10);
  }
  EXPECT_GT(std::abs((at_position(q, 6) * at_position(k, 2)).sum().item<double>() - want), 1e-3);
  ExpectClose(at_position(q, 0), q, 1e-15, "position 0 turns nothing");
  // Channel j pairs with channel j + d/2.
  const at::Tensor e = at::eye(8, at::kDouble)[1].view({1, 1, 1, 8}), r = at_position(e, 3);
  const double angle = 3 * std::pow(10000.0, -1.0 / 4);
  EXPECT_NEAR(r.flatten()[1].item<double>(), std::cos(angle), 1e-12);
  EXPECT_NEAR(r.flatten()[5].item<double>(), std::sin(angle), 1e-12);
}

TEST(Block, PreAndPostNormByTheirFormulas) {
  for (const std::string norm : {"pre", "post"}) {
    for (const std::string activation : {"gelu", "gelu_tanh", "relu"}) {
      BlockOptions o;
      o.attention = LayerOptions("latte", Form::kCausal, 0);
      o.norm = ValueOf(norm, NormPlaces()), o.activation = ValueOf(activation, Activations()),
      o.ffn_bias = true, o.ffn_dim = 7;
      at::manual_seed(6);
      const auto block = InDouble(std::make_shared<Block>(o));
      auto p = block->named_parameters();
      auto layer_norm = [&](const std::string& name, const at::Tensor& x) {
        const at::Tensor mean = x.mean(-1, true), centred = x - mean;
        return centred / (centred.square().mean(-1, true) + 1e-5).sqrt() * p[name + ".weight"] +
               p[name + ".bias"];
      };
      auto ffn = [&](const at::Tensor& x) {
        at::Tensor h = at::matmul(x, p["ffn.up_proj.weight"].t()) + p["ffn.up_proj.bias"];
        if (activation == "relu") h = h.clamp_min(0);
        if (activation == "gelu") h = h * 0.5 * (1 + at::erf(h / std::sqrt(2.0)));
        if (activation == "gelu_tanh")
          h = h * 0.5 * (1 + at::tanh(std::sqrt(2 / M_PI) * (h + 0.044715 * h.pow(3))));
        return at::matmul(h, p["ffn.down_proj.weight"].t()) + p["ffn.down_proj.bias"];
      };
      at::NoGradGuard guard;
      const at::Tensor x = Normal({2, 9, kModel});
      State state = block->EmptyState(2, x.options()), inner = state.Clone();
      const at::Tensor got = block->Extend(MakeStream(x), state).x;
      auto attend = [&](const at::Tensor& y) {
        return const_cast<AttentionLayer&>(block->attention()).Extend(MakeStream(y), inner);
      };
      at::Tensor want;
      if (norm == "pre") {
        const at::Tensor a = x + attend(layer_norm("attention_norm", x));
        want = a + ffn(layer_norm("ffn_norm", a));
      } else {
        const at::Tensor a = layer_norm("attention_norm", x + attend(x));
        want = layer_norm("ffn_norm", a + ffn(a));
      }
      ExpectClose(got, want, 1e-12, norm + " " + activation);
    }
  }
}

}  // namespace
}  // namespace cistern
