// Chunks of the slot memory: where they end, their references and their exponentials; included once
// per Highway target.
//
// Inside a chunk e^{s_i - z_t} (i <= t) is split into E_i = e^{s_i - zc} and F_t = e^{zc - z_t}.
// The reference zc of a slot comes from the past of every row that uses it: z before the chunk, or
// the log-weight of the chunk's first row where that would be too far off, or the first finite
// log-weight of a slot that is still empty. With carry = e^{z_before - zc} (1, tiny, or 0) and sums
// over rows i <= t
//   1 / F_t = carry + sum_i E_i,   M_t = F_t (carry M_before + sum_i E_i v_i).
// A chunk ends before a row that starts a document and before a row with s > zc + kReach: then all
// factors stay within float's range.
#if defined(CISTERN_KERNELS_SLOT_CHUNK_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef CISTERN_KERNELS_SLOT_CHUNK_INL_H_
#undef CISTERN_KERNELS_SLOT_CHUNK_INL_H_
#else
#define CISTERN_KERNELS_SLOT_CHUNK_INL_H_
#endif

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#include "cistern/kernels/gemm-inl.h"
#include "cistern/kernels/rows.h"
#include "cistern/kernels/slot_memory.h"
#include "cistern/kernels/workspace.h"
#include "hwy/contrib/math/math-inl.h"

HWY_BEFORE_NAMESPACE();
namespace cistern {
namespace HWY_NAMESPACE {

constexpr size_t kChunkRows = 32;
constexpr double kReach =
    60;  // e^60 and sums of kChunkRows of them fit float, as do their reciprocals
constexpr double kEmpty = -std::numeric_limits<double>::infinity();

// Leading dimension of [rows, kChunkRows] panels.
template <class T>
constexpr size_t kChunkPadded = RoundUp(kChunkRows, kLanes<T> > kTileRows ? kLanes<T> : kTileRows);

using Double = Vec<double>;

// Vectors of doubles from and to aligned memory of either precision, and unaligned.
template <class T>
HWY_INLINE Double LoadAsDouble(const T* from) {
  const Tag<double> d;
  if constexpr (std::is_same_v<T, double>) {
    return hn::Load(d, from);
  } else {
    return hn::PromoteTo(d, hn::Load(hn::Rebind<T, Tag<double>>(), from));
  }
}
template <class T>
HWY_INLINE Double LoadAsDoubleU(const T* from) {
  const Tag<double> d;
  if constexpr (std::is_same_v<T, double>) {
    return hn::LoadU(d, from);
  } else {
    return hn::PromoteTo(d, hn::LoadU(hn::Rebind<T, Tag<double>>(), from));
  }
}
template <class T>
HWY_INLINE void StoreDouble(Double x, T* to) {
  if constexpr (std::is_same_v<T, double>) {
    hn::Store(x, Tag<double>(), to);
  } else {
    const hn::Rebind<T, Tag<double>> d;
    hn::Store(hn::DemoteTo(d, x), d, to);
  }
}
template <class T>
HWY_INLINE void StoreDoubleU(Double x, T* to) {
  if constexpr (std::is_same_v<T, double>) {
    hn::StoreU(x, Tag<double>(), to);
  } else {
    const hn::Rebind<T, Tag<double>> d;
    hn::StoreU(hn::DemoteTo(d, x), d, to);
  }
}

// Highway's turn NaN into ordinary numbers.
template <class T>
HWY_INLINE Vec<T> ExpOrNaN(Vec<T> x) {
  return hn::IfThenElse(hn::IsNaN(x), x, hn::Exp(Tag<T>(), x));
}
template <class T>
HWY_INLINE Vec<T> LogOrNaN(Vec<T> x) {
  return hn::IfThenElse(hn::IsNaN(x), x, hn::Log(Tag<T>(), x));
}

// The tokens of one head.
template <class T>
struct Sequence {
  Sequence(T* first, size_t stride) : data(first), time(static_cast<int64_t>(stride)) {}
  Sequence(const Rows<T>& rows, int64_t b, int64_t h)
      : data(rows.data == nullptr ? nullptr : rows.At(b, h, 0)), time(rows.time) {}
  T* At(size_t t) const { return data + static_cast<int64_t>(t) * time; }
  T* data;
  int64_t time;
};

struct Tokens {
  Tokens(const SlotShape& shape, const RowMask& mask, int64_t b)
      : length(static_cast<size_t>(mask.lengths == nullptr ? shape.length : mask.lengths[b])),
        starts(mask.starts == nullptr ? nullptr : mask.starts + b * shape.length) {}
  bool StartsAt(size_t t) const { return starts != nullptr && starts[t] != 0; }
  size_t length;  // without padding
  const uint8_t* starts;
};

// Small jobs are not worth waking other threads for.
inline int64_t HeadsPerThread(const SlotShape& shape) {
  const int64_t work = shape.length * shape.slots * shape.width;
  return work > 32768 ? 1 : 32768 / (work + 1) + 1;
}

// panel[0..count, 0..padded) = rows t.. of x, with `fill` in the padding columns.
template <class T>
void PackRows(const Sequence<const T>& x, size_t t, size_t count, size_t width, size_t padded,
              T fill, T* panel) {
  for (size_t i = 0; i < count; ++i, panel += padded) {
    std::memcpy(panel, x.At(t + i), width * sizeof(T));
    for (size_t j = width; j < padded; ++j) panel[j] = fill;
  }
}

template <class T>
void UnpackRows(const T* panel, size_t t, size_t count, size_t width, size_t padded,
                const Sequence<T>& x) {
  for (size_t i = 0; i < count; ++i)
    std::memcpy(x.At(t + i), panel + i * padded, width * sizeof(T));
}

template <class T>
void ZeroRows(size_t t, size_t end, size_t width, const Sequence<T>& x) {
  for (; t < end; ++t) std::memset(x.At(t), 0, width * sizeof(T));
}

// The log-weights of one chunk and all that follows from them. Slots are padded with log-weights of
// -inf: never written, zero factors.
template <class T>
class SlotChunk {
 public:
  static size_t Bytes(size_t slots) {
    return Padded<T>(slots) * ((3 * kChunkRows + 7) * sizeof(T) + 2 * sizeof(double));
  }
  static constexpr size_t kPieces = 12;

