#include "cistern/attention/mechanism.h"

#include <torch/csrc/autograd/forward_grad.h>

#include "cistern/attention/testing_mechanisms.h"
#include "cistern/base/error.h"

namespace cistern {
namespace {

using namespace cistern::testing;
using ops::ImplName;
using ops::ImplScope;

// What every mechanism must have is checked by the conformance suite (verify/suite_test.cc); here
// is what some are known to be besides.
template <class F>
void InEveryImplementation(const std::string& name, F&& f) {
  for (const ops::Impl impl : kImpls) {
    ImplScope scope(impl);
    at::manual_seed(11);
    f(*Small(FindMechanism(name)), name + " " + ImplName(impl));
  }
}

TEST(Mechanisms, OrderOfSlotsDoesNotMatter) {
  at::manual_seed(2);
  for (const auto& [name, slots] : std::vector<std::pair<std::string, std::vector<size_t>>>{
           {"latte", {0, 1}}, {"abc_mlp", {3}}}) {
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
  InEveryImplementation("latte", [](Mechanism& m, const std::string& what) {
    auto x = Inputs(m, 2, 30);
    const at::Tensor out = ExtendPieces(m, x, {0, 30});
    for (int64_t h = 0; h < kHeads; ++h) {
      AttentionDims dims;
      dims.dim = kWidth, dims.heads = 1;
      const auto single = m.info().Make(Json{{"latents", 3}}, dims);
      std::vector<at::Tensor> one;
      for (const at::Tensor& y : x) one.push_back(y.narrow(1, h, 1));
      ExpectClose(ExtendPieces(*single, one, {0, 30}), out.narrow(1, h, 1), 1e-13,
                  what + " single head");
    }
    x[2] = Normal({2, kHeads, 1, kWidth}).expand({2, kHeads, 30, kWidth});
    ExpectClose(ExtendPieces(m, x, {0, 30}), x[2], 1e-13, what + " constant values");
    ExpectClose(m.Bidirectional(x, {}), x[2], 1e-13, what + " constant values");
    x[1] = x[1] * 1000;  // log-weights of thousands
    ExpectClose(ExtendPieces(m, x, {0, 30}), x[2], 1e-13, what + " large log-weights");
  });
}

TEST(AbcMlp, SlotMemoryIsSoftmaxOverTime) {
  InEveryImplementation("abc_mlp", [](Mechanism& m, const std::string& what) {
    const auto x = Inputs(m, 2, 30);
    State state, written = m.EmptyState(2, x[0].options());
    ExtendPieces(m, x, {0, 11, 30}, {}, &state);
    m.Write(x, written, {});
    const at::Tensor phi = at::softmax(x[3], 2).transpose(2, 3);  // [B,H,n,T]
    for (const State* s : {&state, &written}) {
      ExpectClose((*s)["key_memory"], at::matmul(phi, x[1]), 1e-12, what + " keys");
      ExpectClose((*s)["value_memory"], at::matmul(phi, x[2]), 1e-12, what + " values");
      ExpectClose((*s)["z"], at::logsumexp(x[3], {2}), 1e-12, what + " z");
    }
  });
}

// A forward-mode derivative is right or refused, never a silent zero.
TEST(Mechanisms, ForwardModeIsRightOrRefused) {
  for (const MechanismInfo* info : Mechanisms()) {
    for (const Form form : info->forms) {
      if (!info->verbs && form != Form::kBidirectional) continue;
      for (const ops::Impl impl : kImpls) {
        ImplScope scope(impl);
        at::manual_seed(7);
        const auto m = Small(*info);
        for (const at::Tensor& p : m->parameters()) p.requires_grad_(false);
        const std::string what = info->name + ", " + FormName(form) + ", " + ImplName(impl);
        const auto run = [&](const std::vector<at::Tensor>& x) {
          if (form == Form::kBidirectional) return m->Bidirectional(x, {});
          State state = m->EmptyState(2, x[0].options().requires_grad(false));
          if (form == Form::kCausal) return m->Extend(x, state, {});
          m->Write(x, state, {});
          return m->Read(x, state);
        };
        const auto x = Inputs(*m, 2, 9), directions = Inputs(*m, 2, 9), leaves = Leaves(x);
        const at::Tensor out = run(leaves), g = at::randn_like(out);
        double want = 0;
        const auto backward = Gradients((out * g).sum(), leaves);
        for (size_t i = 0; i < x.size(); ++i)
          want += (backward[i] * directions[i]).sum().item<double>();
        const uint64_t level = torch::autograd::ForwardADLevel::get_next_idx();
        const std::string refusal = Thrown([&] {
          std::vector<at::Tensor> duals;
          for (size_t i = 0; i < x.size(); ++i)
            duals.push_back(at::_make_dual(x[i], directions[i], int64_t(level)));
          const at::Tensor tangent = std::get<1>(at::_unpack_dual(run(duals), int64_t(level)));
          ASSERT_TRUE(tangent.defined()) << what;
          const double got = (tangent * g).sum().item<double>();
          EXPECT_NEAR(got, want, 1e-9 * std::max(1.0, std::abs(want))) << what;
        });
        torch::autograd::ForwardADLevel::release_idx(level);
        if (refusal != "no error")
          ExpectContains(refusal, {"no forward-mode derivative", "CISTERN_IMPL=composite"});
        if (impl == ops::Impl::kComposite) {
          EXPECT_EQ(refusal, "no error") << what;
        }
      }
    }
  }
}

// Every verb, with each tensor cut to one or none in each dimension.
TEST(Mechanisms, TensorsAndMasksOfOtherTokensAreRefused) {
  at::NoGradGuard guard;
  for (const MechanismInfo* info : Mechanisms()) {
    const auto m = Small(*info);
    for (const int64_t length : {1, 9}) {
      const auto x = Inputs(*m, 2, length);
      // reads, writes: whether cross attention does.
      const auto expect = [&](const std::vector<at::Tensor>& y, const ops::Mask& mask, bool reads,
                              bool writes, const std::vector<std::string>& parts) {
        for (const Form form : info->forms) {
          if (!info->verbs && form != Form::kBidirectional) continue;
          const bool cross = form == Form::kCross;
          State state = m->EmptyState(2, x[0].options());
          Handles handles;
          if (!cross || reads)
            ExpectContains(Thrown([&] { m->Attend(form, y, &state, mask, handles); }), parts);
          if (form == Form::kBidirectional)
            ExpectContains(Thrown([&] { m->Bidirectional(y, mask); }), parts);
          if (form == Form::kCausal)
            ExpectContains(Thrown([&] { m->Extend(y, state, mask); }), parts);
          if (cross && writes) ExpectContains(Thrown([&] { m->Write(y, state, mask); }), parts);
        }
      };
      const std::string wanted = "[" + info->name + "] expected ";
      for (size_t i = 0, next = 0; next < x.size(); ++i) {
        const Projection& p = m->Projections()[i];
        if (!p.OfTokens()) continue;
        for (int64_t d = 0; d < 4; ++d) {
          auto y = x;
          y[next] = x[next].narrow(d, 0, x[next].size(d) > 1 ? 1 : 0);
          // Where cross attention has one tensor of a side, that says how many tokens there are.
          const bool declared = d % 2 == 1;
          expect(y, {}, declared && p.side == Side::kQuery, declared && p.side == Side::kKey,
                 {wanted, "of shape [B,", "got ["});
        }
        ++next;
      }
      for (const at::Tensor& other :
           {at::ones({1, length}, at::kBool), at::ones({2, length + 1}, at::kBool),
            at::ones({2, length}, at::kLong), at::ones({2}, at::kBool)}) {
        expect(x, {std::nullopt, other}, true, true, {wanted + "starts of shape [B,T] = [2, "});
        expect(x, {std::nullopt, std::nullopt, other}, true, true,
               {wanted + "valid of shape [B,T] = [2, "});
      }
      expect(x, {Lengths({1}), std::nullopt}, true, true, {wanted + "lengths of shape [B] = [2]"});
    }
  }
}

// Dropout that is asked for is drawn in every form, or refused.
TEST(Mechanisms, DropoutIsDrawnOrRefused) {
  for (const MechanismInfo* info : Mechanisms()) {
    AttentionDims dims;
    dims.dim = kDim, dims.heads = kHeads, dims.max_length = 64, dims.dropout = 0.5;
    std::shared_ptr<Mechanism> m;
    const std::string refusal = Thrown([&] { m = info->Make(info->cases[0], dims); });
    if (!m) {
      ExpectContains(refusal, {info->name, "attention_dropout=0.5"});
      continue;
    }
    m->train();
    const auto x = To(Inputs(*m, 2, 12), at::kFloat);
    for (const Form form : info->forms) {
      const auto run = [&](uint64_t seed) {
        at::manual_seed(seed);
        if (form == Form::kBidirectional) return m->Bidirectional(x, {});
        State state = m->EmptyState(2, x[0].options());
        if (form == Form::kCausal) return m->Extend(x, state, {});
        m->Write(x, state, {});
        return m->Read(x, state);
      };
      if (!info->verbs && form != Form::kBidirectional) continue;
      at::NoGradGuard guard;
      EXPECT_FALSE(at::equal(run(1), run(2))) << info->name << ", " << FormName(form);
      EXPECT_TRUE(at::equal(run(1), run(1))) << info->name << ", " << FormName(form);
    }
  }
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
  ExpectContains(text([] { FindMechanism("late"); }),
                 {"mechanism 'late'", "did you mean 'latte'?"});
  ExpectContains(text([] { FindMechanism("zzzzzzzz"); }),
                 {"zzzzzzzz", "softmax", "latte", "abc_mlp"});
  AttentionDims dims;
  dims.dim = 12, dims.heads = 3;
  ExpectContains(text([&] {
                   FindMechanism("latte").Make(Json{{"latent", 6}}, dims);
                 }),
                 {"latte", "latent", "latents"});
  ExpectContains(text([&] {
                   FindMechanism("latte").Make(Json{{"latents", 7}}, dims);
                 }),
                 {"[latte]", "latents=7", "heads=3"});
  ExpectContains(text([&] {
                   FindMechanism("abc_mlp").Make(Json{{"slots", 0}}, dims);
                 }),
                 {"abc_mlp", "slots", "0"});
  ExpectContains(text([&] {
                   FindMechanism("abc_mlp").Make(Json{{"slots", "many"}}, dims);
                 }),
                 {"slots", "many"});
  ExpectContains(text([&] {
                   FindMechanism("softmax").Make(Json{{"slots", 3}}, dims);
                 }),
                 {"softmax", "slots"});
  for (const auto& [dim, heads] :
       std::vector<std::pair<int64_t, int64_t>>{{0, 0}, {12, 0}, {12, -3}, {0, 3}, {12, 5}}) {
    dims.dim = dim, dims.heads = heads;
    for (const MechanismInfo* m : Mechanisms())
      ExpectContains(text([&] { m->Make(m->cases[0], dims); }),
                     {"[" + m->name + "]", StrCat("dim=", dim), StrCat("heads=", heads)});
  }
  MechanismInfo info;
  info.name = "toy", info.forms = {Form::kCausal},
  info.refusals = {"cross: it has no keys; use softmax instead"};
  ExpectContains(text([&] { RequireForm(info, Form::kCross); }),
                 {"[toy]", "cross", "use softmax instead"});
  ExpectContains(text([&] { RequireForm(info, Form::kBidirectional); }),
                 {"[toy]", "bidirectional"});
  RequireForm(info, Form::kCausal);
  State state = {{{"memory", at::zeros({1})}}};
  ExpectContains(Thrown([&] { state["memoryy"]; }), {"memoryy", "did you mean 'memory'?"});
  for (const MechanismInfo* m : Mechanisms()) {
    EXPECT_FALSE(m->title.empty() || m->source.empty() || m->summary.empty() || m->time.empty() ||
                 m->state.empty() || m->positions.empty())
        << m->name;
    for (const Form form : {Form::kBidirectional, Form::kCausal, Form::kCross}) {
      bool explained = m->Supports(form);
      for (const std::string& refusal : m->refusals)
        explained = explained || refusal.starts_with(FormName(form) + ":");
      EXPECT_TRUE(explained) << m->name << " neither has nor refuses the " << FormName(form)
                             << " form";
    }
  }
}

}  // namespace
}  // namespace cistern
