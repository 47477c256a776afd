#include "cistern/bench/ops.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <memory>
#include <new>

#include "cistern/attention/head_groups.h"
#include "cistern/io/json_text.h"
#include "cistern/kernels/peak.h"
#include "cistern/tensors/torch_error.h"

namespace cistern::bench {

std::vector<Case> Sweep::Cases() const {
  std::vector<Case> cases;
  Case c;
  for (const int64_t t : threads)
    for (const Way way : ways)
      for (const Pass pass : passes)
        for (const int64_t length : lengths)
          for (const int64_t b : batches)
            for (const int64_t h : heads)
              for (const int64_t w : widths)
                for (const Layout layout : layouts)
                  for (const auto& m : mechanisms)
                    for (const at::ScalarType dtype : dtypes)
                      for (const ops::Impl impl : implementations)
                        for (const std::string& isa : isas) {
                          if (way == Way::kDecode && pass == Pass::kBoth && passes.size() > 1)
                            continue;
                          c = {m.first, m.second, way, pass, length, b,     h,
                               w,       dtype,    t,   isa,  impl,   layout};
                          cases.push_back(c);
                        }
  return cases;
}

double Peaks::MultiplyAdds(const Case& c) {
  const bool wide = c.dtype == at::kDouble;
  auto& [what, peak] = known_[StrCat(c.threads, " ", c.isa, wide ? " 64" : " 32")];
  if (peak == 0) {
    const Setting setting(c);
    peak = wide ? MultiplyAddPeak<double>() : MultiplyAddPeak<float>();
    what = {{"threads", c.threads},
            {"isa", c.isa},
            {"dtype", wide ? "float64" : "float32"},
            {"gflops", peak}};
  }
  return peak;
}

double Peaks::Bandwidth(const Case& c) {
  auto& [what, peak] = known_[StrCat("triad ", c.threads)];
  if (peak == 0) {
    const Setting setting(c);
    peak = TriadBandwidth();
    what = {{"threads", c.threads}, {"gb_per_s", peak}};
  }
  return peak;
}

Json Peaks::Written() const {
  Json all = Json::array();
  for (const auto& [key, known] : known_) all.push_back(known.first);
  return all;
}

std::string ReasonOf(const std::exception_ptr& thrown, bool alone) {
  const char* const out_of_memory = "out of memory; lower the length, the batch or the width";
  try {
    std::rethrow_exception(thrown);
  } catch (const UsageError& e) {
    if (alone) throw;
    return StrCat("not supported: ", e.what());
  } catch (const std::bad_alloc&) {
    return out_of_memory;
  } catch (const c10::Error& e) {
    const std::string what = FirstLine(e);
    return what.find("you tried to allocate") != what.npos ? out_of_memory : "failed: " + what;
  } catch (const Error& e) {
    return StrCat("failed: ", e.what());
  }
}

namespace {

// A case that is ready to be timed, and its place.
struct Ready {
  size_t place;
  std::unique_ptr<Core> core;
  int64_t peak_bytes = 0;
};

void AddFigures(const Case& c, const Ready& ready, Peaks& peaks, Row* row) {
  const double seconds = row->ms.median * 1e-3;
  const double tokens = double(c.batch) * (c.way == Way::kDecode ? 1.0 : double(c.length));
  Json& f = row->figures;
  f["tokens_per_s"] = tokens / seconds;
  if (c.way == Way::kDecode) f["ns_per_head"] = 1e9 * seconds / (tokens * double(c.heads));
  if (const double operations = ready.core->Operations(); operations > 0) {
    f["operations"] = operations;
    f["gflops"] = operations / seconds * 1e-9;
    f["of_peak"] = operations / seconds * 1e-9 / peaks.MultiplyAdds(c);
  }
  f["gb_per_s"] = ready.core->Bytes() / seconds * 1e-9;
  f["of_bandwidth"] = ready.core->Bytes() / seconds * 1e-9 / peaks.Bandwidth(c);
  if (ready.peak_bytes > 0) f["peak_bytes"] = ready.peak_bytes;
  if (const int64_t bytes = ready.core->StateBytes(); bytes > 0) f["state_bytes"] = bytes;
}

// Checks it; null, with the row's reason, where it cannot be timed.
std::unique_ptr<Core> Prepare(const Case& c, Inputs& inputs, const MeasureSettings& settings,
                              bool alone, Row* row, int64_t* peak_bytes) {
  const Setting setting(c);
  try {
    auto core = std::make_unique<Core>(c, inputs, settings.seed);
    const verify::Outcome outcome = core->Check();
    if (outcome.failed()) {
      row->wrong = true;
      row->skipped = StrCat("WRONG VALUES, not timed: relative error ", outcome.error,
                            ", tolerance ", outcome.tolerance, ", ", outcome.where);
      return nullptr;
    }
    if (settings.memory) *peak_bytes = core->PeakBytesOfRun();
    return core;
  } catch (...) {
    row->skipped = ReasonOf(std::current_exception(), alone);
    return nullptr;
  }
}

}  // namespace

std::vector<Row> Measure(const std::vector<Case>& cases, const MeasureSettings& settings,
                         Peaks& peaks) {
  std::vector<Row> rows(cases.size());
  const auto stopped = [&] { return settings.stop && settings.stop(); };
  for (size_t begin = 0; begin < cases.size() && !stopped();) {
    size_t end = begin;
    while (end < cases.size() && cases[end].Contest() == cases[begin].Contest()) ++end;
    Inputs inputs;
    std::vector<Ready> ready;
    for (size_t i = begin; i < end && !stopped(); ++i) {
      if (settings.progress) settings.progress(cases[i], int64_t(i));
      Ready r{i, nullptr, 0};
      r.core = Prepare(cases[i], inputs, settings, cases.size() == 1, &rows[i], &r.peak_bytes);
      if (r.core) ready.push_back(std::move(r));
    }
    if (!ready.empty()) {
      const Setting setting(cases[begin]);
      std::vector<Contestant> contestants;
      for (const Ready& r : ready) contestants.push_back(r.core->Run());
      std::vector<Spread> spreads;
      try {
        spreads = TimeAlternating(contestants, settings.timer, settings.stop);
      } catch (const UsageError&) {
        throw;
      } catch (...) {
        for (const Ready& r : ready)
          rows[r.place].skipped = ReasonOf(std::current_exception(), cases.size() == 1);
      }
      for (size_t i = 0; i < spreads.size(); ++i) {
        Row& row = rows[ready[i].place];
        row.ms = spreads[i];
        if (row.ms.runs > 0) AddFigures(cases[ready[i].place], ready[i], peaks, &row);
      }
    }
    begin = end;
  }
  for (size_t i = 0; i < cases.size(); ++i) {
    rows[i].what = cases[i].What();
    if (rows[i].skipped.empty() && rows[i].ms.runs == 0) rows[i].skipped = "interrupted";
  }
  return rows;
}

namespace {

// "32,64,[1,2],a" at the commas outside brackets.
std::vector<std::string> SplitValues(const std::string& text) {
  std::vector<std::string> parts = {""};
  int depth = 0;
  for (const char c : text) {
    depth += c == '[' || c == '{' ? 1 : c == ']' || c == '}' ? -1 : 0;
    if (c == ',' && depth == 0) {
      parts.emplace_back();
    } else {
      parts.back() += c;
    }
  }
  return parts;
}

// JSON, or a bare word.
Json ValueOfText(const std::string& text) {
  try {
    return ParseJson(text, "--set");
  } catch (const Error&) {
    return text;
  }
}

}  // namespace

void AddOptions(Sweep& sweep, const std::vector<std::string>& assignments) {
  for (const std::string& assignment : assignments) {
    const size_t equals = assignment.find('='), dot = assignment.find('.');
    if (equals == assignment.npos || dot == assignment.npos || dot > equals)
      FailUsage("--set takes MECHANISM.OPTION=VALUE, such as latte.latents=64, got ", assignment);
    const std::string name = assignment.substr(0, dot),
                      key = assignment.substr(dot + 1, equals - dot - 1);
    std::vector<std::pair<const MechanismInfo*, Json>> out;
    bool found = false;
    std::vector<std::string> names;
    for (const auto& [info, options] : sweep.mechanisms) {
      names.push_back(info->name);
      const bool group = IsHeadGroups(info->name) && InHeadGroups(info->name, name);
      if (info->name != name && !group) {
        out.emplace_back(info, options);
        continue;
      }
      found = true;
      for (const std::string& text : SplitValues(assignment.substr(equals + 1))) {
        Json with = options;
        (group ? with[name] : with)[key] = ValueOfText(text);
        if (!group) {
          const std::vector<std::string> known = info->options().Names();
          if (std::find(known.begin(), known.end(), key) == known.end())
            throw UsageError("--set " + assignment + ": " + UnknownName("option", key, known));
        }
        out.emplace_back(info, with);
      }
    }
    if (!found)
      throw UsageError("--set " + assignment + ": " + UnknownName("mechanism", name, names));
    sweep.mechanisms = std::move(out);
  }
}

const std::vector<Column>& OpsColumns() {
  using Kind = Column::Kind;
  static const std::vector<Column> columns = {
      {"ms", "ms", Kind::kMilliseconds},         {"spread", "spread", Kind::kShare},
      {"tokens_per_s", "tokens/s", Kind::kRate}, {"ns_per_head", "ns/head", Kind::kRate},
      {"gflops", "GFLOP/s", Kind::kRate},        {"of_peak", "of peak", Kind::kShare},
      {"gb_per_s", "GB/s", Kind::kRate},         {"peak_bytes", "memory", Kind::kBytes},
      {"state_bytes", "state", Kind::kBytes}};
  return columns;
}

}  // namespace cistern::bench
