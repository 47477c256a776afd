// The memories of the summing walks and the gradients of theirs; included once per Highway target.
#if defined(CISTERN_KERNELS_SUM_CORE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef CISTERN_KERNELS_SUM_CORE_INL_H_
#undef CISTERN_KERNELS_SUM_CORE_INL_H_
#else
#define CISTERN_KERNELS_SUM_CORE_INL_H_
#endif

#include "cistern/kernels/sum_chunk-inl.h"

HWY_BEFORE_NAMESPACE();
namespace cistern {
namespace HWY_NAMESPACE {

// One head's memory S [height, across] going forward, S_t = S_{t-1} + b_t (x) x_t and out_t = a_t
// S_t:
//   read:  S = M [n, width],    b = E, x = v, gates scale the rows of S; a is times F
//   match: S = M^T [width, n],  b = k, x = E, gates scale the columns of S; out is to be times F
template <bool kMatch, Gating kGating, class T>
class SumCore {
  static constexpr bool kGated = kGating != Gating::kNone;

 public:
  static size_t Bytes(size_t slots, size_t width) {
    const size_t np = Padded<T>(slots), dp = Padded<T>(width), hp = kMatch ? dp : np,
                 ap = kMatch ? np : dp;
    return sizeof(T) * (kChunkRows * kChunkPadded<T> + hp * kChunkPadded<T> + 2 * hp * ap) +
           sizeof(double) * hp * ap;
  }
  static constexpr size_t kPieces = 5;

  SumCore(size_t slots, size_t width, Workspace& workspace)
      : n_(slots),
        width_(width),
        height_(kMatch ? width : slots),
        across_(kMatch ? slots : width),
        hp_(Padded<T>(height_)),
        ap_(Padded<T>(across_)) {
    A_ = workspace.Take<T>(kChunkRows * kChunkPadded<T>);
    BT_ = workspace.Take<T>(hp_ * kChunkPadded<T>);
    P_ = workspace.Take<T>(hp_ * ap_);
    past_ = workspace.Take<T>(hp_ * ap_);
    S_ = workspace.Take<double>(hp_ * ap_);
  }

  // Leading dimensions of panels of a and b, and of x and out.
  size_t hp() const { return hp_; }
  size_t ap() const { return ap_; }

  void Clear() {
    std::memset(S_, 0, hp_ * ap_ * sizeof(double));
    std::memset(past_, 0, hp_ * ap_ * sizeof(T));
  }
  // memory [n, width].
  void Load(const double* memory) {
    Clear();
    for (size_t l = 0; l < n_; ++l) {
      for (size_t j = 0; j < width_; ++j) S_[Index(l, j)] = memory[l * width_ + j];
    }
    for (size_t i = 0; i < height_ * ap_; i += kLanes<double>)
      StoreDouble(hn::Load(Tag<double>(), S_ + i), past_ + i);
  }
  void Store(double* memory) const {
    for (size_t l = 0; l < n_; ++l) {
      for (size_t j = 0; j < width_; ++j) memory[l * width_ + j] = S_[Index(l, j)];
    }
  }

  // The chunk's rows of out: tril(a b^T) x + a S before them.
  HWY_NOINLINE void Read(const SumChunk<kGating, T>& chunk, const T* a, const T* b, const T* x,
                         T* out) {
    const Tag<double> d;
    const size_t rows = chunk.rows;
    constexpr size_t kCp = kChunkPadded<T>;
    if constexpr (kGated) {
      for (size_t i = 0; i < height_; ++i) {
        for (size_t j = 0; j < ap_; j += kLanes<double>) {
          StoreDouble(Keep(Factor(chunk.first, i, j), hn::Load(d, S_ + i * ap_ + j)),
                      past_ + i * ap_ + j);
        }
      }
    }
    Transpose(rows, height_, b, hp_, BT_, kCp);
    LowerProduct<T>(rows, {a, hp_, 1, BT_, kCp, height_}, A_, kCp);
    Product<Triangle::kLower, T>(rows, across_, {a, hp_, 1, past_, ap_, height_},
                                 {A_, kCp, 1, x, ap_, rows}, out, ap_);
  }

