#include "cistern/io/byte_source.h"

#include <lzma.h>
#include <zlib.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <new>
#include <unordered_map>
#include <vector>

#include "cistern/base/error.h"

namespace cistern {
namespace {

constexpr size_t kPiece = 1 << 16;

}  // namespace

std::string WithoutCompression(const std::string& path) {
  return path.ends_with(".gz") || path.ends_with(".xz") ? path.substr(0, path.size() - 3) : path;
}

void CheckNoTwins(const std::vector<std::string>& paths) {
  std::unordered_map<std::string, std::string> seen;  // by the name without compression
  for (const std::string& path : paths) {
    const auto [at, fresh] = seen.try_emplace(WithoutCompression(path), path);
    CISTERN_CHECK(fresh, at->second, " and ", path,
                  " would both be read: they are the same data, twice; remove one of them");
  }
}

class ByteSource::Stream {
 public:
  explicit Stream(const std::string& path) : path_(path), in_(kPiece) {
    std::error_code error;
    CISTERN_CHECK(!std::filesystem::is_directory(path, error), path, " is a folder, not a file");
    file_ = std::fopen(path.c_str(), "rb");
    CISTERN_CHECK(file_, "cannot read ", path, ": ", std::strerror(errno));
    ReadMore();
    if (size_ >= 2 && std::memcmp(in_.data(), "\x1f\x8b", 2) == 0) {
      kind_ = Kind::kGzip;
      constexpr int kGzipWindow = 15 + 16;
      if (inflateInit2(&gzip_, kGzipWindow) != Z_OK) throw std::bad_alloc();
    } else if (size_ >= 6 && std::memcmp(in_.data(),
                                         "\xfd"
                                         "7zXZ\0",
                                         6) == 0) {
      kind_ = Kind::kXz;
      if (lzma_stream_decoder(&xz_, UINT64_MAX, LZMA_CONCATENATED) != LZMA_OK)
        throw std::bad_alloc();
    }
  }
  ~Stream() {
    if (kind_ == Kind::kGzip) inflateEnd(&gzip_);
    if (kind_ == Kind::kXz) lzma_end(&xz_);
    if (file_) std::fclose(file_);
  }
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;

  int64_t read() const { return read_; }

  // Appends some bytes to `out`; false at the end.
  bool Append(std::string* out) {
    switch (kind_) {
      case Kind::kPlain:
        return AppendPlain(out);
      case Kind::kGzip:
        return AppendGzip(out);
      case Kind::kXz:
        return AppendXz(out);
    }
    return false;
  }

 private:
  enum class Kind { kPlain, kGzip, kXz };

  void ReadMore() {
    size_ = std::fread(in_.data(), 1, in_.size(), file_);
    CISTERN_CHECK(!std::ferror(file_), "cannot read ", path_, ": ", std::strerror(errno));
    read_ += int64_t(size_);
    at_ = 0;
  }

  bool AppendPlain(std::string* out) {
    if (at_ == size_) ReadMore();
    if (size_ == 0) return false;
    out->append(in_.data() + at_, size_ - at_);
    at_ = size_;
    return true;
  }

  bool AppendGzip(std::string* out) {
    std::vector<char> piece(kPiece);
    for (;;) {
      if (at_ == size_) ReadMore();
      if (size_ == 0) {
        CISTERN_CHECK(between_, path_, ": the gzip data ends early");
        return false;
      }
      gzip_.next_in = reinterpret_cast<Bytef*>(in_.data() + at_);
      gzip_.avail_in = uInt(size_ - at_);
      gzip_.next_out = reinterpret_cast<Bytef*>(piece.data());
      gzip_.avail_out = uInt(piece.size());
      between_ = false;
      const int status = inflate(&gzip_, Z_NO_FLUSH);
      at_ = size_ - gzip_.avail_in;
      CISTERN_CHECK(status == Z_OK || status == Z_STREAM_END || status == Z_BUF_ERROR, path_,
                    ": broken gzip data", gzip_.msg ? StrCat(" (", gzip_.msg, ")") : "");
      if (status == Z_STREAM_END) {  // another member may follow
        inflateReset(&gzip_);
        between_ = true;
      }
      const size_t made = piece.size() - gzip_.avail_out;
      if (made > 0) {
        out->append(piece.data(), made);
        return true;
      }
    }
  }

  bool AppendXz(std::string* out) {
    std::vector<char> piece(kPiece);
    while (!xz_ended_) {
      if (at_ == size_) ReadMore();
      xz_.next_in = reinterpret_cast<const uint8_t*>(in_.data() + at_);
      xz_.avail_in = size_ - at_;
      xz_.next_out = reinterpret_cast<uint8_t*>(piece.data());
      xz_.avail_out = piece.size();
      const lzma_ret status = lzma_code(&xz_, size_ == 0 ? LZMA_FINISH : LZMA_RUN);
      at_ = size_ - xz_.avail_in;
      CISTERN_CHECK(status != LZMA_BUF_ERROR, path_, ": the xz data ends early");
      CISTERN_CHECK(status == LZMA_OK || status == LZMA_STREAM_END, path_,
                    ": broken xz data (liblzma's code ", int(status), ")");
      xz_ended_ = status == LZMA_STREAM_END;
      const size_t made = piece.size() - xz_.avail_out;
      if (made > 0) {
        out->append(piece.data(), made);
        return true;
      }
    }
    return false;
  }

  std::string path_;
  std::FILE* file_ = nullptr;
  Kind kind_ = Kind::kPlain;
  std::vector<char> in_;
  size_t at_ = 0, size_ = 0;
  int64_t read_ = 0;
  z_stream gzip_{};
  bool between_ = false;  // members of a gzip file
  lzma_stream xz_ = LZMA_STREAM_INIT;
  bool xz_ended_ = false;
};

ByteSource::ByteSource(const std::string& path)
    : path_(path), stream_(std::make_unique<Stream>(path)) {
  std::error_code error;
  const auto size = std::filesystem::file_size(path, error);
  bytes_total_ = error ? 0 : int64_t(size);
}
ByteSource::~ByteSource() = default;

int64_t ByteSource::bytes_read() const { return stream_->read(); }

bool ByteSource::Append(std::string* out) {
  if (at_ < ahead_.size()) {
    out->append(ahead_, at_, std::string::npos);
    at_ = ahead_.size();
    return true;
  }
  return stream_->Append(out);
}

size_t ByteSource::Read(void* out, size_t bytes) {
  size_t done = 0;
  while (done < bytes) {
    if (at_ == ahead_.size()) {
      ahead_.clear();
      at_ = 0;
      if (!stream_->Append(&ahead_)) break;
    }
    const size_t n = std::min(bytes - done, ahead_.size() - at_);
    std::memcpy(static_cast<char*>(out) + done, ahead_.data() + at_, n);
    at_ += n;
    done += n;
  }
  return done;
}

std::string_view WithoutMark(std::string_view text) {
  constexpr std::string_view kMark = "\xef\xbb\xbf";
  return text.starts_with(kMark) ? text.substr(kMark.size()) : text;
}

std::string ReadText(const std::string& path) {
  std::string text;
  for (ByteSource source(path); source.Append(&text);) {
  }
  text.erase(0, text.size() - WithoutMark(text).size());
  return text;
}

}  // namespace cistern
