#include <ATen/ATen.h>

#include <algorithm>
#include <string>

#include "cistern/attention/mechanism.h"
#include "cistern/attention/operations.h"
#include "cistern/base/error.h"
#include "cistern/base/format.h"
#include "cistern/base/memory.h"
#include "cistern/base/parallel.h"
#include "cistern/tasks/row_groups.h"
#include "cistern/train/trainer.h"

namespace cistern {
namespace {

std::string Gigabytes(double bytes) { return Fixed(bytes / 1e9, 1) + " GB"; }

// Numbers of a stack of layers.
struct Stack {
  double weights = 0, token = 0;  // what the backward pass keeps for each token: norms,
                                  // projections, core, feed-forward, residuals
  double source = 0;  // and for each token of what it attends to, where that is another sequence
  // For each pair of a token and what it attends to: probabilities that are written out, of all
  // layers, and of the one whose gradients are being taken.
  double pair = 0, pair_at_once = 0, heads = 0;
  double bias = 0;  // of relative positions, for each such pair within one row, whatever the batch
};

// With learned relative positions probabilities are written out, and where scores are copied with
// dropout: softmax and its kind keep them, which are dropped, and the result; the backward pass has
// the gradients of both and of the scores.
constexpr double kPairKept = 2.5, kPairBackward = 4;
// Where those of a layer are more than this, they are formed some rows at a time
// (ops/blockwise_attention.h), in the backward pass again.
constexpr double kPairsOfABlock = 1 << 22, kPairBlock = 6;

// Of all heads: slots or features, each a mean or a sum over tokens and its normaliser.
double StateSlots(const Mechanism& mechanism, const LayerStack& stack) {
  const at::TensorOptions options = at::TensorOptions().dtype(at::kFloat);
  const double numbers = double(mechanism.StateBytes(1, 0, options, true)) / 8;
  return numbers / (double(stack.options().qkv_dim) / double(stack.options().heads) + 1);
}

// Whether the feed-forward keeps one number of its hidden width for each token
// (ops/feed_forward.h), and not what its activation gives.
bool FeedForwardByBlocks(const ModelConfig& c, int64_t bytes) {
  return bytes == 4 && c.activation == Activation::kGelu;
}

Stack NumbersOf(const ModelConfig& c, Form form, int64_t bytes) {
  const LayerStack stack = c.Stack(form);
  const double dim = double(stack.dim()), qkv = double(stack.options().qkv_dim),
               ffn = double(stack.ffn_dim()) *
                     (c.activation == Activation::kGeglu ? 1.5 : 1);  // three maps for two
  Stack s;
  for (int64_t layer = 0; layer < stack.layers(); ++layer) {
    const AttentionLayerOptions a = stack.Attention(layer);
    double query = 0, key = 0;  // widths of the projections
    const auto mechanism = MakeMechanism(a);
    // Relative positions are learned, and the gradient of a bias needs the probabilities.
    const MechanismInfo& info = mechanism->info();
    if (info.exact &&
        (a.positions == PositionKind::kRelative || (a.dims.dropout > 0 && info.copies_scores))) {
      s.pair += kPairKept * double(stack.options().heads);
      s.pair_at_once = kPairBackward * double(stack.options().heads);
      s.heads = double(stack.options().heads);
    }
    if (a.positions == PositionKind::kRelative) s.bias += double(stack.options().heads) + 2;
    for (const Projection& p : mechanism->Projections()) {
      if (p.OfTokens() && !p.identity) (p.side == Side::kQuery ? query : key) += double(p.width);
    }
    // Beyond q, k and v; features are computed, not projected, but no less kept, unless a walk
    // forms them as it goes.
    const auto* counts = dynamic_cast<const CountsOperations*>(mechanism.get());
    const double widths = query + key,
                 features =
                     counts && counts->FormsFeatures(form) ? 0 : StateSlots(*mechanism, stack),
                 slots = std::max({0.0, widths - 3 * qkv, features});
    const bool own = stack.TiedTo(layer) == layer;
    if (own) s.weights += dim * (widths + qkv);
    s.source += form == Form::kCross ? key + 2 * slots : 0;
    if (form == Form::kCross) {
      s.token += query + 4 * dim;
    } else {
      if (own) s.weights += 2 * dim * ffn;
      s.token += FeedForwardByBlocks(c, bytes) ? 9 * dim + 1.5 * ffn : 12 * dim + 3 * ffn;
      s.token += widths + 3 * slots + (a.conv > 0 ? dim + widths : 0);
    }
  }
  return s;
}

}  // namespace

int64_t EstimateTrainingBytes(const ModelConfig& c, int64_t rows, int64_t length, int64_t source,
                              int64_t bytes, int64_t copies) {
  // Weights, gradients, two moments; the logits are never held (nn/head_loss.h).
  double numbers = double(copies) * c.info().tables(c);
  const bool both = c.info().encodes;
  const double wide = double(source > 0 ? source : length), tokens = double(rows) * double(length),
               sources = double(rows) * wide;
  for (const Form form : c.info().forms) {
    const Stack stack = NumbersOf(c, form, bytes);
    const bool of_source = both && form == Form::kBidirectional, cross = form == Form::kCross;
    const double own = of_source ? sources : tokens,
                 seen = of_source || cross ? wide : double(length);  // by each of them
    numbers += double(copies) * stack.weights + own * stack.token + sources * stack.source;
    const double pairs = own * seen * stack.heads;
    numbers += pairs > kPairsOfABlock
                   ? kPairBlock * kPairsOfABlock
                   : own * seen * (stack.pair + (cross ? 0 : stack.pair_at_once));
    if (stack.bias > 0) numbers += seen * seen * stack.bias;
    if (!cross) numbers += own * 6 * double(c.Stack(form).input_dim());
  }
  return int64_t(std::min(double(bytes) * numbers, 9e18));
}

namespace {

// Bytes of a token that waits for its turn: its id and its target, of this batch and five that are
// made ahead or put in order.
constexpr int64_t kWaitingBytes = 6 * 2 * 8;

// How a run goes through a batch, and what a step of it needs.
struct Plan {
  int64_t rows_at_once = 0, bytes = 0;
};

// Of one of the processes that share the rows. Each makes the whole batch.
Plan PlanOf(const ModelConfig& config, int64_t rows, int64_t length, int64_t bytes,
            const TrainOptions& options, int64_t source, int64_t processes) {
  const int64_t own = (rows + processes - 1) / processes;
  const auto plan = [&](int64_t parts) {
    const int64_t at_once = RowsAtOnce(config, own, length + source, parts),
                  copies = options.NumbersPerParameter() + parts - 1;
    const double waiting = double(kWaitingBytes) * double(rows - at_once) * double(length + source);
    const int64_t step = EstimateTrainingBytes(config, at_once, length, source, bytes, copies);
    return Plan{at_once, int64_t(std::min(double(step) + waiting, 9e18))};
  };
  const int64_t parts = std::clamp<int64_t>(own, 1, NumThreads()),
                gradients = EstimateTrainingBytes(config, 0, length, source, bytes, parts) -
                            EstimateTrainingBytes(config, 0, length, source, bytes, 1);
  const bool of_rows = options.parallel == ThreadsTake::kRows ||
                       (options.parallel == ThreadsTake::kAuto && gradients <= kAutoGradientBytes);
  return plan(of_rows ? parts : 1);
}

}  // namespace

int64_t EstimateRunBytes(const ModelConfig& config, int64_t rows, int64_t length, int64_t bytes,
                         const TrainOptions& options, int64_t source, int64_t processes) {
  return PlanOf(config, rows, length, bytes, options, source, processes).bytes;
}

void CheckMemory(const ModelConfig& config, int64_t rows, int64_t length, int64_t bytes,
                 const TrainOptions& options, int64_t source, const Processes& processes) {
  const auto plan_of = [&](int64_t count) {
    return PlanOf(config, count, length, bytes, options, source, processes.count());
  };
  const Plan plan = plan_of(rows);
  const int64_t here = processes.Here(), shared = SharedAvailableBytes(), own = OwnAvailableBytes();
  const double one = double(plan.bytes), all = double(here) * one;
  const bool beyond_own = one > double(own);
  if (!beyond_own && all <= double(shared)) return;
  const Plan half = plan_of(std::max<int64_t>(1, rows / 2));
  const bool of_the_batch = double(half.bytes) < 0.8 * double(plan.bytes);
  FailUsage("a training step would need about ", Gigabytes(beyond_own ? one : all), " (",
            here == 1    ? ""
            : beyond_own ? StrCat("each of ", here, " processes, ")
                         : StrCat(here, " processes on this machine, "),
            "batch ", rows, " x length ", length,
            plan.rows_at_once == rows ? "" : StrCat(", ", plan.rows_at_once, " rows at once"), ", ",
            config.Summary(), "), and ", Gigabytes(double(beyond_own ? own : shared)),
            beyond_own ? " are left of its limit of address space (ulimit -v)" : " are free",
            "; lower ",
            of_the_batch ? "train.batch (train.accumulate keeps the effective batch), " : "",
            "task.length or the model's size",
            beyond_own ? ", or raise the limit"
            : here > 1 ? ", or start one process with more --threads"
                       : "");
}

}  // namespace cistern
