// What the cells of a row become: tokens of its texts or numbers, and a target.
#include <algorithm>

#include "cistern/base/error.h"
#include "cistern/base/progress.h"
#include "cistern/tasks/classify_task.h"

namespace cistern {
namespace {

// A byte that no text has, and every tokenizer: no id more.
constexpr char kBetweenTexts[] = "\x1e";

double NumberOf(const std::string& text, const std::string& where, const std::string& what) {
  double value = 0;
  CISTERN_CHECK(ParseFinite(TrimmedCell(text), &value), where, ": expected a number as ", what,
                ", got '", text.substr(0, 40), "'");
  return value;
}

}  // namespace

double ClassifyTask::Target(const std::string& label, const std::string& where) const {
  if (options_.regression) return NumberOf(label, where, "the label");
  const auto found = std::find(classes_.begin(), classes_.end(), label);
  if (found == classes_.end()) throw Error(where + ": " + UnknownName("class", label, classes_));
  return double(found - classes_.begin());
}

void ClassifyTask::CheckCells(const LabelledRow& row, const std::string& where) const {
  for (size_t c = 0; options_.input == Input::kNumbers && c < row.inputs.size(); ++c) {
    if (!row.inputs[c].empty()) NumberOf(row.inputs[c], where, "column " + columns_.inputs[c]);
  }
  if (!row.label.empty() && (options_.regression || !classes_.empty())) Target(row.label, where);
}

bool ClassifyTask::NextRow(RowSource& source, const std::string& path, bool labelled,
                           LabelledRow* row, int64_t* skipped) const {
  while (source.Next(row)) {
    if (!labelled) row->label.clear();
    try {
      CheckCells(*row, StrCat(path, ":", row->line));
      return true;
    } catch (const Error&) {
      if (!options_.skip_bad_rows) throw;
      ++*skipped;
    }
  }
  return false;
}

// A pair that is too long loses tokens at the end of its longer text.
std::vector<int32_t> ClassifyTask::EncodeTexts(const LabelledRow& row) const {
  std::vector<int32_t> ids = tokenizer_->Encode(row.inputs[0]);
  if (row.inputs.size() < 2) return ids;
  std::vector<int32_t> between = tokenizer_->Encode(kBetweenTexts),
                       second = tokenizer_->Encode(row.inputs[1]);
  const auto room = size_t(std::max<int64_t>(0, options_.length - int64_t(between.size())));
  if (ids.size() + second.size() > room) {
    std::vector<int32_t>&longer = ids.size() > second.size() ? ids : second,
    &shorter = ids.size() > second.size() ? second : ids;
    shorter.resize(std::min(shorter.size(), room / 2));
    longer.resize(room - shorter.size());
  }
  ids.insert(ids.end(), between.begin(), between.end());
  ids.insert(ids.end(), second.begin(), second.end());
  return ids;
}

std::vector<int32_t> ClassifyTask::Encode(const LabelledRow& row, const std::string& where) const {
  std::vector<int32_t> ids;
  if (tokenizer_) {
    ids = EncodeTexts(row);
  } else {
    // Bins of column c are ids c (bins + 1) + 1 .. ; the first of each column is a missing number.
    for (size_t c = 0; c < edges_.size(); ++c) {
      int64_t bin = 0;
      if (!row.inputs[c].empty()) {
        const double x = NumberOf(row.inputs[c], where, "column " + columns_.inputs[c]);
        bin = 1 + (std::upper_bound(edges_[c].begin(), edges_[c].end(), x) - edges_[c].begin());
      }
      ids.push_back(int32_t(int64_t(c) * (options_.bins + 1) + bin));
    }
  }
  if (int64_t(ids.size()) > options_.length) ids.resize(size_t(options_.length));
  return ids;
}

ClassifyTask::Examples ClassifyTask::Encoded(const std::vector<LabelledRow>& rows,
                                             const std::string& path) const {
  Examples out;
  for (const LabelledRow& row : rows) {
    const std::string where = StrCat(path, ":", row.line);
    const std::vector<int32_t> ids = Encode(row, where);
    out.tokens.insert(out.tokens.end(), ids.begin(), ids.end());
    out.offsets.push_back(int64_t(out.tokens.size()));
    out.targets.push_back(row.label.empty() ? 0 : Target(row.label, where));
    out.lines.push_back(row.line);
  }
  return out;
}

void ClassifyTask::LearnInputs(const std::vector<LabelledRow>& train) {
  if (options_.input == Input::kNumbers) {
    for (size_t c = 0; c < columns_.inputs.size(); ++c) {
      std::vector<double> values;
      for (const LabelledRow& row : train) {
        if (row.inputs[c].empty()) continue;
        values.push_back(NumberOf(row.inputs[c], StrCat(options_.data, ":", row.line),
                                  "column " + columns_.inputs[c]));
      }
      std::sort(values.begin(), values.end());
      std::vector<double> edges;
      for (int64_t b = 1; b < options_.bins && !values.empty(); ++b) {
        const double edge =
            values[size_t(double(b) / double(options_.bins) * double(values.size()))];
        if (edges.empty() || edge > edges.back()) edges.push_back(edge);
      }
      edges_.push_back(std::move(edges));
    }
    return;
  }
  if (tokenizer_) return;  // TakeTokenizer
  if (options_.tokenizer == TokenizerKind::kBytes) {
    tokenizer_ = MakeByteTokenizer();
    return;
  }
  ProgressBar bar({0, "learn BPE", "merges"});
  const size_t texts = columns_.inputs.size();
  size_t next = 0;
  const auto text = [&]() -> const std::string& {
    return train[next / texts].inputs[next % texts];
  };
  tokenizer_ = TrainBpe(
      [&]() -> std::string_view {
        while (next < train.size() * texts && text().empty()) ++next;
        if (next == train.size() * texts) return {};
        const std::string_view found = text();
        ++next;
        return found;
      },
      options_.vocab_size, [&](int64_t done, int64_t) { bar.Update(done); }, TextPieces::kTexts);
}

}  // namespace cistern
