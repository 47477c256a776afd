// States as values: their size before a run, copies without spare room, gradients through them,
// merging and cutting back.
#include "cistern/attention/state.h"

#include <algorithm>

#include "cistern/attention/testing_mechanisms.h"
#include "cistern/base/error.h"
#include "cistern/io/test_folder.h"
#include "cistern/ops/impl.h"
#include "cistern/ops/slot_decoding.h"

namespace cistern {
namespace {

using namespace cistern::testing;

// Every registered mechanism with every option set it is tested with.
template <class F>
void ForEachCase(F&& f) {
  for (const MechanismInfo* info : Mechanisms()) {
    if (!info->verbs || !info->Supports(Form::kCausal)) continue;
    for (const Json& options : info->cases) {
      at::manual_seed(11);
      AttentionDims dims;
      dims.dim = kDim, dims.heads = kHeads, dims.max_length = 256;
      const auto m = info->Make(options, dims);
      m->eval();  // random matrices are those of the seed
      if (!m->FormRefusal(Form::kCausal).empty()) continue;
      f(*m, info->name + " " + options.dump());
    }
  }
  for (const char* groups :
       {"softmax:1+latte:1",
        "softmax:1+softmax:1"}) {  // one that grows in part, and one all of whose parts do
    at::manual_seed(11);
    AttentionDims dims;
    dims.dim = kDim, dims.heads = kHeads, dims.max_length = 256;
    f(*FindMechanism(groups).Make(Json{{"latte", {{"latents", 3}}}}, dims), groups);
  }
}

// Whether its states have a form of their own while they decode floats.
bool Decodes(const Mechanism& m) {
  const auto& names = m.StateNames();
  return std::any_of(names.begin(), names.end(),
                     [](const std::string& name) { return name.ends_with("decoding"); });
}

void ExpectSameState(const State& got, const State& want, const std::string& what) {
  ASSERT_EQ(got.tensors.size(), want.tensors.size()) << what;
  for (size_t i = 0; i < want.tensors.size(); ++i) {
    const NamedTensor &a = got.tensors[i], &b = want.tensors[i];
    EXPECT_EQ(a.name, b.name) << what;
    ASSERT_EQ(a.value.defined(), b.value.defined()) << what << " " << b.name;
    if (b.value.defined()) ExpectSameBits(a.value, b.value, what + " " + b.name);
  }
}

TEST(State, BytesAreKnownBeforeARun) {
  ForEachCase([](Mechanism& m, const std::string& what) {
    at::NoGradGuard guard;
    for (const auto dtype : {at::kFloat, at::kDouble}) {
      for (const int64_t batch : {1, 3}) {
        for (const int64_t tokens : {0, 1, 40, 200}) {
          const auto x = To(Inputs(m, batch, tokens), dtype);
          const int64_t foretold = m.StateBytes(batch, tokens, at::TensorOptions(dtype), true);
          EXPECT_GT(foretold, 0) << what;
          State state;
          ExtendPieces(m, x, {0, tokens / 3, tokens}, {}, &state);
          if (dtype == at::kFloat && Decodes(m)) {
            EXPECT_LE(m.Compact(state).Bytes(), foretold) << what << ", " << tokens << " tokens";
          } else {
            EXPECT_EQ(m.Compact(state).Bytes(), foretold) << what << ", " << tokens << " tokens";
          }
          // Token by token a cache has room to grow into, at most as much again, and the least room
          // is 64 tokens.
          if (tokens == 200) {
            ExtendPieces(m, x, EachToken(tokens), {}, &state);
            EXPECT_EQ(m.Compact(state).Bytes(), foretold) << what << ", one by one";
            EXPECT_LE(state.Bytes(), 2 * foretold) << what;
          }
        }
      }
    }
    EXPECT_EQ(
        m.StateBytes(2, 1'000'000, at::kFloat, true) == m.StateBytes(2, 1'000, at::kFloat, true),
        m.info().bounded)
        << what;
  });
}

TEST(State, CompactGoesOnTheSame) {
  ForEachCase([](Mechanism& m, const std::string& what) {
    at::NoGradGuard guard;
    const auto x = Inputs(m, 2, 90);
    for (const ops::Mask& mask : {ops::Mask{}, ops::Mask{Lengths({90, 31}), {}}}) {
      State state;
      ExtendPieces(m, x, EachToken(90), mask, &state);
      const State compact = m.Compact(state).Clone();
      m.CheckState(compact);
      State a = state.Clone(), b = compact;
      const auto more = Inputs(m, 2, 7);
      ExpectSameBits(m.Extend(more, b, {}), m.Extend(more, a, {}), what);
      ExpectSameState(m.Compact(b), m.Compact(a), what);
    }
  });
}

TEST(State, GradientsFlowThroughItsCopies) {
  ForEachCase([](Mechanism& m, const std::string& what) {
    const auto x = Inputs(m, 2, 9), more = Inputs(m, 3, 4);
    const at::Tensor g = Normal({3, kHeads, 4, kWidth}), rows = at::tensor({1, 0, 1}, at::kLong);
    const auto loss = [&](const std::vector<at::Tensor>& y, bool copied) {
      State state = m.EmptyState(2, y[0].options().requires_grad(false));
      m.Extend(y, state, {});
      if (!copied) {
        std::vector<at::Tensor> whole;
        for (size_t i = 0; i < y.size(); ++i)
          whole.push_back(at::cat({y[i].index_select(0, rows), more[i]}, 2));
        return (ExtendPieces(m, whole, {0, 13}).narrow(2, 9, 4) * g).sum();
      }
      State copy = m.Compact(state).Clone().Reorder(rows);
      return (m.Extend(more, copy, {}) * g).sum();
    };
    const auto a = Leaves(x), b = Leaves(x);
    const auto got = Gradients(loss(a, true), a), want = Gradients(loss(b, false), b);
    double size = 0;
    for (size_t i = 0; i < x.size(); ++i) {
      EXPECT_LE((got[i] - want[i]).norm().item<double>(),
                1e-10 * (1 + want[i].norm().item<double>()))
          << what << " " << i;
      size += got[i].norm().item<double>();
    }
    EXPECT_GT(size, 0) << what;
    State state = m.EmptyState(2, a[0].options().requires_grad(false));
    m.Extend(a, state, {});
    for (const NamedTensor& t : state.Detach().tensors)
      EXPECT_FALSE(t.value.defined() && t.value.requires_grad()) << what;
  });
}

TEST(State, MergesAndCutsBackWhereItSaysSo) {
  ForEachCase([](Mechanism& m, const std::string& what) {
    at::NoGradGuard guard;
    const auto x = Inputs(m, 2, 20), more = Inputs(m, 2, 3);
    const auto after = [&](int64_t begin, int64_t count) {
      State state = m.EmptyState(2, x[0].options());
      m.Extend(Narrow(x, begin, count), state, {});
      return state;
    };
    State whole = after(0, 20);
    const at::Tensor want = m.Extend(more, whole, {});
    const State first = after(0, 8), second = after(8, 12);
    if (m.info().merges) {
      State merged = m.Merge(first, second);
      ExpectClose(m.Extend(more, merged, {}), want, 1e-12, what + " merged");
      const State row = second.Reorder(at::zeros({1}, at::kLong));
      EXPECT_NE(Thrown([&] { m.Merge(first, row); }), "no error") << what;
      EXPECT_NE(Thrown([&] { m.Merge(row, first); }), "no error") << what;
    } else {
      ExpectContains(Thrown([&] { m.Merge(first, second); }), {m.info().name, "do not merge"});
    }
    State state = after(0, 20);
    if (!m.info().truncates) {
      const State before = state.Clone();
      ExpectContains(Thrown([&] { m.Truncate(state, 5); }), {m.info().name, "cut back"});
      ExpectSameState(state, before, what + ": a refusal changes nothing");
      return;
    }
    m.Extend(more, state, {});
    m.Truncate(state, 8);
    EXPECT_EQ(m.Compact(state).Bytes(), m.StateBytes(2, 8, x[0].options(), true)) << what;
    State fresh = after(0, 8);
    ExpectClose(m.Extend(more, state, {}), m.Extend(more, fresh, {}), 1e-13, what + " cut back");
    ExpectContains(Thrown([&] { m.Truncate(state, 12); }), {"[softmax]", "11 tokens", "12"});
  });
}

// One token after another goes on in place, but never in a state that somebody else holds: by a
// copy of the State, by one tensor of it, by a view, or because a gradient passes through it.
TEST(State, WhatSomebodyElseHoldsIsNotWritten) {
  const std::vector<std::string> with_memories = {"latte",       "abc_mlp",     "abc_random",
                                                  "gated_slots", "linear",      "efficient",
                                                  "linformer",   "luna_causal", "performer"};
  ForEachCase([&](Mechanism& m, const std::string& what) {
    if (std::find(with_memories.begin(), with_memories.end(), m.info().name) == with_memories.end())
      return;
    at::NoGradGuard guard;
    for (const int64_t count : {1, 3}) {
      const auto x = Inputs(m, 2, 7), token = Inputs(m, 2, count);
      State begun = m.EmptyState(2, x[0].options());
      m.Extend(x, begun, {});
      const State kept = begun.Clone();
      State alone = begun.Clone();
      const at::Tensor want = m.Extend(token, alone, {});
      const auto expect_kept = [&](const State& held, const std::string& how) {
        for (size_t i = 0; i < kept.tensors.size(); ++i) {
          if (kept.tensors[i].value.defined())
            ExpectSameBits(held.tensors[i].value, kept.tensors[i].value, what + " " + how);
        }
      };
      {
        const State held = begun;  // copies of a State share their tensors
        ExpectSameBits(m.Extend(token, begun, {}), want, what + " copied");
        expect_kept(held, "copied");
        begun = kept.Clone();
      }
      {
        State views;
        for (const NamedTensor& t : begun.tensors)
          views.tensors.push_back(
              {t.name, t.value.defined() ? t.value.view(t.value.sizes()) : t.value});
        ExpectSameBits(m.Extend(token, begun, {}), want, what + " viewed");
        expect_kept(views, "viewed");
        begun = kept.Clone();
      }
      {
        State detached = begun.Detach();
        ExpectSameBits(m.Extend(token, detached, {}), want, what + " detached");
        expect_kept(begun, "detached");
      }
      {  // the graph of a piece needs the state before it
        at::AutoGradMode enable(true);
        State leaf = kept.Clone();
        auto grown = token;
        for (at::Tensor& t : grown) t = t.detach().requires_grad_();
        State before = leaf;
        m.Extend(grown, leaf, {});
        expect_kept(before, "differentiated");
      }
    }
  });
}

TEST(State, GoesOnInPlace) {
  for (const char* name : {"latte", "abc_mlp", "linear", "gated_slots", "abc_random"}) {
    at::NoGradGuard guard;
    const auto m = Small(FindMechanism(name));
    m->eval();
    State state = m->EmptyState(2, at::kDouble);
    m->Extend(Inputs(*m, 2, 5), state, {});
    std::vector<const void*> places;
    const auto places_now = [&] {
      std::vector<const void*> now;
      for (const NamedTensor& t : state.tensors) {
        if (t.value.defined() && t.value.dim() == 4) now.push_back(t.value.const_data_ptr());
      }
      return now;
    };
    places = places_now();
    EXPECT_FALSE(places.empty()) << name;
    for (const int64_t count : {1, 1, 4}) {
      m->Extend(Inputs(*m, 2, count), state, {});
      EXPECT_EQ(places_now(), places) << name << ", " << count << " tokens";
    }
    // Under another implementation a new one.
    ops::ImplScope scope(ops::Impl::kComposite);
    m->Extend(Inputs(*m, 2, 1), state, {});
    EXPECT_NE(places_now(), places) << name;
  }
}

// Floats, token by token: the state has its own form (ops/slot_decoding.h), and does what any
// state does.
TEST(State, DecodesWithWritesPutOff) {
  int64_t decoding = 0;
  ForEachCase([&](Mechanism& m, const std::string& what) {
    if (!Decodes(m) || m.info().name == "softmax:1+latte:1") return;
    at::NoGradGuard guard;
    const auto x = Inputs(m, 3, 30), more = Inputs(m, 3, 1);
    const auto floats = To(x, at::kFloat), token = To(more, at::kFloat);
    State state, wide;
    const at::Tensor out = ExtendPieces(m, floats, EachToken(30), {}, &state),
                     want = ExtendPieces(m, x, {0, 30}, {}, &wide);
    ExpectClose(out.to(at::kDouble), want, 2e-5, what);
    const State settled = m.Settled(state);
    for (const NamedTensor& t : wide.tensors) {
      ASSERT_EQ(settled.Has(t.name), t.value.defined()) << what << " " << t.name;
      if (t.value.defined()) ExpectClose(settled[t.name], t.value, 2e-5, what + " " + t.name);
    }
    if (!state.Has("decoding")) return;  // a gate, or log-weights of -inf
    ++decoding;
    EXPECT_FALSE(state.Has("z")) << what;
    ExpectSameState(m.Settled(settled), settled, what + " twice");

    // What somebody else holds is not written, and changes no bit of what is read.
    State alone = state.Clone(), shared = state;
    const at::Tensor read = m.Extend(token, alone, {});
    ExpectSameBits(m.Extend(token, shared, {}), read, what + " shared");
    ExpectSameState(m.Settled(state), settled, what + " shared");
    // Nor do the other rows.
    State turned = state.Reorder(at::tensor({2, 0, 0}, at::kLong));
    const auto turned_token = [&] {
      std::vector<at::Tensor> y;
      for (const at::Tensor& t : token)
        y.push_back(t.index_select(0, at::tensor({2, 0, 0}, at::kLong)));
      return y;
    }();
    const at::Tensor others = m.Extend(turned_token, turned, {});
    ExpectSameBits(others.select(0, 0), read.select(0, 2), what + " reordered");
    ExpectSameBits(others.select(0, 1), read.select(0, 0), what + " reordered");

    // Every other verb takes it, and another implementation.
    State some = state.Clone();
    const at::Tensor piece = m.Extend(To(Inputs(m, 3, 4), at::kFloat), some, {});
    EXPECT_FALSE(some.Has("decoding")) << what;
    EXPECT_TRUE(piece.isfinite().all().item<bool>()) << what;
    if (m.info().Supports(Form::kCross)) {
      ExpectSameBits(m.Read(token, state), m.Read(token, settled), what + " read");
      State written = state.Clone(), settled_written = settled.Clone();
      m.Write(token, written, {});
      m.Write(token, settled_written, {});
      ExpectSameState(written, settled_written, what + " written");
    }
    if (m.info().merges)
      ExpectSameState(m.Merge(state, state), m.Merge(settled, settled), what + " merged");
    State composite = state.Clone();
    {
      ops::ImplScope scope(ops::Impl::kComposite);
      ExpectClose(m.Extend(token, composite, {}).to(at::kDouble), read.to(at::kDouble), 2e-5,
                  what + " composite");
    }
    // With gradients it is settled first.
    at::AutoGradMode enable(true);
    auto leaves = token;
    for (at::Tensor& t : leaves) t = t.detach().requires_grad_();
    State grown = state.Clone();
    const at::Tensor differentiable = m.Extend(leaves, grown, {});
    ExpectClose(differentiable.detach().to(at::kDouble), read.to(at::kDouble), 2e-5,
                what + " with gradients");
    EXPECT_FALSE(grown.Has("decoding")) << what;
    differentiable.sum().backward();
    EXPECT_GT(leaves[0].grad().abs().sum().item<double>(), 0) << what;

    // A state of other sizes is refused.
    State foreign = state.Clone();
    foreign["decoding"] = foreign["decoding"].narrow(2, 0, 64).contiguous();
    ExpectContains(Thrown([&] { m.Extend(token, foreign, {}); }), {"decoding", "shape"});
  });
  EXPECT_GE(decoding, 18);
}

// A caller may have one buffer for all pieces.
TEST(State, ItsMemoryIsNotTheCallers) {
  ForEachCase([](Mechanism& m, const std::string& what) {
    at::NoGradGuard guard;
    for (const at::ScalarType type : {at::kDouble, at::kFloat}) {
      const auto x = To(Inputs(m, 2, 5), type), token = To(Inputs(m, 2, 1), type);
      auto buffers = x;
      for (at::Tensor& t : buffers) t = t.clone();
      State kept = m.EmptyState(2, x[0].options()), over = m.EmptyState(2, x[0].options());
      m.Extend(x, kept, {});
      m.Extend(buffers, over, {});
      for (const at::Tensor& t : buffers) t.fill_(7);
      ExpectSameBits(m.Extend(token, over, {}), m.Extend(token, kept, {}), what);
    }
  });
}

// Also once it decodes, where nothing but the sizes of the state tells.
TEST(State, ALaterTokenOfOtherRowsIsRefused) {
  int64_t refused = 0;
  ForEachCase([&](Mechanism& m, const std::string& what) {
    if (!Decodes(m) || m.info().name == "softmax:1+latte:1") return;
    at::NoGradGuard guard;
    const auto token = To(Inputs(m, 3, 1), at::kFloat);
    State state = m.EmptyState(3, token[0].options());
    m.Extend(token, state, {});
    if (!state.Has("decoding")) return;
    for (size_t i = 0; i < token.size(); ++i) {
      if (token[i].dim() != 4 || token[i].size(0) != 3) continue;
      auto other = token;
      other[i] = token[i].narrow(0, 0, 1);
      State copy = state.Clone();
      EXPECT_NE(Thrown([&] { m.Extend(other, copy, {}); }), "no error") << what << " " << i;
      ++refused;
    }
  });
  EXPECT_GE(refused, 40);
}

TEST(State, TokensOfOtherRowsThanTheStatesAreRefused) {
  ForEachCase([](Mechanism& m, const std::string& what) {
    at::NoGradGuard guard;
    const auto x = Inputs(m, 3, 5);
    for (const int64_t count : {1, 2}) {
      const auto one = Row(Narrow(x, 0, count), 0);
      State state = m.EmptyState(3, x[0].options());
      m.Extend(x, state, {});
      const State before = state.Clone();
      ExpectContains(Thrown([&] { m.Extend(one, state, {}); }),
                     {"[" + m.info().name + "]", "as many rows as the tokens have, 1"});
      if (m.info().Supports(Form::kCross))
        for (const bool writes : {true, false}) {
          Handles handles;
          ExpectContains(Thrown([&] {
                           writes ? m.Write(one, state, {})
                                  : void(m.Attend(Form::kCross, one, &state, {}, handles));
                         }),
                         {"as many rows"});
        }
      ExpectSameState(state, before, what + ": a refusal changes nothing");
    }
  });
}

TEST(State, TokensOfTwoTypesAreRefused) {
  ForEachCase([](Mechanism& m, const std::string& what) {
    at::NoGradGuard guard;
    m.to(at::kFloat);
    const auto x = To(Inputs(m, 2, 5), at::kFloat);
    State state = m.EmptyState(2, x[0].options());
    m.Extend(x, state, {});
    const State before = state.Clone();
    for (size_t i = 0; i < x.size(); ++i) {
      auto y = x;
      y[i] = x[i].to(at::kDouble);
      const std::string wanted = "[" + m.info().name + "] expected ";
      if (x.size() > 1)
        ExpectContains(Thrown([&] { m.Extend(y, state, {}); }),
                       {wanted + "tokens of one dtype", "Double", "Float"});
      y[i] = at::Tensor();
      ExpectContains(Thrown([&] { m.Extend(y, state, {}); }), {wanted, "undefined"});
    }
    ExpectSameState(state, before, what + ": a refusal changes nothing");
  });
}

TEST(State, RowsThatItDoesNotHaveAreNamed) {
  const State state = {{{"k", at::zeros({2, 3})}, {"valid", {}}}};
  for (const int64_t row : {-1, 2}) {
    ExpectContains(ErrorMessage([&] {
                     state.Reorder(at::tensor({int64_t{0}, row}));
                   }),
                   {StrCat("row ", row), "state's 2"});
  }
  EXPECT_EQ(state.Reorder(at::tensor({1, 1, 0}, at::kInt))["k"].size(0), 3);
}

// The bytes of a state that decodes are as many for widths that are padded to the same.
TEST(State, OneOfAnotherWidthIsRefused) {
  at::NoGradGuard guard;
  for (const char* name : {"latte", "performer", "t2r", "rfa"}) {
    const auto of_width = [&](int64_t width) {
      AttentionDims dims;
      dims.dim = kHeads * width, dims.heads = kHeads;
      const Json options =
          name == std::string("latte") ? Json{{"latents", 4}} : Json{{"features", 8}};
      const auto m = FindMechanism(name).Make(options, dims);
      m->eval();
      return m;
    };
    const auto narrow = of_width(5), wide = of_width(6);
    const auto token = To(Inputs(*narrow, 2, 1), at::kFloat),
               other = To(Inputs(*wide, 2, 1), at::kFloat);
    State state = narrow->EmptyState(2, at::kFloat);
    narrow->Extend(token, state, {});
    ASSERT_TRUE(state.Has("decoding")) << name;
    for (auto&& use : std::vector<std::function<void()>>{[&] { wide->Extend(other, state, {}); },
                                                         [&] { wide->Settled(state); }})
      ExpectContains(Thrown(use), {"decoding", "slots of width 6", "of width 5"});
    narrow->Extend(token, state, {});
  }
}

// Whatever of a piece has a gradient: what earlier pieces keep for theirs stays as it was.
TEST(State, PiecesWithAGradientOfOneInputAlone) {
  ForEachCase([](Mechanism& m, const std::string& what) {
    const auto x = Inputs(m, 2, 9);
    const at::Tensor g = Normal({2, kHeads, 9, kWidth});
    for (size_t i = 0; i < x.size(); ++i) {
      const auto gradient = [&](const std::vector<int64_t>& cuts) {
        auto y = x;
        y[i] = Leaf(x[i]);
        return Gradients((ExtendPieces(m, y, cuts) * g).sum(), {y[i]})[0];
      };
      const at::Tensor want = gradient({0, 9});
      ExpectClose(gradient({0, 3, 5, 6, 9}), want, 1e-10, what + " " + std::to_string(i), 1);
    }
  });
}

TEST(State, WritesAtOnceWhereThatIsAskedFor) {
  at::NoGradGuard guard;
  const auto m = Small(FindMechanism("latte"));
  State state = m->EmptyState(1, at::kFloat);
  const auto token = To(Inputs(*m, 1, 1), at::kFloat);
  {
    const ops::WriteAtOnceScope at_once;
    m->Extend(token, state, {});
    EXPECT_FALSE(state.Has("decoding"));
  }
  m->Extend(token, state, {});
  EXPECT_TRUE(state.Has("decoding"));
  const ops::WriteAtOnceScope at_once;
  m->Extend(token, state, {});
  EXPECT_TRUE(state.Has("memory") && !state.Has("decoding"));
}

// Rows whose documents begin or whose tokens are padding keep to themselves there, too.
TEST(State, DecodesPaddedAndPackedRows) {
  at::NoGradGuard guard;
  for (const char* name :
       {"latte", "abc_mlp", "efficient", "gated_slots", "linear", "t2r", "rfa", "performer"}) {
    const auto m = Small(FindMechanism(name));
    const auto x = Inputs(*m, 3, 20);
    const at::Tensor starts = at::zeros({3, 20}, at::kBool);
    starts[0][7] = true, starts[2][19] = true;
    const ops::Mask mask = {Lengths({20, 11, 20}), starts};
    ExpectClose(ExtendPieces(*m, To(x, at::kFloat), EachToken(20), mask).to(at::kDouble),
                ExtendPieces(*m, x, {0, 20}, mask), 2e-5, name);
  }
}

TEST(Softmax, CachesThatDoNotFitAreRefused) {
  at::NoGradGuard guard;
  const auto m = Small(FindMechanism("softmax"));
  const auto message = [&](auto&& change) {
    State state;
    ExtendPieces(*m, Inputs(*m, 2, 6), {0, 6}, {Lengths({6, 2}), {}}, &state);
    state = m->Compact(state);
    change(state);
    return Thrown([&] { m->CheckState(state); });
  };
  EXPECT_EQ(message([](State&) {}), "no error");
  ExpectContains(message([](State& s) {
                   s["count"] = at::tensor({6, 5}, at::kLong);
                 }),
                 {"[softmax]", "6 tokens"});
  ExpectContains(message([](State& s) {
                   s["count"] = at::tensor({-1, -1}, at::kLong);
                 }),
                 {"-1 tokens"});
  ExpectContains(message([](State& s) { s["v"] = s["v"].narrow(2, 0, 5); }), {"k has 6 and v 5"});
  ExpectContains(message([](State& s) { s["valid"] = s["valid"].narrow(1, 0, 5); }),
                 {"valid of shape [2, 6]", "[2, 5]"});
  ExpectContains(message([](State& s) { s["valid"] = s["valid"].to(at::kLong); }),
                 {"Bool", "Long"});
}

}  // namespace
}  // namespace cistern
