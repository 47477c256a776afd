// Spans and chunks of the slot memory: where they end, their references and their exponentials;
// included once per Highway target.
//
// A span is a run of up to kSpanRows rows with one reference zc for each slot; a chunk is up to
// kChunkRows rows of a span. Inside a span e^{s_i - z_t} (i <= t) is split into E_i = e^{s_i - zc}
// and F_t = e^{zc - z_t}. The reference comes from the past of every row that uses it: z before the
// span, or the log-weight of the span's first row where that would be too far off, or the first
// finite log-weight of a slot that is still empty. With carry = e^{z_before - zc} (1, tiny, or 0)
// and sums over the rows i <= t of the span
//   1 / F_t = carry + sum_i E_i,   M_t = F_t (carry M_before + sum_i E_i v_i).
// A span ends before a row that starts a document and before a row with s > zc + kReach: then all
// factors stay within float's range. The memory is a double where a span begins; in a span its
// sums are of type T.
#if defined(CISTERN_KERNELS_SLOT_CHUNK_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef CISTERN_KERNELS_SLOT_CHUNK_INL_H_
#undef CISTERN_KERNELS_SLOT_CHUNK_INL_H_
#else
#define CISTERN_KERNELS_SLOT_CHUNK_INL_H_
#endif

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#include "cistern/kernels/exponentials-inl.h"
#include "cistern/kernels/gemm-inl.h"
#include "cistern/kernels/rows.h"
#include "cistern/kernels/rows_ahead.h"
#include "cistern/kernels/slot_memory.h"
#include "cistern/kernels/workspace.h"

HWY_BEFORE_NAMESPACE();
namespace cistern {
namespace HWY_NAMESPACE {

constexpr size_t kChunkRows = 32;
constexpr size_t kSpanRows = 128;
constexpr double kReach =
    60;  // e^60 and sums of kSpanRows of them fit float, as do their reciprocals
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

template <class T>
Sequence<const T> Const(const Sequence<T>& y) {
  return {y.data, static_cast<size_t>(y.time)};
}

// Rows t.. of a sequence.
template <class S>
struct TokenRows {
  const S* At(size_t i) const { return x.At(t + i); }
  Sequence<const S> x;
  size_t t;
};

// What a walk asks of the log-weights of tokens [t, t + count), and of other rows that lie in
// memory; where they are formed when they are asked for, it is theirs to do (FavorTokens).
template <class S>
TokenRows<S> RowsAt(const Sequence<const S>& x, size_t t, size_t) {
  return {x, t};
}

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

// Notes rows [t, end) of x, for the products to come to ask for (rows_ahead.h).
template <class T>
void NoteRows(const Sequence<const T>& x, size_t t, size_t end, size_t width) {
  if (t >= end) return;
  RowsAhead::OfThisThread().Note(x.At(t), x.time * static_cast<ptrdiff_t>(sizeof(T)), end - t,
                                 width * sizeof(T));
}

// panel[0..count, 0..padded) = rows t.. of x, with `fill` in the padding columns.
template <class T>
HWY_NOINLINE void PackRows(const Sequence<const T>& x, size_t t, size_t count, size_t width,
                           size_t padded, T fill, T* panel) {
  const Tag<T> d;
  const size_t whole = width / kLanes<T> * kLanes<T>;
  for (size_t i = 0; i < count; ++i, panel += padded) {
    const T* from = x.At(t + i);
    for (size_t j = 0; j < whole; j += kLanes<T>) hn::Store(hn::LoadU(d, from + j), d, panel + j);
    for (size_t j = whole; j < padded; ++j) panel[j] = j < width ? from[j] : fill;
  }
}

// `fill` in the padding columns of a panel [count, padded], where a product leaves anything.
template <class T>
void FillPadding(size_t count, size_t width, size_t padded, T fill, T* panel) {
  for (size_t i = 0; width < padded && i < count; ++i)
    std::fill(panel + i * padded + width, panel + (i + 1) * padded, fill);
}

template <class T>
HWY_NOINLINE void UnpackRows(const T* panel, size_t t, size_t count, size_t width, size_t padded,
                             const Sequence<T>& x) {
  const Tag<T> d;
  const size_t whole = width / kLanes<T> * kLanes<T>;
  for (size_t i = 0; i < count; ++i, panel += padded) {
    T* to = x.At(t + i);
    for (size_t j = 0; j < whole; j += kLanes<T>) hn::StoreU(hn::Load(d, panel + j), d, to + j);
    for (size_t j = whole; j < width; ++j) to[j] = panel[j];
  }
}

// Rows of a product or a transposition that need no panel: whole vectors, whole tiles, and one row
// after another (rows a power of two apart would fall into few sets of the cache).
template <class T>
bool InPlace(const Sequence<T>& x, size_t count, size_t width) {
  return width == Padded<T>(width) && count == Padded<T>(count) &&
         x.time == static_cast<int64_t>(width);
}

// Rows t.. of x as a panel of leading dimension Padded(width): in place, or packed into `panel`.
template <class T>
const T* PanelOf(const Sequence<const T>& x, size_t t, size_t count, size_t width, T* panel) {
  if (InPlace(x, count, width)) return x.At(t);
  PackRows(x, t, count, width, Padded<T>(width), T{0}, panel);
  return panel;
}

template <class T>
void ZeroRows(size_t t, size_t end, size_t width, const Sequence<T>& x) {
  for (; t < end; ++t) std::fill_n(x.At(t), width, T(0.0f));
}

// The log-weights of one span, chunk by chunk, and all that follows from them. Slots are padded
// with log-weights of -inf: never written, zero factors.
template <class T>
class SlotChunk {
 public:
  static size_t Bytes(size_t slots) {
    return Padded<T>(slots) * ((3 * kChunkRows + 5) * sizeof(T) + 7 * sizeof(double));
  }
  static constexpr size_t kPieces = 15;

