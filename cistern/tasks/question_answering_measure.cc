// How answers are found in what a model says of a text's tokens, and what they are measured by.
#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <set>
#include <string_view>

#include "cistern/base/error.h"
#include "cistern/io/json_text.h"
#include "cistern/tasks/question_answering_task.h"
#include "cistern/tasks/row_batch.h"
#include "cistern/text/answer_score.h"
#include "cistern/text/utf8.h"

namespace cistern {
namespace {

SpanPredictor& PredictorOf(Model& model) { return dynamic_cast<SpanPredictor&>(model); }

// Characters that begin in these bytes.
int64_t Characters(std::string_view bytes) {
  return std::count_if(bytes.begin(), bytes.end(),
                       [](char c) { return (static_cast<unsigned char>(c) & 0xC0) != 0x80; });
}

// Texts as rows of bytes, zeros behind them.
at::Tensor ByteRows(const std::vector<std::string>& texts) {
  size_t longest = 1;
  for (const std::string& text : texts) longest = std::max(longest, text.size());
  const at::Tensor rows = at::zeros({int64_t(texts.size()), int64_t(longest)}, at::kByte);
  uint8_t* to = rows.mutable_data_ptr<uint8_t>();
  for (const std::string& text : texts) {
    std::copy(text.begin(), text.end(), to);
    to += longest;
  }
  return rows;
}

// Of a question, as its first window's row of a batch says it.
Json AboutRow(const at::Tensor& about, int64_t row) {
  const auto* bytes =
      reinterpret_cast<const char*>(about.const_data_ptr<uint8_t>()) + row * about.size(1);
  const std::string_view padded(bytes, size_t(about.size(1)));
  return ParseJson(padded.substr(0, padded.find('\0')), "question");
}

// Where the windows of a question begin in a batch's rows; the number of rows behind the last.
std::vector<int64_t> FirstWindows(const at::Tensor& questions) {
  const int64_t* of = questions.const_data_ptr<int64_t>();
  std::vector<int64_t> first;
  for (int64_t r = 0; r < questions.numel(); ++r) {
    if (r == 0 || of[r] != of[r - 1]) first.push_back(r);
  }
  first.push_back(questions.numel());
  return first;
}

// Part of a text that a row holds.
struct RowWindow {
  int64_t row, place, begin, count, characters;  // place: of its first token in the row
  const int64_t* ids;                            // of its tokens
  const double* logits;                          // of its tokens: first, last

