#include "cistern/analyses/reuse_plan.h"

#include <algorithm>
#include <functional>
#include <iterator>

#include "cistern/base/error.h"

namespace cistern {
namespace {

// FLOPs of a token and parameters of a stack whose layers copy so many heads.
struct StackCost {
  double flops = 0, parameters = 0;
};
StackCost CostOf(const ModelConfig& config, const std::vector<int64_t>& copied, double length) {
  const LayerStack stack = config.Stack(config.info().forms[0]);
  const double dim = double(stack.dim()), heads = double(stack.options().heads),
               width = double(stack.options().qkv_dim) / heads,
               feed = dim * double(stack.ffn_dim()) *
                      (config.activation == Activation::kGeglu ? 3 : 2);
  const double seen = stack.form() == Form::kCausal ? (length + 1) / 2 : length;
  StackCost cost;
  for (size_t l = 0; l < copied.size(); ++l) {
    const double own = heads - double(copied[l]);  // with queries, keys and scores of their own
    const double maps = dim * width * (2 * own + 2 * heads);
    if (stack.TiedTo(int64_t(l)) == int64_t(l)) cost.parameters += maps + feed;
    cost.flops += 2 * (maps + feed) + 2 * seen * width * (own + heads);
  }
  return cost;
}

// The layers whose scores each layer's heads have: its own for the new ones, then those of the
// first heads of the layer before, which may be copies themselves.
std::vector<std::vector<int64_t>> ScoreLayers(const std::vector<int64_t>& copied, int64_t heads) {
  std::vector<std::vector<int64_t>> all;
  for (size_t l = 0; l < copied.size(); ++l) {
    std::vector<int64_t> own(size_t(heads - copied[l]), int64_t(l));
    if (copied[l] > 0) own.insert(own.end(), all[l - 1].begin(), all[l - 1].begin() + copied[l]);
    all.push_back(std::move(own));
  }
  return all;
}

// Whether each source layer can have a head of its own that is at least `least` like it; heads
// [h][l']. Sources that find all such heads taken move others on (Kuhn's augmenting paths).
bool CanCopy(const std::vector<std::vector<double>>& heads, const std::vector<int64_t>& sources,
             double least) {
  std::vector<int64_t> source_of(heads.size(), -1);
  std::vector<bool> seen;
  const std::function<bool(int64_t)> place = [&](int64_t source) {
    for (size_t h = 0; h < heads.size(); ++h) {
      if (seen[h] || heads[h][size_t(sources[size_t(source)])] < least) continue;
      seen[h] = true;
      if (source_of[h] >= 0 && !place(source_of[h])) continue;
      source_of[h] = source;
      return true;
    }
    return false;
  };
  for (int64_t i = 0; i < int64_t(sources.size()); ++i) {
    seen.assign(heads.size(), false);
    if (!place(i)) return false;
  }
  return true;
}

// The most that the least alike can be then.
double LeastOfCopies(const std::vector<std::vector<double>>& heads,
                     const std::vector<int64_t>& sources) {
  std::vector<double> values;
  for (const auto& head : heads) {
    for (const int64_t source : sources) values.push_back(head[size_t(source)]);
  }
  std::sort(values.begin(), values.end());
  const auto end = std::partition_point(values.begin(), values.end(),
                                        [&](double v) { return CanCopy(heads, sources, v); });
  return *std::prev(end);  // there are as many heads as sources: the first value can always be had
}

// Whether the model can be one of these options: tied layers have to copy the same.
bool CanBe(ModelConfig config, const Json& options) {
  config.attention = {"reuse"};
  config.attention_options = {{"reuse", options}}, config.layer_options = Json::object();
  try {
    config.Validate();
  } catch (const UsageError&) {
    return false;
  }
  return true;
}

}  // namespace

ReuseRecommendation RecommendReuse(const std::vector<std::vector<std::vector<double>>>& best,
                                   const ModelConfig& config, double threshold, double length) {
  ReuseRecommendation chosen;
  const auto layers = int64_t(best.size());
  if (layers < 2) return chosen;
  const auto heads = int64_t(best[0].size());
  const MechanismInfo& reuse = FindMechanism("reuse");
  const Json scale = config.Stack(config.info().forms[0]).Options(0).value("scale", Json("sqrt"));
  std::vector<int64_t> plan;
  for (const char* placement : {"alternate", "partial", "full", "all_end"}) {
    for (int64_t k = 1; k <= heads; ++k) {
      for (int64_t p = 1; p < layers; ++p) {
        Json options = {{"placement", placement}, {"heads", k}, {"layers", p}};
        if (scale != "sqrt") options["scale"] = scale;
        std::vector<int64_t> copied;
        try {
          copied = reuse.copy_plan(options, heads, layers);
        } catch (const UsageError&) {
          continue;  // the placement has no room for so many, or takes whole layers alone
        }
        double least = 1;
        int64_t count = 0;
        const std::vector<std::vector<int64_t>> layers_of = ScoreLayers(copied, heads);
        for (size_t l = 1; l < copied.size() && least >= threshold; ++l) {
          if (copied[l] == 0) continue;
          least = std::min(
              least, LeastOfCopies(best[l], {layers_of[l].end() - copied[l], layers_of[l].end()}));
          count += copied[l];
        }
        const bool better =
            count > chosen.copied || (count == chosen.copied && count > 0 && least > chosen.least);
        if (least < threshold || !better || !CanBe(config, options)) continue;
        chosen.options = options;
        chosen.copied = count;
        chosen.least = least;
        plan = copied;
      }
    }
  }
  if (chosen.copied == 0) return chosen;
  const StackCost whole = CostOf(config, std::vector<int64_t>(size_t(layers), 0), length),
                  less = CostOf(config, plan, length);
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
