// BLEU and chrF against the figures of sacreBLEU 2.6 for the same sentences.
#include "cistern/text/translation_score.h"

#include <gtest/gtest.h>

namespace cistern {
namespace {

struct Sentence {
  std::string translation, reference;
  double bleu, chrf;  // of a corpus of this one
};

const std::vector<Sentence>& Sentences() {
  static const std::vector<Sentence> all = {
      {"The cat sat on the mat.", "The cat is sitting on the mat.", 42.38365628278778,
       49.6485170311433},
      {"It costs 1,234.50 dollars - really!", "It cost 1,234.5 dollars, really!",
       15.619699684601283, 64.17243840155322},
      {"Ein Mann &quot;schläft&quot; 3-mal am Tag...", "Ein Mann \"schläft\" 3-mal am Tag.",
       82.4236750264605, 64.10826770398023},
      {"", "nothing was said", 0, 0},
      {"a b", "a b c d e", 0, 37.57225433526011},
      {"Zwei Hunde laufen über die Wiese; einer bellt (laut).",
       "Zwei Hunde rennen über eine Wiese, einer bellt (laut).", 45.2588800789056,
       64.50596420617927}};
  return all;
}

TEST(TranslationScore, SentencesAsSacreBleu) {
  for (const Sentence& s : Sentences()) {
    BleuSums bleu;
    ChrfSums chrf;
    bleu.Add(s.translation, s.reference);
    chrf.Add(s.translation, s.reference);
    EXPECT_NEAR(bleu.Score(), s.bleu, 1e-9) << s.translation;
    EXPECT_NEAR(chrf.Score(), s.chrf, 1e-9) << s.translation;
  }
}

TEST(TranslationScore, ACorpusIsASumAndNoMean) {
  BleuSums bleu;
  ChrfSums chrf;
  for (const Sentence& s : Sentences()) {
    bleu.Add(s.translation, s.reference);
    chrf.Add(s.translation, s.reference);
  }
  EXPECT_NEAR(bleu.Score(), 49.13724481221156, 1e-9);
  EXPECT_NEAR(chrf.Score(), 56.484182546410224, 1e-9);
  EXPECT_EQ(bleu.length, 42);
  EXPECT_EQ(bleu.reference_length, 47);
}

// Characters whose last byte alone would be white space: 0x85 and 0xa0.
TEST(TranslationScore, EndsOfManyWords) {
  const std::vector<Sentence> all = {
      {"oggi vado in città , sì", "oggi vado in città", 50.81327481546149, 0},
      {"oni w domu są .", "oni w domu są", 66.87403049764218, 0},
      {"мы живём в больших домах .", "мы живём в больших домах", 75.98356856515926, 0},
      {"αυτό είναι το σπίτι του .", "αυτό είναι το σπίτι του", 75.98356856515926, 0}};
  for (const Sentence& s : all) {
    BleuSums bleu;
    bleu.Add(s.translation, s.reference);
    EXPECT_NEAR(bleu.Score(), s.bleu, 1e-9) << s.translation;
  }
  using Words = std::vector<std::string>;
  EXPECT_EQ(Mteval13aTokens("là \t\xe2\x80\x83\xc2\xa0\n"), Words{"là"});
  EXPECT_EQ(Mteval13aTokens("a-\n\xc2\xa0"), (Words{"a-"}));
  EXPECT_EQ(Mteval13aTokens("a \x85"), (Words{"a", "\x85"}));  // a byte that is no character
}

TEST(TranslationScore, OfNothingIsZero) {
  EXPECT_EQ(BleuSums().Score(), 0);
  EXPECT_EQ(ChrfSums().Score(), 0);
}

std::string Tokens(const std::string& text) {
  std::string joined;
  for (const std::string& token : Mteval13aTokens(text))
    joined += (joined.empty() ? "" : "|") + token;
  return joined;
}

TEST(TranslationScore, TokensAsMteval13a) {
  EXPECT_EQ(Tokens("Hello, world... 3.5, 4,000 e.g. x.y"),
            "Hello|,|world|.|.|.|3.5|,|4,000|e|.|g|.|x|.|y");
  EXPECT_EQ(Tokens("\"Quoted\" it's a rock-n-roll 5-6 a-7 (b)[c]{d}"),
            "\"|Quoted|\"|it's|a|rock-n-roll|5|-|6|a-7|(|b|)|[|c|]|{|d|}");
  EXPECT_EQ(Tokens("a\u00a0b\u3000c d\x1f"
                   "e <skipped>end-\nofline &lt;b&gt; 50%/100$ ü.ö ..,,"),
            "a|b|c|d|e|endofline|<|b|>|50|%|/|100|$|ü|.|ö|.|.|,|,");
  EXPECT_EQ(Tokens("1.a .2 3,b ,4 5. 6,"), "1|.|a|.|2|3|,|b|,|4|5|.|6|,");
  EXPECT_EQ(Tokens(" \n"), "");
  EXPECT_EQ(Tokens("\xff\xfe."), "\xff\xfe|.");  // no UTF-8
}

}  // namespace
}  // namespace cistern
