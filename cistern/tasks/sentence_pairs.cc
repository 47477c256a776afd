#include "cistern/tasks/sentence_pairs.h"

#include <algorithm>
#include <optional>
#include <vector>

#include "cistern/base/error.h"

namespace cistern {
namespace {

bool IsTable(const std::string& path) {
  TableReader::Format format;
  return TableReader::FormatOf(path, &format);
}

class TablePairs : public PairSource {
 public:
  TablePairs(const PairFiles& files, const TableOptions& options, bool targets)
      : table_(files.source, options) {
    source_ = Find(files.source_column, 0, options);
    table_.Require(source_);
    if (!targets) return;
    target_ = Find(files.target_column, 1, options);
    table_.Require(*target_);
  }
  bool Next(SentencePair* pair) override {
    if (!table_.Next(&cells_)) return false;
    pair->source = cells_[source_];
    pair->target = target_ ? cells_[*target_] : "";
    pair->line = table_.line();
    return true;
  }
  int64_t skipped() const override { return table_.skipped(); }
  int64_t done() const override { return table_.lines().bytes_read(); }
  int64_t total() const override { return table_.lines().bytes_total(); }

 private:
  size_t Find(const std::string& name, size_t place, const TableOptions& options) const {
    const std::vector<std::string>&columns = table_.columns(), named = table_.NamedColumns();
    std::string all;
    for (const std::string& column : named) all += (all.empty() ? "" : ", ") + column;
    const char* which = place == 0 ? "source" : "target";
    if (name.empty()) {
      if (named.size() > place) return table_.Column(named[place]);
      FailUsage(table_.path(), ": no column for the ", which, ": its columns are ", all,
                "; a table of pairs has a source and a target in each row");
    }
    const auto found = std::find(columns.begin(), columns.end(), name);
    if (found != columns.end()) return size_t(found - columns.begin());
    FailUsage(table_.path(), ": no column '", name, "' for the ", which, ": its columns are ", all,
              options.header == TableOptions::Header::kNo
                  ? "; if its first line names them: --set task.header=yes"
                  : "");
  }

  TableReader table_;
  std::vector<std::string> cells_;
  size_t source_ = 0;
  std::optional<size_t> target_;
};

class LinePairs : public PairSource {
 public:
  explicit LinePairs(const PairFiles& files, bool targets) : sources_(files.source) {
    if (targets) targets_.emplace(files.target);
  }
  bool Next(SentencePair* pair) override {
    const bool more = sources_.Next(&pair->source);
    pair->target.clear();
    pair->line = sources_.number();
    if (targets_ && targets_->Next(&pair->target) != more) {
      const LineReader &shorter = more ? *targets_ : sources_,
                       &longer = more ? sources_ : *targets_;
      Fail(shorter.path(), " ends after line ", shorter.number(), " and ", longer.path(),
           " does not: their lines have to correspond");
    }
    return more;
  }
  int64_t done() const override { return sources_.bytes_read(); }
  int64_t total() const override { return sources_.bytes_total(); }

 private:
  LineReader sources_;
  std::optional<LineReader> targets_;
};

}  // namespace

std::unique_ptr<PairSource> OpenPairs(const PairFiles& files, const TableOptions& options,
                                      bool targets) {
  if (IsTable(files.source) && files.target.empty())
    return std::make_unique<TablePairs>(files, options, targets);
  if (targets && files.target.empty())
    FailUsage(files.source,
              " is no table (.tsv, .csv, .jsonl) of sources and targets; name the text of the "
              "targets as well, or join the two: paste source target > pairs.tsv");
  return std::make_unique<LinePairs>(files, targets);
}

}  // namespace cistern
