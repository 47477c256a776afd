// The memory of one head over the chunks of its tokens: what reads and matches compute with it, and
// how it moves on; included once per Highway target.
#if defined(CISTERN_KERNELS_SLOT_CORE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef CISTERN_KERNELS_SLOT_CORE_INL_H_
#undef CISTERN_KERNELS_SLOT_CORE_INL_H_
#else
#define CISTERN_KERNELS_SLOT_CORE_INL_H_
#endif

#include "cistern/kernels/head_parts.h"
#include "cistern/kernels/span_memory-inl.h"
#include "cistern/kernels/staged_rows-inl.h"
#include "cistern/kernels/token_products-inl.h"

HWY_BEFORE_NAMESPACE();
namespace cistern {
namespace HWY_NAMESPACE {

// out = F panel, [rows, np].
template <class T>
HWY_INLINE void TimesF(const SlotChunk<T>& chunk, const T* panel, T* out) {
  const Tag<T> d;
  for (size_t i = 0; i < chunk.rows * chunk.np; i += kLanes<T>)
    hn::Store(hn::Mul(hn::Load(d, panel + i), hn::Load(d, chunk.F + i)), d, out + i);
}

// Reads: slots are the rows of the memory [np, dp].
template <class S>
class ReadCore {
  using T = ComputeType<S>;

 public:
  static size_t Bytes(size_t n, size_t width) {
    const size_t np = Padded<T>(n), dp = Padded<T>(width);
    return SpanMemory<T>::Bytes(np, dp) + ChunkPairsFor<S>::Bytes(n, width) +
           sizeof(T) * (kChunkRows * (2 * dp + kChunkPadded<T>)+np * kChunkPadded<T>);
  }
  static constexpr size_t kPieces = SpanMemory<T>::kPieces + ChunkPairsFor<S>::kPieces + 4;

  ReadCore(size_t slots, size_t columns, Workspace& workspace)
      : memory_(Padded<T>(slots), Padded<T>(columns), workspace),
        pairs_(slots, columns, workspace),
        n_(slots),
        width_(columns),
        np_(Padded<T>(slots)),
        dp_(Padded<T>(columns)) {
    V_ = workspace.Take<T>(kChunkRows * dp_);
    O_ = workspace.Take<T>(kChunkRows * dp_);
    A_ = workspace.Take<T>(kChunkRows * kChunkPadded<T>);
    ET_ = workspace.Take<T>(np_ * kChunkPadded<T>);
  }

  // The memory of a slot that holds nothing counts as zero, whatever the caller left there.
  void LoadMemory(const double* memory, const double* z) {
    memory_.Clear();
    PackRows(Sequence<const double>{memory, width_}, 0, n_, width_, dp_, 0.0, memory_.M);
    for (size_t l = 0; l < n_; ++l) {
      if (z[l] == kEmpty) std::memset(memory_.M + l * dp_, 0, dp_ * sizeof(double));
    }
    memory_.Load();
  }
  void StoreMemory(double* memory) const {
    UnpackRows(memory_.M, 0, n_, width_, dp_, Sequence<double>{memory, width_});
  }
  void Empty() { memory_.Clear(); }
  size_t width() const { return width_; }

  HWY_NOINLINE void Begin(const SlotChunk<T>& chunk) {
    if (!chunk.scaled) return;
    const Tag<T> d;
    for (size_t l = 0; l < n_; ++l) {
      const Vec<T> carry = hn::Set(d, chunk.carry[l]);
      for (size_t j = l * dp_; j < (l + 1) * dp_; j += kLanes<T>)
        hn::Store(hn::Mul(carry, hn::Load(d, memory_.past + j)), d, memory_.past + j);
    }
  }

