#pragma once
// From tensors to the kernels' views, and the layout of what the ops return.
#include <ATen/Context.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>

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

// A [B,H,T,w] tensor stored as [B,T,H,w], so that merging the heads afterwards is a view. Where
// torch is asked to fill unset memory, it is torch's.
inline at::Tensor EmptyHeads(c10::SymIntArrayRef sizes, const at::TensorOptions& options) {
  const c10::SymInt stored[] = {sizes[0], sizes[2], sizes[1], sizes[3]};
  const at::Context& context = at::globalContext();
  if (!options.device().is_cpu() ||
      (context.deterministicAlgorithms() && context.deterministicFillUninitializedMemory()))
    return at::empty_symint(stored, options).transpose(1, 2);
  const at::Tensor x = at::detail::empty_generic_symint(
      stored, &OutputAllocator(), c10::DispatchKeySet(c10::DispatchKey::CPU),
      c10::typeMetaToScalarType(options.dtype()), std::nullopt);
  return x.transpose(1, 2);
}

// The same stored as it is, [B,H,T,w].
inline at::Tensor EmptyHeadByHead(c10::SymIntArrayRef sizes, const at::TensorOptions& options) {
  const c10::SymInt turned[] = {sizes[0], sizes[2], sizes[1], sizes[3]};
  return EmptyHeads(turned, options).transpose(1, 2);
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
