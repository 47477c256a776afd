// Documents that `retrieval` makes pairs of: halves lie end to end and are no longer than the
// limit, and the pairs of the halves can be read. The first byte chooses the form and the limit.
#include <numeric>

#include "cistern/data/text_pairs.h"
#include "fuzz/fuzz_input.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace cistern;
  static FuzzFile files[] = {FuzzFile(".jsonl"), FuzzFile(".tsv"), FuzzFile(".csv"),
                             FuzzFile(".jsonl.gz")};
  if (size == 0) return 0;
  const uint8_t how = data[0];
  const std::string& path =
      files[how % 4].Holding(std::string_view(reinterpret_cast<const char*>(data) + 1, size - 1));
  const int64_t limit = how / 8 % 2 == 1 ? 5 : 4000, least = how / 16 % 2 == 1 ? 1 : 64;
  return FuzzOne(data, size, [&](std::string_view) {
    const auto documents = std::make_shared<const Documents>(
        ReadDocuments(path, {.limit = limit, .least_bytes = least, .skip_bad = how / 4 % 2 == 1}));
    if (documents->size() == 0 || documents->offsets.back() != int64_t(documents->bytes.size()))
      __builtin_trap();
    for (int64_t d = 0; d < documents->size(); ++d) {
      for (const int half : {0, 1}) {
        if (int64_t(documents->Half(d, half).size()) > limit) __builtin_trap();
      }
    }
    if (documents->size() < 2) return;
    std::vector<int64_t> all(size_t(documents->size()));
    std::iota(all.begin(), all.end(), int64_t{0});
    const auto pairs = HalvesOf(documents, all, 1);
    if (pairs->size() != 2 * documents->size()) __builtin_trap();
    int64_t ones = 0;
    for (int64_t i = 0; i < pairs->size(); ++i) {
      std::string first, second;
      pairs->Read(i, limit, &first, &second);
      ones += pairs->Label(i);
    }
    if (ones != documents->size()) __builtin_trap();
  });
}
