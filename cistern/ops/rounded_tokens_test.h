#pragma once
// What tests of tokens in bfloat16 share: what an op makes of rounded tokens, beside what it makes
// of the same numbers in float.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <vector>

#include "cistern/kernels/isa.h"
#include "cistern/ops/mask.h"
#include "cistern/ops/testing.h"

namespace cistern::ops::rounded_tokens {

using namespace cistern::testing;

using Tensors = std::vector<at::Tensor>;
// Tokens in, tokens and states out.
using Run = std::function<Tensors(const Tensors&)>;

// How near gradients are: of tokens, where they take the output as it was rounded, and of others,
// whose sums may have another order; and outputs and states. 0: the same bits.
struct Tolerance {
  double tokens = 0, others = 0, outputs = 0;
};

// Whether walks over chunks multiply in bfloat16.
inline bool ByPairs() { return GainsByBFloat16() && ActiveIsa().starts_with("avx512"); }
inline Tolerance OfWalks(const Tolerance& exact = {}) {
  return ByPairs() ? Tolerance{1.5e-2, 1.5e-2, 6e-3} : exact;
}

// Runs `test` with the instruction set in use, and, where that multiplies pairs, without them.
inline void WithAndWithoutPairs(const std::function<void()>& test) {
  test();
  if (!ByPairs()) return;
  ForceIsa("avx2");
  test();
  ForceIsa("");
}

// `tokens` are rounded; `run` of them in bfloat16, and in float. Outputs after the first, and those
// in double, are states, which are not rounded.
inline void ExpectRounded(const Tensors& tokens, const Tensors& others, const Run& run,
                          const std::string& what, const Tolerance& tolerance = {},
                          at::ScalarType type = at::kBFloat16) {
  Tensors half, whole, half_all, whole_all;
  for (const at::Tensor& t : tokens) {
    half.push_back(Leaf(t.to(type)));
    whole.push_back(Leaf(half.back().detach().to(at::kFloat)));
  }
  half_all = half, whole_all = whole;
  for (const at::Tensor& t : others) half_all.push_back(Leaf(t)), whole_all.push_back(Leaf(t));
  const Tensors got = run(half_all), want = run(whole_all);
  for (size_t i = 0; i < got.size(); ++i) {
    const bool of_tokens = i == 0 && want[i].scalar_type() == at::kFloat;
    ASSERT_EQ(got[i].scalar_type(), of_tokens ? type : want[i].scalar_type()) << what;
    const at::Tensor rounded = want[i].to(got[i].scalar_type());
    const std::string which = what + (of_tokens ? "" : " state");
    if (tolerance.outputs == 0) {
      ExpectSameBits(got[i], rounded, which);
    } else {
      ExpectClose(got[i], rounded, tolerance.outputs, which);
    }
  }
  // The gradient that comes back is in bfloat16, too.
  at::manual_seed(9);
  Tensors g_half, g_whole;
  for (const at::Tensor& y : got) {
    g_half.push_back(at::randn(y.sizes()).to(y.scalar_type()));
    g_whole.push_back(y.scalar_type() == type ? g_half.back().to(at::kFloat) : g_half.back());
  }
  const Tensors dx = torch::autograd::grad(got, half_all, g_half),
                want_dx = torch::autograd::grad(want, whole_all, g_whole);
  for (size_t i = 0; i < dx.size(); ++i) {
    ASSERT_EQ(dx[i].scalar_type(), half_all[i].scalar_type()) << what;
    const double near = i < tokens.size() ? tolerance.tokens : tolerance.others;
    const at::Tensor rounded = want_dx[i].to(dx[i].scalar_type());
    if (near == 0) {
      ExpectSameBits(dx[i], rounded, what + " gradient");
    } else {
      ExpectClose(dx[i], rounded, near, what + " gradient");
    }
  }
}

struct Shape {
  int64_t length, slots, width;
};
// Of {84, 48, 64} the last chunk has more than half of its rows, and depths end inside of a tile.
inline const std::vector<Shape> kShapes = {
    {1, 16, 16}, {5, 3, 7}, {70, 32, 16}, {84, 48, 64}, {300, 16, 33}};
constexpr Shape kShared = {1100, 16, 7};  // six heads; with eight threads, two for each

inline std::vector<Mask> Masks(int64_t length) {
  std::vector<Mask> masks = {{}};
  if (length > 1) {
    masks.push_back({Lengths({length, length / 2, 0}), {}});
    masks.push_back({{}, Starts(3, length, {{0, 0}, {1, 2}, {2, length - 1}})});
  }
  return masks;
}

inline at::Tensor Heads(int64_t length, int64_t width) { return at::randn({3, length, 2, width}); }
inline at::Tensor HeadsFirst(const at::Tensor& x) { return x.transpose(1, 2); }

}  // namespace cistern::ops::rounded_tokens
