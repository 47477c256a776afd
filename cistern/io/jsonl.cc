#include "cistern/io/jsonl.h"

#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>

#include "cistern/base/error.h"
#include "cistern/base/interrupt.h"
#include "cistern/io/json_text.h"

namespace cistern {
namespace {

struct CloseFile {
  void operator()(std::FILE* file) const { std::fclose(file); }
};
struct FreeMemory {
  void operator()(char* memory) const { std::free(memory); }
};
using OpenFile = std::unique_ptr<std::FILE, CloseFile>;

OpenFile OpenToRead(const std::string& path) {
  OpenFile file(std::fopen(path.c_str(), "rb"));
  if (!file) Fail("cannot read ", path, ": ", std::strerror(errno));
  return file;
}

bool Blank(std::string_view line) {
  return line.find_first_not_of(" \t\r\n") == std::string_view::npos;
}

Json ParseLine(std::string_view line, const std::string& name, size_t number) {
  try {
    return ParseJson(line, name, number);
  } catch (const Error& e) {
    const std::string shown(line.substr(0, 80));
    Fail(e.what(), "; the line is: ", shown, line.size() > 80 ? "..." : "");
  }
}

// The offset after the last newline.
int64_t LastLineStart(std::FILE* file, int64_t size) {
  char block[4096];
  for (int64_t end = size; end > 0;) {
    const int64_t begin = std::max<int64_t>(0, end - int64_t(sizeof(block)));
    if (std::fseek(file, long(begin), SEEK_SET) != 0) break;
    const size_t n = std::fread(block, 1, size_t(end - begin), file);
    const size_t newline = std::string_view(block, n).rfind('\n');
    if (newline != std::string_view::npos) return begin + int64_t(newline) + 1;
    end = begin;
  }
  return 0;
}

}  // namespace

JsonlWriter::JsonlWriter(const std::string& path) : file_(path) {
  const OpenFile file(std::fopen(path.c_str(), "rb"));
  if (!file || std::fseek(file.get(), 0, SEEK_END) != 0) return;  // a pipe: nothing to mend
  const int64_t size = std::ftell(file.get());
  const int64_t start = size > 0 ? LastLineStart(file.get(), size) : size;
  if (start >= size) return;
  std::string last(size_t(size - start), '\0');
  if (std::fseek(file.get(), long(start), SEEK_SET) != 0 ||
      std::fread(last.data(), 1, last.size(), file.get()) != last.size())
    return;
  const Json line = Json::parse(last, nullptr, false);
  // A number may be the first half of a longer one, so only what closes itself counts as complete.
  if (!line.is_discarded() && (line.is_structured() || line.is_string())) {
    file_.Append("\n");
  } else {
    file_.Truncate(start);
  }
}

void JsonlWriter::Write(const Json& line) { file_.Append(JsonLine(line) + "\n"); }

void JsonlWriter::Sync() { file_.Sync(); }

int64_t JsonlWriter::Bytes() const { return file_.Bytes(); }

bool JsonlWriter::Cut(int64_t bytes) {
  if (Bytes() < bytes) return false;
  file_.Truncate(bytes);
  return true;
}

void ForEachJsonl(const std::string& path, const std::function<void(Json line, size_t number)>& f) {
  const bool input = path == "-";
  const std::string name = input ? "standard input" : path;
  const OpenFile file = input ? OpenFile(::fdopen(::dup(STDIN_FILENO), "rb")) : OpenToRead(path);
  if (!file) Fail("cannot read ", name, ": ", std::strerror(errno));
  std::unique_ptr<char, FreeMemory> buffer;
  char* raw = nullptr;
  size_t room = 0;
  for (size_t number = 1;; ++number) {
    errno = 0;
    raw = buffer.release();
    const ssize_t n = ::getline(&raw, &room, file.get());
    const int error = errno;
    buffer.reset(raw);
    if (n < 0) {
      if (error == EINTR && Interrupted()) return;  // waiting for what a terminal or a pipe brings
      if (std::ferror(file.get()) || error == ENOMEM)
        Fail("cannot read ", name, ": ", std::strerror(error));
      return;
    }
    const std::string_view line(raw, size_t(n));
    if (!Blank(line))
      f(ParseLine(line.substr(0, line.find_last_not_of("\r\n") + 1), name, number), number);
  }
}

std::vector<Json> ReadJsonl(const std::string& path) {
  std::vector<Json> lines;
  ForEachJsonl(path, [&](Json line, size_t) { lines.push_back(std::move(line)); });
  return lines;
}

std::vector<Json> ParseJsonl(std::string_view text, const std::string& name) {
  std::vector<Json> lines;
  for (size_t number = 1; !text.empty(); ++number) {
    const size_t newline = std::min(text.find('\n'), text.size());
    const std::string_view line = text.substr(0, newline);
    if (!Blank(line)) lines.push_back(ParseLine(line, name, number));
    text.remove_prefix(std::min(newline + 1, text.size()));
  }
  return lines;
}

}  // namespace cistern
