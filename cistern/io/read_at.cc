#include "cistern/io/read_at.h"

#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "cistern/base/error.h"

namespace cistern {

void ReadAt(int fd, int64_t at, size_t bytes, void* out, const std::string& where) {
  for (size_t done = 0; done < bytes;) {
    const ssize_t n =
        ::pread(fd, static_cast<char*>(out) + done, bytes - done, off_t(at) + off_t(done));
    if (n < 0 && errno == EINTR) continue;
    CISTERN_CHECK(n >= 0, "cannot read ", where, ": ", std::strerror(errno));
    CISTERN_CHECK(n > 0, where, ": the file ends at byte ", at + int64_t(done), "; expected ",
                  bytes - done, " more");
    done += size_t(n);
  }
}

FileVersion VersionOf(int fd, const std::string& path) {
  struct stat about {};
  CISTERN_CHECK(::fstat(fd, &about) == 0, "cannot read ", path, ": ", std::strerror(errno));
  return {int64_t(about.st_size), int64_t(about.st_mtim.tv_sec), int64_t(about.st_mtim.tv_nsec)};
}

void CheckVersion(int fd, const FileVersion& version, const std::string& path) {
  CISTERN_CHECK(VersionOf(fd, path) == version, path,
                " changed after it was opened; start again when it is complete");
}

}  // namespace cistern
