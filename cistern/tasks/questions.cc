#include "cistern/tasks/questions.h"

#include <algorithm>
#include <charconv>
#include <filesystem>
#include <map>
#include <optional>
#include <utility>

#include "cistern/base/error.h"
#include "cistern/io/json_text.h"
#include "cistern/text/utf8.h"

namespace cistern {
namespace {

// The byte where character `index` begins; the end for any beyond.
size_t ByteOf(const std::string& text, int64_t index) {
  size_t at = 0;
  for (; index > 0 && at < text.size(); --index) at += size_t(DecodeUtf8(text, at).length);
  return at;
}

// Where the answer stands, nearest to `wanted`.
std::optional<size_t> Nearest(const std::string& context, const std::string& answer,
                              size_t wanted) {
  std::optional<size_t> best;
  const auto distance = [wanted](size_t at) { return at > wanted ? at - wanted : wanted - at; };
  for (size_t at = context.find(answer); at != context.npos; at = context.find(answer, at + 1)) {
    if (!best || distance(at) < distance(*best)) best = at;
  }
  return best;
}

class Reader {
 public:
  Reader(const std::string& path, bool labelled, bool skip_bad)
      : path_(path), labelled_(labelled), skip_bad_(skip_bad) {}

  size_t Context(std::string text, const std::string& where) {
    CISTERN_CHECK(!text.empty(), where, ": the context is empty");
    const auto [found, fresh] = numbers_.emplace(std::move(text), set_.contexts.size());
    if (fresh) set_.contexts.push_back(found->first);
    return found->second;
  }

  void Add(Question question, const std::string& where) {
    CISTERN_CHECK(!question.text.empty(), where, ": the question is empty");
    set_.questions.push_back(std::move(question));
  }

  // characters: where the file says that the answer begins; nullopt: where it stands first.
  Answer Placed(const std::string& text, size_t context, std::optional<int64_t> characters,
                const std::string& where) {
    CISTERN_CHECK(!text.empty(), where, ": an answer is empty; a question without one has none");
    const std::string& in = set_.contexts[context];
    const size_t wanted = characters ? ByteOf(in, *characters) : 0;
    const std::optional<size_t> at = Nearest(in, text, wanted);
    CISTERN_CHECK(at.has_value(), where, ": the answer '", text.substr(0, 60),
                  "' is not in its context; answers are spans of it, letter by letter");
    if (characters && *at != wanted) ++set_.moved;
    return {text, int64_t(*at)};
  }

  // SQuAD's list of {"text", "answer_start"}, or an object of two lists.
  std::vector<Answer> Answers(const Json& json, size_t context, const std::string& where) {
    std::vector<Answer> out;
    const auto add = [&](const Json& text, const Json& start) {
      CISTERN_CHECK(text.is_string() && start.is_number_integer() && start.get<int64_t>() >= 0,
                    where, ": expected an answer's text and answer_start, characters from 0");
      out.push_back(Placed(text.get<std::string>(), context, start.get<int64_t>(), where));
    };
    if (json.is_array()) {
      for (const Json& answer : json) {
        CISTERN_CHECK(
            answer.is_object() && answer.contains("text") && answer.contains("answer_start"), where,
            ": expected answers of {\"text\": ..., \"answer_start\": ...}");
        add(answer["text"], answer["answer_start"]);
      }
      return out;
    }
    CISTERN_CHECK(json.is_object() && json.contains("text") && json.contains("answer_start") &&
                      json["text"].is_array() && json["answer_start"].is_array() &&
                      json["text"].size() == json["answer_start"].size(),
                  where,
                  ": expected answers {\"text\": [...], \"answer_start\": [...]} of one length");
    for (size_t i = 0; i < json["text"].size(); ++i) add(json["text"][i], json["answer_start"][i]);
    return out;
  }

  void ReadSquad(const Json& file);
  void ReadTable(const QuestionColumns& columns, const TableOptions& options);
  QuestionSet Take() { return std::move(set_); }

 private:
  // `add` reads one question; where that fails it is counted, or the error goes on.
  template <class F>
  void OrSkip(F&& add) {
    try {
      add();
    } catch (const Error&) {
      if (!skip_bad_) throw;
      ++set_.skipped;
    }
  }

