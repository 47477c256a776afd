#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdlib>

#include "cistern/text/tokenizer.h"
#include "fuzz/fuzz_input.h"

// LoadTokenizer takes a path: the input goes through a file in memory.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const int fd = memfd_create("tokenizer.json", 0);
  static const std::string path = "/proc/self/fd/" + std::to_string(fd);
  if (ftruncate(fd, 0) != 0 || pwrite(fd, data, size, 0) != ssize_t(size)) std::abort();
  return cistern::FuzzOne(data, size, [](std::string_view) {
    const auto tokenizer = cistern::LoadTokenizer(path);
    const std::string text = "Hello, w\xc3\xb6rld 123\n\n  \xff\x00 x";
    if (tokenizer->Decode(tokenizer->Encode(text)) != text) __builtin_trap();
  });
}