  // S becomes that after the chunk.
  HWY_NOINLINE void Write(const SumChunk<kGating, T>& chunk, const T* b, const T* x) {
    const Tag<double> d;
    Product<T>(height_, across_, {b, 1, hp_, x, ap_, chunk.rows}, P_, ap_);
    for (size_t i = 0; i < height_; ++i) {
      for (size_t j = 0; j < ap_; j += kLanes<double>) {
        const size_t at = i * ap_ + j;
        Double sum = hn::Load(d, S_ + at);
        if constexpr (kGated) {
          sum = hn::Mul(Factor(chunk.last, i, j),
                        hn::Add(Keep(Factor(chunk.first, i, j), sum), LoadAsDouble(P_ + at)));
        } else {
          sum = hn::Add(sum, LoadAsDouble(P_ + at));
          StoreDouble(sum, past_ + at);
        }
        hn::Store(sum, d, S_ + at);
      }
    }
  }

 private:
  size_t Index(size_t slot, size_t channel) const {
    return kMatch ? channel * ap_ + slot : slot * ap_ + channel;
  }
  // Of the slots that elements (i, j..) of S belong to.
  static HWY_INLINE Double Factor(const double* of_slots, size_t i, size_t j) {
    const Tag<double> d;
    return kMatch ? hn::Load(d, of_slots + j) : hn::Set(d, of_slots[i]);
  }

  const size_t n_, width_, height_, across_, hp_, ap_;
  T *A_, *BT_, *P_;  // tril(a b^T), b^T, b^T x
  T* past_;          // what the chunk's rows see of S
  double* S_;
};

// The gradients G of one head's memory [n, width], going back. With W = a F and Gs = last G, those
// at the chunk's reference:
//   du_i = sum_{t>=i} (W_t . E_i) g_t + E_i Gs
//   Y_i  = F_i dw_i = sum_{t>=i} (g_t . u_i) W_t + Gs u_i
//   G    = first (W^T g + Gs)
template <Gating kGating, class T>
class SumReverseCore {
  static constexpr bool kGated = kGating != Gating::kNone;

 public:
  static size_t Bytes(size_t slots, size_t width) {
    const size_t np = Padded<T>(slots), dp = Padded<T>(width);
    return sizeof(T) * (2 * kChunkRows * kChunkPadded<T> + dp * kChunkPadded<T> + 3 * np * dp) +
           sizeof(double) * np * dp;
  }
  static constexpr size_t kPieces = 7;

  SumReverseCore(size_t slots, size_t width, Workspace& workspace)
      : n_(slots), width_(width), np_(Padded<T>(slots)), dp_(Padded<T>(width)) {
    A_ = workspace.Take<T>(kChunkRows * kChunkPadded<T>);
    B_ = workspace.Take<T>(kChunkRows * kChunkPadded<T>);
    UT_ = workspace.Take<T>(dp_ * kChunkPadded<T>);
    for (T** piece : {&Gs_, &GT_, &P_}) *piece = workspace.Take<T>(np_ * dp_);
    G_ = workspace.Take<double>(np_ * dp_);
  }

  void Clear() { std::memset(G_, 0, np_ * dp_ * sizeof(double)); }
  void Load(const double* grad) {
    Clear();
    std::memset(Gs_, 0, np_ * dp_ * sizeof(T));
    for (size_t l = 0; l < n_; ++l)
      std::memcpy(G_ + l * dp_, grad + l * width_, width_ * sizeof(double));
  }
  void Store(double* grad) const {
    for (size_t l = 0; l < n_; ++l)
      std::memcpy(grad + l * width_, G_ + l * dp_, width_ * sizeof(double));
  }

