#include "cistern/attention/mechanism.h"

#include "cistern/attention/testing_mechanisms.h"
#include "cistern/base/error.h"

namespace cistern {
namespace {

using namespace cistern::testing;
using ops::ImplName;
using ops::ImplScope;

// What a mechanism declares, and 2^-22 of logits up to 4 in float; ill-conditioned mechanisms lose as much more in double.
double Tolerance(const Mechanism& m, at::ScalarType dtype, double in_double = 1e-12) {
  const double declared = m.info().tolerance;
  return dtype == at::kDouble ? in_double * std::max(1.0, declared / 1e-6) : declared + 1e-6;
}

// Every mechanism with every set of options it lists, in every implementation.
template <class F>
void ForEachMechanism(F&& f) {
  for (const MechanismInfo* info : Mechanisms()) {
    for (size_t i = 0; i < info->cases.size(); ++i) {
      for (const ops::Impl impl : kImpls) {
        ImplScope scope(impl);
        at::manual_seed(11);
        f(*Small(*info, i), impl, info->name + " " + info->cases[i].dump() + " " + ImplName(impl));
      }
    }
  }
}

TEST(Mechanisms, BothFormsAreTheDefinition) {
  ForEachMechanism([](Mechanism& m, ops::Impl, const std::string& what) {
    for (const int64_t length : {1, 2, 17, 37, 65}) {
      for (const bool heads_last : {false, true}) {
        const auto x = Inputs(m, 2, length, heads_last);
        for (const auto dtype : {at::kDouble, at::kFloat}) {
          const auto y = To(x, dtype);
          m.to(dtype);
          at::Tensor both, causal;
          if (IsBidirectional(m)) both = m.Bidirectional(y, {});
          if (IsCausal(m)) causal = ExtendPieces(m, y, {0, length});
          m.to(at::kDouble);
          if (both.defined()) ExpectClose(both, m.Definition(Form::kBidirectional, x, x), Tolerance(m, dtype), what + " bidirectional");
          if (causal.defined()) ExpectClose(causal, m.Definition(Form::kCausal, x, x), Tolerance(m, dtype), what + " causal");
        }
      }
    }
  });
}

TEST(Mechanisms, CrossWritesOnceAndReadsOften) {
  ForEachMechanism([](Mechanism& m, ops::Impl, const std::string& what) {
    if (!Crosses(m)) return;
    const auto queries = Inputs(m, 2, 5), keys = Inputs(m, 2, 13);
    const at::Tensor want = m.Definition(Form::kCross, queries, keys);
    for (const int64_t cut : {0, 1, 6, 13}) {
      State state = m.EmptyState(2, keys[0].options());
      m.Write(Narrow(keys, 0, cut), state, {});
      m.Write(Narrow(keys, cut, 13 - cut), state, {});
      ExpectClose(m.Read(queries, state), want, Tolerance(m, at::kDouble), what);
      ExpectClose(m.Read(Narrow(queries, 2, 1), state), want.narrow(2, 2, 1), Tolerance(m, at::kDouble), what + " again");
    }
    const State empty = m.EmptyState(2, keys[0].options());
    EXPECT_EQ(m.Read(queries, empty).abs().sum().item<double>(), 0) << what << ": an empty memory reads zeros";
  });
}

TEST(Mechanisms, GradientsMatchFiniteDifferences) {
  ForEachMechanism([](Mechanism& m, ops::Impl, const std::string& what) {
    const auto x = Inputs(m, 3, 19);
    const at::Tensor g = Normal({3, kHeads, 19, kWidth});
    const ops::Mask masks[] = {{}, {Lengths({19, 7, 0}), {}}, {Lengths({19, 12, 5}), Starts(3, 19, {{0, 0}, {0, 5}, {1, 8}, {2, 3}})}};
    for (const ops::Mask& mask : masks) {
      if (IsCausal(m))
        ExpectGradientsMatchDifferences(
            [&](const auto& y) {
              return (ExtendPieces(m, y, {0, 8, 19}, mask) * g).sum();
            },
            x, what + " causal");
      if (IsBidirectional(m))
        ExpectGradientsMatchDifferences([&](const auto& y) { return (m.Bidirectional(y, mask) * g).sum(); }, x, what + " bidirectional");
    }
  });
}

TEST(Mechanisms, SplitAnywhereEqualsWholeWithItsGradients) {
  ForEachMechanism([](Mechanism& m, ops::Impl, const std::string& what) {
    if (!IsCausal(m)) return;
    const int64_t T = 37;
    const auto x = Leaves(Inputs(m, 2, T, true));
    const at::Tensor g = Normal({2, kHeads, T, kWidth});
    const at::Tensor whole = ExtendPieces(m, x, {0, T});
    const auto want = Gradients((whole * g).sum(), x);
    for (int64_t cut = 0; cut <= T + 1; ++cut) {
      const at::Tensor got = ExtendPieces(m, x, cut > T ? EachToken(T) : std::vector<int64_t>{0, cut, T});
      ExpectClose(got, whole, Tolerance(m, at::kDouble), what + " cut " + std::to_string(cut));
      const auto got_g = Gradients((got * g).sum(), x);
      for (size_t i = 0; i < x.size(); ++i)
        ExpectClose(got_g[i], want[i], Tolerance(m, at::kDouble, 1e-11), what + " gradient, cut " + std::to_string(cut));
    }
    // Decoding: no gradient, so that states may be updated in place.
    at::NoGradGuard guard;
    ExpectClose(ExtendPieces(m, x, EachToken(T)), whole, Tolerance(m, at::kDouble), what + " decoding");
    ExpectClose(ExtendPieces(m, x, {0, 0, 5, 5, 36, 37}), whole, Tolerance(m, at::kDouble), what + " pieces, some empty");
    m.to(at::kFloat);
    ExpectClose(ExtendPieces(m, To(x, at::kFloat), EachToken(T)), whole, Tolerance(m, at::kFloat), what + " decoding in float");
  });
}

TEST(Mechanisms, CausalIsBidirectionalOverThePrefix) {
  ForEachMechanism([](Mechanism& m, ops::Impl, const std::string& what) {
    if (!m.info().causal_is_prefix || !IsCausal(m) || !IsBidirectional(m)) return;
    const auto x = Inputs(m, 2, 21);
    const at::Tensor causal = ExtendPieces(m, x, {0, 21});
    for (int64_t t = 0; t < 21; ++t) {
      ExpectClose(causal.select(2, t), m.Bidirectional(Narrow(x, 0, t + 1), {}).select(2, t), Tolerance(m, at::kDouble),
                  what + " t=" + std::to_string(t));
    }
  });
}

TEST(Mechanisms, TheFutureLeavesThePastAlone) {
  ForEachMechanism([](Mechanism& m, ops::Impl impl, const std::string& what) {
    if (!IsCausal(m)) return;
    const int64_t T = 150;
    for (const auto dtype : {at::kDouble, at::kFloat}) {
      m.to(dtype);
      const auto x = To(Inputs(m, 2, T), dtype);
      const at::Tensor want = ExtendPieces(m, x, {0, T});
      for (const int64_t t : {1, 63, 64, 65, 149}) {
        std::vector<at::Tensor> changed;
        for (const at::Tensor& y : x) changed.push_back(at::cat({y.narrow(2, 0, t), y.narrow(2, t, T - t) * -50.0 + 3.0}, 2));
        const at::Tensor got = ExtendPieces(m, changed, {0, T});
        EXPECT_FALSE(at::equal(got, want));
        if (impl == ops::Impl::kKernel && !m.info().exact) {
          ExpectSameBits(got.narrow(2, 0, t), want.narrow(2, 0, t), what);
        } else {
          ExpectClose(got.narrow(2, 0, t), want.narrow(2, 0, t), Tolerance(m, dtype), what);
        }
      }
    }
  });
}

TEST(Mechanisms, PaddingChangesNothingAndGetsNoGradient) {
  ForEachMechanism([](Mechanism& m, ops::Impl, const std::string& what) {
    const int64_t T = 19;
    const auto x = Leaves(Inputs(m, 3, T));
    const at::Tensor g = Normal({3, kHeads, T, kWidth});
    const ops::Mask mask = {Lengths({T, 8, 0}), {}};
    for (int form = 0; form < 4; ++form) {
      if (form == 0 ? !IsBidirectional(m) : !IsCausal(m)) continue;
      auto run = [&](const std::vector<at::Tensor>& y, const ops::Mask& rows) {
        const int64_t length = y[0].size(2);
        if (form == 0) return m.Bidirectional(y, rows);
        return ExtendPieces(m, y,
                            form == 1   ? std::vector<int64_t>{0, length}
                            : form == 2 ? std::vector<int64_t>{0, length / 2, length}
                                        : EachToken(length),
                            rows);
      };
      const std::string name = what + " form " + std::to_string(form);
      const at::Tensor got = run(x, mask);
      const auto got_g = Gradients((got * g).sum(), x);
      for (int64_t b = 0; b < 3; ++b) {
        const int64_t length = mask.lengths->index({b}).item<int64_t>(), pads = T - length;
        EXPECT_EQ(got[b].narrow(1, length, pads).abs().sum().item<double>(), 0) << name;
        for (const at::Tensor& d : got_g) EXPECT_EQ(d[b].narrow(1, length, pads).abs().sum().item<double>(), 0) << name;
        if (length == 0) continue;
        const auto alone = Leaves(Narrow(Row(x, b), 0, length));
        const at::Tensor want = run(alone, {});
        ExpectClose(got.narrow(0, b, 1).narrow(2, 0, length), want, Tolerance(m, at::kDouble), name + " row " + std::to_string(b));
        const auto want_g = Gradients((want * g.narrow(0, b, 1).narrow(2, 0, length)).sum(), alone);
        for (size_t i = 0; i < x.size(); ++i)
          ExpectClose(got_g[i].narrow(0, b, 1).narrow(2, 0, length), want_g[i], Tolerance(m, at::kDouble, 1e-11), name + " gradient");
      }
      std::vector<at::Tensor> longer;
      for (const at::Tensor& y : x) longer.push_back(at::cat({y, Normal({3, y.size(1), 6, y.size(3)}, 30)}, 2));
      ExpectClose(run(longer, mask).narrow(2, 0, T), got, Tolerance(m, at::kDouble), name + " with more padding");
    }
  });
}

TEST(Mechanisms, APaddedRowGoesOnWhereItStopped) {
  // Rows of different lengths, extended twice: the second piece follows each row's own last token.
  ForEachMechanism([](Mechanism& m, ops::Impl, const std::string& what) {
    if (!IsCausal(m)) return;
    const auto first = Inputs(m, 3, 9), second = Inputs(m, 3, 6);
    const at::Tensor lengths = Lengths({9, 4, 0});
    State state = m.EmptyState(3, first[0].options());
    m.Extend(first, state, {lengths, {}});
    const at::Tensor got = m.Extend(second, state, {});
    for (int64_t b = 0; b < 3; ++b) {
      const int64_t length = lengths.index({b}).item<int64_t>();
      std::vector<at::Tensor> row;
      for (size_t i = 0; i < first.size(); ++i)
        row.push_back(at::cat({first[i].narrow(0, b, 1).narrow(2, 0, length), second[i].narrow(0, b, 1)}, 2));
      ExpectClose(got.narrow(0, b, 1), m.Definition(Form::kCausal, row, row).narrow(2, length, 6), Tolerance(m, at::kDouble),
                  what + " row " + std::to_string(b));
    }
  });
}

TEST(Mechanisms, PackedDocumentsAreEachAlone) {
  ForEachMechanism([](Mechanism& m, ops::Impl, const std::string& what) {
    const int64_t T = 23;
    auto x = Inputs(m, 3, T);
    // The documents' levels differ by hundreds, so that none may set another's scale.
    for (at::Tensor& y : x) y.narrow(0, 0, 1).narrow(2, 5, 10).add_(400.0);
    x = Leaves(x);
    const at::Tensor g = Normal({3, kHeads, T, kWidth});
    // Row 1 begins without a start, row 2 is all padding (though a start is marked in it).
    const ops::Mask mask = {Lengths({T, 17, 0}), Starts(3, T, {{0, 0}, {0, 5}, {0, 15}, {1, 1}, {1, 12}, {2, 0}, {1, 20}})};
    const std::vector<Piece> documents = {{0, 0, 5}, {0, 5, 10}, {0, 15, 8}, {1, 0, 1}, {1, 1, 11}, {1, 12, 5}};
    for (int cut = -2; cut <= T; ++cut) {
      const bool causal = cut > -2;
      if (causal ? !IsCausal(m) : !IsBidirectional(m)) continue;
      const at::Tensor got =
          !causal ? m.Bidirectional(x, mask) : ExtendPieces(m, x, cut < 0 ? EachToken(T) : std::vector<int64_t>{0, cut, T}, mask);
      const auto got_g = Gradients((got * g).sum(), x);
      const std::string name = what + (causal ? " causal, cut " + std::to_string(cut) : " bidirectional");
      for (const Piece& d : documents) {
        const auto alone = Leaves(Narrow(Row(x, d.row), d.begin, d.count));
        const at::Tensor want = causal ? ExtendPieces(m, alone, {0, d.count}) : m.Bidirectional(alone, {});
        // 1e-9: logits of 400^2/sqrt(d) in softmax, rounded to 2^-52 of that.
        const double tolerance = Tolerance(m, at::kDouble, 1e-9);
        ExpectClose(got.narrow(0, d.row, 1).narrow(2, d.begin, d.count), want, tolerance, name);
        const auto want_g = Gradients((want * g.narrow(0, d.row, 1).narrow(2, d.begin, d.count)).sum(), alone);
        for (size_t i = 0; i < x.size(); ++i) {
          const at::Tensor piece = got_g[i].narrow(0, d.row, 1).narrow(2, d.begin, d.count);
          EXPECT_LE((piece - want_g[i]).norm().item<double>(), 1e-9 * (1 + got_g[i].norm().item<double>())) << name << " gradient " << i;
        }
      }
      EXPECT_EQ(got[1].narrow(1, 17, 6).abs().sum().item<double>() + got[2].abs().sum().item<double>(), 0) << name;
      for (const at::Tensor& d : got_g)
        EXPECT_EQ(d[1].narrow(1, 17, 6).abs().sum().item<double>() + d[2].abs().sum().item<double>(), 0) << name;
    }
  });
}

TEST(Mechanisms, AllRowsEmpty) {
  ForEachMechanism([](Mechanism& m, ops::Impl, const std::string& what) {
    const auto x = Inputs(m, 2, 4);
    const ops::Mask mask = {Lengths({0, 0}), Starts(2, 4, {{0, 0}, {1, 2}})};
    if (IsBidirectional(m)) {
      EXPECT_EQ(m.Bidirectional(x, mask).abs().sum().item<double>(), 0) << what;
      EXPECT_EQ(m.Bidirectional(Inputs(m, 2, 0), {}).numel(), 0) << what << ": no tokens";
    }
    if (!IsCausal(m)) return;
    EXPECT_EQ(ExtendPieces(m, x, {0, 4}, mask).abs().sum().item<double>(), 0) << what;
    State state;
    // A start in the padding of an empty piece is no start: the document before goes on.
    const auto more = Inputs(m, 2, 3);
    ExtendPieces(m, more, {0, 3}, {}, &state);
    m.Extend(x, state, mask);
    std::vector<at::Tensor> whole;
    for (size_t i = 0; i < x.size(); ++i) whole.push_back(at::cat({more[i], x[i]}, 2));
    ExpectClose(m.Extend(x, state, {}), m.Definition(Form::kCausal, whole, whole).narrow(2, 3, 4), Tolerance(m, at::kDouble), what);
    EXPECT_EQ(ExtendPieces(m, Inputs(m, 0, 4), {0, 4}).numel(), 0) << what << ": no rows";
  });
}

TEST(Mechanisms, StatesAreReorderedAndCloned) {
  ForEachMechanism([](Mechanism& m, ops::Impl, const std::string& what) {
    if (!IsCausal(m)) return;
    at::NoGradGuard guard;
    const auto first = Inputs(m, 3, 9), second = Inputs(m, 4, 5);
    const at::Tensor rows = at::tensor({2, 0, 0, 1}, at::kLong);
    State state;
    ExtendPieces(m, first, {0, 3, 8, 9}, {}, &state);
    const State kept = state.Clone();
    State chosen = state.Reorder(rows);
    EXPECT_LE(chosen.Bytes(), state.Bytes() * 2) << what;
    std::vector<at::Tensor> whole;
    for (size_t i = 0; i < first.size(); ++i) whole.push_back(at::cat({first[i].index_select(0, rows), second[i]}, 2));
    ExpectClose(m.Extend(second, chosen, {}), m.Definition(Form::kCausal, whole, whole).narrow(2, 9, 5), Tolerance(m, at::kDouble),
                what + " reordered");
    // Three continuations of one state: the clones are independent, and the clone kept at the beginning still holds the first nine tokens.
    const auto a = Row(second, 0), b = Row(second, 1);
    for (int round = 0; round < 2; ++round) {
      for (const auto& next : {a, b}) {
        State branch = kept.Clone();
        std::vector<at::Tensor> batch, expected;
        for (size_t i = 0; i < first.size(); ++i) {
          batch.push_back(next[i].expand({3, -1, -1, -1}));
          expected.push_back(at::cat({first[i], batch.back()}, 2));
        }
        ExpectClose(m.Extend(batch, branch, {}), m.Definition(Form::kCausal, expected, expected).narrow(2, 9, 5), Tolerance(m, at::kDouble),
                    what + " branch");
      }
    }
    EXPECT_EQ(state.Bytes() == m.EmptyState(3, first[0].options()).Bytes(), m.info().bounded) << what;
  });
}

TEST(Mechanisms, OrderOfSlotsDoesNotMatter) {
  at::manual_seed(2);
  for (const auto& [name, slots] : std::vector<std::pair<std::string, std::vector<size_t>>>{{"latte", {0, 1}}, {"abc_mlp", {3}}}) {
    const auto m = Small(FindMechanism(name));
    const auto x = Inputs(*m, 2, 20);
    auto y = x;
    for (const size_t i : slots) y[i] = x[i].index_select(3, at::tensor({2, 0, 1}, at::kLong));
    for (const ops::Impl impl : kImpls) {
      ImplScope scope(impl);
      ExpectClose(ExtendPieces(*m, y, {0, 20}), ExtendPieces(*m, x, {0, 20}), 1e-13, name);
      ExpectClose(m->Bidirectional(y, {}), m->Bidirectional(x, {}), 1e-13, name);
    }
  }
}

TEST(Latte, ConstantValuesComeBackAndHeadsAreIndependent) {
  ForEachMechanism([](Mechanism& m, ops::Impl, const std::string& what) {
    if (m.info().name != "latte") return;
    auto x = Inputs(m, 2, 30);
    const at::Tensor out = ExtendPieces(m, x, {0, 30});
    for (int64_t h = 0; h < kHeads; ++h) {
      AttentionDims dims;
      dims.dim = kWidth, dims.heads = 1;
      const auto single = m.info().make(Json{{"latents", 3}}, dims);
      std::vector<at::Tensor> one;
      for (const at::Tensor& y : x) one.push_back(y.narrow(1, h, 1));
      ExpectClose(ExtendPieces(*single, one, {0, 30}), out.narrow(1, h, 1), 1e-13, what + " single head");
    }
    x[2] = Normal({2, kHeads, 1, kWidth}).expand({2, kHeads, 30, kWidth});
    ExpectClose(ExtendPieces(m, x, {0, 30}), x[2], 1e-13, what + " constant values");
    ExpectClose(m.Bidirectional(x, {}), x[2], 1e-13, what + " constant values");
    x[1] = x[1] * 1000;  // log-weights of thousands
    ExpectClose(ExtendPieces(m, x, {0, 30}), x[2], 1e-13, what + " large log-weights");
  });
}

TEST(AbcMlp, SlotMemoryIsSoftmaxOverTime) {
  ForEachMechanism([](Mechanism& m, ops::Impl, const std::string& what) {
    if (m.info().name != "abc_mlp" || what.find("{\"slots\":3} ") == std::string::npos) return;  // exp, a control for each head
    const auto x = Inputs(m, 2, 30);
    State state, written = m.EmptyState(2, x[0].options());
    ExtendPieces(m, x, {0, 11, 30}, {}, &state);
    m.Write(x, written, {});
    const at::Tensor phi = at::softmax(x[3], 2).transpose(2, 3);  // [B,H,n,T]
    for (const State* s : {&state, &written}) {
      ExpectClose((*s)["key_memory"], at::matmul(phi, x[1]), Tolerance(m, at::kDouble), what + " keys");
      ExpectClose((*s)["value_memory"], at::matmul(phi, x[2]), Tolerance(m, at::kDouble), what + " values");
      ExpectClose((*s)["z"], at::logsumexp(x[3], {2}), Tolerance(m, at::kDouble), what + " z");
    }
  });
}

TEST(Registry, RefusesWithAReasonAndASuggestion) {
  auto text = [](auto&& f) {
    try {
      f();
    } catch (const UsageError& e) {
      return std::string(e.what());
    }
    return std::string("no UsageError");
  };
  ExpectContains(text([] { FindMechanism("late"); }), {"mechanism 'late'", "did you mean 'latte'?"});
  ExpectContains(text([] { FindMechanism("zzzzzzzz"); }), {"zzzzzzzz", "softmax, ", "latte", "abc_mlp"});
  AttentionDims dims;
  dims.dim = 12, dims.heads = 3;
  ExpectContains(text([&] { FindMechanism("latte").make(Json{{"latent", 6}}, dims); }), {"latte", "latent", "latents"});
  ExpectContains(text([&] { FindMechanism("latte").make(Json{{"latents", 7}}, dims); }), {"[latte]", "latents=7", "heads=3"});
  ExpectContains(text([&] { FindMechanism("abc_mlp").make(Json{{"slots", 0}}, dims); }), {"abc_mlp", "slots", "0"});
  ExpectContains(text([&] { FindMechanism("abc_mlp").make(Json{{"slots", "many"}}, dims); }), {"slots", "many"});
  ExpectContains(text([&] { FindMechanism("softmax").make(Json{{"slots", 3}}, dims); }), {"softmax", "slots"});
  MechanismInfo info;
  info.name = "toy", info.forms = {Form::kCausal}, info.refusals = {"cross: it has no keys; use softmax instead"};
  ExpectContains(text([&] { RequireForm(info, Form::kCross); }), {"[toy]", "cross", "use softmax instead"});
  ExpectContains(text([&] { RequireForm(info, Form::kBidirectional); }), {"[toy]", "bidirectional"});
  RequireForm(info, Form::kCausal);
  State state = {{{"memory", at::zeros({1})}}};
  ExpectContains(Thrown([&] { state["memoryy"]; }), {"memoryy", "did you mean 'memory'?"});
  for (const MechanismInfo* m : Mechanisms()) {
    EXPECT_FALSE(m->title.empty() || m->source.empty() || m->summary.empty() || m->time.empty() || m->state.empty() || m->positions.empty())
        << m->name;
    for (const Form form : {Form::kBidirectional, Form::kCausal, Form::kCross}) {
      bool explained = m->Supports(form);
      for (const std::string& refusal : m->refusals) explained = explained || refusal.starts_with(FormName(form) + ":");
      EXPECT_TRUE(explained) << m->name << " neither has nor refuses the " << FormName(form) << " form";
    }
  }
}

}  // namespace
}  // namespace cistern
