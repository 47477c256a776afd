// cistern verify: the conformance suite on this machine, or a trained model's forms against each
// other.
#include <ATen/Parallel.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/randn.h>
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
#include "cistern/base/interrupt.h"
#include "cistern/base/progress.h"
#include "cistern/cli/command.h"
#include "cistern/decode/lm_folder.h"
#include "cistern/decode/prompt.h"
#include "cistern/io/json_text.h"
#include "cistern/kernels/isa.h"
#include "cistern/tensors/device.h"
#include "cistern/verify/long_run.h"
#include "cistern/verify/model_check.h"
#include "cistern/verify/paths.h"
#include "cistern/verify/report.h"
#include "cistern/verify/suite.h"

namespace cistern::cli {
namespace {

struct VerifyCommand {
  Common common;
  std::vector<std::string> mechanisms, forms, properties, implementations;
  std::vector<int64_t> lengths;
  at::Device device = at::kCPU;
  bool quick = false, full = false;
  std::string folder, text;
  int64_t tokens = 0;
  int64_t long_tokens = 0, piece = 4096;
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
  settings.device = c.device;
  for (const int64_t length : c.lengths) {
    if (length < 0 || length > 16384) FailUsage("--lengths must be from 0 to 16384, got ", length);
  }
  if (!c.forms.empty()) settings.forms.clear();
  for (const std::string& form : c.forms) settings.forms.push_back(ParseForm(form));
  if (!c.implementations.empty()) settings.implementations.clear();
  for (const std::string& name : c.implementations)
    settings.implementations.push_back(ops::ParseImpl(name));
  return settings;
}

std::string CommandToRepeat(const VerifyCommand& c, const verify::Result& r) {
  std::string lengths;
  for (const int64_t length : c.lengths)
    lengths += StrCat(lengths.empty() ? " --lengths " : ",", length);
  return StrCat("cistern verify --mechanism ", r.mechanism, " --property ", r.property,
                r.form ? " --form " + FormName(*r.form) : "", " --implementation ",
                ops::ImplName(r.implementation), lengths,
                c.device.is_cpu() ? "" : " --device " + c.common.device, c.full ? " --full" : "",
                " --seed ", c.common.seed);
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
  std::vector<std::string> paths;
  for (const std::string& name : c.mechanisms) {
    if (verify::IsPath(name)) {
      paths.push_back(name);
    } else {
      mechanisms.push_back(&FindMechanism(name, verify::PathNames()));
    }
  }
  const bool of_mechanisms = !c.forms.empty() || !c.lengths.empty();
  if (!paths.empty() && of_mechanisms)
    FailUsage("--form and --lengths are of mechanisms; ", paths[0], " has neither, omit them");
  if (c.mechanisms.empty()) {
    mechanisms = Mechanisms();
    if (!of_mechanisms && settings.device.is_cpu()) paths = verify::PathNames();
  }
  std::vector<const verify::Property*> properties;
  for (const std::string& name : c.properties) properties.push_back(&verify::FindProperty(name));
  if (properties.empty()) {
    for (const verify::Property& p : verify::Properties()) properties.push_back(&p);
  }
  const int64_t total = verify::CountChecks(mechanisms, properties, settings) +
                        verify::CountPathChecks(paths, properties, settings);
  if (total == 0 && !settings.device.is_cpu())
    FailUsage(
        "nothing to check: on another device than the CPU the mechanisms' property `device` is "
        "checked, with --implementation kernel alone");
  if (total == 0)
    FailUsage(
        "nothing to check: the properties asked for look at the kernels alone; add "
        "--implementation kernel");
  const auto begin = std::chrono::steady_clock::now();
  ProgressBar bar({.total = total, .label = "verify", .unit = "checks"});
  int64_t done = 0, failed = 0;
  const auto hear = [&](const verify::Result& r) {
    failed += r.outcome.failed();
    bar.Update(++done, r.mechanism + " " + r.property +
                           (failed > 0 ? StrCat(", ", failed, " failed") : ""));
    return !Interrupted();
  };
  std::vector<verify::Result> results = verify::RunSuite(mechanisms, properties, settings, hear);
  if (!Interrupted()) {
    for (verify::Result& r : verify::RunPaths(paths, properties, settings, hear))
      results.push_back(std::move(r));
  }
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
    std::snprintf(line, sizeof line,
                  "%lld checks with %lld comparisons in %.1f s, %lld failed (seed %llu, SIMD %s, "
                  "%d threads)%s\n",
                  static_cast<long long>(done), static_cast<long long>(comparisons), Since(begin),
                  static_cast<long long>(failed), static_cast<unsigned long long>(settings.seed),
                  ActiveIsa().c_str(), at::get_num_threads(), done < total ? "; interrupted" : "");
    std::cout << line;
  }
  if (done < total) return 130;
  return failed > 0 ? 1 : 0;
}

// As many tokens as are asked for or fit in a stack of this form.
int64_t TokensWanted(const VerifyCommand& c, const ModelConfig& config, Form form) {
  const int64_t fits = config.Stack(form).options().max_length,
                wanted = c.tokens > 0 ? c.tokens : std::min<int64_t>(fits, c.full ? 512 : 192);
  if (wanted > fits)
    FailUsage("--tokens ", wanted, " is more than the model's max_length of ", fits);
  return wanted;
}

at::Tensor TokensOf(const VerifyCommand& c, const LmFolder& lm) {
  PromptReader reader(*lm.tokenizer, FileSource(c.text));
  const std::vector<int32_t> ids = reader.Take(TokensWanted(c, lm.model->config(), Form::kCausal));
  CISTERN_CHECK(ids.size() >= 16, c.text, " is too short: ", ids.size(),
                " tokens; at least 16 are needed");
  return at::tensor(std::vector<int64_t>(ids.begin(), ids.end()), at::kLong);
}

using HearModel = std::function<bool(const verify::ModelResult&)>;

struct ModelResults {
  std::vector<verify::ModelResult> all;
  int64_t tokens;
  std::string source;  // of the tokens
};

ModelResults CheckOnText(const VerifyCommand& c, const HearModel& hear) {
  const LmFolder lm = OpenLmFolder(c.folder), twin = OpenLmFolder(c.folder, "float64");
  const at::Tensor ids = TokensOf(c, lm);
  return {verify::CheckModel(*lm.model, *twin.model, ids, c.full, hear), ids.size(0), c.text};
}

// Two copies of the model of the folder, the second in double.
std::pair<std::shared_ptr<Model>, std::shared_ptr<Model>> TwoCopies(const std::string& folder) {
  std::pair<std::shared_ptr<Model>, std::shared_ptr<Model>> copies = {LoadModel(folder),
                                                                      LoadModel(folder)};
  copies.second->to(at::kDouble);
  return copies;
}

// Of a model that extends a state from the empty one.
ModelResults CheckOnRandomTokens(const VerifyCommand& c, const ModelConfig& config,
                                 const HearModel& hear) {
  const auto [model, twin] = TwoCopies(c.folder);
  auto &one = dynamic_cast<StatefulModel&>(*model), &other = dynamic_cast<StatefulModel&>(*twin);
  at::manual_seed(c.common.seed);
  const int64_t count = TokensWanted(c, config, Form::kCausal),
                inputs = config.Own().value("inputs", int64_t{0});
  const at::Tensor tokens = inputs > 0 ? at::randn({count, inputs}, at::kFloat)
                                       : at::randint(config.TargetVocabSize(), {count}, at::kLong);
  return {verify::CheckModel(one, other, tokens, c.full, hear), count,
          inputs > 0 ? "random values" : "random ids"};
}

ModelResults CheckEncoderDecoder(const VerifyCommand& c, const ModelConfig& config,
                                 const HearModel& hear) {
  const auto [model, twin] = TwoCopies(c.folder);
  auto &lm = dynamic_cast<LanguageModel&>(*model), &double_lm = dynamic_cast<LanguageModel&>(*twin);
  at::manual_seed(c.common.seed);
  const int64_t count = TokensWanted(c, config, Form::kCausal);
  // A source of another length than the target's.
  const int64_t fits = config.Stack(Form::kBidirectional).options().max_length,
                source_count = std::min(fits, std::max<int64_t>(8, count * 2 / 3));
  const at::Tensor ids = at::randint(lm.vocab_size(), {count}, at::kLong),
                   source = at::randint(config.vocab_size, {source_count}, at::kLong);
  return {verify::CheckModel(lm, double_lm, ids, c.full, hear, source), count,
          StrCat("random ids, for a source of ", source_count)};
}

ModelResults CheckRows(const VerifyCommand& c, const ModelConfig& config, const HearModel& hear) {
  const auto [model, twin] = TwoCopies(c.folder);
  at::manual_seed(c.common.seed);
  const int64_t count = TokensWanted(c, config, Form::kBidirectional),
                channels = config.Own().value("channels", int64_t{0});
  const at::Tensor input = channels > 0 ? at::randn({count, channels}, at::kFloat)
                                        : at::randint(config.vocab_size, {count}, at::kLong);
  return {verify::CheckRows(*model, *twin, input, hear), count,
          channels > 0 ? "random values" : "random ids"};
}

int VerifyModel(const VerifyCommand& c) {
  const ModelConfig config = ReadFolderConfig(c.folder);
  const ModelInfo& info = config.info();
  if (!c.text.empty() && (!info.extends || info.encodes))
    FailUsage(c.folder, " holds a model of kind ", config.kind,
              ", which is checked on random input; omit --text");
  ProgressBar bar({.total = 0, .label = "verify", .unit = "checks"});
  int64_t done = 0;
  bool stopped = false;
  const HearModel hear = [&](const verify::ModelResult& r) {
    bar.Update(++done, r.property);
    stopped = Interrupted();
    return !stopped;
  };
  const auto [results, tokens, source] = info.encodes      ? CheckEncoderDecoder(c, config, hear)
                                         : !c.text.empty() ? CheckOnText(c, hear)
                                         : info.Has(Form::kCausal)
                                             ? CheckOnRandomTokens(c, config, hear)
                                             : CheckRows(c, config, hear);
  bar.Finish();
  int64_t failed = 0, applied = 0;
  Json rows = Json::array();
  for (const verify::ModelResult& r : results) {
    failed += r.outcome.failed();
    applied += r.outcome.kind != verify::Outcome::Kind::kNotApplicable;
    Json row = {{"property", r.property}};
    row.update(verify::OutcomeJson(r.outcome));
    rows.push_back(std::move(row));
  }
  if (c.common.json) {
    const Json out = {{"model", c.folder},
                      {"tokens", tokens},
                      {"failed", failed},
                      {"interrupted", stopped},
                      {"results", rows}};
    std::cout << JsonLine(out) << std::endl;
  } else {
    std::printf("%s: %s, on %lld tokens of %s\n\n", c.folder.c_str(), config.Summary().c_str(),
                static_cast<long long>(tokens), source.c_str());
    for (const verify::ModelResult& r : results) {
      const verify::Outcome& o = r.outcome;
      if (o.kind == verify::Outcome::Kind::kNotApplicable) {
        std::printf("%-5s %-16s does not apply: %s\n", "-", r.property.c_str(), o.reason.c_str());
        continue;
      }
      std::printf("%-5s %-16s error %-6s tolerance %-6s %s\n", o.failed() ? "FAIL" : "ok",
                  r.property.c_str(), verify::ErrorText(o.error).c_str(),
                  verify::ErrorText(o.tolerance).c_str(), r.description.c_str());
      if (o.failed()) std::printf("      %s\n", verify::FailureText(o).c_str());
    }
    std::printf("\n%lld checks, %lld failed\n", static_cast<long long>(applied),
                static_cast<long long>(failed));
  }
  if (stopped) return 130;
  return failed > 0 ? 1 : 0;
}

int VerifyLong(const VerifyCommand& c) {
  if (!c.forms.empty() || !c.properties.empty() || !c.implementations.empty() || !c.lengths.empty())
    FailUsage(
        "--long decodes with the kernels against the reference; of the other options only "
        "--mechanism and --full apply to it");
  if (c.long_tokens < 1000 || c.piece < 1)
    FailUsage("--long must be at least 1000 and --piece at least 1");
  std::vector<const MechanismInfo*> mechanisms;
  for (const std::string& name : c.mechanisms) {
    mechanisms.push_back(&FindMechanism(name));
    RequireForm(*mechanisms.back(), Form::kCausal);
    if (!verify::DecodesForEver(*mechanisms.back()))
      FailUsage("[", name, "] its state grows with the text; --long is for bounded ones");
  }
  if (mechanisms.empty()) {
    for (const MechanismInfo* info : Mechanisms()) {
      if (verify::DecodesForEver(*info)) mechanisms.push_back(info);
    }
  }
  verify::LongSettings settings;
  settings.tokens = c.long_tokens, settings.piece = c.piece, settings.seed = c.common.seed;
  int64_t runs = 0, finished = 0, failed = 0;
  for (const MechanismInfo* info : mechanisms) runs += c.full ? int64_t(info->cases.size()) : 1;
  ProgressBar bar({.total = runs * settings.tokens, .label = "verify", .unit = "tokens"});
  bool stopped = false;
  Json rows = Json::array();
  for (const MechanismInfo* info : mechanisms) {
    for (size_t i = 0; i < (c.full ? info->cases.size() : 1) && !stopped; ++i) {
      const auto result = verify::RunLong(*info, info->cases[i], settings, [&](int64_t tokens) {
        bar.Update(finished * settings.tokens + tokens, info->name);
        return !(stopped = Interrupted());
      });
      if (stopped) break;
      ++finished;
      failed += result.failed();
      Json errors = Json::object();
      std::string line = StrCat(info->name, i > 0 ? " " + result.options.dump() : "", ":");
      for (const auto& point : result.points) {
        errors[std::to_string(point.tokens)] = point.error;
        line += StrCat("  ", point.tokens, " ", verify::ErrorText(point.error));
      }
      rows.push_back({{"mechanism", info->name},
                      {"options", result.options},
                      {"failed", result.failed()},
                      {"errors", errors},
                      {"seconds", result.seconds}});
      if (!c.common.json) std::printf("%-5s %s\n", result.failed() ? "FAIL" : "ok", line.c_str());
      std::fflush(stdout);
    }
  }
  bar.Finish();
  if (c.common.json) {
    const Json out = {{"tokens", settings.tokens},
                      {"piece", settings.piece},
                      {"seed", settings.seed},
                      {"tolerance", verify::kLongTolerance},
                      {"failed", failed},
                      {"interrupted", stopped},
                      {"results", rows}};
    std::cout << JsonLine(out) << std::endl;
  } else {
    std::printf(
        "\n%lld mechanisms, %lld failed: relative error of float after that many tokens, tolerance "
        "%s\n",
        static_cast<long long>(finished), static_cast<long long>(failed),
        verify::ErrorText(verify::kLongTolerance).c_str());
  }
  if (stopped) return 130;
  return failed > 0 ? 1 : 0;
}

int RunVerify(const CLI::App& command, VerifyCommand c) {
  ApplyCommon(c.common);
  const bool decodes = command.count("--long") > 0;
  c.device = ActiveDevice();
  SetActiveDevice(at::kCPU);  // what is compared with is made here
  if (!c.device.is_cpu() && (!c.folder.empty() || decodes))
    FailUsage("--device checks mechanisms on it, without --model and --long");
  if (c.quick && c.full) FailUsage("give --quick or --full, not both");
  if (c.folder.empty() && !c.text.empty())
    FailUsage("--text goes with --model: a language model is checked on your text");
  if (decodes && !c.folder.empty())
    FailUsage("--long checks mechanisms, --model a model: give one of them");
  if (c.folder.empty() && c.tokens != 0) FailUsage("--tokens goes with --model");
  if (decodes) return VerifyLong(c);
  if (c.folder.empty()) return VerifyMechanisms(c);
  if (!c.mechanisms.empty() || !c.forms.empty() || !c.properties.empty() ||
      !c.implementations.empty() || !c.lengths.empty())
    FailUsage(
        "--model checks all that the model does; --mechanism, --form, --property, --implementation "
        "and --lengths do not go with it");
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
  CLI::App* sub = app.add_subcommand(
      "verify",
      "check on this machine that every form of every mechanism computes the same numbers");
  sub->add_option("--mechanism,--mechanisms", c->mechanisms,
                  "only these; the fused paths, which are checked by themselves too, are "
                  "exact_attention, attention_of_slots, linear_attention, gelu and vocab_loss")
      ->delimiter(',')
      ->type_name("NAME,...");
  sub->add_option("--form,--forms", c->forms, "only these: bidirectional, causal, cross")
      ->delimiter(',')
      ->type_name("FORM,...");
  sub->add_option("--property,--properties", c->properties, "only these of the list below")
      ->delimiter(',')
      ->type_name("NAME,...");
  sub->add_option("--implementation,--implementations", c->implementations,
                  "only these: kernel, composite, reference")
      ->delimiter(',')
      ->type_name("NAME,...");
  sub->add_option("--lengths", c->lengths, "sequence lengths that the definition is compared at")
      ->delimiter(',')
      ->type_name("N,...");
  sub->add_flag("--quick", c->quick, "one to two minutes on one core (the default)");
  sub->add_flag("--full", c->full,
                "longer sequences, a cut at every point, many more random shapes");
  sub->add_option("--model", c->folder,
                  "check a trained model instead, on random input, or a language model on your own "
                  "text")
      ->type_name("FOLDER");
  sub->add_option("--text", c->text, "--model: a text for a language model; -: standard input")
      ->type_name("FILE");
  sub->add_option("--tokens", c->tokens, "--model: how many tokens; 0: 192, or 512 with --full");
  sub->add_option("--long", c->long_tokens,
                  "decode this many tokens instead: how far does float drift from double?")
      ->type_name("TOKENS");
  sub->add_option("--piece", c->piece,
                  "--long: tokens extended at a time between the comparisons; 1: token by token")
      ->needs("--long");
  AddCommon(*sub, c->common);
  // More threads than one would only wait for each other (the property "threads" brings its own).
  c->common.threads = 1;
  sub->get_option("--threads")
      ->description("threads to use: 1 unless told, for the tensors are tiny; 0: all cores");
  sub->add_option("--device", c->common.device,
                  "check instead that this device (cuda, cuda:1, ...) computes as the CPU does");
  sub->footer(
      "Examples:\n"
      "  cistern verify                                          all mechanisms, a matrix of the "
      "measured errors\n"
      "  cistern verify --mechanism latte --full --json\n"
      "  cistern verify --form causal --property pieces,future\n"
      "  cistern verify --model runs/kjv/latte --text my.txt     one model: whole, in pieces, "
      "token by token, padded, packed, from a file\n"
      "  cistern verify --device cuda                            mechanisms on a GPU against the "
      "CPU\n"
      "  cistern verify --long 10000000                          ten million tokens of decoding: "
      "the drift of float, in minutes\n"
      "\nA cell is the error that came closest to its tolerance (relative, root mean square) and "
      "that tolerance,\n"
      "0 where every bit agrees, FAIL, or the letter of a reason why the property does not apply.\n"
      "The exit code is 1 if anything failed.\n" +
      PropertyHelp());
  sub->callback([c, sub, &run] { run = [c, sub] { return RunVerify(*sub, *c); }; });
}

}  // namespace cistern::cli
