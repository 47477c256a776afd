#pragma once
// What decoding costs: time per token and bytes of state at chosen positions.
#include <atomic>
#include <cstdint>
#include <functional>
#include <vector>

#include "cistern/decode/sampler.h"
#include "cistern/models/language_model.h"

namespace cistern {

struct DecodePoint {
  int64_t position = 0;     // tokens in the state before
  double milliseconds = 0;  // per token, the median
  int64_t state_bytes = 0;  // StateBytes of the whole model, one sequence, at that position
};

// Prefills arbitrary tokens up to each position (ascending) and times `tokens` steps of decoding
// there: one token into the state, the output layer, and the choice of the next one by `sampling`.
// Positions that a learned table does not reach are left out.
std::vector<DecodePoint> MeasureDecoding(LanguageModel& model,
                                         const std::vector<int64_t>& positions, int64_t tokens = 64,
                                         const std::atomic<bool>* interrupt = nullptr,
                                         const SamplerOptions& sampling = {});

// What a step of decoding, one token of each sequence, takes at least on this machine: all weights
// come from memory, or every weight takes a multiply-add for every sequence. The cores and their
// states are left out.
struct DecodeLimits {
  int64_t weights = 0,
          weight_bytes = 0;         // each once; of tables of which a token reads one row none
  double gb_per_s = 0, gflops = 0;  // measured, of all threads, in float32

  double MemoryMilliseconds() const { return double(weight_bytes) / gb_per_s / 1e6; }
  double PeakMilliseconds(int64_t sequences) const {
    return 2 * double(weights) * double(sequences) / gflops / 1e6;
  }
};
// Takes about 0.4 s. bfloat16: linear maps have 2 bytes a weight (BFloat16Decoding).
DecodeLimits MeasureDecodeLimits(const LanguageModel& model, bool bfloat16 = false);

// Milliseconds of each of `count` steps: a token of each row into `state`, and its logits. `stop`
// is asked between steps.
std::vector<double> TimeDecodeSteps(LanguageModel& model, ModelState& state, int64_t count,
                                    const std::function<bool()>& stop = nullptr);

// A state that grows (the key-value cache of softmax) doubles its room when full. Raises an Error,
// before the system kills the process, if the next doubling would not fit into `available` bytes
// (below 0: what the system has free). Bounded states always pass.
void CheckStateGrowth(const ModelConfig& config, int64_t state_bytes, int64_t position,
                      int64_t available = -1);

}  // namespace cistern
