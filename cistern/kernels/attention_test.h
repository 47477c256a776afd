#pragma once
// Problems for kernels of exact attention, and what their definition makes of them.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "cistern/kernels/ref/exact_attention_ref.h"
#include "cistern/kernels/slot_test.h"

namespace cistern::attention_test {

using slot_test::Normals;

inline const double kNan = std::numeric_limits<double>::quiet_NaN();

enum class Kind { kAll, kCausal, kWindow, kBand, kLengths, kDocuments, kHoles, kEmpty, kBlind };
constexpr Kind kKinds[] = {Kind::kAll,   Kind::kCausal,  Kind::kWindow,
                           Kind::kBand,  Kind::kLengths, Kind::kDocuments,
                           Kind::kHoles, Kind::kEmpty,   Kind::kBlind};

struct Problem {
  AttentionShape shape;
  double scale = 0.25;
  std::vector<double> q, k, v, g;
  std::vector<KeyRange> ranges;
  std::vector<uint8_t> valid;
  DropoutDraw dropout = {};
  std::string name;

  AttentionMask Mask() const {
    return {ranges.empty() ? nullptr : ranges.data(),
            int64_t(ranges.size()) == shape.queries ? 0 : shape.queries,
            valid.empty() ? nullptr : valid.data(), dropout};
  }
  bool Sees(int64_t b, int64_t t, int64_t j) const {
    const AttentionMask mask = Mask();
    const KeyRange range =
        ranges.empty() ? KeyRange{0, shape.keys, 0} : ranges[size_t(b * mask.range_batch + t)];
    return j >= range.begin && j < range.end && (j - t) % shape.dilation == 0 &&
           (valid.empty() || valid[size_t(b * shape.keys + j)] != 0);
  }
};

inline Problem MakeProblem(uint64_t seed, const AttentionShape& shape, Kind kind,
                           double spread = 1) {
  Random random(seed);
  Problem p;
  p.shape = shape;
  const int64_t heads = shape.batch * shape.heads, T = shape.queries, S = shape.keys,
                ahead = S - T;  // the queries are the last T of the keys, where there are as many
  p.q = Normals(random, heads * T * shape.key_width, spread);
  p.k = Normals(random, heads * S * shape.key_width);
  p.v = Normals(random, heads * S * shape.value_width);
  p.g = Normals(random, heads * T * shape.value_width);
  p.name = "kind " + std::to_string(int(kind)) + " seed " + std::to_string(seed) + " B" +
           std::to_string(shape.batch) + " H" + std::to_string(shape.heads) + " T" +
           std::to_string(T) + " S" + std::to_string(S) + " dk" + std::to_string(shape.key_width) +
           " dv" + std::to_string(shape.value_width) + " dilation " +
           std::to_string(shape.dilation);
  const auto range = [&](int64_t t, int64_t before, int64_t after) {
    const int64_t at = t + ahead;
    return KeyRange{std::clamp<int64_t>(at - before, 0, S),
                    std::clamp<int64_t>(at + after + 1, 0, S), 0};
  };
  const int64_t rows = kind == Kind::kLengths || kind == Kind::kDocuments ? shape.batch : 1;
  for (int64_t b = 0; b < rows && kind != Kind::kAll && kind != Kind::kHoles; ++b) {
    const int64_t length = random.Below(S + 1);
    int64_t document = 0;
    for (int64_t t = 0; t < T; ++t) {
      switch (kind) {
        case Kind::kCausal:
          p.ranges.push_back(range(t, S + T, 0));
          break;
        case Kind::kWindow:
          p.ranges.push_back(range(t, 5 * shape.dilation, 0));
          break;
        case Kind::kBand:
          p.ranges.push_back(range(t, 70, 9));
          break;
        case Kind::kLengths:
          p.ranges.push_back({0, length, 0});
          break;
        case Kind::kDocuments:
          if (random.Below(12) == 0) document = std::clamp<int64_t>(t + ahead, 0, S);
          p.ranges.push_back(range(t, std::max<int64_t>(0, t + ahead - document), 0));
          break;
        case Kind::kEmpty:
          p.ranges.push_back(range(t, 9, 0));
          p.ranges.back().empty = std::max<int64_t>(0, 10 - t);
          break;
        default:  // some queries see nothing
          p.ranges.push_back(range(t, 3, 0));
          if (random.Below(3) == 0) p.ranges.back() = {};
      }
    }
  }
  if (kind == Kind::kHoles || kind == Kind::kBlind) {
    for (int64_t i = 0; i < shape.batch * S; ++i) p.valid.push_back(random.Below(3) != 0);
  }
  return p;
}

struct Result {
  std::vector<double> out, dq, dk, dv;
  std::vector<std::vector<double>*> All() { return {&out, &dq, &dk, &dv}; }
};

inline Result Reference(const Problem& p) {
  Result r = {std::vector<double>(p.g.size()), std::vector<double>(p.q.size()),
              std::vector<double>(p.k.size()), std::vector<double>(p.v.size())};
  ref::AttentionForward(p.shape, p.scale, p.q.data(), p.k.data(), p.v.data(), p.Mask(),
                        r.out.data());
  ref::AttentionBackward(p.shape, p.scale, p.q.data(), p.k.data(), p.v.data(), p.g.data(), p.Mask(),
                         r.dq.data(), r.dk.data(), r.dv.data());
  return r;
}

// Bits of the outputs and gradients of what does not see key j of any head.
// run(problem) -> Result
template <class Run>
void ExpectUnseenHasNoPart(const Problem& p, const Result& want, int64_t j, double value,
                           Run&& run) {
  const AttentionShape& s = p.shape;
  Problem other = p;
  for (int64_t i = 0; i < s.batch * s.heads; ++i) {
    for (int64_t c = 0; c < s.key_width; ++c)
      other.k[size_t((i * s.keys + j) * s.key_width + c)] = value;
    for (int64_t c = 0; c < s.value_width; ++c)
      other.v[size_t((i * s.keys + j) * s.value_width + c)] = value;
  }
  const Result got = run(other);
  for (int64_t i = 0; i < s.batch * s.heads; ++i) {
    for (int64_t t = 0; t < s.queries; ++t) {
      const bool sees = p.Sees(i / s.heads, t, j);
      const size_t at = size_t((i * s.queries + t) * s.value_width);
      const size_t dq_at = size_t((i * s.queries + t) * s.key_width);
      if (sees) {
        EXPECT_EQ(std::isnan(value), std::isnan(got.out[at])) << p.name << " t " << t << " j " << j;
        continue;
      }
      EXPECT_EQ(std::memcmp(&got.out[at], &want.out[at], size_t(s.value_width) * sizeof(double)), 0)
          << p.name << " t " << t << " j " << j;
      EXPECT_EQ(std::memcmp(&got.dq[dq_at], &want.dq[dq_at], size_t(s.key_width) * sizeof(double)),
                0)
          << p.name << " dq of t " << t << " j " << j;
    }
  }
}

}  // namespace cistern::attention_test
