// Identities of efficient attention (spec 2.2, 2.18).
#include "cistern/attention/testing_mechanisms.h"
#include "cistern/base/error.h"

namespace cistern {
namespace {

using namespace cistern::testing;

std::shared_ptr<Mechanism> Make(const std::string& name, const Json& options) {
  AttentionDims dims;
  dims.dim = kDim, dims.heads = kHeads;
  return FindMechanism(name).make(options, dims);
}

TEST(Efficient, IsLatteWithAsManyLatentsAsChannels) {
  const auto efficient = Make("efficient", Json::object()),
             latte = Make("latte", Json{{"latents", kDim}});
  at::manual_seed(1);
  const auto x = Inputs(*efficient, 2, 40);
  EXPECT_EQ(efficient->EmptyState(2, at::kFloat).Bytes(), latte->EmptyState(2, at::kFloat).Bytes());
  for (const ops::Impl impl : kImpls) {
    ops::ImplScope scope(impl);
    ExpectSameBits(ExtendPieces(*efficient, x, {0, 13, 40}), ExtendPieces(*latte, x, {0, 13, 40}),
                   "causal");
    ExpectSameBits(efficient->Bidirectional(x, {}), latte->Bidirectional(x, {}), "bidirectional");
  }
}

TEST(Efficient, ScalingDividesThePlainProduct) {
  at::manual_seed(2);
  const int64_t T = 70;
  for (const bool by_length : {false, true}) {
    const auto m = Make(
        "efficient", Json{{"normaliser", "scaling"}, {"divisor", by_length ? "length" : "width"}});
    const auto x = Inputs(*m, 2, T);
    const at::Tensor scores = at::matmul(x[0], x[1].transpose(2, 3));  // [B,H,T,T]
    const double width = double(kWidth);
    const at::Tensor seen = at::arange(1, T + 1, at::kDouble).unsqueeze(1);
    ExpectClose(m->Bidirectional(x, {}), at::matmul(scores / (by_length ? double(T) : width), x[2]),
                1e-12, "bidirectional");
    ExpectClose(ExtendPieces(*m, x, {0, 30, T}),
                at::matmul(by_length ? scores.tril() / seen : scores.tril() / width, x[2]), 1e-12,
                "causal");
  }
}

TEST(Efficient, AdjacentPiecesMerge) {
  at::manual_seed(3);
  for (const Json& options : FindMechanism("efficient").cases) {
    const auto m = Make("efficient", options);
    const auto x = Inputs(*m, 2, 30), more = Inputs(*m, 2, 5);
    State first, second, whole;
    ExtendPieces(*m, Narrow(x, 0, 12), {0, 12}, {}, &first);
    ExtendPieces(*m, Narrow(x, 12, 18), {0, 18}, {}, &second);
    ExtendPieces(*m, x, {0, 30}, {}, &whole);
    State merged = m->Merge(first, second);
    ExpectClose(m->Extend(more, merged, {}), m->Extend(more, whole, {}), 1e-12, options.dump());
  }
}

TEST(Efficient, ADivisorNeedsScaling) {
  ExpectContains(Thrown([] {
                   Make("efficient", Json{{"divisor", "length"}});
                 }),
                 {"[efficient]", "divisor=length", "normaliser=scaling"});
}

}  // namespace
}  // namespace cistern
