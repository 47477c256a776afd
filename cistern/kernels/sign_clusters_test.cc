#include "cistern/kernels/sign_clusters.h"

#include <bit>

#include "cistern/base/testing_threads.h"
#include "cistern/kernels/slot_test.h"

namespace cistern::slot_test {
namespace {

using Codes = std::vector<uint32_t>;
using Clusters = std::vector<int64_t>;

struct Keys {
  SlotShape shape;  // slots: planes
  std::vector<double> k, planes;
};

Keys Make(const SlotShape& shape, uint64_t seed) {
  Random random(seed);
  return {shape, Normals(random, shape.batch * shape.heads * shape.length * shape.width),
          Normals(random, shape.heads * kMostPlanes * (shape.width + 1))};
}

Codes DefinedCodes(const Keys& p) {
  const auto [batch, heads, length, count, width] = p.shape;
  Codes codes;
  for (int64_t row = 0; row < batch * heads * length; ++row) {
    uint32_t code = 0;
    for (int64_t i = 0; i < count; ++i) {
      const double* plane = &p.planes[size_t((row / length % heads * 32 + i) * (width + 1))];
      double side = plane[width];
      for (int64_t j = 0; j < width; ++j) side += plane[j] * p.k[size_t(row * width + j)];
      if (side > 0) code |= uint32_t{1} << i;
    }
    codes.push_back(code);
  }
  return codes;
}

template <class S>
Codes Computed(const Keys& p) {
  const auto [batch, heads, length, count, width] = p.shape;
  const std::vector<S> k = As<S>(p.k);
  const std::vector<float> planes = As<float>(p.planes);
  Codes codes(size_t(batch * heads * length), 7);
  const Rows<const S> rows = {k.data(), heads * length * width, length * width, width};
  SignCodes<S>(p.shape, rows, planes.data(), codes.data());
  return codes;
}

TEST(SignCodes, Definition) {
  ForEachIsa([] {
    for (const int64_t count : {1, 3, 8, 9, 31, 32}) {
      for (const auto& [batch, length, width] :
           {std::tuple<int64_t, int64_t, int64_t>(1, 1, 1), {2, 37, 5}, {1, 2100, 16}}) {
        Keys p = Make({batch, 2, length, count, width}, 4);
        EXPECT_EQ(Computed<float>(p), DefinedCodes(p)) << count << " " << ActiveIsa();
        EXPECT_EQ(Computed<double>(p), DefinedCodes(p)) << count << " " << ActiveIsa();
        p.k = Wide(As<BFloat16>(p.k));
        EXPECT_EQ(Computed<BFloat16>(p), DefinedCodes(p)) << count << " " << ActiveIsa();
      }
    }
  });
}

TEST(SignCodes, ZeroAndNaNAreOnNoPositiveSide) {
  Keys p = Make({1, 1, 3, 32, 4}, 5);
  for (size_t i = 0; i < p.planes.size(); i += 5) p.planes[i + 4] = 0;  // the biases
  for (size_t j = 0; j < 4; ++j) p.k[j] = 0;
  p.k[6] = std::nan("");
  ForEachIsa([&] {
    const Codes codes = Computed<float>(p);
    EXPECT_EQ(codes[0], 0u);
    EXPECT_EQ(codes[1], 0u);
    EXPECT_EQ(codes[2], DefinedCodes(p)[2]);
    EXPECT_NE(codes[2], 0u);
  });
}

Clusters DefinedClusters(const SlotShape& shape, const Codes& codes,
                         const std::vector<int64_t>& lengths, int64_t iterations) {
  const auto n = size_t(shape.slots);
  Clusters all;
  for (int64_t row = 0; row < shape.batch * shape.heads; ++row) {
    const auto count = size_t(lengths[size_t(row / shape.heads)]);
    const uint32_t* const code = &codes[size_t(row * shape.length)];
    Codes centre;
    for (size_t l = 0; l < n && count > 0; ++l) centre.push_back(code[l * count / n]);
    Clusters cluster(size_t(shape.length), 0);
    const auto assign = [&] {
      for (size_t t = 0; t < count; ++t) {
        int least = 33;
        for (size_t l = 0; l < n; ++l) {
          const int differ = std::popcount(code[t] ^ centre[l]);
          if (differ < least) least = differ, cluster[t] = int64_t(l);
        }
      }
    };
    for (int64_t i = 0; i < iterations; ++i) {
      assign();
      for (size_t l = 0; l < n && count > 0; ++l) {
        for (int p = 0; p < 32; ++p) {
          int64_t votes = 0;
          for (size_t t = 0; t < count; ++t)
            if (cluster[t] == int64_t(l)) votes += (code[t] >> p & 1) != 0 ? 1 : -1;
          if (votes != 0) centre[l] = (centre[l] & ~(1u << p)) | uint32_t(votes > 0) << p;
        }
      }
    }
    assign();
    all.insert(all.end(), cluster.begin(), cluster.end());
  }
  return all;
}

Clusters Clustered(const SlotShape& shape, const Codes& codes, const int64_t* lengths,
                   int64_t iterations) {
  Clusters clusters(codes.size(), 9);
  SignClusters(shape, codes.data(), lengths, iterations, clusters.data());
  return clusters;
}

// Codes with few bits have ties, and equal centres; random ones go on moving.
TEST(SignClusters, Definition) {
  ForEachIsa([] {
    Random random(6);
    for (const int64_t n : {1, 2, 7, 40}) {
      for (const int64_t length : {1, 5, 31, 32, 130}) {
        for (const uint32_t bits : {0x7u, 0x80000001u, 0xffffffffu}) {
          const SlotShape shape = {2, 2, length, n, 1};
          Codes codes;
          for (int64_t i = 0; i < 4 * length; ++i)
            codes.push_back(uint32_t(random.Uniform() * 4294967296.0) & bits);
          const std::vector<int64_t> lengths = {length, length / 2}, whole = {length, length};
          for (const int64_t iterations : {0, 1, 3, 10}) {
            EXPECT_EQ(Clustered(shape, codes, nullptr, iterations),
                      DefinedClusters(shape, codes, whole, iterations))
                << n << " " << length << " " << iterations << " " << ActiveIsa();
            EXPECT_EQ(Clustered(shape, codes, lengths.data(), iterations),
                      DefinedClusters(shape, codes, lengths, iterations))
                << n << " " << length << " " << iterations << " " << ActiveIsa();
          }
        }
      }
    }
  });
}

}  // namespace
}  // namespace cistern::slot_test
