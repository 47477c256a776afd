#include "cistern/attention/head_groups.h"

#include "cistern/attention/testing_mechanisms.h"
#include "cistern/base/error.h"
#include "cistern/kernels/isa.h"

namespace cistern {
namespace {

using namespace cistern::testing;

std::string Refusal(const std::string& name, Json options = Json::object(),
                    int64_t heads = kHeads) {
  try {
    AttentionDims dims;
    dims.dim = 6 * heads, dims.heads = heads;
    FindMechanism(name).Make(options, dims);
  } catch (const UsageError& e) {
    return e.what();
  }
  return "no UsageError";
}

// Each group writes its memories where they lie, though the whole state has handles of them, too.
TEST(HeadGroups, GoOnInPlace) {
  at::NoGradGuard guard;
  AttentionDims dims;
  dims.dim = 20, dims.heads = 4;
  const auto m = FindMechanism("latte:2+linear:2").Make(Json::object(), dims);
  State state = m->EmptyState(2, at::kDouble);
  const auto extend = [&](int64_t tokens) {
    std::vector<at::Tensor> x;
    for (const Projection& p : m->Projections())
      x.push_back(Normal({2, p.heads, tokens, p.width / p.heads}));
    m->Extend(x, state, {});
    return std::pair(state["latte_memory"].const_data_ptr(),
                     state["linear_memory"].const_data_ptr());
  };
  const auto places = extend(5);
  EXPECT_EQ(extend(1), places);
}

// A mechanism's tokens in bfloat16, and the same numbers in float.
std::pair<std::vector<at::Tensor>, std::vector<at::Tensor>> RoundedTokens(const Mechanism& m) {
  std::vector<at::Tensor> half, whole;
  for (const Projection& p : m.Projections()) {
    half.push_back(Normal({2, p.heads, 17, p.width / p.heads}).to(at::kBFloat16));
    whole.push_back(half.back().to(at::kFloat));
  }
  return {half, whole};
}

// A group that does not take bfloat16, beside one that does, computes in float.
TEST(HeadGroups, FloatsForGroupsThatTakeThem) {
  at::manual_seed(3);
  AttentionDims dims;
  dims.dim = 20, dims.heads = 4;
  const auto m = FindMechanism("latte:2+gated_slots:2").Make(Json::object(), dims);
  m->to(at::kFloat);
  ASSERT_TRUE(m->TakesBFloat16(Form::kCausal));
  const auto [half, whole] = RoundedTokens(*m);
  const auto run = [&](const std::vector<at::Tensor>& x) {
    State state = m->EmptyState(2, at::kFloat);
    return m->Extend(x, state, {});
  };
  ForceIsa("portable");  // whose products are those of floats
  EXPECT_TRUE(at::equal(run(half), run(whole).to(at::kBFloat16)));
  ForceIsa("");
}

// The same of what is written at once and then read.
TEST(HeadGroups, FloatsToWriteAndRead) {
  at::manual_seed(3);
  AttentionDims dims;
  dims.dim = 20, dims.heads = 4;
  const auto m =
      FindMechanism("softmax:2+performer:2").Make(Json{{"performer", {{"kernel", "relu"}}}}, dims);
  m->to(at::kFloat);
  ASSERT_TRUE(m->TakesBFloat16(Form::kBidirectional));
  const auto [half, whole] = RoundedTokens(*m);
  const auto run = [&](const std::vector<at::Tensor>& x) {
    State state = m->EmptyState(2, x[0].options());
    m->Write(x, state, {});
    return m->Read(x, state);
  };
  const at::Tensor got = run(half), want = run(whole);
  ASSERT_EQ(got.scalar_type(), at::kBFloat16);
  const int64_t second = want.size(1) / 2;  // heads of the group that takes floats
  EXPECT_TRUE(
      at::equal(got.narrow(1, second, second), want.narrow(1, second, second).to(at::kBFloat16)));
}

TEST(HeadGroups, EachGroupIsItsMechanismAlone) {
  at::manual_seed(3);
  AttentionDims dims;
  dims.dim = 20, dims.heads = 4;
  const Json options = {{"latte", {{"latents", 6}}}, {"abc_mlp", {{"slots", 3}}}};
  const auto m = FindMechanism("softmax:1+latte:2+abc_mlp:1").Make(options, dims);
  std::vector<at::Tensor> x;
  std::vector<std::string> names;
  for (const Projection& p : m->Projections()) {
    names.push_back(p.name);
    x.push_back(Normal({2, p.heads, 17, p.width / p.heads}));
  }
  EXPECT_EQ(names, (std::vector<std::string>{"softmax_q", "softmax_k", "softmax_v", "latte_q",
                                             "latte_k", "latte_v", "abc_mlp_q", "abc_mlp_k",
                                             "abc_mlp_v", "abc_mlp_control"}));
  const at::Tensor whole = ExtendPieces(*m, x, {0, 17}),
                   everywhere = m->Bidirectional(x, {Lengths({17, 5}), {}});
  EXPECT_EQ(whole.sizes(), (std::vector<int64_t>{2, 4, 17, 5}));
  ExpectClose(ExtendPieces(*m, x, {0, 6, 7, 17}), whole, 1e-12, "pieces");
  ExpectClose(whole, m->Definition(Form::kCausal, x, x), 1e-12, "definition");
  int64_t head = 0;
  size_t next = 0;
  for (const auto& [name, heads] :
       std::vector<std::pair<std::string, int64_t>>{{"softmax", 1}, {"latte", 2}, {"abc_mlp", 1}}) {
    AttentionDims part;
    part.dim = 5 * heads, part.heads = heads;
    const auto alone =
        FindMechanism(name).Make(options.contains(name) ? options.at(name) : Json::object(), part);
    const size_t count = alone->Projections().size();
    const std::vector<at::Tensor> own(x.begin() + int64_t(next), x.begin() + int64_t(next + count));
    ExpectSameBits(whole.narrow(1, head, heads), ExtendPieces(*alone, own, {0, 17}), name);
    ExpectSameBits(everywhere.narrow(1, head, heads),
                   alone->Bidirectional(own, {Lengths({17, 5}), {}}), name + " bidirectional");
    head += heads;
    next += count;
  }
}

TEST(HeadGroups, TheSameMechanismTwiceKeepsTwoStates) {
  AttentionDims dims;
  dims.dim = 12, dims.heads = 2;
  const auto m = FindMechanism("latte:1+latte:1").Make(Json{{"latte", {{"latents", 3}}}}, dims);
  std::vector<std::string> names;
  for (const NamedTensor& t : m->EmptyState(1, at::kFloat).tensors) names.push_back(t.name);
  EXPECT_EQ(names, (std::vector<std::string>{"latte0_memory", "latte0_z", "latte0_decoding",
                                             "latte1_memory", "latte1_z", "latte1_decoding"}));
}

TEST(HeadGroups, WhatAllHaveIsDeclared) {
  const MechanismInfo& info = FindMechanism("softmax:1+latte:1");
  EXPECT_EQ(&info, &FindMechanism("softmax:1+latte:1"));
  EXPECT_FALSE(info.bounded || info.exact || info.merges || info.truncates);
  EXPECT_TRUE(info.Supports(Form::kCausal) && info.Supports(Form::kCross));
  EXPECT_EQ(info.positions.back(), PositionKind::kRotary);  // turns the softmax heads alone
  const MechanismInfo& bounded = FindMechanism("latte:1+abc_mlp:3");
  EXPECT_TRUE(bounded.bounded && bounded.merges);
  EXPECT_EQ(bounded.positions.back(), PositionKind::kSinusoidalHalves);
}

TEST(HeadGroups, ANameInsideAnotherIsNoGroup) {
  EXPECT_TRUE(InHeadGroups("rfa_gate:2+latte:2", "latte") &&
              InHeadGroups("rfa_gate:2+latte:2", "rfa_gate"));
  for (const char* other : {"rfa", "gate", "late", "latt"})
    EXPECT_FALSE(InHeadGroups("rfa_gate:2+latte:2", other)) << other;
  EXPECT_FALSE(InHeadGroups("latte", "latte"));
}

TEST(HeadGroups, RefusalsNameTheGroup) {
  ExpectContains(Refusal("softmax:1+late:1"),
                 {"unknown mechanism 'late'", "did you mean 'latte'?"});
  ExpectContains(Refusal("softmax:1+latte:2"),
                 {"shares out 3 heads, the layer has 2", "model.attention", "model.heads"});
  ExpectContains(Refusal("softmax:1+latte"), {"MECHANISM:HEADS", "got 'latte'"});
  ExpectContains(Refusal("softmax:0+latte:2"), {"got 'softmax:0'"});
  ExpectContains(Refusal("softmax:1+"), {"got ''"});
  ExpectContains(Refusal("softmax:1+latte:1", {{"latte", {{"latent", 3}}}}), {"latte", "latents"});
}

}  // namespace
}  // namespace cistern
