#include "cistern/text/translation_score.h"

#include <algorithm>
#include <cmath>
#include <unordered_map>

#include "cistern/text/utf8.h"

namespace cistern {
namespace {

// Calls visit(code, bytes) with each character; broken bytes are characters of their own.
template <class Visit>
void ForEachChar(std::string_view text, const Visit& visit) {
  for (size_t at = 0; at < text.size();) {
    const Utf8Char c = DecodeUtf8(text, at);
    const size_t length = c.code < 0 ? 1 : size_t(c.length);
    visit(c.code, text.substr(at, length));
    at += length;
  }
}

void DropSpaceAtEnd(std::string* text) {
  while (!text->empty()) {
    size_t at = text->size() - 1;
    while (at > 0 && (uint8_t((*text)[at]) & 0xc0) == 0x80) --at;  // within a character
    const Utf8Char c = DecodeUtf8(*text, at);
    if (!IsSpace(c.code) || at + size_t(c.length) != text->size()) return;
    text->resize(at);
  }
}

void Replace(std::string* text, std::string_view what, std::string_view by) {
  for (size_t at = text->find(what); at != std::string::npos; at = text->find(what, at + by.size()))
    text->replace(at, what.size(), by);
}

bool IsDigit(char c) { return c >= '0' && c <= '9'; }
bool IsStop(char c) { return c == '.' || c == ','; }
// ASCII's signs but for apostrophe, comma, hyphen and period.
bool StandsAlone(char c) {
  return c == '/' || (c >= ' ' && c <= '&') || (c >= '(' && c <= '+') || (c >= ':' && c <= '@') ||
         (c >= '[' && c <= '`') || (c >= '{' && c <= '~');
}

// The text with two neighbours a, b that `apart` says apart(a, b) of written as before(a, b); a
// pair that was found is passed over as a whole, as a regular expression does.
template <class Apart, class Written>
std::string Separate(const std::string& text, const Apart& apart, const Written& written) {
  std::string out;
  for (size_t i = 0; i < text.size(); ++i) {
    if (i + 1 < text.size() && apart(text[i], text[i + 1])) {
      out += written(text[i], text[i + 1]);
      ++i;
    } else {
      out += text[i];
    }
  }
  return out;
}

using Counts = std::unordered_map<std::string, int64_t>;

// Adds what n-grams have in common, each as often as both have it.
int64_t Common(const Counts& a, const Counts& b) {
  int64_t sum = 0;
  for (const auto& [ngram, count] : a) {
    const auto other = b.find(ngram);
    if (other != b.end()) sum += std::min(count, other->second);
  }
  return sum;
}

// n-grams of parts, joined by `between`.
Counts CountNgrams(const std::vector<std::string>& parts, size_t n, std::string_view between) {
  Counts counts;
  for (size_t i = 0; i + n <= parts.size(); ++i) {
    std::string ngram = parts[i];
    for (size_t j = 1; j < n; ++j) ngram.append(between).append(parts[i + j]);
    ++counts[std::move(ngram)];
  }
  return counts;
}

int64_t NgramsOf(size_t parts, size_t n) { return parts < n ? 0 : int64_t(parts - n + 1); }

std::vector<std::string> CharactersWithoutSpace(std::string_view text) {
  std::vector<std::string> out;
  ForEachChar(text, [&](int32_t code, std::string_view bytes) {
    if (!IsSpace(code)) out.emplace_back(bytes);
  });
  return out;
}

}  // namespace

std::vector<std::string> Mteval13aTokens(std::string_view given) {
  std::string text(given);
  DropSpaceAtEnd(&text);
  Replace(&text, "<skipped>", "");
  Replace(&text, "-\n", "");
  Replace(&text, "\n", " ");
  Replace(&text, "&quot;", "\"");
  Replace(&text, "&amp;", "&");
  Replace(&text, "&lt;", "<");
  Replace(&text, "&gt;", ">");
  std::string apart = " ";
  for (const char c : text) apart += StandsAlone(c) ? std::string{' ', c, ' '} : std::string(1, c);
  apart += ' ';
  // Period and comma but between digits; a hyphen behind a digit.
  apart = Separate(
      apart, [](char a, char b) { return !IsDigit(a) && IsStop(b); },
      [](char a, char b) {
        return std::string{a, ' ', b, ' '};
      });
  apart = Separate(
      apart, [](char a, char b) { return IsStop(a) && !IsDigit(b); },
      [](char a, char b) {
        return std::string{' ', a, ' ', b};
      });
  apart = Separate(
      apart, [](char a, char b) { return IsDigit(a) && b == '-'; },
      [](char a, char b) {
        return std::string{a, ' ', b, ' '};
      });
  std::vector<std::string> tokens;
  std::string token;
  const auto end = [&] {
    if (!token.empty()) tokens.push_back(std::move(token));
    token.clear();
  };
  ForEachChar(apart, [&](int32_t code, std::string_view bytes) {
    if (IsSpace(code)) {
      end();
    } else {
      token += bytes;
    }
  });
  end();
  return tokens;
}

void BleuSums::Add(std::string_view translation, std::string_view reference) {
  const std::vector<std::string> said = Mteval13aTokens(translation),
                                 wanted = Mteval13aTokens(reference);
  length += int64_t(said.size()), reference_length += int64_t(wanted.size());
  for (size_t n = 1; n <= kOrder; ++n) {
    ngrams[n - 1] += NgramsOf(said.size(), n);
    matches[n - 1] += Common(CountNgrams(said, n, " "), CountNgrams(wanted, n, " "));
  }
}

double BleuSums::Score() const {
  if (matches == decltype(matches)()) return 0;
  double logs = 0, smooth = 1;
  for (size_t n = 0; n < kOrder; ++n) {
    if (ngrams[n] == 0) return 0;
    double found = double(matches[n]);
    if (matches[n] == 0) found = 1 / (smooth *= 2);
    logs += std::log(found / double(ngrams[n]));
  }
  const double shorter =
      length < reference_length ? 1 - double(reference_length) / double(length) : 0;
  return 100 * std::exp(shorter + logs / double(kOrder));
}

void ChrfSums::Add(std::string_view said, std::string_view wanted) {
  const std::vector<std::string> a = CharactersWithoutSpace(said),
                                 b = CharactersWithoutSpace(wanted);
  for (size_t n = 1; n <= kOrder; ++n) {
    const int64_t ngrams = NgramsOf(b.size(), n);
    reference[n - 1] += ngrams;
    if (ngrams > 0) translation[n - 1] += NgramsOf(a.size(), n);
    matches[n - 1] += Common(CountNgrams(a, n, ""), CountNgrams(b, n, ""));
  }
}

double ChrfSums::Score() const {
  double precision = 0, recall = 0;
  int64_t orders = 0;
  for (size_t n = 0; n < kOrder; ++n) {
    if (translation[n] == 0 || reference[n] == 0) continue;
    precision += double(matches[n]) / double(translation[n]);
    recall += double(matches[n]) / double(reference[n]);
    ++orders;
  }
  if (precision + recall == 0) return 0;
  precision /= double(orders), recall /= double(orders);
  constexpr double kBeta2 = 4;
  return 100 * (1 + kBeta2) * precision * recall / (kBeta2 * precision + recall);
}

}  // namespace cistern
