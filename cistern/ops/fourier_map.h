#pragma once
// What ops that form random Fourier features are given (kernels/fourier_features.h): checks, and
// the map as the kernels take it. For .cc files of this layer.
#include <ATen/ATen.h>

#include "cistern/kernels/fourier_features.h"
#include "cistern/ops/tensor_rows.h"

namespace cistern::ops {

// scale [H,1,d] or none, matrices [H,m,d] for tokens x [B,H,T,d], in their type or the one that is
// computed in.
inline void CheckFourier(const char* op, const char* name, const at::Tensor& x,
                         const OptionalTensor& scale, const OptionalTensor& matrices) {
  TORCH_CHECK(matrices && matrices->dim() == 3 && matrices->sym_size(0) == x.sym_size(1) &&
                  matrices->sym_size(2) == x.sym_size(3),
              op, " expected matrices [H,m,d] for ", name, " ", x.sym_sizes(), ", got ",
              matrices ? matrices->sym_sizes() : c10::SymIntArrayRef());
  TORCH_CHECK(!scale || (scale->dim() == 3 && scale->sym_size(0) == x.sym_size(1) &&
                         scale->sym_size(1) == 1 && scale->sym_size(2) == x.sym_size(3)),
              op, " expected scale [H,1,d] for ", name, " ", x.sym_sizes(), ", got ",
              scale ? scale->sym_sizes() : c10::SymIntArrayRef());
  for (const OptionalTensor* t : {&scale, &matrices}) {
    TORCH_CHECK(
        !*t || (*t)->scalar_type() == ComputeTypeOf(x) || (*t)->scalar_type() == x.scalar_type(),
        op, " expected scale and matrices of ", ComputeTypeOf(x), " for ", name, " of ",
        x.scalar_type(), ", got ", (*t)->scalar_type());
  }
}

// In the type that tokens stored as S are computed in.
template <class S>
class FourierTensors {
  using T = ComputeType<S>;

 public:
  FourierTensors(const at::Tensor& x, const OptionalTensor& scale, const at::Tensor& matrices,
                 bool normalise, double factor)
      : scale_(scale ? scale->to(ComputeTypeOf(x)).contiguous() : at::Tensor()),
        matrices_(matrices.to(ComputeTypeOf(x)).contiguous()),
        normalise_(normalise),
        factor_(factor) {}
  FourierMap<T> map() const {
    return {scale_.defined() ? ConstData<T>(scale_) : nullptr,
            ConstData<T>(matrices_),
            matrices_.size(2),
            matrices_.size(1),
            normalise_,
            factor_};
  }
  // [H,1,d], undefined without a scale.
  at::Tensor EmptyScaleGradient() const {
    return scale_.defined() ? at::empty_like(scale_) : at::Tensor();
  }

 private:
  at::Tensor scale_, matrices_;
  bool normalise_;
  double factor_;
};

}  // namespace cistern::ops
