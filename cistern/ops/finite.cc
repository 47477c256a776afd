#include "cistern/ops/finite.h"

#include <ATen/ops/max.h>
#include <ATen/ops/sum.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "cistern/ops/in_place.h"
#include "cistern/ops/tensor_rows.h"

namespace cistern::ops {
namespace {

constexpr int64_t kFew = 4096;  // numbers that plain loops look at sooner than a call of torch

bool HasNoNumbers(const at::Tensor& x) {
  return x.is_meta() || x.numel() == 0 || x.key_set().has(c10::DispatchKey::Python) ||
         x.key_set().has(c10::DispatchKey::FuncTorchBatched);
}

// Few numbers on the CPU, in four dimensions as a decoding step has them.
bool IsSmall(const at::Tensor& x) {
  return x.dim() == 4 && x.numel() <= kFew && x.is_cpu() && x.has_storage() &&
         (x.scalar_type() == at::kFloat || x.scalar_type() == at::kDouble);
}

// sum(term(number)) over a small tensor.
template <class T, class Term>
double Accumulate(const at::Tensor& x, Term&& term) {
  const T* data = x.const_data_ptr<T>();
  const auto size = x.sizes(), stride = x.strides();
  double sums[4] = {};  // apart, so that none waits for the one before
  for (int64_t i = 0; i < size[0]; ++i) {
    for (int64_t j = 0; j < size[1]; ++j) {
      for (int64_t k = 0; k < size[2]; ++k) {
        const T* row = data + i * stride[0] + j * stride[1] + k * stride[2];
        const auto add = [&](int64_t l) { sums[l % 4] += term(double(row[l * stride[3]])); };
        int64_t l = 0;
        for (; l + 4 <= size[3]; l += 4) add(l), add(l + 1), add(l + 2), add(l + 3);
        for (; l < size[3]; ++l) add(l);
      }
    }
  }
  return (sums[0] + sums[1]) + (sums[2] + sums[3]);
}
template <class Term>
double Accumulate(const at::Tensor& x, Term&& term) {
  return x.scalar_type() == at::kFloat ? Accumulate<float>(x, term) : Accumulate<double>(x, term);
}

template <class T>
bool PaddingIsBelow(const at::Tensor& x, const int64_t* lengths, float limit) {
  const T* data = ConstData<T>(x);
  bool below = true;
  for (int64_t b = 0; b < x.size(0) && below; ++b) {
    for (int64_t h = 0; h < x.size(1); ++h) {
      for (int64_t t = std::max<int64_t>(lengths[b], 0); t < x.size(2); ++t) {
        const T* row = data + b * x.stride(0) + h * x.stride(1) + t * x.stride(2);
        for (int64_t i = 0; i < x.size(3); ++i) below &= std::abs(float(row[i])) < limit;
      }
    }
  }
  return below;
}

}  // namespace

bool AllFinite(const at::Tensor& x) {
  if (HasNoNumbers(x)) return true;
  const auto itself = [](double number) { return number; };
  return std::isfinite(IsSmall(x) ? Accumulate(x, itself) : x.detach().sum().item<double>());
}

bool AllBelowInfinity(const at::Tensor& s) {
  if (HasNoNumbers(s)) return true;
  const auto broken = [](double number) {
    return number < std::numeric_limits<double>::infinity() ? 0.0 : 1.0;
  };
  return IsSmall(s) ? Accumulate(s, broken) == 0
                    : s.detach().max().item<double>() < std::numeric_limits<double>::infinity();
}

bool PaddingIsBelow(const at::Tensor& x, const at::Tensor& lengths_in, double limit) {
  const auto type = x.scalar_type();
  if (x.is_meta() || !IsPlain(x) || !x.is_cpu() || x.dim() != 4 || x.stride(3) != 1 ||
      (type != at::kFloat && type != at::kDouble && type != at::kBFloat16))
    return false;
  const at::Tensor lengths = lengths_in.to(at::kCPU, at::kLong).contiguous();
  bool below = true;
  DispatchStored(x, [&]<class T>(T) {
    below = PaddingIsBelow<T>(x, lengths.const_data_ptr<int64_t>(), static_cast<float>(limit));
  });
  return below;
}

}  // namespace cistern::ops
