#include "cistern/decode/generate.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <chrono>

#include "cistern/base/error.h"
#include "cistern/decode/eval_scope.h"
#include "cistern/decode/measure.h"
#include "cistern/decode/text_output.h"

namespace cistern {
namespace {

using Clock = std::chrono::steady_clock;

double SecondsSince(Clock::time_point begin) { return std::chrono::duration<double>(Clock::now() - begin).count(); }

// ids [B,T] from rows of up to T tokens, padded on the right, and the mask that says so; no mask where nothing is padded.
struct TokenBatch {
  at::Tensor ids;
  ops::Mask mask;
};

TokenBatch MakeTokenBatch(const std::vector<std::vector<int32_t>>& rows, const at::TensorOptions& options) {
  size_t longest = 0;
  for (const auto& row : rows) longest = std::max(longest, row.size());
  const auto integers = at::TensorOptions().dtype(at::kLong);
  TokenBatch batch;
  batch.ids = at::zeros({int64_t(rows.size()), int64_t(longest)}, integers);
  const at::Tensor lengths = at::empty({int64_t(rows.size())}, integers);
  bool padded = false;
  for (size_t b = 0; b < rows.size(); ++b) {
    std::copy(rows[b].begin(), rows[b].end(), batch.ids.mutable_data_ptr<int64_t>() + b * longest);
    lengths.mutable_data_ptr<int64_t>()[b] = int64_t(rows[b].size());
    padded = padded || rows[b].size() != longest;
  }
  batch.ids = batch.ids.to(options.device());
  if (padded) batch.mask.lengths = lengths.to(options.device());
  return batch;
}

}  // namespace

struct Generator::Row {
  Row(const Tokenizer& tokenizer, ByteSource source, const GenerateOptions& options)
      : prompt(tokenizer, std::move(source)), seen(tokenizer.vocab_size(), options.sampler.repetition_window), output(options.stop) {}
  PromptReader prompt;
  SeenTokens seen;
  TextOutput output;
  Generation result;
  bool done = false;
};

void GenerateOptions::Validate() const {
  sampler.Validate();
  if (max_tokens < 0) FailUsage("max-tokens must be 0 or above, got ", max_tokens);
  if (top_logprobs < 0) FailUsage("logprobs must be 0 or above, got ", top_logprobs);
  if (piece < 1) FailUsage("a piece of the prompt must have at least 1 token, got ", piece);
}

std::string FinishName(Finish finish) {
  switch (finish) {
    case Finish::kLength:
      return "length";
    case Finish::kStopString:
      return "stop_string";
    case Finish::kStopToken:
      return "stop_token";
    case Finish::kInterrupted:
      return "interrupted";
  }
  return "";
}

Generator::Generator(std::shared_ptr<DecoderLm> model, std::shared_ptr<const Tokenizer> tokenizer)
    : model_(std::move(model)), tokenizer_(std::move(tokenizer)) {
  CISTERN_CHECK(model_ && tokenizer_, "[generate] needs a model and a tokenizer");
  CISTERN_CHECK(model_->config().vocab_size == tokenizer_->vocab_size(), "[generate] the model has ", model_->config().vocab_size,
                " tokens, the tokenizer ", tokenizer_->vocab_size());
}

Generation Generator::Run(const std::string& prompt, const GenerateOptions& options) {
  return Run(std::vector<ByteSource>{StringSource(prompt)}, options)[0];
}

std::vector<Generation> Generator::Run(std::vector<ByteSource> prompts, const GenerateOptions& options, const OnText& on_text,
                                       const std::atomic<bool>* interrupt) {
  options.Validate();
  stats_ = {};
  std::deque<Row> rows;
  for (ByteSource& source : prompts) {
    rows.emplace_back(*tokenizer_, std::move(source), options);
  }
  if (rows.empty()) return {};
  const EvalScope scope(*model_);
  ModelState state = model_->EmptyState(int64_t(rows.size()));
  const at::Tensor hidden = Prefill(rows, state, options, interrupt);
  Decode(rows, hidden, state, options, on_text, interrupt);
  stats_.state_bytes = state.Bytes();
  std::vector<Generation> out;
  for (Row& row : rows) {
    stats_.prompt_tokens += row.result.prompt_tokens;
    stats_.tokens += int64_t(row.result.tokens.size());
    out.push_back(std::move(row.result));
  }
  return out;
}

// Every prompt into the state; returns the hidden state [B,1,D] at the last token of each.
at::Tensor Generator::Prefill(std::deque<Row>& rows, ModelState& state, const GenerateOptions& options,
                              const std::atomic<bool>* interrupt) {
  const auto begin = Clock::now();
  const ModelConfig& config = model_->config();
  at::Tensor last;
  for (int64_t position = 0; !(interrupt && *interrupt); position += options.piece) {
    std::vector<std::vector<int32_t>> pieces;
    for (size_t b = 0; b < rows.size(); ++b) {
      Row& row = rows[b];
      pieces.push_back(row.prompt.Take(options.piece));
      for (const int32_t token : pieces.back()) row.seen.Push(token);
      const int64_t tokens = row.result.prompt_tokens = row.prompt.taken();
      if (config.positions == "learned" && tokens + options.max_tokens > config.max_length) {
        FailUsage("prompt ", options.first_row + int64_t(b), " has ", tokens, " tokens or more, and with max-tokens=", options.max_tokens,
                  " it would go beyond max_length=", config.max_length, ", where the learned positions of this model end");
      }
    }
    if (std::all_of(pieces.begin(), pieces.end(), [](const auto& p) { return p.empty(); })) break;
    CheckStateGrowth(config, state.Bytes(), position);
    const TokenBatch batch = MakeTokenBatch(pieces, model_->options());
    const at::Tensor hidden = model_->Hidden(batch.ids, state, batch.mask);
    if (!last.defined()) last = at::zeros({hidden.size(0), 1, hidden.size(2)}, hidden.options());
    for (size_t b = 0; b < rows.size(); ++b) {
      const int64_t length = int64_t(pieces[b].size());
      if (length > 0) last.select(0, int64_t(b)).copy_(hidden.select(0, int64_t(b)).narrow(0, length - 1, 1));
    }
  }
  stats_.prompt_seconds = SecondsSince(begin);
  return last;
}

void Generator::Decode(std::deque<Row>& rows, at::Tensor hidden, ModelState& state, const GenerateOptions& options, const OnText& on_text,
                       const std::atomic<bool>* interrupt) {
  const auto begin = Clock::now();
  const Sampler sampler(options.sampler);
  const int32_t end_token = options.stop_at_end ? tokenizer_->AddedToken("<|endoftext|>") : -1;
  const auto show = [&](size_t b, const std::string& text) {
    rows[b].result.text += text;
    if (on_text && !text.empty()) on_text(b, text);
  };
  const auto finish = [&](size_t b, Finish why) {
    rows[b].done = true;
    rows[b].result.finish = why;
    show(b, rows[b].output.Finish());
  };

  for (int64_t step = 0;; ++step) {
    const bool stopping = interrupt && *interrupt;
    if (stopping || step == options.max_tokens) {
      for (size_t b = 0; b < rows.size(); ++b) {
        if (!rows[b].done) finish(b, stopping ? Finish::kInterrupted : Finish::kLength);
      }
      break;
    }
    const at::Tensor logits = model_->Logits(hidden).to(at::kCPU, at::kDouble).contiguous();  // [B,1,V]
    const size_t vocab = size_t(logits.size(2));
    std::vector<std::vector<int32_t>> next(rows.size());
    bool going = false;
    for (size_t b = 0; b < rows.size(); ++b) {
      Row& row = rows[b];
      if (row.done) continue;
      const std::span<const double> scores(logits.const_data_ptr<double>() + b * vocab, vocab);
      Choice choice = sampler.Choose(scores, &row.seen, options.first_row + int64_t(b), step, options.top_logprobs);
      row.seen.Push(choice.token);
      row.result.tokens.push_back(choice.token);
      row.result.logprobs.push_back(choice.logprob);
      if (options.top_logprobs > 0) row.result.top.push_back(std::move(choice.top));
      if (choice.token == end_token) {
        finish(b, Finish::kStopToken);
        continue;
      }
      show(b, row.output.Push(tokenizer_->Bytes(choice.token)));
      if (row.output.stopped()) {
        finish(b, Finish::kStopString);
        continue;
      }
      next[b] = {choice.token};
      going = true;
    }
    if (!going) break;
    if (step + 1 == options.max_tokens) continue;  // the last token is not written: nobody reads after it
    if (step % 1024 == 0) CheckStateGrowth(model_->config(), state.Bytes(), rows[0].result.prompt_tokens + step);
    const TokenBatch batch = MakeTokenBatch(next, model_->options());  // rows that ended are padding
    hidden = model_->Hidden(batch.ids, state, batch.mask);
  }
  stats_.seconds = SecondsSince(begin);
}

}  // namespace cistern
