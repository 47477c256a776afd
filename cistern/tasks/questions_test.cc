#include "cistern/tasks/questions.h"

#include <gtest/gtest.h>

#include <fstream>

#include "cistern/base/error.h"
#include "cistern/io/test_folder.h"
#include "cistern/ops/testing.h"

namespace cistern {
namespace {

using testing::ExpectContains;

// Twelve bytes stand before "Paris", and ten characters.
constexpr char kContext[] = "\xc3\x89t\xc3\xa9 1889: Paris, the Paris of today.";

class Questions : public ::testing::Test {
 protected:
  std::string Write(const std::string& name, const std::string& text) {
    std::ofstream(folder_ / name, std::ios::binary) << text;
    return folder_ / name;
  }
  static QuestionSet Read(const std::string& path, bool labelled = true, bool skip = false) {
    TableOptions options;
    options.skip_bad = skip;
    return ReadQuestions(path, {}, options, labelled);
  }
  static std::string Refusal(const std::string& path) {
    return ErrorMessage([&] { Read(path); });
  }
  static std::string Squad(const std::string& qas) {
    return StrCat("{\"version\": \"v2.0\", \"data\": [{\"title\": \"t\", \"paragraphs\": ",
                  "[{\"context\": \"", kContext, "\", \"qas\": [", qas, "]}]}]}");
  }

