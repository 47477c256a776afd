// Layers that share their parameters (ModelConfig::tied_layers): the same numbers as of equal
// layers, gradients summed, saved and counted once.
#include <map>

#include "cistern/attention/testing_mechanisms.h"
#include "cistern/base/error.h"
#include "cistern/io/test_folder.h"
#include "cistern/models/encoder_classifier.h"
#include "cistern/models/testing_models.h"

namespace cistern {
namespace {

using namespace cistern::testing;

ModelConfig Small(std::vector<std::string> attention) {
  ModelConfig c;
  c.vocab_size = 23, c.dim = 12, c.heads = 2, c.max_length = 64;
  c.layers = int64_t(attention.size());
  c.attention = std::move(attention);
  c.attention_options =
      Json{{"latte", {{"latents", 6}}}, {"perceiver", {{"latents", 4}}}, {"luna", {{"slots", 3}}}};
  return c;
}

ModelConfig SmallClassifier(std::vector<std::string> attention,
                            const std::string& pooling = "mean") {
  ModelConfig c = Small(std::move(attention));
  c.kind = "encoder_classifier", c.classes = 3, c.pooling = ValueOf(pooling, PoolingKinds());
  return c;
}

// A Perceiver of depth 3 whose later two repeats have their parameters in common (the latents
// belong to the first cross attention), and memories, whose last block alone would have less.
TEST(TiedLayers, AreOneBlock) {
  const std::vector<std::string> perceiver = {"perceiver", "softmax",   "perceiver",
                                              "softmax",   "perceiver", "softmax"};
  std::vector<std::pair<ModelConfig, std::vector<int64_t>>> all = {
      {SmallClassifier(perceiver), {0, 1, 0, 1, 0, 1}},
      {SmallClassifier(perceiver), {0, 1, 2, 3, 2, 3}},
      {SmallClassifier({"luna", "luna", "luna"}, "memory"), {0, 0, 0}},
      {SmallClassifier({"luna", "latte", "luna"}), {0, 1, 0}}};
  all[2].first.norm = NormPlace::kPost;
  for (auto& [config, ties] : all) {
    const std::string what = config.Summary() + " " + Json(ties).dump();
    const auto untied = Make<EncoderClassifier>(config);
    config.tied_layers = ties;
    const auto tied = Make<EncoderClassifier>(config);
    auto own = untied->named_parameters(), shared = tied->named_parameters();
    auto name = [](size_t layer, const std::string& rest) {
      return "layers." + std::to_string(layer) + "." + rest;
    };
    std::map<std::string, at::Tensor>
        want;  // gradients of the shared parameters: the sum of the untied ones
    int64_t count = 0;
    for (const auto& p : shared) count += p.value().numel();
    EXPECT_EQ(tied->ParameterCount(), count) << what;
    at::NoGradGuard guard;
    for (const auto& p : shared) own[p.key()].copy_(p.value());
    for (size_t layer = 0; layer < ties.size(); ++layer) {
      for (const auto& p : own) {
        const std::string prefix = name(layer, "");
        if (p.key().rfind(prefix, 0) != 0) continue;
        EXPECT_EQ(shared.contains(p.key()), ties[layer] == int64_t(layer))
            << what << ": " << p.key();
        p.value().copy_(shared[name(size_t(ties[layer]), p.key().substr(prefix.size()))]);
      }
    }
    const at::Tensor ids = at::randint(0, 23, {3, 11}, at::kLong), lengths = Lengths({11, 4, 1});
    {
      at::AutoGradMode enable(true);
      const at::Tensor got = tied->Forward(ids, lengths), expected = untied->Forward(ids, lengths);
      ExpectClose(got, expected, 1e-12, what);
      got.square().sum().backward();
      expected.square().sum().backward();
    }
    for (size_t layer = 0; layer < ties.size(); ++layer) {
      for (const auto& p : own) {
        const std::string prefix = name(layer, "");
        if (p.key().rfind(prefix, 0) != 0 || !p.value().grad().defined()) continue;
        at::Tensor& sum = want[name(size_t(ties[layer]), p.key().substr(prefix.size()))];
        sum = sum.defined() ? sum + p.value().grad() : p.value().grad();
      }
    }
    for (const auto& [key, gradient] : want)
      ExpectClose(shared[key].grad(), gradient, 1e-10, what + " gradient of " + key);
    const TestFolder folder;
    SaveModel(*tied, folder / "model");
    EXPECT_EQ(LoadTensors(folder / "model/model.safetensors").tensors.size(), shared.size())
        << what;
    const auto loaded = std::dynamic_pointer_cast<EncoderClassifier>(LoadModel(folder / "model"));
    ExpectSameBits(loaded->Forward(ids, lengths), tied->Forward(ids, lengths),
                   what + ", saved and loaded");
  }
}

TEST(TiedLayers, RefuseWithAReason) {
  auto message = [](const std::vector<std::string>& attention, const std::vector<int64_t>& ties,
                    const Json& options = Json::object()) {
    ModelConfig c = Small(attention);
    c.layers = int64_t(ties.size());
    c.tied_layers = ties;
    for (const auto& [name, o] : options.items()) c.attention_options[name] = o;
    return ErrorMessage([&] { MakeModel(c, 0); });
  };
  EXPECT_EQ(message({"latte"}, {0, 1, 0, 1}), "no error");
  ExpectContains(message({"latte"}, {1, 1}), {"layer 0", "parameters of layer 1", "earlier layer"});
  ExpectContains(message({"latte"}, {0, 0, 1}), {"layer 2", "layer 1", "with its own"});
  ExpectContains(message({"latte"}, {0, -1}), {"'tied_layers' is -1"});
  ExpectContains(message({"latte", "softmax"}, {0, 0}),
                 {"layer 1 (softmax)", "layer 0 (latte)", "one mechanism"});
  ExpectContains(message({"performer"}, {0, 0}), {"performer", "redraw=0"});
  EXPECT_EQ(message({"performer"}, {0, 0}, {{"performer", {{"redraw", 0}}}}), "no error");
  ExpectContains(message({"reuse"}, {0, 0}, {{"reuse", {{"placement", "alternate"}}}}),
                 {"reuse", "do not copy the same scores"});
  EXPECT_EQ(message({"reuse"}, {0, 1, 2, 1}, {{"reuse", {{"placement", "alternate"}}}}),
            "no error");
  ModelConfig c = Small({"latte", "softmax", "latte"});
  c.tied_layers = {0};
  ExpectContains(ErrorMessage([&] { MakeModel(c, 0); }), {"tied_layers lists 1", "3 layers"});
  c.kind = "encoder_decoder", c.tied_layers = {}, c.decoder.tied_layers = {0, 0};
  ExpectContains(ErrorMessage([&] { MakeModel(c, 0); }),
                 {"decoder.tied_layers lists 2", "3 layers of the decoder"});
}

}  // namespace
}  // namespace cistern
