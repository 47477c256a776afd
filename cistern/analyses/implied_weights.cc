#include "cistern/analyses/implied_weights.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "cistern/base/error.h"

namespace cistern {
namespace {

constexpr int64_t kScores = 512;  // keys at a time, for the sums of exact softmax

using Tensors = std::vector<at::Tensor>;

// Row `row` of tensors of a batch; those of a learned memory may have one row for all.
at::Tensor RowOf(const at::Tensor& x, int64_t row) {
  return !x.defined() || x.size(0) == 1 ? x : x.narrow(0, row, 1);
}
Tensors RowOf(const Tensors& x, int64_t row) {
  Tensors out;
  for (const at::Tensor& t : x) out.push_back(RowOf(t, row));
  return out;
}
ops::Mask RowOf(const ops::Mask& mask, int64_t row) {
  ops::Mask out;
  if (mask.lengths) out.lengths = RowOf(*mask.lengths, row);
  if (mask.starts) out.starts = RowOf(*mask.starts, row);
  if (mask.valid) out.valid = RowOf(*mask.valid, row);
  return out;
}

// `count` copies of the row.
at::Tensor Copies(const at::Tensor& x, int64_t count) {
  if (!x.defined()) return x;
  std::vector<int64_t> sizes(size_t(x.dim()), -1);
  sizes[0] = count;
  return x.expand(sizes);
}
Tensors Copies(const Tensors& x, int64_t count) {
  Tensors out;
  for (const at::Tensor& t : x) out.push_back(Copies(t, count));
  return out;
}
ops::Mask Copies(const ops::Mask& mask, int64_t count) {
  ops::Mask out;
  if (mask.lengths) out.lengths = Copies(*mask.lengths, count).contiguous();
  if (mask.starts) out.starts = Copies(*mask.starts, count).contiguous();
  if (mask.valid) out.valid = Copies(*mask.valid, count).contiguous();
  return out;
}
Handles Copies(const Handles& handles, int64_t count) {
  Handles out;
  for (const HeadScores& s : handles)
    out.push_back({Copies(s.q, count), Copies(s.k, count), Copies(s.p, count),
                   Copies(s.bias, count), s.scale});
  return out;
}

bool EndsInValue(const std::string& name) {
  return name == "v" || name == "pv" || name.ends_with("_v");
}

// The projections of the values: those of the tokens, or among those of what was packed (whose
// places are counted by themselves).
std::vector<size_t> ValuesOf(const Mechanism& m, bool packed) {
  std::vector<size_t> found;
  size_t place = 0;
  for (const Projection& p : m.Projections()) {
    const bool of_packed = p.side == Side::kPacked;
    if (of_packed != packed) continue;
    if ((packed || p.side == Side::kKey) && EndsInValue(p.name)) found.push_back(place);
    ++place;
  }
  return found;
}

// Tensors in the order of `tied` as tensors in the order of `untied`, which has more projections of
// a side: the last of the side stands for those that are missing.
Tensors Untied(const Mechanism& tied, const Mechanism& untied, const Tensors& x, bool packed) {
  if (x.empty()) return x;
  Tensors out;
  std::vector<int> used(4, 0);
  for (const Projection& to : untied.Projections()) {
    if ((to.side == Side::kPacked) != packed) continue;
    int place = 0, number = 0, last = -1;
    for (const Projection& from : tied.Projections()) {
      if ((from.side == Side::kPacked) != packed) continue;
      if (from.side == to.side && number++ <= used[size_t(to.side)]) last = place;
      ++place;
    }
    ++used[size_t(to.side)];
    CISTERN_CHECK(last >= 0, "[analyze] ", tied.info().name, " has no projection of the ",
                  SideName(to.side));
    if (size_t(last) < x.size()) out.push_back(x[size_t(last)]);
  }
  return out;
}

// [count,H,S,d]: the values that give the columns begin .. begin + n - 1.
at::Tensor IdentityValues(const at::Tensor& like, int64_t begin, int64_t n) {
  const int64_t width = like.size(3), copies = (n + width - 1) / width;
  const at::Tensor v = at::zeros({copies, like.size(1), like.size(2), width}, like.options());
  for (int64_t i = 0; i < copies; ++i) {
    const int64_t first = begin + i * width, count = std::min(width, begin + n - first);
    v.select(0, i)
        .narrow(1, first, count)
        .narrow(2, 0, count)
        .copy_(at::eye(count, like.options()).expand({like.size(1), -1, -1}));
  }
  return v;
}

// [copies,H,T,d], what the core gave for these values, as [H,T,n].
at::Tensor AsColumns(const at::Tensor& y, int64_t n) {
  return y.permute({1, 2, 0, 3}).reshape({y.size(1), y.size(2), -1}).narrow(2, 0, n);
}

// A fixed direction of the channels, of length sqrt(d) and without zeros.
at::Tensor Direction(const at::Tensor& like) {
  const at::Tensor i = at::arange(like.size(-1), like.options());
  return at::cos(i * 2.399963 + 0.5) + 0.25;
}

double RelativeError(const at::Tensor& got, const at::Tensor& want) {
  const double difference = (got - want).to(at::kDouble).norm().item<double>(),
               size = want.to(at::kDouble).norm().item<double>();
  return size > 0 ? difference / size : difference;
}

}  // namespace

ImpliedWeights::ImpliedWeights(const CapturedLayer& layer, int64_t row)
    : layer_(layer),
      row_(row),
      heads_(layer.heads()),
      queries_(layer.queries()),
      sources_(layer.sources()),
      core_(layer.core),
      x_(RowOf(layer.x, row)),
      written_(RowOf(layer.written, row)),
      mask_(RowOf(layer.mask, row)),
      written_mask_(RowOf(layer.written_mask, row)) {
  const MechanismInfo& info = layer.core->info();
  CISTERN_CHECK(row >= 0 && row < layer.rows(), "[analyze] row ", row, " of a batch of ",
                layer.rows());
  if (layer.core->SeesBatch())
    FailUsage("[", info.name,
              "] each row depends on the others of its batch (start=batch), so that a row has no "
              "attention weights of its own; use start=head");
  for (const HeadScores& s : layer.handles)
    handles_.push_back(
        {RowOf(s.q, row), RowOf(s.k, row), RowOf(s.p, row), RowOf(s.bias, row), s.scale});
  const auto has_memory = layer.packed.defined();
  if (layer.core->memory_mechanism() && !has_memory && layer.form == Form::kCross)
    FailUsage("[", info.name,
              "] cross attention through a memory has its weights spread over two layers' calls; "
              "analyze its bidirectional form");
  values_ = ValuesOf(*core_, false);
  if (values_.empty() && !info.name.empty()) {
    const std::vector<std::string> options = info.options().Names();
    if (std::find(options.begin(), options.end(), "tie_kv") == options.end())
      FailUsage("[", info.name, "] has no projection of values, so that no weights are implied");
    Json untied = layer.options.mechanism_options;
    untied["tie_kv"] = false;
    AttentionDims dims = layer.layer->mechanism().dims();
    dims.first = &layer.layer->mechanism();  // whose memory it shares
    untied_ = info.Make(untied, dims);
    untied_->to(layer.y.scalar_type());
    untied_->eval();
    x_ = Untied(*core_, *untied_, x_, false);
    written_ = Untied(*core_, *untied_, written_, false);
    core_ = untied_.get();
    values_ = ValuesOf(*core_, false);
  }
  if (has_memory) {
    PrepareMemory();
    return;
  }

  const bool cross = layer.form == Form::kCross;
  Tensors values;
  for (const size_t i : values_) values.push_back((cross ? written_ : x_).at(i));
  const at::Tensor v = values.size() == 1 ? values[0] : at::cat(values, 1);  // [1,H,S,d]
  CISTERN_CHECK(v.size(1) == heads_, "[analyze] ", info.name, " has values of ", v.size(1),
                " heads and gives ", heads_);
  probe_values_ = at::matmul(v[0], Direction(v));  // [H,S]
  const at::Tensor y = RowOf(layer.y, row)[0];
  probe_out_ = at::matmul(y, Direction(y));  // [H,T]
  softmax_ = info.name == "softmax" && !cross && !layer.core->dims().relative && !mask_.starts;
  if (!softmax_) return;
  scale_ = layer.options.mechanism_options.value("scale", "sqrt") == "unit"
               ? 1
               : 1 / std::sqrt(double(x_[0].size(3)));
  for (int64_t begin = 0; begin < sources_; begin += kScores) {
    const at::Tensor part =
        at::logsumexp(Scores(begin, std::min(kScores, sources_ - begin)), {2}, true);
    total_ = total_.defined() ? at::logaddexp(total_, part) : part;  // [H,T,1]
  }
}

// [H,T,count]: what exact softmax takes the exponential of; -inf where a query does not see a key.
at::Tensor ImpliedWeights::Scores(int64_t begin, int64_t count) const {
  const at::Tensor keys = x_[1][0].narrow(1, begin, count);
  at::Tensor scores = at::matmul(x_[0][0], keys.transpose(1, 2)) * scale_;
  const double hidden = -std::numeric_limits<double>::infinity();
  const auto index = x_[0].options().dtype(at::kLong).requires_grad(false);
  const at::Tensor s = at::arange(begin, begin + count, index);
  if (layer_.form == Form::kCausal)
    scores = scores.masked_fill(s > at::arange(queries_, index).unsqueeze(1), hidden);
  if (mask_.lengths) scores = scores.masked_fill(s >= *mask_.lengths, hidden);
  return scores;
}

// Both attentions at once: [H,T,M] and [G,M,S] are small where M is.
void ImpliedWeights::PrepareMemory() {
  MemoryMechanism* memory = core_->memory_mechanism();
  Tensors read = RowOf(layer_.read, row_);
  if (untied_) read = Untied(layer_.layer->mechanism(), *untied_, read, true);
  const std::vector<size_t> packed_values = ValuesOf(*core_, true);
  CISTERN_CHECK(values_.size() == 1 && packed_values.size() == 1, "[analyze] ", core_->info().name,
                " has ", values_.size(), " values of tokens and ", packed_values.size(),
                " of the memory; expected one of each");
  const at::Tensor v = x_[values_[0]], u = read[packed_values[0]];
  const auto copies_of = [&](const at::Tensor& identity) { return Copies(x_, identity.size(0)); };
  at::Tensor identity = IdentityValues(v, 0, sources_);
  Tensors x = copies_of(identity);
  x[values_[0]] = identity;
  packing_ = AsColumns(memory->Pack(x, Copies(mask_, identity.size(0))), sources_);
  identity = IdentityValues(u, 0, u.size(2));
  Tensors slots = Copies(read, identity.size(0));
  slots[packed_values[0]] = identity;
  unpacking_ = AsColumns(
      memory->Unpack(copies_of(identity), slots, Copies(mask_, identity.size(0))), u.size(2));
  // Each of the two has to give what the layer had.
  const at::Tensor packed = RowOf(layer_.packed, row_)[0]
                                .unflatten(1, {v.size(1), v.size(3)})
                                .transpose(0, 1);  // [G,M,d]
  const double pack_error = RelativeError(at::matmul(packing_, v[0]).to(packed.dtype()), packed);
  const int64_t real = layer_.core->SeesPadding() ? queries_ : layer_.RealQueries(row_);
  const at::Tensor y = RowOf(layer_.y, row_)[0].narrow(1, 0, real);
  const double read_error =
      RelativeError(at::matmul(unpacking_.narrow(1, 0, real), u[0]).to(y.dtype()), y);
  CISTERN_CHECK(pack_error <= kImpliedTolerance && read_error <= kImpliedTolerance, "[",
                core_->info().name,
                "] is not linear in its values, so that no attention weights are implied: packing "
                "misses its output by ",
                pack_error, ", reading by ", read_error, " (conv_luna: filter=conv is linear)");
  if (real < queries_) unpacking_.narrow(1, real, queries_ - real).zero_();
}

at::Tensor ImpliedWeights::Columns(int64_t begin, int64_t count) const {
  CISTERN_CHECK(begin >= 0 && count >= 0 && begin + count <= sources_, "[analyze] columns ", begin,
                " to ", begin + count, " of ", sources_, " sources");
  if (softmax_) {
    const at::Tensor p = at::exp(Scores(begin, count) - total_);
    return mask_.lengths ? ZeroPadding(p.unsqueeze(0), mask_)[0] : p;
  }
  if (unpacking_.defined())
    return at::matmul(unpacking_, packing_.mean(0).narrow(1, begin, count).to(unpacking_.dtype()));
  const bool cross = layer_.form == Form::kCross;
  Tensors x, written;
  int64_t copies = 0;
  for (const size_t i : values_) {
    const at::Tensor identity = IdentityValues((cross ? written_ : x_)[i], begin, count);
    if (copies == 0) {
      copies = identity.size(0);
      x = Copies(x_, copies), written = Copies(written_, copies);
    }
    (cross ? written : x)[i] = identity;
  }
  Handles handles = Copies(handles_, copies);
  const ops::Mask mask = Copies(mask_, copies);
  State state;
  const auto options = layer_.y.options().requires_grad(false);
  if (layer_.form != Form::kBidirectional) state = core_->EmptyState(copies, options);
  if (cross) core_->Write(written, state, Copies(written_mask_, copies));
  return AsColumns(core_->Attend(layer_.form, x, &state, mask, handles), count);
}

at::Tensor ImpliedWeights::Probe(int64_t begin, const at::Tensor& columns) const {
  if (!probe_values_.defined()) return {};
  const at::Tensor v = probe_values_.narrow(1, begin, columns.size(2));
  return at::matmul(columns, v.unsqueeze(2).to(columns.dtype())).squeeze(2);
}

void ImpliedWeights::Check(const at::Tensor& probe) const {
  if (!probe.defined()) return;  // a memory stream: PrepareMemory has checked
  const int64_t real = layer_.core->SeesPadding() ? queries_ : layer_.RealQueries(row_);
  const double error =
      RelativeError(probe.narrow(1, 0, real).to(probe_out_.dtype()), probe_out_.narrow(1, 0, real));
  CISTERN_CHECK(error <= kImpliedTolerance, "[", layer_.core->info().name, "] ", layer_.name,
                " is not linear in its values, so that no attention weights are implied: W v "
                "misses its output by ",
                error, " (at most ", kImpliedTolerance, " is rounding)");
}

at::Tensor ImpliedWeights::All() const {
  const at::Tensor all = Columns(0, sources_);
  Check(Probe(0, all));
  return all;
}

}  // namespace cistern
