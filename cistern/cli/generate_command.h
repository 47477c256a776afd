#pragma once
// The parts of `cistern generate`: its options (generate.cc), what it prints (generate_report.cc),
// the interactive loop (interactive.cc).
#include <algorithm>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "cistern/cli/command.h"
#include "cistern/decode/generate.h"
#include "cistern/decode/lm_folder.h"
#include "cistern/decode/measure.h"
#include "cistern/io/fields.h"

namespace cistern::cli {

struct GenerateCommand {
  Common common;
  std::string folder, prompt, prompt_file, prompts, save_state, load_state;
  GenerateOptions options;
  int64_t logprobs = -1, batch = 8, count = 1;
  bool stats = false, interactive = false;
  std::string logprobs_text, stats_text = "0,1024,2048,4096,8192";
  std::vector<int64_t> stats_at;  // from stats_text
};

// To standard output, at once. Error where it cannot be written.
void WriteOut(std::string_view text);

Json ResultJson(const GenerateCommand& c, const Tokenizer& tokenizer, const Generation& g);
// One line per token: its log-probability, the token, and the most likely ones.
std::string LogprobLines(const Tokenizer& tokenizer, const Generation& g);

// --stats: totals of everything read and generated, and speed at chosen positions.
struct Stats {
  GenerateStats sum;
  // Of one text's state after a million tokens, predicted; none where positions end before.
  std::optional<int64_t> million_bytes;
  std::vector<DecodePoint> points;

  void Add(const GenerateStats& s);
  Json ToJson() const;
  std::string ToText() const;
};

// A saved state of one text; UsageError if it holds several.
TextState LoadOneText(const std::string& path, const LmFolder& lm);

// Reads lines from standard input, appends each to the text and answers it; ends at :quit, at the
// end of the input, and without a terminal at the first error, which it throws. Ctrl-C stops an
// answer.
void RunInteractive(const GenerateCommand& c, const LmFolder& lm, Generator& generator,
                    TextState& text, Stats& stats);

}  // namespace cistern::cli
