#include "cistern/nn/attention_layer.h"

#include <ATen/ATen.h>

#include <algorithm>

#include "cistern/base/error.h"
#include "cistern/nn/attention_observer.h"
#include "cistern/nn/full_precision.h"
#include "cistern/nn/memory_attention.h"
#include "cistern/nn/padding_reads.h"
#include "cistern/nn/positions.h"
#include "cistern/ops/dropout.h"
#include "cistern/ops/linear_product.h"
#include "cistern/ops/rotary.h"
#include "cistern/ops/short_conv.h"
#include "cistern/ops/tensor_rows.h"
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

const std::string& MapName(const Projection& p) { return p.map.empty() ? p.name : p.map; }

// A map that the source shares with tokens of the model's own width.
void CheckSharedMaps(const Mechanism& made, int64_t source_dim) {
  const int64_t width = made.dims().Model();
  if (source_dim == 0 || source_dim == width) return;
  for (const Projection& key : made.Projections()) {
    if (key.side != Side::kKey || key.identity) continue;
    for (const Projection& p : made.Projections()) {
      if (p.side != Side::kKey && !p.identity && MapName(p) == MapName(key))
        FailUsage("[", made.info().name, "] has one map, ", MapName(key),
                  "_proj, for the source and for another input, so the source's width ", source_dim,
                  " has to be dim=", width,
                  "; give each a map of its own (luna: sharing=none), or use another mechanism");
    }
  }
}

}  // namespace

std::shared_ptr<Mechanism> MakeMechanism(const AttentionLayerOptions& options) {
  const MechanismInfo& info = FindMechanism(options.mechanism);
  AttentionDims dims = options.dims;
  dims.cross = options.form == Form::kCross;
  dims.relative = options.positions == PositionKind::kRelative;
  if (dims.dim % dims.heads != 0)
    FailUsage(dims.model > 0 ? "qkv_dim=" : "dim=", dims.dim,
              " is not divisible by heads=", dims.heads);
  RequireForm(info, options.form);
  if (!info.Fits(options.positions)) {
    std::string fitting;
    for (const std::string& p : info.PositionNames()) fitting += (fitting.empty() ? "" : ", ") + p;
    FailUsage("positions=", NameOf(options.positions, PositionKinds()), " do not fit mechanism ",
              info.name, "; model.positions may be ", fitting);
  }
  if (dims.relative && dims.cross) {
    FailUsage(
        "relative positions are of self attention: the target's tokens and the source's "
        "count apart; use positions=none");
  }
  if (dims.Model() != dims.dim && info.memory != MemoryUse::kNone && !info.MakesLatents()) {
    FailUsage("[", info.name, "] has a memory as wide as the model, so qkv_dim=", dims.dim,
              " has to be dim=", dims.Model(), "; leave qkv_dim out, or use another mechanism");
  }
  if (options.positions == PositionKind::kRotary && (dims.dim / dims.heads) % 2 != 0) {
    FailUsage("rotary positions need an even head width, got dim/heads=", dims.dim / dims.heads);
  }
  if (options.conv > 0 && options.form != Form::kCausal) {
    FailUsage("conv=", options.conv, " is a causal convolution; the ", FormName(options.form),
              " form has none: set conv=0");
  }
  const std::shared_ptr<Mechanism> made = info.Make(options.mechanism_options, dims);
  const std::string refusal = made->FormRefusal(options.form);
  if (!refusal.empty()) FailUsage("[", info.name, "] has no ", refusal);
  for (const Projection& p : made->Projections()) {
    if (p.OfTokens() && p.normalised != made->Projections()[0].normalised)
      FailUsage("[", options.mechanism,
                "] some of its projections take tokens of length one and some as they are; give "
                "all head groups the same");
    if (p.side == Side::kKey && p.identity && options.source_dim > 0 &&
        options.source_dim != dims.dim) {
      FailUsage("[", info.name, "] takes the source as it is, so the source's width ",
                options.source_dim, " has to be dim=", dims.dim, "; use another mechanism");
    }
    if (p.identity && p.width != dims.Model())
      FailUsage("[", info.name, "] takes the stream as it is, so qkv_dim=", p.width,
                " has to be dim=", dims.Model(), "; leave qkv_dim out");
  }
  CheckSharedMaps(*made, options.source_dim);
  return made;
}

std::shared_ptr<AttentionLayer> MakeAttentionLayer(AttentionLayerOptions options) {
  if (options.first) options.dims.first = &options.first->mechanism();
  const std::shared_ptr<Mechanism> mechanism = MakeMechanism(options);
  if (mechanism->memory_mechanism()) return std::make_shared<MemoryAttention>(options, mechanism);
  return std::shared_ptr<AttentionLayer>(new AttentionLayer(options, mechanism));
}

