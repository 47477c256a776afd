// Mechanisms with a memory stream at their core: identities between them, their limits, what they
// refuse.
#include "cistern/attention/mechanisms/luna.h"

#include "cistern/attention/testing_mechanisms.h"
#include "cistern/base/error.h"

namespace cistern {
namespace {

using namespace cistern::testing;

std::shared_ptr<Mechanism> Make(const std::string& name, const Json& options,
                                const Mechanism* first = nullptr) {
  AttentionDims dims;
  dims.dim = kDim, dims.heads = kHeads, dims.max_length = 64, dims.first = first;
  at::manual_seed(1);
  const auto m = FindMechanism(name).Make(options, dims);
  m->eval();
  m->to(at::kDouble);
  return m;
}

TEST(Luna, OneSlotReadsTheSameForEveryToken) {
  at::NoGradGuard guard;
  for (const char* name : {"luna", "conv_luna", "set_transformer", "shared_workspace"}) {
    const auto m = Make(name, {{"slots", 1}});
    auto x = Inputs(*m, 2, 9);
    const at::Tensor out = m->Bidirectional(x, {});
    ExpectClose(out, out.narrow(2, 0, 1).expand_as(out), 1e-14, name);
    x[0] = x[0] * 3 + 1;
    ExpectClose(m->Bidirectional(x, {}), out, 1e-14, std::string(name) + ", other queries");
    x[1] = x[1] * 3 + at::arange(9).view({1, 1, 9, 1});
    EXPECT_GT(RelRms(m->Bidirectional(x, {}), out), 1e-3) << name << ", other keys";
  }
}

TEST(Luna, SlotsHaveNoOrder) {
  at::NoGradGuard guard;
  for (const MechanismInfo* info : Mechanisms()) {
    if (info->memory == MemoryUse::kNone || info->memory == MemoryUse::kLatents) continue;
    const auto m = Make(info->name, {{"slots", 5}});
    const auto x = Inputs(*m, 2, 12);
    const auto run = [&] {
      return info->verbs && info->Supports(Form::kCausal) ? ExtendPieces(*m, x, {0, 12})
                                                          : m->Bidirectional(x, {});
    };
    const at::Tensor before = run(), memory = m->named_parameters()["memory"],
                     kept = memory.clone();
    memory.copy_(kept.index_select(1, at::tensor({3, 0, 4, 1, 2}, at::kLong)));
    ExpectClose(run(), before, 1e-13, info->name);
    memory.copy_(kept.flip({2}));
    EXPECT_GT(RelRms(run(), before), 1e-6) << info->name << ": its memory matters";
  }
}

TEST(Luna, FewTokensReadAsManySlots) {
  at::NoGradGuard guard;
  const auto all = Make("luna", {{"slots", 6}}),
             dynamic = Make("luna", {{"slots", 6}, {"dynamic_projection", true}});
  dynamic->named_parameters()["memory"].copy_(all->named_parameters()["memory"]);
  auto x = Inputs(*all, 2, 6);
  ExpectClose(dynamic->Bidirectional(x, {}), all->Bidirectional(x, {}), 1e-14,
              "as many tokens as slots");
  x = Narrow(x, 0, 4);
  const at::Tensor got = dynamic->Bidirectional(x, {});
  EXPECT_GT(RelRms(got, all->Bidirectional(x, {})), 1e-3);
  const auto four = Make("luna", {{"slots", 4}});
  four->named_parameters()["memory"].copy_(all->named_parameters()["memory"].narrow(1, 0, 4));
  ExpectClose(got, four->Bidirectional(x, {}), 1e-14, "the first four slots");
}

TEST(Luna, PackingHasHeadsOfItsOwn) {
  at::NoGradGuard guard;
  auto attention = [](const at::Tensor& q, const at::Tensor& k, const at::Tensor& v) {
    return at::matmul(
        at::softmax(at::matmul(q, k.transpose(2, 3)) / std::sqrt(double(k.size(3))), 3), v);
  };
  for (const int64_t heads : {1, 5}) {
    const std::string what = std::to_string(heads) + " packing heads";
    const auto m = Make("luna", {{"slots", 3}, {"tie_kv", false}, {"packing_heads", heads}});
    const auto x = Inputs(*m, 2, 9);  // q, pk, pv
    ASSERT_EQ(x[1].sizes(), at::IntArrayRef({2, heads, 9, kDim / heads}));
    const at::Tensor memory =
        m->named_parameters()["memory"].view({1, 3, heads, kDim / heads}).transpose(1, 2);
    const at::Tensor packed = attention(memory, x[1], x[2])
                                  .transpose(1, 2)
                                  .reshape({2, 3, kHeads, kWidth})
                                  .transpose(1, 2);
    const at::Tensor want = attention(x[0], packed, packed);
    ExpectClose(m->Bidirectional(x, {}), want, 1e-13, what);
    ExpectClose(m->Definition(Form::kBidirectional, x, x), want, 1e-13, what + ", definition");
    State state = m->EmptyState(2, x[0].options());
    m->Write(Narrow(x, 0, 4), state, {});
    m->Write(Narrow(x, 4, 5), state, {});
    EXPECT_EQ(state["memory"].sizes(), at::IntArrayRef({2, heads, 3, kDim / heads}));
    ExpectClose(m->Read(x, state), want, 1e-13, what + ", written in two pieces");
    ExpectClose(Narrow(Row({m->Bidirectional(x, {Lengths({9, 4}), {}})}, 1), 0, 4)[0],
                m->Bidirectional(Narrow(Row(x, 1), 0, 4), {}), 1e-13, what + ", a padded row");
  }
  const auto plain = Make("luna", {{"slots", 3}}),
             same = Make("luna", {{"slots", 3}, {"packing_heads", kHeads}});
  const auto x = Inputs(*plain, 2, 9);
  ExpectSameBits(same->Bidirectional(x, {}), plain->Bidirectional(x, {}), "as many heads");
  ExpectContains(Thrown([] {
                   Make("luna", {{"slots", 3}, {"packing_heads", 3}});
                 }),
                 {"[luna]", "packing_heads=3", "dim=10"});
}

TEST(Luna, OneHeadThatIsNotFiniteLeavesTheOthersAlone) {
  at::NoGradGuard guard;
  const auto m = Make("luna", {{"slots", 3}, {"tie_kv", false}});
  const auto x = Inputs(*m, 2, 9);
  const auto read = [&](const std::vector<at::Tensor>& y) {
    State state = m->EmptyState(2, x[0].options());
    m->Write(y, state, {});
    return m->Read(x, state);
  };
  const at::Tensor want = read(x);
  for (int64_t head = 0; head < kHeads; ++head) {
    auto broken = x;
    broken[1] = x[1].clone();
    broken[1].select(1, head).select(1, 4).fill_(std::nan(""));
    const at::Tensor got = read(broken);
    EXPECT_TRUE(got.select(1, head).isnan().all().item<bool>()) << head;
    ExpectClose(got.select(1, 1 - head), want.select(1, 1 - head), 1e-13, "the other head");
  }
}

TEST(LunaCausal, EqualFitsMakeMeans) {
  // With all of the memory at 0 every token weighs log2(1 + 2^0) = 1 (elu(0) + 1 = 1 likewise), so
  // the slots are running means.
  at::NoGradGuard guard;
  for (const char* weight : {"softplus", "elu"}) {
    const auto m = Make("luna_causal", {{"slots", 3}, {"weight", weight}});
    m->named_parameters()["memory"].zero_();
    const auto x = Inputs(*m, 2, 9);
    const at::Tensor count = at::arange(1, 10, at::kDouble).view({1, 1, 9, 1});
    ExpectClose(ExtendPieces(*m, x, {0, 4, 9}), x[2].cumsum(2) / count, 1e-14, weight);
  }
}

TEST(ConvLuna, ADeltaIsNoFilter) {
  at::NoGradGuard guard;
  const auto plain = Make("only_scaling", {{"slots", 3}});
  const auto x = Inputs(*plain, 3, 11);
  const ops::Mask mask = {Lengths({11, 4, 0}), {}};
  for (const int64_t kernel : {1, 2, 3, 4, 7}) {
    const auto conv = Make("conv_luna", {{"slots", 3}, {"kernel", kernel}});
    auto p = conv->named_parameters();
    if (kernel > 1) p["filter.weight"].zero_().select(1, (kernel - 1) / 2).fill_(1);
    p["memory"].copy_(plain->named_parameters()["memory"]);
    for (const double tau : {0.0, 0.7}) {
      p["tau"].fill_(tau);
      plain->named_parameters()["tau"].fill_(tau);
      ExpectClose(conv->Bidirectional(x, mask), plain->Bidirectional(x, mask), 1e-13,
                  "kernel " + std::to_string(kernel));
    }
  }
}

TEST(ConvLuna, AFixedTemperatureOfSqrtDIsLuna) {
  at::NoGradGuard guard;
  const auto luna = Make("luna", {{"slots", 3}, {"tie_kv", false}}),
             learned = Make("only_scaling", {{"slots", 3}});
  const auto fixed = Make("conv_luna", {{"slots", 3}, {"kernel", 1}, {"temperature", "sqrt"}});
  learned->named_parameters()["tau"].fill_(0.5 * std::log(double(kWidth)));
  const auto x = Inputs(*luna, 2, 11);
  for (const auto& m : {learned, fixed}) {
    m->named_parameters()["memory"].copy_(luna->named_parameters()["memory"]);
    ExpectClose(m->Bidirectional(x, {}), luna->Bidirectional(x, {}), 1e-13, m->info().name);
  }
}

TEST(ConvLuna, PublishedMasksSeePadding) {
  at::NoGradGuard guard;
  for (const char* filter : {"maxpool", "conv"}) {
    const Json options = {{"slots", 3}, {"kernel", 4}, {"filter", filter}};
    Json none = options;
    none["mask"] = "none";
    const auto ours = Make("conv_luna", options), published = Make("conv_luna", none);
    for (const auto& p : ours->named_parameters())
      published->named_parameters()[p.key()].copy_(p.value());
    const auto x = Inputs(*ours, 1, 12);
    const ops::Mask mask = {Lengths({7}), {}};
    const at::Tensor got = published->Bidirectional(x, mask),
                     want = published->Bidirectional(x, {});
    ExpectClose(got.narrow(2, 0, 7), want.narrow(2, 0, 7), 1e-14, "padding is tokens");
    EXPECT_GT(RelRms(got, ours->Bidirectional(x, mask)), 1e-3) << filter;
    // A centred convolution has one key for each token, with or without masks; a maximum loses the
    // last three windows.
    const double difference = RelRms(want, ours->Bidirectional(x, {}));
    EXPECT_EQ(difference < 1e-13, filter == std::string("conv")) << difference;
  }
  const auto m =
      Make("conv_luna", {{"slots", 3}, {"kernel", 4}, {"filter", "maxpool"}, {"mask", "none"}});
  ExpectContains(Thrown([&] { m->Bidirectional(Inputs(*m, 1, 3), {}); }),
                 {"[conv_luna]", "4 tokens", "in 3 tokens", "mask=tokens"});
  for (const char* filter : {"maxpool", "conv"}) {
    const auto strided =
        Make("conv_luna",
             {{"slots", 3}, {"kernel", 4}, {"stride", 3}, {"filter", filter}, {"mask", "none"}});
    for (const int64_t length : {1, 2, 3})
      ExpectContains(Thrown([&] { strided->Bidirectional(Inputs(*strided, 1, length), {}); }),
                     {"[conv_luna]", "no window in " + std::to_string(length)});
    const auto x = Inputs(*strided, 1, 4);
    ExpectClose(strided->Bidirectional(x, {}), strided->Definition(Form::kBidirectional, x, x),
                1e-13, filter);
  }
}

TEST(SharedWorkspace, TokensAndWeightsOfTwoTypesAreRefused) {
  at::NoGradGuard guard;
  const auto m = Make("shared_workspace", {{"slots", 3}});
  const auto x = Inputs(*m, 2, 9);
  const std::string message = Thrown([&] { m->Bidirectional(testing::To(x, at::kFloat), {}); });
  ExpectContains(message, {"[shared_workspace] expected tokens and weights of one dtype",
                           "got Float and Double"});
  m->to(at::kFloat);
  ExpectContains(Thrown([&] { m->Bidirectional(x, {}); }), {"got Double and Float"});
  m->Bidirectional(testing::To(x, at::kBFloat16), {});
}

TEST(Luna, TensorsOfOtherTokensArePackedNeitherNorUnpacked) {
  at::NoGradGuard guard;
  for (const char* name : {"luna", "conv_luna", "set_transformer", "shared_workspace"}) {
    const auto m = Make(name, {{"slots", 3}});
    for (const Side side : {Side::kKey, Side::kQuery}) {
      auto x = Inputs(*m, 2, 9);
      for (size_t i = 0; i < x.size(); ++i) {
        if (m->Projections()[i].side == side) x[i] = x[i].narrow(1, 0, 1).narrow(3, 0, 1);
      }
      const auto call = [&] {
        side == Side::kKey ? m->memory_mechanism()->Pack(x, {})
                           : m->memory_mechanism()->Unpack(x, {}, {});
      };
      ExpectContains(Thrown(call), {StrCat("[", name, "] expected "), "of shape [B,"});
    }
  }
}

TEST(SharedWorkspace, AClosedInputGateKeepsTheMemory) {
  at::NoGradGuard guard;
  const auto m = Make("shared_workspace", {{"slots", 3}, {"init", "normal"}});
  auto x = Inputs(*m, 2, 9);
  x[3].narrow(3, 0, kDim).fill_(-1000);    // input gate
  x[3].narrow(3, kDim, kDim).fill_(1000);  // forget gate
  const at::Tensor out = m->Bidirectional(x, {}),
                   memory =
                       m->named_parameters()["memory"].view({1, 3, kHeads, kWidth}).transpose(1, 2);
  const at::Tensor p =
      at::softmax(at::matmul(x[0], memory.transpose(2, 3)) / std::sqrt(double(kWidth)), 3);
  ExpectClose(out, at::matmul(p, memory), 1e-13, "the tokens read the memory as it was");
}

TEST(MemoryMechanisms, TheFirstLayerOwnsTheMemory) {
  for (const MechanismInfo* info : Mechanisms()) {
    if (info->memory == MemoryUse::kNone || info->memory == MemoryUse::kLatents) continue;
    const auto first = Make(info->name, {{"slots", 4}}),
               second = Make(info->name, {{"slots", 4}}, first.get());
    EXPECT_EQ(first->named_parameters()["memory"].sizes(), at::IntArrayRef({1, 4, kDim}))
        << info->name;
    EXPECT_FALSE(second->named_parameters().contains("memory")) << info->name;
    const auto& memory = dynamic_cast<const MemoryMechanism&>(*second);
    ExpectSameBits(memory.InitialMemory(),
                   dynamic_cast<const MemoryMechanism&>(*first).InitialMemory(), info->name);
  }
}

TEST(MemoryMechanisms, InitialMemories) {
  for (const auto& [init, deviation] :
       std::vector<std::pair<std::string, double>>{{"normal", 1},
                                                   {"embedding", 1 / std::sqrt(double(kDim))},
                                                   {"scaled", 1},
                                                   {"xavier", std::sqrt(2.0 / (4001.0 * kDim))}}) {
    const auto m = Make("luna", {{"slots", 4000}, {"init", init}});
    EXPECT_NEAR(dynamic_cast<const MemoryMechanism&>(*m).InitialMemory().std().item<double>(),
                deviation, 0.03 * deviation)
        << init;
  }
  const auto m = Make("luna", {{"slots", 3}, {"init", "identity"}});
  ExpectSameBits(m->named_parameters()["memory"][0], at::eye(3, kDim, at::kDouble), "identity");
  // The defaults that are not Luna's.
  ExpectSameBits(Make("shared_workspace", {{"slots", 3}})->named_parameters()["memory"][0],
                 at::eye(3, kDim, at::kDouble), "workspace");
  const at::Tensor set = Make("set_transformer", {{"slots", 4000}})->named_parameters()["memory"];
  const double bound = std::sqrt(6.0 / (4001.0 * kDim));
  EXPECT_LE(set.abs().max().item<double>(), bound);
  EXPECT_NEAR(set.std().item<double>(), bound / std::sqrt(3.0), 0.02 * bound);
}

TEST(Perceiver, InitialLatents) {
  const at::Tensor normal = Make("perceiver", {{"latents", 4000}})->named_parameters()["latents"];
  EXPECT_NEAR(normal.std().item<double>(), 1, 0.03);
  EXPECT_GT(normal.abs().max().item<double>(), 3);
  // A normal variable cut at two deviations keeps 0.8796 of its deviation.
  const at::Tensor cut =
      Make("perceiver", {{"latents", 4000}, {"init", "truncated"}})->named_parameters()["latents"];
  EXPECT_LE(cut.abs().max().item<double>(), 0.04 * (1 + 1e-6));
  EXPECT_NEAR(cut.std().item<double>(), 0.02 * 0.8796, 0.02 * 0.02);
}

TEST(MemoryMechanisms, SinusoidsAndANormOfTheInitialMemory) {
  at::NoGradGuard guard;
  for (const int64_t width : {10, 7}) {  // an odd one ends in a zero
    AttentionDims dims;
    dims.dim = width, dims.heads = 1;
    const int64_t slots = 5, half = width / 2;
    at::Tensor sinusoid = at::zeros({slots, width}, at::kDouble);
    for (int64_t m = 0; m < slots; ++m) {
      for (int64_t i = 0; i < half; ++i) {
        const double angle = double(m) * std::pow(10000.0, -double(i) / double(half - 1));
        sinusoid[m][i] = std::sin(angle);
        sinusoid[m][half + i] = std::cos(angle);
      }
    }
    for (const char* name : {"luna", "luna_causal", "set_transformer"}) {
      const MechanismInfo& info = FindMechanism(name);
      const auto with = info.Make({{"slots", slots}, {"init", "scaled"}, {"sinusoid", true}}, dims);
      const auto normed = info.Make(
          {{"slots", slots}, {"init", "embedding"}, {"sinusoid", true}, {"norm", true}}, dims);
      AttentionDims later = dims;
      later.first = normed.get();
      const auto second = info.Make(
          {{"slots", slots}, {"init", "embedding"}, {"sinusoid", true}, {"norm", true}}, later);
      for (const auto& m : {with, normed}) m->to(at::kDouble);
      const at::Tensor memory = with->named_parameters()["memory"];
      ExpectClose(with->InitialMemory(), memory * std::sqrt(double(width)) + sinusoid, 1e-14, name);
      auto p = normed->named_parameters();
      p["memory_norm.weight"].normal_();
      p["memory_norm.bias"].normal_();
      const at::Tensor sum = p["memory"] + sinusoid, centred = sum - sum.mean(2, true);
      const at::Tensor unit = centred / (centred.square().mean(2, true) + 1e-5).sqrt();
      ExpectClose(normed->InitialMemory(), unit * p["memory_norm.weight"] + p["memory_norm.bias"],
                  1e-13, std::string(name) + ", norm");
      ExpectSameBits(second->InitialMemory(), normed->InitialMemory(),
                     std::string(name) + ", second layer");
      EXPECT_TRUE(second->named_parameters().is_empty()) << name;
    }
  }
}

TEST(MemoryMechanisms, RefuseWithAReason) {
  auto refused = [](const std::string& name, Form form) {
    return Thrown([&] { RequireForm(FindMechanism(name), form); });
  };
  ExpectContains(refused("luna", Form::kCausal), {"[luna]", "luna_causal"});
  ExpectContains(refused("luna_causal", Form::kBidirectional),
                 {"[luna_causal]", "use luna instead"});
  ExpectContains(refused("conv_luna", Form::kCausal), {"whole input", "luna_causal"});
  ExpectContains(refused("only_filtering", Form::kCross), {"use luna instead"});
  ExpectContains(refused("shared_workspace", Form::kCausal), {"gated_slots"});
  ExpectContains(Thrown([] { FindMechanism("luna:2+softmax:2"); }),
                 {"luna", "cannot share a layer"});
  State state;
  const auto m = Make("conv_luna", {{"slots", 3}});
  ExpectContains(Thrown([&] { m->Extend(Inputs(*m, 1, 3), state, {}); }),
                 {"[conv_luna]", "causal"});
}

}  // namespace
}  // namespace cistern
