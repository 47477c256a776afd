#include "cistern/verify/subject.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/autograd.h>

#include <algorithm>
#include <cmath>

#include "cistern/attention/head_groups.h"
#include "cistern/verify/outcome.h"

namespace cistern::verify {

namespace {

// Two; for head groups such as "window:2+latte:1" as many as they share out.
int64_t HeadsOf(const std::string& name) {
  if (!IsHeadGroups(name)) return 2;
  int64_t heads = 0;
  for (size_t colon = name.find(':'); colon != std::string::npos; colon = name.find(':', colon + 1))
    heads += std::stoll(name.substr(colon + 1));
  return heads;
}

}  // namespace

Subject::Subject(const MechanismInfo& info, const Json& options, uint64_t seed, int64_t heads,
                 int64_t max_length, int64_t width)
    : info_(info), options_(options), seed_(seed) {
  dims_.heads = heads > 0 ? heads : HeadsOf(info.name);
  dims_.dim = width * dims_.heads;
  dims_.max_length = max_length;
  at::manual_seed(seed);
  mechanism_ = info.Make(options, dims_);
  mechanism_->eval();
  mechanism_->to(at::kDouble);
}

std::string Subject::Name() const {
  return info_.name + (options_.empty() ? "" : " " + options_.dump());
}

Mechanism& Subject::In(at::ScalarType dtype) {
  // Tokens alone are in half precision, as in training.
  const at::ScalarType weights = dtype == at::kDouble ? at::kDouble : at::kFloat;
  if (weights != dtype_) mechanism_->to(weights);
  dtype_ = weights;
  return *mechanism_;
}

bool Subject::Has(Form form) const {
  return info_.Supports(form) && (info_.verbs || form == Form::kBidirectional) &&
         mechanism_->FormRefusal(form).empty();
}

std::string Subject::RowsDepend() const {
  if (mechanism_->SeesPadding()) return "its options let padding take part";
  return mechanism_->SeesBatch() ? "its options let the rows of a batch change each other" : "";
}

Tensors Subject::Inputs(int64_t batch, int64_t length, double scale) const {
  Tensors x;
  for (const Projection& p : mechanism_->Projections()) {
    if (!p.OfTokens()) continue;
    const int64_t heads = p.heads > 0 ? p.heads : dims_.heads;
    x.push_back(Normal({batch, heads, length, p.width / heads}, scale));
  }
  return x;
}

at::Tensor Subject::Weights(int64_t batch, int64_t length) const {
  return Normal({batch, dims_.heads, length, width()});
}

at::Tensor Subject::Definition(Form form, const Tensors& queries, const Tensors& x) {
  constexpr size_t kRemembered = 96;
  at::NoGradGuard guard;
  Tensors inputs = Cast(queries, at::kDouble);
  for (const at::Tensor& t : x) inputs.push_back(t.to(at::kDouble));
  for (const Known& known : known_) {
    const auto same = [](const at::Tensor& a, const at::Tensor& b) {
      return a.sizes() == b.sizes() && at::equal(a, b);
    };
    if (known.form == form &&
        std::equal(inputs.begin(), inputs.end(), known.inputs.begin(), known.inputs.end(), same))
      return known.out;
  }
  Known fresh{
      form, {}, In(at::kDouble).Definition(form, Cast(queries, at::kDouble), Cast(x, at::kDouble))};
  for (const at::Tensor& t : inputs)
    fresh.inputs.push_back(t.clone());  // callers may go on to change theirs
  known_.push_back(std::move(fresh));
  if (known_.size() > kRemembered) known_.pop_front();
  return known_.back().out;
}

double Subject::Tolerance(at::ScalarType dtype) const {
  return dtype == at::kDouble ? 1e-12 * std::max(1.0, info_.tolerance / 1e-6)
                              : info_.tolerance + 1e-6;
}

double Subject::Tolerance(at::ScalarType dtype, Form form, const Tensors& queries,
                          const Tensors& x) {
  if (form != Form::kCross) {
    return Tolerance(dtype, x, Definition(form, x, x),
                     [&](const Tensors& moved) { return Definition(form, moved, moved); });
  }
  Tensors inputs = queries;
  inputs.insert(inputs.end(), x.begin(), x.end());
  return Tolerance(dtype, inputs, Definition(form, queries, x), [&](const Tensors& moved) {
    const auto middle = moved.begin() + int64_t(queries.size());
    return Definition(form, {moved.begin(), middle}, {middle, moved.end()});
  });
}

namespace {

at::Tensor RoundedLike(const at::Tensor& t, double unit) {
  return t * (1 + unit * (2 * at::rand(t.sizes(), t.options()) - 1));
}

// Parameters moved by rounding, for as long as this lives; behind the back of autograd.
class MovedParameters {
 public:
  MovedParameters(Mechanism& m, double unit) {
    for (const at::Tensor& p : m.parameters()) {
      data_.push_back(p.variable_data());
      kept_.push_back(data_.back().clone());
      data_.back().copy_(RoundedLike(kept_.back(), unit));
    }
  }
  ~MovedParameters() {
    for (size_t i = 0; i < data_.size(); ++i) data_[i].copy_(kept_[i]);
  }
  MovedParameters(const MovedParameters&) = delete;
  MovedParameters& operator=(const MovedParameters&) = delete;

