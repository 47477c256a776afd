#pragma once
// A text with a weight for each of its tokens, as a picture: the darker behind a word, the larger
// its weight.
#include <ATen/core/Tensor.h>

#include <functional>
#include <string>
#include <vector>

namespace cistern {

struct WeightedWord {
  std::string text;
  double weight = 0;  // NaN: none, such as of a token that may not be seen
};

// The text of each token of ids [T]; none without `token` (AnalysisContext::token).
std::vector<std::string> WordsOf(const at::Tensor& ids,
                                 const std::function<std::string(int64_t)>& token);

// `marked`: the token that attends, framed; -1: none. Weights below 0 are red. Spaces at the
// beginning of a token are shown as a gap, other white space and bytes that are no text as dots.
std::string RenderWords(const std::string& title, const std::vector<WeightedWord>& words,
                        int64_t marked = -1);

}  // namespace cistern
