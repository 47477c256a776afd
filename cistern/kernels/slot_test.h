#pragma once
// Random problems for the tests of the slot memory, and what those of the summing slot memory
// (sum_test.h) share with them: inputs that fit float exactly, so that every precision computes the
// same problem.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "cistern/base/random.h"
#include "cistern/kernels/bfloat16.h"
#include "cistern/kernels/isa.h"
#include "cistern/kernels/slot_memory.h"

namespace cistern::slot_test {

inline constexpr double kInf = std::numeric_limits<double>::infinity();

enum class Weights { kMild, kJumps, kGrowth, kOffset, kHoles, kLate };
inline constexpr Weights kAllWeights[] = {Weights::kMild,   Weights::kJumps, Weights::kGrowth,
                                          Weights::kOffset, Weights::kHoles, Weights::kLate};

enum class Start { kEmpty, kFull, kMixed };

inline std::vector<double> Normals(Random& random, int64_t count, double scale = 1) {
  std::vector<double> x(static_cast<size_t>(count));
  for (double& value : x) value = static_cast<float>(scale * random.Normal());
  return x;
}

// The numbers as they are stored as S, and back.
template <class S>
std::vector<S> As(const std::vector<double>& x) {
  std::vector<S> y;
  for (const double v : x) y.push_back(S(static_cast<ComputeType<S>>(v)));
  return y;
}
template <class S>
std::vector<double> Wide(const std::vector<S>& x) {
  std::vector<double> y;
  for (const S v : x) y.push_back(double(static_cast<ComputeType<S>>(v)));
  return y;
}

// |got - want| <= tolerance |want|.
inline void ExpectNearInAll(const std::vector<double>& got, const std::vector<double>& want,
                            double tolerance, const char* what) {
  ASSERT_EQ(got.size(), want.size()) << what;
  double size = 0, off = 0;
  for (size_t i = 0; i < want.size(); ++i)
    size += want[i] * want[i], off += (got[i] - want[i]) * (got[i] - want[i]);
  EXPECT_LE(std::sqrt(off), tolerance * (std::sqrt(size) + 1e-30)) << what << " " << ActiveIsa();
}

// What every mode has. Contiguous [B,H,T,w] arrays. a: r of a read [n], q of a match [d]. g: the
// gradient of the output.
struct AnyProblem {
  SlotShape shape;
  bool match = false;
  std::vector<double> a, u, memory, g, dmemory_T;
  std::vector<uint8_t> starts;
  std::vector<int64_t> lengths;
  std::string name;
  int64_t AWidth() const { return match ? shape.width : shape.slots; }
  int64_t OutWidth() const { return match ? shape.slots : shape.width; }
  int64_t Tokens() const { return shape.batch * shape.heads * shape.length; }
  int64_t States() const { return shape.batch * shape.heads * shape.slots; }
  RowMask Mask() const {
    return {starts.empty() ? nullptr : starts.data(), lengths.empty() ? nullptr : lengths.data()};
  }

