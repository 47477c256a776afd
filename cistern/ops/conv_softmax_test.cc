// Short convolution and exact softmax attention against plain loops.
#include "cistern/ops/short_conv.h"
#include "cistern/ops/softmax_attention.h"
#include "cistern/ops/testing.h"

namespace cistern::ops {
namespace {

using namespace cistern::testing;

// ---- short convolution

struct Conv {
  at::Tensor x, weight, state, g_y, g_after;
  Mask mask;
  int64_t ahead = 0;
};

Conv MakeConv(int64_t batch, int64_t length, int64_t channels, int64_t taps, bool lengths,
              bool starts, int64_t ahead = 0) {
  at::manual_seed(3 + length);
  Conv c = {Normal({batch, length, channels}),
            Normal({channels, taps}),
            Normal({batch, taps - 1, channels}),
            Normal({batch, length, channels}),
            Normal({batch, taps - 1, channels}),
            {},
            ahead};
  if (lengths)
    c.mask.lengths = at::cat({Lengths({0, length}), at::randint(0, length + 1, {batch}, at::kLong)})
                         .narrow(0, 0, batch);
  if (starts) c.mask.starts = at::rand({batch, length}) < 0.2;
  return c;
}

// The definition, token by token.
std::pair<at::Tensor, at::Tensor> ConvByLoops(const Conv& c) {
  const int64_t B = c.x.size(0), T = c.x.size(1), C = c.x.size(2), K = c.weight.size(1);
  at::Tensor y = at::zeros_like(c.x), after = at::zeros_like(c.state);
  auto x = c.x.accessor<double, 3>(), state = c.state.accessor<double, 3>(),
       out = y.accessor<double, 3>(), end = after.accessor<double, 3>();
  auto w = c.weight.accessor<double, 2>();
  for (int64_t b = 0; b < B; ++b) {
    const int64_t length = c.mask.lengths ? c.mask.lengths->index({b}).item<int64_t>() : T;
    int64_t begin = -(K - 1);  // the first token that can be seen
    auto value = [&](int64_t t, int64_t ch) {
      return t < begin || t >= length ? 0.0 : t < 0 ? state[b][t + K - 1][ch] : x[b][t][ch];
    };
    for (int64_t t = 0; t < length; ++t) {
      if (c.mask.starts && c.mask.starts->index({b, t}).item<bool>()) begin = t;
      for (int64_t ch = 0; ch < C; ++ch) {
        for (int64_t j = 0; j < K; ++j)
          out[b][t][ch] += w[ch][j] * value(t - (K - 1) + j + c.ahead, ch);
      }
    }
    for (int64_t i = 0; i < K - 1; ++i) {
      for (int64_t ch = 0; ch < C; ++ch) end[b][i][ch] = value(length - (K - 1) + i, ch);
    }
  }
  return {y, after};
}

at::Tensor ConvLoss(const Conv& c, const std::tuple<at::Tensor, at::Tensor>& r) {
  const auto t = std::get<0>(r).scalar_type();
  return (std::get<0>(r) * c.g_y.to(t)).sum() + (std::get<1>(r) * c.g_after.to(t)).sum();
}

std::vector<Conv> Convs() {
  std::vector<Conv> all;
  for (const int64_t length : {0, 1, 2, 5, 37}) {
    for (const int64_t taps : {1, 2, 4, 7}) {
      for (int masks = 0; masks < 4; ++masks)
        all.push_back(MakeConv(3, length, 13, taps, (masks & 1) != 0, (masks & 2) != 0));
    }
  }
  all.push_back(MakeConv(2, 200, 67, 4, true, true));
  for (const int64_t length : {0, 2, 37}) {
    for (const int64_t ahead : {1, 3, 6}) {
      all.push_back(MakeConv(3, length, 13, 7, false, false, ahead));
      all.push_back(MakeConv(3, length, 13, 7, true, false, ahead));
    }
  }
  return all;
}

TEST(ShortConv, ThreeImplementationsAreTheDefinition) {
  for (const Conv& c : Convs()) {
    const auto [y, after] = ConvByLoops(c);
    std::vector<at::Tensor> want;
    for (const auto dtype : {at::kDouble, at::kFloat}) {
      for (const Impl impl : {Impl::kReference, Impl::kKernel, Impl::kComposite}) {
        ImplScope scope(impl);
        const std::string what =
            ImplName(impl) + " T" + std::to_string(c.x.size(1)) + " K" +
            std::to_string(c.weight.size(1)) + (dtype == at::kFloat ? " float" : "") +
            (c.mask.lengths ? " lengths" : "") + (c.mask.starts ? " starts" : "") + " ahead " +
            std::to_string(c.ahead);
        const double tolerance = dtype == at::kDouble ? 1e-13 : 1e-6;
        // x lies in a wider buffer, as a slice of the joint projection does.
        const at::Tensor wide = at::cat({c.x, c.x}, 2).to(dtype).narrow(2, 0, c.x.size(2));
        const std::vector<at::Tensor> x = {Leaf(wide), Leaf(c.weight.to(dtype)),
                                           Leaf(c.state.to(dtype))};
        const auto got = ShortConv(x[0], x[1], x[2], c.mask, c.ahead);
        ExpectClose(std::get<0>(got), y, tolerance, what + " y");
        ExpectClose(std::get<1>(got), after, tolerance, what + " after");
        const auto g = Gradients(ConvLoss(c, got), x);
        if (want.empty()) want = g;
        for (size_t i = 0; i < 3; ++i)
          ExpectClose(g[i], want[i], tolerance, what + " gradient " + std::to_string(i));
        at::NoGradGuard guard;
        ExpectSameBits(std::get<0>(ShortConv(x[0], x[1], x[2], c.mask, c.ahead)),
                       std::get<0>(got).detach(), what + " without gradient");
      }
    }
  }
}

TEST(ShortConv, GradientsMatchFiniteDifferencesTwice) {
  const std::vector<Conv> convs = {MakeConv(3, 11, 5, 1, true, true),
                                   MakeConv(3, 11, 5, 4, true, true),
                                   MakeConv(3, 11, 5, 4, true, false, 2)};
  for (const Conv& c : convs) {
    for (const Impl impl : kImpls) {
      ImplScope scope(impl);
      ExpectGradientsMatchDifferences(
          [&](const auto& x) { return ConvLoss(c, ShortConv(x[0], x[1], x[2], c.mask, c.ahead)); },
          {c.x, c.weight, c.state}, ImplName(impl));
      auto second = [&](at::ScalarType dtype) {
        const std::vector<at::Tensor> x = {Leaf(c.x.to(dtype)), Leaf(c.weight.to(dtype)),
                                           Leaf(c.state.to(dtype))};
        at::Tensor loss = at::zeros({}, dtype);
        const auto r = ShortConv(x[0], x[1], x[2], c.mask, c.ahead);
        for (const at::Tensor& g :
             torch::autograd::grad({ConvLoss(c, r).square()}, x, {}, true, true))
          loss = loss + g.square().sum();
        return Gradients(loss, x);
      };
      std::vector<at::Tensor> want;
      {
        ImplScope composite(Impl::kComposite);
        want = second(at::kDouble);
      }
      const auto got = second(at::kFloat);
      for (size_t i = 0; i < 3; ++i)
        ExpectClose(got[i], want[i], 1e-5,
                    ImplName(impl) + " second derivative " + std::to_string(i));
    }
  }
}

TEST(ShortConv, SplitEqualsWhole) {
  const Conv c = MakeConv(3, 17, 5, 4, false, true);
  for (const Impl impl : kImpls) {
    ImplScope scope(impl);
    const auto [want, want_after] = ShortConv(c.x, c.weight, c.state, c.mask);
    for (int64_t cut = 0; cut <= 17; ++cut) {
      auto part = [&](int64_t begin, int64_t count, const at::Tensor& state) {
        return ShortConv(c.x.narrow(1, begin, count), c.weight, state,
                         {{}, c.mask.starts->narrow(1, begin, count)});
      };
      const auto [first, middle] = part(0, cut, c.state);
      const auto [second, after] = part(cut, 17 - cut, middle);
      ExpectClose(at::cat({first, second}, 1), want, 1e-14, ImplName(impl));
      ExpectClose(after, want_after, 1e-14, ImplName(impl));
    }
  }
}

TEST(ShortConv, WrongShapesNameTheOpAndTheShape) {
  const Conv c = MakeConv(2, 6, 5, 4, false, false);
  for (const Impl impl : kImpls) {
    ImplScope scope(impl);
    ExpectContains(Thrown([&] { ShortConv(c.x.select(0, 0), c.weight, c.state); }),
                   {"[short_conv]", "x of shape [B,T,C]", "[6, 5]"});
    ExpectContains(Thrown([&] { ShortConv(c.x, c.weight.t(), c.state); }),
                   {"[short_conv]", "weight", "[4, 5]"});
    ExpectContains(Thrown([&] { ShortConv(c.x, c.weight, c.x); }),
                   {"[short_conv]", "state of shape [B,K-1,C]", "[2, 6, 5]"});
    ExpectContains(Thrown([&] { ShortConv(c.x, c.weight.to(at::kFloat), c.state); }),
                   {"[short_conv]", "one dtype", "Float"});
    ExpectContains(Thrown([&] {
                     ShortConv(c.x, c.weight, c.state, {{}, at::zeros({2, 3}, at::kBool)});
                   }),
                   {"[short_conv]", "starts", "[2, 3]"});
    ExpectContains(Thrown([&] {
                     ShortConv(c.x, c.weight, c.state, {Lengths({1}), {}});
                   }),
                   {"[short_conv]", "lengths", "[1]"});
    ExpectContains(Thrown([&] { ShortConv(c.x, c.weight, c.state, {}, 4); }),
                   {"[short_conv]", "ahead of 0 .. K-1 with K=4", "got 4"});
    ExpectContains(Thrown([&] {
                     ShortConv(c.x, c.weight, c.state, {{}, at::zeros({2, 6}, at::kBool)}, 1);
                   }),
                   {"[short_conv]", "document starts", "got 1"});
  }
}

// ---- softmax attention

struct Softmax {
  at::Tensor q, k, v, g;
  SoftmaxOptions options;
  Mask mask;
  at::Tensor key_valid;
  std::string name;
};

Softmax MakeSoftmax(const std::string& name, int64_t queries, int64_t keys,
                    SoftmaxOptions options = {}) {
  at::manual_seed(5);
  return {Normal({3, 2, queries, 5}),
          Normal({3, 2, keys, 5}),
          Normal({3, 2, keys, 5}),
          Normal({3, 2, queries, 5}),
          options,
          {},
          {},
          name};
}

at::Tensor SoftmaxByLoops(const Softmax& c) {
  const int64_t B = c.q.size(0), H = c.q.size(1), T = c.q.size(2), S = c.k.size(2), d = c.q.size(3);
  at::Tensor out = at::zeros({B, H, T, d}, at::kDouble);
  auto q = c.q.accessor<double, 4>(), k = c.k.accessor<double, 4>(), v = c.v.accessor<double, 4>(),
       o = out.accessor<double, 4>();
  const double scale = c.options.scale > 0 ? c.options.scale : 1 / std::sqrt(double(d));
  for (int64_t b = 0; b < B; ++b) {
    std::vector<int64_t> document(S, 0);
    for (int64_t j = 0, count = 0; c.mask.starts && j < T; ++j)
      document[S - T + j] = count += c.mask.starts->index({b, j}).item<bool>();
    for (int64_t h = 0; h < H; ++h) {
      for (int64_t t = 0; t < T; ++t) {
        std::vector<double> e(S, 0);
        double sum = 0;
        for (int64_t j = 0; j < S; ++j) {
          if (c.options.causal && j > c.options.query_offset + t) continue;
          if (c.mask.lengths && j >= c.mask.lengths->index({b}).item<int64_t>()) continue;
          if (c.mask.starts && document[j] != document[S - T + t]) continue;
          if (c.key_valid.defined() && !c.key_valid.index({b, j}).item<bool>()) continue;
          double dot = 0;
          for (int64_t i = 0; i < d; ++i) dot += q[b][h][t][i] * k[b][h][j][i];
          sum += e[j] = std::exp(dot * scale);
        }
        for (int64_t j = 0; j < S && sum > 0; ++j) {
          for (int64_t i = 0; i < d; ++i) o[b][h][t][i] += e[j] / sum * v[b][h][j][i];
        }
      }
    }
  }
  return out;
}

std::vector<Softmax> Softmaxes() {
  SoftmaxOptions causal, scaled;
  causal.causal = true, scaled.scale = 0.3;
  std::vector<Softmax> all = {
      MakeSoftmax("full", 9, 9), MakeSoftmax("cross", 4, 11), MakeSoftmax("scaled", 7, 7, scaled),
      MakeSoftmax("causal", 37, 37, causal), MakeSoftmax("one", 1, 1, causal)};
  for (const int64_t queries : {1, 5}) {
    SoftmaxOptions cached = causal;
    cached.query_offset = 8;
    all.push_back(MakeSoftmax("cached", queries, 8 + queries, cached));
    all.push_back(MakeSoftmax("cached, padded", queries, 8 + queries, cached));
    all.back().key_valid = at::rand({3, 8 + queries}) < 0.6;
    all.back().key_valid[1].fill_(false);  // rows that see nothing
    all.push_back(MakeSoftmax("cached, packed", queries, 8 + queries, cached));
    all.back().mask.starts = at::rand({3, queries}) < 0.4;
  }
  for (const bool is_causal : {false, true}) {
    all.push_back(MakeSoftmax("lengths", 13, 13, is_causal ? causal : SoftmaxOptions()));
    all.back().mask.lengths = Lengths({13, 0, 6});
    all.push_back(MakeSoftmax("packed", 13, 13, is_causal ? causal : SoftmaxOptions()));
    all.back().mask = {Lengths({13, 5, 9}), Starts(3, 13, {{0, 0}, {0, 4}, {1, 2}, {2, 8}})};
  }
  return all;
}

TEST(SoftmaxAttention, ThreeImplementationsAreTheDefinition) {
  for (const Softmax& c : Softmaxes()) {
    const at::Tensor want = SoftmaxByLoops(c);
    std::vector<at::Tensor> want_g;
    for (const bool heads_last : {false, true}) {
      for (const auto dtype : {at::kDouble, at::kFloat}) {
        for (const Impl impl : {Impl::kReference, Impl::kKernel, Impl::kComposite}) {
          ImplScope scope(impl);
          const std::string what = c.name + (c.options.causal ? " causal " : " ") + ImplName(impl) +
                                   (dtype == at::kFloat ? " float" : "");
          const double tolerance = dtype == at::kDouble ? 1e-12 : 2e-6;
          const std::vector<at::Tensor> x = {Leaf(WithLayout(c.q.to(dtype), heads_last)),
                                             Leaf(WithLayout(c.k.to(dtype), heads_last)),
                                             Leaf(WithLayout(c.v.to(dtype), heads_last))};
          const at::Tensor got = SoftmaxAttention(x[0], x[1], x[2], c.options, c.mask, c.key_valid);
          ExpectClose(got, want, tolerance, what);
          const auto g = Gradients((got * c.g.to(dtype)).sum(), x);
          if (want_g.empty()) want_g = g;
          for (size_t i = 0; i < 3; ++i) {
            EXPECT_TRUE(g[i].isfinite().all().item<bool>()) << what;
            // Of one token q and k have no gradient: what is left of it is rounding.
            ExpectClose(g[i], want_g[i], tolerance, what + " gradient " + std::to_string(i),
                        c.g.norm().item<double>());
          }
          // A row that sees no key: zeros, and no gradient for its query.
          const at::Tensor blind = want.abs().sum(-1) == 0;
          EXPECT_EQ(got.masked_select(blind.unsqueeze(-1)).abs().sum().item<double>(), 0) << what;
          EXPECT_EQ(g[0].masked_select(blind.unsqueeze(-1)).abs().sum().item<double>(), 0) << what;
        }
      }
    }
    if (c.name == "lengths" || c.name == "packed") {
      for (const Impl impl : kImpls) {
        ImplScope scope(impl);
        ExpectGradientsMatchDifferences(
            [&](const auto& x) {
              return (SoftmaxAttention(x[0], x[1], x[2], c.options, c.mask, c.key_valid) * c.g)
                  .sum();
            },
            {c.q, c.k, c.v}, c.name + ImplName(impl));
      }
    }
  }
}

// The kernel has no second derivatives: they are those of the explicit probabilities.
TEST(SoftmaxAttention, SecondDerivativesAreThoseOfTheComposite) {
  for (const Softmax& c : Softmaxes()) {
    const auto second = [&](at::ScalarType dtype) {
      const std::vector<at::Tensor> x = {Leaf(c.q.to(dtype)), Leaf(c.k.to(dtype)),
                                         Leaf(c.v.to(dtype))};
      const at::Tensor out = SoftmaxAttention(x[0], x[1], x[2], c.options, c.mask, c.key_valid);
      const auto first = torch::autograd::grad({(out.square() * c.g.to(dtype)).sum()}, x, {}, {},
                                               /*create_graph=*/true);
      at::Tensor loss = at::zeros({}, dtype);
      for (const at::Tensor& g : first) loss = loss + g.square().sum();
      std::vector<at::Tensor> all = first;
      for (const at::Tensor& g : Gradients(loss, x)) all.push_back(g);
      return all;
    };
    std::vector<at::Tensor> want;
    {
      ImplScope composite(Impl::kComposite);
      want = second(at::kDouble);
    }
    for (const Impl impl : kImpls) {
      ImplScope scope(impl);
      for (const auto dtype : {at::kDouble, at::kFloat}) {
        const auto got = second(dtype);
        for (size_t i = 0; i < got.size(); ++i) {
          ExpectClose(got[i].detach(), want[i].detach(), dtype == at::kDouble ? 1e-12 : 1e-5,
                      c.name + " " + ImplName(impl) + (i < 3 ? " first " : " second ") +
                          std::to_string(i % 3),
                      c.g.norm().item<double>());
        }
      }
    }
  }
}

// An implementation that shares nothing with ours.
TEST(SoftmaxAttention, AgreesWithTorchs) {
  const Softmax c = MakeSoftmax("full", 70, 90);
  ImplScope scope(Impl::kKernel);
  const auto gradients = [&](bool ours) {
    const std::vector<at::Tensor> x = {Leaf(c.q), Leaf(c.k), Leaf(c.v)};
    const at::Tensor out = ours ? SoftmaxAttention(x[0], x[1], x[2], {})
                                : at::scaled_dot_product_attention(x[0], x[1], x[2], {}, 0.0, false,
                                                                   1.0 / std::sqrt(5.0));
    auto all = Gradients((out * c.g).sum(), x);
    all.push_back(out.detach());
    return all;
  };
  const auto got = gradients(true), want = gradients(false);
  for (size_t i = 0; i < got.size(); ++i) ExpectClose(got[i], want[i], 1e-13, std::to_string(i));
}

// Masked and later keys may hold anything; a query of NaN reads NaN, and so does one that sees NaN.
TEST(SoftmaxAttention, OnlyThoseThatSeeItReadWhatIsNotFinite) {
  for (const Softmax& c : Softmaxes()) {
    const int64_t T = c.q.size(2), S = c.k.size(2);
    const at::Tensor want = SoftmaxByLoops(c);
    for (const int64_t s : {int64_t{0}, S / 2, S - 1}) {
      for (const double value : {std::nan(""), kInf, -kInf}) {
        for (const Impl impl : kImpls) {
          ImplScope scope(impl);
          const std::string what = c.name + " " + ImplName(impl) + " key " + std::to_string(s) +
                                   " holds " + std::to_string(value);
          // What the definition says of a key: outputs change where it is seen.
          Softmax other = c;
          other.v = c.v.clone();
          other.v.select(2, s).add_(1.0);
          const at::Tensor seen = (SoftmaxByLoops(other) - want).abs().sum(-1) > 0;  // [B,H,T]
          for (const bool of_key : {false, true}) {
            at::Tensor k = c.k.clone(), v = c.v.clone();
            (of_key ? k : v).select(2, s).fill_(value);
            const at::Tensor got = SoftmaxAttention(c.q, k, v, c.options, c.mask, c.key_valid);
            const at::Tensor blind = seen.logical_not().unsqueeze(-1).expand_as(got);
            ExpectClose(got.masked_select(blind), want.masked_select(blind), 1e-12, what);
            if (std::isnan(value)) {
              EXPECT_TRUE(got.isnan().all(-1).masked_select(seen).all().item<bool>()) << what;
            }
          }
        }
      }
    }
    for (const Impl impl : kImpls) {
      ImplScope scope(impl);
      at::Tensor q = c.q.clone();
      q.select(2, T / 2).fill_(std::nan(""));
      const at::Tensor got = SoftmaxAttention(q, c.k, c.v, c.options, c.mask, c.key_valid);
      const at::Tensor sees = want.select(2, T / 2).abs().sum(-1) > 0;  // [B,H]
      EXPECT_TRUE(at::equal(got.select(2, T / 2).isnan().all(-1), sees)) << c.name;
      ExpectClose(got.narrow(2, 0, T / 2), want.narrow(2, 0, T / 2), 1e-12, c.name);
    }
  }
}

// What is not seen has a score that the type can hold.
TEST(SoftmaxAttention, ProbabilitiesInHalfPrecision) {
  const at::Tensor q = at::randn({2, 3, 6, 5}), k = at::randn({2, 3, 6, 5});
  at::Tensor valid = at::ones({2, 6}, at::kBool);
  valid[1].fill_(false);
  const SoftmaxOptions options = {.causal = true};
  const at::Tensor want = AttentionProbabilities(q, k, options, {}, valid);
  for (const auto type : {at::kBFloat16, at::kHalf}) {
    const at::Tensor p = AttentionProbabilities(q.to(type), k.to(type), options, {}, valid);
    ASSERT_EQ(p.scalar_type(), type);
    ExpectClose(p.to(at::kFloat), want, 2e-2, "probabilities");
    EXPECT_EQ(p[1].abs().sum().item<float>(), 0);
  }
}

TEST(SoftmaxAttention, NothingToSee) {
  for (const Impl impl : kImpls) {
    ImplScope scope(impl);
    const at::Tensor q = Leaf(Normal({2, 3, 4, 5})), none = Normal({2, 3, 0, 5});
    const at::Tensor out = SoftmaxAttention(q, none, none, {});
    EXPECT_EQ(out.sizes(), q.sizes());
    EXPECT_EQ(out.abs().sum().item<double>(), 0);
    EXPECT_EQ(Gradients(out.sum(), {q})[0].abs().sum().item<double>(), 0);
    EXPECT_EQ(SoftmaxAttention(none, q.detach(), q.detach(), {}).size(2), 0);
    ExpectContains(Thrown([&] { SoftmaxAttention(q, none, q, {}); }),
                   {"[softmax_attention]", "[2, 3, 0, 5]", "[2, 3, 4, 5]"});
  }
}

}  // namespace
}  // namespace cistern::ops
