#include "cistern/cli/generate_command.h"

#include <cstdio>
#include <type_traits>

#include "cistern/base/error.h"
#include "cistern/base/memory.h"
#include "cistern/io/json_text.h"

namespace cistern::cli {
namespace {

Json TokenJson(const Tokenizer& tokenizer, const TokenLogprob& t) {
  return {
      {"token", t.token}, {"text", std::string(tokenizer.Bytes(t.token))}, {"logprob", t.logprob}};
}

std::string Quoted(std::string_view bytes) { return JsonLine(Json(std::string(bytes))); }

template <class T>
T Unsigned(T x) {
  if constexpr (std::is_floating_point_v<T>) return NanUnsigned(x);
  return x;
}

double Rate(int64_t tokens, double seconds) { return seconds > 0 ? double(tokens) / seconds : 0; }

}  // namespace

void WriteOut(std::string_view text) {
  const bool written = std::fwrite(text.data(), 1, text.size(), stdout) == text.size();
  CISTERN_CHECK(std::fflush(stdout) == 0 && written, "cannot write to standard output");
}

Json ResultJson(const GenerateCommand& c, const Tokenizer& tokenizer, const Generation& g) {
  Json out = {{"text", g.text},
              {"finish", FinishName(g.finish)},
              {"prompt_tokens", g.prompt_tokens},
              {"tokens", g.tokens}};
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

std::string LogprobLines(const Tokenizer& tokenizer, const Generation& g) {
  std::string out;
  char number[32];
  for (size_t i = 0; i < g.tokens.size(); ++i) {
    std::snprintf(number, sizeof number, "%9.4f  ", NanUnsigned(g.logprobs[i]));
    out += number + Quoted(tokenizer.Bytes(g.tokens[i]));
    for (size_t k = 0; k < (g.top.empty() ? 0 : g.top[i].size()); ++k) {
      std::snprintf(number, sizeof number, " %.4f", NanUnsigned(g.top[i][k].logprob));
      out += (k == 0 ? "   of " : ", ") + Quoted(tokenizer.Bytes(g.top[i][k].token)) + number;
    }
    out += "\n";
  }
  return out;
}

void Stats::Add(const GenerateStats& s) {
  sum.prompt_tokens += s.prompt_tokens;
  sum.tokens += s.tokens;
  sum.prompt_seconds += s.prompt_seconds;
  sum.seconds += s.seconds;
  sum.of_one_thread += s.of_one_thread;
  sum.state_bytes = std::max(sum.state_bytes, s.state_bytes);
}

Json Stats::ToJson() const {
  Json out = {{"prompt_tokens", sum.prompt_tokens},
              {"prompt_tokens_per_second", Rate(sum.prompt_tokens, sum.prompt_seconds)},
              {"tokens", sum.tokens},
              {"tokens_per_second", Rate(sum.tokens, sum.seconds)},
              {"steps_of_one_thread", sum.of_one_thread},
              {"state_bytes", sum.state_bytes},
              {"resident_bytes", ResidentBytes()}};
  if (million_bytes) out["state_bytes_after_million_tokens"] = *million_bytes;
  for (const DecodePoint& p : points) {
    out["positions"].push_back({{"position", p.position},
                                {"ms_per_token", p.milliseconds},
                                {"tokens_per_second", 1000 / p.milliseconds},
                                {"state_bytes", p.state_bytes}});
  }
  return out;
}

std::string Stats::ToText() const {
  char line[160];
  std::string out;
  const auto add = [&](const char* format, auto... values) {
    std::snprintf(line, sizeof line, format, Unsigned(values)...);
    out += line;
  };
  add("prompt      %10lld tokens  %10.0f tokens/s\n", static_cast<long long>(sum.prompt_tokens),
      Rate(sum.prompt_tokens, sum.prompt_seconds));
  add("generated   %10lld tokens  %10.0f tokens/s", static_cast<long long>(sum.tokens),
      Rate(sum.tokens, sum.seconds));
  if (sum.of_one_thread > 0)
    add("   (%lld steps by one thread, on a busy machine)",
        static_cast<long long>(sum.of_one_thread));
  out += '\n';
  add("state       %10lld bytes", static_cast<long long>(sum.state_bytes));
  if (million_bytes)
    add("   %10lld for one text of a million tokens", static_cast<long long>(*million_bytes));
  out += '\n';
  add("memory      %10.1f MB resident\n", double(ResidentBytes()) / 1e6);
  if (points.empty()) return out;
  add("\n%10s %12s %12s %14s   (64 tokens each, one sequence)\n", "position", "ms/token",
      "tokens/s", "state bytes");
  for (const DecodePoint& p : points) {
    add("%10lld %12.3f %12.0f %14lld\n", static_cast<long long>(p.position), p.milliseconds,
        1000 / p.milliseconds, static_cast<long long>(p.state_bytes));
  }
  return out;
}

}  // namespace cistern::cli
