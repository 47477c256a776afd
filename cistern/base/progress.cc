#include "cistern/base/progress.h"

#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "cistern/base/error.h"
#include "cistern/base/format.h"

namespace cistern {
namespace {

std::atomic<bool> quiet{false};

int Columns() {
  winsize size{};
  return ::ioctl(STDERR_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 0 ? size.ws_col : 80;
}

bool Terminal() {
  const char* kind = std::getenv("TERM");
  return ::isatty(STDERR_FILENO) == 1 && !(kind != nullptr && std::strcmp(kind, "dumb") == 0);
}

// The first `columns` UTF-8 characters, one line.
std::string Cut(const std::string& text, int columns) {
  std::string result;
  int used = 0;
  for (const char c : text) {
    const bool starts = (static_cast<unsigned char>(c) & 0xC0) != 0x80;
    if (starts && used++ >= columns) break;
    result += static_cast<unsigned char>(c) < 32 ? ' ' : c;
  }
  return result;
}

}  // namespace

void SetQuiet(bool value) { quiet = value; }
bool Quiet() { return quiet; }

ProgressBar::ProgressBar(ProgressOptions options)
    : options_(std::move(options)),
      begin_(std::chrono::steady_clock::now()),
      terminal_(Terminal()) {
  drawn_ = terminal_ ? begin_ - std::chrono::seconds(1) : begin_;
}

ProgressBar::ProgressBar(int64_t total, std::string label)
    : ProgressBar(ProgressOptions{.total = total, .label = std::move(label)}) {}

ProgressBar::~ProgressBar() { Finish(); }

std::string ProgressBar::Line(int64_t done, const std::string& extra, double seconds,
                              int columns) const {
  const int64_t total = options_.total;
  const int64_t fresh = done - options_.start;
  const double rate = seconds > 0 && fresh > 0 ? double(fresh) / seconds : 0;
  std::string tail =
      std::to_string(done) + (total > 0 ? "/" + std::to_string(total) : "") + " " + options_.unit;
  if (rate > 0) tail += "  " + ThreeDigits(rate) + " " + options_.unit + "/s";
  if (rate > 0 && total > done) tail += "  ETA " + Clock(double(total - done) / rate);
  if (total <= 0) tail += "  " + Clock(seconds);
  if (!extra.empty()) tail += "  " + extra;
  std::string head = options_.label.empty() ? "" : options_.label + "  ";
  if (total > 0) {
    const double part = std::clamp(double(done) / double(total), 0.0, 1.0);
    const int room = columns - int(head.size() + tail.size()) - 9;  // "[", "] ", "100%  "
    const int width = std::min(room, 30);
    if (width >= 5) {
      const int full = int(part * width);
      head += "[" + std::string(size_t(full), '#') + std::string(size_t(width - full), '-') + "] ";
    }
    char percent[16];
    std::snprintf(percent, sizeof(percent), "%3d%%  ", int(part * 100));
    head += percent;
  }
  return Cut(head + tail, columns);
}

void ProgressBar::Update(int64_t done, const std::string& extra) {
  if (finished_ || quiet || (!terminal_ && options_.plain_seconds <= 0)) return;
  const auto now = std::chrono::steady_clock::now();
  const double since = std::chrono::duration<double>(now - drawn_).count();
  if (since < (terminal_ ? 0.1 : options_.plain_seconds)) return;
  drawn_ = now;
  const double seconds = std::chrono::duration<double>(now - begin_).count();
  if (terminal_) {
    // \r to the line's start, text, \x1b[K to wipe what an earlier, longer line left; one column
    // free, so that nothing wraps
    const std::string line = "\r" + Line(done, extra, seconds, Columns() - 1) + "\x1b[K";
    std::fwrite(line.data(), 1, line.size(), stderr);
    std::fflush(stderr);
    visible_ = true;
  } else {
    const std::string line = Line(done, extra, seconds, 1000) + "\n";
    std::fwrite(line.data(), 1, line.size(), stderr);
  }
}

void ProgressBar::Clear() {
  if (!visible_) return;
  std::fputs("\r\x1b[K", stderr);
  std::fflush(stderr);
  visible_ = false;
  drawn_ -= std::chrono::seconds(1);
}

void ProgressBar::Finish() {
  Clear();
  finished_ = true;
}

}  // namespace cistern
