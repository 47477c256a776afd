#pragma once
// What the tests of decoding with writes put off share: rows token by token, and room for states.
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#include "cistern/kernels/slot_test.h"

namespace cistern::slot_test {

template <class T>
Rows<T> From(const Rows<T>& x, int64_t t) {
  return {x.data + t * x.time, x.batch, x.head, x.time};
}

inline SlotShape OneToken(SlotShape shape) {
  shape.length = 1;
  return shape;
}

// body(t, mask of that token) for each token of p, which has a shape, starts and lengths.
template <class P, class Body>
void EachToken(const P& p, Body&& body) {
  for (int64_t t = 0; t < p.shape.length; ++t) {
    std::vector<uint8_t> starts;
    std::vector<int64_t> lengths;
    for (int64_t b = 0; b < p.shape.batch; ++b) {
      if (!p.starts.empty()) starts.push_back(p.starts[size_t(b * p.shape.length + t)]);
      if (!p.lengths.empty()) lengths.push_back(t < p.lengths[size_t(b)] ? 1 : 0);
    }
    body(t, RowMask{starts.empty() ? nullptr : starts.data(),
                    lengths.empty() ? nullptr : lengths.data()});
  }
}

// Aligned bytes, with leftovers in them.
class AlignedBytes {
 public:
  explicit AlignedBytes(size_t size)
      : size_(size),
        data_(static_cast<std::byte*>(std::aligned_alloc(64, std::max<size_t>(64, size)))) {
    std::memset(data_.get(), 0xff, size_);
  }
  std::byte* data() const { return data_.get(); }
  std::vector<std::byte> Copy() const { return {data(), data() + size_}; }

 private:
  struct Free {
    void operator()(std::byte* p) const { std::free(p); }
  };
  size_t size_;
  std::unique_ptr<std::byte, Free> data_;
};

}  // namespace cistern::slot_test
