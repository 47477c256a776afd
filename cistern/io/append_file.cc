#include "cistern/io/append_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "cistern/base/error.h"

namespace cistern {

AppendFile::AppendFile(const std::string& path)
    : path_(path), fd_(::open(path.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666)) {
  if (fd_ < 0) Fail("cannot write ", path, ": ", std::strerror(errno));
}

AppendFile::~AppendFile() { ::close(fd_); }

void AppendFile::Append(std::string_view record) {
  struct stat before;
  const bool regular = ::fstat(fd_, &before) == 0 && S_ISREG(before.st_mode);
  for (std::string_view rest = record; !rest.empty();) {
    const ssize_t n = ::write(fd_, rest.data(), rest.size());
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) {
      const int error = errno;
      if (regular && rest.size() < record.size()) (void)!::ftruncate(fd_, before.st_size);
      Fail("cannot write ", path_, ": ", std::strerror(error));
    }
    rest.remove_prefix(size_t(n));
  }
}

void AppendFile::Truncate(int64_t bytes) {
  if (::ftruncate(fd_, bytes) != 0) Fail("cannot write ", path_, ": ", std::strerror(errno));
}

int64_t AppendFile::Bytes() const {
  struct stat info;
  return ::fstat(fd_, &info) == 0 && S_ISREG(info.st_mode) ? int64_t(info.st_size) : 0;
}

void AppendFile::Sync() {
  if (::fsync(fd_) != 0 && errno != EINVAL && errno != ENOTSUP)
    Fail("cannot write ", path_, ": ", std::strerror(errno));
}

}  // namespace cistern
