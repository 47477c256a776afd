// Pathfinder images on disk: packed in one file, or as PNG and metadata in the published layout.
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstring>
#include <filesystem>
#include <utility>
#include <vector>

#include "cistern/base/error.h"
#include "cistern/base/hash.h"
#include "cistern/base/parallel.h"
#include "cistern/data/interruptible.h"
#include "cistern/data/made_folder.h"
#include "cistern/data/pathfinder.h"
#include "cistern/io/atomic_file.h"
#include "cistern/io/file_lock.h"
#include "cistern/io/line_reader.h"
#include "cistern/io/png.h"
#include "cistern/io/read_at.h"

namespace cistern {
namespace fs = std::filesystem;
namespace {

// The beginning of a packed file; little-endian.
struct PathfinderHeader {
  char magic[8];  // "CISTPTH1"
  uint64_t count, side;
  uint64_t checksum;  // ImagesHash of what follows
  uint64_t reserved[3];
  uint64_t header_checksum;  // XXH64 of all above
};
static_assert(sizeof(PathfinderHeader) == 64);
constexpr char kPathfinderMagic[] = "CISTPTH1";
constexpr uint64_t kMostImages = uint64_t{1} << 32, kLargestPathfinder = 4096;
constexpr int64_t kVerifiedPathfinder = int64_t{1} << 30;

std::string_view PathfinderBytes(const void* data, size_t size) {
  return {static_cast<const char*>(data), size};
}

// XXH64 of the labels, seeded with that of the pixels, which are there first.
uint64_t ImagesHash(uint64_t pixels, const std::vector<uint8_t>& labels) {
  return XxHash64(PathfinderBytes(labels.data(), labels.size()), pixels);
}

uint64_t PathfinderChecksum(const PathfinderHeader& h) {
  return XxHash64(PathfinderBytes(&h, offsetof(PathfinderHeader, header_checksum)));
}

class PackedSet : public PathfinderSet {
 public:
  explicit PackedSet(const std::string& path) : path_(path) {
    fd_ = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
    CISTERN_CHECK(fd_ >= 0, "cannot read ", path, ": ", std::strerror(errno));
    try {
      Check();
    } catch (...) {
      ::close(fd_);
      throw;
    }
  }
  ~PackedSet() override { ::close(fd_); }
  PackedSet(const PackedSet&) = delete;
  PackedSet& operator=(const PackedSet&) = delete;

  int64_t size() const override { return int64_t(header_.count); }
  int64_t side() const override { return int64_t(header_.side); }
  int Label(int64_t image) const override { return labels_[size_t(image)]; }
  uint64_t Hash() const override { return header_.checksum; }
  void Read(int64_t image, uint8_t* out) const override {
    const int64_t bytes = side() * side();
    ReadAt(fd_, int64_t(sizeof(PathfinderHeader)) + size() + image * bytes, size_t(bytes), out,
           path_);
  }

 private:
  void Check() {
    ReadAt(fd_, 0, sizeof header_, &header_, path_);
    CISTERN_CHECK(std::memcmp(header_.magic, kPathfinderMagic, sizeof header_.magic) == 0, path_,
                  ": not a packed Pathfinder file, which begins with ", kPathfinderMagic);
    CISTERN_CHECK(header_.header_checksum == PathfinderChecksum(header_), path_,
                  ": the header does not fit its checksum");
    CISTERN_CHECK(header_.count >= 1 && header_.count <= kMostImages && header_.side >= 1 &&
                      header_.side <= kLargestPathfinder,
                  path_, ": ", header_.count, " images of ", header_.side,
                  " pixels on a side; expected 1 to ", kLargestPathfinder);
    std::error_code error;
    const auto found = int64_t(fs::file_size(path_, error)),
               wanted = int64_t(sizeof header_) + size() * (1 + side() * side());
    CISTERN_CHECK(!error && found == wanted, path_, " has ", found, " bytes; its ", size(),
                  " images need ", wanted);
    labels_.resize(header_.count);
    ReadAt(fd_, sizeof header_, size_t(size()), labels_.data(), path_);
    for (int64_t i = 0; i < size(); ++i)
      CISTERN_CHECK(labels_[size_t(i)] <= 1, path_, ": image ", i + 1, " has the label ",
                    int{labels_[size_t(i)]}, "; expected 0 or 1");
    if (wanted > kVerifiedPathfinder) return;
    XxHash64Stream hash;
    std::vector<uint8_t> image(size_t(side() * side()));
    for (int64_t i = 0; i < size(); ++i) {
      Read(i, image.data());
      hash.Add(PathfinderBytes(image.data(), image.size()));
    }
    CISTERN_CHECK(ImagesHash(hash.Value(), labels_) == header_.checksum, path_,
                  " is damaged: its images do not fit their checksum");
  }

