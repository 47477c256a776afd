#pragma once
// What `cistern info FILE.toml` prints: the model that an experiment would train, without data and
// without memory for its weights.
#include <string>

namespace cistern::cli {

// Parameters in all and by part, the memory of a training step, and how they compare with what the
// file's [published] table says. UsageError where the size depends on data and the file does not
// say it (model.vocab_size, model.classes). Exit code.
int PrintExperiment(const std::string& file, bool as_json);

}  // namespace cistern::cli
