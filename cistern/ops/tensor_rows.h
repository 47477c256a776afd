#pragma once
// From tensors to the kernels' views, and the layout of what the ops return.
#include <ATen/Context.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <optional>
#include <type_traits>

#include "cistern/kernels/bfloat16.h"
#include "cistern/kernels/rows.h"
#include "cistern/ops/mask.h"
#include "cistern/ops/output_memory.h"

namespace cistern::ops {

using OptionalTensor = std::optional<at::Tensor>;

// [B,H,T,w] with unit stride in the last dimension, copied only where it is not.
inline at::Tensor UnitStride(const at::Tensor& x) {
  return x.stride(-1) == 1 || x.size(-1) <= 1 ? x : x.contiguous();
}

// A tensor's values for a kernel, of which ours names bfloat16 in its own way.
template <class T>
const T* ConstData(const at::Tensor& x) {
  if constexpr (std::is_same_v<T, BFloat16>) {
    return reinterpret_cast<const T*>(x.const_data_ptr<at::BFloat16>());
  } else {
    return x.const_data_ptr<T>();
  }
}
template <class T>
T* MutableData(const at::Tensor& x) {
  if constexpr (std::is_same_v<T, BFloat16>) {
    return reinterpret_cast<T*>(x.mutable_data_ptr<at::BFloat16>());
  } else {
    return x.mutable_data_ptr<T>();
  }
}

// run(float{}) or run(double{}), as x is.
template <class Run>
void DispatchType(const at::Tensor& x, Run&& run) {
  x.scalar_type() == at::kFloat ? run(float{}) : run(double{});
}
// The type that kernels compute in, given tokens of x's.
inline at::ScalarType ComputeTypeOf(const at::Tensor& x) {
  return x.scalar_type() == at::kBFloat16 ? at::kFloat : x.scalar_type();
}
// What belongs to slots, in float beside tokens in bfloat16.
inline at::Tensor OfSlots(const at::Tensor& x, const at::Tensor& tokens) {
  const bool both = tokens.scalar_type() == at::kBFloat16 && x.scalar_type() == at::kBFloat16;
  return both ? x.to(at::kFloat) : x;
}
// The same for what kernels take as it is stored: run(BFloat16{}) as well.
template <class Run>
void DispatchStored(const at::Tensor& x, Run&& run) {
  x.scalar_type() == at::kBFloat16 ? run(BFloat16{}) : DispatchType(x, run);
}

template <class T>
Rows<const T> InputRows(const at::Tensor& x) {
  return {ConstData<T>(x), x.stride(0), x.stride(1), x.stride(2)};
}
template <class T>
Rows<T> OutputRows(const at::Tensor& x) {
  return {MutableData<T>(x), x.stride(0), x.stride(1), x.stride(2)};
}

// A [B,H,T,w] tensor, not filled, stored as [B,T,H,w], or as it is. Where torch is asked to fill
// unset memory, it is torch's.
inline at::Tensor EmptyRows(c10::SymIntArrayRef sizes, const at::TensorOptions& options,
                            bool heads_inside) {
  const c10::SymInt &B = sizes[0], &H = sizes[1], &T = sizes[2], &w = sizes[3];
  const at::Context& context = at::globalContext();
  if (!options.device().is_cpu() ||
      (context.deterministicAlgorithms() && context.deterministicFillUninitializedMemory())) {
    return heads_inside ? at::empty_symint({B, T, H, w}, options).transpose(1, 2)
                        : at::empty_symint(sizes, options);
  }
  // One call of torch: a view of a tensor costs more than making it.
  const int64_t head = w.expect_int(), heads = H.expect_int(), time = T.expect_int(),
                row = std::max<int64_t>(1, head), all = std::max<int64_t>(1, heads) * row;
  const int64_t outer = std::max<int64_t>(1, time);
  const int64_t strides[] = {outer * all, heads_inside ? row : outer * row,
                             heads_inside ? all : row, 1};
  return at::detail::empty_strided_generic(
      {B.expect_int(), heads, time, head}, strides, &OutputAllocator(),
      c10::DispatchKeySet(c10::DispatchKey::CPU), c10::typeMetaToScalarType(options.dtype()));
}
// So that merging the heads afterwards is a view.
inline at::Tensor EmptyHeads(c10::SymIntArrayRef sizes, const at::TensorOptions& options) {
  return EmptyRows(sizes, options, true);
}
inline at::Tensor EmptyHeadByHead(c10::SymIntArrayRef sizes, const at::TensorOptions& options) {
  return EmptyRows(sizes, options, false);
}

// A mask of starts and lengths for the kernels; keeps what it points to alive.
struct MaskView {
  at::Tensor starts, lengths;
  RowMask mask;
  MaskView(const Mask& given, int64_t length) {
    if (given.starts) {
      starts = given.starts->contiguous();
      mask.starts = reinterpret_cast<const uint8_t*>(starts.const_data_ptr<bool>());
    }
    if (given.lengths) {
      lengths = given.lengths->contiguous();
      mask.lengths = lengths.const_data_ptr<int64_t>();
      for (int64_t b = 0; b < lengths.numel(); ++b) {
        TORCH_CHECK(mask.lengths[b] >= 0 && mask.lengths[b] <= length, "lengths[", b,
                    "] = ", mask.lengths[b], " is not within 0..T = ", length);
      }
    }
  }
};

}  // namespace cistern::ops