AttentionLayer::AttentionLayer(const AttentionLayerOptions& options,
                               std::shared_ptr<Mechanism> mechanism)
    : options_(options), mechanism_(register_module("core", std::move(mechanism))) {
  options_.dims = mechanism_->dims();  // which may have heads of its own
  const AttentionDims& dims = options_.dims;
  for (const Projection& p : mechanism_->Projections()) AddProjection(p);
  if (options.tokens_out && attends())
    out_ = register_module(
        "o_proj", std::make_shared<Linear>(dims.dim, dims.Model(), options.bias, options.out_std));
  if (options.conv > 0) conv_ = {"conv", mechanism_->StateNames().size()};
  if (!FoldRefusal().empty()) return;
  after_maps_ = mechanism_->folding()->AfterMaps();
  const std::vector<Projection>& after = after_maps_->Projections();
  for (size_t i = 0; i < after.size(); ++i) tokens_[i].folded_width = after[i].width;
}

void AttentionLayer::AddProjection(Projection p) {
  if (p.heads == 0) p.heads = options_.dims.heads;
  std::vector<Mapped>& mapped = p.side == Side::kMemory   ? memory_
                                : p.side == Side::kPacked ? packed_
                                                          : tokens_;
  Mapped m{p, nullptr, {}};
  const std::string& name = MapName(p);
  // A map that only the tokens' reading would need is not made where nothing reads; another that
  // shares it makes it.
  m.needed = options_.tokens_out || (p.side != Side::kQuery && p.side != Side::kPacked);
  if (m.needed && !p.identity) {
    m.map = p.tied && options_.first ? options_.first->FindMap(name) : FindMap(name);
    if (!m.map)
      m.map = register_module(
          name + "_proj",
          std::make_shared<Linear>(p.side == Side::kKey && options_.source_dim > 0
                                       ? options_.source_dim
                                       : options_.dims.Model(),
                                   p.width, p.bias.value_or(options_.bias), options_.init_std));
  }
  if (options_.conv > 0 && p.OfTokens())
    m.filter = register_module(p.name + "_conv",
                               std::make_shared<ShortConvolution>(p.width, options_.conv))
                   ->weight;
  mapped.push_back(m);
}

std::shared_ptr<Linear> AttentionLayer::FindMap(const std::string& name) const {
  for (const std::vector<Mapped>* mapped : {&tokens_, &memory_, &packed_}) {
    for (const Mapped& m : *mapped) {
      if (m.map && MapName(m.projection) == name) return m.map;
    }
  }
  return nullptr;
}

bool AttentionLayer::ReadsByMaps() const {
  return std::all_of(tokens_.begin(), tokens_.end(), [](const Mapped& m) {
    return !m.needed || (m.map && !m.projection.normalised);
  });
}

State AttentionLayer::EmptyState(int64_t batch, const at::TensorOptions& options) const {
  return StateForm(batch, options, [](const std::string&) { return false; });
}

State AttentionLayer::StateForm(int64_t batch, const at::TensorOptions& options,
                                const std::function<bool(const std::string&)>& has) const {
  State state = mechanism_->StateForm(batch, options, has);
  if (options_.conv > 0 && attends())
    state.tensors.push_back({conv_.name, EmptyConv(batch, options)});
  return state;
}

at::Tensor AttentionLayer::EmptyConv(int64_t batch, const at::TensorOptions& options) const {
  int64_t channels = 0;
  for (const Mapped& m : tokens_) channels += m.projection.width;
  return at::zeros({batch, options_.conv - 1, channels}, options);
}