  std::string path_;
  int fd_ = -1;
  PathfinderHeader header_{};
  std::vector<uint8_t> labels_;
};

// A folder in the published layout.
class FolderSet : public PathfinderSet {
 public:
  FolderSet(const std::string& folder, const PathfinderProgress& progress) {
    std::vector<Row> rows = Rows(folder);
    std::vector<GreyImage> images(rows.size());
    std::vector<std::string> failed(rows.size());
    constexpr int64_t kPiece = 256;  // between reports
    for (int64_t begin = 0; begin < int64_t(rows.size()); begin += kPiece) {
      const int64_t count = std::min<int64_t>(kPiece, int64_t(rows.size()) - begin);
      ParallelFor(count, 1, [&](int64_t from, int64_t to) {
        for (int64_t i = begin + from; i < begin + to; ++i) {
          try {
            const std::string bytes = ReadFile(rows[size_t(i)].image);
            if (!bytes.empty()) images[size_t(i)] = ReadPng(bytes, rows[size_t(i)].image);
          } catch (const Error& e) {
            failed[size_t(i)] = e.what();
          }
        }
      });
      if (progress) progress(begin + count, int64_t(rows.size()));
    }
    for (size_t i = 0; i < rows.size(); ++i) {
      CISTERN_CHECK(failed[i].empty(), failed[i], " (named in ", rows[i].where, ")");
      if (images[i].pixels.empty()) {
        ++skipped_;
        continue;
      }
      if (side_ == 0) side_ = images[i].height;
      CISTERN_CHECK(images[i].height == side_ && images[i].width == side_, rows[i].image, ": ",
                    images[i].height, " x ", images[i].width, " pixels; expected ", side_, " x ",
                    side_, ", as the first image has");
      labels_.push_back(rows[i].label);
      lines_.push_back(int64_t(i) + 1);
      pixels_.insert(pixels_.end(), images[i].pixels.begin(), images[i].pixels.end());
      images[i] = {};
    }
    CISTERN_CHECK(!labels_.empty(), folder, ": no images that are not empty");
  }

  int64_t size() const override { return int64_t(labels_.size()); }
  int64_t side() const override { return side_; }
  int Label(int64_t image) const override { return labels_[size_t(image)]; }
  int64_t Line(int64_t image) const override { return lines_[size_t(image)]; }
  void Read(int64_t image, uint8_t* out) const override {
    std::copy_n(pixels_.begin() + image * side_ * side_, side_ * side_, out);
  }
  uint64_t Hash() const override {
    return ImagesHash(XxHash64(PathfinderBytes(pixels_.data(), pixels_.size())), labels_);
  }
  int64_t skipped() const override { return skipped_; }

 private:
  struct Row {
    std::string image, where;
    uint8_t label = 0;
  };

