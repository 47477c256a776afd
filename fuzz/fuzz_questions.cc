// Questions on texts: every answer stands where it is said to, in the text of its question. The
// first byte chooses the form and what happens to bad questions.
#include "cistern/tasks/questions.h"
#include "fuzz/fuzz_input.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace cistern;
  static FuzzFile files[] = {FuzzFile(".json"), FuzzFile(".jsonl"), FuzzFile(".tsv"),
                             FuzzFile(".csv")};
  if (size == 0) return 0;
  const uint8_t how = data[0];
  const std::string& path =
      files[how % 4].Holding(std::string_view(reinterpret_cast<const char*>(data) + 1, size - 1));
  TableOptions options;
  options.skip_bad = how / 4 % 2 == 1;
  const bool labelled = how / 8 % 2 == 0;
  return FuzzOne(data, size, [&](std::string_view) {
    IsSquadFile(path);
    const QuestionSet set = ReadQuestions(path, {}, options, labelled);
    if (set.questions.empty() || (set.skipped > 0 && !options.skip_bad)) __builtin_trap();
    for (const Question& q : set.questions) {
      if (q.context >= set.contexts.size() || q.text.empty()) __builtin_trap();
      if (!labelled && !q.answers.empty()) __builtin_trap();
      const std::string& context = set.contexts[q.context];
      for (const Answer& answer : q.answers) {
        if (answer.text.empty() ||
            context.compare(size_t(answer.begin), answer.text.size(), answer.text) != 0)
          __builtin_trap();
      }
    }
  });
}