  // out rows t.. = W S + tril(W E^T) V, with W = r F [rows, np]; then the chunk is written.
  void Rows(const SlotChunk<T>& chunk, const T* W, const Sequence<const S>& v, size_t t,
            const Sequence<S>& out) {
    constexpr size_t kCp = kChunkPadded<T>;
    const size_t rows = chunk.rows, paired = TakePairs(chunk, v, t);
    if (paired == rows && width_ % kLanes<T> == 0) {
      pairs_.Read(PanelRows<T>{W, np_}, PanelRows<T>{chunk.E, np_}, memory_, out.At(t),
                  static_cast<size_t>(out.time));
      return Add(chunk, nullptr, paired);
    }
    const RowsOut<S, T> O(out, t, rows, width_, O_);
    const T* V = nullptr;
    if (paired < rows) {
      V = PanelOf(v, t, rows, width_, V_);
      Transpose(rows, n_, chunk.E, np_, ET_, kCp);
      LowerProduct<T>(rows, {W, np_, 1, ET_, kCp, n_}, A_, kCp);
      Product<Triangle::kLower, T>(rows, width_, {W, np_, 1, memory_.Seen(), dp_, n_},
                                   {A_, kCp, 1, V, dp_, rows}, O.data, O.ld);
    }
    if (paired > 0)
      pairs_.Read(PanelRows<T>{W, np_}, PanelRows<T>{chunk.E, np_}, memory_, O.data, O.ld);
    O.Finish();
    Add(chunk, V, paired);
  }
  // Writes the chunk as Rows does, and reads nothing.
  void Write(const SlotChunk<T>& chunk, const Sequence<const S>& v, size_t t) {
    const size_t paired = TakePairs(chunk, v, t);
    Add(chunk, paired < chunk.rows ? PanelOf(v, t, chunk.rows, width_, V_) : nullptr, paired);
  }

  HWY_NOINLINE void Close(const SlotChunk<T>& chunk) {
    const Tag<double> d;
    const T* const U = memory_.added();
    for (size_t l = 0; l < n_; ++l) {
      const Double keep = hn::Set(d, chunk.keep[l]), sub = hn::Set(d, chunk.sub[l]),
                   gain = hn::Set(d, chunk.gain[l]);
      const bool written = chunk.gain[l] != 0;
      for (size_t j = l * dp_; j < (l + 1) * dp_; j += kLanes<double>) {
        Double m = hn::Load(d, memory_.M + j);
        if (written) {
          m = hn::MulAdd(gain, hn::NegMulAdd(sub, m, LoadAsDouble(U + j)), hn::Mul(keep, m));
          hn::Store(m, d, memory_.M + j);
        }
        StoreDouble(m, memory_.past + j);
      }
    }
    memory_.set_fresh();
  }

 private:
  // How many rows of the chunk are left to pairs.
  size_t TakePairs(const SlotChunk<T>& chunk, const Sequence<const S>& v, size_t t) {
    return pairs_.Take(chunk.rows, PanelRows<T>{chunk.E, np_}, TokenRows<S>{v, t});
  }
  // U += E^T V
  void Add(const SlotChunk<T>& chunk, const T* V, size_t paired) {
    if (paired == chunk.rows) return pairs_.Write(memory_);
    memory_.Write(n_, width_, {chunk.E, 1, np_, V, dp_, chunk.rows});
  }

  SpanMemory<T> memory_;
  ChunkPairsFor<S> pairs_;
  const size_t n_, width_, np_, dp_;
  T *V_, *O_, *A_, *ET_;
};

// Matches: slots are the columns of the memory [dp, np], the transposed one.
template <class S>
class MatchCore {
  using T = ComputeType<S>;

 public:
  static size_t Bytes(size_t n, size_t width) {
    const size_t np = Padded<T>(n), dp = Padded<T>(width);
    return SpanMemory<T>::Bytes(dp, np) + ChunkPairsFor<S>::Bytes(width, n) +
           sizeof(T) * (kChunkRows * (2 * dp + kChunkPadded<T>)+dp * kChunkPadded<T>);
  }
  static constexpr size_t kPieces = SpanMemory<T>::kPieces + ChunkPairsFor<S>::kPieces + 4;

  MatchCore(size_t slots, size_t columns, Workspace& workspace)
      : memory_(Padded<T>(columns), Padded<T>(slots), workspace),
        pairs_(columns, slots, workspace),
        n_(slots),
        width_(columns),
        np_(Padded<T>(slots)),
        dp_(Padded<T>(columns)) {
    Q_ = workspace.Take<T>(kChunkRows * dp_);
    K_ = workspace.Take<T>(kChunkRows * dp_);
    A_ = workspace.Take<T>(kChunkRows * kChunkPadded<T>);
    KT_ = workspace.Take<T>(dp_ * kChunkPadded<T>);
  }

