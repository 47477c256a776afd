#include "cistern/nn/attention_layer.h"

#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <algorithm>

#include "cistern/base/error.h"
#include "cistern/nn/positions.h"
#include "cistern/ops/short_conv.h"
#include "cistern/tensors/device.h"

namespace cistern {
namespace {

// The filter of one projection, [width, taps]; begins as the identity: 1 on the token itself, small
// noise on the tokens before it.
class ShortConvolution : public torch::nn::Module {
 public:
  ShortConvolution(int64_t width, int64_t taps) {
    at::Tensor filter = at::randn({width, taps}) * 0.02;
    filter.select(1, taps - 1).add_(1.0);
    weight = register_parameter("weight", ToActiveDevice(filter));
  }
  at::Tensor weight;
};

// Under autocast the linear maps of a layer run in bfloat16; what its core computes runs in full
// precision, the core's own products too.
template <class F>
auto InFullPrecision(F&& core) {
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  return core();
}

}  // namespace

std::shared_ptr<Mechanism> MakeMechanism(const AttentionLayerOptions& options) {
  const MechanismInfo& info = FindMechanism(options.mechanism);
  AttentionDims dims = options.dims;
  dims.cross = options.form == Form::kCross;
  if (dims.dim % dims.heads != 0)
    FailUsage("dim=", dims.dim, " is not divisible by heads=", dims.heads);
  RequireForm(info, options.form);
  if (std::find(info.positions.begin(), info.positions.end(), options.positions) ==
      info.positions.end()) {
    std::string fitting;
    for (const std::string& p : info.positions) fitting += (fitting.empty() ? "" : ", ") + p;
    FailUsage("positions=", options.positions, " do not fit mechanism ", info.name,
              "; those that do: ", fitting);
  }
  if (options.positions == "rotary" && (dims.dim / dims.heads) % 2 != 0) {
    FailUsage("rotary positions need an even head width, got dim/heads=", dims.dim / dims.heads);
  }
  if (options.conv > 0 && options.form != Form::kCausal) {
    FailUsage("conv=", options.conv, " is a causal convolution; the ", FormName(options.form),
              " form has none: set conv=0");
  }
  const std::shared_ptr<Mechanism> made = info.make(options.mechanism_options, dims);
  for (const Projection& p : made->Projections()) {
    if (p.side == Side::kKey && p.identity && options.source_dim > 0 &&
        options.source_dim != dims.dim) {
      FailUsage("[", info.name, "] takes the source as it is, so the source's width ",
                options.source_dim, " has to be dim=", dims.dim, "; use another mechanism");
    }
  }
  return made;
}

AttentionLayer::AttentionLayer(AttentionLayerOptions options) : options_(options) {
  if (options.first) options.dims.first = options.first->mechanism_.get();
  const AttentionDims& dims = options.dims;
  mechanism_ = register_module("core", MakeMechanism(options));
  memory_mechanism_ = mechanism_->memory_mechanism();
  for (const Projection& p : mechanism_->Projections()) AddProjection(p);
  const auto packed =
      memory_mechanism_ ? memory_mechanism_->packed_output() : MemoryMechanism::PackedOutput::kNone;
  if ((options.tokens_out && attends()) || packed == MemoryMechanism::PackedOutput::kShared)
    out_ = register_module(
        "o_proj", std::make_shared<Linear>(dims.dim, dims.dim, options.bias, options.out_std));
  if (packed == MemoryMechanism::PackedOutput::kOwn)
    packed_out_ = register_module(
        "packed_o_proj",
        std::make_shared<Linear>(dims.dim, dims.dim, options.bias, options.out_std));
  if (packed == MemoryMechanism::PackedOutput::kShared) packed_out_ = out_;
  if (!FoldRefusal().empty()) return;
  after_maps_ = mechanism_->folding()->AfterMaps();
  const std::vector<Projection> after = after_maps_->Projections();
  for (size_t i = 0; i < after.size(); ++i) tokens_[i].folded_width = after[i].width;
}

void AttentionLayer::AddProjection(Projection p) {
  if (p.heads == 0) p.heads = options_.dims.heads;
  std::vector<Mapped>& mapped = p.side == Side::kMemory   ? memory_
                                : p.side == Side::kPacked ? packed_
                                                          : tokens_;
  Mapped m{p, nullptr, {}};
  const std::string name = p.map.empty() ? p.name : p.map;
  // A map that only the tokens' reading would need is not made where nothing reads; another that
  // shares it makes it.
  m.needed = options_.tokens_out || (p.side != Side::kQuery && p.side != Side::kPacked);
  if (m.needed && !p.identity) {
    m.map = p.tied && options_.first ? options_.first->FindMap(name) : FindMap(name);
    if (!m.map)
      m.map = register_module(
          name + "_proj", std::make_shared<Linear>(p.side == Side::kKey && options_.source_dim > 0
                                                       ? options_.source_dim
                                                       : options_.dims.dim,
                                                   p.width, options_.bias, options_.init_std));
  }
  if (options_.conv > 0 && p.OfTokens() && p.convolved)
    m.filter = register_module(p.name + "_conv",
                               std::make_shared<ShortConvolution>(p.width, options_.conv))
                   ->weight;
  mapped.push_back(m);
}

std::shared_ptr<Linear> AttentionLayer::FindMap(const std::string& name) const {
  for (const std::vector<Mapped>* mapped : {&tokens_, &memory_, &packed_}) {
    for (const Mapped& m : *mapped) {
      if (m.map && (m.projection.map.empty() ? m.projection.name : m.projection.map) == name)
        return m.map;
    }
  }
  return nullptr;
}

State AttentionLayer::EmptyState(int64_t batch, const at::TensorOptions& options) const {
  State state = mechanism_->EmptyState(batch, options);
  if (options_.conv > 0 && attends()) state.tensors.push_back({"conv", EmptyConv(batch, options)});
  return state;
}

at::Tensor AttentionLayer::EmptyConv(int64_t batch, const at::TensorOptions& options) const {
  int64_t channels = 0;
  for (const Mapped& m : tokens_) channels += m.projection.convolved ? m.projection.width : 0;
  return at::zeros({batch, options_.conv - 1, channels}, options);
}

int64_t AttentionLayer::StateBytes(int64_t batch, int64_t tokens,
                                   const at::TensorOptions& options) const {
  const int64_t conv =
      options_.conv > 0 ? int64_t(EmptyConv(batch, options.device(at::kMeta)).nbytes()) : 0;
  return mechanism_->StateBytes(batch, tokens, options) + conv;
}

std::string AttentionLayer::TruncateRefusal() const {
  if (!mechanism_->info().truncates)
    return "the state of " + mechanism_->info().name + " does not hold single tokens";
  if (options_.conv > 0)
    return StrCat("of its convolution, conv=", options_.conv, ", only the last inputs are kept");
  return "";
}

std::string AttentionLayer::FoldRefusal() const {
  const FoldingMechanism* folding = mechanism_->folding();
  if (!folding)
    return mechanism_->info().name + " has no map that could be folded into its projections";
  if (options_.conv > 0)
    return StrCat("the convolution, conv=", options_.conv,
                  ", stands between the projections and the map");
  return folding->FoldRefusal();
}

void AttentionLayer::train(bool on) {
  for (FoldedMap* map : {&joined_, &joined_query_, &joined_key_}) map->Clear();
  torch::nn::Module::train(on);
}

bool AttentionLayer::Folds() const {
  return after_maps_ && !is_training() && !at::GradMode::is_enabled();
}

FoldedMap::Map AttentionLayer::Joined(const std::vector<const Mapped*>& mapped,
                                      FoldedMap& kept) const {
  if (is_training() || at::GradMode::is_enabled()) return Join(mapped);
  std::vector<at::Tensor> sources;
  for (const Mapped* m : mapped) sources.insert(sources.end(), {m->map->weight, m->map->bias});
  if (!Folds()) return kept.Get(sources, [&] { return Join(mapped); });
  for (const CoreWeight& w : mechanism_->weights()) sources.push_back(*w.value);
  return kept.Get(sources, [&] { return Fold(mapped); });
}

FoldedMap::Map AttentionLayer::Join(const std::vector<const Mapped*>& mapped) const {
  std::vector<at::Tensor> weights, biases;
  for (const Mapped* m : mapped) {
    weights.push_back(m->map->weight);
    if (m->map->bias.defined()) biases.push_back(m->map->bias);
  }
  return {at::cat(weights), biases.empty() ? at::Tensor() : at::cat(biases)};
}

FoldedMap::Map AttentionLayer::Fold(const std::vector<const Mapped*>& mapped) const {
  std::vector<at::Tensor> weights, biases;
  for (const Mapped* m : mapped) {
    at::Tensor weight = m->map->weight, bias = m->map->bias;
    const auto type = weight.scalar_type();
    const auto then = mechanism_->folding()->FirstMap(size_t(m - tokens_.data()));
    if (then.weight.defined()) {  // [H,w',w] times [H,w,D], in double: rounded once
      const at::Tensor map = then.weight.to(at::kDouble);
      const auto by_head = [&](const at::Tensor& x) {
        return x.to(at::kDouble).reshape({map.size(0), map.size(2), -1});
      };
      const at::Tensor added = then.bias.to(at::kDouble).unsqueeze(2);
      weight = at::matmul(map, by_head(weight)).flatten(0, 1).to(type);
      bias = (bias.defined() ? at::matmul(map, by_head(bias)) + added : added).flatten().to(type);
    }
    weights.push_back(weight);
    biases.push_back(bias.defined() ? bias : at::zeros({weight.size(0)}, weight.options()));
  }
  return {at::cat(weights), at::cat(biases)};
}

// All projections of the tokens in one product (and one convolution), then split into heads: views,
// no copies.
std::vector<at::Tensor> AttentionLayer::Project(const Stream& stream, State* state,
                                                std::optional<Side> side) const {
  const bool folds = Folds();
  const auto wanted = [&](const Mapped& m) {
    return m.needed && (!side || m.projection.side == *side);
  };
  std::vector<const Mapped*> mapped;  // those with a filter first
  std::vector<at::Tensor> filters, parts;
  std::vector<int64_t> widths;
  int64_t filtered = 0;
  for (const bool convolved : {true, false}) {
    for (const Mapped& m : tokens_) {
      if (!m.map || !wanted(m) || m.projection.convolved != convolved) continue;
      mapped.push_back(&m);
      widths.push_back(folds ? m.folded_width : m.projection.width);
      if (!m.filter.defined()) continue;
      filters.push_back(m.filter);
      filtered += widths.back();
    }
  }
  if (!mapped.empty()) {
    const FoldedMap::Map map = Joined(mapped, !side                   ? joined_
                                              : *side == Side::kQuery ? joined_query_
                                                                      : joined_key_);
    at::Tensor y =
        at::linear(stream.x, map.weight,
                   map.bias.defined() ? std::optional<at::Tensor>(map.bias) : std::nullopt);
    if (y.scalar_type() != map.weight.scalar_type())
      y = y.to(map.weight.scalar_type());  // InFullPrecision
    if (filtered > 0) {
      const int64_t rest = y.size(2) - filtered;
      const at::Tensor before = rest > 0 ? y.narrow(2, 0, filtered).contiguous() : y;
      auto [convolved, after] =
          ops::ShortConv(before, at::cat(filters), (*state)["conv"], stream.mask);
      y = rest > 0 ? at::cat({convolved, y.narrow(2, filtered, rest)}, 2) : convolved;
      (*state)["conv"] = after;
    }
    parts = y.split_with_sizes(
        widths, 2);  // one gradient for all parts, where narrow makes one of full size for each
  }
  std::vector<at::Tensor> x;
  for (const Mapped& m : tokens_) {
    const Projection& p = m.projection;
    const auto at = size_t(std::find(mapped.begin(), mapped.end(), &m) - mapped.begin());
    x.push_back(!wanted(m) ? at::Tensor() : Split(m.map ? parts[at] : stream.x, p.heads));
    if (options_.positions == "rotary" && p.rotary && wanted(m))
      x.back() = Rotate(x.back(), stream.positions);
  }
  return x;
}

void AttentionLayer::Project(const std::vector<Mapped>& maps, const at::Tensor& memory,
                             std::vector<at::Tensor>* x) const {
  if (maps.empty()) return;
  const auto type = mechanism_->InitialMemory().scalar_type();  // InFullPrecision
  for (const Mapped& m : maps)
    x->push_back(Split((m.map ? m.map->Forward(memory) : memory).to(type), m.projection.heads));
}

at::Tensor AttentionLayer::Split(const at::Tensor& y, int64_t heads) {
  return y.view({y.size(0), y.size(1), heads, y.size(2) / heads}).transpose(1, 2);
}

at::Tensor AttentionLayer::Merge(const at::Tensor& heads) const {
  return heads.transpose(1, 2).reshape({heads.size(0), heads.size(2), options_.dims.dim});
}

at::Tensor AttentionLayer::Attend(Form form, const std::vector<at::Tensor>& x, State* state,
                                  const ops::Mask& mask, Handles* handles) {
  Handles none;
  return out_->Forward(Merge(InFullPrecision(
      [&] { return Running().Attend(form, x, state, mask, handles ? *handles : none); })));
}

namespace {

Stream Moved(const Stream& stream, const ops::TokenMap& map) {
  Stream moved = stream;
  moved.mask = map.mask();
  moved.x = map.Move(stream.x, 1);
  if (stream.positions.defined())
    moved.positions = map.Move(stream.positions.expand({stream.x.size(0), -1}), 1);
  return moved;
}

}  // namespace

at::Tensor AttentionLayer::Extend(const Stream& stream, State& state, Handles* handles) {
  if (stream.mask.valid) {
    const ops::TokenMap front = mechanism_->RealTokensFirst(stream.mask);
    return front.Back(Extend(Moved(stream, front), state, handles), 1);
  }
  std::vector<at::Tensor> x = Project(stream, &state);
  Project(memory_, mechanism_->InitialMemory(), &x);
  return Attend(Form::kCausal, x, &state, stream.mask, handles);
}

void AttentionLayer::Write(const Stream& source, State& state) {
  if (source.mask.valid)
    return Write(Moved(source, mechanism_->RealTokensFirst(source.mask)), state);
  std::vector<at::Tensor> x = Project(source, nullptr, Side::kKey);
  Project(memory_, mechanism_->InitialMemory(), &x);
  InFullPrecision([&] { Running().Write(x, state, source.mask); });
}

at::Tensor AttentionLayer::Read(const Stream& target, State& state, Handles* handles) {
  std::vector<at::Tensor> x = Project(target, nullptr, Side::kQuery);
  if (memory_mechanism_) {
    const at::Tensor heads =
        Merge(memory_mechanism_->Packed(state)).to(mechanism_->InitialMemory().scalar_type());
    Project(packed_, packed_out_ ? packed_out_->Forward(heads) : heads, &x);
  }
  return Attend(Form::kCross, x, &state, target.mask, handles);
}

AttentionLayer::Attended AttentionLayer::Bidirectional(const Stream& stream, Handles* handles) {
  if (stream.mask.valid) {
    const ops::TokenMap front = mechanism_->RealTokensFirst(stream.mask);
    Attended attended = Bidirectional(Moved(stream, front), handles);
    attended.tokens = front.Back(attended.tokens, 1);
    return attended;
  }
  if (memory_mechanism_) return WithMemory(stream, handles);
  return {Attend(Form::kBidirectional, Project(stream, nullptr), nullptr, stream.mask, handles),
          {}};
}

AttentionLayer::Attended AttentionLayer::WithMemory(const Stream& stream, Handles* handles) {
  std::vector<at::Tensor> x = Project(stream, nullptr);
  if (handles) handles->clear();
  if (stream.mask.starts) {
    FailUsage("[", mechanism_->info().name,
              "] has one memory for each row, and a row of several documents would need one for "
              "each: give each document a row of its own, "
              "with lengths, or use a mechanism without a memory, such as latte");
  }
  const bool handed_on = mechanism_->info().HandsOnMemory() && stream.memory.defined();
  Project(memory_, handed_on ? stream.memory : mechanism_->InitialMemory(), &x);
  const at::Tensor heads =
      Merge(InFullPrecision([&] { return memory_mechanism_->Pack(x, stream.mask); }));
  const at::Tensor mapped =
      packed_out_ ? packed_out_->Forward(heads).to(heads.scalar_type()) : heads;
  const at::Tensor packed =
      InFullPrecision([&] { return memory_mechanism_->Update(x, mapped, stream.mask); });
  if (!options_.tokens_out) return {{}, packed};
  std::vector<at::Tensor> read;
  Project(packed_, packed, &read);
  const at::Tensor y =
      InFullPrecision([&] { return memory_mechanism_->Unpack(x, read, stream.mask); });
  return {out_->Forward(Merge(ZeroPadding(y, stream.mask))), packed};
}

}  // namespace cistern
