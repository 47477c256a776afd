#pragma once
// JSON lines: one JSON value per line, UTF-8.
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "cistern/io/append_file.h"
#include "cistern/io/fields.h"

namespace cistern {

// Appends; every line is in the file when Write returns. A last line without its newline (a process
// that was killed) is completed when it is valid JSON, and removed otherwise. Numbers that JSON
// lacks (NaN, infinity) become null.
class JsonlWriter {
 public:
  explicit JsonlWriter(const std::string& path);
  void Write(const Json& line);
  void Sync();            // to the disk
  int64_t Bytes() const;  // of the file
  // Keeps the first `bytes`; false when there are fewer.
  bool Cut(int64_t bytes);

 private:
  AppendFile file_;
};

// Empty lines are skipped. A bad line is an Error "log.jsonl:12:5: not valid JSON: ...; the line
// is: ...".
std::vector<Json> ReadJsonl(const std::string& path);

// The same one line at a time, for files larger than memory; `f` gets the line and its number
// from 1. "-" is standard input; a signal (base/interrupt.h) ends the wait for it.
void ForEachJsonl(const std::string& path, const std::function<void(Json line, size_t number)>& f);

// The lines of a text in memory, as ReadJsonl has those of a file; `name` is the path in messages.
std::vector<Json> ParseJsonl(std::string_view text, const std::string& name);

}  // namespace cistern
