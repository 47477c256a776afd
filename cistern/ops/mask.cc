#include "cistern/ops/mask.h"

#include <ATen/ATen.h>
#include <ATen/TensorSubclassLikeUtils.h>

#include <algorithm>

namespace cistern::ops {

at::Tensor Within(const at::Tensor& lengths, int64_t length) {
  return at::arange(length, lengths.options()).unsqueeze(0) < lengths.unsqueeze(1);
}

at::Tensor Mask::Real(int64_t length) const {
  if (!lengths) return valid.value_or(at::Tensor());
  const at::Tensor within = Within(*lengths, length);
  return valid ? within.logical_and(*valid) : within;
}

at::Tensor Mask::Padding(int64_t length) const {
  const at::Tensor real = Real(length);
  return real.defined() ? real.logical_not() : real;
}

at::Tensor Mask::HeadsPadding(int64_t length) const {
  const at::Tensor padding = Padding(length);
  return padding.defined() ? padding.unsqueeze(1).unsqueeze(-1) : padding;
}

at::Tensor Mask::RealStarts(int64_t length) const {
  if (!starts) return {};
  const at::Tensor real = Real(length);
  if (!real.defined()) return *starts;
  if (!valid || length == 0) return starts->logical_and(real);
  // A real token begins a document where more have begun than at the real token before it.
  const at::Tensor begun = starts->to(at::kLong).cumsum(1);
  const at::Tensor seen = std::get<0>(at::cummax(begun.masked_fill(real.logical_not(), 0), 1));
  const at::Tensor before =
      at::cat({at::zeros_like(seen.narrow(1, 0, 1)), seen.narrow(1, 0, length - 1)}, 1);
  return real.logical_and(begun > before);
}

at::Tensor Mask::Documents(int64_t length) const {
  return starts ? RealStarts(length).to(at::kLong).cumsum(1) : at::Tensor();
}

Mask Mask::Narrow(int64_t begin, int64_t count) const {
  Mask piece;
  if (lengths) piece.lengths = (*lengths - begin).clamp(0, count);
  // With masked tokens, a start may count for a token of the next piece.
  if (starts)
    piece.starts = (valid ? RealStarts(starts->size(1)) : *starts).narrow(1, begin, count);
  if (valid) piece.valid = valid->narrow(1, begin, count);
  return piece;
}

namespace {

void CheckLengths(const char* op, const at::Tensor& lengths, int64_t length) {
  const auto* const rows = lengths.const_data_ptr<int64_t>();
  for (int64_t b = 0; b < lengths.numel(); ++b) {
    TORCH_CHECK(rows[b] >= 0 && rows[b] <= length, op, " lengths[", b, "] = ", rows[b],
                " is not within 0..T = ", length);
  }
}

}  // namespace

void Mask::Check(const char* op, const c10::SymInt& batch, const c10::SymInt& length) const {
  const auto of_tokens = [&](const at::Tensor& x, const char* name) {
    TORCH_CHECK(x.dim() == 2 && x.sym_size(0) == batch && x.sym_size(1) == length &&
                    x.scalar_type() == at::kBool,
                op, " expected ", name, " of shape [B,T] = [", batch, ", ", length,
                "] and dtype bool, got ", x.sym_sizes(), " ", x.scalar_type());
  };
  if (starts) of_tokens(*starts, "starts");
  if (valid) of_tokens(*valid, "valid");
  if (lengths) {
    TORCH_CHECK(
        lengths->dim() == 1 && lengths->sym_size(0) == batch && lengths->scalar_type() == at::kLong,
        op, " expected lengths of shape [B] = [", batch, "] and dtype int64, got ",
        lengths->sym_sizes(), " ", lengths->scalar_type());
    const auto known = length.maybe_as_int();
    if (known && lengths->device().is_cpu() && !at::isTensorSubclassLike(*lengths))
      CheckLengths(op, lengths->contiguous(), *known);
  }
}

at::Tensor TokenMap::Pick(const at::Tensor& x, const at::Tensor& from, int64_t time) const {
  if (!x.defined()) return x;
  const at::Tensor rows = x.movedim(time, 1);
  std::vector<int64_t> shape = rows.sizes().vec();
  at::Tensor table = rows.flatten(0, 1);
  if (empty_) {
    std::vector<int64_t> none = table.sizes().vec();
    none[0] = 1;
    table = at::cat({table, at::zeros(none, table.options())});
  }
  shape[0] = from.size(0), shape[1] = from.size(1);
  return table.index_select(0, from.flatten().to(x.device())).reshape(shape).movedim(1, time);
}

TokenMap ToFront(const Mask& mask, int64_t length) {
  const at::Tensor real = mask.Real(length);
  const at::Tensor order = at::argsort(real.logical_not().to(at::kInt), /*stable=*/true, 1);
  Mask moved;
  moved.lengths = real.sum({1}, false, at::kLong);
  if (mask.starts) moved.starts = mask.RealStarts(length).gather(1, order);
  const at::Tensor row = at::arange(real.size(0), order.options()).unsqueeze(1) * length;
  return {row + order, row + at::argsort(order, /*stable=*/false, 1), false, moved};
}

namespace {

// (row, first token, length)
struct Document {
  int64_t row, begin, length;
};

std::vector<Document> Listed(const Mask& mask, int64_t batch, int64_t length) {
  const at::Tensor starts = mask.starts->to(at::kCPU).contiguous();
  const at::Tensor lengths = mask.lengths ? mask.lengths->to(at::kCPU).contiguous() : at::Tensor();
  std::vector<Document> documents;
  for (int64_t b = 0; b < batch; ++b) {
    const bool* start = starts.const_data_ptr<bool>() + b * length;
    const int64_t end =
        lengths.defined() ? std::min(length, lengths.const_data_ptr<int64_t>()[b]) : length;
    for (int64_t t = 0; t < end; ++t) {
      if (t == 0 || start[t]) documents.push_back({b, t, 0});
      documents.back().length = t + 1 - documents.back().begin;
    }
  }
  return documents;
}

}  // namespace

TokenMap EachDocument(const Mask& mask, int64_t length) {
  const int64_t batch = mask.starts->size(0);
  const std::vector<Document> documents = Listed(mask, batch, length);
  int64_t longest = 0;
  for (const Document& d : documents) longest = std::max(longest, d.length);
  const int64_t count = int64_t(documents.size());
  const at::Tensor from = at::full({count, longest}, batch * length, at::kLong),
                   back = at::full({batch, length}, count * longest, at::kLong),
                   lengths = at::empty({count}, at::kLong);
  for (int64_t i = 0; i < count; ++i) {
    const Document& d = documents[size_t(i)];
    lengths.mutable_data_ptr<int64_t>()[i] = d.length;
    for (int64_t t = 0; t < d.length; ++t) {
      from.mutable_data_ptr<int64_t>()[i * longest + t] = d.row * length + d.begin + t;
      back.mutable_data_ptr<int64_t>()[d.row * length + d.begin + t] = i * longest + t;
    }
  }
  Mask rows;
  rows.lengths = lengths.to(mask.starts->device());
  return {from, back, true, rows};
}

}  // namespace cistern::ops
