// The fused paths hold what they promise; with one defect each is caught by the property that is
// there for it.
#include "cistern/verify/paths.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <set>

#include "cistern/base/parallel.h"
#include "cistern/kernels/isa.h"
#include "cistern/ops/testing.h"

namespace cistern::verify {
namespace {

const PathCheck& Find(const std::string& path, const std::string& property) {
  for (const PathCheck& c : PathChecks()) {
    if (c.path == path && c.property == property) return c;
  }
  throw std::runtime_error(path + " has no property " + property);
}

TEST(Paths, HoldInEveryImplementation) {
  const Settings settings;
  for (const PathCheck& check : PathChecks()) {
    EXPECT_EQ(FindProperty(check.property).name, check.property);
    for (const ops::Impl impl : settings.implementations) {
      if (impl != ops::Impl::kKernel && check.scope == Property::Scope::kMachine) continue;
      const Outcome o = RunPathCheck(check, OurPaths(), impl, settings);
      EXPECT_FALSE(o.failed()) << check.path << " " << check.property << " " << ops::ImplName(impl)
                               << ": error " << o.error << ", tolerance " << o.tolerance << ", at "
                               << o.where << " " << o.reason;
      EXPECT_TRUE(o.comparisons > 0 || o.kind == Outcome::Kind::kNotApplicable)
          << check.path << " " << check.property;
    }
  }
}

TEST(Paths, AreRunByName) {
  EXPECT_EQ(PathNames(), (std::vector<std::string>{"exact_attention", "attention_of_slots",
                                                   "linear_attention", "gelu", "vocab_loss"}));
  EXPECT_TRUE(IsPath("gelu"));
  EXPECT_FALSE(IsPath("latte"));
  const std::vector<const Property*> some = {&FindProperty("simd"), &FindProperty("extreme")};
  const Settings settings;
  const auto results = RunPaths({"gelu", "vocab_loss"}, some, settings);
  ASSERT_EQ(results.size(), 3u);
  EXPECT_EQ(CountPathChecks({"gelu", "vocab_loss"}, some, settings), 3);
  EXPECT_EQ(results[1].mechanism + " " + results[1].property, "vocab_loss extreme");
}

struct Mutant {
  std::string name, property;
  Paths paths;
};

void ExpectCaught(const std::string& path, const std::vector<Mutant>& mutants) {
  std::set<std::string> used;
  for (const Mutant& m : mutants) {
    const Outcome o = RunPathCheck(Find(path, m.property), m.paths, ops::Impl::kKernel, Settings());
    EXPECT_TRUE(o.failed() || o.kind == Outcome::Kind::kNotApplicable)
        << path << " that " << m.name << " passed " << m.property << ": error " << o.error
        << ", tolerance " << o.tolerance << ", at " << o.where;
    if (o.kind == Outcome::Kind::kNotApplicable) {
      EXPECT_EQ(m.property, "simd") << o.reason;
    }
    EXPECT_TRUE(!o.failed() || o.reason.empty()) << m.name << " throws: " << o.reason;
    used.insert(m.property);
  }
  for (const PathCheck& c : PathChecks())
    EXPECT_TRUE(c.path != path || used.count(c.property) > 0)
        << path << " has no mutant for " << c.property;
}

at::Tensor OnOneIsa(const at::Tensor& y) {
  return ActiveIsa() == SupportedIsas().back() ? y * 1.001 : y;
}
at::Tensor OnThreads(const at::Tensor& y) { return NumThreads() > 1 ? y * (1 + 2e-7) : y; }
at::Tensor Coarse(const at::Tensor& y) {
  return y.scalar_type() == at::kFloat ? y.to(at::kBFloat16).to(at::kFloat) : y;
}
at::Tensor WithUnset(const at::Tensor& y) { return y + 0 * at::empty(y.sizes(), y.options()); }
// The value of one, the gradient of the other.
at::Tensor Joined(const at::Tensor& value, const at::Tensor& gradient) {
  return value.detach() + (gradient - gradient.detach());
}

TEST(PathMutants, OfExactAttention) {
  using T = const at::Tensor&;
  using Seen = const ops::SeenKeys&;
  using Drop = const DropoutDraw&;
  const auto with = [](auto&& exact) {
    Paths paths = OurPaths();
    paths.exact = exact;
    return paths;
  };
  const auto ranges = [&](auto&& change) {  // change(ranges, keys, queries)
    return with([change](T q, T k, T v, double scale, Seen seen, Drop drop) {
      ops::SeenKeys other = seen;
      if (seen.ranges.defined()) {
        other.ranges = seen.ranges.clone();
        change(other.ranges, k.size(2), q.size(2));
      }
      return ops::ExactAttention(q, k, v, scale, other, drop);
    });
  };
  const auto after = [&](auto&& change) {  // change(out, v)
    return with([change](T q, T k, T v, double scale, Seen seen, Drop drop) {
      return change(ops::ExactAttention(q, k, v, scale, seen, drop), v);
    });
  };
  const auto ours = ops::ExactAttention;
  ExpectCaught(
      "exact_attention",
      {{"sees one key ahead", "definition",
        ranges([](T r, int64_t keys, int64_t) { r.select(2, 1).add_(1).clamp_max_(keys); })},
       {"has a window that is a key too wide", "definition",
        ranges([](T r, int64_t, int64_t) { r.select(2, 0).sub_(1).clamp_min_(0); })},
       {"forgets empty slots", "definition",
        ranges([](T r, int64_t, int64_t) { r.select(2, 2).zero_(); })},
       {"decodes without the last key", "pieces", ranges([](T r, int64_t, int64_t queries) {
          if (queries == 1) r.select(2, 1).sub_(1).clamp_min_(1);
        })},
       {"forgets the dilation", "definition",
        with([ours](T q, T k, T v, double scale, Seen seen, Drop drop) {
          return ours(q, k, v, scale, {seen.ranges, seen.valid, 1}, drop);
        })},
       {"sees hidden keys", "masked",
        with([ours](T q, T k, T v, double scale, Seen seen, Drop drop) {
          return ours(q, k, v, scale, {seen.ranges, {}, seen.dilation}, drop);
        })},
       {"loses half the gradient of values", "gradient",
        with([ours](T q, T k, T v, double scale, Seen seen, Drop drop) {
          return ours(q, k, 0.5 * v + 0.5 * v.detach(), scale, seen, drop);
        })},
       {"loses the gradient of keys in part", "gradient",
        with([ours](T q, T k, T v, double scale, Seen seen, Drop drop) {
          return ours(q, 0.9 * k + 0.1 * k.detach(), v, scale, seen, drop);
        })},
       {"drops others in the backward pass", "gradient",
        with([ours](T q, T k, T v, double scale, Seen seen, Drop drop) {
          return Joined(ours(q, k, v, scale, seen, drop),
                        ours(q, k, v, scale, seen, {drop.rate, drop.seed + 1}));
        })},
       {"drops others", "definition",
        with([ours](T q, T k, T v, double scale, Seen seen, Drop drop) {
          return ours(q, k, v, scale, seen, {drop.rate, drop.seed + 1});
        })},
       {"does not divide what is kept", "definition",
        with([ours](T q, T k, T v, double scale, Seen seen, Drop drop) {
          return ours(q, k, v, scale, seen, drop) * (1 - drop.rate);
        })},
       {"lets the future round the past", "future",
        after([](T y, T v) { return y + 1e-12 * v.select(2, v.size(2) - 1).unsqueeze(2); })},
       {"adds zero times everything", "nonfinite",
        after([](T y, T v) { return y + 0.0 * v.sum(2, true); })},
       {"reads NaN as zero", "nonfinite", after([](T y, T) { return at::nan_to_num(y, 0.0); })},
       {"is coarse in float", "float", after([](T y, T) { return Coarse(y); })},
       {"depends on threads", "threads", after([](T y, T) { return OnThreads(y); })},
       {"is wrong on one instruction set", "simd", after([](T y, T) { return OnOneIsa(y); })},
       {"reads what is not set", "poison", after([](T y, T) { return WithUnset(y); })}});
}

TEST(PathMutants, OfAttentionOfSlots) {
  using T = const at::Tensor&;
  using Mask = const ops::Mask&;
  const auto with = [](auto&& slots) {
    Paths paths = OurPaths();
    paths.slots = slots;
    return paths;
  };
  const auto ours = OurPaths().slots;
  const auto after = [&](auto&& change) {  // change(out, v)
    return with([ours, change](T q, T k, T v, double scale, Mask mask, T valid) {
      return change(ours(q, k, v, scale, mask, valid), v);
    });
  };
  ExpectCaught(
      "attention_of_slots",
      {{"has another scale", "definition",
        with([ours](T q, T k, T v, double scale, Mask mask, T valid) {
          return ours(q, k, v, 1.001 * scale, mask, valid);
        })},
       {"sees padding", "definition", with([ours](T q, T k, T v, double scale, Mask, T valid) {
          return ours(q, k, v, scale, {}, valid);
        })},
       {"sees hidden keys", "definition", with([ours](T q, T k, T v, double scale, Mask mask, T) {
          return ours(q, k, v, scale, mask, {});
        })},
       {"loses the gradient of keys in part", "gradient",
        with([ours](T q, T k, T v, double scale, Mask mask, T valid) {
          return ours(q, 0.9 * k + 0.1 * k.detach(), v, scale, mask, valid);
        })},
       {"loses half the gradient of queries", "gradient",
        with([ours](T q, T k, T v, double scale, Mask mask, T valid) {
          return ours(0.5 * q + 0.5 * q.detach(), k, v, scale, mask, valid);
        })},
       {"reads what is hidden", "masked", after([](T y, T v) { return y + 0.0 * v.sum(2, true); })},
       {"lets heads read each other", "nonfinite", after([](T y, T v) {
          return y + 0.0 * v.sum({1, 2}, true).sum(1, true);
        })},
       {"reads NaN as zero", "nonfinite", after([](T y, T) { return at::nan_to_num(y, 0.0); })},
       {"is coarse in float", "float", after([](T y, T) { return Coarse(y); })},
       {"depends on threads", "threads", after([](T y, T) { return OnThreads(y); })},
       {"is wrong on one instruction set", "simd", after([](T y, T) { return OnOneIsa(y); })},
       {"reads what is not set", "poison", after([](T y, T) { return WithUnset(y); })}});
}

TEST(PathMutants, OfLinearAttention) {
  using T = const at::Tensor&;
  using Rule = const LinearRule&;
  using Mask = const ops::Mask&;
  const auto with = [](auto&& linear) {
    Paths paths = OurPaths();
    paths.linear = linear;
    return paths;
  };
  const auto after = [&](auto&& change) {  // change(out, v)
    return with([change](T q, T k, T v, T memory, Rule rule, Mask mask) {
      ops::SumResult y = ops::LinearAttention(q, k, v, memory, rule, mask);
      y.out = change(y.out, v);
      return y;
    });
  };
  const auto ours = ops::LinearAttention;
  ExpectCaught(
      "linear_attention",
      {{"has another feature map", "definition",
        with([ours](T q, T k, T v, T memory, Rule rule, Mask mask) {
          LinearRule other = rule;
          other.map_eps = 0;
          return ours(q, k, v, memory, other, mask);
        })},
       {"forgets the starts of documents", "definition",
        with([ours](T q, T k, T v, T memory, Rule rule, Mask mask) {
          return ours(q, k, v, memory, rule, {mask.lengths, {}});
        })},
       {"writes padding", "padding", with([ours](T q, T k, T v, T memory, Rule rule, Mask mask) {
          return ours(q, k, v, memory, rule, {{}, mask.starts});
        })},
       {"forgets the normaliser", "pieces",
        with([ours](T q, T k, T v, T memory, Rule rule, Mask mask) {
          ops::SumResult y = ours(q, k, v, memory, rule, mask);
          const int64_t width = v.size(3), more = memory.size(3) - width;
          y.memory = at::cat(
              {y.memory.narrow(3, 0, width), at::zeros_like(memory.narrow(3, width, more))}, 3);
          return y;
        })},
       {"loses half the gradient of queries", "gradient",
        with([ours](T q, T k, T v, T memory, Rule rule, Mask mask) {
          return ours(0.5 * q + 0.5 * q.detach(), k, v, memory, rule, mask);
        })},
       {"loses the gradient of the memory before it", "gradient",
        with([ours](T q, T k, T v, T memory, Rule rule, Mask mask) {
          return ours(q, k, v, memory.detach(), rule, mask);
        })},
       {"reads a token late", "future", after([](T y, T) { return y.roll({-1}, {2}); })},
       {"adds zero times everything", "nonfinite",
        after([](T y, T v) { return y + 0.0 * v.sum(2, true); })},
       {"is coarse in float", "float", after([](T y, T) { return Coarse(y); })},
       {"depends on threads", "threads", after([](T y, T) { return OnThreads(y); })},
       {"is wrong on one instruction set", "simd", after([](T y, T) { return OnOneIsa(y); })},
       {"reads what is not set", "poison", after([](T y, T) { return WithUnset(y); })}});
}

TEST(PathMutants, OfGelu) {
  using T = const at::Tensor&;
  const auto with = [](auto&& gelu) {
    Paths paths = OurPaths();
    paths.gelu = gelu;
    return paths;
  };
  const auto ours = OurPaths().gelu;
  ExpectCaught("gelu",
               {{"is the approximation by tanh", "definition",
                 with([](T x) { return at::gelu(x, "tanh"); })},
                {"is differentiated as the approximation", "definition",
                 with([ours](T x) { return Joined(ours(x), at::gelu(x, "tanh")); })},
                {"is coarse in float", "float", with([ours](T x) { return Coarse(ours(x)); })},
                {"reads NaN as zero", "nonfinite",
                 with([ours](T x) { return at::nan_to_num(ours(x), 0.0); })},
                {"is wrong on one instruction set", "simd",
                 with([ours](T x) { return OnOneIsa(ours(x)); })}});
}

TEST(PathMutants, OfTheLossOverAVocabulary) {
  using T = const at::Tensor&;
  const auto with = [](auto&& loss) {
    Paths paths = OurPaths();
    paths.loss = loss;
    return paths;
  };
  const auto ours = OurPaths().loss;
  const auto after = [&](auto&& change) {
    return with(
        [ours, change](T h, T w, T b, T y, double s) { return change(ours(h, w, b, y, s)); });
  };
  ExpectCaught(
      "vocab_loss",
      {{"does not smooth", "definition",
        with([ours](T h, T w, T b, T y, double) { return ours(h, w, b, y, 0); })},
       {"counts targets without a loss", "definition", with([ours](T h, T w, T b, T y, double s) {
          return ours(h, w, b, y, s) * (y != -100).to(h.scalar_type()).mean();
        })},
       {"forgets the bias", "definition",
        with([ours](T h, T w, T, T y, double s) { return ours(h, w, {}, y, s); })},
       {"adds up plain exponentials", "extreme", with([](T h, T w, T b, T y, double) {
          const at::Tensor logits = at::linear(h, w, b), real = (y != -100).nonzero().squeeze(1);
          const at::Tensor picked = logits.gather(1, y.clamp_min(0).unsqueeze(1)).squeeze(1);
          return (logits.exp().sum(1).log() - picked).index_select(0, real).mean();
        })},
       {"loses half its gradient", "gradient",
        after([](T x) { return 0.5 * x + 0.5 * x.detach(); })},
       {"has no gradient of the bias", "gradient", with([ours](T h, T w, T b, T y, double s) {
          return ours(h, w, b.defined() ? b.detach() : b, y, s);
        })},
       {"is coarse in float", "float", after([](T x) { return Coarse(x); })},
       {"depends on threads", "threads", after([](T x) { return OnThreads(x); })},
       {"is wrong on one instruction set", "simd", after([](T x) { return OnOneIsa(x); })}});
}

}  // namespace
}  // namespace cistern::verify
