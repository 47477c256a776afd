#include "cistern/text/answer_score.h"

#include <utf8proc.h>

#include <algorithm>
#include <map>

#include "cistern/text/utf8.h"

namespace cistern {
namespace {

bool IsAsciiPunctuation(int32_t code) {
  return (code >= '!' && code <= '/') || (code >= ':' && code <= '@') ||
         (code >= '[' && code <= '`') || (code >= '{' && code <= '~');
}

bool IsArticle(std::string_view word) { return word == "a" || word == "an" || word == "the"; }

AnswerScore Compare(const std::vector<std::string>& said, const std::vector<std::string>& wanted) {
  if (said.empty() || wanted.empty()) {
    const double both = said.empty() && wanted.empty() ? 1 : 0;
    return {both, both};
  }
  std::map<std::string_view, int64_t> left;
  for (const std::string& word : wanted) ++left[word];
  double same = 0;
  for (const std::string& word : said) {
    const auto found = left.find(word);
    if (found != left.end() && found->second-- > 0) ++same;
  }
  return {said == wanted ? 1.0 : 0.0, 2 * same / double(said.size() + wanted.size())};
}

}  // namespace

// Punctuation goes first, so that "U.S." is one word; what else is no letter and no number parts
// an article from its neighbours, but stays in its word.
std::vector<std::string> AnswerWords(std::string_view answer) {
  std::string plain, run;  // run: the letters and numbers since the last other character
  const auto end_run = [&] {
    plain += IsArticle(run) ? " " : run;
    run.clear();
  };
  std::vector<std::string> words;
  const auto end_word = [&] {
    end_run();
    for (size_t begin = 0; begin < plain.size();) {  // an article leaves a space
      const size_t end = std::min(plain.find(' ', begin), plain.size());
      if (end > begin) words.push_back(plain.substr(begin, end - begin));
      begin = end + 1;
    }
    plain.clear();
  };
  for (size_t at = 0; at < answer.size();) {
    const Utf8Char c = DecodeUtf8(answer, at);
    const std::string_view bytes = answer.substr(at, size_t(c.length));
    at += size_t(c.length);
    if (c.code < 0) {  // bytes that are no character
      end_run();
      plain += bytes;
      continue;
    }
    if (IsAsciiPunctuation(c.code)) continue;
    const CharClass kind = ClassOf(c.code);
    if (IsSpace(c.code)) {
      end_word();
    } else if (kind == CharClass::kOther) {
      end_run();
      plain += bytes;
    } else {
      AppendUtf8(utf8proc_tolower(c.code), &run);
    }
  }
  end_word();
  return words;
}

AnswerScore ScoreAnswer(std::string_view answer, const std::vector<std::string>& references) {
  const std::vector<std::string> said = AnswerWords(answer);
  AnswerScore best;
  bool answered = false;
  for (const std::string& reference : references) {
    const std::vector<std::string> wanted = AnswerWords(reference);
    if (wanted.empty()) continue;
    answered = true;
    const AnswerScore score = Compare(said, wanted);
    best = {std::max(best.exact, score.exact), std::max(best.f1, score.f1)};
  }
  return answered ? best : Compare(said, {});
}

}  // namespace cistern
