#include <ATen/ATen.h>

#include <set>

#include "cistern/attention/head_groups.h"
#include "cistern/nn/attention_layer.h"
#include "cistern/nn/memory_attention.h"
#include "cistern/verify/properties.h"

namespace cistern::verify {
namespace {

// A layer whose weights are looked up by the names that its mechanism declares.
class LayerParts {
 public:
  explicit LayerParts(AttentionLayer& layer) : layer_(layer), named_(layer.named_parameters()) {}

  at::Tensor Map(const std::string& name, const at::Tensor& x) {
    used_.insert(name + ".weight");
    used_.insert(name + ".bias");
    const at::Tensor y = at::matmul(x, named_[name + ".weight"].t());
    const at::Tensor* bias = named_.find(name + ".bias");
    return bias ? y + *bias : y;
  }
  // [B,T,D] -> [B,H,T,w]
  at::Tensor Projected(const Projection& p, const at::Tensor& stream) {
    at::Tensor x = stream;
    if (p.normalised) x = x / x.square().sum(-1, true).sqrt();
    if (!p.identity) x = Map((p.map.empty() ? p.name : p.map) + "_proj", x);
    const int64_t heads = p.heads > 0 ? p.heads : layer_.mechanism().dims().heads;
    return x.reshape({x.size(0), x.size(1), heads, x.size(2) / heads}).permute({0, 2, 1, 3});
  }
  Tensors OfTokens(const at::Tensor& queries, const at::Tensor& keys) {
    Tensors x;
    for (const Projection& p : layer_.mechanism().Projections()) {
      if (p.OfTokens()) x.push_back(Projected(p, p.side == Side::kQuery ? queries : keys));
    }
    return x;
  }
  // Of the memory or of what was packed, [B,M,D].
  Tensors OfSlots(Side side, const at::Tensor& slots) {
    Tensors x;
    for (const Projection& p : layer_.mechanism().Projections()) {
      if (p.side == side) x.push_back(Projected(p, slots));
    }
    return x;
  }
  // The first parameter that nothing here asked for; empty: there is none.
  std::string Unused() const {
    for (const auto& p : named_) {
      if (!p.key().starts_with("core.") && !used_.contains(p.key())) return p.key();
    }
    return "";
  }

