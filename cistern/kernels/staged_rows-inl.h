// Rows as they are stored, bfloat16 too, for kernels that compute in float or double: a vector or a
// panel at a time, or a copy of one head's tokens, in memory of this thread that stays in its cache
// where sequences are short; included once per Highway target.
#if defined(CISTERN_KERNELS_STAGED_ROWS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef CISTERN_KERNELS_STAGED_ROWS_INL_H_
#undef CISTERN_KERNELS_STAGED_ROWS_INL_H_
#else
#define CISTERN_KERNELS_STAGED_ROWS_INL_H_
#endif

#include "cistern/kernels/bfloat16-inl.h"
#include "cistern/kernels/slot_chunk-inl.h"
#include "cistern/kernels/workspace.h"

HWY_BEFORE_NAMESPACE();
namespace cistern {
namespace HWY_NAMESPACE {

// Up to one vector of row x from column j, with zeros behind its end.
template <class T>
HWY_INLINE Vec<T> LoadPart(const T* x, size_t j, size_t width) {
  const Tag<T> d;
  if (j + kLanes<T> <= width) return hn::LoadU(d, x + j);
  HWY_ALIGN T part[kLanes<T>] = {};
  for (size_t i = j; i < width; ++i) part[i - j] = x[i];
  return hn::Load(d, part);
}
HWY_INLINE Vec<float> LoadPart(const BFloat16* x, size_t j, size_t width) {
  return LoadUpTo(x + j, std::min(kLanes<float>, width - j));
}

// Up to one vector to row x from column j on.
template <class T>
HWY_INLINE void StorePart(Vec<T> v, size_t j, size_t width, T* x) {
  const Tag<T> d;
  if (j + kLanes<T> <= width) return hn::StoreU(v, d, x + j);
  HWY_ALIGN T part[kLanes<T>];
  hn::Store(v, d, part);
  std::copy_n(part, width - j, x + j);
}
HWY_INLINE void StorePart(Vec<float> v, size_t j, size_t width, BFloat16* x) {
  StoreUpTo(v, x + j, std::min(kLanes<float>, width - j));
}

template <class From, class To>
HWY_NOINLINE void ConvertRows(const Sequence<From>& from, size_t count, size_t width,
                              const Sequence<To>& to) {
  for (size_t t = 0; t < count; ++t) ConvertRow(width, from.At(t), to.At(t));
}

// As those of slot_chunk-inl.h, for a panel of floats.
HWY_NOINLINE inline void PackRows(const Sequence<const BFloat16>& x, size_t t, size_t count,
                                  size_t width, size_t padded, float fill, float* panel) {
  for (size_t i = 0; i < count; ++i, panel += padded) {
    ConvertRow(width, x.At(t + i), panel);
    std::fill(panel + width, panel + padded, fill);
  }
}
HWY_NOINLINE inline void UnpackRows(const float* panel, size_t t, size_t count, size_t width,
                                    size_t padded, const Sequence<BFloat16>& x) {
  for (size_t i = 0; i < count; ++i, panel += padded) ConvertRow(width, panel, x.At(t + i));
}
inline const float* PanelOf(const Sequence<const BFloat16>& x, size_t t, size_t count, size_t width,
                            float* panel) {
  PackRows(x, t, count, width, Padded<float>(width), 0.0f, panel);
  return panel;
}

// Where a product puts rows t.. of x, stored as S: there where whole vectors and tiles of T fit,
// else into `scratch`, from which Finish takes them.
template <class S, class T = ComputeType<S>>
struct RowsOut {
  RowsOut(const Sequence<S>& x, size_t t, size_t rows, size_t width, T* scratch)
      : data(scratch), ld(Padded<T>(width)), x_(x), t_(t), rows_(rows), width_(width) {
    if constexpr (std::is_same_v<S, T>) {
      direct_ = width % kLanes<T> == 0 && rows % kTileRows == 0;
      if (direct_) data = x.At(t), ld = static_cast<size_t>(x.time);
    }
  }
  void Finish() const {
    if (!direct_) UnpackRows(data, t_, rows_, width_, ld, x_);
  }
  T* data;
  size_t ld;

 private:
  const Sequence<S>& x_;
  size_t t_, rows_, width_;
  bool direct_ = false;
};

// Rows of one head, or of one part of a sequence; the next one in the same workspace forgets them.
class Staging {
 public:
  Staging(size_t values, size_t pieces, Workspace& workspace = Workspace::StagingOfThisThread())
      : workspace_(workspace) {
    workspace_.Start(values * sizeof(float), pieces);
  }
  Sequence<float> Take(size_t count, size_t width) {
    return {workspace_.Take<float>(count * width), width};
  }
  Sequence<const float> Copy(const Sequence<const BFloat16>& x, size_t count, size_t width) {
    const Sequence<float> copy = Take(count, width);
    ConvertRows(x, count, width, copy);
    return {copy.data, width};
  }

 private:
  Workspace& workspace_;
};

// The first row of x in the type that is computed in: where it lies, or in `copy`.
template <class S, class T>
const T* FirstRow(const Sequence<const S>& x, size_t width, T* copy) {
  if constexpr (std::is_same_v<S, T>) {
    return x.At(0);
  } else {
    ConvertRow(width, x.At(0), copy);
    return copy;
  }
}
// Where it is put, before PutRow puts it there.
template <class S, class T>
T* RoomForRow(const Sequence<S>& x, T* copy) {
  if constexpr (std::is_same_v<S, T>) {
    return x.At(0);
  } else {
    return copy;
  }
}
template <class S, class T>
void PutRow(const T* row, size_t width, const Sequence<S>& x) {
  if constexpr (!std::is_same_v<S, T>) ConvertRow(width, row, x.At(0));
}

}  // namespace HWY_NAMESPACE
}  // namespace cistern
HWY_AFTER_NAMESPACE();

#endif  // include guard