  TestFolder folder_;
};

TEST_F(Questions, SquadPlacesAnswersInCharacters) {
  const std::string text = Squad(
      R"({"id": "a", "question": "Where?", "is_impossible": false,
          "answers": [{"text": "Paris", "answer_start": 10}, {"text": "Paris", "answer_start": 21}]},
         {"id": "b", "question": "Who?", "answers": [], "is_impossible": true,
          "plausible_answers": [{"text": "today", "answer_start": 30}]},
         {"id": "c", "question": "When?", "answers": [{"text": "1889", "answer_start": 5}]})");
  const QuestionSet set = Read(Write("q.json", text));
  ASSERT_EQ(set.contexts, std::vector<std::string>{kContext});
  ASSERT_EQ(set.questions.size(), 3u);
  EXPECT_EQ(set.questions[0].id, "a");
  EXPECT_EQ(set.questions[0].text, "Where?");
  ASSERT_EQ(set.questions[0].answers.size(), 2u);
  EXPECT_EQ(set.questions[0].answers[0].begin, 12);
  EXPECT_EQ(set.questions[0].answers[1].begin, 23);
  EXPECT_TRUE(set.questions[1].answers.empty());
  EXPECT_EQ(set.questions[2].answers[0].begin, 6);
  EXPECT_EQ(set.moved, 1);  // 1889 stands at character 4
  // The same in one line; without answers none are read.
  std::string line = text;
  std::replace(line.begin(), line.end(), '\n', ' ');
  EXPECT_EQ(Read(Write("q.json", line)).questions.size(), 3u);
  EXPECT_TRUE(Read(Write("q.json", line), false).questions[0].answers.empty());
}

TEST_F(Questions, SquadIsKnownByItsBeginning) {
  EXPECT_TRUE(IsSquadFile(Write("q.json", Squad(""))));
  EXPECT_FALSE(IsSquadFile(Write("q.txt", Squad(""))));
  EXPECT_FALSE(IsSquadFile(Write("q.json", "{\"data\": \"a\", \"label\": 1}\n")));
  EXPECT_FALSE(IsSquadFile(Write("q.json", "{\"paragraphs\": 1, \"data\": 2}\n")));
  EXPECT_FALSE(IsSquadFile(folder_ / "none.json"));
  EXPECT_FALSE(IsSquadFile(folder_.path()));
}

TEST_F(Questions, TablesHaveColumns) {
  const auto check = [](const QuestionSet& set) {
    ASSERT_EQ(set.questions.size(), 3u);
    EXPECT_EQ(set.contexts.size(), 2u);  // the first and the last are of one text
    EXPECT_EQ(set.questions[0].answers[0].begin, 3);
    EXPECT_TRUE(set.questions[1].answers.empty());
    EXPECT_EQ(set.questions[2].context, set.questions[0].context);
    EXPECT_EQ(set.questions[2].answers[0].text, "a b");
  };
  QuestionSet set = Read(Write("q.tsv",
                               "question\tcontext\tanswers\nq1\tc a b\ta b\nq2\tother\t\n"
                               "q3\tc a b\ta b\n"));
  set.questions[0].answers[0].begin += 1;  // "c a b": byte 2
  check(set);
  EXPECT_EQ(set.questions[1].id, "2");
  set = Read(Write("q.csv",
                   "context,question,answer,answer_start,id\na ba b,q1,a b,3,x\nother,q2,,,y\n"
                   "a ba b,q3,a b,0,z\n"));
  check(set);
  EXPECT_EQ(set.questions[2].answers[0].begin, 0);
  EXPECT_EQ(set.questions[1].id, "y");
  set = Read(Write("q.jsonl", R"({"context": "a ba b", "question": "q1",)"
                              R"( "answers": {"text": ["a b", "b"], "answer_start": [3, 5]}})"
                              "\n"
                              R"({"context": "other", "question": "q2",)"
                              R"( "answers": {"text": [], "answer_start": []}})"
                              "\n"
                              R"({"context": "a ba b", "question": "q3", "answers": "a b"})"
                              "\n"));
  check(set);
  EXPECT_EQ(set.questions[0].answers[1].begin, 5);
  const std::string asked = Write("new.tsv", "context\tquestion\nc\tq\n");
  EXPECT_EQ(Read(asked, false).questions.size(), 1u);
  ExpectContains(Refusal(asked), {"new.tsv", "answers", "context, question"});
  const std::string second = R"({"context": "c a", "question": "q", "answers": "a"})";
  ExpectContains(
      Refusal(Write("late.jsonl", "{\"context\": \"c\", \"question\": \"q\"}\n" + second + "\n")),
      {"late.jsonl", "answers", "keys of the first row", "put it there, with null"});
  set = Read(Write("late.jsonl", "{\"context\": \"c\", \"question\": \"q\", \"answers\": null}\n" +
                                     second + "\n"));
  EXPECT_TRUE(set.questions[0].answers.empty());
  EXPECT_EQ(set.questions[1].answers[0].begin, 2);
}

TEST_F(Questions, WhatCannotBeReadIsNamed) {
  const std::string elsewhere =
      Squad(R"({"id": "a7", "question": "Q", "answers": [{"text": "Rome", "answer_start": 1}]},
               {"id": "b", "question": "Q", "answers": [{"text": "1889", "answer_start": 4}]})");
  ExpectContains(Refusal(Write("q.json", elsewhere)),
                 {"q.json: question a7: the answer 'Rome' is not in its context"});
  const QuestionSet rest = Read(Write("q.json", elsewhere), true, true);
  EXPECT_EQ(rest.questions.size(), 1u);
  EXPECT_EQ(rest.skipped, 1);
  ExpectContains(Refusal(Write("q.json", Squad(R"({"id": "a", "question": "Q"})"))),
                 {"question a: no \"answers\""});
  ExpectContains(Refusal(Write("q.json", Squad(R"({"id": "a", "answers": []})"))),
                 {"question a: no \"question\""});
  ExpectContains(Refusal(Write("q.json", "{\"data\": [{\"title\": \"x\"}]}")),
                 {"q.json: article 1: no \"paragraphs\""});
  ExpectContains(Refusal(Write("q.json", elsewhere.substr(0, 200))), {"q.json:1", "not valid"});
  const std::string head = "context\tquestion\tanswers\tanswer_start\n";
  ExpectContains(Refusal(Write("q.tsv", head + "a b\tq\tb\tx\n")),
                 {"q.tsv:2: answer_start is 'x'"});
  ExpectContains(Refusal(Write("q.tsv", head + "a b\tq\tb\t2\n\tq\tb\t0\n")),
                 {"q.tsv:3: the context is empty"});
  ExpectContains(Refusal(Write("q.tsv", head + "a b\t\tb\t2\n")),
                 {"q.tsv:2: the question is empty"});
  ExpectContains(Refusal(Write("q.tsv", "context\tquestion\tanswers\n")), {"has no questions"});
  ExpectContains(Refusal(Write("q.jsonl",
                               "{\"context\": \"a\", \"question\": \"q\", "
                               "\"answers\": {\"text\": [\"a\"], \"answer_start\": []}}\n")),
                 {"q.jsonl:1", "of one length"});
  ExpectContains(Refusal(folder_ / "none.json"), {"none.json"});
}

}  // namespace
}  // namespace cistern
