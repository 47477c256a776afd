#include "cistern/data/text_pairs.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <string_view>
#include <unordered_set>
#include <utility>

#include "cistern/base/error.h"
#include "cistern/base/hash.h"
#include "cistern/base/random.h"
#include "cistern/io/byte_source.h"
#include "cistern/io/folder_files.h"
#include "cistern/io/read_at.h"

namespace cistern {
namespace fs = std::filesystem;
namespace {

constexpr size_t kColumns = 5;
constexpr size_t kLongestLabel = 32;

class PairFile : public TextPairs {
 public:
  PairFile(const std::string& path, const PairFileOptions& options)
      : path_(path), options_(options) {
    std::error_code error;
    CISTERN_CHECK(!fs::is_directory(path, error), path, " is a folder, not a file");
    fd_ = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
    CISTERN_CHECK(fd_ >= 0, "cannot read ", path, ": ", std::strerror(errno));
    try {
      version_ = VersionOf(fd_, path_);
      Scan();
    } catch (...) {
      ::close(fd_);
      throw;
    }
  }
  ~PairFile() override { ::close(fd_); }
  PairFile(const PairFile&) = delete;
  PairFile& operator=(const PairFile&) = delete;

  int64_t size() const override { return int64_t(rows_.size()); }
  int Label(int64_t pair) const override { return rows_[size_t(pair)].label; }
  int64_t Line(int64_t pair) const override { return rows_[size_t(pair)].line; }
  uint64_t Hash() const override { return hash_; }
  int64_t skipped() const override { return skipped_; }

  void Read(int64_t pair, int64_t limit, std::string* first, std::string* second) const override {
    const Row& row = rows_[size_t(pair)];
    ReadText(row.first, std::min(limit, row.first_bytes), row.line, first);
    ReadText(row.second, std::min(limit, row.second_bytes), row.line, second);
    CheckVersion(fd_, version_, path_);
  }

 private:
  struct Row {
    int64_t first = 0, first_bytes = 0, second = 0, second_bytes = 0, line = 0;
    int label = 0;
  };

  void ReadText(int64_t offset, int64_t bytes, int64_t line, std::string* out) const {
    out->resize(size_t(bytes));
    ReadAt(fd_, offset, out->size(), out->data(), StrCat(path_, ":", line));
  }

  // One pass in pieces: where each line's tabs are.
  void Scan() {
    std::string piece(size_t{1} << 20, '\0');
    XxHash64Stream hash;
    int64_t at = 0;
    Begin(0);
    for (;;) {
      const ssize_t n = ::read(fd_, piece.data(), piece.size());
      if (n < 0 && errno == EINTR) continue;
      CISTERN_CHECK(n >= 0, "cannot read ", path_, ": ", std::strerror(errno));
      if (n == 0) break;
      const std::string_view bytes = std::string_view(piece).substr(0, size_t(n));
      if (at == 0 && (bytes.starts_with("\x1f\x8b") || bytes.starts_with("\xfd"
                                                                         "7zXZ"))) {
        FailUsage(path_,
                  " is compressed; decompress it first: its texts are read from their "
                  "places in the file, not held in memory");
      }
      hash.Add(bytes);
      for (size_t i = 0; i < bytes.size(); ++i) Take(bytes[i], at + int64_t(i));
      at += n;
    }
    if (at > begin_) EndLine(at);
    hash_ = hash.Value();
    CheckVersion(fd_, version_, path_);
    CISTERN_CHECK(!rows_.empty(), path_, " has no pairs",
                  skipped_ > 0 ? StrCat(" (", skipped_, " lines could not be read)") : "");
  }

  void Begin(int64_t at) {
    begin_ = at;
    ++line_;
    tabs_ = 0;
    label_.clear();
  }

  void Take(char byte, int64_t at) {
    if (byte == '\n') {
      EndLine(at);
      Begin(at + 1);
      return;
    }
    returned_ = byte == '\r';
    if (byte == '\t') {
      if (tabs_ < places_.size()) places_[tabs_] = at;
      ++tabs_;
    } else if (tabs_ == 0 && label_.size() <= kLongestLabel) {
      label_ += byte;
    }
  }

  void EndLine(int64_t end) {
    Row row;
    const std::string wrong = RowOf(end, &row);
    if (wrong.empty()) {
      rows_.push_back(row);
    } else if (options_.skip_bad) {
      ++skipped_;
    } else {
      Fail(path_, ":", line_, ": ", wrong);
    }
    returned_ = false;
  }

  // What is wrong with the line that ends here; empty: nothing.
  std::string RowOf(int64_t end, Row* row) const {
    if (tabs_ + 1 != kColumns)
      return StrCat(tabs_ + 1, " columns; expected ", kColumns,
                    ", between tabs: label, id, id, text, text");
    if (options_.labelled) {
      const std::string said(line_ == 1 ? WithoutMark(label_) : label_);
      char* rest = nullptr;
      const double label = std::strtod(said.c_str(), &rest);
      if (said.empty() || rest != said.c_str() + said.size() || (label != 0 && label != 1))
        return StrCat("expected the label 0 or 1, got '", said.substr(0, kLongestLabel), "'");
      row->label = label == 1 ? 1 : 0;
    }
    if (returned_ && end > places_[3] + 1) --end;
    row->line = line_;
    row->first = places_[2] + 1;
    row->first_bytes = places_[3] - row->first;
    row->second = places_[3] + 1;
    row->second_bytes = end - row->second;
    return "";
  }

