#pragma once
// What the rows of a chunk read from a memory and write to it, and their gradients, by pairs of
// bfloat16: the products of the cores of slot_core-inl.h and slot_reverse-inl.h. What enters a
// product is rounded once, sums are float; included once, in the pass of the one target that may
// have the instruction.
//
// In a triangle weights outside of it are 0, and 0 times a number is 0 unless that is NaN or
// infinite. So rows from the first one on that holds such a number are left to products of floats:
// no bit of a row that reads depends on later ones.
#include <algorithm>
#include <utility>

#include "cistern/kernels/isa.h"
#include "cistern/kernels/pair_panels-inl.h"
#include "cistern/kernels/span_memory-inl.h"
#include "cistern/kernels/workspace.h"

HWY_BEFORE_NAMESPACE();
HWY_PUSH_ATTRIBUTES("avx512bf16")
namespace cistern {
namespace HWY_NAMESPACE {

struct ChangesNothing {
  void operator()(float*) const {}
};

// The products of a chunk with a memory [height, across]. Rows are those of a panel or tokens
// (pair_panels-inl.h).
class ChunkPairs {
 public:
  static size_t Bytes(size_t height, size_t across) {
    const size_t most = Most(height, across);
    return kChunkRows * most * (2 * sizeof(BFloat16) + 3 * sizeof(uint32_t) / 2) +
           kChunkRows * kChunkRows * (sizeof(float) + sizeof(BFloat16)) +
           MemoryRows(height, across) * sizeof(BFloat16) +
           MemoryPairs(height, across) * sizeof(uint32_t);
  }
  static constexpr size_t kPieces = 9;

  ChunkPairs(size_t height, size_t across, Workspace& workspace)
      : height_(height),
        across_(across),
        ldx_(PairColumns(height)),
        ldy_(PairColumns(across)),
        vectors_((across + kPairLanes - 1) / kPairLanes) {
    const size_t most = Most(height, across);
    first_ = workspace.Take<BFloat16>(kChunkRows * most);
    second_ = workspace.Take<BFloat16>(kChunkRows * most);
    for (uint32_t** piece : {&x_, &y_, &turned_})
      *piece = workspace.Take<uint32_t>(kChunkRows / 2 * most);
    triangle_ = workspace.Take<float>(kChunkRows * kChunkRows);
    rounded_ = workspace.Take<BFloat16>(kChunkRows * kChunkRows);
    memory_rows_ = workspace.Take<BFloat16>(MemoryRows(height, across));
    memory_pairs_ = workspace.Take<uint32_t>(MemoryPairs(height, across));
  }

  // Takes x [rows, height] and y [rows, across] for what follows: the rows before the first one
  // that holds anything not finite. Their number; 0 where pairs are not faster than floats.
  template <class X, class Y>
  size_t Take(size_t rows, const X& x, const Y& y) {
    if (!GainsByPairs()) return 0;
    rows_ = rows;
    if (PairOf(x, rows, height_, x_) && PairOf(y, rows, across_, y_)) return rows;
    rows_ = std::min(FiniteRows(x, rows, height_), FiniteRows(y, rows, across_));
    PairOf(x, rows_, height_, x_);
    PairOf(y, rows_, across_, y_);
    return rows_;
  }

  // out [rows, across] = a S + tril(a x^T) y, for x, y and as many rows as were taken; S is what
  // the chunk sees. change: of a x^T, [rows, kChunkRows].
  template <class A, class X, class Out, class Change = ChangesNothing>
  HWY_NOINLINE void Read(const A& a, const X& x, const SpanMemory<float>& S, Out* out, size_t ldo,
                         Change change = {}) {
    const RoundedRows as = Triangle(a, x, height_).first;
    change(triangle_);
    RoundPanel<true>(rows_, rows_, triangle_, kChunkRows, rounded_, kChunkRows);
    if (S.fresh()) {
      PairPanel<false>(height_, vectors_, S.past, S.ld, memory_pairs_, ldy_);
    } else {
      PairSums(height_, vectors_, S.past, S.added(), S.ld, memory_pairs_, ldy_);
    }
    PairProduct<PairTriangle::kLower, false>(
        rows_, vectors_, {as.a, as.ld, 2, memory_pairs_, ldy_, (height_ + 1) / 2},
        {rounded_, kChunkRows, 2, y_, ldy_, (rows_ + 1) / 2}, out, ldo);
  }