  // Y [rows, np], added to where kAdd. W [rows, np], g and u [rows, dp]. Du may follow.
  template <bool kAdd>
  HWY_NOINLINE void Weights(const SumChunk<kGating, T>& chunk, const T* W, const T* g, const T* u,
                            T* Y) {
    const Tag<double> d;
    const size_t rows = chunk.rows;
    constexpr size_t kCp = kChunkPadded<T>;
    for (size_t l = 0; l < n_; ++l) {
      for (size_t j = l * dp_; j < (l + 1) * dp_; j += kLanes<double>) {
        Double grads = hn::Load(d, G_ + j);
        if constexpr (kGated) grads = hn::Mul(hn::Set(d, chunk.last[l]), grads);
        StoreDouble(grads, Gs_ + j);
      }
    }
    Transpose(np_, dp_, Gs_, dp_, GT_, np_);
    Transpose(rows, width_, u, dp_, UT_, kCp);
    LowerProduct<T>(rows, {g, dp_, 1, UT_, kCp, width_}, B_, kCp);
    Product<Triangle::kUpper, kAdd, T>(rows, n_, {u, dp_, 1, GT_, np_, width_},
                                       {B_, 1, kCp, W, np_, rows}, Y, np_);
  }
  // du [rows, dp]; ET [np, rows] = E^T.
  HWY_NOINLINE void Du(const SumChunk<kGating, T>& chunk, const T* ET, const T* W, const T* g,
                       T* du) {
    const size_t rows = chunk.rows;
    constexpr size_t kCp = kChunkPadded<T>;
    LowerProduct<T>(rows, {W, np_, 1, ET, kCp, n_}, A_, kCp);
    Product<Triangle::kUpper, T>(rows, width_, {chunk.E, np_, 1, Gs_, dp_, n_},
                                 {A_, 1, kCp, g, dp_, rows}, du, dp_);
  }
  // G becomes that before the chunk.
  HWY_NOINLINE void Add(const SumChunk<kGating, T>& chunk, const T* W, const T* g) {
    const Tag<double> d;
    Product<T>(n_, width_, {W, 1, np_, g, dp_, chunk.rows}, P_, dp_);
    for (size_t l = 0; l < n_; ++l) {
      for (size_t j = l * dp_; j < (l + 1) * dp_; j += kLanes<double>) {
        Double grads = hn::Load(d, G_ + j);
        if constexpr (kGated) {
          grads = hn::MulAdd(hn::Set(d, chunk.last[l]), grads, LoadAsDouble(P_ + j));
          grads = Keep(hn::Set(d, chunk.first[l]), grads);
        } else {
          grads = hn::Add(grads, LoadAsDouble(P_ + j));
        }
        hn::Store(grads, d, G_ + j);
      }
    }
  }

 private:
  const size_t n_, width_, np_, dp_;
  T *A_, *B_, *UT_;  // tril(W E^T), tril(g u^T), u^T
  T *Gs_, *GT_, *P_;
  double* G_;
};

// dlg of one chunk, in reverse: h += a_t b_t - w_t dw_t, dlg_t = h. A document's start and a gate
// of 0, which are first rows, end the sum. ab = a b, E and Y = F dw [rows, np]; w dw = E Y. A gate
// for every slot: h [np], and ab becomes dlg.
template <class T>
HWY_NOINLINE void GateGradients(const SumChunk<Gating::kSlots, T>& chunk, bool starts, const T* Y,
                                T* ab, double* h) {
  const Tag<double> d;
  for (size_t l = 0; l < chunk.np; l += kLanes<double>) {
    Double sum = hn::Load(d, h + l);
    for (size_t i = chunk.rows; i-- > 0;) {
      const size_t at = i * chunk.np + l;
      sum = hn::Add(sum, hn::NegMulAdd(LoadAsDouble(chunk.E + at), LoadAsDouble(Y + at),
                                       LoadAsDouble(ab + at)));
      if (i == 0) {
        const auto cut = hn::Eq(hn::Load(d, chunk.first + l), hn::Zero(d));
        sum = starts ? hn::Zero(d) : hn::IfThenZeroElse(cut, sum);
      }
      StoreDouble(sum, ab + at);
    }
    hn::Store(sum, d, h + l);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace cistern
HWY_AFTER_NAMESPACE();

#endif  // include guard
