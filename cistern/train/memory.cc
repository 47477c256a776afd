#include <ATen/ATen.h>

#include <algorithm>
#include <fstream>
#include <string>

#include "cistern/attention/mechanism.h"
#include "cistern/base/error.h"
#include "cistern/base/format.h"
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

std::string Gigabytes(int64_t bytes) { return Fixed(double(bytes) / 1e9, 1) + " GB"; }

}  // namespace

int64_t ResidentBytes() { return ProcBytes("/proc/self/status", "VmRSS"); }
int64_t PeakBytes() { return ProcBytes("/proc/self/status", "VmHWM"); }
void ResetPeakMemory() { std::ofstream("/proc/self/clear_refs") << "5"; }
int64_t AvailableBytes() { return ProcBytes("/proc/meminfo", "MemAvailable"); }

namespace {

// Numbers of a stack of layers.
struct Stack {
  double weights = 0, token = 0;  // what the backward pass keeps for each token: norms,
                                  // projections, core, feed-forward, residuals
  double source = 0;  // and for each token of what it attends to, where that is another sequence
};

Stack NumbersOf(const ModelConfig& c, Form form) {
  const LayerStack stack = c.Stack(form);
  const double dim = double(stack.dim()), ffn = double(stack.ffn_dim());
  Stack s;
  for (int64_t layer = 0; layer < stack.layers(); ++layer) {
    const AttentionLayerOptions a = stack.Attention(layer);
    double query = 0, key = 0;  // widths of the projections
    for (const Projection& p : MakeMechanism(a)->Projections()) {
      if (p.OfTokens() && !p.identity) (p.side == Side::kQuery ? query : key) += double(p.width);
    }
    const double widths = query + key,
                 slots = std::max(0.0, widths - 3 * dim);  // beyond q, k and v
    const bool own = stack.TiedTo(layer) == layer;
    if (own) s.weights += dim * (widths + dim);
    s.source += form == Form::kCross ? key + 3 * slots : 0;
    if (form == Form::kCross) {
      s.token += query + 6 * dim;
    } else {
      if (own) s.weights += 2 * dim * ffn;
      s.token += 13 * dim + 3 * ffn + widths + 3 * slots + (a.conv > 0 ? dim + widths : 0);
    }
  }
  return s;
}

}  // namespace

int64_t EstimateTrainingBytes(const ModelConfig& c, int64_t rows, int64_t length, int64_t source) {
  // Weights, gradients, two moments; the logits are never held (nn/head_loss.h).
  double numbers = 4 * c.info().tables(c);
  const bool both = c.info().encodes;
  const double tokens = double(rows) * double(length),
               sources = double(rows) * double(source > 0 ? source : length);
  for (const Form form : c.info().forms) {
    const Stack stack = NumbersOf(c, form);
    const bool of_source = both && form == Form::kBidirectional;
    numbers += 4 * stack.weights + (of_source ? sources : tokens) * stack.token;
    numbers += sources * stack.source;
    if (form != Form::kCross)
      numbers += (of_source ? sources : tokens) * 6 * double(c.Stack(form).dim());
  }
  return int64_t(std::min(4 * numbers, 9e18));
}

void CheckMemory(const ModelConfig& config, int64_t rows, int64_t length) {
  const int64_t need = EstimateTrainingBytes(config, rows, length), have = AvailableBytes();
  if (have > 0 && need > have) {
    FailUsage("a training step would need about ", Gigabytes(need), " (batch ", rows, " x length ",
              length, ", ", config.Summary(), "), and ", Gigabytes(have),
              " are free; lower train.batch (train.accumulate keeps the effective batch), "
              "task.length or the model's size");
  }
}

}  // namespace cistern