  SlotChunk(size_t slots, Workspace& workspace) : n(slots), np(Padded<T>(slots)) {
    for (double** piece : {&z, &reference, &total, &keep, &sub, &gain, &scratch_})
      *piece = workspace.Take<double>(np);
    packed_ = workspace.Take<T>(kChunkRows * np);
    E = workspace.Take<T>(kChunkRows * np);
    F = workspace.Take<T>(kChunkRows * np);
    for (T** piece : {&hi, &lo, &carry, &base, &sum_}) *piece = workspace.Take<T>(np);
  }

  void LoadZ(const double* from) {
    for (size_t l = 0; l < np; ++l) z[l] = l < n ? from[l] : kEmpty;
  }
  void Empty() {
    for (size_t l = 0; l < np; ++l) z[l] = kEmpty;
  }

  // Begins a span at the first of these rows and settles its references. z must be that before it.
  template <class S>
  HWY_NOINLINE void Begin(const TokenRows<S>& log_weights) {
    PackRows(log_weights.x, log_weights.t, 1, n, np, -std::numeric_limits<T>::infinity(), packed_);
    scaled = open_ = false;
    first_ = true;
    for (size_t l = 0; l < np; ++l) {
      const double first = packed_[l];
      reference[l] = z[l];
      carry[l] = 1;
      total[l] = 0;
      if (z[l] == kEmpty) {
        reference[l] = first;
        carry[l] = 0;
        open_ |= l < n && first == kEmpty;
      } else if (first > z[l] + kReach) {
        reference[l] = first;
        carry[l] = static_cast<T>(std::exp(z[l] - first));
        scaled = true;
      }
      // A reference of -inf in the padding would make its factors NaN.
      if (l >= n) reference[l] = 0;
      hi[l] = static_cast<T>(reference[l]);
      lo[l] =
          reference[l] == kEmpty ? T{0} : static_cast<T>(reference[l] - static_cast<double>(hi[l]));
      base[l] = l < n ? carry[l] : T{1};
    }
  }

