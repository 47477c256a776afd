#pragma once
// What torch/nn/module.h names of torch's own file format. Its headers hold templates that GCC makes
// in every file that sees them; nothing here reads or writes that format, so that their names are
// enough. Found before torch's header of this name, in the build alone.

namespace torch::serialize {
class InputArchive;
class OutputArchive;
}  // namespace torch::serialize
