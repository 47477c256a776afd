#include "cistern/decode/prompt.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <memory>
#include <utility>

#include "cistern/base/error.h"
#include "cistern/io/byte_source.h"

namespace cistern {

PromptSource StringSource(std::string text) {
  auto held = std::make_shared<std::string>(std::move(text));
  auto at = std::make_shared<size_t>(0);
  return [held, at] {
    const std::string_view piece = std::string_view(*held).substr(*at, 1 << 16);
    *at += piece.size();
    return piece;
  };
}

PromptSource FileSource(const std::string& path) {
  const std::string name = path == "-" ? "standard input" : path;
  const int fd = path == "-" ? ::dup(STDIN_FILENO) : ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  CISTERN_CHECK(fd >= 0, "cannot read ", name, ": ", std::strerror(errno));
  const std::shared_ptr<int> file(new int(fd), [](const int* f) {
    ::close(*f);
    delete f;
  });
  struct stat info;
  CISTERN_CHECK(::fstat(fd, &info) != 0 || !S_ISDIR(info.st_mode), "cannot read ", name,
                ": it is a folder");
  auto buffer = std::make_shared<std::string>(1 << 16, '\0');
  return [file, buffer, name, first = true]() mutable -> std::string_view {
    size_t held = 0;
    for (ssize_t n = 1; n > 0 && held <= (first ? 3u : 0u); held += size_t(n)) {  // a whole mark
      n = ::read(*file, buffer->data() + held, buffer->size() - held);
      if (n < 0 && errno == EINTR) return {};
      CISTERN_CHECK(n >= 0, "cannot read ", name, ": ", std::strerror(errno));
    }
    const std::string_view bytes(buffer->data(), held);
    return std::exchange(first, false) ? WithoutMark(bytes) : bytes;
  };
}

PromptReader::PromptReader(const Tokenizer& tokenizer, PromptSource source, bool start)
    : tokenizer_(tokenizer), encoder_(tokenizer), source_(std::move(source)), start_(start) {}

std::vector<int32_t> PromptReader::Take(int64_t count) {
  while (!ended_ && int64_t(ready_.size() - next_) < count) {
    ready_.erase(ready_.begin(), ready_.begin() + int64_t(next_));
    next_ = 0;
    const std::string_view bytes = source_();
    ended_ = bytes.empty();
    const std::vector<int32_t> ids = ended_ ? encoder_.Finish() : encoder_.Push(bytes);
    ready_.insert(ready_.end(), ids.begin(), ids.end());
    if (ended_ && ready_.empty() && taken_ == 0 && start_) {
      const int32_t start = tokenizer_.AddedToken("<|endoftext|>");
      ready_ = start >= 0 ? std::vector<int32_t>{start} : tokenizer_.Encode("\n");
    }
  }
  const int64_t n = std::min<int64_t>(count, int64_t(ready_.size() - next_));
  std::vector<int32_t> out(ready_.begin() + int64_t(next_), ready_.begin() + int64_t(next_) + n);
  next_ += size_t(n);
  taken_ += n;
  return out;
}

}  // namespace cistern
