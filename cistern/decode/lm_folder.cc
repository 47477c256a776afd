#include "cistern/decode/lm_folder.h"

#include <algorithm>
#include <filesystem>

#include "cistern/base/error.h"
#include "cistern/base/subprocess.h"

namespace cistern {
namespace {

namespace fs = std::filesystem;

// Where a user who named the folder above, which lacks a file, may have wanted to go, or what is
// still to be done there. A checkpoint is no model folder.
std::string WhatIsInside(const std::string& folder, const std::string& lacks) {
  std::vector<std::string> found;
  bool checkpoint = false;
  std::error_code error;
  for (fs::directory_iterator it(folder, error), end; !error && it != end; it.increment(error)) {
    std::error_code ignored;
    const bool trains = fs::exists(it->path() / "trainer.json", ignored);
    checkpoint = checkpoint || trains;
    if (!trains && fs::exists(it->path() / "config.json", ignored) &&
        fs::exists(it->path() / "model.safetensors", ignored) &&
        fs::exists(it->path() / lacks, ignored))
      found.push_back(it->path().string());
  }
  if (checkpoint && lacks != "tokenizer.json")
    return StrCat("; this run has no model yet, as its first evaluation has not come: `cistern ",
                  "train --resume --out ", ShellWord(folder), "` goes on");
  std::sort(found.begin(), found.end());
  std::string text;
  for (const std::string& f : found) text += (text.empty() ? "; model folders inside: " : ", ") + f;
  return text;
}

void RequireFile(const std::string& folder, const std::string& name) {
  std::error_code ignored;
  if (!fs::exists(fs::path(folder) / name, ignored)) {
    Fail(folder, " is not a model folder: it lacks ", name,
         " (a model folder holds config.json, model.safetensors and tokenizer.json)",
         WhatIsInside(folder, name));
  }
}

}  // namespace

ModelConfig ReadFolderConfig(const std::string& folder) {
  std::error_code ignored;
  CISTERN_CHECK(fs::exists(folder, ignored), "there is no folder ", folder);
  CISTERN_CHECK(fs::is_directory(folder, ignored), folder,
                " is a file; give the folder that holds config.json and model.safetensors");
  RequireFile(folder, "config.json");
  RequireFile(folder, "model.safetensors");
  const std::string path = folder + "/config.json";
  return ReadModelConfig(ReadJsonFile(path), path);
}

LmFolder OpenLmFolder(const std::string& folder, const std::string& dtype) {
  const ModelConfig config = ReadFolderConfig(folder);
  if (!config.info().extends || config.info().encodes) {
    FailUsage(folder, " holds a model of kind ", config.kind,
              "; only a language model without a source, such as a decoder_lm, continues a text "
              "(`cistern predict` and `cistern eval` take the other kinds)");
  }
  RequireFile(folder, "tokenizer.json");
  LmFolder out;
  out.tokenizer = LoadTokenizer(folder + "/tokenizer.json");
  CISTERN_CHECK(out.tokenizer->vocab_size() == config.vocab_size, folder, ": tokenizer.json has ",
                out.tokenizer->vocab_size(),
                " tokens, config.json says vocab_size=", config.vocab_size,
                "; they belong to different models");
  out.model = std::dynamic_pointer_cast<LanguageModel>(LoadModel(folder));
  if (dtype == "float64") out.model->to(at::kDouble);
  return out;
}

}  // namespace cistern