  SlotChunk(size_t slots, Workspace& workspace) : n(slots), np(Padded<T>(slots)) {
    z = workspace.Take<double>(np);
    reference = workspace.Take<double>(np);
    s = workspace.Take<T>(kChunkRows * np);
    E = workspace.Take<T>(kChunkRows * np);
    F = workspace.Take<T>(kChunkRows * np);
    for (T** piece : {&hi, &lo, &carry, &sum, &keep, &sub, &gain}) *piece = workspace.Take<T>(np);
  }

  void LoadZ(const double* from) {
    for (size_t l = 0; l < np; ++l) z[l] = l < n ? from[l] : kEmpty;
  }
  void Empty() {
    for (size_t l = 0; l < np; ++l) z[l] = kEmpty;
  }

  // Takes rows t.. into the chunk, at most up to `end`, and settles the references. z must be that
  // before row t.
  HWY_NOINLINE void Gather(const Sequence<const T>& log_weights, const Tokens& tokens, size_t t,
                           size_t end) {
    PackRows(log_weights, t, 1, n, np, -std::numeric_limits<T>::infinity(), s);
    scaled = false;
    bool open = false;  // some slot has no reference yet
    for (size_t l = 0; l < np; ++l) {
      const double first = s[l];
      reference[l] = z[l];
      carry[l] = 1;
      if (z[l] == kEmpty) {
        reference[l] = first;
        carry[l] = 0;
        open |= first == kEmpty;
      } else if (first > z[l] + kReach) {
        reference[l] = first;
        carry[l] = static_cast<T>(std::exp(z[l] - first));
        scaled = true;
      }
      hi[l] = static_cast<T>(reference[l]);
      lo[l] =
          reference[l] == kEmpty ? T{0} : static_cast<T>(reference[l] - static_cast<double>(hi[l]));
    }
    for (rows = 1; rows < kChunkRows && t + rows < end && !tokens.StartsAt(t + rows); ++rows) {
      T* row = s + rows * np;
      PackRows(log_weights, t + rows, 1, n, np, -std::numeric_limits<T>::infinity(), row);
      if (OutOfReach(row)) break;
      if (open) open = Open(row);
    }
    for (size_t l = 0; l < np; ++l) {
      if (reference[l] == kEmpty) reference[l] = static_cast<double>(hi[l]);
    }
  }

