#include "cistern/ops/banded_attention.h"

#include <ATen/ATen.h>

#include <algorithm>

#include "cistern/ops/draws.h"
#include "cistern/ops/exact_attention.h"
#include "cistern/ops/primitive.h"
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

// A band that is not dilated, by blocks of queries.
at::Tensor InBlocks(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const Band& band,
                    const at::Tensor& documents_in, double scale, double dropout) {
  const int64_t batch = q.size(0), heads = q.size(1), length = q.size(2), width = q.size(3),
                around = band.before + band.after;
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

// Every g-th row belongs together: [B,H,S,d] becomes [B g,H,S/g,d], a plain band in each.
at::Tensor Split(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, Band band,
                 const at::Tensor& documents_in, double scale, double dropout) {
  const int64_t g = band.dilation, batch = q.size(0), heads = q.size(1), length = q.size(2),
                width = q.size(3);
  const int64_t more = (g - length % g) % g;  // rows that make the length a multiple of g
  const auto split = [&](const at::Tensor& x) {
    const at::Tensor padded = more == 0 ? x : at::constant_pad_nd(x, {0, 0, 0, more}, 0);
    return padded.reshape({batch, heads, -1, g, width})
        .permute({0, 3, 1, 2, 4})
        .reshape({batch * g, heads, -1, width});
  };
  const at::Tensor documents =
      documents_in.defined()
          ? documents_in
          : at::zeros({1, k.size(2)}, q.options().dtype(at::kLong).requires_grad(false));
  const at::Tensor rows =
      (more == 0 ? documents : at::constant_pad_nd(documents, {0, more}, -1)).expand({batch, -1});
  const at::Tensor split_rows =
      rows.reshape({batch, -1, g}).transpose(1, 2).reshape({batch * g, -1});
  band.lead /= g, band.dilation = 1;
  const at::Tensor out = InBlocks(split(q), split(k), split(v), band, split_rows, scale, dropout);
  return out.view({batch, g, heads, -1, width})
      .permute({0, 2, 3, 1, 4})
      .reshape({batch, heads, length + more, width})
      .narrow(2, 0, length);
}

// The band as ranges of keys, for tensors on the CPU.
at::Tensor Ranges(const Band& band, int64_t length, const at::Tensor& documents_in) {
  const int64_t rows = documents_in.defined() ? documents_in.size(0) : 1, keys = band.lead + length,
                g = band.dilation;
  const at::Tensor ranges = at::zeros({rows, length, 3}, at::kLong),
                   documents = documents_in.defined() ? documents_in.contiguous() : documents_in;
  int64_t* range = ranges.mutable_data_ptr<int64_t>();
  for (int64_t b = 0; b < rows; ++b) {
    const int64_t* document =
        documents.defined() ? documents.const_data_ptr<int64_t>() + b * keys : nullptr;
    int64_t first = 0, last = document == nullptr ? keys : 0;  // the rows of the query's document
    for (int64_t t = 0; t < length; ++t, range += 3) {
      const int64_t at = band.lead + t;
      if (document != nullptr && document[at] < 0) {
        range[2] = band.slots;
        continue;
      }
      if (at >= last) {
        for (first = at; first > 0 && document[first - 1] == document[at];) --first;
        for (last = at + 1; last < keys && document[last] == document[at];) ++last;
      }
      range[0] = std::max(first, at - band.before * g);
      range[1] = std::min(last, at + band.after * g + 1);
      range[2] = std::max<int64_t>(0, band.slots - (at - range[0]) / g - 1);
    }
  }
  return ranges;
}

}  // namespace

at::Tensor BandedAttention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                           const Band& band, const at::Tensor& documents, double scale,
                           double dropout) {
  TORCH_CHECK(
      q.dim() == 4 && k.sizes() == v.sizes() && k.dim() == 4 && k.size(0) == q.size(0) &&
          k.size(1) == q.size(1) && k.size(3) == q.size(3) && k.size(2) == band.lead + q.size(2),
      "[banded_attention] expected q [B,H,T,d] and k, v [B,H,lead+T,d] with lead=", band.lead,
      ", got ", q.sizes(), ", ", k.sizes(), ", ", v.sizes());
  TORCH_CHECK(band.dilation >= 1 && band.lead % band.dilation == 0,
              "[banded_attention] expected a dilation that divides lead=", band.lead, ", got ",
              band.dilation);
  if (q.numel() == 0) return at::zeros_like(q) + 0 * q.sum();
  // What is dropped follows from the places of queries and keys, which blocks move: so with dropout
  // the other implementations, too, take the whole.
  const bool drops = dropout > 0 && q.device().is_cpu() && !HaveTangents({q, k, v});
  if (drops || HasExactKernel(q, k, v)) {
    return ExactAttention(q, k, v, scale, {Ranges(band, q.size(2), documents), {}, band.dilation},
                          DrawDropout(dropout));
  }
  return band.dilation == 1 ? InBlocks(q, k, v, band, documents, scale, dropout)
                            : Split(q, k, v, band, documents, scale, dropout);
}

}  // namespace cistern::ops
