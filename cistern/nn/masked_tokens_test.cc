// Attention layers with masked tokens: each row as if they were not there, for every mechanism and
// form, with convolution and rotary positions where the mechanism takes them.
#include "cistern/attention/testing_mechanisms.h"
#include "cistern/base/error.h"
#include "cistern/nn/attention_layer.h"

namespace cistern {
namespace {

using namespace cistern::testing;

constexpr int64_t kModel = 12, kLength = 13;

std::shared_ptr<AttentionLayer> Make(const MechanismInfo& info, const Json& options, Form form) {
  AttentionLayerOptions o;
  o.mechanism = info.name;
  o.mechanism_options = options;
  o.dims.dim = kModel, o.dims.heads = 2, o.dims.max_length = 64;
  o.form = form;
  o.bias = true;
  const auto& known = info.positions;
  if (form != Form::kCross &&
      std::find(known.begin(), known.end(), PositionKind::kRotary) != known.end())
    o.positions = PositionKind::kRotary;
  if (form == Form::kCausal) o.conv = 3;
  at::manual_seed(4);
  std::shared_ptr<AttentionLayer> layer;
  try {
    layer = MakeAttentionLayer(o);
  } catch (const UsageError&) {  // no convolution
    o.conv = 0;
    layer = MakeAttentionLayer(o);
  }
  at::NoGradGuard guard;
  layer->to(at::kDouble);
  layer->eval();
  for (at::Tensor& p : layer->parameters()) p.normal_(0, 0.5);
  return layer;
}

at::Tensor RunLayer(AttentionLayer& layer, Form form, const Stream& stream,
                    const at::Tensor& target) {
  if (form == Form::kBidirectional) return layer.Bidirectional(stream).tokens;
  State state = layer.EmptyState(stream.x.size(0), stream.x.options());
  if (form == Form::kCausal) return layer.Extend(stream, state);
  layer.Write(stream, state);
  Stream queries;
  queries.x = target, queries.positions = at::arange(target.size(1)).unsqueeze(0);
  return layer.Read(queries, state);
}

TEST(MaskedTokens, ALayerReadsEachRowAsIfTheyWereNotThere) {
  // Padding on the left; holes and padding on the right.
  const std::vector<std::vector<int64_t>> real = {
      {5, 6, 7, 8, 9, 10, 11, 12}, {1, 2, 4, 7, 8, 9}, {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12}};
  Stream stream;
  stream.mask.valid = at::zeros({3, kLength}, at::kBool);
  stream.mask.lengths = Lengths({kLength, 10, kLength});
  (*stream.mask.valid)[1].narrow(0, 10, 3).fill_(true);  // beyond the length: padding all the same
  stream.positions = at::full({3, kLength}, 60, at::kLong);
  for (int64_t b = 0; b < 3; ++b) {
    const at::Tensor index = at::tensor(real[size_t(b)]);
    (*stream.mask.valid)[b].index_fill_(0, index, true);
    stream.positions[b].index_copy_(0, index, at::arange(index.size(0)));
  }
  int layers = 0;
  for (const MechanismInfo* info : Mechanisms()) {
    for (const Form form : {Form::kBidirectional, Form::kCausal, Form::kCross}) {
      if (!info->Supports(form) || (!info->verbs && form != Form::kBidirectional)) continue;
      if (info->memory == MemoryUse::kLatents) continue;  // reads by latents: nn/latent_block.h
      const auto layer = Make(*info, info->cases[0], form);
      at::NoGradGuard guard;
      stream.x = Normal({3, kLength, kModel});
      const at::Tensor target = Normal({3, 4, kModel}),
                       got = RunLayer(*layer, form, stream, target);
      for (int64_t b = 0; b < 3; ++b) {
        const at::Tensor index = at::tensor(real[size_t(b)]);
        Stream alone;
        alone.x = stream.x.narrow(0, b, 1).index_select(1, index);
        alone.positions = at::arange(index.size(0)).unsqueeze(0);
        const at::Tensor want = RunLayer(*layer, form, alone, target.narrow(0, b, 1));
        const at::Tensor row = got.narrow(0, b, 1);
        ExpectClose(form == Form::kCross ? row : row.index_select(1, index), want,
                    1e-11 * std::max(1.0, info->tolerance / 1e-6),
                    info->name + " " + FormName(form) + " row " + std::to_string(b));
      }
      ++layers;
    }
  }
  EXPECT_GE(layers, 30);
}

TEST(MaskedTokens, OfOtherTokensAreRefused) {
  const MechanismInfo& info = FindMechanism("latte");
  at::NoGradGuard guard;
  for (const Form form : info.forms) {
    const auto layer = Make(info, info.cases[0], form);
    Stream stream;
    stream.x = Normal({2, 9, kModel}), stream.positions = at::arange(9).unsqueeze(0);
    for (const std::vector<int64_t>& sizes : {std::vector<int64_t>{1, 9}, {2, 8}}) {
      stream.mask.valid = at::ones(sizes, at::kBool);
      ExpectContains(Thrown([&] { RunLayer(*layer, form, stream, stream.x); }),
                     {"[latte] expected valid of shape [B,T] = [2, 9]"});
    }
  }
}

TEST(MaskedTokens, WhereAFilterSeesPaddingTheyAreRefused) {
  const MechanismInfo& info = FindMechanism("conv_luna");
  const auto layer =
      Make(info, Json{{"slots", 2}, {"kernel", 3}, {"mask", "none"}}, Form::kBidirectional);
  Stream stream;
  stream.x = Normal({2, 9, kModel}), stream.positions = at::arange(9).unsqueeze(0);
  stream.mask.valid = at::ones({2, 9}, at::kBool);
  ExpectContains(Thrown([&] { layer->Bidirectional(stream); }),
                 {"[conv_luna]", "mask=none", "mask=tokens"});
}

}  // namespace
}  // namespace cistern
