#include "cistern/analyses/implied_weights.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "cistern/analyses/identity_values.h"
#include "cistern/base/error.h"

namespace cistern {
namespace {

constexpr int64_t kScores = 512;              // keys at a time, for the sums of exact softmax
constexpr int64_t kQueries = 128;             // queries at a time, where all weights are kept
constexpr int64_t kWhole = int64_t{1} << 22;  // weights of a row of exact softmax that are kept

using Tensors = std::vector<at::Tensor>;

// A fixed direction of the channels, of length sqrt(d) and without zeros.
at::Tensor Direction(const at::Tensor& like) {
  const at::Tensor i = at::arange(like.size(-1), like.options());
  return at::cos(i * 2.399963 + 0.5) + 0.25;
}

}  // namespace

ImpliedWeights::ImpliedWeights(const CapturedLayer& layer, int64_t row, bool packing)
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
  if ((untied_ = UntiedCore(layer))) {
    x_ = Untied(*core_, *untied_, x_, false);
    written_ = Untied(*core_, *untied_, written_, false);
    core_ = untied_.get();
    values_ = ValuesOf(*core_, false);
  }
  if (has_memory) {
    PrepareMemory(packing);
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
  const std::vector<Projection>& projections = core_->Projections();
  resumes_ = layer.form == Form::kCausal && handles_.empty() && !mask_.lengths && !mask_.starts &&
             !mask_.valid &&
             std::all_of(projections.begin(), projections.end(),
                         [](const Projection& p) { return p.OfTokens(); });
  softmax_ = info.name == "softmax" && !cross && !layer.core->dims().relative && !mask_.starts;
  if (!softmax_) return;
  scale_ = layer.options.mechanism_options.value("scale", "sqrt") == "unit"
               ? 1
               : 1 / std::sqrt(double(x_[0].size(3)));
  if (heads_ * queries_ * sources_ <= kWhole) {
    PrepareWhole();
    return;
  }
  for (int64_t begin = 0; begin < sources_; begin += kScores) {
    const at::Tensor part =
        at::logsumexp(Scores(0, queries_, begin, std::min(kScores, sources_ - begin)), {2}, true);
    total_ = total_.defined() ? at::logaddexp(total_, part) : part;  // [H,T,1]
  }
}

// [H,queries,count]: what exact softmax takes the exponential of; -inf where a query does not see a
// key.
at::Tensor ImpliedWeights::Scores(int64_t first, int64_t queries, int64_t begin,
                                  int64_t count) const {
  const at::Tensor q = x_[0][0].narrow(1, first, queries), k = x_[1][0].narrow(1, begin, count);
  at::Tensor scores = at::matmul(q * scale_, k.transpose(1, 2));
  const double hidden = -std::numeric_limits<double>::infinity();
  const auto index = x_[0].options().dtype(at::kLong).requires_grad(false);
  const at::Tensor s = at::arange(begin, begin + count, index);
  if (layer_.form == Form::kCausal)
    scores.masked_fill_(s > at::arange(first, first + queries, index).unsqueeze(1), hidden);
  if (mask_.lengths) scores.masked_fill_(s >= *mask_.lengths, hidden);
  return scores;
}

// Blocks of queries, and of a causal layer no keys after them: half of the work.
void ImpliedWeights::PrepareWhole() {
  const bool causal = layer_.form == Form::kCausal;
  whole_ = at::zeros({heads_, queries_, sources_}, x_[0].options().requires_grad(false));
  for (int64_t first = 0; first < queries_; first += kQueries) {
    const int64_t queries = std::min(kQueries, queries_ - first),
                  seen = causal ? std::min(first + queries, sources_) : sources_;
    whole_.narrow(1, first, queries)
        .narrow(2, 0, seen)
        .copy_(at::softmax(Scores(first, queries, 0, seen), 2));
  }
  if (mask_.lengths) whole_ = ZeroPadding(whole_.unsqueeze(0), mask_)[0];
}

// Both attentions at once: [H,T,M] and [G,M,S] are small where M is.
void ImpliedWeights::PrepareMemory(bool packing) {
  MemoryMechanism* memory = core_->memory_mechanism();
  Tensors read = RowOf(layer_.read, row_);
  if (untied_) read = Untied(layer_.layer->mechanism(), *untied_, read, true);
  const std::vector<size_t> packed_values = ValuesOf(*core_, true);
  CISTERN_CHECK(values_.size() == 1 && packed_values.size() == 1, "[analyze] ", core_->info().name,
                " has ", values_.size(), " values of tokens and ", packed_values.size(),
                " of the memory; expected one of each");
  const at::Tensor v = x_[values_[0]], u = read[packed_values[0]];
  const auto copies_of = [&](const at::Tensor& identity) { return Copies(x_, identity.size(0)); };
  if (packing) {
    const at::Tensor identity = IdentityValues(v, 0, sources_);
    Tensors x = copies_of(identity);
    x[values_[0]] = identity;
    packing_ = AsColumns(memory->Pack(x, Copies(mask_, identity.size(0))), sources_);
  }
  const at::Tensor identity = IdentityValues(u, 0, u.size(2));
  Tensors slots = Copies(read, identity.size(0));
  slots[packed_values[0]] = identity;
  unpacking_ = AsColumns(
      memory->Unpack(copies_of(identity), slots, Copies(mask_, identity.size(0))), u.size(2));
  // Each of the two has to give what the layer had.
  const at::Tensor packed = RowOf(layer_.packed, row_)[0]
                                .unflatten(1, {v.size(1), v.size(3)})
                                .transpose(0, 1);  // [G,M,d]
  const double pack_error =
      packing ? RelativeError(at::matmul(packing_, v[0]).to(packed.dtype()), packed) : 0;
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
  if (whole_.defined()) return whole_.narrow(2, begin, count);
  if (softmax_) {
    const at::Tensor p = at::exp(Scores(0, queries_, begin, count) - total_);
    return mask_.lengths ? ZeroPadding(p.unsqueeze(0), mask_)[0] : p;
  }
  if (unpacking_.defined())
    return at::matmul(unpacking_, packing_.mean(0).narrow(1, begin, count).to(unpacking_.dtype()));
  if (resumes_) return CausalColumns(begin, count);
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

// Queries before `begin` see none of these sources: 0.
at::Tensor ImpliedWeights::CausalColumns(int64_t begin, int64_t count) const {
  const auto options = layer_.y.options().requires_grad(false);
  const auto piece = [&](int64_t from, int64_t to) {
    Tensors x;
    for (const at::Tensor& t : x_) x.push_back(t.defined() ? t.narrow(2, from, to - from) : t);
    return x;
  };
  Handles none;
  if (prefix_.tensors.empty() || begin < prefix_tokens_) {
    prefix_ = core_->EmptyState(1, options);
    prefix_tokens_ = 0;
  }
  if (prefix_tokens_ < begin) {
    Tensors x = piece(prefix_tokens_, begin);
    for (const size_t i : values_) x[i] = at::zeros_like(x[i]);
    core_->Attend(Form::kCausal, x, &prefix_, {}, none);
    prefix_tokens_ = begin;
  }
  Tensors x = piece(begin, queries_);
  int64_t copies = 0;
  for (const size_t i : values_) {
    const at::Tensor identity = IdentityValues(x[i], 0, count);
    if (copies == 0) {
      copies = identity.size(0);
      x = Copies(x, copies);
    }
    x[i] = identity;
  }
  State state = prefix_.Reorder(at::zeros({copies}, options.dtype(at::kLong)));
  const at::Tensor seen = AsColumns(core_->Attend(Form::kCausal, x, &state, {}, none), count);
  if (begin == 0) return seen;
  const at::Tensor all = at::zeros({heads_, queries_, count}, seen.options());
  all.narrow(1, begin, queries_ - begin).copy_(seen);
  return all;
}

at::Tensor ImpliedWeights::Probe(int64_t begin, const at::Tensor& columns) const {
  if (!probe_values_.defined()) return {};
  const at::Tensor v = probe_values_.narrow(1, begin, columns.size(2)).to(columns.dtype());
  // Head by head: a batched product with a single column is several times slower. Queries before
  // the columns see none of them.
  const int64_t first = layer_.form == Form::kCausal ? std::min(begin, queries_) : 0;
  const at::Tensor out = at::zeros({columns.size(0), queries_}, columns.options());
  for (int64_t h = 0; h < columns.size(0); ++h) {
    const at::Tensor seeing = columns[h].narrow(0, first, queries_ - first);
    out[h].narrow(0, first, queries_ - first).copy_(at::mv(seeing, v[h]));
  }
  return out;
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
