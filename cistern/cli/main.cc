// The program: cistern train | eval | predict | generate | compare | analyze | statistics | bench |
// data | import | info | verify | completion.
#include <fcntl.h>
#include <malloc.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <filesystem>
#include <iostream>
#include <new>
#include <string>
#include <system_error>
#include <vector>

#include <c10/util/Exception.h>

#include "cistern/base/error.h"
#include "cistern/base/interrupt.h"
#include "cistern/base/restart.h"
#include "cistern/base/terminal.h"
#include "cistern/bench/papers.h"
#include "cistern/cli/command.h"
#include "cistern/io/json_text.h"
#include "cistern/tensors/torch_error.h"
#include "cistern/train/processes.h"

namespace {

// The word that was not understood, with the nearest command or option; empty when there is none.
std::string Mistyped(const CLI::App& app) {
  const CLI::App* command = &app;
  while (!command->get_subcommands().empty()) command = command->get_subcommands().front();
  for (std::string word : app.remaining(true)) {
    const bool option = word.starts_with("-");
    word = word.substr(0, option ? word.find('=') : word.npos);
    std::vector<std::string> known;
    for (const CLI::Option* o : command->get_options()) {
      if (option && !o->get_lnames().empty()) known.push_back("--" + o->get_lnames().front());
    }
    for (const CLI::App* c : command->get_subcommands([](const CLI::App*) { return true; })) {
      if (!option) known.push_back(c->get_name());
    }
    if (!known.empty()) return cistern::UnknownName(option ? "option" : "command", word, known);
  }
  return "";
}

// The library reads a whole number beyond 64 bits as the largest one, and one below 0 as 2^64 less
// where the option takes none: the option that was given one, or nothing.
std::string BeyondRange(const CLI::App& app) {
  const CLI::App* command = &app;
  while (!command->get_subcommands().empty()) command = command->get_subcommands().front();
  for (const CLI::Option* option : command->get_options()) {
    const std::string type = option->get_type_name();
    const bool number = type.starts_with("INT") || type.starts_with("UINT") ||
                        type.starts_with("TOKENS") || type.starts_with("N,");
    for (const std::string& text : number ? option->results() : std::vector<std::string>()) {
      errno = 0;
      if (type.starts_with("UINT")) {
        if (text.find('-') != std::string::npos)
          return option->get_name() + " " + text + " is below 0";
        std::strtoull(text.c_str(), nullptr, 0);
      } else {
        std::strtoll(text.c_str(), nullptr, 0);
      }
      if (errno == ERANGE)
        return option->get_name() + " " + text + " is beyond what a whole number of 64 bits holds";
    }
  }
  return "";
}

// Of `cistern train --json`: why it failed is a line of JSON as well.
bool errors_as_json = false;

// Names in a message may come from a file; they must not steer the terminal.
int Report(const std::string& what, int code) {
  if (errors_as_json) std::printf("%s\n", cistern::JsonLine({{"error", what}}).c_str());
  std::fflush(stdout);
  std::fprintf(stderr, "cistern: %s\n", cistern::Printable(what).c_str());
  return code;
}

// The libraries' words, where no one above them has said it better.
int ReportForeign(const std::string& command, const std::exception& e) {
  if (dynamic_cast<const std::bad_alloc*>(&e) != nullptr)
    return Report("out of memory; lower the batch, the length or the model's size", 1);
  const std::string what = cistern::FirstLine(e);
  if (dynamic_cast<const c10::Error*>(&e) != nullptr) {
    const size_t asked = what.find("you tried to allocate ");
    if (asked != what.npos) {
      const std::string rest = what.substr(asked + 22);  // "123 bytes. Error code ..."
      return Report("out of memory: " + rest.substr(0, rest.find('.')) +
                        " more were requested; lower the batch, the length or the model's size",
                    1);
    }
    return Report("cistern " + command + " failed inside torch: " + what, 1);
  }
  if (const auto* file = dynamic_cast<const std::filesystem::filesystem_error*>(&e)) {
    const std::string second = file->path2().string();
    return Report("cannot work on " + file->path1().string() +
                      (second.empty() ? "" : " and " + second) + ": " + file->code().message(),
                  1);
  }
  const auto* system = dynamic_cast<const std::system_error*>(&e);
  if (system && system->code() == std::errc::resource_unavailable_try_again) {
    // At once: the end of torch's pool, of which a part was not started, would crash.
    std::_Exit(
        Report("no more threads may be started (ulimit -u, or the container's limit of "
               "processes); lower --threads",
               1));
  }
  return Report("cistern " + command + " failed inside a library: " + what, 1);
}

// What was printed has arrived, or the run has failed.
int Finish(int code) {
  errno = 0;
  std::cout.flush();
  const bool failed = std::fflush(stdout) != 0 || std::ferror(stdout) != 0 || !std::cout;
  if (!failed) return code;
  const int error = errno;
  return Report(std::string("cannot write to standard output") +
                    (error != 0 ? std::string(": ") + std::strerror(error) : ""),
                code == 0 ? 1 : code);
}

// An exception that nobody could catch, such as one thrown while another was on its way.
[[noreturn]] void Terminate() {
  if (const std::exception_ptr error = std::current_exception()) {
    try {
      std::rethrow_exception(error);
    } catch (const std::exception& e) {
      Report(std::string("stopped by an error inside: ") + cistern::FirstLine(e), 1);
    } catch (...) {
      Report("stopped by an error inside", 1);
    }
  }
  std::_Exit(1);
}

// Another program has cut short a file that is mapped into memory.
void FileGone(int) {
  constexpr char kText[] =
      "cistern: a file was cut short, or its disk failed, while it was being read\n";
  (void)!::write(STDERR_FILENO, kText, sizeof kText - 1);
  std::_Exit(1);
}

// Whether the words after the command name a figure of whole models.
bool NamesWholeModels(int argc, char** argv) {
  std::vector<std::string> names = {"models"};
  for (const cistern::bench::Protocol& p : cistern::bench::WholeModelProtocols())
    names.push_back(p.name);
  return std::any_of(argv + 3, argv + argc, [&](const char* word) {
    return std::find(names.begin(), names.end(), word) != names.end();
  });
}

// Commands whose threads share work for long: training, what measures it, and what reads a whole
// file with a trained model.
bool RunsForLong(int argc, char** argv) {
  const std::string command = argc > 1 ? argv[1] : "", what = argc > 2 ? argv[2] : "";
  return command == "train" || command == "compare" || command == "reproduce" ||
         command == "eval" || command == "predict" ||
         (command == "bench" &&
          (what == "model" || (what == "papers" && NamesWholeModels(argc, argv))));
}

// Commands of whose work nothing is left when nobody reads what they print.
bool PrintsAlone(const std::string& command) {
  return command == "generate" || command == "predict" || command == "info" || command == "verify";
}

// A descriptor of 0 to 2 that is closed would be given to the next file, and messages written into
// it. What takes its place fails when it is used, as a closed one does.
void TakeStandardDescriptors() {
  for (const int fd : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO}) {
    if (fcntl(fd, F_GETFD) < 0 && open("/dev/null", fd == STDIN_FILENO ? O_WRONLY : O_RDONLY) != fd)
      _exit(1);
  }
}

}  // namespace