  void Draw(Random& random, const std::string& kind, bool with_starts, bool with_lengths) {
    name = kind + (match ? " match" : " read") + " B" + std::to_string(shape.batch) + " H" +
           std::to_string(shape.heads) + " T" + std::to_string(shape.length) + " n" +
           std::to_string(shape.slots) + " d" + std::to_string(shape.width) + " isa " + ActiveIsa();
    a = Normals(random, Tokens() * AWidth());
    u = Normals(random, Tokens() * shape.width);
    memory = Normals(random, States() * shape.width);
    g = Normals(random, Tokens() * OutWidth());
    dmemory_T = Normals(random, States() * shape.width);
    for (int64_t i = 0; with_starts && i < shape.batch * shape.length; ++i)
      starts.push_back(random.Below(12) == 0 ? 1 : 0);
    for (int64_t b = 0; with_lengths && b < shape.batch; ++b)
      lengths.push_back(b == 0 ? shape.length : random.Below(shape.length + 1));
  }
  // Tokens [begin, end) of every head of an array of some width.
  std::vector<double> Cut(const std::vector<double>& from, int64_t width, int64_t begin,
                          int64_t end) const {
    std::vector<double> to;
    for (int64_t i = 0; i < shape.batch * shape.heads && !from.empty(); ++i) {
      to.insert(to.end(), from.begin() + (i * shape.length + begin) * width,
                from.begin() + (i * shape.length + end) * width);
    }
    return to;
  }
};

struct Problem : AnyProblem {
  std::vector<double> s, z, dz, dz_T;
};

inline std::vector<double> LogWeights(Random& random, const SlotShape& shape, Weights kind) {
  std::vector<double> s =
      Normals(random, shape.batch * shape.heads * shape.length * shape.slots, 2);
  for (size_t i = 0; i < s.size(); ++i) {
    const int64_t l = int64_t(i) % shape.slots, t = int64_t(i) / shape.slots % shape.length;
    double& x = s[i];
    switch (kind) {
      case Weights::kMild:
        break;
      case Weights::kJumps:
        if (random.Below(20) == 0) x += random.Below(2) == 0 ? 200 : -200;
        break;
      case Weights::kGrowth:
        x += 3.7 * double(t) * (l % 2 == 0 ? 1 : -1);
        break;
      case Weights::kOffset:
        x += l % 3 == 0 ? 1e4 : l % 3 == 1 ? -1e4 : 0;
        break;
      case Weights::kHoles:
        if (random.Below(3) == 0 || t % 7 == 3 || l % 5 == 4) x = -kInf;
        break;
      case Weights::kLate:
        if (t < 5 * l % 41) x = -kInf;
        break;
    }
    x = static_cast<float>(x);
  }
  return s;
}

struct Options {
  Weights weights = Weights::kMild;
  Start start = Start::kMixed;
  bool starts = false, lengths = false;
};

inline Problem MakeProblem(uint64_t seed, bool match, const SlotShape& shape,
                           const Options& options = {}) {
  Random random(seed);
  Problem p;
  p.shape = shape;
  p.match = match;
  p.Draw(random,
         "seed " + std::to_string(seed) + " weights " + std::to_string(int(options.weights)),
         options.starts, options.lengths);
  p.s = LogWeights(random, shape, options.weights);
  p.z = Normals(random, p.States(), 2);
  for (double& z : p.z) {
    if (options.start == Start::kEmpty || (options.start == Start::kMixed && random.Below(2) == 0))
      z = -kInf;
  }
  p.dz = Normals(random, p.Tokens() * shape.slots);
  p.dz_T = Normals(random, p.States());
  return p;
}

enum class Layout { kBHTW, kBTHW };  // kBTHW has 3 spare columns after each token's heads

// One array in the kernels' precision and some layout; spare memory and outputs start as NaN.
template <class T>
class Array {
 public:
  Array(const SlotShape& shape, int64_t width, Layout layout) : shape_(shape), width_(width) {
    const int64_t T_ = shape.length, H = shape.heads;
    if (layout == Layout::kBHTW) {
      time_ = width, head_ = T_ * width, batch_ = H * head_;
    } else {
      head_ = width, time_ = H * width + 3, batch_ = T_ * time_;
    }
    data_.assign(static_cast<size_t>(shape.batch * batch_ + 1),
                 static_cast<T>(std::numeric_limits<ComputeType<T>>::quiet_NaN()));
  }
  Array(const SlotShape& shape, int64_t width, Layout layout, const std::vector<double>& values)
      : Array(shape, width, layout) {
    size_t i = 0;
    ForEach([&](T& x) { x = static_cast<T>(values[i++]); });
  }
  Rows<T> rows() { return {data_.data(), batch_, head_, time_}; }
  Rows<const T> rows() const { return {data_.data(), batch_, head_, time_}; }
  Rows<const T> in() const { return rows(); }
  std::vector<double> Values() {
    std::vector<double> values;
    ForEach([&](T& x) { values.push_back(static_cast<ComputeType<T>>(x)); });
    return values;
  }

