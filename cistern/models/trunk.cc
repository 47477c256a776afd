#include "cistern/models/trunk.h"

#include <ATen/ATen.h>
#include <ATen/TensorSubclassLikeUtils.h>
#include <ATen/autocast_mode.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "cistern/attention/token_positions.h"
#include "cistern/base/error.h"
#include "cistern/base/random.h"
#include "cistern/ops/draws.h"
#include "cistern/ops/dropout.h"

namespace cistern {
namespace {

// The blocks of a stack, registered as "0", "1", ...; what a mechanism ties across layers belongs
// to its first block.
std::vector<std::shared_ptr<Block>> AddBlocks(Container& layers, const ModelConfig& config,
                                              Form form) {
  const LayerStack stack = config.Stack(form);
  std::vector<std::shared_ptr<Block>> blocks;
  for (int64_t i = 0; i < stack.layers(); ++i) {
    if (const int64_t owner = stack.TiedTo(i); owner != i) {
      blocks.push_back(blocks[size_t(owner)]);
      continue;
    }
    BlockOptions options = stack.Block(i);
    for (int64_t j = i; j-- > 0;) {
      const Block& earlier = *blocks[size_t(j)];
      if (stack.Alike(i, j)) options.attention.first = &earlier.attention();
      if (options.cross && config.Stack(Form::kCross).Alike(i, j))
        options.cross->first = &earlier.cross();
    }
    blocks.push_back(layers.Add(std::to_string(i), MakeBlock(options)));
  }
  return blocks;
}

}  // namespace

at::Tensor AddEmbedding(torch::nn::Module& owner, const std::string& name,
                        const ModelConfig& config, int64_t vocab, int64_t dim) {
  if (vocab < 1)
    FailUsage("a model of kind ", config.kind, " needs vocab_size of at least 1, got ", vocab);
  return owner
      .register_module(name, std::make_shared<Embedding>(vocab, dim, config.EmbeddingStd()))
      ->weight;
}

namespace {

// The tokens that mechanisms have weights for, where that is less than the positions of embeddings,
// which say so themselves.
int64_t WeightsEnd(const ModelConfig& config, Form form) {
  const int64_t limit = config.LengthLimit(form);
  return limit < config.PositionLimit(form) ? limit : std::numeric_limits<int64_t>::max();
}

}  // namespace

Trunk::Trunk(torch::nn::Module& owner, const ModelConfig& config, Form form, int64_t extra)
    : owner_(&owner),
      layer_drop_(config.layer_drop),
      extra_(extra),
      length_limit_(WeightsEnd(config, form)),
      padding_(config.padding),
      cls_place_(config.cls_place) {
  const LayerStack stack = config.Stack(form);
  const StackOptions& o = stack.options();
  dropout_ = o.dropout;
  const int64_t width = stack.input_dim();
  if (config.scale_embeddings) scale_ = std::sqrt(double(width));
  const int64_t before = cls_place_ == ClsPlace::kBefore ? extra : 0;
  positions_ = owner.register_module(
      "embed_positions", std::make_shared<PositionEmbedding>(
                             *o.positions, width, o.max_length + before, config.PositionStd()));
  const auto norm = [&](const std::string& name, int64_t of) {
    return owner.register_module(
        name, std::make_shared<LayerNorm>(of, config.norm_eps, config.norm_kind));
  };
  if (config.embedding_norm) embedding_norm_ = norm("embed_norm", width);
  blocks_ =
      AddBlocks(*owner.register_module("layers", std::make_shared<Container>()), config, form);
  if (config.final_norm) norm_ = norm("norm", o.dim);
}

ops::TokenMap Trunk::RealTokensFirst(const ops::Mask& mask) const {
  if (padding_ != PaddingKind::kMasked)
    FailUsage("padding=", NameOf(padding_, PaddingKinds()),
              " lets padding take part, so that no token can be masked; use padding=masked");
  for (const auto& block : blocks_) {
    if (block->attention().attends()) block->attention().mechanism().RequireMaskable();
  }
  return ops::ToFront(mask, mask.valid->size(1));
}

void Trunk::RequireGivenPositions() const {
  for (const auto& block : blocks_) {
    if (block->attention().attends() && block->attention().mechanism().dims().relative)
      FailUsage(
          "positions=relative counts the tokens that are there, and these have positions of their "
          "own (task.zero_is_padding, or a task of series); use learned, sinusoidal or rotary");
  }
}

std::string Trunk::SeesPadding() const {
  if (padding_ == PaddingKind::kSeen || padding_ == PaddingKind::kZeros)
    return "padding=" + NameOf(padding_, PaddingKinds());
  for (const auto& block : blocks_) {
    if (block->attention().attends() && block->attention().mechanism().SeesPadding())
      return block->attention().mechanism().info().name + "'s mask=none";
  }
  return "";
}

at::Tensor Trunk::Embeddings(const at::Tensor& embedded, const ops::Mask& mask) const {
  at::Tensor x = embedded;
  if (padding_ == PaddingKind::kZeros) x = ZerosAtPadding(x, mask);
  if (scale_ == 1) return x;
  if (extra_ == 0) return x * scale_;
  return at::cat({x.narrow(1, 0, extra_), x.narrow(1, extra_, x.size(1) - extra_) * scale_}, 1);
}

namespace {

// A map that makes the embeddings rounds them under autocast; the stream is in full precision.
at::Tensor Wide(const at::Tensor& x) {
  const bool rounded = at::autocast::is_autocast_enabled(x.device().type()) &&
                       (x.scalar_type() == at::kBFloat16 || x.scalar_type() == at::kHalf);
  return rounded ? x.to(at::kFloat) : x;
}

}  // namespace

Stream Trunk::Enter(const at::Tensor& embedded, const ops::Mask& mask,
                    const at::Tensor& positions) const {
  Stream stream;
  stream.positions = positions;
  stream.padding_reads = padding_ == PaddingKind::kReads;
  if (padding_ == PaddingKind::kMasked || padding_ == PaddingKind::kReads) stream.mask = mask;
  const at::Tensor x = Embeddings(Wide(embedded), mask);
  if (extra_ > 0 && cls_place_ == ClsPlace::kAfter) {
    const int64_t tokens = x.size(1) - extra_;
    const at::Tensor places = positions.narrow(1, extra_, tokens) - extra_;
    stream.x = at::cat(
        {x.narrow(1, 0, extra_), positions_->Forward(x.narrow(1, extra_, tokens), places)}, 1);
  } else {
    stream.x = positions_->Forward(x, positions);
  }
  if (embedding_norm_) stream.x = embedding_norm_->Forward(stream.x);
  stream.x = ops::Dropout(stream.x, dropout_, owner_->is_training());
  return stream;
}

std::vector<bool> Trunk::LeftOut() const {
  std::vector<bool> left_out(blocks_.size(), false);
  if (layer_drop_ == 0 || !owner_->is_training()) return left_out;
  constexpr uint64_t kStream = 0x1d;
  const uint64_t key = ops::Draw::Next().seed;
  for (size_t i = 0; i < left_out.size(); ++i)
    left_out[i] = double(Philox(key, kStream, i)[0]) < layer_drop_ * 4294967296.0;
  return left_out;
}

Stream Trunk::Bidirectional(Stream stream) const {
  const std::vector<bool> left_out = LeftOut();
  for (size_t i = 0; i < blocks_.size(); ++i) {
    if (!left_out[i]) stream = blocks_[i]->Bidirectional(std::move(stream));
  }
  return stream;
}

void Trunk::CheckReach(const at::Tensor& positions) const {
  if (length_limit_ == std::numeric_limits<int64_t>::max() || positions.numel() == 0 ||
      positions.is_meta())
    return;
  const int64_t last = positions.max().item<int64_t>();
  if (last < length_limit_) return;
  const auto block = std::find_if(blocks_.begin(), blocks_.end(), [](const auto& b) {
    return b->attention().attends() && b->attention().mechanism().info().fixed_length;
  });
  Fail("[", block == blocks_.end() ? "model" : (*block)->attention().mechanism().info().name,
       "] position ", last, " is beyond max_length=", length_limit_,
       " (or its option length): each position has weights of its own; make the model with a "
       "larger one, or use abc_mlp, whose weights come from the token");
}

Stream Trunk::Extend(Stream stream, ModelState& state) const {
  CheckReach(stream.positions);
  const size_t count = blocks_.size();
  const std::vector<bool> left_out = LeftOut();
  for (size_t i = 0; i < count; ++i) {
    if (left_out[i]) continue;
    State* source = blocks_[i]->has_cross() ? &state.layers[count + i] : nullptr;
    stream = blocks_[i]->Extend(std::move(stream), state.layers[i], source);
  }
  return stream;
}

ops::Mask MaskOf(const NamedTensors& batch, const std::string& prefix) {
  ops::Mask mask;
  const auto set = [&](const char* name, std::optional<at::Tensor>* to) {
    if (at::Tensor found = batch.Find(prefix + name); found.defined()) *to = std::move(found);
  };
  set("lengths", &mask.lengths), set("starts", &mask.starts), set("valid", &mask.valid);
  return mask;
}

at::Tensor ZerosAtPadding(const at::Tensor& x, const ops::Mask& mask) {
  const at::Tensor pad = mask.Padding(x.size(1));
  return pad.defined() ? x.masked_fill(pad.unsqueeze(-1), 0.0) : x;
}

at::Tensor EmbedIds(const at::Tensor& table, const at::Tensor& ids, int64_t pad_row) {
  if (ids.is_cpu() && at::isIntegralType(ids.scalar_type(), /*includeBool=*/false) &&
      !at::isTensorSubclassLike(ids)) {
    const at::Tensor all = ids.scalar_type() == at::kLong && ids.is_contiguous()
                               ? ids
                               : ids.to(at::kLong).contiguous();
    const int64_t* const id = all.const_data_ptr<int64_t>();
    const int64_t count = all.numel(), vocabulary = table.size(0);
    for (int64_t i = 0; i < count; ++i)
      CISTERN_CHECK(id[i] >= 0 && id[i] < vocabulary, "[embedding] token id ", id[i],
                    " is not within the vocabulary of ", vocabulary, "; ids are 0 to ",
                    vocabulary - 1);
  }
  return at::embedding(table, ids, pad_row);
}

at::Tensor RowPositions(int64_t length, const at::Tensor& like) {
  return PiecePositions(at::zeros({1}, like.options().dtype(at::kLong).requires_grad(false)),
                        length, {});
}

}  // namespace cistern
