#include "cistern/models/trunk.h"

#include <ATen/ATen.h>

#include "cistern/attention/token_positions.h"
#include "cistern/base/error.h"
#include "cistern/base/random.h"

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

Trunk::Trunk(torch::nn::Module& owner, const ModelConfig& config, Form form, int64_t extra)
    : owner_(&owner), layer_drop_(config.layer_drop) {
  const LayerStack stack = config.Stack(form);
  const StackOptions& o = stack.options();
  dropout_ = o.dropout;
  positions_ = owner.register_module(
      "embed_positions", std::make_shared<PositionEmbedding>(
                             *o.positions, o.dim, o.max_length + extra, config.PositionStd()));
  const auto norm = [&](const std::string& name) {
    return owner.register_module(name, std::make_shared<LayerNorm>(o.dim, config.norm_eps));
  };
  if (config.embedding_norm) embedding_norm_ = norm("embed_norm");
  blocks_ =
      AddBlocks(*owner.register_module("layers", std::make_shared<Container>()), config, form);
  if (config.final_norm) norm_ = norm("norm");
}

ops::TokenMap Trunk::RealTokensFirst(const ops::Mask& mask) const {
  for (const auto& block : blocks_) {
    if (block->attention().attends()) block->attention().mechanism().RequireMaskable();
  }
  return ops::ToFront(mask, mask.valid->size(1));
}

Stream Trunk::Enter(const at::Tensor& embedded, const ops::Mask& mask,
                    const at::Tensor& positions) const {
  Stream stream;
  stream.mask = mask;
  stream.positions = positions;
  stream.x = positions_->Forward(embedded, positions);
  if (embedding_norm_) stream.x = embedding_norm_->Forward(stream.x);
  if (owner_->is_training() && dropout_ > 0) stream.x = at::dropout(stream.x, dropout_, true);
  return stream;
}

std::vector<bool> Trunk::LeftOut() const {
  std::vector<bool> left_out(blocks_.size(), false);
  if (layer_drop_ == 0 || !owner_->is_training()) return left_out;
  constexpr uint64_t kStream = 0x1d;
  const auto key = uint64_t(at::empty({1}, at::kLong).random_().item<int64_t>());
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

Stream Trunk::Extend(Stream stream, ModelState& state) const {
  const size_t count = blocks_.size();
  const std::vector<bool> left_out = LeftOut();
  for (size_t i = 0; i < count; ++i) {
    if (left_out[i]) continue;
    State* source = blocks_[i]->has_cross() ? &state.layers[count + i] : nullptr;
    stream = blocks_[i]->Extend(std::move(stream), state.layers[i], source);
  }
  return stream;
}

at::Tensor RowPositions(int64_t length, const at::Tensor& like) {
  return PiecePositions(at::zeros({1}, like.options().dtype(at::kLong).requires_grad(false)),
                        length, {});
}

}  // namespace cistern