 private:
  template <class F>
  void ForEach(F f) {
    for (int64_t b = 0; b < shape_.batch; ++b) {
      for (int64_t h = 0; h < shape_.heads; ++h) {
        for (int64_t t = 0; t < shape_.length; ++t) {
          for (int64_t j = 0; j < width_; ++j) f(*(rows().At(b, h, t) + j));
        }
      }
    }
  }
  SlotShape shape_;
  int64_t width_, batch_, head_, time_;
  std::vector<T> data_;
};

struct Forward {
  std::vector<double> out, z_out, memory, z;
};

template <class T>
std::vector<double> ToDouble(const std::vector<T>& x) {
  return std::vector<double>(x.begin(), x.end());
}

template <class T>
Forward RunForward(const Problem& p, Layout layout = Layout::kBTHW) {
  const Array<T> a(p.shape, p.AWidth(), layout, p.a), s(p.shape, p.shape.slots, layout, p.s),
      u(p.shape, p.shape.width, layout, p.u);
  Array<T> out(p.shape, p.OutWidth(), layout), z_out(p.shape, p.shape.slots, layout);
  std::vector<double> memory = p.memory, z = p.z;
  (p.match ? SlotMatch<T> : SlotRead<T>)(p.shape, a.in(), s.in(), u.in(), p.Mask(), memory.data(),
                                         z.data(), out.rows(), z_out.rows());
  return {out.Values(), z_out.Values(), memory, z};
}

// The difference's root mean square over that of `want`; infinities must agree exactly, NaN never
// does.
inline double RelativeRms(const std::vector<double>& got, const std::vector<double>& want) {
  if (got.size() != want.size()) return kInf;
  double error = 0, norm = 0;
  for (size_t i = 0; i < got.size(); ++i) {
    if (got[i] == want[i]) {
      norm += std::isinf(want[i]) ? 0 : want[i] * want[i];
      continue;
    }
    const double difference = got[i] - want[i];
    if (!std::isfinite(difference)) return kInf;
    error += difference * difference;
    norm += want[i] * want[i];
  }
  return error == 0 ? 0 : std::sqrt(error / std::max(norm, 1e-30));
}

// `gradient` of `loss`, which reads x, against central differences: of every finite number of x.
inline void ExpectDifferences(std::vector<double>& x, const std::vector<double>& gradient,
                              const std::string& what, const std::function<double()>& loss) {
  ASSERT_EQ(gradient.size(), x.size()) << what;
  for (size_t i = 0; i < x.size(); ++i) {
    const double kept = x[i], step = 1e-5;
    if (!std::isfinite(kept)) continue;
    x[i] = kept + step;
    const double up = loss();
    x[i] = kept - step;
    const double down = loss();
    x[i] = kept;
    EXPECT_NEAR((up - down) / (2 * step), gradient[i], 1e-7) << what << " " << i;
  }
}

// a . b of one slot of two memories, of which a has zeros where b may hold anything.
template <class A, class B>
double SlotDot(const std::vector<A>& a, const std::vector<B>& b, size_t slot, int64_t width) {
  double sum = 0;
  for (size_t j = slot * size_t(width); j < (slot + 1) * size_t(width); ++j)
    sum += double(a[j]) == 0 ? 0 : double(a[j]) * double(b[j]);
  return sum;
}

inline bool SameBits(const std::vector<double>& x, const std::vector<double>& y, size_t count) {
  return std::memcmp(x.data(), y.data(), count * sizeof(double)) == 0;
}

// float 1e-6, double 1e-12, plus what rounding loses on the largest log-weights.
template <class T>
double Tolerance(const Problem& p) {
  double largest = 0;
  for (double s : p.s) largest = std::max(largest, std::isfinite(s) ? std::abs(s) : 0);
  return std::is_same_v<T, float> ? 1e-6 + 0x1p-22 * std::min(largest, 200.0) / 16
                                  : 1e-12 + 0x1p-51 * largest;
}

// Runs `body` once for every instruction set of this machine.
template <class Body>
void ForEachIsa(Body body) {
  for (const std::string& isa : SupportedIsas()) {
    ForceIsa(isa);
    body();
  }
  ForceIsa("");
}

}  // namespace cistern::slot_test