  // How much of the text stands on both sides of a token (Devlin et al.'s max_context).
  double Context(int64_t token) const {
    return double(std::min(token - begin, begin + count - 1 - token)) + 0.01 * double(count);
  }
};

}  // namespace

Batch QuestionAnsweringTask::QuestionBatch(const Examples& set,
                                           const std::vector<int64_t>& questions) const {
  std::vector<int64_t> windows, number, place, begin, characters;
  std::vector<std::string> about;
  for (size_t n = 0; n < questions.size(); ++n) {
    const auto q = size_t(questions[n]);
    const Question& question = set.set.questions[q];
    const std::string& context = set.set.contexts[question.context];
    const std::vector<int32_t>& text = set.contexts[question.context];
    Json says = {{"id", question.id}, {"question", question.text}, {"answers", Json::array()}};
    std::vector<std::string> answers;
    for (const Answer& answer : question.answers) answers.push_back(answer.text);
    says["answers"] = answers;
    says["context_f1"] = ScoreAnswer(context, answers).f1;
    int64_t token = 0, before = 0;
    for (size_t i = set.windows_of[q]; i < set.windows_of[q + 1]; ++i) {
      const Window& w = set.windows[i];
      for (; token < w.begin; ++token) before += Characters(tokenizer_->Bytes(text[size_t(token)]));
      windows.push_back(int64_t(i));
      number.push_back(int64_t(n));
      place.push_back(2 + int64_t(set.questions[q].size()));
      begin.push_back(w.begin);
      characters.push_back(before);
      about.push_back(i == set.windows_of[q] ? JsonLine(says) : "");
    }
  }
  Batch batch = MakeBatch(set, windows);
  AddNumbers("question", number, &batch);
  AddNumbers("place", place, &batch);
  AddNumbers("begin", begin, &batch);
  AddNumbers("characters", characters, &batch);
  batch.Add("about", ByteRows(about));
  return batch;
}

std::vector<std::vector<QuestionAnsweringTask::Candidate>> QuestionAnsweringTask::Candidates(
    const at::Tensor& given, const Batch& batch) const {
  const at::Tensor logits = given.to(at::kCPU, at::kDouble).contiguous(),
                   ids = batch["ids"].cpu().contiguous(), lengths = batch["lengths"].cpu(),
                   places = batch["place"].cpu(), begins = batch["begin"].cpu(),
                   characters = batch["characters"].cpu();
  const int64_t width = ids.size(1);
  const auto number = [](const at::Tensor& of, int64_t r) {
    return of.const_data_ptr<int64_t>()[r];
  };
  const std::vector<int64_t> first = FirstWindows(batch["question"].cpu());
  std::vector<std::vector<Candidate>> all;
  for (size_t q = 0; q + 1 < first.size(); ++q) {
    std::vector<RowWindow> windows;
    double none = INFINITY;
    for (int64_t r = first[q]; r < first[q + 1]; ++r) {
      const int64_t place = number(places, r);
      const double* const row = logits.const_data_ptr<double>() + r * width * 2;
      none = std::min(none, row[0] + row[1]);
      windows.push_back({r, place, number(begins, r), number(lengths, r) - place,
                         number(characters, r), ids.const_data_ptr<int64_t>() + r * width + place,
                         row + place * 2});
    }
    struct Span {
      const RowWindow* window;
      int64_t from, to;  // of the window
      double score;
    };
    std::vector<Span> spans;
    // Whether token t, or what follows the window, begins with a whole character.
    const auto begins = [&](const RowWindow& w, int64_t t) {
      const std::string_view bytes =
          t < w.count ? tokenizer_->Bytes(int32_t(w.ids[t])) : std::string_view();
      return bytes.empty() || (uint8_t(bytes[0]) & 0xc0) != 0x80;
    };
    for (const RowWindow& w : windows) {
      for (int64_t from = 0; from < w.count; ++from) {
        if (!begins(w, from)) continue;
        // A token of several windows is read where it has most context.
        const bool here = std::all_of(windows.begin(), windows.end(), [&](const RowWindow& other) {
          const int64_t token = w.begin + from;
          return other.row == w.row || token < other.begin || token >= other.begin + other.count ||
                 w.Context(token) > other.Context(token) ||
                 (w.Context(token) == other.Context(token) && w.row < other.row);
        });
        const int64_t end = std::min(w.count, from + options_.answer_length);
        for (int64_t to = from; here && to < end; ++to) {
          if (begins(w, to + 1))
            spans.push_back({&w, from, to, w.logits[2 * from] + w.logits[2 * to + 1]});
        }
      }
    }
    const size_t most = std::min(spans.size(), size_t(4 * options_.n_best));
    std::partial_sort(spans.begin(), spans.begin() + int64_t(most), spans.end(),
                      [](const Span& a, const Span& b) { return a.score > b.score; });
    std::vector<Candidate> found;
    std::set<std::string> seen;
    for (size_t i = 0; i < most && int64_t(found.size()) < options_.n_best; ++i) {
      const Span& s = spans[i];
      const auto text_of = [&](int64_t from, int64_t to) {
        return tokenizer_->Decode({s.window->ids + from, s.window->ids + to});
      };
      // Tokens may be parts of characters.
      std::string text = ValidUtf8(text_of(s.from, s.to + 1));
      const size_t begin = std::min(text.find_first_not_of(" \t\r\n"), text.size());
      text = text.substr(begin);
      text.resize(text.find_last_not_of(" \t\r\n") + 1);
      if (text.empty() || !seen.insert(text).second) continue;
      found.push_back(
          {text, s.window->characters + Characters(text_of(0, s.from)) + int64_t(begin), s.score});
    }
    if (no_answers_ || found.empty()) {
      const auto at = std::find_if(found.begin(), found.end(), [&](const Candidate& c) {
        return c.score < none - options_.no_answer_threshold;
      });
      found.insert(at, {"", -1, none});
    }
    all.push_back(std::move(found));
  }
  return all;
}

Score QuestionAnsweringTask::Measure(Model& model, const Batch& batch) const {
  model.config().CheckPositions(Form::kBidirectional, batch["ids"].size(1), "a row");
  const at::Tensor logits = PredictorOf(model).SpanLogits(model.ReadOf(batch.tensors));
  const at::Tensor nats =
      -at::log_softmax(logits, 1).gather(1, batch["targets"].unsqueeze(1)).to(at::kDouble).cpu();
  Score score;
  for (int64_t i = 0; i < nats.numel(); ++i) score.Add("nats", nats.const_data_ptr<double>()[i]);
  score.Add("places", double(nats.numel()));
  const std::vector<std::vector<Candidate>> candidates = Candidates(logits, batch);
  const std::vector<int64_t> first = FirstWindows(batch["question"].cpu());
  const at::Tensor about = batch["about"].cpu();
  for (size_t q = 0; q < candidates.size(); ++q) {
    const Json says = AboutRow(about, first[q]);
    const auto answers = says["answers"].get<std::vector<std::string>>();
    const AnswerScore right = ScoreAnswer(candidates[q][0].text, answers);
    score.Add("examples", 1);
    score.Add("f1", right.f1);
    score.Add("exact", right.exact);
    score.Add("context_f1", says["context_f1"].get<double>());
    score.Add(answers.empty() ? "no_answer_examples" : "has_answer_examples", 1);
    score.Add(answers.empty() ? "no_answer_f1" : "has_answer_f1", right.f1);
  }
  return score;
}

Json QuestionAnsweringTask::Metrics(const Score& score) const {
  const auto percent = [&](const char* of, const char* examples) {
    return 100 * score[of] / score[examples];
  };
  Json out = {{"f1", percent("f1", "examples")},
              {"exact_match", percent("exact", "examples")},
              {"log_loss", score["nats"] / score["places"]},
              {"examples", int64_t(score["examples"])}};
  if (score.Has("no_answer_examples")) {
    if (score.Has("has_answer_examples"))
      out["has_answer_f1"] = percent("has_answer_f1", "has_answer_examples");
    out["no_answer_f1"] = percent("no_answer_f1", "no_answer_examples");
    out["no_answer"] = percent("no_answer_examples", "examples");
  }
  out["context_f1"] = percent("context_f1", "examples");
  return out;
}

std::vector<Json> QuestionAnsweringTask::Predict(Model& model, const Batch& batch) const {
  model.config().CheckPositions(Form::kBidirectional, batch["ids"].size(1), "a row");
  const std::vector<std::vector<Candidate>> candidates =
      Candidates(PredictorOf(model).SpanLogits(model.ReadOf(batch.tensors)), batch);
  const std::vector<int64_t> first = FirstWindows(batch["question"].cpu());
  const at::Tensor about = batch["about"].cpu();
  std::vector<Json> out;
  for (size_t q = 0; q < candidates.size(); ++q) {
    const Json says = AboutRow(about, first[q]);
    double largest = -INFINITY, sum = 0;
    for (const Candidate& c : candidates[q]) largest = std::max(largest, c.score);
    for (const Candidate& c : candidates[q]) sum += std::exp(c.score - largest);
    Json list = Json::array();
    for (const Candidate& c : candidates[q])
      list.push_back({{"answer", c.text},
                      {"start", c.start},
                      {"probability", std::exp(c.score - largest) / sum}});
    const Candidate& best = candidates[q][0];
    out.push_back({{"id", says["id"]},
                   {"question", says["question"]},
                   {"answer", best.text},
                   {"start", best.start},
                   {"score", best.score},
                   {"candidates", std::move(list)}});
  }
  return out;
}

}  // namespace cistern
