#include "cistern/base/progress.h"

#include <gtest/gtest.h>
#include <pty.h>
#include <unistd.h>

#include <cstdlib>

namespace cistern {
namespace {

TEST(ProgressBar, Line) {
  const ProgressBar bar({.total = 5000, .label = "train"});
  EXPECT_EQ(bar.Line(1900, "loss 2.31", 152, 100),
            "train  [###########-------------------]  38%  1900/5000 steps  12.5 steps/s  ETA 4:08 "
            " loss 2.31");
  EXPECT_EQ(bar.Line(0, "", 0, 60), "train  [------------------------------]   0%  0/5000 steps");
  EXPECT_EQ(bar.Line(5000, "", 10, 60),
            "train  [################] 100%  5000/5000 steps  500 steps/s");
  EXPECT_EQ(bar.Line(1900, "loss 2.31", 152, 20), "train   38%  1900/50");
  const ProgressBar resumed({.total = 100, .label = "", .unit = "MB", .start = 50});
  EXPECT_EQ(resumed.Line(60, "", 100, 42), " 60%  60/100 MB  0.100 MB/s  ETA 6:40");
  const ProgressBar open({.label = "read", .unit = "tokens"});
  EXPECT_EQ(open.Line(1000, "", 4000, 80), "read  1000 tokens  0.250 tokens/s  1:06:40");
}

TEST(ProgressBar, CutsCharactersAndControls) {
  const ProgressBar bar({.total = 0, .label = "\xc3\xa9\xc3\xa9\n"});
  EXPECT_EQ(bar.Line(0, "", 0, 4), "\xc3\xa9\xc3\xa9  ");
}

// What reaches standard error when it is a pipe or a terminal.
std::string Drawn(bool terminal, const ProgressOptions& options, int updates = 1000,
                  int columns = 60) {
  int reader, writer;
  if (terminal) {
    winsize size{.ws_row = 24,
                 .ws_col = static_cast<unsigned short>(columns),
                 .ws_xpixel = 0,
                 .ws_ypixel = 0};
    EXPECT_EQ(openpty(&reader, &writer, nullptr, nullptr, &size), 0);
  } else {
    int ends[2];
    EXPECT_EQ(pipe(ends), 0);
    reader = ends[0];
    writer = ends[1];
  }
  const int saved = dup(STDERR_FILENO);
  dup2(writer, STDERR_FILENO);
  {
    ProgressBar bar(options);
    for (int i = 0; i < updates; ++i) bar.Update(i, "x");
    bar.Finish();
    bar.Update(1000);
  }
  fputc('!', stderr);
  fflush(stderr);
  dup2(saved, STDERR_FILENO);
  close(saved);
  std::string text;
  for (char c = 0; c != '!';
       text += c) {  // a terminal hands out what was written in several pieces
    if (read(reader, &c, 1) != 1) break;
  }
  close(writer);
  close(reader);
  return text;
}

TEST(ProgressBar, OnlyOnATerminal) {
  int reader = 0, writer = 0;
  if (openpty(&reader, &writer, nullptr, nullptr, nullptr) != 0)
    GTEST_SKIP() << "this system has no pseudo-terminals: /dev/pts is not mounted";
  close(reader), close(writer);
  setenv("TERM", "xterm", 1);
  EXPECT_EQ(Drawn(false, {.total = 10, .label = "a"}), "!");
  const std::string text = Drawn(true, {.total = 1000, .label = "a"});
  EXPECT_EQ(text.rfind("\ra  [", 0), 0u) << text;
  EXPECT_EQ(text.substr(text.size() - 5), "\r\x1b[K!") << text;
  EXPECT_LT(text.size(), 500u);  // at most 10 a second
  SetQuiet(true);
  EXPECT_EQ(Drawn(true, {.total = 10, .label = "a"}), "!");
  SetQuiet(false);
  EXPECT_NE(Drawn(false, {.total = 10, .label = "a", .plain_seconds = 1e-9}, 10).find("a  ["),
            std::string::npos);
}

}  // namespace
}  // namespace cistern
