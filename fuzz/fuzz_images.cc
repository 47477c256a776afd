// CIFAR-10's batches and IDX files. The first byte of the input chooses: 0 to 127 a batch, of which
// the colour follows from the number; else IDX images, the labels of which are taken from the end.
#include <algorithm>

#include "cistern/data/images.h"
#include "fuzz/fuzz_input.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  return cistern::FuzzOne(data, size, [](std::string_view bytes) {
    if (bytes.empty()) return;
    static cistern::FuzzFile first, second;
    const auto kind = uint8_t(bytes[0]);
    bytes.remove_prefix(1);
    cistern::ImageSet set;
    if (kind < 128) {
      cistern::ByteSource source(first.Holding(bytes));
      cistern::ReadCifar(source, cistern::ImageColours()[kind % 3].first, &set);
    } else {
      const size_t labels = std::min<size_t>(bytes.size(), kind - 128);
      cistern::ByteSource a(first.Holding(bytes.substr(0, bytes.size() - labels))),
          b(second.Holding(bytes.substr(bytes.size() - labels)));
      cistern::ReadIdx(a, &b, &set);
    }
    if (set.size() < 1 || int64_t(set.pixels.size()) != set.size() * set.image_bytes())
      __builtin_trap();
  });
}
