// Softmax attention with few keys or few queries of many heads, which the kernels of slots compute:
// the same as the definition, with every mask that they take.
#include <ATen/ATen.h>

#include <cmath>

#include "cistern/ops/softmax_attention.h"
#include "cistern/ops/testing.h"

namespace cistern::ops {
namespace {

using namespace cistern::testing;

struct Case {
  std::string name;
  int64_t queries, keys, key_width, value_width;
};
constexpr int64_t kHeads = 11;
const std::vector<Case> kCases = {{"few keys", 1100, 16, 8, 8},
                                  {"one key", 1024, 1, 5, 5},
                                  {"keys of another width", 1030, 7, 5, 3},
                                  {"few queries", 16, 1100, 8, 8},
                                  {"few queries, another width", 7, 1024, 5, 3},
                                  {"many segments", 5, 4200, 4, 4}};

struct Masked {
  std::string name;
  Mask mask;
  at::Tensor valid;  // [B,S], by SoftmaxAttention; of MaskedAttention where `visible`
  bool visible = false;
};
std::vector<Masked> Masks(int64_t keys) {
  at::Tensor valid = at::rand({3, keys}) < 0.6, none = valid.clone();
  none[1].fill_(false);
  const at::Tensor lengths = at::tensor({keys, int64_t{0}, (keys + 1) / 2}, at::kLong);
  return {{"no mask", {}, {}},
          {"lengths", {lengths, {}}, {}},
          {"valid keys", {}, none},
          {"lengths and valid keys", {lengths, {}}, valid},
          {"visible", {}, none, true}};
}

// What every query's keys are, [B,S] bool.
at::Tensor Seen(const Masked& m, int64_t keys) {
  at::Tensor seen = at::ones({3, keys}, at::kBool);
  if (m.mask.lengths) seen = seen.logical_and(Within(*m.mask.lengths, keys));
  if (m.valid.defined()) seen = seen.logical_and(m.valid);
  return seen;
}

at::Tensor Attention(const std::vector<at::Tensor>& x, const Masked& m) {
  if (m.visible)
    return MaskedAttention(x[0], x[1], x[2], m.valid.unsqueeze(1).unsqueeze(1), 0.4, 0);
  SoftmaxOptions options;
  options.scale = 0.4;
  return SoftmaxAttention(x[0], x[1], x[2], options, m.mask, m.valid);
}

void ExpectDefinition(const Case& c, const Masked& m, bool broken, at::ScalarType type,
                      double tolerance) {
  const std::string what = c.name + ", " + m.name + (broken ? ", NaN where none sees it" : "");
  at::manual_seed(5);
  std::vector<at::Tensor> given = {Normal({3, c.queries, kHeads, c.key_width}),
                                   Normal({3, c.keys, kHeads, c.key_width}),
                                   Normal({3, c.keys, kHeads, c.value_width})};
  const at::Tensor g = Normal({3, kHeads, c.queries, c.value_width}), seen = Seen(m, c.keys);
  std::vector<at::Tensor> leaves, x;
  for (size_t i = 0; i < 3; ++i) {
    at::Tensor y = given[i].to(type);
    if (broken && i > 0) {
      y = y.masked_fill(seen.logical_not().unsqueeze(-1).unsqueeze(-1), std::nan(""));
    }
    leaves.push_back(Leaf(y));
    x.push_back(leaves[i].transpose(1, 2));
  }
  const at::Tensor out = Attention(x, m);
  const auto got = Gradients((out * g.to(type)).sum(), leaves);

  std::vector<at::Tensor> exact, exact_x;
  for (const at::Tensor& y : given) {
    exact.push_back(Leaf(y.to(at::kDouble)));
    exact_x.push_back(exact.back().transpose(1, 2));
  }
  const at::Tensor hidden = seen.logical_not().unsqueeze(1).unsqueeze(1),
                   p = at::softmax((at::matmul(exact_x[0], exact_x[1].transpose(2, 3)) * 0.4)
                                       .masked_fill(hidden, -1e300),
                                   -1)
                           .masked_fill(hidden, 0.0),
                   want = at::matmul(p, exact_x[2]);
  const auto of_want = Gradients((want * g.to(at::kDouble)).sum(), exact);
  ExpectClose(out, want, tolerance, what);
  for (size_t i = 0; i < 3; ++i)
    ExpectClose(got[i], of_want[i], tolerance, what + " " + std::to_string(i));
}

TEST(AttentionOfSlots, IsTheDefinition) {
  for (const Case& c : kCases) {
    at::manual_seed(3);
    for (const Masked& m : Masks(c.keys)) {
      for (const bool broken : {false, true}) {
        ExpectDefinition(c, m, broken, at::kDouble, 1e-12);
        ExpectDefinition(c, m, broken, at::kFloat, 3e-6);
      }
    }
  }
}

// Whether queries are many enough for the kernels of slots, or their number: a row is the same to
// rounding.
TEST(AttentionOfSlots, IsExactAttention) {
  const auto q = Normal({2, 8, 2100, 8}), k = Normal({2, 8, 64, 8}), v = Normal({2, 8, 64, 8});
  const at::Tensor all = SoftmaxAttention(q, k, v, {}),
                   some = SoftmaxAttention(q.narrow(2, 0, 1000), k, v, {});
  ExpectClose(all.narrow(2, 0, 1000), some, 2e-6, "few keys");
  const at::Tensor few = SoftmaxAttention(k, q, q, {}),
                   causal = SoftmaxAttention(k, q, q, {true, 2099});  // by exact attention
  ExpectClose(few, causal, 2e-6, "few queries");
}

}  // namespace
}  // namespace cistern::ops
