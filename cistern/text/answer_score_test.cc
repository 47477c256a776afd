// Expected values are those of SQuAD's evaluate-v2.0.py, worked out by its rules by hand.
#include "cistern/text/answer_score.h"

#include <gtest/gtest.h>

namespace cistern {
namespace {

using Words = std::vector<std::string>;

TEST(AnswerWords, AreSmallWithoutPunctuationAndArticles) {
  EXPECT_EQ(AnswerWords("The U.S. Army, in 1,999!"), (Words{"us", "army", "in", "1999"}));
  EXPECT_EQ(AnswerWords("  an  apple a\tday "), (Words{"apple", "day"}));
  EXPECT_EQ(AnswerWords("theatre then Anna"), (Words{"theatre", "then", "anna"}));
  EXPECT_EQ(AnswerWords("\xc3\x89mile \xce\xa9mega"),  // Émile, Ωmega
            (Words{"\xc3\xa9mile", "\xcf\x89mega"}));
  EXPECT_EQ(AnswerWords("the-end"), (Words{"theend"}));  // a hyphen leaves no gap
  // A dash of two bytes is no punctuation of ASCII: it stays, and parts the article from its word.
  EXPECT_EQ(AnswerWords("1914\xe2\x80\x93the war"), (Words{"1914\xe2\x80\x93", "war"}));
  EXPECT_EQ(AnswerWords("a\x1c"
                        "cat"),
            Words{"cat"});  // as Python parts words
  EXPECT_EQ(AnswerWords("the ... a"), Words{});
}

TEST(ScoreAnswer, IsTheBestOverReferences) {
  const AnswerScore same =
      ScoreAnswer("the Denver Broncos.", {"Carolina", "Denver Broncos", "Denver"});
  EXPECT_EQ(same.exact, 1);
  EXPECT_EQ(same.f1, 1);
  // One word of two and three: precision 1/2, recall 1/3.
  const AnswerScore part = ScoreAnswer("Denver team", {"the Denver Broncos football"});
  EXPECT_EQ(part.exact, 0);
  EXPECT_DOUBLE_EQ(part.f1, 0.4);
  // A word counts as often as the reference has it.
  EXPECT_DOUBLE_EQ(ScoreAnswer("x x x", {"x y"}).f1, 0.4);
  EXPECT_EQ(ScoreAnswer("Paris", {"London"}).f1, 0);
  // The best of each may be of two references.
  const AnswerScore two = ScoreAnswer("b c", {"b c d", "c b"});
  EXPECT_EQ(two.exact, 0);
  EXPECT_EQ(two.f1, 1);
}

TEST(ScoreAnswer, WithoutAReferenceNothingIsRight) {
  EXPECT_EQ(ScoreAnswer("", {}).f1, 1);
  EXPECT_EQ(ScoreAnswer("the", {}).exact, 1);
  EXPECT_EQ(ScoreAnswer("Paris", {}).f1, 0);
  EXPECT_EQ(ScoreAnswer("", {"Paris"}).f1, 0);
  EXPECT_EQ(ScoreAnswer("", {"..."}).exact, 1);
  EXPECT_EQ(ScoreAnswer("Paris", {"", "Paris"}).exact, 1);
}

}  // namespace
}  // namespace cistern
