// What the sources do around a core: biases of single maps, dropout of a layer's output, tokens of
// length one.
#include <cmath>

#include "cistern/attention/testing_mechanisms.h"
#include "cistern/base/error.h"
#include "cistern/io/test_folder.h"
#include "cistern/nn/attention_layer.h"

namespace cistern {
namespace {

using namespace cistern::testing;

std::shared_ptr<AttentionLayer> Layer(const std::string& mechanism, const Json& options, Form form,
                                      bool bias = false, double dropout = 0) {
  AttentionLayerOptions o;
  o.mechanism = mechanism, o.mechanism_options = options, o.form = form, o.bias = bias;
  o.dims.dim = 16, o.dims.heads = 2, o.dims.max_length = 64, o.dims.dropout = dropout;
  o.init_std = o.out_std = 0.3;
  const auto layer = MakeAttentionLayer(o);
  layer->to(at::kDouble);
  return layer;
}

at::Tensor Through(AttentionLayer& layer, Form form, const at::Tensor& x) {
  Stream stream;
  stream.x = x;
  if (form == Form::kBidirectional) return layer.Bidirectional(stream).tokens;
  State state = layer.EmptyState(x.size(0), x.options());
  return layer.Extend(stream, state);
}

bool Has(const AttentionLayer& layer, const std::string& name) {
  return layer.named_parameters().find(name) != nullptr;
}

TEST(PublishedBiases, OfSingleMaps) {
  // RFA's gate has its bias, whatever the model's maps have.
  for (const bool bias : {false, true}) {
    const auto gate = Layer("rfa_gate", {{"features", 4}}, Form::kCausal, bias);
    EXPECT_TRUE(Has(*gate, "gate_proj.bias"));
    EXPECT_EQ(Has(*gate, "q_proj.bias"), bias);
    const auto follows = Layer("rfa_gate", {{"gate_bias", false}}, Form::kCausal, bias);
    EXPECT_EQ(Has(*follows, "gate_proj.bias"), bias);
    // ABC's control (P003 eq. 7) has none.
    const auto control = Layer("abc_mlp", {{"slots", 3}}, Form::kCausal, bias);
    EXPECT_FALSE(Has(*control, "control_proj.bias"));
    EXPECT_EQ(Has(*control, "k_proj.bias"), bias);
    const auto model = Layer("abc_mlp", {{"control_bias", "model"}}, Form::kCausal, bias);
    EXPECT_EQ(Has(*model, "control_proj.bias"), bias);
    const auto fork = Layer("rfa", {{"input_gate", true}}, Form::kCausal, bias);
    EXPECT_FALSE(Has(*fork, "input_gate_proj.bias"));
  }
  // A gate that its bias shuts (b_g = 40) keeps everything but what was first written: nothing.
  const auto gate = Layer("rfa_gate", {{"features", 64}}, Form::kCausal);
  at::manual_seed(1);
  const at::Tensor x = Normal({1, 6, 16});
  at::NoGradGuard guard;
  gate->eval();
  const at::Tensor open = Through(*gate, Form::kCausal, x);
  gate->named_parameters()["gate_proj.bias"].fill_(-40.0);
  // g = 0: each token sees itself alone.
  at::Tensor values = at::matmul(x, gate->named_parameters()["v_proj.weight"].t()),
             want = at::matmul(values, gate->named_parameters()["o_proj.weight"].t());
  ExpectClose(Through(*gate, Form::kCausal, x), want, 1e-10, "b_g = -40");
  EXPECT_GT(RelRms(open, want), 1e-2);
}

TEST(PublishedDropout, OfLattesCausalLayer) {
  // P004's code: read weights and the layer's output, in the causal form alone.
  at::manual_seed(2);
  const at::Tensor x = Normal({8, 40, 16});
  const auto zeros = [](const at::Tensor& y) {
    return (y == 0).to(at::kDouble).mean().item<double>();
  };
  const Json published = {{"latents", 8}, {"dropout", "published"}};
  const auto causal = Layer("latte", published, Form::kCausal, false, 0.25);
  EXPECT_NEAR(zeros(Through(*causal, Form::kCausal, x)), 0.25, 0.02);
  EXPECT_EQ(zeros(Through(*Layer("latte", {{"latents", 8}}, Form::kCausal, false, 0.25),
                          Form::kCausal, x)),
            0);
  const auto message = [&](Form form, double dropout) {
    return ErrorMessage([&] { Layer("latte", published, form, false, dropout); });
  };
  // Where it would drop nothing, it is refused.
  ExpectContains(message(Form::kBidirectional, 0.25),
                 {"bidirectional form with dropout=published", "attention_dropout=0.25"});
  ExpectContains(message(Form::kCross, 0.25), {"cross", "dropout=weights"});
  EXPECT_EQ(message(Form::kBidirectional, 0), "no error");
  causal->eval();
  EXPECT_EQ(zeros(Through(*causal, Form::kCausal, x)), 0);
  // The output's mask scales what stays by 1 / (1 - p): the mean of many draws is the whole. The
  // read weights' mask is linear too.
  const at::Tensor whole = Through(*causal, Form::kCausal, x);
  causal->train();
  at::Tensor sum = at::zeros_like(whole);
  at::NoGradGuard guard;
  for (int i = 0; i < 400; ++i) sum += Through(*causal, Form::kCausal, x);
  EXPECT_LT(RelRms(sum / 400, whole), 0.12);
}

TEST(PublishedNorms, OfLinformersTokens) {
  // P004's code divides every row of X by its length before the maps.
  at::manual_seed(3);
  const at::Tensor x = Normal({2, 9, 16}), factor = at::rand({2, 9, 1}, at::kDouble) + 0.5;
  const auto normed = Layer("linformer", {{"slots", 4}, {"normalise", true}}, Form::kBidirectional);
  const at::Tensor y = Through(*normed, Form::kBidirectional, x);
  ExpectClose(Through(*normed, Form::kBidirectional, x * factor), y, 1e-12,
              "lengths do not matter");
  const auto plain = Layer("linformer", {{"slots", 4}}, Form::kBidirectional);
  for (const auto& p : normed->named_parameters()) {
    at::NoGradGuard guard;
    plain->named_parameters()[p.key()].copy_(p.value());
  }
  const at::Tensor ones = x / x.square().sum(2, true).sqrt();
  ExpectClose(Through(*plain, Form::kBidirectional, ones), y, 1e-12, "of tokens of length one");
  EXPECT_GT(RelRms(Through(*plain, Form::kBidirectional, x), y), 1e-2);
  EXPECT_TRUE(
      Through(*normed, Form::kBidirectional, at::zeros_like(x)).isfinite().all().item<bool>());
}

}  // namespace
}  // namespace cistern
