// cistern data: generates and inspects data sets.
#include <cstdio>
#include <filesystem>
#include <optional>

#include "cistern/base/error.h"
#include "cistern/base/interrupt.h"
#include "cistern/base/progress.h"
#include "cistern/base/subprocess.h"
#include "cistern/base/terminal.h"
#include "cistern/cli/command.h"
#include "cistern/data/interruptible.h"
#include "cistern/data/listops.h"
#include "cistern/data/made_folder.h"
#include "cistern/data/pathfinder.h"
#include "cistern/io/atomic_file.h"
#include "cistern/io/json_text.h"
#include "cistern/tasks/task.h"

namespace cistern::cli {
namespace {

struct DataArguments {
  Common common;
  std::string kind, out, text, tokenizer = "bpe";
  std::vector<int64_t> counts = {96000, 2000, 2000};
  std::optional<int64_t> vocab_size;  // that of train --text
  PathfinderOptions pathfinder;
  int64_t images = 200'000;
};

// make(a), ended by the first Ctrl-C or SIGTERM, of which it keeps nothing unfinished.
int UntilInterrupted(const DataArguments& a, int (*make)(const DataArguments& a)) {
  try {
    const InterruptibleData ends;
    return make(a);
  } catch (const Error& e) {
    if (!Interrupted()) throw;
    std::fprintf(stderr, "cistern: %s\n", Printable(e.what()).c_str());
    return 130;
  }
}

int RunListOps(const DataArguments& a) {
  if (a.out.empty()) FailUsage("data listops needs --out FOLDER");
  if (a.counts.size() != 3) FailUsage("--counts takes three numbers: training, validation, test");
  ListOpsOptions options;
  options.counts = {a.counts[0], a.counts[1], a.counts[2]};
  for (const int64_t count : options.counts) {
    if (count < 1 || count > 1 << 28)
      FailUsage("--counts takes numbers from 1 to ", 1 << 28, ", got ", count);
  }
  CheckNoListOps(a.out);  // before the work
  ListOpsSplits splits;
  {
    ProgressBar bar({a.counts[0] + a.counts[1] + a.counts[2], "generate", "examples"});
    splits =
        GenerateListOps(options, a.common.seed, [&](int64_t done, int64_t) { bar.Update(done); });
    WriteListOps(splits, a.out);
  }
  const ListOpsBaselines b = MeasureListOpsBaselines(splits.train, splits.test);
  if (a.common.json) {
    const Json line = {{"out", a.out},
                       {"candidates", splits.candidates},
                       {"majority", 100 * b.majority},
                       {"root_operator", 100 * b.root_operator},
                       {"root_operator_loss", b.root_operator_loss}};
    std::printf("%s\n", JsonLine(line).c_str());
    return 0;
  }
  std::printf("ListOps in %s: %ld / %ld / %ld examples (of %ld candidates)\n", a.out.c_str(),
              long(splits.train.size()), long(splits.valid.size()), long(splits.test.size()),
              long(splits.candidates));
  std::printf(
      "what a model must beat on the test part: most frequent label %.1f %%, guess from the first "
      "operator %.1f %%\n",
      100 * b.majority, 100 * b.root_operator);
  return 0;
}

int RunPathfinder(const DataArguments& a) {
  if (a.images < 1 || a.images > 1 << 28)
    FailUsage("--images takes a number from 1 to ", 1 << 28, ", got ", a.images);
  const bool packed = a.out.ends_with(".pathfinder");
  std::error_code ignored;
  if (packed && std::filesystem::exists(a.out, ignored))
    FailUsage(a.out, " is there already; name another file");
  {
    ProgressBar bar({a.images, "generate", "images"});
    const auto progress = [&](int64_t done, int64_t) { bar.Update(done); };
    (packed ? WritePackedPathfinder : WritePathfinderFolder)(a.pathfinder, a.common.seed, a.images,
                                                             a.out, progress);
  }
  if (a.common.json) {
    const Json line = {{"out", a.out},
                       {"images", a.images},
                       {"size", a.pathfinder.size},
                       {"contour", a.pathfinder.contour},
                       {"seed", a.common.seed}};
    std::printf("%s\n", JsonLine(line).c_str());
    return 0;
  }
  std::printf("Pathfinder in %s: %ld images of %ld x %ld pixels, contours of %ld dashes\n",
              a.out.c_str(), long(a.images), long(a.pathfinder.size), long(a.pathfinder.size),
              long(a.pathfinder.contour));
  std::printf("to train on it: cistern train --data %s\n", ShellWord(a.out).c_str());
  return 0;
}

int RunText(const DataArguments& a) {
  TaskOptions options;
  Fields fields;
  fields.Group("task", options.Describe());  // checks ranges and names
  for (const std::string& setting : FindTask("lm").defaults) {
    if (setting.starts_with("task.")) fields.Set(TaskOptions::Grouped(setting, "lm"));
  }
  fields.Set("task.lm.text=" + AsAssigned(a.text));
  fields.Set("task.lm.tokenizer=" + a.tokenizer);
  if (a.vocab_size && a.tokenizer == "bytes")
    FailUsage("--vocab-size has no effect with --tokenizer bytes; leave it out");
  if (a.vocab_size) fields.Set(StrCat("task.lm.vocab_size=", *a.vocab_size));
  fields.Set("task.lm.length=2");
  const auto task = options.Make();
  std::optional<MadeFolder> made;
  if (!a.out.empty()) {  // what cannot be written is said before the work
    made.emplace(a.out);
    const AtomicFile trial(a.out + "/tokenizer.json");
  }
  task->Prepare();
  if (made) task->SaveAssets(a.out);
  const Json summary = task->DataSummary();
  std::printf("%s", (a.common.json ? JsonLine(summary) + "\n" : JsonFileText(summary)).c_str());
  return 0;
}

}  // namespace

void AddData(CLI::App& app, Run& run) {
  auto a = std::make_shared<DataArguments>();
  CLI::App* command = app.add_subcommand("data", "generate or prepare data");
  command->require_subcommand(1);
  command->footer(
      "Examples:\n"
      "  cistern data listops --out data/listops           the published sizes: 96,000 / 2,000 / "
      "2,000\n"
      "  cistern data pathfinder pf32 --images 2000        PNG and metadata as they are published\n"
      "  cistern data pathfinder pf.pathfinder --size 128  one packed file, as training reads it\n"
      "  cistern data text my.txt                          learns a tokenizer, fills the cache, "
      "prints counts:\n"
      "                                                    what train --text my.txt then finds");
  CLI::App* listops = command->add_subcommand("listops", "generate ListOps as in Long Range Arena");
  listops->add_option("--out", a->out, "folder for basic_{train,val,test}.tsv");
  listops->add_option("--counts", a->counts, "examples for training, validation and test")
      ->expected(3)
      ->delimiter(',');
  AddCommon(*listops, a->common);
  listops->callback([a, &run] {
    run = [a] {
      ApplyCommon(a->common);
      return UntilInterrupted(*a, RunListOps);
    };
  });
  CLI::App* pathfinder = command->add_subcommand(
      "pathfinder", "generate Pathfinder as in Long Range Arena; 128 pixels are Path-X");
  pathfinder
      ->add_option("out", a->out,
                   "a folder for imgs/ and metadata/, or one file NAME.pathfinder for all")
      ->required();
  pathfinder->add_option("--images", a->images, "how many; examples 0, 1, ... of the seed")
      ->capture_default_str();
  pathfinder->add_option("--size", a->pathfinder.size, "pixels on a side: 32, 64, 128, 256")
      ->capture_default_str();
  pathfinder->add_option("--contour", a->pathfinder.contour, "dashes of a contour: 6, 9, 14")
      ->capture_default_str();
  AddCommon(*pathfinder, a->common);
  pathfinder->callback([a, &run] {
    run = [a] {
      ApplyCommon(a->common);
      return UntilInterrupted(*a, RunPathfinder);
    };
  });
  CLI::App* text = command->add_subcommand("text", "tokenize a text into the cache");
  text->add_option("text", a->text, "file or folder")->required();
  text->add_option("--tokenizer", a->tokenizer, "bpe, bytes or words");
  text->add_option("--vocab-size", a->vocab_size,
                   "tokens of the BPE, or words; as many as train --text takes unless told");
  text->add_option("--out", a->out, "folder for tokenizer.json");
  AddCommon(*text, a->common);
  text->callback([a, &run] {
    run = [a] {
      ApplyCommon(a->common);
      ValueOf(a->tokenizer, TokenizerKinds(), "tokenizer");
      return UntilInterrupted(*a, RunText);
    };
  });
}

}  // namespace cistern::cli