  static std::vector<Row> Rows(const std::string& folder) {
    std::vector<fs::path> files;
    std::error_code error;
    for (const auto& entry : fs::directory_iterator(folder + "/metadata", error)) {
      if (entry.path().extension() == ".npy") files.push_back(entry.path());
    }
    CISTERN_CHECK(!error && !files.empty(), folder,
                  ": expected metadata/*.npy, lines of text that name the images under imgs/");
    std::sort(files.begin(), files.end(), [](const fs::path& a, const fs::path& b) {
      const std::string x = a.stem().string(), y = b.stem().string();
      return std::pair(x.size(), x) < std::pair(y.size(), y);  // 2 before 10
    });
    std::vector<Row> rows;
    for (const fs::path& file : files) {
      LineReader lines(file.string());
      for (std::string line; lines.Next(&line);) {
        const std::string where = StrCat(file.string(), ":", lines.number());
        CISTERN_CHECK(!line.starts_with("\x93NUMPY"), file.string(),
                      ": an array of numpy; expected lines of text, as in the published data");
        std::vector<std::string> cells;
        for (size_t begin = 0, end; begin < line.size(); begin = end + 1) {
          end = std::min(line.find(' ', begin), line.size());
          if (end > begin) cells.push_back(line.substr(begin, end - begin));
        }
        if (cells.empty()) continue;
        CISTERN_CHECK(cells.size() >= 4, where, ": ", cells.size(),
                      " columns; expected at least 4: folder, file, number, label");
        CISTERN_CHECK(cells[3] == "0" || cells[3] == "1", where,
                      ": expected the label 0 or 1 in the fourth column, got '",
                      cells[3].substr(0, 40), "'");
        CISTERN_CHECK(StrCat(cells[0], "/", cells[1]).find("..") == std::string::npos, where,
                      ": the image lies outside of the folder");
        rows.push_back(
            {StrCat(folder, "/", cells[0], "/", cells[1]), where, uint8_t(cells[3] == "1")});
      }
    }
    return rows;
  }

  int64_t side_ = 0, skipped_ = 0;
  std::vector<uint8_t> labels_, pixels_;
  std::vector<int64_t> lines_;
};

// Calls take(example, scene's label, image) in order, for images that all threads make.
template <class F>
void EachExample(const PathfinderOptions& options, uint64_t seed, int64_t count,
                 const PathfinderProgress& progress, F take) {
  struct Made {
    PathfinderScene scene;
    std::vector<uint8_t> image;
    std::string failed;
  };
  SettingsOf(options);  // UsageError
  constexpr int64_t kPiece = 256;
  std::vector<Made> made;
  for (int64_t begin = 0; begin < count; begin += kPiece) {
    made.assign(size_t(std::min(kPiece, count - begin)), {});
    ParallelFor(int64_t(made.size()), 1, [&](int64_t from, int64_t to) {
      for (int64_t i = from; i < to; ++i) {
        Made& m = made[size_t(i)];
        if (InterruptibleData::Stopped()) return;
        try {
          m.scene = MakePathfinderScene(options, seed, begin + i);
          m.image = DrawPathfinder(options, m.scene);
        } catch (const Error& e) {
          m.failed = e.what();
        }
      }
    });
    for (size_t i = 0; i < made.size(); ++i) {
      InterruptibleData::Check();
      CISTERN_CHECK(made[i].failed.empty(), made[i].failed);
      take(begin + int64_t(i), made[i].scene.label, made[i].image);
    }
    if (progress) progress(begin + int64_t(made.size()), count);
  }
}

constexpr int64_t kImagesOfAFolder = 1000;

std::string ImagesFolder(int64_t example) { return StrCat("imgs/", example / kImagesOfAFolder); }
std::string ImageName(int64_t example) {
  return StrCat("sample_", example % kImagesOfAFolder, ".png");
}

// A set in the published layout that is being written. Its metadata, without which it is none, lie
// under another name until all images are there; what comes to no end is removed.
class UnfinishedSet {
 public:
  explicit UnfinishedSet(const std::string& folder)
      : folder_(folder), metadata_(folder + "/metadata"), fresh_(TemporaryName(metadata_)) {
    std::error_code ignored;
    if (fs::exists(metadata_, ignored) &&
        !(fs::is_directory(metadata_, ignored) && fs::is_empty(metadata_, ignored)))
      FailUsage(folder, " holds metadata of images already; name another folder");
    RemoveLeftovers(folder, "metadata");
    EnsureDirectory(fresh_);
  }
  ~UnfinishedSet() {
    if (finished_) return;
    std::error_code ignored;
    fs::remove_all(fresh_, ignored);
    for (int64_t i = 0; i < images_; ++i) {
      const std::string images = folder_ + "/" + ImagesFolder(i);
      fs::remove(images + "/" + ImageName(i), ignored);
      if ((i + 1) % kImagesOfAFolder == 0 || i + 1 == images_)
        fs::remove(images, ignored);  // where nothing else is in it
    }
    fs::remove(folder_ + "/imgs", ignored);
  }
  UnfinishedSet(const UnfinishedSet&) = delete;
  UnfinishedSet& operator=(const UnfinishedSet&) = delete;

