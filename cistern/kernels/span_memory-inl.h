// The memory of a walk over spans; included once per Highway target.
#if defined(CISTERN_KERNELS_SPAN_MEMORY_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef CISTERN_KERNELS_SPAN_MEMORY_INL_H_
#undef CISTERN_KERNELS_SPAN_MEMORY_INL_H_
#else
#define CISTERN_KERNELS_SPAN_MEMORY_INL_H_
#endif

#include <cstring>

#include "cistern/kernels/slot_chunk-inl.h"

HWY_BEFORE_NAMESPACE();
namespace cistern {
namespace HWY_NAMESPACE {

// A panel of T sums beside a panel of doubles: S = past + U, where past is the memory at the span's
// beginning and U what its chunks have added.
template <class T>
class SpanMemory {
 public:
  static size_t Bytes(size_t rows, size_t padded) {
    return rows * padded * (sizeof(double) + 3 * sizeof(T));
  }
  static constexpr size_t kPieces = 4;
  SpanMemory(size_t rows, size_t padded, Workspace& workspace) : size_(rows * padded), ld(padded) {
    M = workspace.Take<double>(size_);
    past = workspace.Take<T>(size_);
    U_ = workspace.Take<T>(size_);
    S_ = workspace.Take<T>(size_);
  }
  void Clear() {
    std::memset(M, 0, size_ * sizeof(double));
    std::memset(past, 0, size_ * sizeof(T));
    fresh_ = true;
  }
  // past = M, where a span begins.
  void Load() {
    for (size_t i = 0; i < size_; i += kLanes<double>)
      StoreDouble(hn::Load(Tag<double>(), M + i), past + i);
    fresh_ = true;
  }
  // What the rows of the coming chunk see of earlier ones.
  HWY_NOINLINE const T* Seen() {
    if (fresh_) return past;
    const Tag<T> d;
    for (size_t i = 0; i < size_; i += kLanes<T>)
      hn::Store(hn::Add(hn::Load(d, past + i), hn::Load(d, U_ + i)), d, S_ + i);
    return S_;
  }
  // U += A B
  void Write(size_t rows, size_t columns, const Factors<T>& product) {
    if (fresh_) {
      Product<T>(rows, columns, product, U_, ld);
    } else {
      AddProduct<T>(rows, columns, product, U_, ld);
    }
    fresh_ = false;
  }
  // M += U and past = base + M: where a span of plain sums ends.
  HWY_NOINLINE void Sum(const double* base) {
    if (fresh_) return;
    const Tag<double> d;
    for (size_t i = 0; i < size_; i += kLanes<double>) {
      const Double m = hn::Add(hn::Load(d, M + i), LoadAsDouble(U_ + i));
      hn::Store(m, d, M + i);
      StoreDouble(hn::Add(hn::Load(d, base + i), m), past + i);
    }
    fresh_ = true;
  }
  const T* added() const { return U_; }
  // Whether that counts as zero.
  bool fresh() const { return fresh_; }
  // For what is added next.
  T* AddTo() {
    fresh_ = false;
    return U_;
  }
  void set_fresh() { fresh_ = true; }

 private:
  const size_t size_;
  T *U_, *S_;
  bool fresh_ = true;  // U counts as zero

 public:
  const size_t ld;
  double* M;
  T* past;
};

}  // namespace HWY_NAMESPACE
}  // namespace cistern
HWY_AFTER_NAMESPACE();

#endif  // include guard
