// Which products a walk over chunks has: those of floats (gemm-inl.h), or, where tokens are
// bfloat16 and it pays, those of pairs of them (chunk_pairs-inl.h); included once per Highway
// target.
#if defined(CISTERN_KERNELS_CHUNK_PRODUCTS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef CISTERN_KERNELS_CHUNK_PRODUCTS_INL_H_
#undef CISTERN_KERNELS_CHUNK_PRODUCTS_INL_H_
#else
#define CISTERN_KERNELS_CHUNK_PRODUCTS_INL_H_
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
template <class S>
struct TokenRows {
  Sequence<const S> x;
  size_t t;
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

// Stands where there are none: it takes no rows.
struct NoPairs {
  static size_t Bytes(size_t, size_t) { return 0; }
  static constexpr size_t kPieces = 0;
  NoPairs(size_t, size_t, Workspace&) {}
  template <class... Rows>
  size_t Take(size_t, const Rows&...) {
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

// The pairs of a walk over tokens of S.
#if CISTERN_HAS_PAIRS
template <class S>
using PairsFor = std::conditional_t<std::is_same_v<S, BFloat16>, ChunkPairs, NoPairs>;
#else
template <class S>
using PairsFor = NoPairs;
#endif

}  // namespace HWY_NAMESPACE
}  // namespace cistern
HWY_AFTER_NAMESPACE();

#endif  // include guard