  // E, F, and sum = the last row's sum of E.
  HWY_NOINLINE void Exponentials() {
    const Tag<T> d;
    const Vec<T> empty = hn::Set(d, -std::numeric_limits<T>::infinity());
    for (size_t l = 0; l < np; l += kLanes<T>) {
      const Vec<T> h = hn::Load(d, hi + l), low = hn::Load(d, lo + l), c = hn::Load(d, carry + l);
      Vec<T> total = hn::Zero(d);
      for (size_t i = 0; i < rows; ++i) {
        const Vec<T> weight = hn::Load(d, s + i * np + l);
        const Vec<T> x = hn::Sub(hn::Sub(weight, h), low);
        const Vec<T> e = hn::IfThenZeroElse(hn::Eq(weight, empty), ExpOrNaN<T>(x));
        total = hn::Add(total, e);
        const Vec<T> a = hn::Add(c, total);
        hn::Store(e, d, E + i * np + l);
        hn::Store(hn::IfThenZeroElse(hn::Eq(a, hn::Zero(d)), hn::Div(hn::Set(d, T{1}), a)), d,
                  F + i * np + l);
      }
      hn::Store(total, d, sum + l);
    }
  }

  // z of row i of the chunk, to `row` [np].
  void ZRow(size_t i, T* row) const {
    const Tag<T> d;
    for (size_t l = 0; l < np; l += kLanes<T>) {
      const Vec<T> f = hn::Load(d, F + i * np + l);
      const Vec<T> value =
          hn::Add(hn::Load(d, hi + l), hn::Sub(hn::Load(d, lo + l), LogOrNaN<T>(f)));
      hn::Store(hn::IfThenElse(hn::Eq(f, hn::Zero(d)),
                               hn::Set(d, -std::numeric_limits<T>::infinity()), value),
                d, row + l);
    }
  }

  // z after the chunk, in double; and the factors of M' = keep M + gain (E^T V - sub M). The delta
  // form (keep = 1) does not drift when the chunk adds little to a slot, the other one forgets
  // exactly when it adds much.
  HWY_NOINLINE void Advance() {
    const Tag<double> d;
    const T* last = F + (rows - 1) * np;
    HWY_ALIGN double added[64];
    for (size_t begin = 0; begin < np; begin += 64) {
      const size_t count = np - begin < 64 ? np - begin : 64;
      for (size_t l = 0; l < count; ++l)
        added[l] = static_cast<double>(carry[begin + l]) + static_cast<double>(sum[begin + l]);
      for (size_t l = 0; l < count; l += kLanes<double>)
        hn::Store(LogOrNaN<double>(hn::Load(d, added + l)), d, added + l);
      for (size_t i = 0; i < count; ++i) {
        const size_t l = begin + i;
        const bool written = sum[l] != 0;  // also when it is NaN
        const T left = carry[l] * last[l];
        const bool delta = !written || left > T{0.5};
        keep[l] = delta ? T{1} : left;
        sub[l] = delta ? sum[l] : T{0};
        gain[l] = written ? last[l] : T{0};
        if (written) z[l] = reference[l] + added[i];
      }
    }
  }

  const size_t n, np;
  size_t rows = 0;      // of this chunk
  bool scaled = false;  // some carry is neither 0 nor 1
  double *z, *reference;
  T *s, *E, *F;                                  // [rows, np]
  T *hi, *lo, *carry, *sum, *keep, *sub, *gain;  // [np]; hi + lo = reference

 private:
  bool OutOfReach(const T* row) const {
    const Tag<T> d;
    const Vec<T> reach = hn::Set(d, static_cast<T>(kReach)),
                 empty = hn::Set(d, -std::numeric_limits<T>::infinity());
    for (size_t l = 0; l < np; l += kLanes<T>) {
      const Vec<T> h = hn::Load(d, hi + l);
      const Vec<T> x = hn::Sub(hn::Sub(hn::Load(d, row + l), h), hn::Load(d, lo + l));
      if (!hn::AllFalse(d, hn::AndNot(hn::Eq(h, empty), hn::Gt(x, reach)))) return true;
    }
    return false;
  }

  // Gives open slots this row's log-weight for a reference; whether some remain open.
  bool Open(const T* row) {
    bool open = false;
    for (size_t l = 0; l < n; ++l) {
      if (hi[l] == -std::numeric_limits<T>::infinity()) {
        hi[l] = row[l];
        open |= row[l] == -std::numeric_limits<T>::infinity();
      }
    }
    return open;
  }
};

}  // namespace HWY_NAMESPACE
}  // namespace cistern
HWY_AFTER_NAMESPACE();

#endif  // include guard
