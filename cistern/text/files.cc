#include "cistern/text/files.h"

#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <memory>

#include "cistern/base/error.h"

namespace cistern {
namespace {

struct CloseFile {
  void operator()(std::FILE* file) const { std::fclose(file); }
};
using FilePtr = std::unique_ptr<std::FILE, CloseFile>;

}  // namespace

std::string ReadWholeFile(const std::string& path) {
  std::error_code ignored;
  CISTERN_CHECK(!std::filesystem::is_directory(path, ignored), path,
                " is a folder; a file is expected");
  FilePtr file(std::fopen(path.c_str(), "rb"));
  CISTERN_CHECK(file, "cannot open ", path, ": ", std::strerror(errno));
  std::string contents;
  char buffer[1 << 16];
  while (const size_t n = std::fread(buffer, 1, sizeof buffer, file.get()))
    contents.append(buffer, n);
  CISTERN_CHECK(!std::ferror(file.get()), "cannot read ", path, ": ", std::strerror(errno));
  return contents;
}

void WriteFileAtomic(const std::string& path, std::string_view contents) {
  const std::string temporary = StrCat(path, ".tmp", getpid());
  FilePtr file(std::fopen(temporary.c_str(), "wb"));
  CISTERN_CHECK(file, "cannot write ", path, ": ", std::strerror(errno));
  bool ok = std::fwrite(contents.data(), 1, contents.size(), file.get()) == contents.size();
  ok = std::fclose(file.release()) == 0 && ok;
  if (!ok || std::rename(temporary.c_str(), path.c_str()) != 0) {
    const std::string why = std::strerror(errno);
    std::remove(temporary.c_str());
    Fail("cannot write ", path, ": ", why);
  }
}

uint64_t Hash64(std::string_view bytes, uint64_t seed) {
  for (const char c : bytes) seed = (seed ^ uint8_t(c)) * 0x100000001b3u;
  return seed;
}

}  // namespace cistern
