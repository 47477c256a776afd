#pragma once
// TensorBoard's event files: TFRecord frames (length, data, masked CRC-32C of each) around protobuf
// messages, scalars only.
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include "cistern/io/append_file.h"

namespace cistern {

// Writes DIR/events.out.tfevents.<seconds>.<host>.<pid>.<n>, a new file per writer, which
// `tensorboard --logdir DIR` finds. Every scalar is in the file when AddScalar returns. Errors:
// "cannot write PATH: ...".
class TfEventsWriter {
 public:
  explicit TfEventsWriter(const std::string& directory);  // created when missing
  // `wall_time` in seconds since 1970; below 0 means now.
  void AddScalar(const std::string& tag, double value, int64_t step, double wall_time = -1);
  // What other files of the folder say of this step and later ones counts no more: a run that was
  // cut off goes on from an earlier step.
  void AddStart(int64_t step);
  const std::string& path() const { return file_->path(); }

 private:
  std::unique_ptr<AppendFile> file_;
};

uint32_t Crc32c(std::string_view bytes);      // Castagnoli, as in iSCSI (RFC 3720)
std::string TfRecord(std::string_view data);  // one frame

}  // namespace cistern