  // Images come in order; one that a killed run left is replaced.
  void AddImage(const GreyImage& image, const std::string& rest) {
    const std::string sub = ImagesFolder(images_), name = ImageName(images_),
                      images = folder_ + "/" + sub;
    if (images_ % kImagesOfAFolder == 0) {
      EnsureDirectory(images);
      RemoveLeftovers(images);
    }
    ++images_;
    WriteFileAtomically(images + "/" + name, PngBytes(image));
    lines_ += StrCat(sub, " ", name, " ", images_ - 1, " ", rest, "\n");
    if (images_ % kImagesOfAFolder == 0) WriteLines();
  }
  void Finish() {
    if (!lines_.empty()) WriteLines();
    std::error_code error;
    fs::rename(fresh_, metadata_, error);
    CISTERN_CHECK(!error, "cannot make ", metadata_, ": ", error.message());
    finished_ = true;
    SyncDirectory(folder_);
  }

 private:
  void WriteLines() {
    WriteFileAtomically(StrCat(fresh_, "/", (images_ - 1) / kImagesOfAFolder, ".npy"), lines_);
    lines_.clear();
  }

  std::string folder_, metadata_, fresh_, lines_;  // lines_: of the images since the last file
  int64_t images_ = 0;
  bool finished_ = false;
};

}  // namespace

void WritePackedPathfinder(const PathfinderOptions& options, uint64_t seed, int64_t count,
                           const std::string& path, const PathfinderProgress& progress) {
  const fs::path target = path;
  RemoveLeftovers(target.has_parent_path() ? target.parent_path().string() : ".",
                  target.filename().string());
  AtomicFile file(path);  // under a name of this process alone until it is whole
  PathfinderHeader header{};
  std::copy_n(kPathfinderMagic, sizeof header.magic, header.magic);
  header.count = uint64_t(count), header.side = uint64_t(options.size);
  std::vector<uint8_t> labels(size_t(count), 0);  // written over below
  file.Write(&header, sizeof header);
  file.Write(labels.data(), labels.size());
  XxHash64Stream hash;
  EachExample(options, seed, count, progress,
              [&](int64_t example, int label, const std::vector<uint8_t>& image) {
                labels[size_t(example)] = uint8_t(label);
                hash.Add(PathfinderBytes(image.data(), image.size()));
                file.Write(image.data(), image.size());
              });
  header.checksum = ImagesHash(hash.Value(), labels);
  header.header_checksum = PathfinderChecksum(header);
  file.Overwrite(0, &header, sizeof header);
  file.Overwrite(sizeof header, labels.data(), labels.size());
  file.Commit();
}

void WritePathfinderFolder(const PathfinderOptions& options, uint64_t seed, int64_t count,
                           const std::string& folder, const PathfinderProgress& progress) {
  const PathfinderSettings settings = SettingsOf(options);
  const MadeFolder made(folder);
  const FileLock lock(folder + "/lock", "the data set in " + folder);
  UnfinishedSet set(folder);
  EachExample(options, seed, count, progress,
              [&](int64_t, int label, const std::vector<uint8_t>& image) {
                set.AddImage({options.size, options.size, image},
                             StrCat(label, " ", settings.continuity, " ", options.contour, " ",
                                    settings.distractor_dashes, " ", settings.distractors, " ",
                                    settings.dash, " ", settings.dash_contrast));
              });
  lock.Check();
  set.Finish();
}

std::unique_ptr<PathfinderSet> OpenPathfinder(const std::string& path,
                                              const PathfinderProgress& progress) {
  std::error_code ignored;
  if (fs::is_directory(path, ignored)) return std::make_unique<FolderSet>(path, progress);
  return std::make_unique<PackedSet>(path);
}

bool LooksLikePathfinder(const std::string& path) {
  std::error_code ignored;
  if (fs::is_directory(path, ignored))
    return fs::is_directory(path + "/imgs", ignored) &&
           fs::is_directory(path + "/metadata", ignored);
  return path.ends_with(".pathfinder");
}

}  // namespace cistern