 private:
  AttentionLayer& layer_;
  torch::OrderedDict<std::string, at::Tensor> named_;
  std::set<std::string> used_;
};

at::Tensor Merged(const at::Tensor& heads) {  // [B,H,T,d] -> [B,T,D]
  return heads.permute({0, 2, 1, 3}).reshape({heads.size(0), heads.size(2), -1});
}

// The layer by hand: projections, core, output map. Cores with a memory are run by their verbs,
// since a definition knows no maps of the memory; the others by their definition.
at::Tensor ByHand(LayerParts& parts, Mechanism& m, Form form, const at::Tensor& queries,
                  const at::Tensor& x) {
  MemoryMechanism* memory = m.memory_mechanism();
  if (!memory) {
    const Tensors q = parts.OfTokens(queries, queries), k = parts.OfTokens(x, x);
    return parts.Map("o_proj", Merged(m.Definition(form, q, k)));
  }
  Tensors all = parts.OfTokens(form == Form::kCross ? queries : x, x);
  const size_t tokens = all.size();
  for (const at::Tensor& t : parts.OfSlots(Side::kMemory, m.InitialMemory())) all.push_back(t);
  State state = m.EmptyState(x.size(0), x.options().requires_grad(false));
  if (form == Form::kCausal) return parts.Map("o_proj", Merged(m.Extend(all, state, {})));
  at::Tensor heads;
  if (form == Form::kCross) {
    m.Write(all, state, {});
    heads = memory->Packed(state).to(x.scalar_type());
  } else {
    heads = memory->Pack(all, {});
  }
  at::Tensor packed = Merged(heads);
  using Output = MemoryMechanism::PackedOutput;
  if (memory->packed_output() == Output::kOwn) packed = parts.Map("packed_o_proj", packed);
  if (memory->packed_output() == Output::kShared) packed = parts.Map("o_proj", packed);
  if (form == Form::kBidirectional) packed = memory->Update(all, packed, {});
  const Tensors read = parts.OfSlots(Side::kPacked, packed);
  all.resize(tokens);
  if (form == Form::kBidirectional)
    return parts.Map("o_proj", Merged(memory->Unpack(all, read, {})));
  all.insert(all.end(), read.begin(), read.end());
  return parts.Map("o_proj", Merged(m.Read(all, state)));
}

// As MakeAttentionLayer, of a mechanism that need not be in the registry.
class PlainLayer : public AttentionLayer {
 public:
  PlainLayer(const AttentionLayerOptions& options, std::shared_ptr<Mechanism> mechanism)
      : AttentionLayer(options, std::move(mechanism)) {}
};
std::shared_ptr<AttentionLayer> MakeLayer(const AttentionLayerOptions& o,
                                          const MechanismInfo& info) {
  AttentionDims dims = o.dims;
  dims.cross = o.form == Form::kCross;
  const std::shared_ptr<Mechanism> mechanism = info.Make(o.mechanism_options, dims);
  if (mechanism->memory_mechanism()) return std::make_shared<MemoryAttention>(o, mechanism);
  return std::make_shared<PlainLayer>(o, mechanism);
}

at::Tensor RunLayer(AttentionLayer& layer, Form form, const Stream& queries, const Stream& x) {
  if (form == Form::kBidirectional) return layer.Bidirectional(x).tokens;
  State state = layer.EmptyState(x.x.size(0), x.x.options().requires_grad(false));
  if (form == Form::kCausal) return layer.Extend(x, state);
  layer.Write(x, state);
  return layer.Read(queries, state);
}

}  // namespace

Outcome CheckLayer(Subject& subject, const Settings& settings) {
  const MechanismInfo& info = subject.info();
  Meter meter;
  for (const Form form : {Form::kBidirectional, Form::kCausal, Form::kCross}) {
    if (!settings.Has(form) || !subject.Has(form)) continue;
    for (const bool bias : {false, true}) {
      AttentionLayerOptions o;
      o.mechanism = info.name;
      o.mechanism_options = subject.options();
      o.dims = subject.dims();
      o.form = form;
      o.bias = bias;
      o.init_std = o.out_std = 0.4;
      const std::shared_ptr<AttentionLayer> layer = MakeLayer(o, info);
      layer->eval();
      {
        at::NoGradGuard guard;
        for (const auto& p : layer->named_parameters()) {
          if (p.key().ends_with("_proj.bias")) p.value().normal_();  // at first 0
        }
      }
      layer->to(at::kDouble);
      Stream x, queries;
      x.x = Normal({2, 11, o.dims.dim});
      queries.x = Normal({2, 4, o.dims.dim});
      auto& m = const_cast<Mechanism&>(layer->mechanism());
      LayerParts parts(*layer);
      const at::Tensor want = ByHand(parts, m, form, form == Form::kCross ? queries.x : x.x, x.x);
      const auto where = StrCat(FormName(form), bias ? ", with biases" : "");
      meter.True(parts.Unused().empty(), where,
                 ", a parameter that it does not need: ", parts.Unused());
      meter.Close(RunLayer(*layer, form, queries, x), want, 10 * subject.Tolerance(at::kDouble),
                  where);
      at::NoGradGuard guard;  // where maps are joined and folded
      meter.Close(RunLayer(*layer, form, queries, x), want, 10 * subject.Tolerance(at::kDouble),
                  where, ", without gradients");
    }
  }
  return meter.result();
}

Outcome CheckCopying(Subject& subject, const Settings& settings) {
  const MechanismInfo& info = subject.info();
  if (!info.copies_scores) return NotApplicable("it takes over no scores");
  Meter meter;
  at::NoGradGuard guard;
  int64_t copied = 0;
  for (const Projection& p : subject.mechanism().Projections()) {
    if (p.name == "copied_q") copied = p.heads;
  }
  AttentionDims first = subject.dims(), next = subject.dims();
  first.copied = 0, first.copied_on = copied;
  next.copied = copied, next.layer = 1;
  const auto made = [&](const AttentionDims& dims) {
    const std::shared_ptr<Mechanism> m = info.Make(subject.options(), dims);
    m->eval();
    return m;
  };
  const std::shared_ptr<Mechanism> a = made(first), b = made(next);
  const auto inputs = [&](const Mechanism& m, int64_t length) {
    Tensors x;
    for (const Projection& p : m.Projections())
      x.push_back(Normal({2, p.heads > 0 ? p.heads : m.dims().heads, length, subject.width()}));
    return x;
  };
  // What the core alone would be given: the new heads of b, and the first ones of a.
  const auto alone = [&](const Tensors& of_a, const Tensors& of_b) {
    const auto named = [](const Mechanism& m, const Tensors& x, const std::string& name) {
      for (size_t i = 0; i < x.size(); ++i) {
        if (m.Projections()[i].name == name) return x[i];
      }
      return at::Tensor();
    };
    Tensors x;
    for (const Projection& p : subject.mechanism().Projections()) {
      const bool taken = p.name.starts_with("copied_");
      x.push_back(taken ? named(*a, of_a, p.name.substr(7)).narrow(1, 0, copied)
                        : named(*b, of_b, p.name));
    }
    return x;
  };
  const double tolerance = subject.Tolerance(at::kDouble);
  const int64_t length = 12;
  const Tensors xa = inputs(*a, length), xb = inputs(*b, length), qa = inputs(*a, 5),
                qb = inputs(*b, 5);
  const Tensors x = alone(xa, xb), q = alone(qa, qb);
  for (const Form form : {Form::kBidirectional, Form::kCausal, Form::kCross}) {
    if (!settings.Has(form) || !subject.Has(form)) continue;
    const at::Tensor want = subject.Definition(form, form == Form::kCross ? q : x, x);
    State sa = a->EmptyState(2, x[0].options()), sb = b->EmptyState(2, x[0].options());
    Tensors out;
    Handles handles;
    if (form == Form::kCross) {
      a->Write(xa, sa, {});
      b->Write(xb, sb, {});
      a->Attend(form, qa, &sa, {}, handles);
      out.push_back(b->Attend(form, qb, &sb, {}, handles));
    } else {
      const std::vector<int64_t> cuts = form == Form::kCausal
                                            ? std::vector<int64_t>{0, 5, 6, length}
                                            : std::vector<int64_t>{0, length};
      for (size_t i = 0; i + 1 < cuts.size(); ++i) {
        const int64_t begin = cuts[i], count = cuts[i + 1] - begin;
        handles.clear();
        a->Attend(form, Narrow(xa, begin, count), &sa, {}, handles);
        out.push_back(b->Attend(form, Narrow(xb, begin, count), &sb, {}, handles));
      }
    }
    meter.Close(at::cat(out, 2), want, tolerance, FormName(form), ", ", copied, " heads copied");
  }
  return meter.result();
}

Outcome CheckDeclared(Subject& subject, const Settings& settings) {
  Meter meter;
  at::NoGradGuard guard;
  Mechanism& m = subject.In(at::kDouble);
  bool any = false;
  if (m.SeesPadding() && settings.Has(Form::kBidirectional)) {
    any = true;
    const Tensors x = subject.Inputs(2, 12), longer = Joined(x, subject.Inputs(2, 8));
    const ops::Mask mask = {LengthsOf({12, 5}), {}};
    const at::Tensor got = m.Bidirectional(x, mask), more = m.Bidirectional(longer, mask);
    meter.True(got[1].narrow(1, 5, 7).abs().sum().item<double>() > 0,
               "padding that takes part reads nothing");
    meter.True(RelativeRms(more.narrow(2, 0, 12), got) > 1e-6, "more padding changes nothing");
    if (!m.SeesBatch())
      meter.Close(got.narrow(0, 0, 1),
                  subject.Definition(Form::kBidirectional, Rows(x, 0), Rows(x, 0)),
                  subject.Tolerance(at::kDouble), "a row without padding beside one with it");
  }
  if (m.SeesBatch() && settings.Has(Form::kBidirectional)) {
    any = true;
    const Tensors x = subject.Inputs(2, 12);
    Tensors other;
    for (const at::Tensor& t : x)
      other.push_back(at::cat({t.narrow(0, 0, 1), t.narrow(0, 1, 1) * 3}));
    meter.True(!at::equal(m.Bidirectional(other, {})[0], m.Bidirectional(x, {})[0]),
               "another row of the batch changes nothing");
  }
  const auto refuses = [](const std::function<void()>& run) {
    try {
      run();
    } catch (const UsageError&) {
      return true;
    }
    return false;
  };
  if (m.WritesAtOnce() && settings.Has(Form::kCross) && subject.Has(Form::kCross)) {
    any = true;
    const Tensors x = subject.Inputs(2, 12);
    State state = m.EmptyState(2, x[0].options());
    m.Write(Narrow(x, 0, 7), state, {});
    meter.True(refuses([&] { m.Write(Narrow(x, 7, 5), state, {}); }),
               "a second piece of the source is not refused");
  }
  for (const Form form : {Form::kBidirectional, Form::kCausal, Form::kCross}) {
    if (!settings.Has(form) || !subject.info().Supports(form) || m.FormRefusal(form).empty())
      continue;
    any = true;
    AttentionLayerOptions o;
    o.mechanism = subject.info().name;
    o.mechanism_options = subject.options();
    o.dims = subject.dims();
    o.form = form;
    meter.True(refuses([&] { MakeMechanism(o); }), "a layer of the ", FormName(form),
               " form is not refused");
  }
  return any ? meter.result() : NotApplicable("its options declare nothing of the kind");
}

}  // namespace cistern::verify
