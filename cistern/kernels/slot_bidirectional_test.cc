// Writes and reads of all tokens at once against their definitions, forward and backward, on every
// instruction set, without torch: this is what the sanitizers see of them. ops/ tests more of what
// they mean.
#include "cistern/kernels/slot_bidirectional.h"

#include "cistern/kernels/slot_test.h"

namespace cistern::slot_test {
namespace {

using Values = std::vector<double>;

// Tokens that bfloat16 holds exactly.
Values Tokens(Random& random, int64_t count) {
  Values x = Normals(random, count);
  for (double& value : x) value = static_cast<float>(BFloat16(static_cast<float>(value)));
  return x;
}

// One head after another: tokens x [T,k] and v [T,d], slots K [n,k] and M [n,d], z [n].
struct Case {
  SlotShape shape;
  int64_t key_width;  // k; 0: log-weights or logits are given, [T,n]
  bool read = false;
  Values x, v, K, M, z, g, gz;  // g: gradient of what comes out; gz of z
  std::vector<int64_t> lengths;
  double scale = 0.4;
  int64_t width() const { return key_width == 0 ? shape.slots : key_width; }
  int64_t heads() const { return shape.batch * shape.heads; }
  const int64_t* Lengths() const { return lengths.empty() ? nullptr : lengths.data(); }
  std::string Name() const {
    return std::string(read ? "read" : "write") + " T" + std::to_string(shape.length) + " n" +
           std::to_string(shape.slots) + " d" + std::to_string(shape.width) + " k" +
           std::to_string(key_width) + " isa " + ActiveIsa();
  }
};

Case Make(uint64_t seed, bool read, const SlotShape& shape, int64_t key_width) {
  Random random(seed);
  Case c{shape, key_width, read, {}, {}, {}, {}, {}, {}, {}, {}};
  const int64_t tokens = c.heads() * shape.length, slots = c.heads() * shape.slots;
  c.x = Tokens(random, tokens * c.width());
  c.v = Tokens(random, tokens * shape.width);
  c.K = Tokens(random, slots * c.width());
  c.M = Normals(random, slots * shape.width);
  c.z = Normals(random, slots);
  // Empty slots: of a read some, of a write most.
  for (double& z : c.z) z = random.Below(3) == (read ? 0 : 1) ? z : -kInf;
  if (read && shape.slots == 1) c.z.assign(c.z.size(), 0);
  c.g = read ? Tokens(random, tokens * shape.width) : Normals(random, slots * shape.width);
  c.gz = Normals(random, slots);
  for (int64_t b = 0; !read && b < shape.batch; ++b)
    c.lengths.push_back(b == 0 ? shape.length : random.Below(shape.length + 1));
  return c;
}

// What comes out (of a write M' and z') and the gradients of x, v, K and of M for a read.
struct Results {
  Values out, z, dx, dv, dK, dM;
};

Results Definition(const Case& c) {
  const int64_t T = c.shape.length, n = c.shape.slots, d = c.shape.width, w = c.width();
  Results r{Values(c.read ? c.v.size() : c.M.size()),
            c.z,
            Values(c.x.size()),
            Values(c.v.size()),
            Values(c.K.size()),
            Values(c.M.size())};
  for (int64_t head = 0; head < c.heads(); ++head) {
    const auto at = [&](const Values& x, int64_t rows, int64_t width, int64_t i, int64_t j) {
      return x[size_t((head * rows + i) * width + j)];
    };
    const auto to = [&](Values& x, int64_t rows, int64_t width, int64_t i, int64_t j) -> double& {
      return x[size_t((head * rows + i) * width + j)];
    };
    const int64_t end = c.lengths.empty() ? T : c.lengths[size_t(head / c.shape.heads)];
    Values s(size_t(T * n));
    for (int64_t t = 0; t < end; ++t) {
      for (int64_t l = 0; l < n; ++l) {
        double dot = 0;
        for (int64_t j = 0; j < w; ++j) dot += at(c.x, T, w, t, j) * at(c.K, n, w, l, j);
        s[size_t(t * n + l)] = c.key_width == 0 ? at(c.x, T, n, t, l) : c.scale * dot;
      }
    }
    Values ds(s.size());
    if (c.read) {
      bool any = false;
      for (int64_t l = 0; l < n; ++l) any = any || at(c.z, n, 1, l, 0) != -kInf;
      for (int64_t t = 0; t < T; ++t) {
        double sum = 0, dot = 0;
        Values p(static_cast<size_t>(n)), dp = p;
        for (int64_t l = 0; l < n; ++l) {
          const bool empty = c.key_width > 0 && at(c.z, n, 1, l, 0) == -kInf;
          p[size_t(l)] = empty ? (any ? 0 : 1) : std::exp(s[size_t(t * n + l)]);
          sum += p[size_t(l)];
        }
        for (int64_t l = 0; l < n; ++l) {
          p[size_t(l)] /= sum;
          for (int64_t j = 0; j < d; ++j) {
            const double g = at(c.g, T, d, t, j);
            to(r.out, T, d, t, j) += p[size_t(l)] * at(c.M, n, d, l, j);
            to(r.dM, n, d, l, j) += p[size_t(l)] * g;
            dp[size_t(l)] += g * at(c.M, n, d, l, j);
          }
          dot += p[size_t(l)] * dp[size_t(l)];
        }
        for (int64_t l = 0; l < n; ++l) {
          const bool empty = c.key_width > 0 && at(c.z, n, 1, l, 0) == -kInf;
          ds[size_t(t * n + l)] = empty ? 0 : p[size_t(l)] * (dp[size_t(l)] - dot);
        }
      }
    } else {
      for (int64_t l = 0; l < n; ++l) {
        const double z = at(c.z, n, 1, l, 0);
        double most = z, total = 0, h = -at(c.gz, n, 1, l, 0);
        for (int64_t t = 0; t < end; ++t) most = std::max(most, s[size_t(t * n + l)]);
        if (most == -kInf) continue;
        total = std::exp(z - most);
        for (int64_t t = 0; t < end; ++t) total += std::exp(s[size_t(t * n + l)] - most);
        const double after = to(r.z, n, 1, l, 0) = most + std::log(total);
        for (int64_t j = 0; j < d; ++j) {
          double& mean = to(r.out, n, d, l, j);
          mean = z == -kInf ? 0 : std::exp(z - after) * at(c.M, n, d, l, j);
          for (int64_t t = 0; t < end; ++t)
            mean += std::exp(s[size_t(t * n + l)] - after) * at(c.v, T, d, t, j);
          h += at(c.g, n, d, l, j) * mean;
        }
        for (int64_t t = 0; t < end; ++t) {
          const double weight = std::exp(s[size_t(t * n + l)] - after);
          double dot = 0;
          for (int64_t j = 0; j < d; ++j) {
            dot += at(c.g, n, d, l, j) * at(c.v, T, d, t, j);
            to(r.dv, T, d, t, j) += weight * at(c.g, n, d, l, j);
          }
          ds[size_t(t * n + l)] = weight * (dot - h);
        }
      }
    }
    for (int64_t t = 0; t < end; ++t) {
      for (int64_t l = 0; l < n; ++l) {
        const double g = ds[size_t(t * n + l)];
        for (int64_t j = 0; j < w && c.key_width > 0; ++j) {
          to(r.dx, T, w, t, j) += c.scale * g * at(c.K, n, w, l, j);
          to(r.dK, n, w, l, j) += c.scale * g * at(c.x, T, w, t, j);
        }
        if (c.key_width == 0) to(r.dx, T, n, t, l) = g;
      }
    }
  }
  return r;
}

template <class T>
Results Write(const Case& c, Layout layout) {
  using C = ComputeType<T>;
  const Array<T> x(c.shape, c.width(), layout, c.x), v(c.shape, c.shape.width, layout, c.v);
  Array<T> dx(c.shape, c.width(), layout), dv(c.shape, c.shape.width, layout);
  Results r{c.M, c.z, {}, {}, Values(c.K.size()), Values(c.M.size())};
  const SlotVectors queries = {c.scale, c.K.data(), c.key_width};
  const SlotWritten<T> written[] = {{v.in(), r.out.data()}};
  if (c.key_width == 0) {
    SlotWrite<T>(c.shape, x.in(), written, c.Lengths(), r.z.data());
  } else {
    SlotPack<T>(c.shape, queries, x.in(), v.in(), c.Lengths(), r.out.data(), r.z.data());
  }
  const std::vector<C> G(c.g.begin(), c.g.end());
  std::vector<C> h;
  for (size_t l = 0; l < c.z.size(); ++l)
    h.push_back(static_cast<C>(SlotDot(c.g, r.out, l, c.shape.width) - c.gz[l]));
  const SlotWrittenGradients<T> gradients[] = {{v.in(), G.data(), dv.rows()}};
  if (c.key_width == 0) {
    SlotWriteBackward<T>(c.shape, x.in(), gradients, c.Lengths(), r.z.data(), h.data(), dx.rows());
  } else {
    SlotPackBackward<T>(c.shape, queries, x.in(), gradients[0], c.Lengths(), r.z.data(), h.data(),
                        dx.rows(), r.dK.data());
  }
  r.dx = dx.Values(), r.dv = dv.Values();
  return r;
}

template <class T>
Results Read(const Case& c, Layout layout) {
  const Array<T> x(c.shape, c.width(), layout, c.x), g(c.shape, c.shape.width, layout, c.g);
  Array<T> out(c.shape, c.shape.width, layout), dx(c.shape, c.width(), layout);
  Results r{{}, c.z, {}, Values(c.v.size()), Values(c.K.size()), Values(c.M.size())};
  const SlotKeys keys = {c.scale, c.K.data(), c.z.data()};
  if (c.key_width == 0) {
    SlotSoftmaxRead<T>(c.shape, x.in(), c.M.data(), out.rows());
    SlotSoftmaxReadBackward<T>(c.shape, x.in(), c.M.data(), g.in(), dx.rows(), r.dM.data());
  } else {
    SlotAttend<T>(c.shape, x.in(), keys, c.M.data(), out.rows());
    SlotAttendBackward<T>(c.shape, x.in(), keys, c.M.data(), g.in(), dx.rows(), r.dK.data(),
                          r.dM.data());
  }
  r.out = out.Values(), r.dx = dx.Values();
  return r;
}

// Where gradients nearly cancel, what is left is compared beside what it is made of.
template <class T>
void ExpectDefinition(const Case& c, Layout layout, const Results& want, double tolerance) {
  const Results got = c.read ? Read<T>(c, layout) : Write<T>(c, layout);
  const auto close = [&](const Values& x, const Values& y, const char* what) {
    EXPECT_LE(RelativeRms(x, y), tolerance) << c.Name() << " " << what << " of " << sizeof(T);
  };
  const auto with = [](const Values& x, const Values& more) {
    Values both = x;
    both.insert(both.end(), more.begin(), more.end());
    return both;
  };
  close(got.out, want.out, "out");
  close(got.z, want.z, "z");
  close(got.dv, want.dv, "dv");
  close(got.dM, want.dM, "dM");
  close(with(got.dx, got.out), with(want.dx, want.out), "dx");
  close(with(got.dK, got.out), with(want.dK, want.out), "dK");
}

void ExpectDefinition(const Case& c) {
  const Layout layout = c.shape.length % 2 == 0 ? Layout::kBHTW : Layout::kBTHW;
  const Results want = Definition(c);
  ExpectDefinition<double>(c, layout, want, 1e-11);
  ExpectDefinition<float>(c, layout, want, 5e-6);
  ExpectDefinition<BFloat16>(c, layout, want, 3e-2);
}

TEST(SlotBidirectionalKernels, AreTheirDefinitions) {
  ForEachIsa([] {
    uint64_t seed = 1;
    for (const int64_t T : {0, 1, 31, 64, 65, 200}) {
      for (const auto& [n, d, k] : {std::array<int64_t, 3>{17, 5, 9}, {64, 32, 32}, {3, 33, 1}}) {
        for (const bool read : {false, true}) {
          ExpectDefinition(Make(seed++, read, {2, 2, T, n, d}, 0));
          // Keys of a read are as wide as values.
          ExpectDefinition(Make(seed++, read, {2, 2, T, n, d}, read ? d : k));
        }
      }
    }
  });
}

TEST(SlotBidirectionalKernels, OfSegments) {
  ForEachIsa([] {
    for (const bool read : {false, true}) ExpectDefinition(Make(77, read, {1, 2, 4133, 5, 4}, 4));
  });
}

}  // namespace
}  // namespace cistern::slot_test
