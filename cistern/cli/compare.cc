// cistern compare: trains one model per mechanism with equal size and time, measures quality,
// speed, memory and decoding, writes a report.
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <ctime>
#include <filesystem>

#include "cistern/base/error.h"
#include "cistern/base/parallel.h"
#include "cistern/base/progress.h"
#include "cistern/cli/command.h"
#include "cistern/cli/experiment.h"
#include "cistern/decode/generate.h"
#include "cistern/decode/lm_folder.h"
#include "cistern/decode/measure.h"
#include "cistern/io/atomic_file.h"
#include "cistern/io/html_report.h"
#include "cistern/io/jsonl.h"
#include "cistern/io/svg_plot.h"
#include "cistern/kernels/isa.h"

namespace cistern::cli {
namespace {

// What compare trains unless --set says otherwise; the same for every mechanism. The rate suits a
// few minutes of training: for hours take less.
const std::vector<std::string> kDefaults = {"model.dim=128",
                                            "model.layers=2",
                                            "model.heads=4",
                                            "model.conv=4",
                                            "model.init_std=0.0884",
                                            "model.embedding_std=0.1",
                                            "model.attention_options={\"abc_mlp\":{\"slots\":16}}",
                                            "task.length=256",
                                            "train.batch=8",
                                            "train.lr=12e-3"};

struct CompareArguments {
  Common common;
  std::string text, file, out;
  std::vector<std::string> mechanisms = {"softmax", "latte", "abc_mlp", "window:2+latte:2"}, set;
  double seconds = 120;
  int64_t sample_tokens = 120, decode_tokens = 4000;
};

struct Row {
  std::string mechanism, folder;
  bool bounded = true;
  Json result;  // what `cistern train --json` printed
  std::vector<DecodePoint> decode;
};

// Runs `cistern train` in a process of its own, so that peak memory is that model's alone. Returns
// the JSON it printed.
Json TrainInChild(const std::vector<std::string>& arguments) {
  int fds[2];
  CISTERN_CHECK(pipe(fds) == 0, "cannot make a pipe");
  std::vector<std::string> words = {"cistern", "train"};
  words.insert(words.end(), arguments.begin(), arguments.end());
  std::vector<char*> argv;
  for (std::string& w : words) argv.push_back(w.data());
  argv.push_back(nullptr);
  const pid_t child = fork();
  CISTERN_CHECK(child >= 0, "cannot start a process for training");
  if (child == 0) {
    dup2(fds[1], STDOUT_FILENO);
    close(fds[0]);
    close(fds[1]);
    execv("/proc/self/exe", argv.data());
    _exit(127);
  }
  close(fds[1]);
  std::string output;
  char buffer[4096];
  for (;;) {
    const ssize_t n = read(fds[0], buffer, sizeof buffer);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) break;
    output.append(buffer, size_t(n));
  }
  close(fds[0]);
  int status = 0;
  while (waitpid(child, &status, 0) < 0 && errno == EINTR) {
  }
  const int code = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  if (code == 130) {
    Interrupted() = true;
    return {};
  }
  if (code == 2) throw UsageError("the training run was refused (see above)");
  CISTERN_CHECK(code == 0, "the training run failed with exit code ", code, " (see above)");
  return Json::parse(output);
}

std::string Number(double x, int digits) {
  char text[48];
  std::snprintf(text, sizeof text, "%.*f", digits, NanUnsigned(x));
  return text;
}

// "window:2+latte:2" lies in window2-latte2.
std::string FolderName(std::string mechanism) {
  std::erase(mechanism, ':');
  std::replace(mechanism.begin(), mechanism.end(), '+', '-');
  return mechanism;
}

std::string Bytes(double bytes) {
  if (bytes < 10e3) return Number(bytes, 0) + " B";
  if (bytes < 10e6) return Number(bytes / 1e3, 0) + " kB";
  return Number(bytes / 1e6, 0) + " MB";
}

double BitsPerByte(const Row& row) {
  return row.result.at("test").at("bits_per_byte").get<double>();
}

HtmlTable ResultTable(const std::vector<Row>& rows) {
  const std::string later = "at " + std::to_string(rows[0].decode.back().position);
  HtmlTable table;
  table.header = {"mechanism",      "bits/byte",         "parameters",
                  "tokens/s",       "peak memory",       "state at start",
                  "state " + later, "ms/token at start", "ms/token " + later};
  for (const Row& row : rows) {
    const DecodePoint &first = row.decode.front(), &last = row.decode.back();
    table.rows.push_back({row.mechanism, Number(BitsPerByte(row), 3),
                          std::to_string(row.result["parameters"].get<int64_t>()),
                          Number(row.result["tokens_per_s"].get<double>(), 0),
                          Bytes(row.result["peak_bytes"].get<double>()),
                          Bytes(double(first.state_bytes)), Bytes(double(last.state_bytes)),
                          Number(first.milliseconds, 3), Number(last.milliseconds, 3)});
    if (table.best_row < 0 || BitsPerByte(row) < BitsPerByte(rows[size_t(table.best_row)]))
      table.best_row = int(table.rows.size()) - 1;
  }
  return table;
}

void PrintTable(const HtmlTable& table) {
  std::vector<size_t> widths(table.header.size());
  auto widen = [&](const std::vector<std::string>& cells) {
    for (size_t i = 0; i < cells.size(); ++i) widths[i] = std::max(widths[i], cells[i].size());
  };
  widen(table.header);
  for (const auto& row : table.rows) widen(row);
  auto print = [&](const std::vector<std::string>& cells) {
    for (size_t i = 0; i < cells.size(); ++i) {
      std::printf(i == 0 ? "%-*s" : "  %*s", int(widths[i]), cells[i].c_str());
    }
    std::printf("\n");
  };
  print(table.header);
  for (const auto& row : table.rows) print(row);
}

std::vector<std::string> Fairness(const Experiment& e, const CompareArguments& a,
                                  const std::vector<Row>& rows) {
  int64_t fewest = rows[0].result["parameters"].get<int64_t>(), most = fewest;
  for (const Row& row : rows) {
    fewest = std::min(fewest, row.result["parameters"].get<int64_t>());
    most = std::max(most, row.result["parameters"].get<int64_t>());
  }
  return {StrCat("Equal for all: the text and its tokenizer, ", e.model.layers, " layers of width ",
                 e.model.dim, " with ", e.model.heads, " heads",
                 e.model.conv > 0 ? StrCat(", a causal convolution of ", e.model.conv,
                                           " taps on every projection")
                                  : std::string(),
                 ", length ", e.task.length, ", batch ", e.train.batch,
                 ", optimizer and schedule, seed, ", Number(a.seconds, 0),
                 " s of training time on ", NumThreads(), " threads (", ActiveIsa(), "), ",
                 e.dtype == "bfloat16" ? "linear maps in bfloat16, the rest in float32."
                                       : StrCat("dtype ", e.dtype, ".")),
          StrCat("Parameters differ by ", Number(100.0 * (double(most) / double(fewest) - 1.0), 1),
                 " %. Training alone is timed; evaluation is not."),
          "bits/byte: on the last 5 % of the text, in consecutive blocks of the training length "
          "without carried context. Lower is better. One "
          "seed ranks nothing closer than about 0.02."};
}

std::string WriteReport(const std::string& folder, const Experiment& e, const CompareArguments& a,
                        const std::vector<Row>& rows, const std::string& sample_title,
                        const std::string& sample) {
  HtmlReport report("Attention mechanisms compared",
                    StrCat(a.text, ", ", Number(a.seconds, 0), " s each"));
  report.Table(ResultTable(rows));
  for (const std::string& line : Fairness(e, a, rows)) report.Paragraph(line);
  LineChart valid{"Learning curve", "seconds of training", "bits per byte (validation)", {}};
  LineChart loss{"Training loss", "step", "nats per token", {}};
  LineChart time{"Decoding time", "tokens before", "ms per token", {}};
  LineChart state{"Decoding state", "tokens before", "bytes", {}};
  state.log_y = true;
  time.y_from_zero = true;
  for (const Row& row : rows) {
    Series v{row.mechanism, {}, {}}, l = v, t = v, s = v;
    double seconds = 0;
    for (const Json& line : ReadJsonl(row.folder + "/metrics.jsonl")) {
      if (line["event"] == "step") {
        seconds = line["seconds"].get<double>();
        l.x.push_back(line["step"].get<double>());
        l.y.push_back(line["loss"].get<double>());
      } else if (line["event"] == "valid") {
        v.x.push_back(seconds);
        v.y.push_back(line["bits_per_byte"].get<double>());
      }
    }
    for (const DecodePoint& p : row.decode) {
      t.x.push_back(double(p.position));
      t.y.push_back(p.milliseconds);
      s.x.push_back(double(p.position));
      s.y.push_back(double(p.state_bytes));
    }
    valid.series.push_back(v);
    loss.series.push_back(l);
    time.series.push_back(t);
    state.series.push_back(s);
  }
  report.Heading("Learning").Svg(RenderSvg(valid)).Svg(RenderSvg(loss));
  report.Heading("Decoding").Svg(RenderSvg(time)).Svg(RenderSvg(state));
  report.Heading(sample_title).Preformatted(sample);
  Experiment copy = e;
  report.Details("The experiment", ExperimentToml(copy));
  const std::string path = folder + "/report.html";
  report.Write(path);
  return path;
}

int RunCompare(CLI::App& command, CompareArguments a) {
  ApplyCommon(a.common);
  if (a.text.empty() && a.file.empty()) FailUsage("name a text file or folder to learn from");
  if (!(a.seconds > 0)) FailUsage("--seconds must be above 0, got ", a.seconds);
  std::vector<std::string> set = kDefaults;
  if (!a.text.empty()) set.push_back("task.text=" + a.text);
  set.insert(set.end(), a.set.begin(), a.set.end());
  set.push_back(StrCat("train.seconds=", a.seconds));
  set.push_back("train.steps=0");
  set.push_back("seed=" + std::to_string(a.common.seed));
  if (command.count("--dtype") > 0) {
    set.push_back("dtype=" + a.common.dtype);
  } else if (a.file.empty() && HasBFloat16()) {
    set.push_back("dtype=bfloat16");
  }
  Experiment experiment;
  ReadExperiment(experiment, a.file, set);
  if (experiment.task.kind != "lm")
    FailUsage("compare measures language models; for ", experiment.task.kind,
              " train each mechanism with cistern train");
  for (const std::string& m : a.mechanisms) FindMechanism(m);
  if (a.out.empty()) {
    char stamp[32];
    const std::time_t now = std::time(nullptr);
    std::strftime(stamp, sizeof stamp, "%Y%m%d-%H%M%S", std::localtime(&now));
    a.out = std::string("runs/compare-") + stamp;
  }
  EnsureDirectory(a.out);
  if (!Quiet() && !a.common.json) {
    std::printf("%s: %s s for each of %zu mechanisms, results in %s\n",
                experiment.task.text.c_str(), Number(a.seconds, 0).c_str(), a.mechanisms.size(),
                a.out.c_str());
    std::fflush(stdout);
  }
  std::vector<Row> rows;
  for (const std::string& mechanism : a.mechanisms) {
    Row row{
        mechanism, a.out + "/" + FolderName(mechanism), FindMechanism(mechanism).bounded, {}, {}};
    std::vector<std::string> arguments = {"--json", "--out", row.folder, "--threads",
                                          std::to_string(a.common.threads)};
    if (Quiet()) arguments.push_back("--quiet");
    if (!a.file.empty()) arguments.push_back(a.file);
    std::vector<std::string> assignments = set;
    assignments.push_back("model.attention=" + mechanism);
    for (const std::string& s : assignments) {
      arguments.push_back("--set");
      arguments.push_back(s);
    }
    row.result = TrainInChild(arguments);
    if (Interrupted()) return 130;
    LmFolder lm = OpenLmFolder(row.folder);
    row.decode =
        MeasureDecoding(*lm.model, {0, a.decode_tokens / 4, a.decode_tokens / 2, a.decode_tokens},
                        64, &Interrupted());
    if (Interrupted()) return 130;
    if (!Quiet() && !a.common.json) {
      std::printf("  %-16s %s bits/byte, %s tokens/s, %ld parameters\n", mechanism.c_str(),
                  Number(BitsPerByte(row), 3).c_str(),
                  Number(row.result["tokens_per_s"].get<double>(), 0).c_str(),
                  long(row.result["parameters"].get<int64_t>()));
      std::fflush(stdout);
    }
    rows.push_back(std::move(row));
  }
  const Row* best = nullptr;  // of those with bounded memory, when there is one
  for (const Row& row : rows) {
    if (!best || (row.bounded && !best->bounded) ||
        (row.bounded == best->bounded && BitsPerByte(row) < BitsPerByte(*best)))
      best = &row;
  }
  LmFolder lm = OpenLmFolder(best->folder);
  Generator generator(lm.model, lm.tokenizer);
  GenerateOptions generate;
  generate.max_tokens = a.sample_tokens;
  generate.sampler.temperature = 0.8;
  generate.sampler.top_p = 0.95;
  generate.sampler.seed = a.common.seed;
  const std::string sample = generator.Run("", generate).text;
  const std::string title = "Written by " + best->mechanism;
  const std::string path = WriteReport(a.out, experiment, a, rows, title, sample);
  Json json = {{"out", a.out}, {"report", path}, {"best_bounded", best->mechanism}};
  for (const Row& row : rows) {
    Json r = row.result;
    for (const DecodePoint& p : row.decode) {
      r["decode"].push_back({{"position", p.position},
                             {"ms_per_token", p.milliseconds},
                             {"state_bytes", p.state_bytes}});
    }
    json["mechanisms"][row.mechanism] = r;
  }
  WriteFileAtomically(a.out + "/compare.json", json.dump(2) + "\n");
  if (a.common.json) {
    std::printf("%s\n", json.dump().c_str());
    return 0;
  }
  std::printf("\n");
  PrintTable(ResultTable(rows));
  std::printf("\n");
  for (const std::string& line : Fairness(experiment, a, rows)) std::printf("%s\n", line.c_str());
  std::printf("\n%s:\n%s\n\n", title.c_str(), sample.c_str());
  std::printf("report: %s\nmodels: cistern generate %s --prompt \"In the beginning\"\n",
              path.c_str(), best->folder.c_str());
  return 0;
}

}  // namespace

