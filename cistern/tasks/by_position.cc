#include "cistern/tasks/by_position.h"

#include <ATen/ops/empty.h>

#include <algorithm>

#include "cistern/base/error.h"
#include "cistern/decode/eval_scope.h"
#include "cistern/decode/measure.h"
#include "cistern/tasks/lm_blocks.h"

namespace cistern {

StartingPoints::StartingPoints(const TokenText& text, int64_t rows) {
  const std::vector<int64_t> ends =
      text.ends.empty() ? std::vector<int64_t>{text.tokens} : text.ends;
  const auto pieces = int64_t(ends.size());
  const auto begin_of = [&](int64_t piece) { return piece == 0 ? 0 : ends[size_t(piece - 1)]; };
  positions = text.tokens;
  if (rows < pieces) {
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t piece = r * pieces / rows, begin = begin_of(piece);
      begins.push_back(begin);
      positions = std::min(positions, ends[size_t(piece)] - begin - 1);
    }
    return;
  }
  for (int64_t piece = 0; piece < pieces; ++piece) {
    const int64_t begin = begin_of(piece), targets = ends[size_t(piece)] - begin - 1,
                  each = std::clamp<int64_t>(rows / pieces, 1, std::max<int64_t>(targets, 1));
    for (int64_t r = 0; r < each; ++r) begins.push_back(begin + r * (targets / each));
    positions = std::min(positions, targets / each);
  }
}

std::vector<PositionBucket> EvaluateByPosition(LanguageModel& model, const TokenText& text,
                                               const ByPositionOptions& options) {
  if (options.rows < 1 || options.piece < 1 || options.first_bucket < 1 || options.buckets < 0 ||
      options.max_positions < 0) {
    FailUsage(
        "by-position: rows, piece and first bucket must be at least 1, buckets and positions at "
        "least 0");
  }
  const int64_t tokens = text.tokens;
  CISTERN_CHECK(tokens >= 2, "[eval] the text has ", tokens,
                " tokens; at least 2 are needed to predict one");
  const ModelConfig& config = model.config();
  const StartingPoints start(text, options.rows);
  const auto rows = int64_t(start.begins.size());
  int64_t positions = start.positions;
  if (options.max_positions > 0) positions = std::min(positions, options.max_positions);
  if (const int64_t limit = config.LengthLimit(Form::kCausal); positions > limit) {
    if (options.max_positions > 0) {
      FailUsage("positions up to ", options.max_positions, " are beyond ", limit,
                ", where the learned positions of this model end");
    }
    positions = limit;
  }
  const int64_t equal = std::min(options.buckets, positions);
  const EvalScope scope(model);
  ModelState state = model.EmptyState(rows);
  std::vector<PositionBucket> buckets;
  int64_t bucket = 0;
  for (int64_t begin = 0; begin < positions; ++bucket) {
    int64_t end = bucket == 0 ? options.first_bucket : 2 * begin;
    if (equal > 0) end = positions * (bucket + 1) / equal;
    end = std::min(end, positions);
    PositionBucket result{begin, end, 0, {}, false};
    while (begin < end) {
      if (options.interrupt && *options.interrupt) {
        result.interrupted = true;
        break;
      }
      CheckStateGrowth(config, state.Bytes(), begin);
      const int64_t length = std::min(options.piece, end - begin);
      const at::Tensor ids = at::empty({rows, length + 1}, at::kLong);
      for (int64_t b = 0; b < rows; ++b)
        text.read(start.begins[size_t(b)] + begin, length + 1,
                  ids.mutable_data_ptr<int64_t>() + b * (length + 1));
      const at::Tensor hidden =
          model.Hidden(ids.narrow(1, 0, length).to(model.options().device()), state);
      MeasureTokens(model, hidden, ids.narrow(1, 1, length), text.token_bytes, result.score);
      begin += length;
      if (options.progress) options.progress(begin, positions);
    }
    result.end = begin;
    result.state_bytes = state.Bytes() / rows;
    if (result.score["tokens"] > 0) buckets.push_back(result);
    if (result.interrupted) break;
  }
  return buckets;
}

}  // namespace cistern