  void LoadMemory(const double* memory, const double* z) {
    memory_.Clear();
    for (size_t l = 0; l < n_; ++l) {
      if (z[l] == kEmpty) continue;
      for (size_t j = 0; j < width_; ++j) memory_.M[j * np_ + l] = memory[l * width_ + j];
    }
    memory_.Load();
  }
  void StoreMemory(double* memory) const {
    for (size_t l = 0; l < n_; ++l) {
      for (size_t j = 0; j < width_; ++j) memory[l * width_ + j] = memory_.M[j * np_ + l];
    }
  }
  void Empty() { memory_.Clear(); }
  size_t width() const { return width_; }

  HWY_NOINLINE void Begin(const SlotChunk<T>& chunk) {
    if (!chunk.scaled) return;
    const Tag<T> d;
    for (size_t l = 0; l < np_; l += kLanes<T>) {
      const Vec<T> carry = hn::Load(d, chunk.carry + l);
      for (size_t j = l; j < width_ * np_; j += np_)
        hn::Store(hn::Mul(carry, hn::Load(d, memory_.past + j)), d, memory_.past + j);
    }
  }

  // X = scale F (Q S + tril(Q K^T) E) [rows, np]; then the chunk is written. `to`, of leading
  // dimension ldt: where that goes if not to X, which is scratch then.
  void Rows(const SlotChunk<T>& chunk, const Sequence<const S>& q, const Sequence<const S>& k,
            size_t t, T* X, T scale = 1) {
    Rows(chunk, q, k, t, X, X, np_, scale);
  }
  void Rows(const SlotChunk<T>& chunk, const Sequence<const S>& q, const Sequence<const S>& k,
            size_t t, T* X, T* to, size_t ldt, T scale = 1) {
    constexpr size_t kCp = kChunkPadded<T>;
    const size_t rows = chunk.rows, paired = TakePairs(chunk, k, t);
    const T* K = nullptr;
    if (paired < rows) {
      const T* const Q = PanelOf(q, t, rows, width_, Q_);
      K = PanelOf(k, t, rows, width_, K_);
      Transpose(rows, width_, K, dp_, KT_, kCp);
      LowerProduct<T>(rows, {Q, dp_, 1, KT_, kCp, width_}, A_, kCp);
      Product<Triangle::kLower, T>(rows, n_, {Q, dp_, 1, memory_.Seen(), np_, width_},
                                   {A_, kCp, 1, chunk.E, np_, rows}, X, np_);
    }
    if (paired > 0) pairs_.Read(TokenRows<S>{q, t}, TokenRows<S>{k, t}, memory_, X, np_);
    Add(chunk, K, paired);
    const Tag<T> d;
    const Vec<T> s = hn::Set(d, scale);
    const T* F = chunk.F;
    for (size_t i = 0, np = np_; i < rows; ++i, X += np, F += np, to += ldt) {
      for (size_t l = 0; l < np; l += kLanes<T>)
        hn::StoreU(hn::Mul(s, hn::Mul(hn::Load(d, X + l), hn::Load(d, F + l))), d, to + l);
    }
  }
  // Writes the chunk as Rows does, and matches nothing.
  void Write(const SlotChunk<T>& chunk, const Sequence<const S>& k, size_t t) {
    const size_t paired = TakePairs(chunk, k, t);
    Add(chunk, paired < chunk.rows ? PanelOf(k, t, chunk.rows, width_, K_) : nullptr, paired);
  }

  HWY_NOINLINE void Close(const SlotChunk<T>& chunk) {
    const Tag<double> d;
    const T* const U = memory_.added();
    for (size_t l = 0; l < np_; l += kLanes<double>) {
      const Double keep = hn::Load(d, chunk.keep + l), sub = hn::Load(d, chunk.sub + l),
                   gain = hn::Load(d, chunk.gain + l);
      const auto skip = hn::Eq(gain, hn::Zero(d));
      for (size_t j = l; j < width_ * np_; j += np_) {
        const Double m = hn::Load(d, memory_.M + j);
        const Double next = hn::IfThenElse(
            skip, m,
            hn::MulAdd(gain, hn::NegMulAdd(sub, m, LoadAsDouble(U + j)), hn::Mul(keep, m)));
        hn::Store(next, d, memory_.M + j);
        StoreDouble(next, memory_.past + j);
      }
    }
    memory_.set_fresh();
  }

