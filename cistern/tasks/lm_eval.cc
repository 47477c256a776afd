#include "cistern/tasks/lm_eval.h"

#include <ATen/ops/argmax.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/logsumexp.h>

#include <algorithm>
#include <cmath>

#include "cistern/base/error.h"
#include "cistern/decode/eval_scope.h"
#include "cistern/decode/measure.h"

namespace cistern {
namespace {

// hidden [B,T,D] predicts targets [B,T]. The logits are formed for some rows at a time, so that a
// large vocabulary fits.
LmScore ScoreHidden(const LanguageModel& model, const at::Tensor& hidden, const at::Tensor& targets,
                    const std::vector<int32_t>& token_bytes) {
  const at::Tensor flat = hidden.reshape({-1, hidden.size(-1)}), wanted = targets.reshape({-1});
  const int64_t rows = flat.size(0),
                at_once = std::max<int64_t>(1, (int64_t{1} << 24) / model.config().vocab_size);
  LmScore score;
  for (int64_t i = 0; i < rows; i += at_once) {
    const int64_t n = std::min(at_once, rows - i);
    const at::Tensor logits = model.Logits(flat.narrow(0, i, n)),
                     target = wanted.narrow(0, i, n).to(flat.device());
    const at::Tensor nats = at::logsumexp(logits, 1).to(at::kDouble) -
                            logits.gather(1, target.unsqueeze(1)).squeeze(1).to(at::kDouble);
    score.nats += nats.sum().item<double>();
    score.correct += at::argmax(logits, 1).eq(target).sum().item<int64_t>();
  }
  score.tokens = rows;
  const at::Tensor on_cpu = wanted.contiguous();
  for (int64_t i = 0; i < rows; ++i)
    score.bytes += token_bytes.at(size_t(on_cpu.const_data_ptr<int64_t>()[i]));
  CISTERN_CHECK(std::isfinite(score.nats), "[eval] the model's loss is ", score.nats,
                "; its weights are broken");
  return score;
}

void CheckEvalText(const LanguageModel& model, int64_t tokens,
                   const std::vector<int32_t>& token_bytes) {
  CISTERN_CHECK(tokens >= 2, "[eval] the text has ", tokens,
                " tokens; at least 2 are needed to predict one");
  CISTERN_CHECK(int64_t(token_bytes.size()) == model.config().vocab_size, "[eval] the model has ",
                model.config().vocab_size, " tokens, the tokenizer ", token_bytes.size());
}

}  // namespace

std::vector<int32_t> TokenBytes(const Tokenizer& tokenizer) {
  std::vector<int32_t> bytes;
  const int32_t separator = tokenizer.AddedToken("<|endoftext|>");
  for (int32_t id = 0; id < tokenizer.vocab_size(); ++id)
    bytes.push_back(id == separator ? 0 : int32_t(tokenizer.Bytes(id).size()));
  return bytes;
}

double LmScore::nats_per_token() const { return nats / double(tokens); }
double LmScore::bits_per_byte() const {
  return bytes > 0 ? nats / std::log(2.0) / double(bytes) : std::nan("");
}
double LmScore::perplexity() const { return std::exp(nats_per_token()); }
double LmScore::accuracy() const { return double(correct) / double(tokens); }
void LmScore::Add(const LmScore& other) {
  nats += other.nats;
  tokens += other.tokens;
  bytes += other.bytes;
  correct += other.correct;
  interrupted = interrupted || other.interrupted;
}

LmScore EvaluateBlocks(LanguageModel& model, const TokenReader& read, int64_t tokens,
                       const std::vector<int32_t>& token_bytes, const LmEvalOptions& options) {
  if (options.length < 1) FailUsage("length must be 1 or above, got ", options.length);
  if (options.batch < 1) FailUsage("batch must be 1 or above, got ", options.batch);
  const ModelConfig& config = model.config();
  if (config.positions == "learned" && options.length > config.max_length) {
    FailUsage("length=", options.length, " is beyond max_length=", config.max_length,
              ", where the learned positions of this model end");
  }
  CheckEvalText(model, tokens, token_bytes);
  const EvalScope scope(model);
  const int64_t predicted =
      options.max_tokens > 0 ? std::min(options.max_tokens, tokens - 1) : tokens - 1;
  LmScore total;
  for (int64_t begin = 0; begin < predicted;) {
    if (options.interrupt && *options.interrupt) {
      total.interrupted = true;
      break;
    }
    // Whole blocks together, the shorter last one alone.
    const int64_t whole = (predicted - begin) / options.length;
    const int64_t rows = std::clamp<int64_t>(whole, 1, options.batch),
                  length = whole > 0 ? options.length : predicted - begin;
    const at::Tensor ids = at::empty({rows, length + 1}, at::kLong);
    for (int64_t b = 0; b < rows; ++b)
      read(begin + b * length, length + 1, ids.mutable_data_ptr<int64_t>() + b * (length + 1));
    ModelState state = model.EmptyState(rows);
    const at::Tensor hidden =
        model.Hidden(ids.narrow(1, 0, length).to(model.options().device()), state);
    total.Add(ScoreHidden(model, hidden, ids.narrow(1, 1, length), token_bytes));
    begin += rows * length;
    if (options.progress) options.progress(begin, predicted);
  }
  return total;
}

std::vector<PositionBucket> EvaluateByPosition(LanguageModel& model, const TokenReader& read,
                                               int64_t tokens,
                                               const std::vector<int32_t>& token_bytes,
                                               const ByPositionOptions& options) {
  if (options.rows < 1 || options.piece < 1 || options.first_bucket < 1 || options.buckets < 0 ||
      options.max_positions < 0) {
    FailUsage(
        "by-position: rows, piece and first bucket must be at least 1, buckets and positions at "
        "least 0");
  }
  CheckEvalText(model, tokens, token_bytes);
  const ModelConfig& config = model.config();
  const int64_t rows = std::min(options.rows, tokens - 1), stride = (tokens - 1) / rows;
  int64_t positions = options.max_positions > 0 ? std::min(options.max_positions, stride) : stride;
  if (config.positions == "learned" && positions > config.max_length) {
    if (options.max_positions > 0) {
      FailUsage("positions up to ", options.max_positions,
                " are beyond max_length=", config.max_length,
                ", where the learned positions of this model end");
    }
    positions = config.max_length;
  }
  const EvalScope scope(model);
  ModelState state = model.EmptyState(rows);
  std::vector<PositionBucket> buckets;
  int64_t bucket = 0;
  for (int64_t begin = 0; begin < positions; ++bucket) {
    int64_t end = bucket == 0 ? options.first_bucket : 2 * begin;
    if (options.buckets > 0) end = positions * (bucket + 1) / options.buckets;
    end = std::min(end, positions);
    if (end == begin) continue;  // more buckets than positions
    PositionBucket result{begin, end, 0, {}};
    while (begin < end) {
      if (options.interrupt && *options.interrupt) {
        result.score.interrupted = true;
        break;
      }
      CheckStateGrowth(config, state.Bytes(), begin);
      const int64_t length = std::min(options.piece, end - begin);
      const at::Tensor ids = at::empty({rows, length + 1}, at::kLong);
      for (int64_t b = 0; b < rows; ++b)
        read(b * stride + begin, length + 1, ids.mutable_data_ptr<int64_t>() + b * (length + 1));
      const at::Tensor hidden =
          model.Hidden(ids.narrow(1, 0, length).to(model.options().device()), state);
      result.score.Add(ScoreHidden(model, hidden, ids.narrow(1, 1, length), token_bytes));
      begin += length;
      if (options.progress) options.progress(begin, positions);
    }
    result.end = begin;
    result.state_bytes = state.Bytes() / rows;
    if (result.score.tokens > 0) buckets.push_back(result);
    if (result.score.interrupted) break;
  }
  return buckets;
}

}  // namespace cistern
