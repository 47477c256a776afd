// Pathfinder's published layout: the metadata name images in the folder, of one size, with labels 0
// and 1. The folder has an image, and the input is its metadata; after a zero byte, another image.
#include <fcntl.h>
#include <sys/stat.h>

#include <vector>

#include "cistern/data/pathfinder.h"
#include "cistern/io/atomic_file.h"
#include "fuzz/fuzz_input.h"

namespace cistern {
namespace {

struct Folder {
  Folder() : path("/tmp/cistern-fuzz-pathfinder-" + std::to_string(getpid())) {
    EnsureDirectory(path + "/metadata");
    PathfinderOptions options;
    WritePathfinderFolder(options, 1, 2, path + "/whole");
    EnsureDirectory(path + "/imgs");
    if (rename((path + "/whole/imgs/0").c_str(), (path + "/imgs/0").c_str()) != 0) std::abort();
    Put("/metadata/1.npy", "");
  }
  ~Folder() {
    const std::string command = "rm -rf '" + path + "'";
    if (system(command.c_str()) != 0) return;
  }
  void Put(const char* name, std::string_view bytes) {
    const int fd = open((path + name).c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0600);
    if (fd < 0 || write(fd, bytes.data(), bytes.size()) != ssize_t(bytes.size())) std::abort();
    close(fd);
  }
  const std::string path;
};

}  // namespace
}  // namespace cistern

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static cistern::Folder folder;
  return cistern::FuzzOne(data, size, [](std::string_view bytes) {
    const size_t zero = std::min(bytes.find('\0'), bytes.size());
    folder.Put("/metadata/1.npy", bytes.substr(0, zero));
    if (zero < bytes.size()) folder.Put("/imgs/other.png", bytes.substr(zero + 1));
    const auto set = cistern::OpenPathfinder(folder.path);
    std::vector<uint8_t> image(size_t(set->side() * set->side()));
    for (int64_t i = 0; i < set->size(); ++i) {
      set->Read(i, image.data());
      if (set->Label(i) != 0 && set->Label(i) != 1) __builtin_trap();
    }
  });
}
