#include <algorithm>
#include <charconv>
#include <iostream>
#include <memory>
#include <optional>
#include <sstream>

#include "cistern/base/error.h"
#include "cistern/base/interrupt.h"
#include "cistern/base/progress.h"
#include "cistern/cli/generate_command.h"
#include "cistern/decode/eval_scope.h"
#include "cistern/io/json_text.h"
#include "cistern/io/jsonl.h"

namespace cistern::cli {
namespace {

constexpr int64_t kTimedTokens = 64;  // at each position of --stats
constexpr int64_t kMillion = 1'000'000;

// A prompt of a JSONL file, with what is handed through to its result.
struct PromptLine {
  std::string text;
  std::optional<Json> id;
};

std::vector<PromptLine> ReadPrompts(const std::string& path) {
  const std::string name = path == "-" ? "standard input" : path;
  std::vector<PromptLine> lines;
  ForEachJsonl(path, [&](const Json& json, size_t number) {
    const std::string where = StrCat(name, ":", number);
    CISTERN_CHECK(json.is_object() && json.contains("prompt"), where,
                  ": expected an object such as {\"prompt\": \"In the beginning\"}");
    PromptLine line;
    Json id;
    try {
      Fields()
          .Add("prompt", &line.text, "the text to continue")
          .Add("id", &id, "handed through")
          .Read(json, where);
    } catch (const UsageError& e) {
      Fail(e.what());
    }
    if (json.contains("id")) line.id = id;
    lines.push_back(std::move(line));
  });
  CISTERN_CHECK(
      !lines.empty() || Interrupted(), name,
      " holds no prompt; each line is an object such as {\"prompt\": \"In the beginning\"}");
  return lines;
}

// \n, \t and \\ as one types them in a shell.
std::string Unescape(const std::string& text) {
  std::string out;
  for (size_t i = 0; i < text.size(); ++i) {
    const char next = text[i] == '\\' && i + 1 < text.size() ? text[i + 1] : '\0';
    const bool known = next == 'n' || next == 't' || next == '\\';
    out += next == 'n' ? '\n' : next == 't' ? '\t' : text[i];
    i += known ? 1 : 0;
  }
  return out;
}

int64_t ParseCount(const char* option, const std::string& text) {
  int64_t value = -1;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || value < 0)
    FailUsage(option, " takes whole numbers of 0 or above, got '", text, "'");
  return value;
}

void CheckCommand(GenerateCommand& c) {
  if (int(!c.prompt.empty()) + int(!c.prompt_file.empty()) + int(!c.prompts.empty()) > 1) {
    FailUsage("give one of --prompt, --prompt-file and --prompts");
  }
  if (c.interactive && !c.prompts.empty())
    FailUsage("--interactive takes its prompts from standard input; omit --prompts");
  if (c.interactive && c.prompt_file == "-") {
    FailUsage(
        "--interactive reads its lines from standard input, so --prompt-file cannot be -; give a "
        "file");
  }
  if (!c.save_state.empty() && !c.prompts.empty()) {
    FailUsage(
        "--save-state saves one text, and --prompts generates many; give --prompt or "
        "--prompt-file");
  }
  if (c.count < 1) FailUsage("--count must be 1 or above, got ", c.count);
  if (c.count > 1 && (c.interactive || !c.save_state.empty())) {
    FailUsage("--count makes several texts, and ",
              c.interactive ? "--interactive continues" : "--save-state saves",
              " one; omit one of the two");
  }
  if (c.batch < 1) FailUsage("--batch must be 1 or above, got ", c.batch);
  if (!c.logprobs_text.empty())
    c.logprobs = c.logprobs_text == "chosen" ? 0 : ParseCount("--logprobs", c.logprobs_text);
  for (std::string& s : c.options.stop) {
    s = Unescape(s);
    if (s.empty()) FailUsage("--stop must not be empty");
  }
  std::istringstream positions(c.stats_text);
  for (std::string word; std::getline(positions, word, ',');)
    c.stats_at.push_back(ParseCount("--stats-at", word));
  std::sort(c.stats_at.begin(), c.stats_at.end());
  c.options.sampler.seed = c.common.seed;
  c.options.top_logprobs = std::max<int64_t>(c.logprobs, 0);
  c.options.Validate();
}

// Every prompt of the file, a batch at a time; one line of JSON for each, in the file's order; then
// their next samples.
void RunPrompts(const GenerateCommand& c, Generator& generator, const Tokenizer& tokenizer,
                const TextState* from, Stats& stats) {
  const std::vector<PromptLine> lines = ReadPrompts(c.prompts);
  const size_t total = lines.size() * size_t(c.count);
  ProgressBar bar({.total = int64_t(total), .label = "generate", .unit = "texts"});
  for (size_t begin = 0; begin < total && !Interrupted(); begin += size_t(c.batch)) {
    const size_t end = std::min(total, begin + size_t(c.batch));
    std::vector<PromptSource> sources;
    for (size_t i = begin; i < end; ++i)
      sources.push_back(StringSource(lines[i % lines.size()].text));
    GenerateOptions options = c.options;
    options.first_row = int64_t(begin);
    const std::vector<Generation> results =
        generator.Run(std::move(sources), options, {}, &Interrupted(), from);
    stats.Add(generator.stats());
    bar.Clear();
    for (size_t i = begin; i < end; ++i) {
      const PromptLine& line = lines[i % lines.size()];
      Json out = {{"index", i % lines.size()}};
      if (c.count > 1) out["sample"] = i / lines.size();
      if (line.id) out["id"] = *line.id;
      out.update(ResultJson(c, tokenizer, results[i - begin]));
      WriteOut(JsonLine(out) + "\n");
    }
    bar.Update(int64_t(end));
  }
}

// False: interrupted before the end of the prompt, so that `text` holds a part of it.
bool RunPrompt(const GenerateCommand& c, Generator& generator, const Tokenizer& tokenizer,
               TextState& text, Stats& stats) {
  const bool stream = !c.common.json;
  std::vector<PromptSource> source = {c.prompt_file.empty() ? StringSource(c.prompt)
                                                            : FileSource(c.prompt_file)};
  const auto on_text = [&](size_t, std::string_view shown) {
    if (stream) WriteOut(shown);
  };
  const Generation result =
      c.save_state.empty()
          ? generator.Run(std::move(source), c.options, on_text, &Interrupted(), &text)[0]
          : generator.Continue(text, std::move(source), c.options, on_text, &Interrupted())[0];
  stats.Add(generator.stats());
  if (stream) {
    WriteOut("\n");
    if (c.logprobs >= 0) WriteOut("\n" + LogprobLines(tokenizer, result));
    return result.prompt_read;
  }
  Json out = ResultJson(c, tokenizer, result);
  if (c.stats) out["stats"] = stats.ToJson();
  WriteOut(JsonLine(out) + "\n");
  return result.prompt_read;
}

// Reads the text that lines or samples continue.
Generation ReadFirst(const GenerateCommand& c, Generator& generator, TextState& text,
                     Stats& stats) {
  GenerateOptions options = c.options;
  options.max_tokens = 0;
  Generation read = generator.Continue(
      text, {c.prompt_file.empty() ? StringSource(c.prompt) : FileSource(c.prompt_file)}, options,
      {}, &Interrupted())[0];
  stats.Add(generator.stats());
  return read;
}

// --count texts of one prompt, which is read once; one line of JSON for each.
void RunSamples(const GenerateCommand& c, Generator& generator, const Tokenizer& tokenizer,
                TextState& text, Stats& stats) {
  const Generation read = ReadFirst(c, generator, text, stats);
  GenerateOptions options = c.options;
  for (int64_t begin = 0; begin < c.count && !Interrupted(); begin += c.batch) {
    options.first_row = begin;
    std::vector<PromptSource> nothing_more;
    for (int64_t i = begin; i < std::min(c.count, begin + c.batch); ++i)
      nothing_more.push_back(StringSource(""));
    std::vector<Generation> results =
        generator.Run(std::move(nothing_more), options, {}, &Interrupted(), &text);
    stats.Add(generator.stats());
    for (size_t i = 0; i < results.size(); ++i) {
      results[i].prompt_tokens = read.prompt_tokens;
      Json out = {{"sample", begin + int64_t(i)}};
      out.update(ResultJson(c, tokenizer, results[i]));
      WriteOut(JsonLine(out) + "\n");
    }
  }
}

int RunGenerate(const CLI::App& command, GenerateCommand c) {
  ApplyCommon(c.common);
  if (command.count("--stats-at") > 0 && !c.stats)
    FailUsage("--stats-at says where --stats looks; give both");
  if (c.options.sampler.repetition_window > 0 && c.options.sampler.repetition_penalty == 1)
    FailUsage("--repetition-window says how far --repetition-penalty looks; give both");
  CheckCommand(c);
  const LmFolder lm = OpenLmFolder(c.folder, c.common.dtype);
  const BFloat16Decoding narrow(c.common.dtype == "bfloat16", *lm.model);
  Generator generator(lm.model, lm.tokenizer);
  TextState text = c.load_state.empty() ? generator.Empty() : LoadOneText(c.load_state, lm);
  if (!c.save_state.empty()) CheckWritable(c.save_state);
  Stats stats;
  const int64_t limit = lm.model->config().LengthLimit(Form::kCausal);
  if (command.count("--stats-at") > 0 && !c.stats_at.empty() &&
      c.stats_at.back() + kTimedTokens > limit)
    FailUsage("--stats-at ", c.stats_at.back(), ": ", kTimedTokens,
              " tokens are timed there, and the positions of this model end at ", limit);
  std::erase_if(c.stats_at, [&](int64_t at) { return at + kTimedTokens > limit; });
  if (limit >= kMillion) stats.million_bytes = lm.model->StateBytes(1, kMillion);
  // Measured first for --json, whose one object holds the figures.
  const bool one_object = c.common.json && !c.interactive;
  if (c.stats && one_object)
    stats.points =
        MeasureDecoding(*lm.model, c.stats_at, kTimedTokens, &Interrupted(), c.options.sampler);
  bool complete = true;
  if (c.interactive) {
    const bool prompt = !c.prompt.empty() || !c.prompt_file.empty();
    complete = !prompt || ReadFirst(c, generator, text, stats).prompt_read;
    if (complete) RunInteractive(c, lm, generator, text, stats);
  } else if (c.prompts.empty() && c.count > 1) {
    RunSamples(c, generator, *lm.tokenizer, text, stats);
  } else if (c.prompts.empty()) {
    complete = RunPrompt(c, generator, *lm.tokenizer, text, stats);
  } else {
    RunPrompts(c, generator, *lm.tokenizer, &text, stats);
  }
  if (!c.save_state.empty() && complete) {
    SaveTextState(c.save_state, *lm.model, *lm.tokenizer, text);
  } else if (!c.save_state.empty()) {
    std::cerr << c.save_state << " is not written: interrupted before the end of the prompt\n";
  }
  if (c.stats && !one_object) {
    if (!Interrupted())
      stats.points =
          MeasureDecoding(*lm.model, c.stats_at, kTimedTokens, &Interrupted(), c.options.sampler);
    std::cerr << "\n" << stats.ToText();
  } else if (c.stats && (!c.prompts.empty() || c.count > 1)) {
    std::cerr << JsonLine(stats.ToJson()) << "\n";
  }
  return Interrupted() ? 130 : 0;
}

}  // namespace