int main(int argc, char** argv) {
  TakeStandardDescriptors();
  if (RunsForLong(argc, argv)) cistern::RestartForLongRuns(argv);
  // The name that top and killall know it by: started as /proc/self/exe it would be "exe".
  prctl(PR_SET_NAME, "cistern");
  // Freed blocks stay in the process: fresh large tensors would cost a page fault for every 4 KiB
  // otherwise.
  mallopt(M_MMAP_THRESHOLD, 1 << 30);
  mallopt(M_TRIM_THRESHOLD, 2000 << 20);
  mallopt(M_TOP_PAD, 64 << 20);
  std::set_terminate(Terminate);
  std::signal(SIGBUS, FileGone);
  std::signal(SIGXFSZ,
              SIG_IGN);  // a file beyond `ulimit -f` is an error of writing, like a full disk

  CLI::App app{
      "Linear-time attention with bounded memory: train a model with any mechanism on your data, "
      "compare mechanisms, generate text with\n"
      "constant memory per token. 'cistern COMMAND --help' explains a command."};
  app.set_version_flag("--version", std::string("cistern ") + CISTERN_VERSION);
  app.require_subcommand(1);
  app.failure_message([](const CLI::App*, const CLI::Error& e) {
    return std::string("cistern: ") + e.what() + "\n";
  });
  cistern::cli::Run run;
  cistern::cli::AddTrain(app, run);
  cistern::cli::AddCompare(app, run);
  cistern::cli::AddReproduce(app, run);
  cistern::cli::AddEval(app, run);
  cistern::cli::AddPredict(app, run);
  cistern::cli::AddGenerate(app, run);
  cistern::cli::AddAnalyze(app, run);
  cistern::cli::AddStatistics(app, run);
  cistern::cli::AddData(app, run);
  cistern::cli::AddImport(app, run);
  cistern::cli::AddInfo(app, run);
  cistern::cli::AddVerify(app, run);
  cistern::cli::AddBench(app, run);
  cistern::cli::AddCompletion(app, run);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& e) {
    const std::string mistyped = e.get_exit_code() == 0 ? "" : Mistyped(app);
    if (!mistyped.empty()) return Report(mistyped, 2);
    if (argc == 1) std::fprintf(stderr, "%s\n", app.help().c_str());
    return Finish(app.exit(e) == 0 ? 0 : 2);
  }
  if (const std::string beyond = BeyondRange(app); !beyond.empty()) return Report(beyond, 2);
  try {
    cistern::InstallInterruptHandler();
    const std::string command = app.get_subcommands().front()->get_name();
    if (command != "train") cistern::RequireOneProcess(command);
    if (!PrintsAlone(command)) std::signal(SIGPIPE, SIG_IGN);  // Finish says it
    errors_as_json = command == "train" && app.get_subcommands().front()->count("--json") > 0;
    return Finish(run());
  } catch (const cistern::UsageError& e) {
    return Report(e.what(), 2);
  } catch (const cistern::Error& e) {
    return Report(e.what(), 1);
  } catch (const std::exception& e) {
    return ReportForeign(app.get_subcommands().front()->get_name(), e);
  }
}
