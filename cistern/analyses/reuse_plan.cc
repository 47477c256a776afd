#include "cistern/analyses/reuse_plan.h"

#include <algorithm>
#include <functional>

#include "cistern/base/error.h"

namespace cistern {
namespace {

// FLOPs of a token and parameters of a stack whose layers copy so many heads.
struct StackCost {
  double flops = 0, parameters = 0;
};
StackCost CostOf(const LayerStack& stack, const std::vector<int64_t>& copied, double length) {
  const double dim = double(stack.dim()), ffn = double(stack.ffn_dim());
  const double heads = double(stack.options().heads), width = dim / heads;
  const double seen = stack.form() == Form::kCausal ? (length + 1) / 2 : length;
  StackCost cost;
  for (const int64_t k : copied) {
    const double own = heads - double(k);  // heads with queries, keys and scores of their own
    const double maps = dim * width * (2 * own + 2 * heads), feed = 2 * dim * ffn;
    cost.parameters += maps + feed;
    cost.flops += 2 * (maps + feed) + 2 * seen * width * (own + heads);
  }
  return cost;
}

}  // namespace

ReuseRecommendation RecommendReuse(const std::vector<std::vector<std::vector<double>>>& best,
                                   const ModelConfig& config, double threshold, double length) {
  ReuseRecommendation chosen;
  const auto layers = int64_t(best.size());
  if (layers < 2) return chosen;
  const auto heads = int64_t(best[0].size());
  const MechanismInfo& reuse = FindMechanism("reuse");
  std::vector<int64_t> plan;
  for (const char* placement : {"alternate", "partial", "full", "all_end"}) {
    for (int64_t k = 1; k <= heads; ++k) {
      for (int64_t p = 1; p < layers; ++p) {
        const Json options = {{"placement", placement}, {"heads", k}, {"layers", p}};
        std::vector<int64_t> copied;
        try {
          copied = reuse.copy_plan(options, heads, layers);
        } catch (const UsageError&) {
          continue;  // the placement has no room for so many, or takes whole layers alone
        }
        double least = 1;
        int64_t count = 0, first = 0;
        for (int64_t l = 1; l < layers; ++l) {
          if (copied[size_t(l)] <= 0) continue;
          const bool chain = k == heads && l > 1 && copied[size_t(l) - 1] > 0;
          if (!chain) first = l - 1;
          std::vector<double> alike;
          for (const auto& head : best[size_t(l)])
            alike.push_back(head[size_t(k == heads ? first : l - 1)]);
          std::sort(alike.begin(), alike.end(), std::greater<>());
          least = std::min(least, alike[size_t(k) - 1]);
          count += copied[size_t(l)];
        }
        const bool better =
            count > chosen.copied || (count == chosen.copied && count > 0 && least > chosen.least);
        if (least < threshold || !better) continue;
        chosen.options = options;
        chosen.copied = count;
        chosen.least = least;
        plan = copied;
      }
    }
  }
  if (chosen.copied == 0) return chosen;
  const LayerStack stack = config.Stack(config.info().forms[0]);
  const StackCost whole = CostOf(stack, std::vector<int64_t>(size_t(layers), 0), length),
                  less = CostOf(stack, plan, length);
  chosen.flops_share = less.flops / whole.flops;
  chosen.parameters_share = less.parameters / whole.parameters;
  chosen.settings = {"model.attention=reuse"};
  for (const auto& item : chosen.options.items()) {
    const Json& value = item.value();
    chosen.settings.push_back(StrCat("model.attention_options.reuse.", item.key(), "=",
                                     value.is_string() ? value.get<std::string>() : value.dump()));
  }
  return chosen;
}

}  // namespace cistern
