#pragma once
// Questions on texts, whose answers are spans of them, from a user's own files: SQuAD's JSON, 1.1
// and 2.0, or a table (io/table_reader.h) with columns for the text, the question and its answer.
#include <cstdint>
#include <string>
#include <vector>

#include "cistern/io/table_reader.h"

namespace cistern {

struct Answer {
  std::string text;
  int64_t begin = 0;  // byte of the context
};

struct Question {
  std::string id, text;
  size_t context = 0;           // which of QuestionSet::contexts
  std::vector<Answer> answers;  // of which each is right; none: the text does not answer it
};

struct QuestionSet {
  std::vector<std::string> contexts;
  std::vector<Question> questions;  // in the order of the file
  int64_t moved = 0;    // answers that lie elsewhere in their context than the file says
  int64_t skipped = 0;  // questions that could not be read (TableOptions::skip_bad)
};

// Columns of a table. A column `answer_start` gives the place of answers in characters, as SQuAD
// does; without it an answer is where it stands first. `answers` of JSON lines may be SQuAD's
// {"text": [...], "answer_start": [...]}. A column `id` names questions; without it the row does.
struct QuestionColumns {
  std::string context = "context", question = "question", answer = "answers";
};

// Whether a file is SQuAD's JSON, by its name and what it begins with.
bool IsSquadFile(const std::string& path);

// Errors name the file and the line, or in SQuAD's JSON the question. labelled: answers have to be
// there; those that a text does not hold are an error. Else they are not read.
QuestionSet ReadQuestions(const std::string& path, const QuestionColumns& columns,
                          const TableOptions& options, bool labelled);

}  // namespace cistern
