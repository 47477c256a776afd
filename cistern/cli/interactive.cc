#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstring>
#include <deque>
#include <iostream>
#include <utility>

#include "cistern/base/error.h"
#include "cistern/base/interrupt.h"
#include "cistern/cli/generate_command.h"
#include "cistern/io/json_text.h"

namespace cistern::cli {
namespace {

constexpr char kHelp[] =
    "Each line is appended to the text, with its line end, and answered. A backslash at its end\n"
    "drops the line end. An empty line continues without adding anything. Ctrl-C stops an answer.\n"
    "A line that begins with a colon is a command (:: begins one that is not):\n"
    "  :save FILE   the text's state, for --load-state and :load\n"
    "  :load FILE   continue a saved state\n"
    "  :back        undo the last turn (or :load, or :reset)\n"
    "  :reset       start a new text\n"
    "  :stats       tokens, speed, state\n"
    "  :help        this\n"
    "  :quit        quit (as the end of the input does)\n";

// What :back can undo: at most this many turns, and above one no more bytes of state.
constexpr size_t kBackTurns = 32;
constexpr int64_t kBackBytes = int64_t{256} << 20;

// Ctrl-C sets the flag, the second time too; SIGTERM ends the program.
void ArmInterrupt() {
  Interrupted() = false;
  InstallInterruptHandler();
  std::signal(SIGTERM, SIG_DFL);
}

enum class Input { kLine, kEnd, kInterrupt };

// Lines of standard input; a signal breaks the wait off.
class LineReader {
 public:
  Input Next(std::string* line) {
    for (;;) {
      if (const size_t end = held_.find('\n'); end != std::string::npos) {
        *line = held_.substr(0, end);
        held_.erase(0, end + 1);
        return Input::kLine;
      }
      if (Interrupted()) return Input::kInterrupt;
      char buffer[4096];
      const ssize_t n = ::read(STDIN_FILENO, buffer, sizeof buffer);
      if (n < 0 && errno == EINTR) continue;
      CISTERN_CHECK(n >= 0, "cannot read standard input: ", std::strerror(errno));
      if (n == 0) {
        *line = std::exchange(held_, {});  // the last line may lack its end
        return line->empty() ? Input::kEnd : Input::kLine;
      }
      held_.append(buffer, size_t(n));
    }
  }

 private:
  std::string held_;
};

class Session {
 public:
  Session(const GenerateCommand& c, const LmFolder& lm, Generator& generator, TextState& text,
          Stats& stats)
      : c_(c), lm_(lm), generator_(generator), text_(text), stats_(stats) {}

  // False: the end.
  bool Command(const std::string& line) {
    const size_t space = line.find(' ');
    const std::string word = line.substr(0, space);
    const size_t first = line.find_first_not_of(' ', space), last = line.find_last_not_of(' ');
    const std::string file = first == std::string::npos ? "" : line.substr(first, last - first + 1);
    static const std::vector<std::string> known = {":save",  ":load", ":back", ":reset",
                                                   ":stats", ":help", ":quit"};
    if (std::find(known.begin(), known.end(), word) == known.end())
      throw UsageError(UnknownName("command", word, known));
    const bool takes_file = word == ":save" || word == ":load";
    if (takes_file && file.empty()) FailUsage(word, " takes a file: ", word, " FILE");
    if (!takes_file && !file.empty()) FailUsage(word, " takes nothing after it, got '", file, "'");
    if (word == ":quit") return false;
    if (word == ":help") {
      std::cerr << kHelp;
    } else if (word == ":save") {
      SaveTextState(file, *lm_.model, *lm_.tokenizer, text_);
      Note(StrCat("saved ", file, ": ", text_.position(0), " tokens"));
    } else if (word == ":load") {
      TextState loaded = LoadOneText(file, lm_);
      Remember();
      text_ = std::move(loaded);
      Note(StrCat("loaded ", file, ": ", text_.position(0), " tokens"));
    } else if (word == ":back") {
      CISTERN_CHECK(!before_.empty(), "there is nothing to go back to");
      text_ = std::move(before_.back());
      before_.pop_back();
      Note(StrCat("back at ", text_.position(0), " tokens"));
    } else if (word == ":reset") {
      Remember();
      text_ = generator_.Empty();
    } else {  // :stats
      std::cerr << "text        " << text_.position(0) << " tokens\n" << stats_.ToText();
    }
    return true;
  }

  // Appends and answers; when that fails or the line cannot be read to its end, the text is as it
  // was before.
  void Turn(const std::string& added) {
    Remember();
    ArmInterrupt();
    const auto on_text = [&](size_t, std::string_view shown) {
      if (!c_.common.json) WriteOut(shown);
    };
    Generation answer;
    try {
      answer =
          generator_.Continue(text_, {StringSource(added)}, c_.options, on_text, &Interrupted())[0];
    } catch (...) {
      GoBack();
      throw;
    }
    ArmInterrupt();
    stats_.Add(generator_.stats());
    if (!answer.prompt_read) {
      GoBack();
      Note("interrupted while reading the line; the text is unchanged");
    }
    if (c_.common.json) {
      WriteOut(JsonLine(ResultJson(c_, *lm_.tokenizer, answer)) + "\n");
    } else {
      WriteOut("\n");
      if (c_.logprobs >= 0) WriteOut(LogprobLines(*lm_.tokenizer, answer));
    }
  }

 private:
  void Note(const std::string& text) const {
    if (!c_.common.quiet) std::cerr << text << "\n";
  }

  void Remember() {
    before_.push_back(text_.Clone());
    int64_t bytes = 0;
    for (const TextState& t : before_) bytes += t.Bytes();
    while (before_.size() > 1 && (before_.size() > kBackTurns || bytes > kBackBytes)) {
      bytes -= before_.front().Bytes();
      before_.pop_front();
    }
  }

  void GoBack() {
    text_ = std::move(before_.back());
    before_.pop_back();
  }

  const GenerateCommand& c_;
  const LmFolder& lm_;
  Generator& generator_;
  TextState& text_;
  Stats& stats_;
  std::deque<TextState> before_;
};

// What a line adds to the text.
std::string Added(std::string line) {
  if (line.empty()) return line;
  if (line.starts_with("::")) line.erase(0, 1);
  if (!line.ends_with("\\")) return line + "\n";
  line.pop_back();
  return line;
}

}  // namespace

void RunInteractive(const GenerateCommand& c, const LmFolder& lm, Generator& generator,
                    TextState& text, Stats& stats) {
  const bool terminal = ::isatty(STDIN_FILENO) != 0;
  Session session(c, lm, generator, text, stats);
  LineReader lines;
  ArmInterrupt();
  if (terminal && !c.common.quiet) std::cerr << ":help shows the commands, :quit or Ctrl-D ends\n";
  for (std::string line;;) {
    if (terminal) std::cerr << "> " << std::flush;
    const Input input = lines.Next(&line);
    if (input == Input::kEnd) break;
    if (input == Input::kInterrupt) {
      if (!terminal) return;
      ArmInterrupt();
      std::cerr << "\n:quit or Ctrl-D ends\n";
      continue;
    }
    try {
      if (line.starts_with(":") && !line.starts_with("::")) {
        if (!session.Command(line)) return;
      } else {
        session.Turn(Added(line));
      }
    } catch (const Error& e) {
      if (!terminal) throw;
      std::cerr << e.what() << "\n";
    }
  }
  if (terminal) std::cerr << "\n";
}

}  // namespace cistern::cli
