// cistern import: a model that another program trained, as a model folder.
#include <cstdio>
#include <filesystem>

#include "cistern/base/error.h"
#include "cistern/base/format.h"
#include "cistern/cli/command.h"
#include "cistern/io/json_text.h"
#include "cistern/models/hugging_face.h"
#include "cistern/text/tokenizer.h"

namespace cistern::cli {
namespace {

struct ImportCommand {
  Common common;
  std::string folder, out;
};

std::unique_ptr<Tokenizer> TokenizerOf(const std::string& folder) {
  const std::string vocabulary = folder + "/vocab.json", merges = folder + "/merges.txt",
                    whole = folder + "/tokenizer.json";
  // What tokenizer.json of a RoBERTa adds to each row is no part of its texts.
  if (std::filesystem::exists(vocabulary) && std::filesystem::exists(merges))
    return LoadGpt2(vocabulary, merges);
  CISTERN_CHECK(std::filesystem::exists(whole), folder,
                " has no tokenizer: neither vocab.json and merges.txt nor tokenizer.json");
  return LoadTokenizer(whole);
}

// The id of the token that stands for a hidden one.
int64_t MaskRow(const Tokenizer& tokenizer, const std::string& folder) {
  for (int32_t id = int32_t(tokenizer.vocab_size()); id-- > 0;) {
    if (tokenizer.Bytes(id) == "<mask>") return id;
  }
  throw Error(folder + ": its tokenizer has no token <mask>, which stands for hidden tokens");
}

// The folder may hold a model of ours, as an earlier import left it, and nothing else.
void CheckOut(const std::string& out) {
  RefuseForeignFiles(out, [](const std::string& name) {
    return name == "config.json" || name == "model.safetensors" || name == "tokenizer.json";
  });
  const std::string config = out + "/config.json";
  if (!std::filesystem::exists(config)) return;
  const Json json = ReadJsonFile(config);
  if (!json.is_object() || !json.contains("kind"))
    FailUsage("--out ", out, " holds another program's model; name a new folder");
}

int RunImport(ImportCommand& c) {
  ApplyCommon(c.common);
  CheckOut(c.out);
  const bool masked = HuggingFaceKind(c.folder) == "masked_lm";
  const std::unique_ptr<Tokenizer> tokenizer = TokenizerOf(c.folder);
  const ForeignModel read =
      ReadHuggingFace(c.folder, masked ? MaskRow(*tokenizer, c.folder) : int64_t{-1});
  const ModelConfig& config = read.model->config();
  CISTERN_CHECK(tokenizer->vocab_size() == config.vocab_size, c.folder, ": its tokenizer has ",
                tokenizer->vocab_size(), " tokens, config.json says vocab_size=", config.vocab_size,
                "; they belong to different models");
  std::filesystem::create_directories(c.out);
  tokenizer->Save(c.out + "/tokenizer.json");
  SaveModel(*read.model, c.out);
  if (c.common.json) {
    std::printf("%s\n", JsonLine(Json{{"out", c.out},
                                      {"kind", config.kind},
                                      {"parameters", read.model->ParameterCount()},
                                      {"max_length", config.max_length},
                                      {"notes", read.notes}})
                            .c_str());
    return 0;
  }
  std::printf("%s: %s, %s, %s parameters, at most %s tokens at once\n", c.out.c_str(),
              config.kind.c_str(), config.Summary().c_str(),
              Thousands(read.model->ParameterCount()).c_str(),
              Thousands(config.max_length).c_str());
  for (const std::string& note : read.notes) std::printf("%s\n", note.c_str());
  const char* const next =
      masked ? "cistern train --task mlm --data FILE --from " : "cistern generate ";
  std::printf("next: %s%s\n", next, c.out.c_str());
  return 0;
}

}  // namespace

void AddImport(CLI::App& app, Run& run) {
  auto c = std::make_shared<ImportCommand>();
  CLI::App* command =
      app.add_subcommand("import", "make a model folder of a GPT-2 or RoBERTa of Hugging Face");
  command
      ->add_option("folder", c->folder,
                   "folder with config.json, model.safetensors and a tokenizer (vocab.json and "
                   "merges.txt, or tokenizer.json)")
      ->required();
  command->add_option("--out", c->out, "the model folder to write")->required();
  command->footer(
      "Examples:\n"
      "  cistern import gpt2 --out models/gpt2\n"
      "  cistern generate models/gpt2 --prompt \"In the beginning\"\n"
      "  cistern import roberta-base --out models/roberta\n"
      "  cistern train configs/P003/mlm/abc_mlp-64.toml --data my.txt --from models/roberta \\\n"
      "    --swap-attention --out runs/abc");
  AddCommon(*command, c->common);
  command->callback([c, &run] { run = [c] { return RunImport(*c); }; });
}

}  // namespace cistern::cli