TextState LoadOneText(const std::string& path, const LmFolder& lm) {
  TextState text = LoadTextState(path, *lm.model, *lm.tokenizer);
  if (text.rows() != 1)
    FailUsage(path, " holds ", text.rows(), " texts; `cistern generate` continues a file of one");
  return text;
}

void AddGenerate(CLI::App& app, Run& run) {
  auto c = std::make_shared<GenerateCommand>();
  c->options.sampler.temperature = 0.8;
  CLI::App* sub = app.add_subcommand("generate", "continue a text with a trained language model");
  sub->add_option("model", c->folder,
                  "model folder: config.json, model.safetensors, tokenizer.json")
      ->required()
      ->type_name("FOLDER");
  sub->add_option("--prompt,-p", c->prompt,
                  "the text to continue; none: start with <|endoftext|> or a newline")
      ->type_name("TEXT");
  sub->add_option("--prompt-file", c->prompt_file,
                  "read the prompt from a file of any length; -: standard input")
      ->type_name("FILE");
  sub->add_option("--prompts", c->prompts,
                  "JSON lines {\"prompt\": ..., \"id\": ...}; writes a JSON line for each; -: "
                  "standard input")
      ->type_name("FILE");
  sub->add_option("--load-state", c->load_state,
                  "continue a saved state with the prompt, or with each of --prompts")
      ->type_name("FILE");
  sub->add_option(
         "--save-state", c->save_state,
         "save the text read and generated, to continue it later (with -n 0: only the prompt)")
      ->type_name("FILE");
  sub->add_flag("--interactive,-i", c->interactive,
                "append each line of standard input and answer it; :help shows the commands");
  sub->add_option("--max-tokens,-n", c->options.max_tokens, "tokens to generate at most")
      ->capture_default_str();
  sub->add_option("--temperature,-t", c->options.sampler.temperature,
                  "0: always the most likely token; higher: more variety")
      ->capture_default_str();
  sub->add_option("--top-k", c->options.sampler.top_k,
                  "sample from the K most likely tokens; 0: from all")
      ->capture_default_str();
  sub->add_option("--top-p", c->options.sampler.top_p,
                  "sample from the smallest set of tokens with this total probability")
      ->capture_default_str();
  sub->add_option("--repetition-penalty", c->options.sampler.repetition_penalty,
                  "above 1: avoid tokens already seen; 1: off")
      ->capture_default_str();
  sub->add_option("--repetition-window", c->options.sampler.repetition_window,
                  "only the last N tokens count as seen; 0: all")
      ->capture_default_str();
  sub->add_option("--stop", c->options.stop,
                  "stop before this text (\\n and \\t are understood); may be repeated")
      ->type_name("TEXT")
      ->expected(1)
      ->take_all();
  sub->add_flag("--logprobs{chosen}", c->logprobs_text,
                "log-probability of every token; --logprobs=N: and of the N most likely");
  sub->add_option("--count", c->count,
                  "texts of each prompt, each with draws of its own; above 1: a JSON line for each")
      ->capture_default_str();
  sub->add_option("--batch", c->batch, "texts of --prompts and --count in one batch")
      ->capture_default_str();
  sub->add_flag("--stats", c->stats,
                "speed, state and memory, also far into a text (on standard error; with --json in "
                "the result)");
  sub->add_option("--stats-at", c->stats_text, "positions where --stats looks")
      ->capture_default_str()
      ->type_name("N,N,...");
  AddCommon(*sub, c->common);
  AddDtype(*sub, c->common, Dtypes::kAny);
  AddDevice(*sub, c->common);
  sub->footer(
      "Examples:\n"
      "  cistern generate runs/kjv/latte --prompt 'In the beginning' --max-tokens 300\n"
      "  cat book.txt | cistern generate runs/kjv/latte --prompt-file - --temperature 0 --stop "
      "'\\n\\n' --stats\n"
      "  cistern generate runs/kjv/latte --prompts questions.jsonl --logprobs=3 > answers.jsonl\n"
      "  cistern generate runs/kjv/latte --prompt-file book.txt -n 0 --save-state book.state     # "
      "read once\n"
      "  cistern generate runs/kjv/latte --load-state book.state --prompt 'And so' -n 100        # "
      "use often\n"
      "  cistern generate runs/kjv/latte --load-state book.state --interactive\n"
      "\nText is shown as it is generated, in complete characters. Ctrl-C stops cleanly (exit code "
      "130). One seed, one text:\n"
      "prompt i of a file gets the same draws in any batch, whatever the other prompts are; "
      "--prompt "
      "those of the first. The first of --count texts is the one without --count.");
  sub->callback([c, sub, &run] { run = [c, sub] { return RunGenerate(*sub, *c); }; });
}

}  // namespace cistern::cli
