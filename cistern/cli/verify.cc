// cistern verify: the conformance suite on this machine, or a trained model's forms against each other.
#include <ATen/Parallel.h>
#include <ATen/ops/tensor.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <iostream>
#include <memory>
#include <sstream>

#include "cistern/base/error.h"
#include "cistern/base/progress.h"
#include "cistern/cli/command.h"
#include "cistern/decode/lm_folder.h"
#include "cistern/decode/prompt.h"
#include "cistern/io/json_text.h"
#include "cistern/kernels/isa.h"
#include "cistern/train/trainer.h"
#include "cistern/verify/model_check.h"
#include "cistern/verify/report.h"
#include "cistern/verify/suite.h"

namespace cistern::cli {
namespace {

struct VerifyCommand {
  Common common;
  std::vector<std::string> mechanisms, forms, properties, implementations;
  std::vector<int64_t> lengths;
  bool quick = false, full = false;
  std::string folder, text;
  int64_t tokens = 0;
};

Form ParseForm(const std::string& name) {
  std::vector<std::string> names;
  for (const Form form : {Form::kBidirectional, Form::kCausal, Form::kCross}) {
    if (FormName(form) == name) return form;
    names.push_back(FormName(form));
  }
  throw UsageError(UnknownName("form", name, names));
}

verify::Settings SettingsOf(const VerifyCommand& c) {
  verify::Settings settings;
  settings.full = c.full;
  settings.seed = c.common.seed;
  settings.lengths = c.lengths;
  for (const int64_t length : c.lengths) {
    if (length < 0 || length > 16384) FailUsage("--lengths must be from 0 to 16384, got ", length);
  }
  if (!c.forms.empty()) settings.forms.clear();
  for (const std::string& form : c.forms) settings.forms.push_back(ParseForm(form));
  if (!c.implementations.empty()) settings.implementations.clear();
  for (const std::string& name : c.implementations) settings.implementations.push_back(ops::ParseImpl(name));
  return settings;
}

std::string CommandToRepeat(const VerifyCommand& c, const verify::Result& r) {
  return StrCat("cistern verify --mechanism ", r.mechanism, " --property ", r.property, " --implementation ",
                ops::ImplName(r.implementation), c.full ? " --full" : "", " --seed ", c.common.seed);
}

int TerminalColumns() {
  winsize size{};
  return ::ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col >= 40 ? size.ws_col : 100;
}

verify::MatrixStyle StyleOf() {
  const bool terminal = ::isatty(STDOUT_FILENO) == 1;
  return {TerminalColumns(), terminal && std::getenv("NO_COLOR") == nullptr};
}

double Since(std::chrono::steady_clock::time_point begin) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

int VerifyMechanisms(const VerifyCommand& c) {
  const verify::Settings settings = SettingsOf(c);
  std::vector<const MechanismInfo*> mechanisms;
  for (const std::string& name : c.mechanisms) mechanisms.push_back(&FindMechanism(name));
  if (mechanisms.empty()) mechanisms = Mechanisms();
  std::vector<const verify::Property*> properties;
  for (const std::string& name : c.properties) properties.push_back(&verify::FindProperty(name));
  if (properties.empty()) {
    for (const verify::Property& p : verify::Properties()) properties.push_back(&p);
  }
  const int64_t total = verify::CountChecks(mechanisms, properties, settings);
  if (total == 0) FailUsage("nothing to check: the properties asked for look at the kernels alone; add --implementation kernel");
  const auto begin = std::chrono::steady_clock::now();
  ProgressBar bar({.total = total, .label = "verify", .unit = "checks"});
  int64_t done = 0, failed = 0;
  const auto results = verify::RunSuite(mechanisms, properties, settings, [&](const verify::Result& r) {
    failed += r.outcome.failed();
    bar.Update(++done, r.mechanism + " " + r.property + (failed > 0 ? StrCat(", ", failed, " failed") : ""));
    return !Interrupted();
  });
  bar.Finish();
  int64_t comparisons = 0;
  for (const verify::Result& r : results) comparisons += r.outcome.comparisons;
  if (c.common.json) {
    const Json out = {{"seed", settings.seed},
                      {"simd", ActiveIsa()},
                      {"checks", done},
                      {"failed", failed},
                      {"comparisons", comparisons},
                      {"seconds", Since(begin)},
                      {"interrupted", done < total},
                      {"results", verify::ResultsJson(results)}};
    std::cout << JsonLine(out) << std::endl;
  } else {
    std::cout << verify::MatrixText(results, StyleOf());
    for (const verify::Result& r : results) {
      if (r.outcome.failed()) {
        std::cout << "\nTo repeat the first: " << CommandToRepeat(c, r) << "\n\n";
        break;
      }
    }
    char line[200];
    std::snprintf(line, sizeof line, "%lld checks with %lld comparisons in %.1f s, %lld failed (seed %llu, SIMD %s, %d threads)%s\n",
                  static_cast<long long>(done), static_cast<long long>(comparisons), Since(begin), static_cast<long long>(failed),
                  static_cast<unsigned long long>(settings.seed), ActiveIsa().c_str(), at::get_num_threads(),
                  done < total ? "; interrupted" : "");
    std::cout << line;
  }
  if (done < total) return 130;
  return failed > 0 ? 1 : 0;
}

// The first tokens of a text, as many as are asked for or fit.
at::Tensor TokensOf(const VerifyCommand& c, const LmFolder& lm) {
  const int64_t fits = lm.model->config().max_length, wanted = c.tokens > 0 ? c.tokens : std::min<int64_t>(fits, c.full ? 512 : 192);
  if (wanted > fits) FailUsage("--tokens ", wanted, " is more than the model's max_length of ", fits);
  PromptReader reader(*lm.tokenizer, FileSource(c.text));
  const std::vector<int32_t> ids = reader.Take(wanted);
  CISTERN_CHECK(ids.size() >= 16, c.text, " is too short: ", ids.size(), " tokens; at least 16 are needed");
  return at::tensor(std::vector<int64_t>(ids.begin(), ids.end()), at::kLong);
}

int VerifyModel(const VerifyCommand& c) {
  const LmFolder lm = OpenLmFolder(c.folder), twin = OpenLmFolder(c.folder, "float64");
  const at::Tensor ids = TokensOf(c, lm);
  ProgressBar bar({.total = 0, .label = "verify", .unit = "checks"});
  int64_t done = 0;
  bool stopped = false;
  const auto results = verify::CheckModel(*lm.model, *twin.model, ids, c.full, [&](const verify::ModelResult& r) {
    bar.Update(++done, r.property);
    stopped = Interrupted();
    return !stopped;
  });
  bar.Finish();
  int64_t failed = 0;
  Json rows = Json::array();
  for (const verify::ModelResult& r : results) {
    failed += r.outcome.failed();
    Json row = {{"property", r.property}};
    row.update(verify::OutcomeJson(r.outcome));
    rows.push_back(std::move(row));
  }
  if (c.common.json) {
    const Json out = {{"model", c.folder}, {"tokens", ids.size(0)}, {"failed", failed}, {"interrupted", stopped}, {"results", rows}};
    std::cout << JsonLine(out) << std::endl;
  } else {
    std::printf("%s: %s, on %lld tokens of %s\n\n", c.folder.c_str(), lm.model->config().Summary().c_str(),
                static_cast<long long>(ids.size(0)), c.text.c_str());
    for (const verify::ModelResult& r : results) {
      const verify::Outcome& o = r.outcome;
      std::printf("%-5s %-16s error %-6s tolerance %-6s %s\n", o.failed() ? "FAIL" : "ok", r.property.c_str(),
                  verify::ErrorText(o.error).c_str(), verify::ErrorText(o.tolerance).c_str(), r.description.c_str());
      if (o.failed()) std::printf("      %s\n", verify::FailureText(o).c_str());
    }
    std::printf("\n%lld checks, %lld failed\n", static_cast<long long>(results.size()), static_cast<long long>(failed));
  }
  if (stopped) return 130;
  return failed > 0 ? 1 : 0;
}

int RunVerify(VerifyCommand c) {
  // The tensors are tiny: more threads than one only wait for each other (the property "threads" brings its own).
  if (c.common.threads == 0) c.common.threads = 1;
  ApplyCommon(c.common);
  if (c.quick && c.full) FailUsage("give --quick or --full, not both");
  if (c.common.dtype != "float32") FailUsage("verify compares float32 with float64 by itself; leave --dtype away");
  if (c.folder.empty() != c.text.empty()) FailUsage("--model and --text belong together: a trained model is checked on a text of yours");
  if (c.folder.empty()) {
    if (c.tokens != 0) FailUsage("--tokens goes with --model");
    return VerifyMechanisms(c);
  }
  if (!c.mechanisms.empty() || !c.forms.empty() || !c.properties.empty() || !c.implementations.empty() || !c.lengths.empty())
    FailUsage("--model checks all forms of that model; --mechanism, --form, --property, --implementation and --lengths do not go with it");
  if (c.tokens != 0 && c.tokens < 16) FailUsage("--tokens must be at least 16, got ", c.tokens);
  return VerifyModel(c);
}

std::string PropertyHelp() {
  std::string text = "\nProperties:\n";
  for (const verify::Property& p : verify::Properties())
    text += "  " + p.name + std::string(12 - p.name.size(), ' ') + p.description + "\n";
  return text;
}

}  // namespace

void AddVerify(CLI::App& app, Run& run) {
  auto c = std::make_shared<VerifyCommand>();
  CLI::App* sub = app.add_subcommand("verify", "Prove on this machine that every form of every mechanism computes the same numbers");
  sub->add_option("--mechanism,--mechanisms", c->mechanisms, "only these")->delimiter(',')->type_name("NAME,...");
  sub->add_option("--form,--forms", c->forms, "only these: bidirectional, causal, cross")->delimiter(',')->type_name("FORM,...");
  sub->add_option("--property,--properties", c->properties, "only these of the list below")->delimiter(',')->type_name("NAME,...");
  sub->add_option("--implementation,--implementations", c->implementations, "only these: kernel, composite, reference")
      ->delimiter(',')
      ->type_name("NAME,...");
  sub->add_option("--lengths", c->lengths, "sequence lengths that the definition is compared at")->delimiter(',')->type_name("N,...");
  sub->add_flag("--quick", c->quick, "within a minute (the default)");
  sub->add_flag("--full", c->full, "longer sequences, a cut at every point, many more random shapes");
  sub->add_option("--model", c->folder, "check a trained language model instead, on your own text")->type_name("FOLDER");
  sub->add_option("--text", c->text, "--model: the text; -: standard input")->type_name("FILE");
  sub->add_option("--tokens", c->tokens, "--model: how many tokens of it; 0: 192, or 512 with --full");
  AddCommon(*sub, c->common);
  sub->footer(
      "Examples:\n"
      "  cistern verify                                          all mechanisms, a matrix of the measured errors\n"
      "  cistern verify --mechanism latte --full --json\n"
      "  cistern verify --form causal --property pieces,future\n"
      "  cistern verify --model runs/kjv/latte --text my.txt     one model: whole, in pieces, token by token, padded, packed, from a file\n"
      "\nA cell is the error that came nearest to its tolerance (relative, root mean square), 0 where every bit agrees, FAIL, or the "
      "letter\n"
      "of a reason why the property does not apply. The exit code is 1 when anything failed.\n" +
      PropertyHelp());
  sub->callback([c, &run] { run = [c] { return RunVerify(*c); }; });
}

}  // namespace cistern::cli
