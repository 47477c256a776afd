// Folders of earlier versions, whose maps had other biases than today's defaults.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "cistern/io/atomic_file.h"
#include "cistern/io/json_text.h"
#include "cistern/io/test_folder.h"
#include "cistern/models/decoder_lm.h"
#include "cistern/ops/testing.h"

namespace cistern {
namespace {

TEST(KeptBiases, OfFoldersThatDoNotNameThem) {
  const TestFolder files;
  const std::string folder = files / "model";
  const struct {
    const char *mechanism, *option, *tensor;
    Json value;
    bool bias, has;
  } cases[] = {
      {"rfa_gate", "gate_bias", "layers.0.attention.gate_proj.bias", false, false, false},
      {"rfa_gate", "gate_bias", "layers.0.attention.gate_proj.bias", false, true, true},
      {"abc_mlp", "control_bias", "layers.0.attention.control_proj.bias", "model", true, true},
      {"abc_mlp", "control_bias", "layers.0.attention.control_proj.bias", "model", false, false},
  };
  const at::Tensor ids = at::randint(30, {1, 12}, at::kLong);
  for (const auto& c : cases) {
    ModelConfig config;
    config.vocab_size = 30, config.dim = 16, config.heads = 2, config.layers = 2,
    config.max_length = 32, config.bias = c.bias, config.init_std = 0.2;
    config.attention = {c.mechanism};
    config.attention_options = {{c.mechanism, {{c.option, c.value}}}};
    const auto saved = std::dynamic_pointer_cast<DecoderLm>(MakeModel(config, 3));
    {
      at::NoGradGuard guard;
      for (const auto& p : saved->named_parameters()) {
        if (p.key().ends_with("_proj.bias")) p.value().normal_();
      }
    }
    saved->eval();
    SaveModel(*saved, folder);
    // As an earlier version wrote it: without the option.
    Json json = ReadJsonFile(folder + "/config.json");
    json.erase("attention_options");
    WriteFileAtomically(folder + "/config.json", JsonFileText(json));
    const auto loaded = std::dynamic_pointer_cast<DecoderLm>(LoadModel(folder));
    ASSERT_TRUE(loaded) << c.mechanism;
    EXPECT_EQ(loaded->named_parameters().find(c.tensor) != nullptr, c.has) << c.mechanism;
    at::NoGradGuard guard;
    ModelState a = saved->EmptyState(1), b = loaded->EmptyState(1);
    EXPECT_TRUE(at::equal(saved->Extend(ids, a), loaded->Extend(ids, b))) << c.mechanism;
    // It is written down from now on.
    SaveModel(*loaded, folder);
    EXPECT_TRUE(std::dynamic_pointer_cast<DecoderLm>(LoadModel(folder))) << c.mechanism;
  }
}

}  // namespace
}  // namespace cistern
