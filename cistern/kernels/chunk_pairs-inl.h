#pragma once
// What the rows of a chunk read from a memory and write to it, and their gradients, by pairs of
// bfloat16 (pair_products-inl.h): the products of the walks over chunks (slot_core-inl.h,
// slot_reverse-inl.h, linear_attention*.cc); included once, in the pass of the one target that may
// have the instruction.
//
// In a triangle weights outside of it are 0, and 0 times a number is 0 unless that is NaN or
// infinite. So rows from the first one on that holds such a number are left to products of floats:
// no bit of a row that reads depends on later ones.
#include <algorithm>
#include <utility>

#include "cistern/kernels/pair_products-inl.h"
#include "cistern/kernels/span_memory-inl.h"

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
    return OuterPairs::Bytes(kChunkRows, height, across) +
           kChunkRows * most * (2 * sizeof(BFloat16) + sizeof(uint32_t) / 2) +
           kChunkRows * kChunkRows * (sizeof(float) + sizeof(BFloat16)) +
           MemorySize(height, across) * (sizeof(BFloat16) + sizeof(uint32_t) / 2);
  }
  static constexpr size_t kPieces = OuterPairs::kPieces + 7;

  ChunkPairs(size_t height, size_t across, Workspace& workspace)
      : of_(kChunkRows, height, across, workspace) {
    const size_t most = Most(height, across), size = MemorySize(height, across);
    first_ = workspace.Take<BFloat16>(kChunkRows * most);
    second_ = workspace.Take<BFloat16>(kChunkRows * most);
    turned_ = workspace.Take<uint32_t>(kChunkRows * most / 2);
    triangle_ = workspace.Take<float>(kChunkRows * kChunkRows);
    rounded_ = workspace.Take<BFloat16>(kChunkRows * kChunkRows);
    memory_rows_ = workspace.Take<BFloat16>(size);
    memory_pairs_ = workspace.Take<uint32_t>(size / 2);
  }

  // Takes x [rows, height] and y [rows, across] for what follows, as OuterPairs does.
  template <class X, class Y>
  size_t Take(size_t rows, const X& x, const Y& y) {
    return of_.Take(rows, x, y);
  }

  // out [rows, across] = a S + tril(a x^T) y, for x, y and as many rows as were taken; S is what
  // the chunk sees. change: of a x^T, [rows, kChunkRows].
  template <class A, class X, class Out, class Change = ChangesNothing>
  HWY_NOINLINE void Read(const A& a, const X& x, const SpanMemory<float>& S, Out* out, size_t ldo,
                         Change change = {}) {
    const size_t rows = of_.rows(), height = of_.height(), ldy = of_.ldy();
    const RoundedRows as = Triangle(a, x, height).first;
    change(triangle_);
    RoundPanel<true>(rows, rows, triangle_, kChunkRows, rounded_, kChunkRows);
    if (S.fresh()) {
      PairPanel<false>(height, of_.vectors(), S.past, S.ld, memory_pairs_, ldy);
    } else {
      PairSums(height, of_.vectors(), S.past, S.added(), S.ld, memory_pairs_, ldy);
    }
    PairProduct<PairTriangle::kLower, false>(
        rows, of_.vectors(), {as.a, as.ld, 2, memory_pairs_, ldy, (height + 1) / 2},
        {rounded_, kChunkRows, 2, of_.y(), ldy, of_.steps()}, out, ldo);
  }

  // S += x^T y
  void Write(SpanMemory<float>& S) const {
    const bool fresh = S.fresh();
    fresh ? of_.Multiply<false>(S.AddTo(), S.ld) : of_.Multiply<true>(S.AddTo(), S.ld);
  }
  void Add(float* S, size_t ld) const { of_.Multiply<true>(S, ld); }

  // The other way, with x and y as taken, of a memory S [height, ld]: out [rows, across] =
  // e S + triu((x e^T)^T) y, for e [rows, height].
  template <class X, class E, class Out>
  HWY_NOINLINE void ReverseRead(const X& x, const E& e, const float* S, size_t ld, Out* out,
                                size_t ldo) {
    const size_t height = of_.height(), ldy = of_.ldy();
    const RoundedRows es = Triangle(x, e, height).second;
    PairPanel<false>(height, of_.vectors(), S, ld, memory_pairs_, ldy);
    PairProduct<PairTriangle::kUpper, false>(of_.rows(), of_.vectors(),
                                             {es.a, es.ld, 2, memory_pairs_, ldy, (height + 1) / 2},
                                             UpperTriangle(of_.y(), ldy), out, ldo);
  }
  // out [rows, height] = u S^T + triu((y u^T)^T) x, for u [rows, across]; added to out where kAdd.
  // change: of y u^T.
  template <bool kAdd, class Y, class U, class Change = ChangesNothing>
  HWY_NOINLINE void ReverseMatch(const Y& y, const U& u, const float* S, size_t ld, float* out,
                                 size_t ldo, Change change = {}) {
    const size_t height = of_.height(), across = of_.across(), ldx = of_.ldx();
    const RoundedRows us = Triangle(y, u, across).second;
    change(triangle_);
    RoundPanel<false>(height, across, S, ld, memory_rows_, of_.ldy());
    TransposePairs(height, across, {memory_rows_, of_.ldy()}, memory_pairs_, ldx);
    PairProduct<PairTriangle::kUpper, kAdd>(of_.rows(), (height + kPairLanes - 1) / kPairLanes,
                                            {us.a, us.ld, 2, memory_pairs_, ldx, (across + 1) / 2},
                                            UpperTriangle(of_.x(), ldx), out, ldo);
  }

 private:
  static size_t Most(size_t height, size_t across) { return PairColumns(std::max(height, across)); }
  static size_t MemorySize(size_t height, size_t across) {
    return PairColumns(height) * PairColumns(across);
  }

  // triangle_ = tril(a b^T), both of `width` columns. Both as they were rounded.
  template <class A, class B>
  std::pair<RoundedRows, RoundedRows> Triangle(const A& a, const B& b, size_t width) {
    const size_t rows = of_.rows();
    const RoundedRows as = RoundRows<false>(a, rows, width, first_),
                      bs = RoundRows<true>(b, rows, width, second_);
    TransposePairs(rows, width, bs, turned_, kChunkRows);
    PairLowerProduct(rows, {as.a, as.ld, 2, turned_, kChunkRows, (width + 1) / 2}, triangle_,
                     kChunkRows);
    return {as, bs};
  }

  // triangle_ transposed, and what it multiplies.
  PairFactors UpperTriangle(const uint32_t* b, size_t ldb) {
    PairPanel<true>(of_.rows(), kChunkRows / kPairLanes, triangle_, kChunkRows,
                    reinterpret_cast<uint32_t*>(rounded_), kChunkRows);
    return {rounded_, 2, 2 * kChunkRows, b, ldb, of_.steps()};
  }

  OuterPairs of_;
  BFloat16 *first_, *second_, *rounded_, *memory_rows_;
  uint32_t *turned_, *memory_pairs_;
  float* triangle_;
};

}  // namespace HWY_NAMESPACE
}  // namespace cistern
HWY_POP_ATTRIBUTES
HWY_AFTER_NAMESPACE();