  std::string path_;
  PairFileOptions options_;
  int fd_ = -1;
  FileVersion version_;
  std::vector<Row> rows_;
  uint64_t hash_ = 0;
  int64_t skipped_ = 0;
  // Of the line that is being read.
  int64_t begin_ = 0, line_ = 0;
  size_t tabs_ = 0;
  std::array<int64_t, kColumns - 1> places_{};
  std::string label_;
  bool returned_ = false;
};

class Halves : public TextPairs {
 public:
  Halves(std::shared_ptr<const Documents> documents, std::vector<int64_t> chosen, uint64_t seed)
      : documents_(std::move(documents)), order_(std::move(chosen)) {
    CISTERN_CHECK(order_.size() >= 2,
                  "at least two documents are needed to pair their halves, got ", order_.size());
    constexpr uint64_t kPairStream = 0x9a125;
    Random random(seed, kPairStream);
    for (int64_t i = int64_t(order_.size()) - 1; i > 0; --i)
      std::swap(order_[size_t(i)], order_[size_t(random.Below(i + 1))]);
  }
  int64_t size() const override { return 2 * int64_t(order_.size()); }
  int Label(int64_t pair) const override { return pair % 2 == 0 ? 1 : 0; }
  int64_t Line(int64_t pair) const override { return pair + 1; }
  int64_t skipped() const override { return 0; }
  void Read(int64_t pair, int64_t limit, std::string* first, std::string* second) const override {
    const size_t k = size_t(pair / 2), other = pair % 2 == 0 ? k : (k + 1) % order_.size();
    *first = documents_->Half(order_[k], 0).substr(0, size_t(limit));
    *second = documents_->Half(order_[other], 1).substr(0, size_t(limit));
  }
  uint64_t Hash() const override {
    uint64_t hash = 0;
    for (const int64_t d : order_)
      hash = XxHash64(documents_->Half(d, 0), XxHash64(documents_->Half(d, 1), hash));
    return hash;
  }

 private:
  std::shared_ptr<const Documents> documents_;
  std::vector<int64_t> order_;
};

// Adds a document's halves unless it is too short or was there before.
class DocumentBuilder {
 public:
  DocumentBuilder(const DocumentOptions& options, Documents* out) : options_(options), out_(out) {}
  void Add(std::string_view text) {
    if (int64_t(text.size()) < options_.least_bytes) {
      ++out_->too_short;
      return;
    }
    if (!seen_.insert(XxHash64(text)).second) {
      ++out_->repeated;
      return;
    }
    const size_t middle = text.size() / 2, limit = size_t(options_.limit);
    out_->bytes += text.substr(0, std::min(middle, limit));
    out_->offsets.push_back(int64_t(out_->bytes.size()));
    out_->bytes += text.substr(middle, limit);
    out_->offsets.push_back(int64_t(out_->bytes.size()));
  }

 private:
  const DocumentOptions& options_;
  Documents* out_;
  std::unordered_set<uint64_t> seen_;
};

void ReadFolder(const std::string& path, DocumentBuilder* builder,
                std::vector<std::string>* notes) {
  FolderFiles found;
  FindFiles(path, Folders::kSearch, &found);
  found.Note(notes);
  CheckNoTwins(found.paths);
  for (const std::string& file : found.paths) builder->Add(ReadText(file));
}

std::string TextColumn(const TableReader& table, const std::string& asked) {
  if (!asked.empty()) return asked;
  const std::vector<std::string> all = table.NamedColumns();
  if (std::find(all.begin(), all.end(), "text") != all.end()) return "text";
  if (all.size() == 1) return all[0];
  std::string names;
  for (const std::string& name : all) names += (names.empty() ? "" : ", ") + name;
  FailUsage(table.path(), ": which column is the document? Its columns are ", names,
            "; name it: --set task.text_column=", all[0]);
}

}  // namespace

std::unique_ptr<TextPairs> OpenPairFile(const std::string& path, const PairFileOptions& options) {
  return std::make_unique<PairFile>(path, options);
}

std::string AanFile(const std::string& folder, const std::string& part) {
  return folder + "/new_aan_pairs." + part + ".tsv";
}

bool IsAanFolder(const std::string& path) {
  std::error_code ignored;
  return fs::exists(AanFile(path, "train"), ignored);
}

Documents ReadDocuments(const std::string& path, const DocumentOptions& options) {
  Documents out;
  DocumentBuilder builder(options, &out);
  std::error_code error;
  if (fs::is_directory(path, error)) {
    ReadFolder(path, &builder, &out.notes);
  } else {
    TableOptions table_options;
    table_options.header = options.header;
    table_options.skip_bad = options.skip_bad;
    TableReader table(path, table_options);
    const size_t column = table.Column(TextColumn(table, options.column));
    table.Require(column);
    for (std::vector<std::string> cells; table.Next(&cells);) builder.Add(cells[column]);
    out.skipped = table.skipped();
  }
  CISTERN_CHECK(out.size() > 0, path, ": no documents of at least ", options.least_bytes,
                " bytes in it (", out.too_short, " shorter ones)", AsReasons(out.notes));
  return out;
}

std::unique_ptr<TextPairs> HalvesOf(std::shared_ptr<const Documents> documents,
                                    std::vector<int64_t> chosen, uint64_t seed) {
  return std::make_unique<Halves>(std::move(documents), std::move(chosen), seed);
}

}  // namespace cistern
