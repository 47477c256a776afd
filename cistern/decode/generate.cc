#include "cistern/decode/generate.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/gt.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <chrono>

#include "cistern/base/error.h"
#include "cistern/decode/decode_threads.h"
#include "cistern/decode/eval_scope.h"
#include "cistern/decode/measure.h"
#include "cistern/decode/text_output.h"
#include "cistern/ops/impl.h"

namespace cistern {
namespace {

using Clock = std::chrono::steady_clock;

double SecondsSince(Clock::time_point begin) {
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

// Not where torch's operations decide the bits, which may share out their sums: without kernels, in
// reuse that keeps scores and in a performer with eps (verify/properties_machine.cc).
bool ThreadsChangeNoBit(const ModelConfig& config) {
  const LayerStack stack = config.Stack(Form::kCausal);
  bool ours = ops::ActiveImpl() == ops::Impl::kKernel;
  for (int64_t i = 0; i < stack.layers(); ++i) {
    for (const char* torchs : {"reuse", "performer"})
      ours = ours && stack.Mechanism(i).find(torchs) == std::string::npos;
  }
  return ours;
}

// ids [B,T] from rows of up to T tokens, padded on the right, and the mask that says so; no mask
// where nothing is padded.
struct TokenBatch {
  at::Tensor ids;
  ops::Mask mask;
};

TokenBatch MakeTokenBatch(const std::vector<std::vector<int32_t>>& rows,
                          const at::TensorOptions& options) {
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
  Row(const Tokenizer& tokenizer, PromptSource source, const GenerateOptions& options,
      TokenHistory& history_, bool start)
      : prompt(tokenizer, std::move(source), start),
        history(history_),
        seen(tokenizer.vocab_size(), options.sampler.repetition_window),
        output(options.stop) {
    if (options.sampler.repetition_window == 0) {
      for (size_t token = 0; token < history.ever.size(); ++token) {
        if (history.ever[token]) seen.Push(int32_t(token));
      }
    } else {
      for (const int32_t token : history.recent) seen.Push(token);
    }
  }
  void Push(int32_t token) {
    history.Push(token);
    seen.Push(token);
  }
  PromptReader prompt;
  TokenHistory& history;
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

Generator::Generator(std::shared_ptr<LanguageModel> model,
                     std::shared_ptr<const Tokenizer> tokenizer)
    : model_(std::move(model)), tokenizer_(std::move(tokenizer)) {
  CISTERN_CHECK(model_ && tokenizer_, "[generate] needs a model and a tokenizer");
  CISTERN_CHECK(model_->config().vocab_size == tokenizer_->vocab_size(),
                "[generate] the model has ", model_->config().vocab_size, " tokens, the tokenizer ",
                tokenizer_->vocab_size());
}

Generation Generator::Run(const std::string& prompt, const GenerateOptions& options) {
  return Run(std::vector<PromptSource>{StringSource(prompt)}, options)[0];
}

std::vector<Generation> Generator::Run(std::vector<PromptSource> prompts,
                                       const GenerateOptions& options, const OnText& on_text,
                                       const std::atomic<bool>* interrupt, const TextState* from) {
  const int64_t rows = int64_t(prompts.size());
  CISTERN_CHECK(!from || from->rows() == 1, "[generate] prompts continue a text of one row, got ",
                from ? from->rows() : 0);
  TextState text =
      from ? from->Reorder(std::vector<int64_t>(prompts.size(), 0)) : EmptyTextState(*model_, rows);
  return Go(text, std::move(prompts), {options, on_text, interrupt, false});
}

std::vector<Generation> Generator::Continue(TextState& text, std::vector<PromptSource> prompts,
                                            const GenerateOptions& options, const OnText& on_text,
                                            const std::atomic<bool>* interrupt) {
  CISTERN_CHECK(int64_t(prompts.size()) == text.rows(), "[generate] the text has ", text.rows(),
                " rows, got ", prompts.size(), " prompts");
  return Go(text, std::move(prompts), {options, on_text, interrupt, true});
}

std::vector<Generation> Generator::Go(TextState& text, std::vector<PromptSource> prompts,
                                      const Job& job) {
  const GenerateOptions& options = job.options;
  options.Validate();
  stats_ = {};
  std::deque<Row> rows;
  for (size_t b = 0; b < prompts.size(); ++b) {
    const int64_t position = text.position(int64_t(b));
    if (options.sampler.repetition_penalty != 1 &&
        options.sampler.repetition_window > TokenHistory::kRecent &&
        position > TokenHistory::kRecent) {
      FailUsage("a text that is continued remembers its last ", TokenHistory::kRecent,
                " tokens, got repetition-window=", options.sampler.repetition_window,
                "; take a smaller one, or 0 for all tokens");
    }
    rows.emplace_back(*tokenizer_, std::move(prompts[b]), options, text.history[b], position == 0);
  }
  if (rows.empty()) return {};
  const DecodeScope scope(*model_);
  Prefill(rows, text, job);
  Decode(rows, text, job);
  stats_.state_bytes = text.Bytes();
  std::vector<Generation> out;
  for (size_t b = 0; b < rows.size(); ++b) {
    Generation& result = rows[b].result;
    stats_.prompt_tokens += result.prompt_tokens;
    stats_.tokens += int64_t(result.tokens.size());
    text.drawn[b] += int64_t(result.tokens.size());
    out.push_back(std::move(result));
  }
  return out;
}

// Every prompt into the state, and the hidden state at the last token of each.
void Generator::Prefill(std::deque<Row>& rows, TextState& text, const Job& job) {
  const auto begin = Clock::now();
  const GenerateOptions& options = job.options;
  const ModelConfig& config = model_->config();
  const int64_t limit = config.LengthLimit(Form::kCausal);
  std::vector<int64_t> before;
  for (size_t b = 0; b < rows.size(); ++b) before.push_back(text.position(int64_t(b)));
  if (text.hidden.defined()) text.hidden = text.hidden.clone();
  for (int64_t position = 0;; position += options.piece) {
    if (job.Stopping()) {
      for (Row& row : rows) row.result.prompt_read = false;
      break;
    }
    std::vector<std::vector<int32_t>> pieces;
    for (size_t b = 0; b < rows.size(); ++b) {
      Row& row = rows[b];
      pieces.push_back(row.prompt.Take(options.piece));
      for (const int32_t token : pieces.back()) row.Push(token);
      row.result.prompt_tokens = row.prompt.taken();
      const int64_t tokens = before[b] + row.result.prompt_tokens;
      if (options.max_tokens > limit - tokens) {
        FailUsage("prompt ", options.first_row + int64_t(b),
                  before[b] > 0 ? " and the text that it continues have " : " has ", tokens,
                  " tokens or more, and with max-tokens=", options.max_tokens,
                  " it would go beyond the ", limit,
                  " tokens where the positions of this model end (max_length)");
      }
    }
    if (std::all_of(pieces.begin(), pieces.end(), [](const auto& p) { return p.empty(); })) break;
    CheckStateGrowth(config, text.Bytes(), before[0] + position);
    const TokenBatch batch = MakeTokenBatch(pieces, model_->options());
    const at::Tensor hidden = model_->Hidden(batch.ids, text.model, batch.mask);
    if (!text.hidden.defined())
      text.hidden = at::zeros({hidden.size(0), 1, hidden.size(2)}, model_->options());
    for (size_t b = 0; b < rows.size(); ++b) {
      const int64_t length = int64_t(pieces[b].size());
      if (length > 0)
        text.hidden.select(0, int64_t(b))
            .copy_(hidden.select(0, int64_t(b)).narrow(0, length - 1, 1));
    }
  }
  stats_.prompt_seconds = SecondsSince(begin);
}

void Generator::Decode(std::deque<Row>& rows, TextState& text, const Job& job) {
  const auto begin = Clock::now();
  const GenerateOptions& options = job.options;
  const Sampler sampler(options.sampler);
  const int32_t end_token = tokenizer_->AddedToken("<|endoftext|>");  // ends a text
  const auto show = [&](size_t b, const std::string& shown) {
    rows[b].result.text += shown;
    if (job.on_text && !shown.empty()) job.on_text(b, shown);
  };
  const auto finish = [&](size_t b, Finish why) {
    rows[b].done = true;
    rows[b].result.finish = why;
    show(b, rows[b].output.Finish());
  };

  const at::TensorOptions on = model_->options();  // looks at all parameters
  const bool choose = on.device().is_cpu() && ThreadsChangeNoBit(model_->config());
  DecodeThreads threads(choose ? int64_t(rows.size()) : DecodeThreads::kRows + 1);
  for (int64_t step = 0;; ++step) {
    const auto began = Clock::now();
    if (job.Stopping() || step == options.max_tokens) {
      for (size_t b = 0; b < rows.size(); ++b) {
        if (!rows[b].done) finish(b, job.Stopping() ? Finish::kInterrupted : Finish::kLength);
      }
      break;
    }
    const at::Tensor logits =
        model_->Logits(text.hidden).to(at::kCPU, at::kDouble).contiguous();  // [B,1,V]
    const size_t vocab = size_t(logits.size(2));
    std::vector<std::vector<int32_t>> next(rows.size());
    bool going = false, writing = false;
    for (size_t b = 0; b < rows.size(); ++b) {
      Row& row = rows[b];
      if (row.done) continue;
      const std::span<const double> scores(logits.const_data_ptr<double>() + b * vocab, vocab);
      Choice choice = sampler.Choose(scores, &row.seen, options.first_row + int64_t(b),
                                     text.drawn[b] + step, options.top_logprobs);
      row.result.tokens.push_back(choice.token);
      row.result.logprobs.push_back(choice.logprob);
      if (options.top_logprobs > 0) row.result.top.push_back(std::move(choice.top));
      if (choice.token == end_token) {
        finish(b, Finish::kStopToken);
        continue;
      }
      row.Push(choice.token);
      show(b, row.output.Push(tokenizer_->Bytes(choice.token)));
      if (row.output.stopped()) finish(b, Finish::kStopString);
      going = going || !row.done;
      if (row.done && !job.keep) continue;
      next[b] = {choice.token};
      writing = true;
    }
    // The last token is written only if the text is continued.
    if (!job.keep && step + 1 == options.max_tokens) continue;
    if (!(job.keep ? writing : going)) break;
    if (step % 1024 == 0) CheckStateGrowth(model_->config(), text.Bytes(), text.position(0));
    const TokenBatch batch = MakeTokenBatch(next, on);  // rows that ended are padding
    const at::Tensor hidden = model_->Hidden(batch.ids, text.model, batch.mask);
    text.hidden = batch.mask.lengths
                      ? at::where((*batch.mask.lengths > 0).view({-1, 1, 1}), hidden, text.hidden)
                      : hidden;
    if (!going) break;
    threads.Token(SecondsSince(began));
  }
  stats_.of_one_thread = threads.of_one();
  stats_.seconds = SecondsSince(begin);
}

}  // namespace cistern
