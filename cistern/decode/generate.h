#pragma once
// Text from a language model: prompts are consumed piece by piece, then one token at a time is
// drawn, written and shown. What was read can be saved (text_state.h) and continued: a long
// prompt is read once and used often.
#include <atomic>
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "cistern/decode/prompt.h"
#include "cistern/decode/sampler.h"
#include "cistern/decode/text_state.h"
#include "cistern/models/language_model.h"

namespace cistern {

struct GenerateOptions {
  SamplerOptions sampler;
  int64_t max_tokens = 200;
  std::vector<std::string> stop;  // text from the first of these on is not shown
  int64_t top_logprobs = 0;       // also keep the N most likely tokens of every step
  int64_t piece = 1024;           // prompt tokens per extend: what bounds the memory
  int64_t first_row = 0;          // row b of the batch draws as row first_row + b

  void Validate() const;  // UsageError
};

enum class Finish { kLength, kStopString, kStopToken, kInterrupted };
std::string FinishName(Finish finish);

struct Generation {
  std::string text;  // whole characters; without the stop string
  std::vector<int32_t>
      tokens;  // all that were drawn, those of a stop string and the stop token included
  std::vector<double> logprobs;  // of each token, by the model itself
  std::vector<std::vector<TokenLogprob>> top;
  int64_t prompt_tokens = 0;
  bool prompt_read = true;  // false: interrupted before the end of the prompt
  Finish finish = Finish::kLength;
};

struct GenerateStats {
  int64_t prompt_tokens = 0, tokens = 0;  // over all rows
  double prompt_seconds = 0, seconds = 0;
  int64_t of_one_thread = 0;  // steps that one thread took alone, as the machine was busy
  int64_t state_bytes = 0;    // at the end, of the whole batch
};

class Generator {
 public:
  // Row of the batch, and its next characters.
  using OnText = std::function<void(size_t row, std::string_view text)>;

  Generator(std::shared_ptr<LanguageModel> model, std::shared_ptr<const Tokenizer> tokenizer);

  // Prompts of any lengths as one batch, each with the result that it would get alone as that row,
  // but for rounding. An interrupt ends all of them cleanly. With `from`, a text of one row that
  // stays as it is, every prompt continues from there.
  std::vector<Generation> Run(std::vector<PromptSource> prompts, const GenerateOptions& options,
                              const OnText& on_text = {},
                              const std::atomic<bool>* interrupt = nullptr,
                              const TextState* from = nullptr);
  Generation Run(const std::string& prompt, const GenerateOptions& options);
  // Row b of `text` reads prompt b, or nothing more where that is empty, and then draws. Afterwards
  // `text` holds all that was read and drawn, stop strings too, but for an <|endoftext|> that ended
  // a row: that row can be continued as if it had not been drawn. Continuing is, to the bit, not
  // having stopped; prompts are encoded each for itself. When an interrupt came before the end of a
  // prompt (prompt_read), `text` holds a part of it: continue from an earlier Clone. After an Error
  // `text` must not be used.
  std::vector<Generation> Continue(TextState& text, std::vector<PromptSource> prompts,
                                   const GenerateOptions& options, const OnText& on_text = {},
                                   const std::atomic<bool>* interrupt = nullptr);
  TextState Empty(int64_t rows = 1) const { return EmptyTextState(*model_, rows); }
  const GenerateStats& stats() const { return stats_; }  // of the last Run

 private:
  struct Row;
  // What one call works with. keep: the text is continued, so the last token drawn is written
  // too.
  struct Job {
    const GenerateOptions& options;
    const OnText& on_text;
    const std::atomic<bool>* interrupt;
    bool keep;
    bool Stopping() const { return interrupt && *interrupt; }
  };
  std::vector<Generation> Go(TextState& text, std::vector<PromptSource> prompts, const Job& job);
  void Prefill(std::deque<Row>& rows, TextState& text, const Job& job);
  void Decode(std::deque<Row>& rows, TextState& text, const Job& job);

  std::shared_ptr<LanguageModel> model_;
  std::shared_ptr<const Tokenizer> tokenizer_;
  GenerateStats stats_;
};

}  // namespace cistern
