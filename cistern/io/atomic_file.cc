#include "cistern/io/atomic_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>

#include "cistern/base/error.h"
#include "cistern/base/hash.h"
#include "cistern/io/file_lock.h"

namespace cistern {
namespace {

constexpr size_t kBufferBytes = size_t{1} << 18;

// Writes all of it; false with errno set when the system refuses.
bool WriteAll(int fd, const char* data, size_t bytes) {
  while (bytes > 0) {
    const ssize_t n = ::write(fd, data, std::min(bytes, size_t{1} << 30));
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return false;
    data += n;
    bytes -= size_t(n);
  }
  return true;
}

bool SyncFails(int fd) {
  return ::fsync(fd) != 0 && errno != EINVAL && errno != ENOTSUP && errno != EROFS;
}

std::string ResolveLinks(const std::string& path) {
  struct stat info;
  if (::lstat(path.c_str(), &info) != 0 || !S_ISLNK(info.st_mode)) return path;
  char* real = ::realpath(path.c_str(), nullptr);
  if (real == nullptr) return path;  // dangling: the link itself is replaced
  std::string result = real;
  std::free(real);
  return result;
}

}  // namespace

AtomicFile::AtomicFile(const std::string& path) : path_(path), target_(ResolveLinks(path)) {
  struct stat info;
  const bool exists = ::stat(target_.c_str(), &info) == 0;
  if (exists && S_ISDIR(info.st_mode)) {
    errno = EISDIR;
    FailWrite();
  }
  if (exists && !S_ISREG(info.st_mode)) {
    fd_ = ::open(target_.c_str(), O_WRONLY | O_CLOEXEC);
  } else {
    temporary_ = TemporaryName(target_);
    fd_ = ::open(temporary_.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
    if (fd_ < 0) temporary_.clear();
    if (fd_ >= 0 && exists) (void)!::fchmod(fd_, info.st_mode & 07777);
  }
  if (fd_ < 0) FailWrite();
}

AtomicFile::~AtomicFile() {
  if (fd_ >= 0) ::close(fd_);
  if (!temporary_.empty()) ::unlink(temporary_.c_str());
}

// The object may still be under construction, where the destructor does not run, so the temporary
// file goes here.
void AtomicFile::FailWrite() {
  const int error = errno;
  if (fd_ >= 0) ::close(fd_);
  fd_ = -1;
  if (!temporary_.empty()) ::unlink(temporary_.c_str());
  temporary_.clear();
  Fail("cannot write ", path_, ": ", std::strerror(error));
}

void AtomicFile::Write(const void* data, size_t bytes) {
  CISTERN_CHECK(fd_ >= 0, "cannot write ", path_,
                ": an earlier write failed, or it is committed already");
  if (buffer_.size() + bytes > kBufferBytes) Flush();
  if (bytes > kBufferBytes) {
    if (!WriteAll(fd_, static_cast<const char*>(data), bytes)) FailWrite();
  } else {
    buffer_.append(static_cast<const char*>(data), bytes);
  }
}

void AtomicFile::Overwrite(size_t offset, const void* data, size_t bytes) {
  CISTERN_CHECK(fd_ >= 0 && !temporary_.empty(), "cannot write ", path_,
                ": an earlier write failed, or it is not a regular file");
  Flush();
  const char* from = static_cast<const char*>(data);
  while (bytes > 0) {
    const ssize_t n = ::pwrite(fd_, from, bytes, off_t(offset));
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) FailWrite();
    from += n;
    offset += size_t(n);
    bytes -= size_t(n);
  }
}

void AtomicFile::Flush() {
  if (!WriteAll(fd_, buffer_.data(), buffer_.size())) FailWrite();
  buffer_.clear();
}

void AtomicFile::Commit() {
  CISTERN_CHECK(fd_ >= 0, "cannot write ", path_,
                ": an earlier write failed, or it is committed already");
  Flush();
  if (SyncFails(fd_)) FailWrite();
  const int closed = ::close(fd_);
  fd_ = -1;
  if (closed != 0) FailWrite();
  if (temporary_.empty()) return;
  if (::rename(temporary_.c_str(), target_.c_str()) != 0) FailWrite();
  temporary_.clear();
  SyncDirectory(std::filesystem::path(target_).parent_path().string());
}

void SyncDirectory(const std::string& path) {
  const int directory =
      ::open(path.empty() ? "." : path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (directory < 0) return;
  (void)!::fsync(directory);
  ::close(directory);
}

void WriteFileAtomically(const std::string& path, std::string_view bytes) {
  AtomicFile file(path);
  file.Write(bytes);
  file.Commit();
}

std::string ReadFile(const std::string& path) {
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) Fail("cannot read ", path, ": ", std::strerror(errno));
  std::string bytes;
  struct stat info;
  constexpr size_t kMostOfDevice = size_t{1} << 30;  // /dev/zero has no end
  size_t size = 0, room = 1 << 16;
  const bool regular = ::fstat(fd, &info) == 0 && S_ISREG(info.st_mode);
  if (regular) room = size_t(info.st_size) + 1;  // + 1: the end shows in the same read
  for (;;) {
    if (bytes.size() < size + room) bytes.resize(size + room);
    const ssize_t n = ::read(fd, bytes.data() + size, bytes.size() - size);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) {
      const int error = errno;
      ::close(fd);
      Fail("cannot read ", path, ": ", std::strerror(error));
    }
    if (n == 0) break;
    size += size_t(n);
    if (!regular && size > kMostOfDevice) {
      ::close(fd);
      Fail(path, ": more than 1 GiB, of what is no regular file; put it into one");
    }
    room = std::max<size_t>(1, std::min<size_t>(size, 1 << 26));
    if (size < bytes.size()) room = bytes.size() - size;
  }
  ::close(fd);
  bytes.resize(size);
  return bytes;
}

uint64_t HashFile(const std::string& path) {
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) Fail("cannot read ", path, ": ", std::strerror(errno));
  XxHash64Stream hash;
  std::string piece(size_t{1} << 20, '\0');
  for (;;) {
    const ssize_t n = ::read(fd, piece.data(), piece.size());
    if (n < 0 && errno == EINTR) continue;
    if (n > 0) {
      hash.Add(std::string_view(piece).substr(0, size_t(n)));
      continue;
    }
    const int error = errno;
    ::close(fd);
    if (n < 0) Fail("cannot read ", path, ": ", std::strerror(error));
    return hash.Value();
  }
}

void EnsureDirectory(const std::string& path) {
  std::error_code error;
  std::filesystem::create_directories(path, error);
  if (!error && !std::filesystem::is_directory(path))
    error = std::make_error_code(std::errc::not_a_directory);
  if (error) Fail("cannot create directory ", path, ": ", error.message());
}

}  // namespace cistern
