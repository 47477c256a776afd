#pragma once
// How near an answer is to one that people gave: exact match and the F1 of words, as the evaluation
// script of SQuAD has them (Rajpurkar et al. 2016, 2018).
#include <string>
#include <string_view>
#include <vector>

namespace cistern {

// The words that are compared: in small letters, without ASCII's punctuation and without the words
// a, an and the.
std::vector<std::string> AnswerWords(std::string_view answer);

struct AnswerScore {
  double exact = 0, f1 = 0;  // 0 to 1
};

// The best of each over the references that have words. Where none has, or there are none, the
// question has no answer: 1 for an answer without words, else 0.
AnswerScore ScoreAnswer(std::string_view answer, const std::vector<std::string>& references);

}  // namespace cistern
