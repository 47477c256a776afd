#include "cistern/cli/child_run.h"

#include <filesystem>
#include <sstream>

#include "cistern/base/error.h"
#include "cistern/base/interrupt.h"
#include "cistern/base/progress.h"
#include "cistern/base/subprocess.h"
#include "cistern/base/terminal.h"
#include "cistern/cli/experiment.h"
#include "cistern/cli/run_folder.h"
#include "cistern/io/atomic_file.h"
#include "cistern/io/checked_json.h"
#include "cistern/io/file_lock.h"
#include "cistern/io/metrics_csv.h"
#include "cistern/train/checkpoint.h"
#include "cistern/train/run_state.h"

namespace cistern::cli {
namespace {

constexpr int kInterrupted = 130, kRefused = 2;

bool FileExists(const std::string& path) {
  std::error_code ignored;
  return std::filesystem::exists(path, ignored);
}

// The program's last words in a log, without its name: "cistern: the loss is nan at step 3".
std::string LastWords(const std::string& log) {
  constexpr char kName[] = "cistern: ";
  std::string words;
  std::istringstream lines(ReadFile(log));
  for (std::string line; std::getline(lines, line);) {
    if (line.starts_with(kName)) words = line.substr(sizeof(kName) - 1);
  }
  return words;
}

// Why a run failed, by the last line that it printed (cli/main.cc); empty: it does not say.
std::string ErrorIn(const std::string& output) {
  std::string last;
  std::istringstream lines(output);
  for (std::string line; std::getline(lines, line);) last = line;
  const Json json = Json::parse(last, nullptr, /*allow_exceptions=*/false);
  const Json error = json.is_object() ? json.value("error", Json()) : Json();
  return error.is_string() ? Printable(error.get<std::string>()) : "";
}

// What the record of a run that has ended says of its data; null: it has no hash of them.
Json RecordedData(const std::string& folder) {
  const std::string path = folder + "/experiment.json";
  if (!FileExists(folder + "/result.json") || !FileExists(path)) return nullptr;
  const Json record = ReadCheckedJson(path, "the runs may be others");
  const Json data = record.value("data", Json::object());
  if (!data.is_object() || !data.value("xxh64", Json()).is_string()) return nullptr;
  return data;
}

// By the words of Trainer and the tasks' measures; cli/reproduce_test.cc holds them to it.
bool SaysNotFinite(const std::string& words) {
  for (const char* phrase : {"not finite", " is nan at step ", " is inf at step "}) {
    if (words.find(phrase) != std::string::npos) return true;
  }
  return false;
}

// By the words of FileLock: the run did not begin, since another process has its folder.
bool SaysInUse(const std::string& words) { return words.find(" is in use by ") != words.npos; }

// A process of a reproduction or comparison that was killed may still save its run.
void WaitForFolder(const std::string& folder) {
  const std::string lock = folder + "/lock";
  if (!FileExists(lock)) return;
  try {
    const FileLock wait(lock, "the run folder " + folder, FileLock::Wait::kYes);
  } catch (const Error&) {
    if (Interrupted()) throw InterruptedRun();
    throw;
  }
}

std::vector<std::string> TrainArgumentsOf(const ChildSettings& s) {
  const bool goes_on = s.resume && FileExists(s.folder + "/experiment.json");
  std::vector<std::string> words = {
      "train",    "--part", "--json", "--out", s.folder, "--threads", std::to_string(s.threads),
      "--device", s.device};
  if (Quiet() || s.keep_failures) words.push_back("--quiet");
  if (goes_on) {
    words.push_back("--resume");
  } else if (!s.file.empty()) {
    words.push_back(s.file);
  }
  for (const std::string& assignment : goes_on ? PlacesOfData(s) : s.set) {
    words.push_back("--set");
    words.push_back(assignment);
  }
  return words;
}

}  // namespace

std::vector<std::string> PlacesOfData(const ChildSettings& s) {
  Experiment experiment;
  ReadExperiment(experiment, s.file, s.set);
  const Json flat = experiment.Write().flatten();
  std::vector<std::string> places;
  for (const auto& [key, value] : flat.items()) {
    if (IsPlaceOfData(DottedKey(key)) && value.is_string())
      places.push_back(DottedKey(key) + "=" + AsAssigned(value.get<std::string>()));
  }
  return places;
}

bool ReadChildRun(const std::string& folder, ChildRun* run) {
  const std::string path = folder + "/result.json";
  if (!FileExists(path)) return false;
  const Json json = ReadCheckedJson(path);
  *run = ChildRun();
  run->kept = true;
  if (json.contains("failed")) {
    run->failed = json["failed"].is_string() ? json["failed"].get<std::string>() : "unknown";
    run->diverged = json.value("diverged", false);
  } else {
    run->result = json;
  }
  return true;
}

ChildRun RunTraining(const ChildSettings& s) {
  ChildRun run;
  if (s.resume && ReadChildRun(s.folder, &run)) return run;
  std::string log;
  if (s.keep_failures) {
    EnsureDirectory(s.folder);
    log = s.folder + "/log.txt";
  }
  WaitForFolder(s.folder);
  const ProcessResult child = RunProcess(ThisProgram(), TrainArgumentsOf(s), log);
  if (child.code == kInterrupted || (child.code != 0 && Interrupted())) throw InterruptedRun();
  const std::string done = s.folder + "/result.json";
  if (child.code == 0) {
    run.result = ParseJson(child.output, "the training run's result");
    WriteCheckedJson(done, run.result);
    return run;
  }
  if (!s.keep_failures) {
    const std::string error = ErrorIn(child.output);
    run.failed = error.empty() ? StrCat("the training run ended with exit code ", child.code)
                 : child.code == kRefused ? "the training run was refused: " + error
                                          : error;
    return run;
  }
  run.failed = LastWords(log);
  if (run.failed.empty()) run.failed = StrCat("the run ended with exit code ", child.code);
  if (SaysInUse(run.failed)) Fail(run.failed);
  run.diverged = SaysNotFinite(run.failed);
  WriteCheckedJson(done, {{"failed", run.failed}, {"diverged", run.diverged}});
  return run;
}

Series RunCurve(const std::string& folder, const std::string& name, const std::string& event,
                const std::string& x, const std::string& y) {
  Series series{name, {}, {}};
  if (!FileExists(folder + "/metrics.jsonl")) return series;
  if (const std::string problem = LogProblem(folder); !problem.empty()) Note(problem);
  ForEachLogLine(folder, [&](const Json& line) {
    if (line.value("event", Json()) != event) return;
    if (!line.contains(x) || !line.contains(y)) return;
    if (!line[x].is_number() || !line[y].is_number()) return;
    series.x.push_back(line[x].get<double>());
    series.y.push_back(line[y].get<double>());
  });
  return series;
}

void SameData::Require(const std::string& folder, const TaskOptions& task) {
  const Json was = RecordedData(folder);
  if (was.is_null()) return;
  TaskOptions options = task;
  Json& now = now_[options.Write().dump()];
  if (now.is_null()) {
    const std::unique_ptr<Task> made = options.Make();
    made->Prepare();
    now = made->DataSummary();
  }
  if (const std::string other = OtherData(was, now); !other.empty())
    FailUsage(folder, " has been trained on other data: ", other,
              "; put the data back as they were, or give another --out");
}

}  // namespace cistern::cli
