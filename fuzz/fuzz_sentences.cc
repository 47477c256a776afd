// Pairs of a source and a target: from a table, and the lines of two texts, which are the input cut
// in half. The first byte chooses the form and what happens to bad rows.
#include "cistern/tasks/sentence_pairs.h"
#include "fuzz/fuzz_input.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace cistern;
  static FuzzFile files[] = {FuzzFile(".tsv"), FuzzFile(".csv"), FuzzFile(".jsonl"),
                             FuzzFile(".txt")};
  static FuzzFile targets(".target.txt");
  if (size == 0) return 0;
  const uint8_t how = data[0];
  const std::string_view text(reinterpret_cast<const char*>(data) + 1, size - 1);
  const bool lines = how % 4 == 3;
  const size_t half = lines ? text.size() / 2 : text.size();
  PairFiles of;
  of.source = files[how % 4].Holding(text.substr(0, half));
  if (lines) of.target = targets.Holding(text.substr(half));
  TableOptions options;
  options.skip_bad = how / 4 % 2 == 1;
  return FuzzOne(data, size, [&](std::string_view) {
    const auto pairs = OpenPairs(of, options, true);
    int64_t line = 0;
    for (SentencePair pair; pairs->Next(&pair);) {
      if (pair.line <= line) __builtin_trap();
      line = pair.line;
    }
    if (pairs->skipped() > 0 && !options.skip_bad) __builtin_trap();
  });
}
