#include "cistern/train/run_state.h"

#include <algorithm>
#include <iterator>
#include <limits>
#include <map>

#include "cistern/base/error.h"
#include "cistern/base/hash.h"
#include "cistern/io/json_text.h"

namespace cistern {
namespace {

constexpr char kChecksum[] = "checksum";

// Of [train]; all but the rate and the schedule leave the weights of each step as they are.
constexpr std::string_view kMayChange[] = {
    "steps",           "seconds",          "lr",
    "min_lr",          "schedule",         "warmup",
    "warmup_init",     "schedule_from",    "schedule_steps",
    "schedule_every",  "schedule_power",   "schedule_period",
    "schedule_growth", "schedule_shrink",  "eval_every",
    "eval_tokens",     "log_every",        "log_memory",
    "patience",        "checkpoint_every", "checkpoint_seconds",
    "final_test",      "parallel"};
bool In(const auto& list, std::string_view name) {
  return std::find(std::begin(list), std::end(list), name) != std::end(list);
}

std::string Shown(const Json& json) {
  const std::string line = JsonLine(json);
  return line.size() > 60 ? line.substr(0, 57) + "..." : line;
}

// "model.attention_options.latte.latents" -> value, for every value that is no object.
void Flatten(const std::string& prefix, const Json& json, std::map<std::string, Json>* out) {
  for (const auto& [key, value] : json.items()) {
    if (value.is_object() && !value.empty()) {
      Flatten(prefix + key + ".", value, out);
    } else {
      (*out)[prefix + key] = value;
    }
  }
}

// Settings of the run itself: all of it but the data, the machine, and what is only printed.
bool DecidesRun(const std::string& group) {
  return group != "data" && group != "environment" && group != "published";
}

// The value of a key that was not written: the default, or null.
Json Unsaid(const std::map<std::string, Json>& defaults, const std::string& key) {
  const auto found = defaults.find(key);
  return found == defaults.end() ? Json() : found->second;
}

bool SaysNothing(const Json& value) {
  return value.is_null() || (value.is_structured() && value.empty()) || value == "" ||
         value == false;
}

}  // namespace

Fields RunState::Describe() {
  constexpr int64_t kMost = std::numeric_limits<int64_t>::max();
  Fields f;
  f.Add("step", &step, "updates done", {0, kMost});
  f.Add("total_steps", &total_steps, "updates of the run; 0: not known yet", {0, kMost});
  f.Add("trained_seconds", &trained_seconds, "time of them", {0.0, 1e12});
  f.Add("has_best", &has_best, "there is a best model");
  f.Add("best", &best, "its metric");
  f.Add("best_metrics", &best_metrics, "all of its metrics");
  f.Add("best_file", &best_file, "XXH64 of its file");
  f.Add("evals_without_better", &evals_without_better, "evaluations since then", {0, kMost});
  f.Add("evaluation_due", &evaluation_due, "the evaluation of this step was interrupted");
  f.Add("measured_step", &measured_step, "of the last evaluation", {-1, kMost});
  f.Add("peak_bytes", &peak_bytes, "most memory so far", {0, kMost});
  f.Add("window_loss", &window_loss, "sum since the last logged line");
  f.Add("window_seconds", &window_seconds, "sum since the last logged line", {0.0, 1e12});
  f.Add("window_tokens", &window_tokens, "sum since the last logged line", {0, kMost});
  f.Add("window_steps", &window_steps, "steps since the last logged line", {0, kMost});
  f.Add("log_bytes", &log_bytes, "length of metrics.jsonl", {0, kMost});
  f.Add("log_xxh64", &log_xxh64, "XXH64 of metrics.jsonl");
  f.Add("seed", &seed, "of the run", {0, kMost});
  f.Add("experiment", &experiment, "what was asked for");
  return f;
}

std::string RunStateText(RunState state) {
  Json json = state.Describe().Write();
  json[kChecksum] = HexText(XxHash64(JsonLine(json)));
  return JsonFileText(json);
}

RunState ParseRunState(std::string_view text, const std::string& name) {
  Json json = ParseJson(text, name);
  CISTERN_CHECK(json.is_object() && json.contains("step") && json.contains("total_steps") &&
                    json.contains(kChecksum),
                name, ": step, total_steps or ", kChecksum,
                " is missing; the file is broken, or of an older cistern");
  const Json found = json[kChecksum];
  json.erase(kChecksum);
  CISTERN_CHECK(found == HexText(XxHash64(JsonLine(json))), name,
                ": the contents do not fit their checksum; the file is corrupt");
  RunState state;
  try {
    state.Describe().Read(json, name);
  } catch (const UsageError& e) {
    throw Error(e.what());  // a file of ours, not a configuration
  }
  CISTERN_CHECK(state.total_steps == 0 || state.step <= state.total_steps, name, ": step ",
                state.step, " is beyond total_steps ", state.total_steps);
  return state;
}

bool IsPlaceOfData(std::string_view key) {
  constexpr std::string_view kPlaces[] = {"text", "data",   "cache",        "valid",
                                          "test", "target", "valid_target", "test_target"};
  const size_t first = key.find_first_of("./"), last = key.find_last_of("./");
  if (last == key.npos) return false;
  const std::string_view group = key.substr(0, first), name = key.substr(last + 1);
  if (group == "data") return name == "text" || name == "data";  // data.valid: how many rows
  if (name == "valid" && key.substr(0, last).ends_with("image")) return false;  // which of them
  return group == "task" && In(kPlaces, name);
}

std::vector<std::string> CompareRuns(const Json& asked, const Json& begun, const Json& defaults,
                                     const std::string& run) {
  std::map<std::string, Json> now, before, unset;
  Flatten("", asked, &now);
  Flatten("", begun, &before);
  Flatten("", defaults, &unset);
  std::vector<std::string> changes, data;  // data: keys that differ, the hash first
  std::map<std::string, Json> keys = before;
  keys.insert(now.begin(), now.end());
  for (const auto& [key, ignored] : keys) {
    const auto old = before.find(key), fresh = now.find(key);
    const std::string group = key.substr(0, key.find('.')), name = key.substr(key.rfind('.') + 1);
    if (!DecidesRun(group) && fresh == now.end()) continue;
    const Json was = old == before.end() ? Unsaid(unset, key) : old->second,
               is = fresh == now.end() ? Unsaid(unset, key) : fresh->second;
    if (was == is) continue;
    const bool place = IsPlaceOfData(key);
    if (key == "data.notes" || group == "published" || (group == "data" && place)) continue;
    if (group == "environment" || (group == "train" && In(kMayChange, name)) || place) {
      changes.push_back(StrCat(key, "=", Shown(is), " (it was ", Shown(was), ")"));
      continue;
    }
    if (group == "data") {
      if (old == before.end() && name != "xxh64") continue;  // an earlier version did not say it
      data.insert(name == "xxh64" ? data.begin() : data.end(), key);
      continue;
    }
    if (SaysNothing(was) && SaysNothing(is)) continue;
    const auto said = [](const Json& value) {
      return value.is_null() ? std::string("unset") : Shown(value);
    };
    FailUsage(run, " was begun with ", key, "=", said(was), ", and ", said(is),
              " is asked for now: that is another run; leave it away, or give another --out");
  }
  if (!data.empty()) {
    const auto old = before.find(data[0]);
    std::string than;  // the data's place, where the record names it
    for (const char* key : {"data.text", "data.data"}) {
      if (now[key].is_string()) than = StrCat(" than ", now[key].get<std::string>(), " holds");
    }
    FailUsage(run, " was begun with other data", than, ": ", data[0].substr(5), " is ",
              Shown(now[data[0]]), " now and was ",
              Shown(old == before.end() ? Json() : old->second),
              "; put the data back as they were, or give another --out for a new run");
  }
  return changes;
}

}  // namespace cistern
