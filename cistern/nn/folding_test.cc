// The map that a mechanism begins with, folded into the projections: the same numbers as without,
// always of the weights as they are.
#include "cistern/attention/testing_mechanisms.h"
#include "cistern/nn/attention_layer.h"

namespace cistern {
namespace {

using namespace cistern::testing;

constexpr int64_t kModel = 12;

AttentionLayerOptions Options(Form form, bool bias, const Json& options = Json{{"features", 6}}) {
  AttentionLayerOptions o;
  o.mechanism = "t2r", o.mechanism_options = options;
  o.dims.dim = kModel, o.dims.heads = 3, o.dims.max_length = 64;
  o.form = form, o.bias = bias;
  o.init_std = o.out_std = 0.5;
  return o;
}

std::shared_ptr<AttentionLayer> Make(const AttentionLayerOptions& options, at::ScalarType dtype) {
  at::manual_seed(4);
  const auto layer = MakeAttentionLayer(options);
  at::NoGradGuard guard;
  for (at::Tensor& p : layer->parameters()) p.normal_(0, 0.5);
  layer->to(dtype);
  layer->eval();
  return layer;
}

Stream MakeStream(const at::Tensor& x, const ops::Mask& mask = {}) {
  return {x, mask, at::arange(x.size(1), at::kLong).unsqueeze(0)};
}

// Every way the layer runs, one after the other: [B,T,D] of its form.
at::Tensor RunLayer(AttentionLayer& layer, Form form, const at::Tensor& x) {
  if (form == Form::kBidirectional)
    return layer.Bidirectional(MakeStream(x, {Lengths({9, 5}), {}})).tokens;
  State state = layer.EmptyState(x.size(0), x.options());
  std::vector<at::Tensor> outs;
  if (form == Form::kCross) layer.Write(MakeStream(x, {Lengths({9, 5}), {}}), state);
  for (const auto& [begin, count] : {std::pair{0, 6}, std::pair{6, 1}, std::pair{7, 2}}) {
    const Stream piece = MakeStream(x.narrow(1, begin, count));
    outs.push_back(form == Form::kCross ? layer.Read(piece, state) : layer.Extend(piece, state));
  }
  return at::cat(outs, 1);
}

at::Tensor Folded(AttentionLayer& layer, Form form, const at::Tensor& x) {
  at::NoGradGuard guard;
  return RunLayer(layer, form, x);
}

// As in evaluation, for this mechanism has no dropout; but nothing is folded.
at::Tensor Unfolded(AttentionLayer& layer, Form form, const at::Tensor& x) {
  layer.train();
  const at::Tensor y = Folded(layer, form, x);
  layer.eval();
  return y;
}

constexpr Form kForms[] = {Form::kBidirectional, Form::kCausal, Form::kCross};

TEST(Folding, GivesTheSameNumbers) {
  for (const Form form : kForms) {
    for (const bool bias : {false, true}) {
      for (const auto dtype : {at::kDouble, at::kFloat}) {
        const auto layer = Make(Options(form, bias), dtype);
        EXPECT_EQ(layer->FoldRefusal(), "");
        const at::Tensor x = Normal({2, 9, kModel}).to(dtype);
        const at::Tensor folded = Folded(*layer, form, x), unfolded = Unfolded(*layer, form, x);
        const std::string what = FormName(form) + (bias ? " with biases" : "") +
                                 (dtype == at::kFloat ? " in float" : "");
        const double tolerance = dtype == at::kFloat ? 1e-6 : 1e-12;
        ExpectClose(folded, unfolded, tolerance, what);
        ExpectClose(folded, RunLayer(*layer, form, x), tolerance,
                    what + ", against the pass with gradients");
        EXPECT_FALSE(at::equal(folded, unfolded))
            << what << ": the same bits, so nothing was folded";
        ExpectSameBits(Folded(*layer, form, x), folded, what + ", again");
      }
    }
  }
}

TEST(Folding, SeesEveryChangeOfAWeight) {
  for (const auto& [mechanism, form] :
       {std::pair{"t2r", Form::kBidirectional}, std::pair{"t2r", Form::kCausal},
        std::pair{"t2r", Form::kCross}, std::pair{"linear", Form::kCausal},
        std::pair{"linear", Form::kCross}}) {
    AttentionLayerOptions options = Options(form, true);
    if (options.mechanism != mechanism)
      options.mechanism = mechanism, options.mechanism_options = Json::object();  // joined alone
    const auto layer = Make(options, at::kDouble);
    const at::Tensor x = Normal({2, 9, kModel});
    at::Tensor before = Folded(*layer, form, x);
    const auto expect_new = [&](const std::string& what, double tolerance = 1e-12) {
      const at::Tensor input = x.to(layer->parameters()[0].scalar_type()),
                       folded = Folded(*layer, form, input);
      ExpectClose(folded, RunLayer(*layer, form, input), tolerance, FormName(form) + ", " + what);
      EXPECT_GT(RelRms(folded, before), 1e-9) << FormName(form) << ", " << what;
      before = folded;
    };
    for (auto& p : layer->named_parameters()) {
      at::NoGradGuard guard;
      p.value().mul_(1.5);
      expect_new(p.key() + " in place");
    }
    for (auto& p : layer->named_parameters()) p.value().set_data(p.value().detach() * 0.7);
    expect_new("other memory");
    layer->to(at::kFloat);
    expect_new("other type", 1e-6);
  }
}

TEST(Folding, IsRefusedWithTheReason) {
  const auto refusal = [](auto&& change) {
    AttentionLayerOptions o = Options(Form::kCausal, false);
    change(o);
    return MakeAttentionLayer(o)->FoldRefusal();
  };
  EXPECT_EQ(refusal([](auto&) {}), "");
  ExpectContains(refusal([](auto& o) { o.conv = 3; }), {"conv=3", "stands between"});
  ExpectContains(refusal([](auto& o) { o.mechanism_options["norm"] = true; }), {"norm=true"});
  EXPECT_EQ(refusal([](auto& o) { o.mechanism_options["features"] = 6; }),
            "");  // 6 (12 - 4) = 12 * 4
  ExpectContains(refusal([](auto& o) { o.mechanism_options["features"] = 7; }),
                 {"features=7", "4 channels"});
  ExpectContains(
      refusal([](auto& o) { o.mechanism = "latte", o.mechanism_options = Json::object(); }),
      {"latte"});
  // Refused, it is not folded.
  for (const Json& options : {Json{{"features", 6}, {"norm", true}}, Json{{"features", 7}}}) {
    const auto layer = Make(Options(Form::kCausal, true, options), at::kDouble);
    const at::Tensor x = Normal({2, 9, kModel});
    ExpectSameBits(Folded(*layer, Form::kCausal, x), Unfolded(*layer, Form::kCausal, x),
                   options.dump());
  }
}

}  // namespace
}  // namespace cistern
