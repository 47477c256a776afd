#include "cistern/kernels/sign_clusters.h"

#include <algorithm>
#include <vector>

#include "cistern/base/parallel.h"
#include "cistern/kernels/dispatch.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cistern/kernels/sign_clusters.cc"
#include "hwy/foreach_target.h"  // must come before the headers below

#include "cistern/kernels/segments-inl.h"

HWY_BEFORE_NAMESPACE();
namespace cistern {
namespace HWY_NAMESPACE {

constexpr size_t kPlanes = kMostPlanes;

// The first planes of head h, turned [d+1, 32]; those that are not used are 0, on whose positive
// side no key lies.
std::vector<double> TurnedPlanes(const SlotShape& shape, int64_t h, const float* planes) {
  const auto row = static_cast<size_t>(shape.width) + 1, used = static_cast<size_t>(shape.slots);
  std::vector<double> turned(row * kPlanes);
  for (size_t p = 0; p < used; ++p) {
    for (size_t j = 0; j < row; ++j)
      turned[j * kPlanes + p] = planes[(static_cast<size_t>(h) * kPlanes + p) * row + j];
  }
  return turned;
}

double AsDouble(float x) { return x; }
double AsDouble(double x) { return x; }
double AsDouble(BFloat16 x) { return float(x); }

// kVectors of planes, from the first.
template <size_t kVectors, class S>
HWY_NOINLINE void CodesOf(size_t width, const double* planes, const Sequence<const S>& k,
                          const Segment& segment, uint32_t* codes) {
  const Tag<double> d;
  constexpr size_t kStep = kLanes<double>;
  for (size_t t = segment.begin; t < segment.padded; ++t) {
    const S* const key = k.At(t);
    Vec<double> sums[kVectors];
    for (size_t v = 0; v < kVectors; ++v)
      sums[v] = hn::LoadU(d, planes + width * kPlanes + v * kStep);  // the biases
    for (size_t j = 0; j < width; ++j) {
      const Vec<double> x = hn::Set(d, AsDouble(key[j]));
      for (size_t v = 0; v < kVectors; ++v)
        sums[v] = hn::MulAdd(x, hn::LoadU(d, planes + j * kPlanes + v * kStep), sums[v]);
    }
    uint32_t code = 0;
    for (size_t v = 0; v < kVectors; ++v) {
      uint8_t bits[8] = {};
      hn::StoreMaskBits(d, hn::Gt(sums[v], hn::Zero(d)), bits);
      code |= (bits[0] & ((1U << kStep) - 1)) << (v * kStep);
    }
    codes[t] = code;
  }
}

template <class S>
void Codes(const SlotShape& shape, Rows<const S> k, const float* planes, uint32_t* codes) {
  const auto width = static_cast<size_t>(shape.width), used = static_cast<size_t>(shape.slots);
  const SegmentList segments(shape);
  segments.For([&](int64_t head, size_t index, size_t) HWY_ATTR {
    const Segment segment(shape, nullptr, head, index);
    const std::vector<double> turned = TurnedPlanes(shape, segment.h, planes);
    const Sequence<const S> keys(k, segment.b, segment.h);
    uint32_t* const to = codes + head * shape.length;
    constexpr size_t kAll = kPlanes / kLanes<double>, kFew = std::max<size_t>(1, kAll / 4);
    used <= kFew* kLanes<double> ? CodesOf<kFew>(width, turned.data(), keys, segment, to)
                                 : CodesOf<kAll>(width, turned.data(), keys, segment, to);
  });
}

// The nearest centre of each code: bits that differ, then the number of the centre, in one integer.
HWY_NOINLINE void Nearest(const std::vector<uint32_t>& codes, const std::vector<uint32_t>& centres,
                          std::vector<uint32_t>& nearest) {
  const Tag<uint32_t> d;
  constexpr size_t kStep = kLanes<uint32_t>, kTogether = 4;
  for (size_t t = 0; t < codes.size(); t += kTogether * kStep) {
    Vec<uint32_t> code[kTogether], least[kTogether];
    for (size_t i = 0; i < kTogether; ++i) {
      code[i] = hn::LoadU(d, codes.data() + t + i * kStep);
      least[i] = hn::Set(d, ~uint32_t{0});
    }
    for (size_t l = 0; l < centres.size(); ++l) {
      const Vec<uint32_t> centre = hn::Set(d, centres[l]),
                          number = hn::Set(d, static_cast<uint32_t>(l));
      for (size_t i = 0; i < kTogether; ++i) {
        const Vec<uint32_t> differ = hn::PopulationCount(hn::Xor(code[i], centre));
        least[i] = hn::Min(least[i], hn::Or(hn::ShiftLeft<16>(differ), number));
      }
    }
    for (size_t i = 0; i < kTogether; ++i)
      hn::StoreU(hn::And(least[i], hn::Set(d, uint32_t{0xffff})), d,
                 nearest.data() + t + i * kStep);
  }
}

// ones [n, 32]: how many of a cluster's keys have each bit; sizes [n]: how many it has.
HWY_NOINLINE void CountBits(size_t count, const std::vector<uint32_t>& codes,
                            const std::vector<uint32_t>& nearest, std::vector<uint32_t>& ones,
                            std::vector<uint32_t>& sizes) {
  const Tag<uint32_t> d;
  constexpr size_t kStep = kLanes<uint32_t>;
  uint32_t bits[kPlanes];
  for (size_t p = 0; p < kPlanes; ++p) bits[p] = uint32_t{1} << p;
  std::fill(ones.begin(), ones.end(), 0);
  std::fill(sizes.begin(), sizes.end(), 0);
  for (size_t t = 0; t < count; ++t) {
    const Vec<uint32_t> code = hn::Set(d, codes[t]);
    uint32_t* const of_cluster = ones.data() + nearest[t] * kPlanes;
    for (size_t p = 0; p < kPlanes; p += kStep) {
      const Vec<uint32_t> bit = hn::LoadU(d, bits + p),
                          has = hn::VecFromMask(d, hn::Eq(hn::And(code, bit), bit));  // -1 or 0
      hn::StoreU(hn::Sub(hn::LoadU(d, of_cluster + p), has), d, of_cluster + p);
    }
    ++sizes[nearest[t]];
  }
}

void Cluster(const SlotShape& shape, const uint32_t* codes, const int64_t* lengths,
             int64_t iterations, int64_t* clusters) {
  constexpr size_t kBlock = 4 * kLanes<uint32_t>;
  const auto length = static_cast<size_t>(shape.length), n = static_cast<size_t>(shape.slots);
  ParallelFor(shape.batch * shape.heads, 1, [&](int64_t begin, int64_t end) HWY_ATTR {
    std::vector<uint32_t> centres(n), ones(n * kPlanes), sizes(n);
    for (int64_t row = begin; row < end; ++row) {
      const size_t count =
          lengths == nullptr ? length : static_cast<size_t>(lengths[row / shape.heads]);
      int64_t* const to = clusters + row * shape.length;
      std::fill(to, to + length, 0);
      if (count == 0) continue;
      const uint32_t* const from = codes + row * shape.length;
      std::vector<uint32_t> keys(from, from + count);
      keys.resize((count + kBlock - 1) / kBlock * kBlock);
      std::vector<uint32_t> nearest(keys.size());
      for (size_t l = 0; l < n; ++l) centres[l] = keys[l * count / n];
      bool moved = true;
      for (int64_t i = 0; i < iterations && moved; ++i) {
        Nearest(keys, centres, nearest);
        CountBits(count, keys, nearest, ones, sizes);
        moved = false;
        for (size_t l = 0; l < n; ++l) {
          uint32_t centre = centres[l];
          for (size_t p = 0; p < kPlanes; ++p) {
            const uint32_t with = ones[l * kPlanes + p], without = sizes[l] - with,
                           bit = uint32_t{1} << p;
            if (with > without) centre |= bit;
            if (with < without) centre &= ~bit;
          }
          moved = moved || centre != centres[l];
          centres[l] = centre;
        }
      }
      Nearest(keys, centres, nearest);
      std::copy_n(nearest.begin(), count, to);
    }
  });
}

void CodesFloat(const SlotShape& shape, Rows<const float> k, const float* planes, uint32_t* codes) {
  Codes(shape, k, planes, codes);
}
void CodesDouble(const SlotShape& shape, Rows<const double> k, const float* planes,
                 uint32_t* codes) {
  Codes(shape, k, planes, codes);
}
void CodesBFloat16(const SlotShape& shape, Rows<const BFloat16> k, const float* planes,
                   uint32_t* codes) {
  Codes(shape, k, planes, codes);
}

}  // namespace HWY_NAMESPACE
}  // namespace cistern
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace cistern {

HWY_EXPORT(CodesFloat);
HWY_EXPORT(CodesDouble);
HWY_EXPORT(CodesBFloat16);
HWY_EXPORT(Cluster);

template <>
void SignCodes(const SlotShape& shape, Rows<const float> k, const float* planes, uint32_t* codes) {
  CISTERN_DISPATCH(CodesFloat)(shape, k, planes, codes);
}
template <>
void SignCodes(const SlotShape& shape, Rows<const double> k, const float* planes, uint32_t* codes) {
  CISTERN_DISPATCH(CodesDouble)(shape, k, planes, codes);
}
template <>
void SignCodes(const SlotShape& shape, Rows<const BFloat16> k, const float* planes,
               uint32_t* codes) {
  CISTERN_DISPATCH(CodesBFloat16)(shape, k, planes, codes);
}
void SignClusters(const SlotShape& shape, const uint32_t* codes, const int64_t* lengths,
                  int64_t iterations, int64_t* clusters) {
  CISTERN_DISPATCH(Cluster)(shape, codes, lengths, iterations, clusters);
}

}  // namespace cistern
#endif  // HWY_ONCE