 private:
  size_t TakePairs(const SlotChunk<T>& chunk, const Sequence<const S>& k, size_t t) {
    return pairs_.Take(chunk.rows, TokenRows<S>{k, t}, PanelRows<T>{chunk.E, np_});
  }
  // U += K^T E
  void Add(const SlotChunk<T>& chunk, const T* K, size_t paired) {
    if (paired == chunk.rows) return pairs_.Write(memory_);
    memory_.Write(width_, n_, {K, 1, dp_, chunk.E, np_, chunk.rows});
  }

  SpanMemory<T> memory_;
  ChunkPairsFor<S> pairs_;
  const size_t n_, width_, np_, dp_;
  T *Q_, *K_, *A_, *KT_;
};

// One head of a forward pass, or one of its parts (head_parts.h): the walk goes over the tokens up
// to `stop`, for the state alone where they lie before `from`.
template <class T>
struct ForwardHead {
  ForwardHead(const SlotShape& shape, const RowMask& mask, int64_t index,
              const HeadParts& parts = {}, int64_t part = 0)
      : b(index / shape.heads),
        h(index % shape.heads),
        n(static_cast<size_t>(shape.slots)),
        width(static_cast<size_t>(shape.width)),
        total(static_cast<size_t>(shape.length)),
        tokens(shape, mask, b),
        from(parts.Begin(part, tokens.length)),
        stop(parts.Begin(part + 1, tokens.length)),
        last(part + 1 == parts.count) {}

  // Behind the last chunk: padding, of the last part, and the state.
  template <class S>
  void Finish(const SlotChunk<T>& chunk, double* z, const Sequence<S>& out, size_t out_width,
              const Sequence<T>& z_out) const {
    std::memcpy(z, chunk.z, n * sizeof(double));
    if (!last) return;
    ZeroRows(tokens.length, total, out_width, out);
    if (z_out.data != nullptr) ZeroRows(tokens.length, total, n, z_out);
  }

  int64_t b, h;
  size_t n, width, total;
  Tokens tokens;
  size_t from, stop;
  bool last;
};

// Walks over the spans and chunks of a head's tokens that begin before `stop`; which they are does
// not depend on it. s: log-weights, for RowsAt and NoteRows. visit: Empty(), Begin(t), Rows(t),
// Close(), and Note(t, end), the rows that come after the ones at hand.
template <class T, class LogWeights, class Visit>
HWY_INLINE void WalkChunks(SlotChunk<T>& chunk, const LogWeights& s, const Tokens& tokens,
                           size_t stop, Visit& visit) {
  const auto rows_at = [&](size_t t) HWY_ATTR {
    return RowsAt(s, t, std::min(kChunkRows, tokens.length - t));
  };
  bool open = false;
  size_t begun = 0;
  const auto close = [&]() HWY_ATTR {
    if (!open) return;
    chunk.Close();
    visit.Close();
    open = false;
  };
  for (size_t t = 0; t < stop; t += chunk.rows) {
    if (tokens.StartsAt(t)) {
      chunk.Empty();
      visit.Empty();
      open = false;
    } else if (open &&
               (t - begun >= kSpanRows || chunk.Take(rows_at(t), tokens, t, tokens.length) == 0)) {
      close();
    }
    if (!open) {
      chunk.Begin(rows_at(t));
      visit.Begin(t);
      begun = t;
      open = true;
      chunk.Take(rows_at(t), tokens, t, tokens.length);
    }
    const size_t next = t + chunk.rows,
                 end = tokens.length - next < kChunkRows ? tokens.length : next + kChunkRows;
    RowsAhead::OfThisThread().Clear();
    NoteRows(s, next, end, chunk.n);
    visit.Note(next, end);
    visit.Rows(t);
    chunk.Pass();
  }
  close();
}

}  // namespace HWY_NAMESPACE
}  // namespace cistern
HWY_AFTER_NAMESPACE();

#endif  // include guard
