// LayerDrop: which blocks a training pass leaves out, and that nothing else changes.
#include <array>
#include <cmath>

#include "cistern/io/test_folder.h"
#include "cistern/models/testing_models.h"

namespace cistern {
namespace {

using namespace cistern::testing;

// The logits of `model` with only the blocks of `kept`, made of a model that has no others.
at::Tensor Subset(const ModelConfig& config, DecoderLm& model, const std::vector<int>& kept,
                  const at::Tensor& ids) {
  ModelConfig c = config;
  c.layer_drop = 0, c.layers = std::max<int64_t>(1, int64_t(kept.size()));
  const auto some = Make<DecoderLm>(c);
  const auto all = model.named_parameters();
  const at::NoGradGuard guard;
  for (const auto& p : some->named_parameters()) {
    std::string name = p.key();
    if (name.starts_with("layers.")) {
      if (kept.empty()) {  // a block that adds nothing
        if (name.find("o_proj") != std::string::npos || name.find("down") != std::string::npos)
          at::Tensor(p.value()).zero_();
        continue;
      }
      const auto layer = size_t(name[7] - '0');
      name = "layers." + std::to_string(kept[layer]) + name.substr(8);
    }
    at::Tensor(p.value()).copy_(all[name]);
  }
  ModelState state = some->EmptyState(ids.size(0));
  return some->Logits(some->Hidden(ids, state, {}));
}

TEST(LayerDrop, LeavesOutWholeBlocksEachWithItsProbability) {
  ModelConfig c = SmallLm({"latte"});
  c.layers = 3, c.layer_drop = 0.3;
  const auto model = Make<DecoderLm>(c);
  const at::Tensor ids = Ids(2, 7);
  const at::NoGradGuard guard;
  std::vector<at::Tensor> subsets;
  for (int set = 0; set < 8; ++set) {
    std::vector<int> kept;
    for (int i = 0; i < 3; ++i) {
      if (set >> i & 1) kept.push_back(i);
    }
    subsets.push_back(Subset(c, *model, kept, ids));
  }
  const auto logits = [&] {
    ModelState state = model->EmptyState(2);
    return model->Logits(model->Hidden(ids, state, {}));
  };
  EXPECT_LT((logits() - subsets[7]).abs().max().item<double>(), 1e-12);  // evaluation: all of them
  model->train();
  std::array<int, 8> seen = {};
  constexpr int kPasses = 600;
  at::manual_seed(4);
  for (int pass = 0; pass < kPasses; ++pass) {
    const at::Tensor y = logits();
    int found = -1;
    for (int set = 0; set < 8; ++set) {
      if ((y - subsets[size_t(set)]).abs().max().item<double>() < 1e-12) found = set;
    }
    ASSERT_GE(found, 0) << "no subset of the blocks gives this";
    ++seen[size_t(found)];
  }
  for (int set = 0; set < 8; ++set) {  // independent of each other
    double share = 1;
    for (int i = 0; i < 3; ++i) share *= set >> i & 1 ? .7 : .3;
    EXPECT_NEAR(double(seen[size_t(set)]) / kPasses, share,
                4 * std::sqrt(share * (1 - share) / kPasses))
        << set;
  }
}

TEST(LayerDrop, IsAFunctionOfTheSeedAndDrawsNothingInEvaluation) {
  ModelConfig c = SmallLm({"softmax"});
  c.layers = 6, c.layer_drop = 0.5;
  const auto model = Make<DecoderLm>(c);
  const at::Tensor ids = Ids(1, 5);
  const auto logits = [&] {
    const at::NoGradGuard guard;
    ModelState state = model->EmptyState(1);
    return model->Logits(model->Hidden(ids, state, {}));
  };
  at::manual_seed(1);
  const at::Tensor next = at::rand({3});
  at::manual_seed(1);
  logits();
  EXPECT_TRUE(at::equal(at::rand({3}), next));
  model->train();
  at::manual_seed(7);
  const at::Tensor first = logits(), second = logits();
  at::manual_seed(7);
  EXPECT_TRUE(at::equal(logits(), first));
  EXPECT_TRUE(at::equal(logits(), second));
  EXPECT_FALSE(at::equal(first, second));  // by this seed; another may leave out the same ones
}

// A block without a gradient is neither updated nor decayed; the others are trained.
TEST(LayerDrop, BlocksLeftOutHaveNoGradient) {
  ModelConfig c = SmallLm({"softmax"});
  c.layers = 8, c.layer_drop = 0.5;
  const auto model = Make<DecoderLm>(c);
  model->train();
  at::manual_seed(3);
  ModelState state = model->EmptyState(2);
  const at::Tensor ids = Ids(2, 6);
  model->Loss(model->Hidden(ids, state, {}), ids).backward();
  int with = 0, without = 0;
  for (const auto& p : model->named_parameters()) {
    if (p.key().ends_with("q_proj.weight")) ++(p.value().grad().defined() ? with : without);
  }
  EXPECT_EQ(with + without, 8);
  EXPECT_GT(with, 0);
  EXPECT_GT(without, 0);
}

TEST(LayerDrop, IsRefusedWhereABlockNeedsTheOneBefore) {
  for (const char* mechanism : {"reuse", "luna", "perceiver"}) {
    ModelConfig c;
    c.kind = "encoder_classifier", c.classes = 3, c.vocab_size = 23, c.dim = 12, c.heads = 2;
    c.layers = 3, c.attention = {mechanism}, c.layer_drop = 0.2;
    if (c.attention[0] == "perceiver") c.attention = {"perceiver", "softmax", "softmax"};
    ExpectContains(ErrorMessage([&] { c.Validate(); }), {"layer_drop", mechanism});
    c.layer_drop = 0;
    c.Validate();
  }
}

}  // namespace
}  // namespace cistern
