// Exact attention as a path: masks, widths, dropout, decoding and prefill in chunks against plain
// loops.
#include <ATen/ATen.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>

#include "cistern/base/random.h"
#include "cistern/verify/path_machine.h"
#include "cistern/verify/paths.h"
#include "cistern/verify/properties.h"

namespace cistern::verify {
namespace path_attention {

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr double kScale = 0.4;
constexpr double kFloatTolerance = 2e-6;

struct Case {
  std::string name;
  at::Tensor q, k, v, g;
  ops::SeenKeys seen = {};
  DropoutDraw dropout = {};
};

// range(b, t) -> begin, end, empty of each query.
template <class Range>
at::Tensor Ranges(int64_t batch, int64_t queries, Range&& range) {
  const at::Tensor ranges = at::zeros({batch, queries, 3}, at::kLong);
  int64_t* of = ranges.mutable_data_ptr<int64_t>();
  for (int64_t b = 0; b < batch; ++b) {
    for (int64_t t = 0; t < queries; ++t) {
      for (const int64_t x : range(b, t)) *of++ = x;
    }
  }
  return ranges;
}
using Range = std::array<int64_t, 3>;

at::Tensor Window(int64_t queries, int64_t keys, int64_t before, int64_t after) {
  return Ranges(1, queries, [&](int64_t, int64_t t) {
    const int64_t at = keys - queries + t;
    return Range{std::clamp<int64_t>(at - before, 0, keys),
                 std::clamp<int64_t>(at + after + 1, 0, keys), 0};
  });
}
at::Tensor Causal(int64_t queries, int64_t keys) { return Window(queries, keys, keys, 0); }

Case Make(const std::string& name, int64_t batch, int64_t queries, int64_t keys, int64_t width,
          int64_t value_width) {
  return {name, Normal({batch, 2, queries, width}), Normal({batch, 2, keys, width}),
          Normal({batch, 2, keys, value_width}), Normal({batch, 2, queries, value_width})};
}

// `most`: the longest sequence.
std::vector<Case> Cases(int64_t most) {
  const auto with = [](Case c, const ops::SeenKeys& seen, double rate = 0) {
    c.seen = seen, c.dropout = {rate, 77};
    return c;
  };
  const int64_t T = most, few = std::max<int64_t>(2, most / 3);
  std::vector<Case> all = {
      with(Make("full", 2, T, T, 5, 5), {}),
      with(Make("full, other widths and lengths", 2, few, T + 7, 17, 4), {}),
      with(Make("causal", 2, T, T, 8, 3), {Causal(T, T)}),
      with(Make("causal after a cache", 1, few, T, 5, 9), {Causal(few, T)}),
      with(Make("window", 1, T, T, 5, 5), {Window(T, T, 6, 0)}),
      with(Make("band", 1, T, T, 5, 5), {Window(T, T, 9, 4)}),
      with(Make("dilated", 2, T, T + 6, 5, 5), {Window(T, T + 6, 12, 0), {}, 3}),
      with(Make("causal with dropout", 2, T, T, 5, 6), {Causal(T, T)}, 0.25),
      with(Make("dilated with dropout", 1, T, T + 6, 5, 5), {Window(T, T + 6, 15, 3), {}, 3}, 0.5)};
  Case lengths = Make("lengths", 3, T, T, 5, 5);
  lengths.seen.ranges = Ranges(3, T, [&](int64_t b, int64_t) { return Range{0, b * T / 2, 0}; });
  all.push_back(lengths);
  Case documents = Make("documents", 1, T, T, 5, 5);
  documents.seen.ranges = Ranges(1, T, [](int64_t, int64_t t) {
    return Range{t - t % 7, t + 1, 0};
  });
  all.push_back(documents);
  Case left = Make("padding on the left", 3, T, T, 5, 5);
  left.seen = {Causal(T, T), at::arange(T).unsqueeze(0) >= at::tensor({0, 5, int(T)}).unsqueeze(1)};
  all.push_back(left);
  Case holes = Make("holes with dropout", 2, T, T + 3, 5, 4);
  holes.seen.valid = at::rand({2, T + 3}) < 0.6;
  holes.dropout = {0.1, 5};
  all.push_back(holes);
  Case empty = Make("empty slots", 1, T, T, 5, 5);
  empty.seen.ranges = Ranges(1, T, [](int64_t, int64_t t) {
    return Range{std::max<int64_t>(0, t - 4), t + 1, std::max<int64_t>(0, 4 - t)};
  });
  all.push_back(empty);
  return all;
}

// One query and few, long caches: decoding splits these keys.
std::vector<Case> Decoding() {
  Case one = Make("one query, split keys", 1, 1, 4200, 3, 2),
       few = Make("three queries, split keys", 2, 3, 2100, 3, 2);
  few.seen.ranges = Causal(3, 2100);
  Case holes = Make("one query, split keys, holes", 2, 1, 2500, 3, 2);
  holes.seen.valid = at::rand({2, 2500}) < 0.3;
  return {one, few, holes};
}

// [B,T,S]: whether a query sees a key.
std::vector<uint8_t> AllSeen(const Case& c) {
  const int64_t B = c.q.size(0), T = c.q.size(2), S = c.k.size(2);
  std::vector<uint8_t> seen(size_t(B * T * S));
  const at::Tensor ranges = c.seen.ranges.defined() ? c.seen.ranges.contiguous() : c.seen.ranges,
                   valid = c.seen.valid.defined() ? c.seen.valid.contiguous() : c.seen.valid;
  for (int64_t b = 0; b < B; ++b) {
    for (int64_t t = 0; t < T; ++t) {
      for (int64_t j = 0; j < S; ++j) {
        bool sees = (j - t) % c.seen.dilation == 0;
        if (valid.defined()) sees = sees && valid.const_data_ptr<bool>()[b * S + j];
        if (ranges.defined()) {
          const int64_t* of =
              ranges.const_data_ptr<int64_t>() + 3 * ((ranges.size(0) == 1 ? 0 : b) * T + t);
          sees = sees && j >= of[0] && j < of[1];
        }
        seen[size_t((b * T + t) * S + j)] = sees;
      }
    }
  }
  return seen;
}

// out_t = sum_j f_tj e^(scale q_t . k_j) v_j / (empty_t + sum_j e^(scale q_t . k_j))
at::Tensor Definition(const Case& c) {
  const int64_t B = c.q.size(0), H = c.q.size(1), T = c.q.size(2), S = c.k.size(2), d = c.q.size(3),
                e = c.v.size(3);
  const std::vector<uint8_t> seen = AllSeen(c);
  const at::Tensor out = at::zeros({B, H, T, e}, at::kDouble);
  const auto q = c.q.accessor<double, 4>(), k = c.k.accessor<double, 4>(),
             v = c.v.accessor<double, 4>();
  auto y = out.accessor<double, 4>();
  for (int64_t b = 0; b < B; ++b) {
    for (int64_t h = 0; h < H; ++h) {
      for (int64_t t = 0; t < T; ++t) {
        const int64_t row = !c.seen.ranges.defined() || c.seen.ranges.size(0) == 1 ? 0 : b;
        const int64_t empty =
            c.seen.ranges.defined() ? c.seen.ranges[row][t][2].item<int64_t>() : 0;
        std::vector<double> score(size_t(S), -std::numeric_limits<double>::infinity());
        double high = empty > 0 ? 0 : score[0], sum = 0;
        for (int64_t j = 0; j < S; ++j) {
          if (!seen[size_t((b * T + t) * S + j)]) continue;
          double dot = 0;
          for (int64_t i = 0; i < d; ++i) dot += q[b][h][t][i] * k[b][h][j][i];
          high = std::max(high, score[size_t(j)] = kScale * dot);
        }
        if (std::isinf(high)) continue;  // it sees nothing
        for (const double x : score) sum += std::exp(x - high);
        sum += double(empty) * std::exp(-high);
        for (int64_t j = 0; j < S; ++j) {
          if (!seen[size_t((b * T + t) * S + j)]) continue;
          double p = std::exp(score[size_t(j)] - high) / sum;
          if (c.dropout.rate > 0) {
            const uint32_t drawn = Philox(c.dropout.seed, uint64_t(b * H + h),
                                          (uint64_t(t) << 32) + uint64_t(j / 4))[size_t(j % 4)];
            p = double(drawn) < c.dropout.rate * 0x1p32 ? 0 : p / (1 - c.dropout.rate);
          }
          for (int64_t i = 0; i < e; ++i) y[b][h][t][i] += p * v[b][h][j][i];
        }
      }
    }
  }
  return out;
}

at::Tensor Run(const Paths& paths, const Case& c, at::ScalarType dtype = at::kDouble) {
  return paths.exact(c.q.to(dtype), c.k.to(dtype), c.v.to(dtype), kScale, c.seen, c.dropout);
}

// The output and the gradients of q, k and v.
Tensors Everything(const Paths& paths, const Case& c, at::ScalarType dtype) {
  const Tensors leaves = Leaves(Cast({c.q, c.k, c.v}, dtype));
  const at::Tensor out = paths.exact(leaves[0], leaves[1], leaves[2], kScale, c.seen, c.dropout);
  Tensors all = Gradients((out * c.g.to(dtype)).sum(), leaves);
  all.insert(all.begin(), out.detach());
  return all;
}

Outcome CompareWithDefinition(const Paths& paths, const Settings& settings, at::ScalarType dtype,
                              double tolerance) {
  Meter meter;
  std::vector<Case> all = Decoding();
  for (const int64_t most :
       settings.full ? std::vector<int64_t>{2, 67, 130, 300} : std::vector<int64_t>{2, 67, 130}) {
    const std::vector<Case> more = Cases(most);
    all.insert(all.end(), more.begin(), more.end());
  }
  for (const Case& c : all) {
    const at::Tensor want = Definition(c);
    meter.Close(Run(paths, c, dtype), want, tolerance, c.name, ", T=", c.q.size(2));
    meter.Close(Everything(paths, c, dtype)[0], want, tolerance, c.name, ", T=", c.q.size(2),
                ", with gradients");
  }
  return meter.result();
}

Outcome CheckDefinitionOf(const Paths& paths, const Settings& settings) {
  return CompareWithDefinition(paths, settings, at::kDouble, 1e-12);
}
Outcome CheckFloatOf(const Paths& paths, const Settings& settings) {
  return CompareWithDefinition(paths, settings, at::kFloat, kFloatTolerance);
}

Outcome CheckGradientOf(const Paths& paths, const Settings& settings) {
  Meter meter;
  std::vector<Case> all = Cases(9);
  if (settings.full) {
    const std::vector<Case> more = Cases(70);
    all.insert(all.end(), more.begin(), more.end());
  }
  for (const Case& c : all) {
    Differences(
        [&](const Tensors& x) {
          return (paths.exact(x[0], x[1], x[2], kScale, c.seen, c.dropout) * c.g).sum();
        },
        {c.q, c.k, c.v}, 2e-7, c.name, {"q", "k", "v"}, meter);
  }
  return meter.result();
}

// A prompt in chunks, or token by token as in decoding, is the whole.
Outcome CheckPiecesOf(const Paths& paths, const Settings&) {
  Meter meter;
  const at::NoGradGuard guard;
  for (const int64_t T : {5, 130}) {
    Case whole = Make("whole", 2, T, T, 6, 5);
    whole.seen.ranges = Causal(T, T);
    const at::Tensor want = Definition(whole);
    std::vector<std::vector<int64_t>> ways = {{0, 3, 4, T}, EachToken(T)};
    if (T > 64) ways.push_back({0, 64, 65, 100, T});
    for (const std::vector<int64_t>& cuts : ways) {
      Tensors out;
      for (size_t i = 0; i + 1 < cuts.size(); ++i) {
        const int64_t begin = cuts[i], end = cuts[i + 1];
        Case piece = whole;
        piece.q = whole.q.narrow(2, begin, end - begin);
        piece.k = whole.k.narrow(2, 0, end), piece.v = whole.v.narrow(2, 0, end);
        piece.seen.ranges = Causal(end - begin, end);
        out.push_back(Run(paths, piece));
      }
      meter.Close(at::cat(out, 2), want, 1e-12, "T=", T, " in ", cuts.size() - 1, " pieces");
    }
  }
  return meter.result();
}

// Keys that are hidden are as if they were not there, and have exactly zero gradient.
Outcome CheckMaskedOf(const Paths& paths, const Settings&) {
  Meter meter;
  for (const int64_t T : {1, 70}) {
    Case c = Make("masked", 1, T, 90, 5, 4);
    c.seen.valid = at::rand({1, 90}) < 0.6;
    c.seen.valid.narrow(1, 0, 10).fill_(false);
    const at::Tensor kept = c.seen.valid[0].nonzero().squeeze(1),
                     hidden = c.seen.valid[0].logical_not().nonzero().squeeze(1);
    Case without = c;
    without.seen = {};
    without.k = c.k.index_select(2, kept), without.v = c.v.index_select(2, kept);
    const Tensors got = Everything(paths, c, at::kDouble);
    meter.Close(got[0], Definition(without), 1e-12, "T=", T);
    meter.Close(Run(paths, c), got[0], 1e-12, "T=", T, ", without gradients");
    for (const size_t i : {2, 3})
      meter.Zero(got[i].index_select(2, hidden), "T=", T, ", gradient of what is hidden");
  }
  return meter.result();
}

// What is not seen, NaN or any number, changes no bit; what is seen and NaN makes NaN.
Outcome CheckUnseen(const Paths& paths, const std::vector<double>& values, bool later_alone) {
  Meter meter;
  for (const Case& c : Cases(67)) {
    if (later_alone && c.name.rfind("causal", 0) != 0) continue;
    const std::vector<uint8_t> seen = AllSeen(c);
    const int64_t B = c.q.size(0), T = c.q.size(2), S = c.k.size(2);
    for (const auto dtype : {at::kFloat, at::kDouble}) {
      const Tensors want = Everything(paths, c, dtype);
      for (const int64_t j : {int64_t{0}, S / 2, S - 1}) {
        for (const double value : values) {
          Case other = c;
          other.k = c.k.clone(), other.v = c.v.clone();
          other.k.select(2, j).fill_(value), other.v.select(2, j).fill_(value);
          const Tensors got = Everything(paths, other, dtype);
          for (int64_t b = 0; b < B; ++b) {
            std::vector<int64_t> unseen, sees;
            for (int64_t t = 0; t < T; ++t)
              (seen[size_t((b * T + t) * S + j)] ? sees : unseen).push_back(t);
            const auto rows = [&](const at::Tensor& x, const std::vector<int64_t>& of) {
              return x[b].index_select(1, at::tensor(of, at::kLong));
            };
            for (size_t i = 0; i < 2 && !unseen.empty(); ++i)
              meter.Same(rows(got[i], unseen), rows(want[i], unseen), c.name, ", key ", j, " = ",
                         value);
            if (std::isnan(value) && !sees.empty())
              meter.True(rows(got[0], sees).isnan().all().item<bool>(), c.name, ", key ", j,
                         " is NaN and seen");
          }
        }
      }
    }
  }
  return meter.result();
}
Outcome CheckFutureOf(const Paths& paths, const Settings&) {
  return CheckUnseen(paths, {3.0}, true);
}
Outcome CheckNonFiniteOf(const Paths& paths, const Settings&) {
  return CheckUnseen(paths, {kNan}, false);
}

// Everything, and the output where no gradient is wanted, which is another way.
auto BothWays(const Paths& paths, const Case& c) {
  return [&](at::ScalarType dtype) {
    Tensors all = Everything(paths, c, dtype);
    all.push_back(Run(paths, c, dtype));
    return all;
  };
}

Outcome CheckThreadsOf(const Paths& paths, const Settings&) {
  Meter meter;
  std::vector<Case> all = Cases(130);
  all.push_back(Make("full, in groups", 1, 450, 780, 4, 4));
  for (const Case& c : Decoding()) all.push_back(c);
  for (const Case& c : all) SameOnThreads(meter, c.name, BothWays(paths, c));
  return meter.result();
}

Outcome CheckSimdOf(const Paths& paths, const Settings&) {
  if (HasOneTarget()) return OneTarget();
  Meter meter;
  for (const Case& c : Cases(67)) {
    CloseToReferenceOnTargets(
        meter, c.name, paths, 10 * kFloatTolerance,
        [&](const Paths& by, at::ScalarType dtype) { return Everything(by, c, dtype); });
  }
  return meter.result();
}

Outcome CheckPoisonOf(const Paths& paths, const Settings&) {
  Meter meter;
  std::vector<Case> all = Cases(67);
  for (const Case& c : Decoding()) all.push_back(c);
  for (const Case& c : all) SameWithPoison(meter, c.name, BothWays(paths, c));
  return meter.result();
}

}  // namespace path_attention

std::vector<PathCheck> AttentionPathChecks() {
  using namespace path_attention;
  const std::string path = "exact_attention";
  const auto machine = Property::Scope::kMachine;
  return {{path, "definition", CheckDefinitionOf},
          {path, "float", CheckFloatOf},
          {path, "pieces", CheckPiecesOf},
          {path, "future", CheckFutureOf, machine},
          {path, "gradient", CheckGradientOf},
          {path, "masked", CheckMaskedOf},
          {path, "nonfinite", CheckNonFiniteOf, machine},
          {path, "threads", CheckThreadsOf, machine},
          {path, "simd", CheckSimdOf, machine},
          {path, "poison", CheckPoisonOf, machine}};
}

}  // namespace cistern::verify