  // S += x^T y
  void Write(SpanMemory<float>& S) const {
    const bool fresh = S.fresh();
    fresh ? Multiply<false>(S.AddTo(), S.ld) : Multiply<true>(S.AddTo(), S.ld);
  }
  void Add(float* S, size_t ld) const { Multiply<true>(S, ld); }

  // The other way, with x and y as taken, of a memory S [height, ld]: out [rows, across] =
  // e S + triu((x e^T)^T) y, for e [rows, height].
  template <class X, class E, class Out>
  HWY_NOINLINE void ReverseRead(const X& x, const E& e, const float* S, size_t ld, Out* out,
                                size_t ldo) {
    const RoundedRows es = Triangle(x, e, height_).second;
    PairPanel<false>(height_, vectors_, S, ld, memory_pairs_, ldy_);
    PairProduct<PairTriangle::kUpper, false>(
        rows_, vectors_, {es.a, es.ld, 2, memory_pairs_, ldy_, (height_ + 1) / 2},
        UpperTriangle(y_, ldy_), out, ldo);
  }
  // out [rows, height] = u S^T + triu((y u^T)^T) x, for u [rows, across]; added to out where kAdd.
  // change: of y u^T.
  template <bool kAdd, class Y, class U, class Change = ChangesNothing>
  HWY_NOINLINE void ReverseMatch(const Y& y, const U& u, const float* S, size_t ld, float* out,
                                 size_t ldo, Change change = {}) {
    const RoundedRows us = Triangle(y, u, across_).second;
    change(triangle_);
    RoundPanel<false>(height_, across_, S, ld, memory_rows_, ldy_);
    TransposePairs(height_, across_, {memory_rows_, ldy_}, memory_pairs_, ldx_);
    PairProduct<PairTriangle::kUpper, kAdd>(
        rows_, (height_ + kPairLanes - 1) / kPairLanes,
        {us.a, us.ld, 2, memory_pairs_, ldx_, (across_ + 1) / 2}, UpperTriangle(x_, ldx_), out,
        ldo);
  }

 private:
  // S [height, ld] = x^T y, or += that.
  template <bool kAdd>
  void Multiply(float* S, size_t ld) const {
    PairProduct<PairTriangle::kNone, kAdd>(
        height_, vectors_,
        {reinterpret_cast<const BFloat16*>(x_), 2, 2 * ldx_, y_, ldy_, (rows_ + 1) / 2}, {}, S, ld);
  }

  static size_t Most(size_t height, size_t across) { return PairColumns(std::max(height, across)); }
  static size_t MemoryRows(size_t height, size_t across) {
    return PairColumns(height) * PairColumns(across);
  }
  static size_t MemoryPairs(size_t height, size_t across) {
    return PairColumns(height) * PairColumns(across) / 2;
  }

  // triangle_ = tril(a b^T), both of `width` columns. Both as they were rounded.
  template <class A, class B>
  std::pair<RoundedRows, RoundedRows> Triangle(const A& a, const B& b, size_t width) {
    const RoundedRows as = RoundRows<false>(a, rows_, width, first_),
                      bs = RoundRows<true>(b, rows_, width, second_);
    TransposePairs(rows_, width, bs, turned_, kChunkRows);
    PairLowerProduct(rows_, {as.a, as.ld, 2, turned_, kChunkRows, (width + 1) / 2}, triangle_,
                     kChunkRows);
    return {as, bs};
  }

  // triangle_ transposed, and what it multiplies.
  PairFactors UpperTriangle(const uint32_t* b, size_t ldb) {
    PairPanel<true>(rows_, kChunkRows / kPairLanes, triangle_, kChunkRows,
                    reinterpret_cast<uint32_t*>(rounded_), kChunkRows);
    return {rounded_, 2, 2 * kChunkRows, b, ldb, (rows_ + 1) / 2};
  }

  size_t height_, across_, ldx_, ldy_, vectors_, rows_ = 0;
  BFloat16 *first_, *second_, *rounded_, *memory_rows_;
  uint32_t *x_, *y_, *turned_, *memory_pairs_;
  float* triangle_;
};

}  // namespace HWY_NAMESPACE
}  // namespace cistern
HWY_POP_ATTRIBUTES
HWY_AFTER_NAMESPACE();
