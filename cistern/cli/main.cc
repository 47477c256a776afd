// The program: cistern train | eval | predict | generate | compare | data | info | verify.
#include <malloc.h>

#include <cstdio>
#include <exception>
#include <new>
#include <string>
#include <vector>

#include <c10/util/Exception.h>

#include "cistern/base/error.h"
#include "cistern/cli/command.h"
#include "cistern/train/trainer.h"

namespace {

// torch appends a C++ stack trace to its messages; people want the first line.
std::string FirstLine(const std::string& text) { return text.substr(0, text.find('\n')); }

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

int Report(const char* what, int code) {
  std::fflush(stdout);
  std::fprintf(stderr, "cistern: %s\n", what);
  return code;
}

}  // namespace

int main(int argc, char** argv) {
  // Freed blocks stay in the process: fresh large tensors would cost a page fault for every 4 KiB
  // otherwise.
  mallopt(M_MMAP_THRESHOLD, 1 << 30);
  mallopt(M_TRIM_THRESHOLD, 2000 << 20);
  mallopt(M_TOP_PAD, 64 << 20);

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
  cistern::cli::AddEval(app, run);
  cistern::cli::AddPredict(app, run);
  cistern::cli::AddGenerate(app, run);
  cistern::cli::AddData(app, run);
  cistern::cli::AddInfo(app, run);
  cistern::cli::AddVerify(app, run);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& e) {
    const std::string mistyped = e.get_exit_code() == 0 ? "" : Mistyped(app);
    if (!mistyped.empty()) return Report(mistyped.c_str(), 2);
    return app.exit(e) == 0 ? 0 : 2;
  }
  try {
    cistern::InstallInterruptHandler();
    return run();
  } catch (const cistern::UsageError& e) {
    return Report(e.what(), 2);
  } catch (const cistern::Error& e) {
    return Report(e.what(), 1);
  } catch (const c10::Error& e) {
    return Report(FirstLine(e.what_without_backtrace()).c_str(), 1);
  } catch (const std::bad_alloc&) {
    return Report("out of memory; lower the batch, the length or the model's size", 1);
  } catch (const std::exception& e) {
    return Report(e.what(), 1);
  }
}
