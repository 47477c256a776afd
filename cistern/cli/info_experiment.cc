#include "cistern/cli/info_experiment.h"

#include <torch/nn/module.h>

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <map>

#include "cistern/base/error.h"
#include "cistern/base/format.h"
#include "cistern/cli/experiment.h"
#include "cistern/io/json_text.h"

namespace cistern::cli {
namespace {

// "layers.3.ffn.up_proj.weight" -> "layers.ffn": the part that a parameter is counted under.
std::string PartOf(const std::string& name) {
  std::string part, word;
  int words = 0;
  for (size_t i = 0; i <= name.size() && words < 2; ++i) {
    if (i < name.size() && name[i] != '.') {
      word += name[i];
      continue;
    }
    const bool number = std::all_of(word.begin(), word.end(), [](char c) { return isdigit(c); });
    if (!number && i < name.size()) part += (part.empty() ? "" : ".") + word, ++words;
    word.clear();
  }
  return part.empty() ? name : part;
}

struct Size {
  int64_t parameters = 0;
  std::map<std::string, int64_t> parts;
  ModelConfig config;
};

// Of the model that an experiment would train.
Size SizeOf(const Experiment& experiment, const std::string& file, int64_t length) {
  Size size;
  ModelConfig& config = size.config = experiment.model;
  config.max_length = std::max(config.max_length, length);
  config.Validate();
  const ShapesOnly scope;
  std::shared_ptr<Model> model;
  try {
    model = MakeModel(config, uint64_t(experiment.seed));
  } catch (const UsageError& e) {
    if (config.vocab_size > 0 && (config.classes > 0 || !config.info().classifies)) throw;
    FailUsage(file, ": the size of the model depends on the data (", e.what(),
              "); to see it here, set it in the file: model.vocab_size, model.classes");
  }
  size.parameters = model->ParameterCount();
  for (const auto& p : model->named_parameters()) size.parts[PartOf(p.key())] += p.value().numel();
  return size;
}

// The size as the source prints it: of the model, or to that of another file's.
double PrintedSize(const Published& published, const std::string& file, const Size& size) {
  if (published.relative_to.empty()) return double(size.parameters);
  const std::string base =
      (std::filesystem::path(file).parent_path() / published.relative_to).string();
  Experiment experiment;
  ReadExperiment(experiment, base, {});
  const auto task = experiment.task.Make();
  return double(size.parameters) /
         double(SizeOf(experiment, base, task->tokens_per_sequence()).parameters);
}

}  // namespace

int PrintExperiment(const std::string& file, bool as_json) {
  Experiment experiment;
  ReadExperiment(experiment, file, {});
  experiment.train.Validate();
  const auto task = experiment.task.Make();
  const Size size = SizeOf(experiment, file, task->tokens_per_sequence());
  const ModelConfig& config = size.config;
  const int64_t parameters = size.parameters;
  const Published& published = experiment.published;
  const bool known = !published.parameters.empty();
  const double printed = known ? PrintedSize(published, file, size) : 0;
  const int64_t rows = task->rows_of_batch(experiment.train.batch);
  // Of images that are not at hand the model may know more than the task.
  const int64_t length = experiment.task.kind == "image"
                             ? std::max(task->tokens_per_row(), config.max_length)
                             : task->tokens_per_row();
  const int64_t bytes = EstimateRunBytes(config, rows, length,
                                         experiment.dtype == "float64" ? 8 : 4, experiment.train);
  if (as_json) {
    Json json = {{"file", file},
                 {"task", experiment.task.kind},
                 {"model", config.Summary()},
                 {"parameters", parameters},
                 {"parts", size.parts},
                 {"training_bytes", bytes},
                 {"published", experiment.Describe().Write().value("published", Json::object())}};
    if (known) json["as_published"] = IsPrintedAs(printed, published.parameters);
    if (!published.relative_to.empty()) json["relative"] = printed;
    std::printf("%s\n", JsonLine(json).c_str());
    return 0;
  }
  std::printf("%-12s %s\n%-12s %s\n%-12s %s\n%-12s %lld", "experiment", file.c_str(), "task",
              experiment.task.kind.c_str(), "model", config.Summary().c_str(), "parameters",
              static_cast<long long>(parameters));
  if (known) {
    if (!published.relative_to.empty())
      std::printf(", %.4f of %s", printed, published.relative_to.c_str());
    std::printf(
        " (%s says %s: %s)", published.source.c_str(), published.parameters.c_str(),
        IsPrintedAs(printed, published.parameters) ? "the same to its digits" : "another size");
  }
  std::printf("\n");
  for (const auto& [part, count] : size.parts)
    std::printf("  %-30s %12lld\n", part.c_str(), static_cast<long long>(count));
  std::printf("%-12s about %.2f GB for a training step of %lld rows of %lld tokens\n", "memory",
              double(bytes) / 1e9, static_cast<long long>(rows), static_cast<long long>(length));
  if (const std::string line = published.Line(); !line.empty())
    std::printf("%-12s %s\n", "published", line.c_str());
  for (const std::string& difference : published.differences)
    std::printf("%-12s %s\n", "difference", difference.c_str());
  return 0;
}

}  // namespace cistern::cli
