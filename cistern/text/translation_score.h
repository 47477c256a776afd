#pragma once
// How near a translation is to a reference: sums over a corpus from which BLEU and chrF follow, by
// sacreBLEU's defaults (Post 2018), so that figures compare with published ones. One reference.
#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace cistern {

// BLEU (Papineni et al. 2002): the geometric mean of the shares of n-grams of 1 to 4 tokens that
// the reference has as well, times a penalty for being shorter.
struct BleuSums {
  static constexpr size_t kOrder = 4;
  std::array<int64_t, kOrder> matches = {}, ngrams = {};  // of the translations
  int64_t length = 0, reference_length = 0;               // tokens

  void Add(std::string_view translation, std::string_view reference);
  // 0 to 100. Where no n-gram of a length matches, its share is 1/2, 1/4, ... of one match.
  double Score() const;
};

// chrF (Popovic 2015): the F score, with twice the weight on recall, of n-grams of 1 to 6
// characters, without white space; precision and recall are means over n.
struct ChrfSums {
  static constexpr size_t kOrder = 6;
  std::array<int64_t, kOrder> matches = {}, translation = {}, reference = {};

  void Add(std::string_view translation, std::string_view reference);
  double Score() const;  // 0 to 100
};

// The tokens that BLEU counts: those of WMT's script mteval-v13a.
std::vector<std::string> Mteval13aTokens(std::string_view text);

}  // namespace cistern
