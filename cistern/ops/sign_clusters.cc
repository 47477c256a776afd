#include "cistern/ops/sign_clusters.h"

#include <ATen/ATen.h>

#include <algorithm>

#include "cistern/kernels/sign_clusters.h"
#include "cistern/ops/impl.h"
#include "cistern/ops/tensor_rows.h"

namespace cistern::ops {
namespace {

bool ByKernel(const at::Tensor& x) { return x.device().is_cpu() && ActiveImpl() == Impl::kKernel; }

// Bits as numbers on all devices: of 32, the last one is the sign of an int32.
at::Tensor Bits(int64_t count, const at::TensorOptions& like) {
  return at::arange(count, like.dtype(at::kLong).requires_grad(false));
}

uint32_t* CodesOf(const at::Tensor& codes) {
  return reinterpret_cast<uint32_t*>(codes.mutable_data_ptr<int32_t>());
}

at::Tensor ComposedCodes(const at::Tensor& keys, const at::Tensor& planes, int64_t count) {
  const at::Tensor used = planes.narrow(1, 0, count).to(at::kDouble);
  const int64_t width = keys.size(3);
  const at::Tensor side =
      at::matmul(keys.to(at::kDouble), used.narrow(2, 0, width).transpose(1, 2)) +
      used.select(2, width).unsqueeze(1);  // [B,H,T,count] + [H,1,count]
  const at::Tensor code =
      (side > 0).to(at::kLong).bitwise_left_shift(Bits(count, keys.options())).sum(3);
  return at::where(code >= int64_t{1} << 31, code - (int64_t{1} << 32), code).to(at::kInt);
}

// Distances and votes of signs are integers that floats hold, so nothing is rounded.
at::Tensor ComposedClusters(const at::Tensor& codes, int64_t n, int64_t iterations,
                            const Mask& mask) {
  const int64_t batch = codes.size(0), heads = codes.size(1), length = codes.size(2);
  constexpr int64_t kFloatCounts = int64_t{1} << 24;
  const auto type = std::max(length, kMostPlanes * n) < kFloatCounts ? at::kFloat : at::kDouble;
  const at::Tensor bit = Bits(kMostPlanes, codes.options());
  at::Tensor signs =
      codes.to(at::kLong).unsqueeze(-1).bitwise_right_shift(bit).bitwise_and(1).to(type) * 2 - 1;
  const at::Tensor lengths =
      mask.lengths ? *mask.lengths : at::full({batch}, length, bit.options());
  if (mask.lengths) signs = signs.masked_fill(mask.HeadsPadding(length), 0.0);  // moves no centre
  const at::Tensor slot = at::arange(n, bit.options());
  const at::Tensor first =
      at::floor_divide(slot.unsqueeze(0) * lengths.unsqueeze(1), n).view({batch, 1, n, 1});
  at::Tensor centres = signs.gather(2, first.expand({batch, heads, n, kMostPlanes}));
  const auto nearest =
      [&] {  // the first of the nearest centres: agreement is an integer, the slot breaks ties
        return (at::matmul(signs, centres.transpose(2, 3)) * double(n) - slot).argmax(3);
      };
  for (int64_t i = 0; i < iterations; ++i) {
    const at::Tensor member = (nearest().unsqueeze(-1) == slot).to(type);
    const at::Tensor votes = at::matmul(member.transpose(2, 3), signs);
    centres = at::where(votes == 0, centres, votes.sign());  // a tie, or nobody: the sign stays
  }
  const at::Tensor clusters = nearest();
  return mask.lengths ? clusters.masked_fill(mask.HeadsPadding(length).squeeze(-1), 0) : clusters;
}

}  // namespace

at::Tensor SignCodes(const at::Tensor& keys, const at::Tensor& planes, int64_t count) {
  const at::NoGradGuard guard;
  if (!ByKernel(keys)) return ComposedCodes(keys, planes, count);
  const at::Tensor k = UnitStride(keys), hyperplanes = planes.to(at::kFloat).contiguous(),
                   codes = at::empty(keys.sizes().slice(0, 3), keys.options().dtype(at::kInt));
  const SlotShape shape = {k.size(0), k.size(1), k.size(2), count, k.size(3)};
  DispatchStored(k, [&]<class S>(S) {
    cistern::SignCodes<S>(shape, InputRows<S>(k), hyperplanes.const_data_ptr<float>(),
                          CodesOf(codes));
  });
  return codes;
}

at::Tensor SignClusters(const at::Tensor& codes, int64_t n, int64_t iterations, const Mask& mask) {
  const at::NoGradGuard guard;
  if (!ByKernel(codes)) return ComposedClusters(codes, n, iterations, mask);
  const at::Tensor given = codes.contiguous(),
                   clusters = at::empty(codes.sizes(), codes.options().dtype(at::kLong));
  const MaskView view(mask, codes.size(2));
  cistern::SignClusters({codes.size(0), codes.size(1), codes.size(2), n, 1}, CodesOf(given),
                        view.mask.lengths, iterations, clusters.mutable_data_ptr<int64_t>());
  return clusters;
}

}  // namespace cistern::ops