  std::string path_;
  bool labelled_, skip_bad_;
  QuestionSet set_;
  std::map<std::string, size_t> numbers_;  // of contexts
};

const Json& Field(const Json& object, const char* name, const std::string& where) {
  CISTERN_CHECK(object.is_object() && object.contains(name), where, ": no \"", name, "\"");
  return object[name];
}

std::string TextOf(const Json& object, const char* name, const std::string& where) {
  const Json& text = Field(object, name, where);
  CISTERN_CHECK(text.is_string(), where, ": \"", name, "\" is no text");
  return text.get<std::string>();
}

const Json& ListOf(const Json& object, const char* name, const std::string& where) {
  const Json& list = Field(object, name, where);
  CISTERN_CHECK(list.is_array(), where, ": \"", name, "\" is no list");
  return list;
}

void Reader::ReadSquad(const Json& file) {
  size_t articles = 0;
  for (const Json& article : file["data"]) {
    const std::string of = StrCat(path_, ": article ", ++articles);
    size_t paragraphs = 0;
    for (const Json& paragraph : ListOf(article, "paragraphs", of)) {
      const std::string where = StrCat(of, ", paragraph ", ++paragraphs);
      const size_t context = Context(TextOf(paragraph, "context", where), where);
      for (const Json& qa : ListOf(paragraph, "qas", where)) {
        OrSkip([&] {
          Question q;
          q.id = TextOf(qa, "id", where);
          const std::string at = StrCat(path_, ": question ", q.id);
          q.text = TextOf(qa, "question", at);
          q.context = context;
          const bool impossible = qa.contains("is_impossible") && qa["is_impossible"] == Json(true);
          if (labelled_ && !impossible) q.answers = Answers(Field(qa, "answers", at), context, at);
          Add(std::move(q), at);
        });
      }
    }
  }
}

void Reader::ReadTable(const QuestionColumns& names, const TableOptions& options) {
  TableReader table(path_, options);
  const auto find = [&](const std::string& name) -> std::optional<size_t> {
    const auto found = std::find(table.columns().begin(), table.columns().end(), name);
    if (found == table.columns().end()) return std::nullopt;
    return size_t(found - table.columns().begin());
  };
  const size_t context = table.Column(names.context), question = table.Column(names.question);
  table.Require(context);
  table.Require(question);
  std::optional<size_t> answer = find(names.answer);
  if (!answer && names.answer == QuestionColumns().answer) answer = find("answer");
  if (labelled_ && !answer) table.Column(names.answer);  // the error
  const std::optional<size_t> start = find("answer_start"), id = find("id");
  TableReader::Format format;
  TableReader::FormatOf(path_, &format);
  const bool json = format == TableReader::Format::kJsonl;
  const auto answers_of = [&](const std::vector<std::string>& cells, size_t of,
                              const std::string& where) -> std::vector<Answer> {
    const std::string& cell = cells[*answer];
    if (cell.empty()) return {};
    const bool of_text = cells[context].find(cell) != std::string::npos;  // such as "[1]"
    if (json && !of_text && (cell.starts_with('{') || cell.starts_with('[')))
      return Answers(ParseJson(cell, where), of, where);
    std::optional<int64_t> characters;
    if (start) {
      const std::string& text = cells[*start];
      int64_t value = -1;
      const auto [rest, error] = std::from_chars(text.data(), text.data() + text.size(), value);
      CISTERN_CHECK(error == std::errc() && rest == text.data() + text.size() && value >= 0, where,
                    ": answer_start is '", text, "', not a number of characters");
      characters = value;
    }
    return {Placed(cell, of, characters, where)};
  };
  int64_t row = 0;
  for (std::vector<std::string> cells; table.Next(&cells);) {
    const std::string where = StrCat(path_, ":", table.line());
    ++row;
    OrSkip([&] {
      Question q;
      q.id = id ? cells[*id] : std::to_string(row);
      q.text = cells[question];
      q.context = Context(cells[context], where);
      if (labelled_) q.answers = answers_of(cells, q.context, where);
      Add(std::move(q), where);
    });
  }
  set_.skipped += table.skipped();
}

bool IsSquad(const Json& json) {
  return json.is_object() && json.contains("data") && json["data"].is_array();
}

std::optional<Json> Parsed(const std::string& text, const std::string& path) {
  try {
    return ParseJson(text, path);
  } catch (const Error&) {
    return std::nullopt;
  }
}

// SQuAD's file, one object in one line or in many; nullopt for a table.
std::optional<Json> SquadFile(const std::string& path) {
  TableReader::Format format;
  if (!TableReader::FormatOf(path, &format) || format != TableReader::Format::kJsonl)
    return std::nullopt;
  std::string first;
  LineReader(path).Next(&first);
  std::optional<Json> json = Parsed(first, path);
  if (!json) json = Parsed(ReadText(path), path);
  return json && IsSquad(*json) ? json : std::nullopt;
}

}  // namespace

bool IsSquadFile(const std::string& path) {
  TableReader::Format format;
  std::error_code error;
  if (!TableReader::FormatOf(path, &format) || format != TableReader::Format::kJsonl ||
      !std::filesystem::is_regular_file(path, error))
    return false;
  std::string start(1 << 12, '\0');
  start.resize(ByteSource(path).Read(start.data(), start.size()));
  const size_t data = start.find("\"data\"");
  return data != start.npos && start.find("\"paragraphs\"", data) != start.npos;
}

QuestionSet ReadQuestions(const std::string& path, const QuestionColumns& columns,
                          const TableOptions& options, bool labelled) {
  Reader reader(path, labelled, options.skip_bad);
  if (const std::optional<Json> squad = SquadFile(path)) {
    reader.ReadSquad(*squad);
  } else {
    reader.ReadTable(columns, options);
  }
  QuestionSet set = reader.Take();
  CISTERN_CHECK(!set.questions.empty(), path, " has no questions");
  return set;
}

}  // namespace cistern
