// Which products a walk over tokens has: those of floats (gemm-inl.h), or, where tokens are
// bfloat16 and it pays, those of pairs of them (pair_products-inl.h, chunk_pairs-inl.h); included
// once per Highway target.
#if defined(CISTERN_KERNELS_TOKEN_PRODUCTS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef CISTERN_KERNELS_TOKEN_PRODUCTS_INL_H_
#undef CISTERN_KERNELS_TOKEN_PRODUCTS_INL_H_
#else
#define CISTERN_KERNELS_TOKEN_PRODUCTS_INL_H_
#endif

#include <type_traits>

#include "cistern/kernels/isa.h"
#include "cistern/kernels/staged_rows-inl.h"
#include "cistern/kernels/workspace.h"

HWY_BEFORE_NAMESPACE();
namespace cistern {
namespace HWY_NAMESPACE {

// Rows of a chunk: a panel [rows, ld], or tokens t.. of a sequence.
template <class T>
struct PanelRows {
  const T* x;
  size_t ld;
};

}  // namespace HWY_NAMESPACE
}  // namespace cistern
HWY_AFTER_NAMESPACE();

// AVX512-BF16 is no target of Highway's: those headers add it by attributes.
#undef CISTERN_HAS_PAIRS
#if HWY_TARGET == HWY_AVX3
#define CISTERN_HAS_PAIRS 1
#include "cistern/kernels/chunk_pairs-inl.h"
#else
#define CISTERN_HAS_PAIRS 0
#endif

HWY_BEFORE_NAMESPACE();
namespace cistern {
namespace HWY_NAMESPACE {

// Stand where there are none: they take no rows and compute nothing.
struct NoOuterPairs {
  static size_t Bytes(size_t, size_t, size_t) { return 0; }
  static constexpr size_t kPieces = 0;
  NoOuterPairs(size_t, size_t, size_t, Workspace&) {}
  template <class... Rows>
  size_t Take(size_t, const Rows&...) const {
    return 0;
  }
  template <bool kAdd, class T>
  void Multiply(T*, size_t) const {}
};
struct NoPanelPairs {
  static size_t Bytes(size_t, size_t, size_t) { return 0; }
  static constexpr size_t kPieces = 0;
  NoPanelPairs(size_t, size_t, size_t, Workspace&) {}
  template <class T>
  void Set(const T*, size_t) const {}
  template <bool kAdd, class... Arguments>
  bool Times(const Arguments&...) const {
    return false;
  }
  template <class... Arguments>
  bool TimesTo(const Arguments&...) const {
    return false;
  }
};
struct NoChunkPairs {
  static size_t Bytes(size_t, size_t) { return 0; }
  static constexpr size_t kPieces = 0;
  NoChunkPairs(size_t, size_t, Workspace&) {}
  template <class... Rows>
  size_t Take(size_t, const Rows&...) const {
    return 0;
  }
  template <class... Arguments>
  void Read(const Arguments&...) const {}
  template <class... Arguments>
  void ReverseRead(const Arguments&...) const {}
  template <bool kAdd, class... Arguments>
  void ReverseMatch(const Arguments&...) const {}
  template <class Memory>
  void Write(const Memory&) const {}
  template <class T>
  void Add(T*, size_t) const {}
};

// Those of a walk over tokens of S.
#if CISTERN_HAS_PAIRS
template <class S, class Pairs, class None>
using PairsOr = std::conditional_t<std::is_same_v<S, BFloat16>, Pairs, None>;
template <class S>
using OuterPairsFor = PairsOr<S, OuterPairs, NoOuterPairs>;
template <class S>
using PanelPairsFor = PairsOr<S, PanelPairs, NoPanelPairs>;
template <class S>
using ChunkPairsFor = PairsOr<S, ChunkPairs, NoChunkPairs>;
#else
template <class S>
using OuterPairsFor = NoOuterPairs;
template <class S>
using PanelPairsFor = NoPanelPairs;
template <class S>
using ChunkPairsFor = NoChunkPairs;
#endif

}  // namespace HWY_NAMESPACE
}  // namespace cistern
HWY_AFTER_NAMESPACE();

#endif  // include guard