 private:
  Tensors data_, kept_;
};

}  // namespace

double Subject::Tolerance(at::ScalarType dtype, const Tensors& inputs, const at::Tensor& want,
                          const std::function<at::Tensor(const Tensors&)>& define) {
  const double unit = dtype == at::kDouble ? std::ldexp(1, -52) : std::ldexp(1, -23);
  Tensors moved;
  for (const at::Tensor& t : inputs) moved.push_back(RoundedLike(t, unit));
  const MovedParameters parameters(In(at::kDouble), unit);
  return Tolerance(dtype) + 16 * std::min(RelativeRms(define(moved), want), 1.0);
}

at::Tensor Normal(at::IntArrayRef sizes, double scale) {
  return (at::randn(sizes, at::kDouble) * scale).to(at::kFloat).to(at::kDouble);
}

namespace {

template <class F>
Tensors Map(const Tensors& x, F&& f) {
  Tensors y;
  for (const at::Tensor& t : x) y.push_back(f(t));
  return y;
}

}  // namespace

Tensors Narrow(const Tensors& x, int64_t begin, int64_t count) {
  return Map(x, [&](const at::Tensor& t) { return t.narrow(2, begin, count); });
}
Tensors Rows(const Tensors& x, int64_t begin, int64_t count) {
  return Map(x, [&](const at::Tensor& t) { return t.narrow(0, begin, count); });
}
Tensors Cast(const Tensors& x, at::ScalarType dtype) {
  return Map(x, [&](const at::Tensor& t) { return t.to(dtype); });
}
Tensors Leaves(const Tensors& x) {
  return Map(x, [](const at::Tensor& t) { return t.detach().requires_grad_(true); });
}
Tensors Joined(const Tensors& a, const Tensors& b) {
  Tensors out;
  for (size_t i = 0; i < a.size(); ++i) out.push_back(at::cat({a[i], b[i]}, 2));
  return out;
}

Tensors HeadsLast(const Tensors& x) {
  return Map(x, [](const at::Tensor& t) {
    const int64_t columns = t.size(1) * t.size(3);
    const at::Tensor memory =
        at::full({t.size(0), t.size(2), columns + 3}, std::nan(""), t.options());
    const at::Tensor view = memory.narrow(2, 0, columns)
                                .view({t.size(0), t.size(2), t.size(1), t.size(3)})
                                .transpose(1, 2);
    view.copy_(t.detach());
    return view;
  });
}

at::Tensor LengthsOf(const std::vector<int64_t>& lengths) { return at::tensor(lengths, at::kLong); }

at::Tensor StartsAt(int64_t batch, int64_t length,
                    const std::vector<std::pair<int64_t, int64_t>>& at) {
  const at::Tensor starts = at::zeros({batch, length}, at::kBool);
  for (const auto& [row, token] : at) starts.select(0, row).select(0, token).fill_(true);
  return starts;
}

at::Tensor Whole(Mechanism& m, Form form, const Tensors& queries, const Tensors& x,
                 const ops::Mask& mask) {
  if (form == Form::kBidirectional) return m.Bidirectional(x, mask);
  State state = m.EmptyState(x[0].size(0), x[0].options().requires_grad(false));
  if (form == Form::kCausal) return m.Extend(x, state, mask);
  m.Write(x, state, mask);
  return m.Read(queries, state);
}

at::Tensor Pieces(Mechanism& m, const Tensors& x, const std::vector<int64_t>& cuts,
                  const ops::Mask& mask, State* state_out) {
  State state = m.EmptyState(x[0].size(0), x[0].options().requires_grad(false));
  Tensors outs;
  for (size_t i = 0; i + 1 < cuts.size(); ++i) {
    const int64_t begin = cuts[i], count = cuts[i + 1] - begin;
    outs.push_back(m.Extend(Narrow(x, begin, count), state, mask.Narrow(begin, count)));
  }
  if (state_out) *state_out = state;
  return at::cat(outs, 2);
}

std::vector<int64_t> EachToken(int64_t length) {
  std::vector<int64_t> cuts;
  for (int64_t t = 0; t <= length; ++t) cuts.push_back(t);
  return cuts;
}

std::vector<Document> DocumentsOf(const ops::Mask& mask, int64_t batch, int64_t length) {
  std::vector<Document> documents;
  for (int64_t b = 0; b < batch; ++b) {
    const int64_t end = mask.lengths ? mask.lengths->select(0, b).item<int64_t>() : length;
    for (int64_t t = 0; t < end; ++t) {
      if (t == 0 || (mask.starts && mask.starts->select(0, b).select(0, t).item<bool>()))
        documents.push_back({b, t, 0});
      ++documents.back().count;
    }
  }
  return documents;
}

at::Tensor DefinitionOf(Subject& subject, Form form, const Tensors& x, const ops::Mask& mask) {
  const int64_t batch = x[0].size(0), length = x[0].size(2);
  const at::Tensor out = at::zeros({batch, subject.heads(), length, subject.width()}, at::kDouble);
  for (const Document& d : DocumentsOf(mask, batch, length)) {
    const Tensors alone = Narrow(Rows(x, d.row), d.begin, d.count);
    out.narrow(0, d.row, 1)
        .narrow(2, d.begin, d.count)
        .copy_(subject.Definition(form, alone, alone));
  }
  return out;
}

Tensors Gradients(const at::Tensor& loss, const Tensors& x) {
  if (!loss.requires_grad()) return Map(x, [](const at::Tensor& t) { return at::zeros_like(t); });
  Tensors g = torch::autograd::grad({loss}, x, {}, true, false, true);
  for (size_t i = 0; i < g.size(); ++i) {
    if (!g[i].defined()) g[i] = at::zeros_like(x[i]);
  }
  return g;
}

}  // namespace cistern::verify
