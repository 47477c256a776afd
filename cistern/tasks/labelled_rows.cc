#include "cistern/tasks/labelled_rows.h"

#include <algorithm>
#include <filesystem>

#include "cistern/base/error.h"
#include "cistern/io/byte_source.h"
#include "cistern/io/folder_files.h"
#include "cistern/io/json_text.h"

namespace cistern {
namespace fs = std::filesystem;
namespace {

class TableRows : public RowSource {
 public:
  TableRows(const std::string& path, const RowColumns& columns, const TableOptions& options,
            bool labelled)
      : table_(path, options), labelled_(labelled), skip_bad_(options.skip_bad) {
    for (const std::string& name : columns.inputs) {
      inputs_.push_back(table_.Column(name));
      if (!columns.numbers) table_.Require(inputs_.back());
    }
    const auto& all = table_.columns();
    has_label_ = labelled || std::find(all.begin(), all.end(), columns.label) != all.end();
    if (has_label_) label_ = table_.Column(columns.label);
  }
  bool Next(LabelledRow* row) override {
    for (;; ++skipped_) {
      if (!table_.Next(&cells_)) return false;
      if (!labelled_ || !cells_[label_].empty()) break;
      CISTERN_CHECK(skip_bad_, table_.path(), ":", table_.line(), ": the label is empty");
    }
    row->inputs.clear();
    for (const size_t i : inputs_) row->inputs.push_back(cells_[i]);
    row->label = has_label_ ? cells_[label_] : "";
    row->line = table_.line();
    return true;
  }
  int64_t skipped() const override { return table_.skipped() + skipped_; }
  int64_t done() const override { return table_.lines().bytes_read(); }
  int64_t total() const override { return table_.lines().bytes_total(); }

 private:
  TableReader table_;
  std::vector<size_t> inputs_;
  std::vector<std::string> cells_;
  size_t label_ = 0;
  bool has_label_ = false;
  const bool labelled_, skip_bad_;
  int64_t skipped_ = 0;  // rows without a label
};

bool IsHidden(const fs::directory_entry& entry) {
  return entry.path().filename().string().starts_with(".");
}

// Not such as .ipynb_checkpoints.
bool IsClass(const fs::directory_entry& entry) { return entry.is_directory() && !IsHidden(entry); }

class FolderRows : public RowSource {
 public:
  explicit FolderRows(const std::string& path) {
    const bool reviews = fs::is_directory(path + "/pos") && fs::is_directory(path + "/neg");
    FolderFiles found;
    for (const auto& entry : fs::directory_iterator(path)) {
      if (!IsHidden(entry) && entry.is_symlink() && !entry.exists())
        found.broken.Add(entry.path().string());
      if (!IsClass(entry) || (reviews && entry.path().filename() == "unsup")) continue;
      FindFiles(entry.path().string(), Folders::kSkip, &found);
    }
    found.Note(&notes_);
    files_.assign(found.paths.begin(), found.paths.end());
    std::sort(files_.begin(), files_.end());
    CISTERN_CHECK(!files_.empty(), path, ": no files in its folders", AsReasons(notes_));
    CheckNoTwins({files_.begin(), files_.end()});
  }
  bool Next(LabelledRow* row) override {
    if (next_ == files_.size()) return false;
    const fs::path& path = files_[next_++];
    row->inputs = {ReadText(path.string())};
    row->label = path.parent_path().filename().string();
    row->line = int64_t(next_);
    return true;
  }
  int64_t done() const override { return int64_t(next_); }
  int64_t total() const override { return int64_t(files_.size()); }

