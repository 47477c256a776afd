#pragma once
// What the tests of the slot memory and of the summing memory share: an op on random inputs, and
// what must hold of it.
#include <string>
#include <utility>
#include <vector>

#include "cistern/ops/slot_memory.h"
#include "cistern/ops/testing.h"

namespace cistern::testing {

using Tensors = std::vector<at::Tensor>;

struct MemoryProblem {
  std::string name;
  Tensors
      x;  // in double: a (r or q), s or w, u (v or k), memory, then z, or log_gate, or nothing more
  std::vector<size_t> state;  // which of x are the state before, double in every precision; the
                              // others are [B,H,T,w]
  size_t of_tokens =
      1;      // outputs: so many [B,H,T,w], then the state after, in the order of `state`
  Tensors g;  // one for each output: their gradients
  std::vector<std::string> parts;  // names: the outputs, then x
  ops::Mask mask;
  std::function<Tensors(const Tensors& x, const ops::Mask& mask)> run;

  bool IsState(size_t i) const { return std::find(state.begin(), state.end(), i) != state.end(); }
  int64_t length() const { return x[0].size(2); }
};

inline at::Tensor Finite(const at::Tensor& z) { return z.masked_fill(z.isinf(), 0.0); }

// Touches every output.
inline at::Tensor Loss(const MemoryProblem& p, const Tensors& outputs) {
  at::Tensor sum = at::zeros({}, outputs[0].scalar_type());
  for (size_t i = 0; i < outputs.size(); ++i)
    sum = sum +
          (Finite(outputs[i]) * p.g[i].to(outputs[i].scalar_type())).sum().to(sum.scalar_type());
  return sum;
}

inline Tensors LeavesOf(const MemoryProblem& p, at::ScalarType dtype = at::kDouble,
                        bool heads_last = false) {
  Tensors x;
  for (size_t i = 0; i < p.x.size(); ++i) {
    x.push_back(Leaf(p.IsState(i) ? p.x[i] : WithLayout(p.x[i].to(dtype), heads_last)));
  }
  return x;
}

// Tokens [begin, begin + count), going on from the state given.
inline Tensors PieceOf(const MemoryProblem& p, const Tensors& x, int64_t begin, int64_t count,
                       const Tensors& state) {
  Tensors piece;
  for (size_t i = 0, s = 0; i < x.size(); ++i)
    piece.push_back(p.IsState(i) ? state[s++] : x[i].narrow(2, begin, count));
  return piece;
}
inline Tensors StateOf(const MemoryProblem& p, const Tensors& x) {
  Tensors state;
  for (const size_t i : p.state) state.push_back(x[i]);
  return state;
}

// The outputs, then the gradients of x.
inline Tensors WithGradients(const MemoryProblem& p, const Tensors& outputs, const Tensors& x) {
  Tensors all;
  for (const at::Tensor& y : outputs) all.push_back(y.detach());
  for (const at::Tensor& g : Gradients(Loss(p, outputs), x)) all.push_back(g);
  return all;
}
inline Tensors Everything(const MemoryProblem& p, ops::Impl impl, at::ScalarType dtype,
                          bool heads_last = false) {
  ops::ImplScope scope(impl);
  const Tensors x = LeavesOf(p, dtype, heads_last);
  return WithGradients(p, p.run(x, p.mask), x);
}

// In float and double; tolerance(dtype, part).
template <class Tolerance>
void ExpectImplementationsAgree(const MemoryProblem& p, bool heads_last, Tolerance&& tolerance) {
  const Tensors want = Everything(p, ops::Impl::kReference, at::kDouble, heads_last);
  for (const ops::Impl impl : kImpls) {
    for (const auto dtype : {at::kDouble, at::kFloat}) {
      const Tensors got = Everything(p, impl, dtype, heads_last);
      EXPECT_EQ(got[0].scalar_type(), dtype);
      for (size_t i = 0; i < want.size(); ++i)
        ExpectClose(got[i], want[i], tolerance(dtype, i),
                    p.name + ", " + ops::ImplName(impl) +
                        (dtype == at::kFloat ? " float " : " double ") + p.parts[i]);
    }
  }
}

inline void ExpectFiniteDifferences(const MemoryProblem& p) {
  for (const ops::Impl impl : kImpls) {
    ops::ImplScope scope(impl);
    ExpectGradientsMatchDifferences([&](const Tensors& x) { return Loss(p, p.run(x, p.mask)); },
                                    p.x, p.name + ", " + ops::ImplName(impl));
  }
}

// The gradients of the other outputs are undefined then.
inline void ExpectGradientsOfOneOutputAlone(const MemoryProblem& p) {
  for (size_t output = 0; output < p.g.size(); ++output) {
    std::vector<Tensors> all;
    for (const ops::Impl impl : {ops::Impl::kReference, ops::Impl::kKernel}) {
      ops::ImplScope scope(impl);
      const Tensors x = LeavesOf(p);
      all.push_back(Gradients(Finite(p.run(x, p.mask)[output]).square().sum(), x));
    }
    for (size_t i = 0; i < p.x.size(); ++i)
      ExpectClose(all[1][i], all[0][i], 1e-12,
                  p.name + ", output " + p.parts[output] + ", input " + std::to_string(i));
  }
}

inline void ExpectSecondDerivatives(const MemoryProblem& p) {
  auto second = [&](ops::Impl impl, at::ScalarType dtype) {
    ops::ImplScope scope(impl);
    const Tensors x = LeavesOf(p, dtype);
    at::Tensor loss = at::zeros({}, dtype);
    for (const at::Tensor& t :
         torch::autograd::grad({Loss(p, p.run(x, p.mask)).square()}, x, {}, true, true))
      loss = loss + t.square().sum().to(dtype);
    return Gradients(loss, x);
  };
  const Tensors want = second(ops::Impl::kComposite, at::kDouble),
                exact = second(ops::Impl::kKernel, at::kDouble),
                got = second(ops::Impl::kKernel, at::kFloat);
  for (size_t i = 0; i < want.size(); ++i) {
    ExpectClose(exact[i], want[i], 1e-11, p.name + " double, input " + std::to_string(i));
    ExpectClose(got[i], want[i], 1e-5,
                p.name + " float, input " + std::to_string(i));  // two backward passes deep
  }
  // The composite's second derivative is itself checked by differences of its first.
  ops::ImplScope scope(ops::Impl::kKernel);
  ExpectGradientsMatchDifferences(
      [&](const Tensors& x_in) {
        at::AutoGradMode enable(true);
        Tensors x;
        for (const at::Tensor& t : x_in) x.push_back(t.requires_grad() ? t : Leaf(t));
        at::Tensor loss = at::zeros({}, at::kDouble);
        for (const at::Tensor& t :
             torch::autograd::grad({Loss(p, p.run(x, p.mask))}, x, {}, true, true))
          loss = loss + t.square().sum();
        return loss;
      },
      p.x, p.name + " second");
}

// Cut anywhere, and token by token: the same numbers and gradients through the state. Starts, but
// no lengths.
inline void ExpectPiecesEqualWhole(const MemoryProblem& p) {
  const int64_t length = p.length();
  for (const ops::Impl impl : kImpls) {
    ops::ImplScope scope(impl);
    auto run = [&](const std::vector<int64_t>& cuts) {
      const Tensors x = LeavesOf(p);
      Tensors state = StateOf(p, x);
      std::vector<Tensors> outs(p.of_tokens);
      for (size_t c = 0; c + 1 < cuts.size(); ++c) {
        const int64_t begin = cuts[c], count = cuts[c + 1] - begin;
        const Tensors y = p.run(PieceOf(p, x, begin, count, state), p.mask.Narrow(begin, count));
        for (size_t i = 0; i < p.of_tokens; ++i) outs[i].push_back(y[i]);
        state.assign(y.begin() + int64_t(p.of_tokens), y.end());
      }
      Tensors whole;
      for (const Tensors& pieces : outs) whole.push_back(at::cat(pieces, 2));
      whole.insert(whole.end(), state.begin(), state.end());
      return WithGradients(p, whole, x);
    };
    const Tensors want = run({0, length});
    std::vector<int64_t> each;
    for (int64_t t = 0; t <= length; ++t) each.push_back(t);
    for (int64_t cut = 0; cut <= length + 1; ++cut) {
      const Tensors got = run(cut > length ? each : std::vector<int64_t>{0, cut, length});
      for (size_t i = 0; i < want.size(); ++i)
        ExpectClose(
            got[i], want[i], 1e-12,
            p.name + " " + ops::ImplName(impl) + " cut " + std::to_string(cut) + " " + p.parts[i]);
    }
  }
}

inline void ExpectSameBitsForAnyNumberOfThreads(const MemoryProblem& p) {
  const Tensors want = Everything(p, ops::Impl::kKernel, at::kFloat, true);
  for (const int threads : {2, 3}) {
    SetNumThreads(threads);
    const Tensors got = Everything(p, ops::Impl::kKernel, at::kFloat, true);
    SetNumThreads(1);
    for (size_t i = 0; i < want.size(); ++i)
      ExpectSameBits(got[i], want[i], p.name + " " + p.parts[i]);
  }
}

// For a problem of 300 tokens, by the kernels, in every dtype: no bit of the first output's first t
// tokens depends on later ones.
inline void ExpectPastIsBlindToTheFuture(const MemoryProblem& p) {
  const ops::ImplScope scope(ops::Impl::kKernel);
  for (const auto dtype : {at::kFloat, at::kDouble, at::kBFloat16}) {
    Tensors x;
    for (size_t i = 0; i < p.x.size(); ++i) x.push_back(p.IsState(i) ? p.x[i] : p.x[i].to(dtype));
    const at::Tensor want = p.run(x, {})[0];
    for (const int64_t t : {1, 31, 32, 33, 127, 128, 129, 299}) {
      Tensors changed = x;
      for (size_t i = 0; i < x.size(); ++i) {
        if (!p.IsState(i))
          changed[i] = at::cat({x[i].narrow(2, 0, t), x[i].narrow(2, t, 300 - t) * -7.0 + 3.0}, 2);
      }
      const at::Tensor got = p.run(changed, {})[0];
      ExpectSameBits(got.narrow(2, 0, t), want.narrow(2, 0, t), p.name + std::to_string(t));
      EXPECT_FALSE(at::equal(got, want));
    }
  }
}

// Tensors without memory have the shapes and strides of those with it.
inline void ExpectMetaTensorsHaveTheShapes(const MemoryProblem& p) {
  Tensors x;
  for (const at::Tensor& t : p.x) x.push_back(Leaf(t.to(at::kMeta)));
  const Tensors want = p.run(p.x, {}), got = p.run(x, {});
  for (size_t i = 0; i < want.size(); ++i) {
    EXPECT_EQ(got[i].sizes(), want[i].sizes()) << p.name << " " << p.parts[i];
    EXPECT_EQ(got[i].strides(), want[i].strides()) << p.name << " " << p.parts[i];
  }
}

// Rows of 23, 9 and 0 tokens, NaN behind them: as each alone, zeros and no gradient at the padding.
inline void ExpectPaddingHasNoEffect(MemoryProblem p) {
  const int64_t length = p.length();
  const ops::Mask mask = {Lengths({length, 9, 0}), {}};
  const at::Tensor pad = mask.HeadsPadding(length);
  for (size_t i = 0; i < p.x.size(); ++i) {
    if (!p.IsState(i)) p.x[i] = p.x[i].masked_fill(pad, std::nan(""));
  }
  for (const ops::Impl impl : kImpls) {
    ops::ImplScope scope(impl);
    const Tensors x = LeavesOf(p), got = p.run(x, mask), g = Gradients(Loss(p, got), x);
    for (int64_t b = 0; b < 3; ++b) {
      const int64_t count = mask.lengths->index({b}).item<int64_t>(), pads = length - count;
      Tensors alone = PieceOf(p, p.x, 0, count, StateOf(p, p.x));
      for (at::Tensor& t : alone) t = t.narrow(0, b, 1);
      const Tensors want = p.run(alone, {});
      const std::string what =
          p.name + " " + ops::ImplName(impl) + " row " + std::to_string(b) + " ";
      for (size_t i = 0; i < want.size(); ++i) {
        const at::Tensor row = got[i].narrow(0, b, 1);
        ExpectClose(i < p.of_tokens ? row.narrow(2, 0, count) : row, want[i], 1e-14,
                    what + p.parts[i]);
        if (i < p.of_tokens) {
          EXPECT_EQ(row.narrow(2, count, pads).abs().sum().item<double>(), 0) << what << p.parts[i];
        }
      }
      for (size_t i = 0; i < g.size(); ++i) {
        if (!p.IsState(i)) {
          EXPECT_EQ(g[i].narrow(0, b, 1).narrow(2, count, pads).abs().sum().item<double>(), 0)
              << what << i;
        }
      }
    }
  }
}

// The documents of one row, as (first token, count): each as if it were alone, gradients too.
// Returns those of x.
inline Tensors ExpectDocumentsApart(const MemoryProblem& p,
                                    const std::vector<std::pair<int64_t, int64_t>>& documents) {
  std::vector<std::pair<int64_t, int64_t>> begins;
  for (const auto& document : documents) begins.emplace_back(0, document.first);
  const ops::Mask mask = {{}, Starts(1, p.length(), begins)};
  Tensors g;
  for (const ops::Impl impl : kImpls) {
    ops::ImplScope scope(impl);
    const Tensors x = LeavesOf(p), y = LeavesOf(p);
    Tensors outs;
    for (const auto& [begin, count] : documents)
      outs.push_back(p.run(PieceOf(p, y, begin, count, StateOf(p, y)), {})[0]);
    const at::Tensor packed = p.run(x, mask)[0], apart = at::cat(outs, 2);
    ExpectClose(packed, apart, 1e-13, p.name + " " + ops::ImplName(impl));
    // The first document empties the state, whatever that holds.
    Tensors broken = x;
    for (const size_t i : p.state) broken[i] = at::full_like(x[i], std::nan(""));
    ExpectClose(p.run(broken, mask)[0].detach(), packed.detach(), 1e-13,
                p.name + " " + ops::ImplName(impl) + " after NaN");
    g = Gradients((packed * p.g[0]).sum(), x);
    const Tensors want = Gradients((apart * p.g[0]).sum(), y);
    for (size_t i = 0; i < g.size(); ++i) {
      if (!p.IsState(i))
        ExpectClose(g[i], want[i], 1e-12,
                    p.name + " " + ops::ImplName(impl) + " gradient " + std::to_string(i));
    }
    for (const size_t i : p.state) EXPECT_EQ(g[i].abs().sum().item<double>(), 0) << p.name;
  }
  return g;
}

}  // namespace cistern::testing
