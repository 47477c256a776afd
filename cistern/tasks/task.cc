#include "cistern/tasks/task.h"

#include <cstdlib>

#include "cistern/base/error.h"
#include "cistern/io/atomic_file.h"
#include "cistern/tasks/cache.h"
#include "cistern/tasks/listops_task.h"
#include "cistern/tasks/lm_task.h"

namespace cistern {

std::string CacheFolder(const std::string& asked) {
  std::string folder = asked;
  const char *xdg = std::getenv("XDG_CACHE_HOME"), *home = std::getenv("HOME");
  if (folder.empty())
    folder = xdg && *xdg ? std::string(xdg) + "/cistern"
                         : StrCat(home && *home ? home : "/tmp", "/.cache/cistern");
  EnsureDirectory(folder);
  return folder;
}

Fields TaskOptions::Describe() {
  Fields f;
  f.Add("kind", &kind, "what is learned", {"lm", "listops"});
  f.Add("text", &text, "lm: a text file, or a folder of them");
  f.Add("tokenizer", &tokenizer, "lm: byte-level BPE learned from the text, or bytes",
        {"bpe", "bytes"});
  f.Add("vocab_size", &vocab_size, "lm with bpe: tokens to learn", {256, 1 << 20});
  f.Add("length", &length, "tokens of a training row; listops: longer examples are cut",
        {2, int64_t{1} << 30});
  f.Add("cache", &cache, "folder for tokens and generated data; empty: ~/.cache/cistern");
  f.Add("data", &data, "listops: folder with basic_{train,val,test}.tsv; empty: generated");
  f.Add("group_by_length", &group_by_length,
        "listops: training batches of examples of about one length: less padding, so faster");
  f.Add("data_seed", &data_seed, "listops: seed of the generator", {0, int64_t{1} << 62});
  f.Add("train_examples", &train_examples, "listops: generated training examples", {1, 1 << 28});
  f.Add("valid_examples", &valid_examples, "listops: generated validation examples", {1, 1 << 28});
  f.Add("test_examples", &test_examples, "listops: generated test examples", {1, 1 << 28});
  return f;
}

std::unique_ptr<Task> MakeTask(const TaskOptions& options) {
  if (options.kind == "listops") return std::make_unique<ListOpsTask>(options);
  if (options.text.empty())
    FailUsage("task.text is empty: name a text file or folder to learn from");
  return std::make_unique<LmTask>(options);
}

}  // namespace cistern
