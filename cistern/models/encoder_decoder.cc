#include "cistern/models/encoder_decoder.h"

#include <ATen/ATen.h>

#include "cistern/base/error.h"

namespace cistern {

const ModelInfo& encoder_decoder_model() {
  static const ModelInfo info = [] {
    ModelInfo i;
    i.name = "encoder_decoder";
    i.summary =
        "Sequence to sequence: an encoder reads a source, a decoder that attends to it writes the "
        "target.";
    i.forms = {Form::kBidirectional, Form::kCausal, Form::kCross};
    i.inputs = {"source", "source_lengths?", "source_valid?", "ids", "lengths?", "valid?"};
    i.extends = i.encodes = i.predicts_tokens = true;
    i.tables = [](const ModelConfig& c) {
      const bool share = OwnOptions<EncoderDecoder>(c).share_embeddings;
      const StackOptions encoder = c.Stack(Form::kBidirectional).options(),
                         decoder = c.Stack(Form::kCausal).options();
      const auto positions = [](const StackOptions& o, double width) {
        return o.positions == PositionKind::kLearned ? double(o.max_length) * width : 0.0;
      };
      const double source = double(c.Stack(Form::kBidirectional).input_dim());
      return double(c.TargetVocabSize()) * double(decoder.dim) * (c.tie_embeddings ? 1 : 2) +
             (share ? 0 : double(c.vocab_size) * source) + positions(encoder, source) +
             positions(decoder, double(decoder.dim));
    };
    BindModel<EncoderDecoder>(i);
    return i;
  }();
  return info;
}

Fields EncoderDecoder::Describe(Options& options) {
  Fields f;
  f.Add("share_embeddings", &options.share_embeddings,
        "source and target share one embedding matrix");
  return f;
}

void EncoderDecoder::Check(const ModelConfig& config) {
  OutputLayer::Check(config);
  if (!OwnOptions<EncoderDecoder>(config).share_embeddings) return;
  if (config.TargetVocabSize() != config.vocab_size) {
    FailUsage("target_vocab_size=", config.target_vocab_size,
              " needs encoder_decoder.share_embeddings=false: one shared matrix has vocab_size=",
              config.vocab_size, " rows");
  }
  const int64_t source = config.Stack(Form::kBidirectional).input_dim(),
                target = config.Stack(Form::kCausal).dim();
  if (source != target) {  // widths of the tokens
    FailUsage("an encoder of dim=", source, " and a decoder of dim=", target,
              " need encoder_decoder.share_embeddings=false");
  }
}

EncoderDecoder::EncoderDecoder(const ModelConfig& config) : LanguageModel(config) {
  target_embedding_ = AddEmbedding(*this, "embed_tokens", config, config.TargetVocabSize(),
                                   config.Stack(Form::kCausal).dim());
  source_embedding_ = OwnOptions<EncoderDecoder>(config).share_embeddings
                          ? target_embedding_
                          : AddEmbedding(*this, "source_embed_tokens", config, config.vocab_size,
                                         config.Stack(Form::kBidirectional).input_dim());
  const auto half = [&](const std::string& name) {
    return register_module(name, std::make_shared<Container>());
  };
  const std::shared_ptr<Container> encoder = half("encoder");
  encoder_ = std::make_unique<Trunk>(*encoder, config, Form::kBidirectional);
  decoder_ = std::make_unique<Trunk>(*half("decoder"), config, Form::kCausal);
  if (config.cross.memory == SourceMemory::kEncoder && config.final_norm) {
    memory_norm_ = encoder->register_module(
        "memory_norm", std::make_shared<LayerNorm>(config.Stack(Form::kBidirectional).dim(),
                                                   config.norm_eps, config.norm_kind));
  }
  SetStateLayers(decoder_->blocks());
  output_ = std::make_unique<OutputLayer>(*this, config, target_embedding_);
}

ModelState EncoderDecoder::Encode(const at::Tensor& source, const ops::Mask& given) {
  CISTERN_CHECK(source.dim() == 2, "[encoder_decoder] expected source ids of shape [B,S], got ",
                source.sizes());
  CISTERN_CHECK(!given.starts, "[encoder_decoder] a row has one source, without starts");
  CheckMask("[encoder_decoder source]", given, source.size(0), source.size(1));
  if (given.valid) {
    const ops::TokenMap front = encoder_->RealTokensFirst(given);
    return Encode(front.Move(source, 1), front.mask());
  }
  ops::Mask mask = given;
  // Without padding there is no mask to be kept and applied at every token. (Where the lengths are
  // elsewhere, looking would mean to wait.)
  if (mask.lengths && mask.lengths->is_cpu() &&
      (*mask.lengths == source.size(1)).all().item<bool>())
    mask.lengths.reset();
  Stream stream = encoder_->Bidirectional(encoder_->Enter(EmbedIds(source_embedding_, source), mask,
                                                          RowPositions(source.size(1), source)));
  stream.x = encoder_->Norm(stream.x);
  ModelState state = EmptyStates(source.size(0));
  const auto& blocks = decoder_->blocks();
  switch (config_.cross.memory) {
    case SourceMemory::kOwn:
      stream.memory = at::Tensor();
      break;
    case SourceMemory::kDecoder:
      stream.memory = blocks[0]->cross().InitialMemory(source.size(0));
      break;
    case SourceMemory::kEncoder:
      if (memory_norm_) stream.memory = memory_norm_->Forward(stream.memory);
  }
  for (size_t i = 0; i < blocks.size(); ++i) {
    stream.memory =
        blocks[i]->WriteSource(stream, state.layers[i], state.layers[blocks.size() + i]);
  }
  return state;
}

at::Tensor EncoderDecoder::Hidden(const at::Tensor& target, ModelState& state,
                                  const ops::Mask& mask) {
  CISTERN_CHECK(
      !mask.starts,
      "[encoder_decoder] several documents in a row would need one source each; give every "
      "document its own row");
  return Run(*decoder_, target_embedding_, target, state, mask);
}

}  // namespace cistern
