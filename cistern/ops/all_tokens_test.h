#pragma once
// What the tests of ops that write or read all tokens at once share: the three implementations
// agree, forward and backward; bits do not depend on threads nor on what scratch memory held.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <string>
#include <vector>

#include "cistern/base/parallel.h"
#include "cistern/kernels/isa.h"
#include "cistern/kernels/workspace.h"
#include "cistern/ops/impl.h"
#include "cistern/ops/memory_test.h"
#include "cistern/ops/testing.h"

namespace cistern::ops::all_tokens_test {

using namespace cistern::testing;
using Tensors = std::vector<at::Tensor>;

struct Problem {
  std::string name;
  Tensors x;      // tokens, then states
  size_t tokens;  // how many of x are tokens
  Tensors g;      // of the outputs
  bool heads_last;
  std::function<Tensors(const Tensors&)> run;
};

// Lengths of rows of which the last is short, and one empty where there are more than two.
inline Mask SomeLengths(int64_t batch, int64_t length) {
  std::vector<int64_t> lengths(size_t(batch), length);
  lengths.back() = length / 3;
  if (batch > 2) lengths[1] = 0;
  return {at::tensor(lengths), {}};
}

// Outputs, then gradients.
inline Tensors Everything(const Problem& p, Impl impl, at::ScalarType dtype) {
  const ImplScope scope(impl);
  Tensors x;
  for (size_t i = 0; i < p.x.size(); ++i)
    x.push_back(Leaf(i < p.tokens ? WithLayout(p.x[i].to(dtype), p.heads_last) : p.x[i]));
  const Tensors y = p.run(x);
  at::Tensor loss = at::zeros({}, at::kDouble);
  for (size_t i = 0; i < y.size(); ++i)
    loss = loss + (Finite(y[i]) * p.g[i].to(y[i].scalar_type())).sum().to(at::kDouble);
  Tensors all;
  for (const at::Tensor& t : y) all.push_back(t.detach());
  for (const at::Tensor& t : Gradients(loss, x)) all.push_back(t);
  return all;
}

inline void OnEveryIsa(const std::function<void()>& body) {
  for (const std::string& isa : SupportedIsas()) {
    ForceIsa(isa);
    body();
  }
  ForceIsa("");
}

// tolerance(impl, dtype): negative where the implementation is left out.
inline void ExpectAgreement(const Problem& p,
                            const std::function<double(Impl, at::ScalarType)>& tolerance) {
  const Tensors want = Everything(p, Impl::kReference, at::kDouble);
  for (const Impl impl : kImpls) {
    for (const auto dtype : {at::kDouble, at::kFloat}) {
      const double allowed = tolerance(impl, dtype);
      if (allowed < 0) continue;
      const Tensors got = Everything(p, impl, dtype);
      for (size_t i = 0; i < want.size(); ++i)
        ExpectClose(
            got[i], want[i], allowed,
            p.name + ", " + ImplName(impl) + " " + at::toString(dtype) + " " + std::to_string(i));
    }
  }
}

inline void ExpectSameBitsForAnyNumberOfThreads(const Problem& p) {
  const int threads = NumThreads();
  SetNumThreads(1);
  const Tensors want = Everything(p, Impl::kKernel, at::kFloat);
  for (const int count : {2, 3}) {
    SetNumThreads(count);
    const Tensors got = Everything(p, Impl::kKernel, at::kFloat);
    for (size_t i = 0; i < want.size(); ++i) ExpectSameBits(got[i], want[i], p.name);
  }
  SetNumThreads(threads);
}

// Nothing is read that was not written, however wide vectors are beside the padding.
inline void ExpectFiniteOnPoisonedWorkspaces(const Problem& p) {
  OnEveryIsa([&] {
    for (const auto dtype : {at::kDouble, at::kFloat}) {
      Workspace::PoisonAll(true);
      const Tensors all = Everything(p, Impl::kKernel, dtype);
      Workspace::PoisonAll(false);
      for (const at::Tensor& t : all)
        EXPECT_TRUE(at::isfinite(Finite(t)).all().item<bool>())
            << p.name << " " << ActiveIsa() << " " << at::toString(dtype);
    }
  });
}

// A write of three rows of 33 tokens, of which the second is empty and the third has 11: what is
// not finite in padding is not read; NaN in a token reaches a memory.
inline void ExpectPaddingUnread(const Problem& p) {
  const Tensors want = Everything(p, Impl::kKernel, at::kFloat);
  Problem poisoned = p;
  for (size_t i = 0; i < p.tokens; ++i) {
    poisoned.x[i] = p.x[i].clone();
    poisoned.x[i].select(0, 1).fill_(std::nan(""));
    poisoned.x[i].select(0, 2).narrow(1, 11, 22).fill_(std::numeric_limits<double>::infinity());
  }
  for (const Impl impl : kImpls) {
    const Tensors got = Everything(poisoned, impl, at::kFloat);
    for (size_t i = 0; i < want.size(); ++i)
      ExpectClose(got[i], want[i], 1e-5, std::string(ImplName(impl)) + " " + std::to_string(i));
  }
  for (size_t i = 0; i < p.tokens; ++i) {
    Problem bad = p;
    bad.x[i] = p.x[i].clone();
    bad.x[i][0][0][4][2] = std::nan("");
    const Tensors got = Everything(bad, Impl::kKernel, at::kFloat);
    bool reached = false;
    for (size_t y = 0; y < p.g.size(); ++y)
      reached = reached || at::isnan(got[y][0][0]).any().item<bool>();
    EXPECT_TRUE(reached) << i;
  }
}

inline void ExpectSecondDerivatives(const Problem& p) {
  const auto second = [&](Impl impl) {
    const ImplScope scope(impl);
    Tensors x;
    for (const at::Tensor& t : p.x) x.push_back(Leaf(t));
    at::Tensor loss = at::zeros({}, at::kDouble);
    for (const at::Tensor& t : p.run(x)) loss = loss + t.square().sum();
    const Tensors first = torch::autograd::grad({loss}, x, {}, true, true);
    at::Tensor norm = at::zeros({}, at::kDouble);
    for (const at::Tensor& t : first) norm = norm + t.square().sum();
    return Gradients(norm, x);
  };
  const Tensors want = second(Impl::kComposite), got = second(Impl::kKernel);
  for (size_t i = 0; i < want.size(); ++i) ExpectClose(got[i], want[i], 1e-10, p.name);
}

}  // namespace cistern::ops::all_tokens_test
