#include "cistern/tasks/row_groups.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <functional>

#include "cistern/base/parallel.h"
#include "cistern/nn/attention_layer.h"
#include "cistern/tasks/row_batch.h"

namespace cistern {
namespace {

// Whether `is` holds for the layer of that number of one of the stacks.
bool AnyLayer(const ModelConfig& config,
              const std::function<bool(const LayerStack&, int64_t)>& is) {
  for (const Form form : config.info().forms) {
    const LayerStack stack = config.Stack(form);
    for (int64_t layer = 0; layer < stack.layers(); ++layer) {
      if (is(stack, layer)) return true;
    }
  }
  return false;
}

// Whether `is` holds for a mechanism of the model.
template <class Is>
bool AnyMechanism(const Model& model, const Is& is) {
  for (const auto& module : model.modules(/*include_self=*/false)) {
    const auto* layer = dynamic_cast<const AttentionLayer*>(module.get());
    if (layer && is(layer->mechanism())) return true;
  }
  return false;
}

bool TiesRows(const Mechanism& m) {
  return m.SeesBatch() || m.SeesPadding() || m.info().stochastic;
}

// Tokens of a group, about, and at most where it has several rows.
double GroupTokens(int64_t parts) {
  return double(std::max<int64_t>(4096, 1024 * int64_t(NumThreads()) / parts));
}
double MostGroupTokens(int64_t parts) { return 1.5 * GroupTokens(parts); }

// How many groups of `parts`.
int64_t GroupCount(double tokens, int64_t parts) {
  return parts * std::max<int64_t>(1, std::llround(tokens / double(parts) / GroupTokens(parts)));
}

}  // namespace

bool DrawsFromGenerator(const ModelConfig& config) {
  return AnyLayer(config, [](const LayerStack& stack, int64_t layer) {
    return FindMechanism(stack.Mechanism(layer)).stochastic;
  });
}

bool RowsMeet(const Model& model) {
  return AnyMechanism(model, [](const Mechanism& m) { return m.SeesBatch(); });
}

bool RowsStandAlone(const Model& model) {
  return model.options().device() == at::Device(at::kCPU) && !PaddingTakesPart(model.config()) &&
         !AnyMechanism(model, TiesRows);
}

int64_t RowsAtOnce(const ModelConfig& config, int64_t rows, int64_t tokens, int64_t parts) {
  const int64_t of_a_part = (rows + parts - 1) / parts;
  const bool alone =
      !PaddingTakesPart(config) && !AnyLayer(config, [](const LayerStack& stack, int64_t layer) {
        return TiesRows(*MakeMechanism(stack.Attention(layer)));
      });
  const auto most =
      int64_t(std::ceil(MostGroupTokens(parts) / double(std::max<int64_t>(1, tokens))));
  return std::min(rows, parts * (alone ? std::min(of_a_part, most) : of_a_part));
}

std::vector<RowGroup> GroupsByLength(const Batch& batch, int64_t parts) {
  const at::Tensor of_rows = batch.TokensOfRows();
  const int64_t* const tokens = of_rows.const_data_ptr<int64_t>();
  const double all = std::max(1.0, double(of_rows.sum().item<int64_t>()));
  const int64_t count = GroupCount(all, parts);
  const double most = MostGroupTokens(parts);
  std::vector<RowGroup> groups;
  int64_t last = -1;
  double before = 0;
  for (int64_t r = 0; r < batch.rows; ++r) {
    const double middle = before + double(tokens[r]) / 2;
    const int64_t group = std::min(count - 1, int64_t(middle / all * double(count)));
    // The first row is the longest; of a pair of texts, nearly so.
    const auto padded = [&] {
      return double(r + 1 - groups.back().begin) * double(tokens[groups.back().begin]);
    };
    if (groups.empty() || group != last || padded() > most) groups.push_back({r, r});
    groups.back().end = r + 1, groups.back().tokens = padded();
    before += double(tokens[r]), last = group;
  }
  return groups;
}

std::vector<RowGroup> EvenGroups(int64_t rows, int64_t count) {
  std::vector<RowGroup> groups;
  for (int64_t g = 0; g < count; ++g) {
    const int64_t begin = rows * g / count, end = rows * (g + 1) / count;
    groups.push_back({begin, end, double(end - begin)});
  }
  return groups;
}

std::vector<RowGroup> GroupsOfRows(const Batch& batch, int64_t parts) {
  int64_t tokens = batch.tokens;
  for (const NamedTensor& t : batch.tensors.all()) {  // ids or values, with what pads them
    const bool ids = t.value.dim() == 2 && t.value.scalar_type() == at::kLong,
               values = t.value.dim() == 3 && t.value.is_floating_point();
    if (ids || values) tokens = std::max(tokens, t.value.size(0) * t.value.size(1));
  }
  return EvenGroups(batch.rows, std::min(batch.rows, GroupCount(double(tokens), parts)));
}

at::Tensor OrderByLength(const Batch& batch) {
  return at::argsort(batch.TokensOfRows(), /*stable=*/true, /*dim=*/0, /*descending=*/true);
}

}  // namespace cistern
