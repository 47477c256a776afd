#include "cistern/io/series_store.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <unordered_map>

#include "cistern/base/error.h"
#include "cistern/base/hash.h"
#include "cistern/base/progress.h"
#include "cistern/io/read_at.h"

namespace cistern {
namespace {

constexpr size_t kFlushAt = 1 << 18;  // numbers

}  // namespace

NumberStore::~NumberStore() {
  if (fd_ >= 0) close(fd_);
}

void NumberStore::Append(const double* values, int64_t count) {
  held_.insert(held_.end(), values, values + count);
  if (fd_ < 0 && int64_t(held_.size()) > in_memory_) {
    std::string name = folder_ + "/series-" + std::string(6, 'X');  // mkostemp's template
    fd_ = mkostemp(name.data(), O_CLOEXEC);
    CISTERN_CHECK(fd_ >= 0, "cannot write in ", folder_, ": ", std::strerror(errno));
    unlink(name.c_str());
  }
  if (fd_ >= 0 && held_.size() >= kFlushAt) Flush();
}

void NumberStore::Flush() {
  const auto* from = reinterpret_cast<const char*>(held_.data());
  for (size_t done = 0, bytes = held_.size() * sizeof(double); done < bytes;) {
    const ssize_t n =
        pwrite(fd_, from + done, bytes - done, written_ * int64_t(sizeof(double)) + int64_t(done));
    if (n < 0 && errno == EINTR) continue;
    CISTERN_CHECK(n > 0, "cannot keep the values of the series in ", folder_, ": ",
                  std::strerror(errno), "; another folder: --set task.cache=FOLDER");
    done += size_t(n);
  }
  written_ += int64_t(held_.size());
  held_.clear();
  held_.shrink_to_fit();
}

void NumberStore::Read(int64_t begin, int64_t count, double* out) const {
  CISTERN_CHECK(begin >= 0 && count >= 0 && begin <= size() && count <= size() - begin,
                "[series] values ", begin, " to ", begin + count, " of ", size());
  const int64_t first = std::min(count, std::max<int64_t>(0, written_ - begin));
  ReadAt(fd_, begin * int64_t(sizeof(double)), size_t(first) * sizeof(double), out,
         "the kept values of the series");
  std::copy_n(held_.data() + (begin + first - written_), count - first, out + first);
}

SeriesStore::SeriesStore(const std::string& path, const SeriesFormat& format,
                         const std::string& folder, int64_t in_memory)
    : path_(path), values_(folder, in_memory) {
  const std::unique_ptr<SeriesSource> source = OpenSeries(path, format);
  if (IsNpyFile(path)) npy_ = std::make_unique<NpyFile>(path);
  ProgressBar bar({source->total(), "read series", "bytes"});
  XxHash64Stream hash, exact;
  const auto add = [&](const void* bytes, size_t size) {
    hash.Add({static_cast<const char*>(bytes), size});
  };
  const bool numbers = format.labels == SeriesFormat::Labels::kNumbers,
             labelled = format.labels != SeriesFormat::Labels::kNone && format.need_labels;
  std::unordered_map<std::string, int32_t> codes;
  SeriesPiece piece;
  std::vector<float> narrow;
  while (source->Next(&piece)) {
    if (piece.first) {
      lines_.push_back(piece.line);
      begins_.push_back(begins_.back());
      if (labelled && numbers) {
        double value = 0;
        CISTERN_CHECK(ParseFinite(piece.label, &value), path, ": the label '", piece.label,
                      "' of the series at ", piece.line, " is not a finite number");
        numbers_.push_back(value);
      } else if (labelled) {
        const auto [at, fresh] = codes.try_emplace(piece.label, int32_t(labels_.size()));
        if (fresh) labels_.push_back(piece.label);
        codes_.push_back(at->second);
      }
      if (!piece.name.empty()) names_.push_back(piece.name);
      add(piece.label.data(), piece.label.size() + 1);
    }
    begins_.back() += piece.steps;
    narrow.assign(piece.values.begin(), piece.values.end());
    add(narrow.data(), narrow.size() * sizeof(float));
    exact.Add(
        {reinterpret_cast<const char*>(piece.values.data()), piece.values.size() * sizeof(double)});
    add(&begins_.back(), sizeof(int64_t));
    if (!npy_) values_.Append(piece.values.data(), int64_t(piece.values.size()));
    bar.Update(source->done());
  }
  channels_ = source->channels();
  classes_ = source->classes();
  notes_ = source->notes();
  label_column_ = source->label_column();
  value_columns_ = source->value_columns();
  unnamed_columns_ = source->unnamed_columns();
  skipped_ = source->skipped();
  missing_ = source->missing();
  hash_ = hash.Value(), exact_hash_ = exact.Value();
  CISTERN_CHECK(size() > 0, path, ": there is no series",
                skipped_ > 0 ? StrCat(" that can be read (", skipped_, " skipped)") : "");
  CISTERN_CHECK(names_.empty() || int64_t(names_.size()) == size(), path,
                ": some series have a name and some have none");
}

int64_t SeriesStore::Longest() const {
  int64_t longest = 0;
  for (int64_t i = 0; i < size(); ++i) longest = std::max(longest, Steps(i));
  return longest;
}

void SeriesStore::Read(int64_t i, int64_t begin, int64_t count, double* out) const {
  CISTERN_CHECK(begin >= 0 && count >= 0 && begin <= Steps(i) && count <= Steps(i) - begin,
                "[series] steps ", begin, " to ", begin + count, " of ", Steps(i));
  if (npy_) {  // rows of one length; those that were skipped are not among begins_
    const int64_t row = lines_[size_t(i)] - 1;
    npy_->Read((row * Steps(i) + begin) * channels(), count * channels(), out);
    return;
  }
  values_.Read((begins_[size_t(i)] + begin) * channels(), count * channels(), out);
}

}  // namespace cistern