  // The span's next chunk: rows t.., those of log_weights, at most up to `end`, with E and F, as
  // far as they are within reach. Its number of rows, 0 where row t is not.
  template <class S>
  HWY_NOINLINE size_t Take(const TokenRows<S>& log_weights, const Tokens& tokens, size_t t,
                           size_t end) {
    size_t most = 1;
    for (; most < kChunkRows && t + most < end && !tokens.StartsAt(t + most); ++most) {
    }
    s_ = packed_, s_row_ = np;
    bool in_place = false;
    if constexpr (std::is_same_v<S, T>) {
      in_place = n == np;
      if (in_place) s_ = log_weights.At(0), s_row_ = static_cast<size_t>(log_weights.x.time);
    }
    if (!in_place) {
      PackRows(log_weights.x, log_weights.t, most, n, np, -std::numeric_limits<T>::infinity(),
               packed_);
    }
    rows = most;
    // Where the last chunk was cut, look first: exponentials of rows that are cut away are wasted.
    if (open_ || cut_ || !Exponentials<false>()) {
      rows = RowsWithinReach(most);
      if (rows > 0) Exponentials<true>();
    }
    cut_ = rows < most;
    return rows;
  }

  // The chunk's sums join those of the span.
  void Pass() {
    const Tag<double> d;
    for (size_t l = 0; l < np; l += kLanes<double>) {
      const Double sum = hn::Add(hn::Load(d, total + l), LoadAsDouble(sum_ + l));
      hn::Store(sum, d, total + l);
      StoreDouble(hn::Add(LoadAsDouble(carry + l), sum), base + l);
    }
    for (size_t l = n; l < np; ++l) base[l] = 1;
    first_ = false;
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

  // Ends the span: z after it, in double; and the factors of M' = keep M + gain (U - sub M), where
  // U = sum_i E_i v_i. The delta form (keep = 1) does not drift when the span adds little to a
  // slot, the other one forgets exactly when it adds much. gain = 0: the slot was not written.
  HWY_NOINLINE void Close() {
    const Tag<double> d;
    for (size_t l = 0; l < np; l += kLanes<double>) {
      const Double all = hn::Add(LoadAsDouble(carry + l), hn::Load(d, total + l));
      hn::Store(LogOrNaN<double>(all), d, scratch_ + l);
    }
    for (size_t l = 0; l < n; ++l) {
      const bool written = total[l] != 0;  // also when it is NaN
      const double before = static_cast<double>(carry[l]), factor = 1 / (before + total[l]);
      const double left = before * factor;
      const bool delta = !written || left > 0.5;
      keep[l] = delta ? 1 : left;
      sub[l] = delta ? total[l] : 0;
      gain[l] = written ? factor : 0;
      if (written) z[l] = reference[l] + scratch_[l];
    }
    for (size_t l = n; l < np; ++l) keep[l] = 1, sub[l] = gain[l] = 0;
  }

  const size_t n, np;
  size_t rows = 0;                // of this chunk
  bool scaled = false;            // some carry is neither 0 nor 1
  double *z, *reference, *total;  // [np]; total: the span's sums of E before this chunk
  T *E, *F;                       // [rows, np]
  T *hi, *lo, *carry, *base;      // [np]; hi + lo = reference, base = carry + total
  double *keep, *sub, *gain;      // [np]

 private:
  // E, F and the last row's sum of E; whether all rows are within reach. kOpen: some slots have no
  // reference yet, and stay empty.
  template <bool kOpen>
  bool Exponentials() {
    const Tag<T> d;
    const Vec<T> reach = hn::Set(d, static_cast<T>(kReach)),
                 empty = hn::Set(d, -std::numeric_limits<T>::infinity());
    Vec<T> highest = empty;
    // Copies: what is stored through a vector might be a member.
    const size_t count = rows, step = np, s_step = s_row_;
    for (size_t l = 0; l < step; l += kLanes<T>) {
      const Vec<T> h = hn::Load(d, hi + l), low = hn::Load(d, lo + l),
                   before = hn::Load(d, base + l);
      const T* from = s_ + l;
      T *e_to = E + l, *f_to = F + l;
      Vec<T> sum = hn::Zero(d);
      size_t left = count;
      const auto take = [&]<int kRows>(std::integral_constant<int, kRows>) HWY_ATTR {
        for (; left >= size_t{kRows}; left -= kRows) {
          Vec<T> e[kRows], sums[kRows], f[kRows];
          ForVectors<kRows>([&](int i) HWY_ATTR {
            e[i] = hn::Sub(hn::Sub(hn::LoadU(d, from + size_t(i) * s_step), h), low);
            if constexpr (!kOpen) highest = hn::IfThenElse(hn::Gt(e[i], highest), e[i], highest);
          });
          WeightExps<kRows>(e);
          ForVectors<kRows>([&](int i) HWY_ATTR {
            if constexpr (kOpen) {
              const auto none = hn::Eq(hn::LoadU(d, from + size_t(i) * s_step), empty);
              e[i] = hn::IfThenZeroElse(none, e[i]);
            }
            sum = hn::Add(sum, e[i]);
            sums[i] = f[i] = hn::Add(before, sum);
            hn::Store(e[i], d, e_to + size_t(i) * step);
          });
          OneOvers<kRows, T>(f);
          ForVectors<kRows>([&](int i) HWY_ATTR {
            if constexpr (kOpen) f[i] = hn::IfThenZeroElse(hn::Eq(sums[i], hn::Zero(d)), f[i]);
            hn::Store(f[i], d, f_to + size_t(i) * step);
          });
          from += kRows * s_step, e_to += kRows * step, f_to += kRows * step;
        }
      };
      take(std::integral_constant<int, 2>());
      take(std::integral_constant<int, 1>());
      hn::Store(sum, d, sum_ + l);
    }
    return kOpen || hn::AllFalse(d, hn::Gt(highest, reach));
  }

  // How many of the first `most` rows are within reach. Gives open slots their references.
  size_t RowsWithinReach(size_t most) {
    for (size_t i = 0; i < most; ++i) {
      const T* row = s_ + i * s_row_;
      if ((i > 0 || !first_) && OutOfReach(row)) return i;
      if (open_) open_ = Open(row);
    }
    return most;
  }

  bool OutOfReach(const T* row) const {
    const Tag<T> d;
    const Vec<T> reach = hn::Set(d, static_cast<T>(kReach)),
                 empty = hn::Set(d, -std::numeric_limits<T>::infinity());
    for (size_t l = 0; l < np; l += kLanes<T>) {
      const Vec<T> h = hn::Load(d, hi + l);
      const Vec<T> x = hn::Sub(hn::Sub(hn::LoadU(d, row + l), h), hn::Load(d, lo + l));
      if (!hn::AllFalse(d, hn::AndNot(hn::Eq(h, empty), hn::Gt(x, reach)))) return true;
    }
    return false;
  }

  // Gives open slots this row's log-weight for a reference; whether some remain open.
  bool Open(const T* row) {
    bool open = false;
    for (size_t l = 0; l < n; ++l) {
      if (hi[l] == -std::numeric_limits<T>::infinity()) {
        reference[l] = hi[l] = row[l];
        open |= row[l] == -std::numeric_limits<T>::infinity();
      }
    }
    return open;
  }

  bool open_ = false;   // some slot has no reference yet
  bool first_ = false;  // the next chunk is the span's first, which always takes a row
  bool cut_ = false;    // the row after the last chunk was out of reach
  const T* s_ = nullptr;
  size_t s_row_ = 0;
  T *packed_, *sum_;
  double* scratch_;
};

}  // namespace HWY_NAMESPACE
}  // namespace cistern
HWY_AFTER_NAMESPACE();

#endif  // include guard
