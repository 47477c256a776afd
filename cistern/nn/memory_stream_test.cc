// The memory stream through attention layers and blocks: formulas, what shares a map, what is left
// out.
#include <algorithm>
#include <cmath>
#include <map>

#include "cistern/attention/testing_mechanisms.h"
#include "cistern/base/error.h"
#include "cistern/nn/block.h"

namespace cistern {
namespace {

using namespace cistern::testing;

constexpr int64_t kModel = 12;

BlockOptions Options(const std::string& mechanism, const Json& options,
                     const std::string& norm = "post") {
  BlockOptions o;
  o.attention.mechanism = mechanism;
  o.attention.mechanism_options = options;
  o.attention.dims.dim = kModel, o.attention.dims.heads = 2;
  o.attention.form = Form::kBidirectional;
  o.attention.bias = o.ffn_bias = true;
  o.norm = ValueOf(norm, NormPlaces());
  return o;
}

template <class M, class O>
std::shared_ptr<M> Make(const O& options) {
  at::manual_seed(4);
  std::shared_ptr<M> module;
  if constexpr (std::is_same_v<M, Block>) {
    module = MakeBlock(options);
  } else {
    module = MakeAttentionLayer(options);
  }
  at::NoGradGuard guard;
  module->to(at::kDouble);
  module->eval();
  for (at::Tensor& p : module->parameters()) p.normal_(0, 0.5);
  return module;
}

Stream MakeStream(const at::Tensor& x, const ops::Mask& mask = {}) {
  return {x, mask, at::arange(x.size(1)).unsqueeze(0), {}};
}

std::vector<std::string> Names(const torch::nn::Module& m) {
  std::vector<std::string> names;
  for (const auto& p : m.named_parameters()) names.push_back(p.key());
  std::sort(names.begin(), names.end());
  return names;
}

// Softmax attention of heads of 6, or another width, by its formula. [B,T,12] each.
at::Tensor Attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                     double divisor = std::sqrt(6.0), int64_t width = 6) {
  std::vector<at::Tensor> heads;
  for (int64_t h = 0; h < kModel; h += width) {
    const at::Tensor p = at::softmax(
        at::matmul(q.narrow(2, h, width), k.narrow(2, h, width).transpose(1, 2)) / divisor, 2);
    heads.push_back(at::matmul(p, v.narrow(2, h, width)));
  }
  return at::cat(heads, 2);
}

TEST(MemoryStream, BlocksByTheirFormulas) {
  at::NoGradGuard guard;
  for (const std::string norm : {"pre", "post"}) {
    for (const std::string kind : {"luna", "conv_luna"}) {
      const bool conv = kind == "conv_luna";
      const Json options = conv ? Json{{"slots", 3}, {"kernel", 1}} : Json{{"slots", 3}};
      const auto block = Make<Block>(Options(kind, options, norm));
      auto p = block->named_parameters();
      auto map = [&](const std::string& name, const at::Tensor& x) {
        return at::matmul(x, p[name + ".weight"].t()) + p[name + ".bias"];
      };
      auto layer_norm = [&](const std::string& name, const at::Tensor& x) {
        return at::layer_norm(x, {kModel}, p[name + ".weight"], p[name + ".bias"]);
      };
      auto ffn = [&](const at::Tensor& x) {
        return map("ffn.down_proj", at::gelu(map("ffn.up_proj", x)));
      };
      at::Tensor x = Normal({2, 9, kModel}),
                 memory = p["attention.core.memory"].expand({2, -1, -1});
      Stream stream = MakeStream(x);
      for (int round = 0; round < 2; ++round) {  // the second time with a memory that was handed on
        stream = block->Bidirectional(stream);
        const bool pre = norm == "pre";
        const at::Tensor xs = pre ? layer_norm("attention_norm", x) : x,
                         ms = pre ? layer_norm("memory_norm", memory) : memory;
        at::Tensor packed, read;
        if (conv) {
          packed = map("attention.o_proj",
                       Attention(map("attention.q_proj", ms), map("attention.k_proj", xs), xs,
                                 p["attention.core.tau"].exp().item<double>()));
          read = Attention(map("attention.q_proj", xs), map("attention.k_proj", packed), packed);
        } else {
          const at::Tensor c = map("attention.pc_proj", xs);
          packed = Attention(map("attention.pq_proj", ms), c, c);
          read = Attention(map("attention.q_proj", xs), map("attention.c_proj", packed),
                           map("attention.c_proj", packed));
        }
        const at::Tensor y = map("attention.o_proj", read);
        if (pre) {
          memory = memory + packed;
          x = x + y;
          x = x + ffn(layer_norm("ffn_norm", x));
        } else {
          memory = layer_norm("memory_norm", memory + packed);
          x = layer_norm("attention_norm", x + y);
          x = layer_norm("ffn_norm", x + ffn(x));
        }
        const std::string what = norm + " " + kind + " round " + std::to_string(round);
        ExpectClose(stream.x, x, 1e-12, what);
        ExpectClose(stream.memory, memory, 1e-12, what + ", memory");
      }
    }
  }
}

TEST(MemoryStream, LunaPacksWithHeadsOfItsOwn) {
  at::NoGradGuard guard;
  for (const std::string sharing : {"none", "all"}) {
    const Json options = {{"slots", 3},
                          {"tie_kv", false},
                          {"sharing", sharing},
                          {"packed_output", sharing == "all" ? "shared" : "none"}};
    Json other = options;
    other["packing_heads"] = 4;
    const auto plain = Make<AttentionLayer>(Options("luna", options).attention),
               layer = Make<AttentionLayer>(Options("luna", other).attention);
    EXPECT_EQ(Names(*layer), Names(*plain)) << "the same parameters";
    auto p = layer->named_parameters();
    auto map = [&](const std::string& name, const at::Tensor& x) {
      return at::matmul(x, p[name + ".weight"].t()) + p[name + ".bias"];
    };
    const at::Tensor x = Normal({2, 9, kModel}), memory = p["core.memory"].expand({2, -1, -1});
    const bool all = sharing == "all";
    at::Tensor packed =
        Attention(map(all ? "q_proj" : "pq_proj", memory), map(all ? "k_proj" : "pk_proj", x),
                  map(all ? "v_proj" : "pv_proj", x), std::sqrt(3.0), 3);
    if (all) packed = map("o_proj", packed);
    const at::Tensor want =
        map("o_proj", Attention(map("q_proj", x), map("k_proj", packed), map("v_proj", packed)));
    const auto got = layer->Bidirectional(MakeStream(x));
    ExpectClose(got.tokens, want, 1e-12, sharing);
    ExpectClose(got.packed, packed, 1e-12, sharing + ", packed");
    auto cross_options = Options("luna", other).attention;
    cross_options.form = Form::kCross;
    const auto cross = Make<AttentionLayer>(cross_options);
    State state = cross->EmptyState(2, x.options());
    cross->Write(MakeStream(x), state);
    ExpectClose(cross->Read(MakeStream(x), state), want, 1e-12, sharing + ", cross");
  }
}

TEST(MemoryStream, ConvLunaWithoutFilterIsLunaWithItsMaps) {
  at::NoGradGuard guard;
  const auto conv = Make<AttentionLayer>(
      Options("conv_luna",
              {{"slots", 3}, {"kernel", 1}, {"temperature", "sqrt"}, {"values", "separate"}})
          .attention);
  const auto luna = Make<AttentionLayer>(
      Options(
          "luna",
          {{"slots", 3}, {"tie_kv", false}, {"sharing", "query_key"}, {"packed_output", "shared"}})
          .attention);
  const std::map<std::string, std::string> names = {{"q_proj", "q_proj"},
                                                    {"k_proj", "k_proj"},
                                                    {"v_proj", "pv_proj"},
                                                    {"packed_v_proj", "v_proj"},
                                                    {"o_proj", "o_proj"}};
  auto from = conv->named_parameters(), to = luna->named_parameters();
  ASSERT_EQ(from.size(), to.size());
  to["core.memory"].copy_(from["core.memory"]);
  for (const auto& [a, b] : names) {
    for (const std::string part : {".weight", ".bias"}) to[b + part].copy_(from[a + part]);
  }
  const Stream stream = MakeStream(Normal({3, 11, kModel}), {Lengths({11, 4, 0}), {}});
  const auto got = conv->Bidirectional(stream), want = luna->Bidirectional(stream);
  ExpectClose(got.tokens, want.tokens, 1e-13, "tokens");
  ExpectClose(got.packed, want.packed, 1e-13, "packed");
}

TEST(MemoryStream, SetTransformerIsLunaWithTheMapsOfQueriesAndKeysInCommon) {
  at::NoGradGuard guard;
  const auto set = Make<AttentionLayer>(Options("set_transformer", {{"slots", 3}}).attention);
  const auto luna = Make<AttentionLayer>(
      Options("luna",
              {{"slots", 3}, {"tie_kv", false}, {"sharing", "query_key"}, {"packed_output", "own"}})
          .attention);
  std::vector<std::string> names = {"core.memory"};
  for (const char* map : {"k", "o", "packed_o", "pv", "q", "v"}) {
    for (const char* part : {"bias", "weight"}) names.push_back(std::string(map) + "_proj." + part);
  }
  EXPECT_EQ(Names(*set), names);
  auto from = luna->named_parameters();
  for (const auto& p : set->named_parameters()) p.value().copy_(from[p.key()]);
  const Stream stream = MakeStream(Normal({3, 11, kModel}), {Lengths({11, 4, 0}), {}});
  ExpectSameBits(set->Bidirectional(stream).tokens, luna->Bidirectional(stream).tokens, "tokens");
}

TEST(MemoryStream, PaddingReadsNothing) {
  at::NoGradGuard guard;
  for (const char* name : {"luna", "conv_luna", "set_transformer", "shared_workspace"}) {
    const auto layer = Make<AttentionLayer>(Options(name, {{"slots", 3}}).attention);
    const at::Tensor got =
        layer->Bidirectional(MakeStream(Normal({2, 9, kModel}), {Lengths({9, 4}), {}})).tokens;
    const at::Tensor bias = layer->named_parameters()["o_proj.bias"];
    ExpectClose(got[1].narrow(0, 4, 5), bias.expand({5, -1}), 1e-15, name);
    EXPECT_GT(RelRms(got[1].narrow(0, 0, 4), bias.expand({4, -1})), 1e-3) << name;
  }
}

TEST(MemoryStream, WhatIsNotUsedIsNotMade) {
  auto options = Options("conv_luna", {{"slots", 3}, {"kernel", 4}});
  options.attention.tokens_out = false;
  const auto last = Make<Block>(options);
  EXPECT_EQ(Names(*last),
            (std::vector<std::string>{
                "attention.core.filter.weight", "attention.core.memory", "attention.core.tau",
                "attention.k_proj.bias", "attention.k_proj.weight", "attention.o_proj.bias",
                "attention.o_proj.weight", "attention.q_proj.bias", "attention.q_proj.weight",
                "memory_norm.bias", "memory_norm.weight"}));
  options = Options("luna", {{"slots", 3}});
  options.attention.tokens_out = false;
  EXPECT_EQ(Names(*Make<Block>(options)),
            (std::vector<std::string>{"attention.core.memory", "attention.pc_proj.bias",
                                      "attention.pc_proj.weight", "attention.pq_proj.bias",
                                      "attention.pq_proj.weight", "memory_norm.bias",
                                      "memory_norm.weight"}));
  // The memory is that of the whole block.
  const auto whole = Make<Block>(Options("luna", {{"slots", 3}}));
  const auto part = Make<Block>(options);
  at::NoGradGuard guard;
  auto own = whole->named_parameters();
  for (const auto& p : part->named_parameters()) p.value().copy_(own[p.key()]);
  const Stream stream = MakeStream(Normal({2, 7, kModel}));
  const Stream got = part->Bidirectional(stream);
  EXPECT_FALSE(got.x.defined());
  ExpectClose(got.memory, whole->Bidirectional(stream).memory, 1e-13, "memory");
}

TEST(MemoryStream, FixedAndReplacedMemories) {
  at::NoGradGuard guard;
  const at::Tensor x = Normal({2, 7, kModel}), other = Normal({2, 3, kModel});
  Stream stream = MakeStream(x);
  const auto fixed = Make<Block>(Options("set_transformer", {{"slots", 3}}));
  const at::Tensor alone = fixed->Bidirectional(stream).x;
  stream.memory = other;  // another mechanism's: passes by
  const Stream after = fixed->Bidirectional(stream);
  ExpectSameBits(after.x, alone, "fixed memory");
  ExpectSameBits(after.memory, other, "fixed memory hands on what came");
  const auto replaced = Make<Block>(Options("shared_workspace", {{"slots", 3}}));
  EXPECT_GT(RelRms(replaced->Bidirectional(stream).x, replaced->Bidirectional(MakeStream(x)).x),
            1e-3);
  EXPECT_EQ(replaced->Bidirectional(MakeStream(x)).memory.sizes(), at::IntArrayRef({2, 3, kModel}));
}

TEST(Latents, BlocksByTheirFormulas) {
  at::NoGradGuard guard;
  for (const std::string norm : {"pre", "post"}) {
    const auto first = Make<Block>(Options("perceiver", {{"latents", 5}}, norm));
    auto options = Options("perceiver", {{"latents", 5}}, norm);
    options.attention.first = &first->attention();
    const auto second = Make<Block>(options);
    const at::Tensor x = Normal({2, 9, kModel});
    Stream stream = MakeStream(x, {Lengths({9, 4}), {}});
    at::Tensor latents = first->named_parameters()["attention.core.latents"].expand({2, -1, -1});
    EXPECT_FALSE(second->named_parameters().contains("attention.core.latents"));
    for (const auto& block : {first, second}) {
      stream = block->Bidirectional(stream);
      auto p = block->named_parameters();
      auto map = [&](const std::string& name, const at::Tensor& y) {
        return at::matmul(y, p[name + ".weight"].t()) + p[name + ".bias"];
      };
      auto layer_norm = [&](const std::string& name, const at::Tensor& y) {
        return at::layer_norm(y, {kModel}, p[name + ".weight"], p[name + ".bias"]);
      };
      const bool pre = norm == "pre";
      const at::Tensor z = pre ? layer_norm("attention_norm", latents) : latents,
                       xs = pre ? layer_norm("source_norm", x) : x;
      std::vector<at::Tensor> rows;
      for (const auto& [row, count] : {std::pair<int64_t, int64_t>{0, 9}, {1, 4}}) {
        const at::Tensor tokens = xs.narrow(0, row, 1).narrow(1, 0, count);
        rows.push_back(Attention(map("attention.q_proj", z.narrow(0, row, 1)),
                                 map("attention.k_proj", tokens), map("attention.v_proj", tokens)));
      }
      const at::Tensor y = map("attention.o_proj", at::cat(rows));
      auto ffn = [&](const at::Tensor& a) {
        return map("ffn.down_proj", at::gelu(map("ffn.up_proj", a)));
      };
      latents = pre ? latents + y : layer_norm("attention_norm", latents + y);
      latents = pre ? latents + ffn(layer_norm("ffn_norm", latents))
                    : layer_norm("ffn_norm", latents + ffn(latents));
      ExpectClose(stream.x, latents, 1e-12, norm);
      EXPECT_FALSE(stream.mask.lengths);
    }
  }
}

// The features by plain loops, and the block as the one without them on the tokens beside them.
TEST(Latents, FourierFeaturesStandBesideTheTokens) {
  at::NoGradGuard guard;
  constexpr int64_t kBands = 3, kLength = 9, kMore = 2 * kBands + 1;
  constexpr double kFrequencies[kBands] = {1, 2.5, 4};  // to half of 8
  for (const std::string norm : {"pre", "post"}) {
    auto options = Options(
        "perceiver", {{"latents", 5}, {"fourier_bands", kBands}, {"fourier_max_freq", 8.0}}, norm);
    options.attention.dims.max_length = kLength;
    const auto block = Make<Block>(options);
    auto p = block->named_parameters();
    ASSERT_EQ(p["attention.k_proj.weight"].size(1), kModel + kMore);
    const at::Tensor x = Normal({2, 6, kModel}), beside = at::zeros({2, 6, kMore}, x.options());
    for (int64_t t = 0; t < 6; ++t) {
      const double place = 2.0 * double(t) / 8 - 1;  // of 9 positions in [-1,1]
      for (int64_t k = 0; k < kBands; ++k) {
        beside.select(1, t).select(1, k).fill_(std::sin(M_PI * kFrequencies[k] * place));
        beside.select(1, t).select(1, kBands + k).fill_(std::cos(M_PI * kFrequencies[k] * place));
      }
      beside.select(1, t).select(1, 2 * kBands).fill_(place);
    }
    const bool pre = norm == "pre";
    const auto map = [&](const std::string& name, const at::Tensor& y) {
      return at::matmul(y, p[name + ".weight"].t()) + p[name + ".bias"];
    };
    const auto layer_norm = [&](const std::string& name, const at::Tensor& y) {
      return at::layer_norm(y, {y.size(2)}, p[name + ".weight"], p[name + ".bias"]);
    };
    const at::Tensor latents = p["attention.core.latents"].expand({2, -1, -1}),
                     z = pre ? layer_norm("attention_norm", latents) : latents,
                     wide = at::cat({x, beside}, 2),
                     source = pre ? layer_norm("source_norm", wide) : wide;
    const at::Tensor y = map("attention.o_proj",
                             Attention(map("attention.q_proj", z), map("attention.k_proj", source),
                                       map("attention.v_proj", source)));
    const auto ffn = [&](const at::Tensor& a) {
      return map("ffn.down_proj", at::gelu(map("ffn.up_proj", a)));
    };
    at::Tensor want = pre ? latents + y : layer_norm("attention_norm", latents + y);
    want =
        pre ? want + ffn(layer_norm("ffn_norm", want)) : layer_norm("ffn_norm", want + ffn(want));
    ExpectClose(block->Bidirectional(MakeStream(x)).x, want, 1e-12, norm);
  }
  auto cross = Options("perceiver", {{"fourier_bands", 3}}).attention;
  cross.form = Form::kCross;
  ExpectContains(Thrown([&] { MakeMechanism(cross); }), {"fourier_bands", "cross"});
  auto idle = Options("perceiver", {{"fourier_max_freq", 8.0}}).attention;
  ExpectContains(Thrown([&] { MakeMechanism(idle); }), {"fourier_max_freq=8", "fourier_bands"});
}

TEST(Latents, AMemoryPassesBy) {
  at::NoGradGuard guard;
  const auto block = Make<Block>(Options("perceiver", {{"latents", 5}}));
  Stream stream = MakeStream(Normal({2, 9, kModel}));
  stream.memory = Normal({2, 3, kModel});
  const Stream once = block->Bidirectional(stream), twice = block->Bidirectional(once);
  ExpectSameBits(once.memory, stream.memory, "into latents");
  ExpectSameBits(twice.memory, stream.memory, "from latents to latents");
}

TEST(MemoryStream, CrossAttentionIsTheBidirectionalFormOfTheSource) {
  at::NoGradGuard guard;
  for (const Json& options :
       {Json{{"slots", 3}},
        Json{{"slots", 3}, {"tie_kv", false}, {"sharing", "all"}, {"packed_output", "shared"}}}) {
    const auto self = Make<AttentionLayer>(Options("luna", options).attention);
    auto cross_options = Options("luna", options).attention;
    cross_options.form = Form::kCross;
    const auto cross = Make<AttentionLayer>(cross_options);
    const Stream stream = MakeStream(Normal({3, 11, kModel}), {Lengths({11, 4, 1}), {}});
    State state = cross->EmptyState(3, stream.x.options());
    cross->Write(stream, state);
    const at::Tensor got = cross->Read(stream, state), want = self->Bidirectional(stream).tokens;
    for (const auto& [row, count] : {std::pair<int64_t, int64_t>{0, 11}, {1, 4}, {2, 1}})
      ExpectClose(got[row].narrow(0, 0, count), want[row].narrow(0, 0, count), 1e-13,
                  "row of " + std::to_string(count));
  }
}

TEST(MemoryStream, PackedRowsAreRefused) {
  at::NoGradGuard guard;
  const Stream stream = MakeStream(Normal({2, 7, kModel}), {{}, Starts(2, 7, {{0, 3}})});
  for (const char* name : {"luna", "conv_luna", "set_transformer", "shared_workspace"}) {
    const auto layer = Make<AttentionLayer>(Options(name, {{"slots", 3}}).attention);
    ExpectContains(Thrown([&] { layer->Bidirectional(stream); }),
                   {"[" + std::string(name) + "]", "several documents",
                    "a row of its own, with lengths", "such as latte"});
  }
  const auto perceiver = Make<Block>(Options("perceiver", {{"latents", 3}}));
  ExpectContains(Thrown([&] { perceiver->Bidirectional(stream); }),
                 {"[perceiver]", "several documents", "with lengths", "such as latte"});
  // What the message names works.
  const auto latte = Make<AttentionLayer>(Options("latte", {{"latents", 6}}).attention);
  const at::Tensor got = latte->Bidirectional(stream).tokens.narrow(0, 0, 1);
  ExpectClose(got.narrow(1, 3, 4),
              latte->Bidirectional(MakeStream(stream.x.narrow(0, 0, 1).narrow(1, 3, 4))).tokens,
              1e-13, "latte");
}

}  // namespace
}  // namespace cistern