int64_t AttentionLayer::StateBytes(int64_t batch, int64_t tokens, const at::TensorOptions& options,
                                   bool decodes) const {
  const int64_t conv =
      options_.conv > 0 ? int64_t(EmptyConv(batch, options.device(at::kMeta)).nbytes()) : 0;
  return mechanism_->StateBytes(batch, tokens, options, decodes) + conv;
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
  for (const Joints* joints : {&joined_, &joined_query_, &joined_key_}) {
    joints->maps.Clear();
    joints->filters.Clear();
  }
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
  const bool biased = std::any_of(mapped.begin(), mapped.end(),
                                  [](const Mapped* m) { return m->map->bias.defined(); });
  for (const Mapped* m : mapped) {
    const at::Tensor &weight = m->map->weight, &bias = m->map->bias;
    weights.push_back(weight);
    if (biased)
      biases.push_back(bias.defined() ? bias : at::zeros({weight.size(0)}, weight.options()));
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

// Whether what the maps give may stay in bfloat16 up to the core.
bool AttentionLayer::TakesBFloat16(Form form) const {
  const bool normalised = std::any_of(tokens_.begin(), tokens_.end(), [](const Mapped& m) {
    return m.needed && m.projection.normalised;
  });
  return mechanism_->TakesBFloat16(form) && !normalised && !Folds() && !AttentionObserver::Active();
}

namespace {

const at::Tensor& TableFor(const Stream& stream, int64_t width, at::ScalarType type) {
  auto& [positions, table] = *stream.rotary;
  if (!positions.is_same(stream.positions) || table.size(2) != width ||
      table.scalar_type() != type) {
    table = RotaryTable(stream.positions, width, type);
    positions = stream.positions;
  }
  return table;
}

}  // namespace

// All projections of the tokens in one product (and one convolution), then split into heads: views,
// no copies.
std::vector<at::Tensor> AttentionLayer::Project(const Stream& stream, State* state,
                                                std::optional<Side> side) const {
  const bool folds = Folds(), causal = state && !side;
  const auto OfLengthOne = [](const at::Tensor& x) {  // [B,T,D]; a row of zeros stays one
    return x / at::linalg_vector_norm(x, 2, {2}, true).clamp_min(1e-12);
  };
  const auto wanted = [&](const Mapped& m) {
    return m.needed && (!side || m.projection.side == *side);
  };
  std::vector<const Mapped*> mapped;
  std::vector<at::Tensor> filters, parts;
  std::vector<int64_t> widths;
  at::Tensor itself = stream.x;
  for (const Mapped& m : tokens_) {
    if (!m.map || !wanted(m)) continue;
    mapped.push_back(&m);
    widths.push_back(folds ? m.folded_width : m.projection.width);
    if (m.filter.defined()) filters.push_back(m.filter);
  }
  if (!mapped.empty()) {
    const Joints& joints = !side ? joined_ : *side == Side::kQuery ? joined_query_ : joined_key_;
    const FoldedMap::Map map = Joined(mapped, joints.maps);
    const at::Tensor given = mapped[0]->projection.normalised ? OfLengthOne(stream.x) : stream.x;
    at::Tensor y = ops::LinearProduct(given, map.weight, map.bias);
    const bool stays = !side && y.scalar_type() == at::kBFloat16 &&
                       TakesBFloat16(causal ? Form::kCausal : Form::kBidirectional);
    y = stays ? y : y.to(map.weight.scalar_type());  // InFullPrecision
    itself = itself.to(y.scalar_type());
    if (!filters.empty()) {
      const auto join = [&] { return FoldedMap::Map{at::cat(filters), {}}; };
      const at::Tensor filter = is_training() || at::GradMode::is_enabled()
                                    ? join().weight
                                    : joints.filters.Get(filters, join).weight;
      auto [convolved, after] = ops::ShortConv(y, filter, (*state)[conv_], stream.mask);
      y = convolved;
      (*state)[conv_] = after;
    }
    parts = y.split_with_sizes(
        widths, 2);  // one gradient for all parts, where narrow makes one of full size for each
  }
  std::vector<at::Tensor> x;
  for (const Mapped& m : tokens_) {
    const Projection& p = m.projection;
    const auto at = size_t(std::find(mapped.begin(), mapped.end(), &m) - mapped.begin());
    x.push_back(!wanted(m) ? at::Tensor() : Split(m.map ? parts[at] : itself, p.heads));
    if (options_.positions != PositionKind::kRotary || !p.rotary || !wanted(m)) continue;
    x.back() =
        ops::Rotary(x.back(), TableFor(stream, x.back().size(3), ops::ComputeTypeOf(x.back())));
  }
  return x;
}

void AttentionLayer::Project(const std::vector<Mapped>& maps, const at::Tensor& memory,
                             std::vector<at::Tensor>* x) const {
  for (const Mapped& m : maps) {
    x->push_back(Split(m.map ? m.map->Forward(memory).to(m.map->weight.scalar_type())  // not bf16
                             : memory,
                       m.projection.heads));
  }
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
  AttentionObserver* const observer = AttentionObserver::Active();
  const Handles before = observer && handles ? *handles : Handles();
  const at::Tensor heads = InFullPrecision(
      [&] { return Running().Attend(form, x, state, mask, handles ? *handles : none); });
  if (observer) observer->Attended({this, options_, Running(), form, x, mask, before, heads});
  const at::Tensor y = out_->Forward(Merge(heads));
  return ops::Dropout(y, mechanism_->OutputDropout(form), is_training());
}

namespace {

ops::TokenMap RealTokensFirst(const Mechanism& mechanism, const Stream& stream) {
  CheckMask(StrCat("[", mechanism.info().name, "]"), stream.mask, stream.x.size(0),
            stream.x.size(1));
  return mechanism.RealTokensFirst(stream.mask);
}

Stream Moved(const Stream& stream, const ops::TokenMap& map) {
  Stream moved = stream;
  moved.mask = map.mask();
  moved.x = map.Move(stream.x, 1);
  if (stream.positions.defined())
    moved.positions = map.Move(stream.positions.expand({stream.x.size(0), -1}), 1);
  return moved;
}

}  // namespace

at::Tensor AttentionLayer::InitialMemory(int64_t rows) const {
  const MemoryMechanism* const core = mechanism_->memory_mechanism();
  return core ? core->InitialMemoryOf(rows) : mechanism_->InitialMemory();
}

at::Tensor AttentionLayer::Extend(const Stream& stream, State& state, Handles* handles) {
  if (stream.mask.valid) {
    const ops::TokenMap front = RealTokensFirst(*mechanism_, stream);
    return front.Back(Extend(Moved(stream, front), state, handles), 1);
  }
  std::vector<at::Tensor> x = Project(stream, &state);
  if (!mechanism_->dims().memory_given) Project(memory_, InitialMemory(stream.x.size(0)), &x);
  return Attend(Form::kCausal, x, &state, stream.mask, handles);
}

void AttentionLayer::Write(const Stream& source, State& state) {
  if (source.mask.valid) return Write(Moved(source, RealTokensFirst(*mechanism_, source)), state);
  std::vector<at::Tensor> x = Project(source, nullptr, Side::kKey);
  if (!memory_.empty())
    Project(memory_, source.memory.defined() ? source.memory : InitialMemory(source.x.size(0)), &x);
  InFullPrecision([&] { Running().Write(x, state, source.mask); });
  if (AttentionObserver* observer = AttentionObserver::Active())
    observer->Written(*this, Running(), x, source.mask);
}

void AttentionLayer::GiveMemory(const at::Tensor& memory, const at::Tensor& readable,
                                State& state) {
  MemoryMechanism* const core = mechanism_->memory_mechanism();
  CISTERN_CHECK(core, "[", mechanism_->info().name, "] has no memory");
  std::vector<at::Tensor> heads;
  Project(memory_, memory, &heads);
  core->GiveMemory(heads, readable, state);
}

at::Tensor AttentionLayer::Packed(const State&) const {
  throw Error(StrCat("[", mechanism_->info().name, "] packs no memory"));
}

at::Tensor AttentionLayer::ReadableSlots(const State&) const {
  throw Error(StrCat("[", mechanism_->info().name, "] packs no memory"));
}

at::Tensor AttentionLayer::Read(const Stream& target, State& state, Handles* handles) {
  return Attend(Form::kCross, Project(target, nullptr, Side::kQuery), &state, target.mask, handles);
}

AttentionLayer::Attended AttentionLayer::MovedToFront(const Stream& stream, Handles* handles) {
  const ops::TokenMap front = RealTokensFirst(*mechanism_, stream);
  Attended attended = Bidirectional(Moved(stream, front), handles);
  if (attended.tokens.defined()) attended.tokens = front.Back(attended.tokens, 1);
  return attended;
}

// Write all, read all, where padding is among the queries.
AttentionLayer::Attended AttentionLayer::WriteAndRead(const Stream& stream, Handles* handles) {
  RequirePaddingReads(*mechanism_);
  const std::vector<at::Tensor> x = Project(stream, nullptr);
  State state = Running().EmptyState(stream.x.size(0), x[0].options().requires_grad(false));
  InFullPrecision([&] { Running().Write(x, state, stream.mask); });
  if (AttentionObserver* observer = AttentionObserver::Active())
    observer->Written(*this, Running(), x, stream.mask);
  return {Attend(Form::kCross, x, &state, {}, handles), {}};
}

AttentionLayer::Attended AttentionLayer::Bidirectional(const Stream& stream, Handles* handles) {
  if (stream.mask.valid) return MovedToFront(stream, handles);
  if (stream.padding_reads && stream.mask.lengths) return WriteAndRead(stream, handles);
  return {Attend(Form::kBidirectional, Project(stream, nullptr), nullptr, stream.mask, handles),
          {}};
}

}  // namespace cistern
