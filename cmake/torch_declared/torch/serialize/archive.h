#pragma once
// What torch/nn/module.h names of torch's own file format. Its headers hold thousands of templates,
// a third of the time of a file's compilation; nothing here reads or writes that format, so that
// their names are enough. Found before torch's header of this name, in the build alone.

namespace torch::serialize {
class InputArchive;
class OutputArchive;
}  // namespace torch::serialize
