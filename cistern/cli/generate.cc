#include <algorithm>
#include <charconv>
#include <cstdio>
#include <iostream>
#include <memory>
#include <sstream>

#include "cistern/base/error.h"
#include "cistern/base/progress.h"
#include "cistern/cli/command.h"
#include "cistern/decode/generate.h"
#include "cistern/decode/lm_folder.h"
#include "cistern/decode/measure.h"
#include "cistern/io/json_text.h"
#include "cistern/io/jsonl.h"
#include "cistern/train/trainer.h"

namespace cistern::cli {
namespace {

struct GenerateCommand {
  Common common;
  std::string folder, prompt, prompt_file, prompts;
  GenerateOptions options;
  int64_t logprobs = -1, batch = 8;
  bool stats = false;
  std::string logprobs_text, stats_text = "0,1024,2048,4096,8192";
  std::vector<int64_t> stats_at;  // from stats_text
};

// A prompt of a JSONL file, with what is handed through to its result.
struct PromptLine {
  std::string text;
  Json id;
};

std::vector<PromptLine> ReadPrompts(const std::string& path) {
  std::vector<PromptLine> lines;
  ForEachJsonl(path, [&](const Json& json, size_t number) {
    const std::string where = StrCat(path, ":", number);
    CISTERN_CHECK(json.is_object() && json.contains("prompt"), where, ": expected an object such as {\"prompt\": \"In the beginning\"}");
    PromptLine line;
    try {
      Fields().Add("prompt", &line.text, "the text to go on from").Add("id", &line.id, "handed through").Read(json, where);
    } catch (const UsageError& e) {
      Fail(e.what());
    }
    lines.push_back(std::move(line));
  });
  CISTERN_CHECK(!lines.empty(), path, " holds no prompt; each line is an object such as {\"prompt\": \"In the beginning\"}");
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

void WriteOut(std::string_view text) {
  const bool written = std::fwrite(text.data(), 1, text.size(), stdout) == text.size();
  CISTERN_CHECK(std::fflush(stdout) == 0 && written, "cannot write to standard output");
}

Json TokenJson(const Tokenizer& tokenizer, const TokenLogprob& t) {
  return {{"token", t.token}, {"text", std::string(tokenizer.Bytes(t.token))}, {"logprob", t.logprob}};
}

Json ResultJson(const GenerateCommand& c, const Tokenizer& tokenizer, const Generation& g) {
  Json out = {{"text", g.text}, {"finish", FinishName(g.finish)}, {"prompt_tokens", g.prompt_tokens}, {"tokens", g.tokens}};
  if (c.logprobs >= 0) out["logprobs"] = g.logprobs;
  if (c.logprobs > 0) {
    Json& steps = out["top"] = Json::array();
    for (const auto& top : g.top) {
      Json step = Json::array();
      for (const TokenLogprob& t : top) step.push_back(TokenJson(tokenizer, t));
      steps.push_back(std::move(step));
    }
  }
  return out;
}

std::string Quoted(std::string_view bytes) { return JsonLine(Json(std::string(bytes))); }

// One line per token: its log-probability, the token, and the likeliest ones.
std::string LogprobLines(const Tokenizer& tokenizer, const Generation& g) {
  std::string out;
  char number[32];
  for (size_t i = 0; i < g.tokens.size(); ++i) {
    std::snprintf(number, sizeof number, "%9.4f  ", g.logprobs[i]);
    out += number + Quoted(tokenizer.Bytes(g.tokens[i]));
    for (size_t k = 0; k < (g.top.empty() ? 0 : g.top[i].size()); ++k) {
      std::snprintf(number, sizeof number, " %.4f", g.top[i][k].logprob);
      out += (k == 0 ? "   of " : ", ") + Quoted(tokenizer.Bytes(g.top[i][k].token)) + number;
    }
    out += "\n";
  }
  return out;
}

double Rate(int64_t tokens, double seconds) { return seconds > 0 ? double(tokens) / seconds : 0; }

struct Stats {
  GenerateStats sum;
  std::vector<DecodePoint> points;

  void Add(const GenerateStats& s) {
    sum.prompt_tokens += s.prompt_tokens;
    sum.tokens += s.tokens;
    sum.prompt_seconds += s.prompt_seconds;
    sum.seconds += s.seconds;
    sum.state_bytes = std::max(sum.state_bytes, s.state_bytes);
  }
  Json ToJson() const {
    Json out = {{"prompt_tokens", sum.prompt_tokens},
                {"prompt_tokens_per_second", Rate(sum.prompt_tokens, sum.prompt_seconds)},
                {"tokens", sum.tokens},
                {"tokens_per_second", Rate(sum.tokens, sum.seconds)},
                {"state_bytes", sum.state_bytes},
                {"resident_bytes", ResidentBytes()}};
    for (const DecodePoint& p : points) {
      out["positions"].push_back({{"position", p.position},
                                  {"ms_per_token", p.milliseconds},
                                  {"tokens_per_second", 1000 / p.milliseconds},
                                  {"state_bytes", p.state_bytes}});
    }
    return out;
  }
  std::string ToText() const {
    char line[160];
    std::string out;
    const auto add = [&](const char* format, auto... values) {
      std::snprintf(line, sizeof line, format, values...);
      out += line;
    };
    add("prompt      %10lld tokens  %10.0f tokens/s\n", static_cast<long long>(sum.prompt_tokens),
        Rate(sum.prompt_tokens, sum.prompt_seconds));
    add("generated   %10lld tokens  %10.0f tokens/s\n", static_cast<long long>(sum.tokens), Rate(sum.tokens, sum.seconds));
    add("state       %10lld bytes\n", static_cast<long long>(sum.state_bytes));
    add("memory      %10.1f MB resident\n", double(ResidentBytes()) / 1e6);
    if (points.empty()) return out;
    add("\n%10s %12s %12s %14s   (64 tokens each, one sequence)\n", "position", "ms/token", "tokens/s", "state bytes");
    for (const DecodePoint& p : points) {
      add("%10lld %12.3f %12.0f %14lld\n", static_cast<long long>(p.position), p.milliseconds, 1000 / p.milliseconds,
          static_cast<long long>(p.state_bytes));
    }
    return out;
  }
};

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
  if (c.batch < 1) FailUsage("--batch must be 1 or above, got ", c.batch);
  if (!c.logprobs_text.empty()) c.logprobs = c.logprobs_text == "chosen" ? 0 : ParseCount("--logprobs", c.logprobs_text);
  for (std::string& s : c.options.stop) {
    s = Unescape(s);
    if (s.empty()) FailUsage("--stop must not be empty");
  }
  std::istringstream positions(c.stats_text);
  for (std::string word; std::getline(positions, word, ',');) c.stats_at.push_back(ParseCount("--stats-at", word));
  std::sort(c.stats_at.begin(), c.stats_at.end());
  c.options.sampler.seed = c.common.seed;
  c.options.top_logprobs = std::max<int64_t>(c.logprobs, 0);
  c.options.Validate();
}

// Every prompt of the file, a batch at a time; one line of JSON for each, in the file's order.
void RunPrompts(const GenerateCommand& c, Generator& generator, const Tokenizer& tokenizer, Stats& stats) {
  const std::vector<PromptLine> lines = ReadPrompts(c.prompts);
  ProgressBar bar({.total = int64_t(lines.size()), .label = "generate", .unit = "prompts"});
  for (size_t begin = 0; begin < lines.size() && !Interrupted(); begin += size_t(c.batch)) {
    const size_t end = std::min(lines.size(), begin + size_t(c.batch));
    std::vector<ByteSource> sources;
    for (size_t i = begin; i < end; ++i) sources.push_back(StringSource(lines[i].text));
    GenerateOptions options = c.options;
    options.first_row = int64_t(begin);
    const std::vector<Generation> results = generator.Run(std::move(sources), options, {}, &Interrupted());
    stats.Add(generator.stats());
    bar.Clear();
    for (size_t i = begin; i < end; ++i) {
      Json out = {{"index", i}};
      if (!lines[i].id.is_null()) out["id"] = lines[i].id;
      out.update(ResultJson(c, tokenizer, results[i - begin]));
      WriteOut(JsonLine(out) + "\n");
    }
    bar.Update(int64_t(end));
  }
}

void RunPrompt(const GenerateCommand& c, Generator& generator, const Tokenizer& tokenizer, Stats& stats) {
  const bool stream = !c.common.json;
  std::vector<ByteSource> source = {c.prompt_file.empty() ? StringSource(c.prompt) : FileSource(c.prompt_file)};
  const auto on_text = [&](size_t, std::string_view text) {
    if (stream) WriteOut(text);
  };
  const Generation result = generator.Run(std::move(source), c.options, on_text, &Interrupted())[0];
  stats.Add(generator.stats());
  if (stream) {
    WriteOut("\n");
    if (c.logprobs >= 0) WriteOut("\n" + LogprobLines(tokenizer, result));
    return;
  }
  Json out = ResultJson(c, tokenizer, result);
  if (c.stats) out["stats"] = stats.ToJson();
  WriteOut(JsonLine(out) + "\n");
}

int RunGenerate(GenerateCommand c) {
  ApplyCommon(c.common);
  CheckCommand(c);
  const LmFolder lm = OpenLmFolder(c.folder, c.common.dtype);
  Generator generator(lm.model, lm.tokenizer);
  Stats stats;
  // Measured first for --json, whose one object holds the figures.
  if (c.stats && c.common.json) stats.points = MeasureDecoding(*lm.model, c.stats_at, 64, &Interrupted());
  if (c.prompts.empty()) {
    RunPrompt(c, generator, *lm.tokenizer, stats);
  } else {
    RunPrompts(c, generator, *lm.tokenizer, stats);
  }
  if (c.stats && !c.common.json) {
    if (!Interrupted()) stats.points = MeasureDecoding(*lm.model, c.stats_at, 64, &Interrupted());
    std::cerr << "\n" << stats.ToText();
  } else if (c.stats && !c.prompts.empty()) {
    std::cerr << JsonLine(stats.ToJson()) << "\n";
  }
  return Interrupted() ? 130 : 0;
}

}  // namespace

void AddGenerate(CLI::App& app, Run& run) {
  auto c = std::make_shared<GenerateCommand>();
  c->options.sampler.temperature = 0.8;
  CLI::App* sub = app.add_subcommand("generate", "Continue a text with a trained language model");
  sub->add_option("model", c->folder, "model folder: config.json, model.safetensors, tokenizer.json")->required()->type_name("FOLDER");
  sub->add_option("--prompt,-p", c->prompt, "the text to go on from; none: <|endoftext|> or a newline begins")->type_name("TEXT");
  sub->add_option("--prompt-file", c->prompt_file, "the same from a file of any length; -: standard input")->type_name("FILE");
  sub->add_option("--prompts", c->prompts, "JSON lines {\"prompt\": ..., \"id\": ...}; writes a JSON line for each")->type_name("FILE");
  sub->add_option("--max-tokens,-n", c->options.max_tokens, "tokens to write at most")->capture_default_str();
  sub->add_option("--temperature,-t", c->options.sampler.temperature, "0: always the likeliest token; higher: more variety")
      ->capture_default_str();
  sub->add_option("--top-k", c->options.sampler.top_k, "draw among the K likeliest; 0: all")->capture_default_str();
  sub->add_option("--top-p", c->options.sampler.top_p, "draw among the fewest tokens that hold this much probability")
      ->capture_default_str();
  sub->add_option("--repetition-penalty", c->options.sampler.repetition_penalty, "above 1 shuns tokens seen; 1: off")
      ->capture_default_str();
  sub->add_option("--repetition-window", c->options.sampler.repetition_window, "only the last N tokens count as seen; 0: all")
      ->capture_default_str();
  sub->add_option("--stop", c->options.stop, "end before this text (\\n and \\t are understood); may be given several times")
      ->type_name("TEXT")
      ->expected(1)
      ->take_all();
  sub->add_flag("--logprobs{chosen}", c->logprobs_text, "log-probability of every token; --logprobs=N: and the N likeliest");
  sub->add_option("--batch", c->batch, "prompts of --prompts to run together")->capture_default_str();
  sub->add_flag("--stats", c->stats, "speed, state and memory, also far into a text (on standard error; with --json in the result)");
  sub->add_option("--stats-at", c->stats_text, "positions where --stats looks")->capture_default_str()->type_name("N,N,...");
  AddCommon(*sub, c->common);
  sub->footer(
      "Examples:\n"
      "  cistern generate runs/kjv/latte --prompt 'In the beginning' --max-tokens 300\n"
      "  cat book.txt | cistern generate runs/kjv/latte --prompt-file - --temperature 0 --stop '\\n\\n' --stats\n"
      "  cistern generate runs/kjv/latte --prompts questions.jsonl --logprobs=3 > answers.jsonl\n"
      "\nText is shown as it is written, whole characters only. Ctrl-C ends it politely (exit code 130). One seed, one text:\n"
      "prompt i of a file draws as it would alone as prompt i, whatever the batch.");
  sub->callback([c, &run] { run = [c] { return RunGenerate(*c); }; });
}

}  // namespace cistern::cli
