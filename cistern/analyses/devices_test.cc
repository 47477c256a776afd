// Every analysis that fits a model says of it on another device what it says on the CPU.
#include <ATen/ATen.h>

#include "cistern/analyses/testing_analyses.h"
#include "cistern/io/json_text.h"
#include "cistern/tensors/device.h"
#include "cistern/tensors/testing_device.h"

namespace cistern {
namespace {

using namespace cistern::testing;

std::vector<ModelConfig> Configs() {
  std::vector<ModelConfig> all;
  for (const char* mechanism : {"softmax", "latte", "abc_mlp", "linear", "luna_causal"})
    all.push_back(SmallLm({mechanism, mechanism}));
  all.push_back(testing::Classifier("conv_luna", {{"slots", 3}, {"kernel", 4}}));
  all.back().init_std = 0.5;
  return all;
}

// The numbers of the tables and of the maps, in their order.
std::vector<double> NumbersOf(const Figures& figures) {
  std::vector<double> numbers;
  for (const auto& table : figures.tables()) {
    for (const auto& row : table.rows) {
      for (const Json& cell : row) {
        if (cell.is_number()) numbers.push_back(cell.get<double>());
      }
    }
  }
  return numbers;
}

TEST(Analyses, SayOnAnotherDeviceWhatTheySayOnTheCpu) {
  int compared = 0;
  for (const ModelConfig& config : Configs()) {
    const std::shared_ptr<Model> model = MakeModel(config, 3);
    model->eval();
    const Batch batch = IdsBatch(2, 11, {11, 7});
    for (const AnalysisInfo* info : Analyses()) {
      if (!info->refusal(config).empty()) continue;
      Json options = Json::object();
      if (info->name == "similarity") options["normalise"] = true;
      const auto numbers = [&](at::Device device) {
        SetActiveDevice(device);  // of models that an analysis makes
        model->to(device);
        const Batch there = batch.To(device);
        const auto analysis = info->make(options, ContextOf(model));
        const at::NoGradGuard guard;
        analysis->Add(there, RunLayers(*model, there));
        return NumbersOf(analysis->Report());
      };
      const std::vector<double> want = numbers(at::kCPU), got = numbers(kMadeUpDevice);
      SetActiveDevice(at::kCPU);
      ASSERT_EQ(got.size(), want.size()) << info->name;
      for (size_t i = 0; i < want.size(); ++i)
        EXPECT_NEAR(got[i], want[i], 1e-4 * (1 + std::abs(want[i])))
            << info->name << " of " << config.attention[0];
      compared += int(want.size());
    }
  }
  EXPECT_GT(compared, 300);
}

}  // namespace
}  // namespace cistern
