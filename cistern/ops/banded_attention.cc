#include "cistern/ops/banded_attention.h"

#include <ATen/ATen.h>

#include <algorithm>

#include "cistern/ops/softmax_attention.h"

namespace cistern::ops {
namespace {

constexpr int64_t kSmallestBlock = 64;  // queries

// Rows [.., time, ..] with `front` rows of `value` before them and as many after them as make
// `total`.
at::Tensor PadRows(const at::Tensor& x, int64_t time, int64_t front, int64_t total, double value) {
  const int64_t back = total - front - x.size(time);
  if (front == 0 && back == 0) return x;
  std::vector<int64_t> padding(2 * (x.dim() - time), 0);  // counted from the last dimension
  padding[padding.size() - 2] = front;
  padding[padding.size() - 1] = back;
  return at::constant_pad_nd(x, padding, value);
}

// [B, .., (blocks+1) * rows, ..] -> [B, blocks, .., rows + more, ..]: each block with the first
// `more` <= rows rows of the next one.
at::Tensor Overlapping(const at::Tensor& x, int64_t time, int64_t blocks, int64_t rows,
                       int64_t more) {
  std::vector<int64_t> shape = x.sizes().vec();
  shape[time] = blocks + 1;
  shape.insert(shape.begin() + time + 1, rows);
  const at::Tensor y = x.reshape(shape).movedim(time, 1);
  return at::cat({y.narrow(1, 0, blocks), y.narrow(1, 1, blocks).narrow(time + 1, 0, more)},
                 time + 1);
}

}  // namespace

at::Tensor BandedAttention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                           const Band& band, const at::Tensor& documents_in, double scale,
                           double dropout) {
  const int64_t batch = q.size(0), heads = q.size(1), length = q.size(2), width = q.size(3),
                around = band.before + band.after;
  TORCH_CHECK(q.dim() == 4 && k.sizes() == v.sizes() && k.dim() == 4 && k.size(0) == batch &&
                  k.size(1) == heads && k.size(3) == width && k.size(2) == band.lead + length,
              "[banded_attention] expected q [B,H,T,d] and k, v [B,H,lead+T,d] with lead=",
              band.lead, ", got ", q.sizes(), ", ", k.sizes(), ", ", v.sizes());
  if (q.numel() == 0) return at::zeros_like(q) + 0 * q.sum();
  const int64_t rows = std::min(std::max(around, kSmallestBlock), length);
  const int64_t blocks = (length + rows - 1) / rows, keys = rows + around;
  // Block b holds the queries from b * rows on and the `keys` key rows from lead - before + b *
  // rows on. Key rows that do not exist belong to no document.
  const int64_t first = band.lead - band.before, total = blocks == 1 ? keys : (blocks + 1) * rows;
  auto windows = [&](const at::Tensor& x, int64_t time, double value) {
    const at::Tensor from = first > 0 ? x.narrow(time, first, x.size(time) - first) : x;
    const at::Tensor padded = PadRows(from, time, std::max<int64_t>(-first, 0), total, value);
    return blocks == 1 ? padded.unsqueeze(1) : Overlapping(padded, time, blocks, rows, around);
  };
  const auto index = q.options().dtype(at::kLong).requires_grad(false);
  const at::Tensor documents =
      documents_in.defined() ? documents_in : at::zeros({1, band.lead + length}, index);
  const at::Tensor key_document = windows(documents, 1, -1).unsqueeze(2);  // [B,blocks,1,keys]
  const at::Tensor query_document =
      PadRows(documents.narrow(1, band.lead, length), 1, 0, blocks * rows, -1)
          .view({-1, blocks, rows, 1});  // [B,blocks,rows,1]
  const at::Tensor distance =
      at::arange(keys, index).unsqueeze(0) - at::arange(rows, index).unsqueeze(1);  // [rows,keys]
  at::Tensor visible = (distance >= 0)
                           .logical_and(distance <= around)
                           .logical_and(key_document == query_document)
                           .logical_and(key_document >= 0)
                           .expand({batch, blocks, rows, keys})
                           .reshape({batch * blocks, 1, rows, keys});
  auto fold = [&](const at::Tensor& x) {
    return x.reshape({batch * blocks, heads, -1, width});
  };  // from [B,blocks,H,..,d]
  const at::Tensor queries =
      PadRows(q, 2, 0, blocks * rows, 0).view({batch, heads, blocks, rows, width}).transpose(1, 2);
  at::Tensor seen_k = fold(windows(k, 2, 0)), seen_v = fold(windows(v, 2, 0));
  if (band.slots > 0 && band.before > 0) {  // rows of zeros behind the keys, as many as it lacks
    const at::Tensor missing =              // [B blocks,1,rows,1]
        band.slots - visible.logical_and(distance <= band.before).sum({3}, true);
    visible = at::cat({visible, at::arange(band.before, index) < missing}, 3);
    seen_k = at::constant_pad_nd(seen_k, {0, 0, 0, band.before}, 0);
    seen_v = at::constant_pad_nd(seen_v, {0, 0, 0, band.before}, 0);
  }
  const at::Tensor out = MaskedAttention(fold(queries), seen_k, seen_v, visible, scale, dropout);
  return out.reshape({batch, blocks, heads, rows, width})
      .transpose(1, 2)
      .reshape({batch, heads, blocks * rows, width})
      .narrow(2, 0, length);
}

}  // namespace cistern::ops
