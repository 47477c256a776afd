#include <ATen/ATen.h>

#include <algorithm>
#include <cstdio>
#include <fstream>
#include <string>

#include "cistern/attention/mechanism.h"
#include "cistern/base/error.h"
#include "cistern/train/trainer.h"

namespace cistern {
namespace {

// A "Name:  123 kB" line of a /proc file, in bytes; 0 when it is not there.
int64_t ProcBytes(const char* path, const std::string& name) {
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    if (line.starts_with(name + ":")) return std::stoll(line.substr(name.size() + 1)) * 1024;
  }
  return 0;
}

std::string Gigabytes(int64_t bytes) {
  char text[32];
  std::snprintf(text, sizeof text, "%.1f GB", double(bytes) / 1e9);
  return text;
}

}  // namespace

int64_t ResidentBytes() { return ProcBytes("/proc/self/status", "VmRSS"); }
int64_t PeakBytes() { return ProcBytes("/proc/self/status", "VmHWM"); }
void ResetPeakMemory() { std::ofstream("/proc/self/clear_refs") << "5"; }
int64_t AvailableBytes() { return ProcBytes("/proc/meminfo", "MemAvailable"); }

int64_t EstimateTrainingBytes(const ModelConfig& c, int64_t rows, int64_t length) {
  const double ffn = c.ffn_dim > 0 ? double(c.ffn_dim) : 4.0 * double(c.dim), dim = double(c.dim), tokens = double(rows) * double(length);
  double widths = 0, own_widths = 0, own_layers = 0;  // of the projections of all layers, and of those with parameters of their own
  for (int64_t layer = 0; layer < c.layers; ++layer) {
    const AttentionLayerOptions a = c.Block(layer, c.kind == "decoder_lm" ? Form::kCausal : Form::kBidirectional).attention;
    for (const Projection& p : FindMechanism(a.mechanism).make(a.mechanism_options, a.dims)->Projections()) {
      if (!p.OfTokens() || p.identity) continue;
      widths += double(p.width);
      own_widths += c.TiedTo(layer) == layer ? double(p.width) : 0;
    }
    own_layers += c.TiedTo(layer) == layer;
  }
  const double layers = double(c.layers), slots = std::max(0.0, widths - 3 * layers * dim);  // beyond q, k and v
  const double matrices = dim * own_widths + own_layers * (dim * dim + 2 * dim * ffn);
  const double tables =
      double(c.vocab_size) * dim * (c.tie_embeddings ? 1 : 2) + (c.positions == "learned" ? double(c.max_length) * dim : 0);
  // Weights, gradients, two moments; then what the backward pass keeps for each token: norms, projections, core, feed-forward, residuals.
  const double blocks = layers * (13 * dim + 3 * ffn) + widths + 3 * slots + (c.conv > 0 ? layers * dim + widths : 0);
  const double logits = c.kind == "decoder_lm" ? 4 * double(c.vocab_size) : 0;
  return int64_t(std::min(4 * (4 * (matrices + tables) + tokens * (blocks + 6 * dim + logits)), 9e18));
}

void CheckMemory(const ModelConfig& config, int64_t rows, int64_t length) {
  const int64_t need = EstimateTrainingBytes(config, rows, length), have = AvailableBytes();
  if (have > 0 && need > have) {
    FailUsage("a training step would need about ", Gigabytes(need), " (batch ", rows, " x length ", length, ", ", config.Summary(),
              "), and ", Gigabytes(have),
              " are free; lower train.batch (train.accumulate keeps the effective batch), task.length or the model's size");
  }
}

}  // namespace cistern