void AddCompare(CLI::App& app, Run& run) {
  auto a = std::make_shared<CompareArguments>();
  CLI::App* command = app.add_subcommand(
      "compare", "train one model per mechanism, equal in size and time, and report");
  command->footer(
      "Examples:\n"
      "  cistern compare my.txt --seconds 60\n"
      "  cistern compare my.txt --mechanisms latte,abc_mlp --set model.dim=256 --set "
      "task.length=1024\n"
      "Every key of cistern train --list can be set; each holds for all mechanisms.");
  command->add_option("text", a->text, "text file or folder");
  command->add_option("--experiment", a->file, "TOML file to begin with");
  command->add_option("--mechanisms", a->mechanisms, "mechanisms to compare")->delimiter(',');
  command->add_option("--seconds", a->seconds, "training time of each")
      ->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);
  command->add_option("--out", a->out, "folder for the models and report.html");
  command->add_option("--set", a->set, "KEY=VALUE for all of them; may be repeated")
      ->take_all()
      ->allow_extra_args(false);
  command->add_option("--sample-tokens", a->sample_tokens, "tokens of text written at the end")
      ->check(CLI::Range(0, 1 << 20));
  command
      ->add_option("--decode-tokens", a->decode_tokens, "position of the last decoding measurement")
      ->check(CLI::Range(4, 1 << 24));
  AddCommon(*command, a->common);
  command->callback(
      [a, command, &run] { run = [a, command] { return RunCompare(*command, *a); }; });
}

}  // namespace cistern::cli
