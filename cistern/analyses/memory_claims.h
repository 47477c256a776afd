#pragma once
// P000's explanation of memory degradation, claim by claim, with what the memory analysis measured
// (memory.h): "packing's attention stays at high entropy, unlike in vanilla Transformers; so the
// outputs are alike for all tokens and the slots alike; memory-input products vary less than
// input-input products, which a divisor that begins at 1 mends by more variance at the start".
#include <string>
#include <utility>
#include <vector>

#include "cistern/analyses/figures.h"
#include "cistern/analyses/mean.h"

namespace cistern {

// Means over the layers of one model, where any has slots over those that have; of its memories,
// those that blocks were given and packed.
struct MemorySummary {
  struct Numbers {
    Mean entropy, reading, products, logits, output, tokens, divisor;
    Mean cosine, unique, rank;  // rank: effective rank / slots
  };
  std::string label, mechanism;   // mechanism: of the first layer with slots; empty: none has
  Json options = Json::object();  // of that mechanism; without one of the first layer of softmax
  bool softmax = false;           // has layers of exact softmax
  // What arms have to share for one option to be their difference: the config without its
  // attention, and the attention layer by layer, mechanism and options.
  Json config = Json::object();
  std::vector<std::pair<std::string, Json>> layers;
  Numbers trained, random;
  // {"label": of the metric, "value", "lower_is_better", "steps": [], "values": []}; {}: not known
  Json result = Json::object();
};

// What can be said of one model: whether its slots became alike, and packing is nearly uniform.
std::vector<PaperClaim> MemoryChecks(const MemorySummary& model);

// Of several: a table of the arms, their results over the steps, what temperature and filter do,
// all checks, and whether the explanation holds, in words.
Figures CompareMemories(const std::vector<MemorySummary>& models);

}  // namespace cistern