 private:
  std::vector<fs::path> files_;
  size_t next_ = 0;
};

// Names are written down with the model, in JSON.
void CheckUtf8(const std::string& name, const std::string& path, const char* what) {
  if (!IsUtf8(name))
    FailUsage(path, ": ", what, " is not valid UTF-8: '", JsonLine(name),
              "'; convert the file, for example with iconv -t UTF-8");
}

std::string Joined(const std::vector<std::string>& names) {
  std::string out;
  for (const std::string& name : names) out += (out.empty() ? "" : ", ") + name;
  return out;
}

}  // namespace

bool IsClassFolder(const std::string& path) {
  std::error_code error;
  if (!fs::is_directory(path, error)) return false;
  int folders = 0;
  for (const auto& entry : fs::directory_iterator(path, error)) folders += IsClass(entry);
  return folders >= 2;
}

bool IsTrainTestFolder(const std::string& path) {
  return IsClassFolder(path + "/train") && IsClassFolder(path + "/test");
}

bool IsRows(const std::string& path) {
  TableReader::Format format;
  return TableReader::FormatOf(path, &format) || IsClassFolder(path);
}

std::unique_ptr<RowSource> OpenRows(const std::string& path, const RowColumns& columns,
                                    const TableOptions& options, bool labelled) {
  std::error_code error;
  if (fs::is_directory(path, error)) {
    CISTERN_CHECK(IsClassFolder(path), path,
                  ": expected a folder for each class, each with a file for each text");
    return std::make_unique<FolderRows>(path);
  }
  return std::make_unique<TableRows>(path, columns, options, labelled);
}

RowColumns FindColumns(const std::string& path, const RowColumns& named,
                       const TableOptions& options) {
  constexpr int kLookedAt = 200;
  RowColumns found = named;
  std::error_code error;
  if (fs::is_directory(path, error)) {
    if (named.numbers)
      FailUsage(path, ": a folder for each class holds texts; numbers come in a table");
    found.inputs = {"text"};
    return found;
  }
  CISTERN_CHECK(!fs::is_fifo(path, error), path,
                " is a pipe, and rows to train on are read several times; write them to a file, "
                "and give that");
  TableReader table(path, options);
  const std::vector<std::string>&columns = table.columns(), names = table.NamedColumns();
  std::vector<int64_t> lengths(columns.size());
  std::vector<std::string> cells;
  for (int i = 0; i < kLookedAt && table.Next(&cells); ++i) {
    for (size_t c = 0; c < cells.size(); ++c) lengths[c] += int64_t(cells[c].size());
  }
  for (const char* word : {"label", "class", "target", "category"}) {
    for (const std::string& name : columns) {
      if (found.label.empty() && name == word && named.inputs != std::vector<std::string>{name})
        found.label = name;
    }
  }
  if (found.inputs.empty() && !named.numbers) {
    size_t longest = columns.size();
    for (size_t c = 0; c < columns.size(); ++c) {
      if (columns[c] == found.label || columns[c].empty()) continue;
      if (longest == columns.size() || lengths[c] > lengths[longest]) longest = c;
    }
    if (longest == columns.size()) FailUsage(path, ": no column for the text besides the label");
    found.inputs = {columns[longest]};
  }
  const auto is_input = [&](const std::string& name) {
    return std::find(found.inputs.begin(), found.inputs.end(), name) != found.inputs.end();
  };
  if (found.label.empty()) {
    std::vector<std::string> others;
    for (const std::string& name : names) {
      if (!is_input(name)) others.push_back(name);
    }
    if (found.label.empty() && others.size() == 1) found.label = others[0];
    if (found.label.empty()) {
      FailUsage(path, ": which column is the label? Its columns are ", Joined(names),
                "; name it: --set task.label_column=", names.empty() ? "..." : names[0],
                " (and the text: --set task.text_column=...)", table.HeaderHint());
    }
  }
  if (found.inputs.empty()) {
    for (const std::string& name : names) {
      if (name != found.label) found.inputs.push_back(name);
    }
    if (found.inputs.empty()) FailUsage(path, ": no columns of numbers besides the label");
  }
  for (const std::string& name : found.inputs) CheckUtf8(name, path, "the name of a column");
  CheckUtf8(found.label, path, "the name of the label's column");
  return found;
}

}  // namespace cistern
