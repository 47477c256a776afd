// The lists of `cistern bench ops` on the command line.
#include <algorithm>

#include "cistern/base/parallel.h"
#include "cistern/cli/bench_command.h"
#include "cistern/cli/experiment.h"
#include "cistern/kernels/isa.h"

namespace cistern::cli {

void AddSweepOptions(CLI::App& command, SweepOptions& o) {
  const auto words = [&](const char* name, std::vector<std::string>& to, const char* help) {
    command.add_option(name, to, help)->delimiter(',')->allow_extra_args(false);
  };
  const auto numbers = [&](const char* name, std::vector<int64_t>& to, const char* help,
                           int64_t most) {
    command.add_option(name, to, help)
        ->delimiter(',')
        ->allow_extra_args(false)
        ->check(CLI::Range(int64_t{1}, most));
  };
  words("--mechanisms", o.mechanisms, "names, or head groups such as window:4+latte:4; all");
  words("--forms", o.forms,
        "causal, bidirectional, cross, decode (one token after LENGTH); causal");
  words("--passes", o.passes, "forward, forward+backward; both");
  numbers("--lengths", o.lengths, "tokens of a row; 1024", int64_t{1} << 30);
  numbers("--batches", o.batches, "rows; of decode: sequences at once; 1", 1 << 20);
  numbers("--heads", o.heads, "heads; 8", 4096);
  numbers("--widths", o.widths, "of a head; 64", 4096);
  words("--dtypes", o.dtypes, "float32, float64, bfloat16; float32");
  numbers("--threads", o.threads, "threads; all cores", 1024);
  words("--isas", o.isas, "SIMD targets of the kernels (cistern info); the one in use");
  words("--implementations", o.implementations,
        "kernel, composite, reference; the one in use (CISTERN_IMPL)");
  words("--layouts", o.layouts,
        "inputs in memory as [B,H,T,w] (heads_first) or as layers leave them (heads_last); "
        "heads_first");
  command
      .add_option("--set", o.set,
                  "MECHANISM.OPTION=VALUE, or several values, such as latte.latents=64,128; may be "
                  "repeated")
      ->take_all()
      ->allow_extra_args(false);
}

bench::Sweep SweepOf(const SweepOptions& o) {
  bench::Sweep sweep;
  if (o.mechanisms.empty() || o.mechanisms == std::vector<std::string>{"all"}) {
    for (const MechanismInfo* info : Mechanisms())
      sweep.mechanisms.emplace_back(info, Json::object());
  } else {
    for (const std::string& name : o.mechanisms)
      sweep.mechanisms.emplace_back(&FindMechanism(name), Json::object());
  }
  const auto take = [](const std::vector<std::string>& names, const auto& known, const char* what,
                       auto& to) {
    if (!names.empty()) to.clear();
    for (const std::string& name : names) to.push_back(ValueOf(name, known, what));
  };
  take(o.forms, bench::Ways(), "form", sweep.ways);
  take(o.passes, bench::Passes(), "pass", sweep.passes);
  take(o.dtypes, bench::Dtypes(), "dtype", sweep.dtypes);
  take(o.layouts, bench::Layouts(), "layout", sweep.layouts);
  if (!o.lengths.empty()) sweep.lengths = o.lengths;
  if (!o.batches.empty()) sweep.batches = o.batches;
  if (!o.heads.empty()) sweep.heads = o.heads;
  if (!o.widths.empty()) sweep.widths = o.widths;
  sweep.threads = o.threads.empty() ? std::vector<int64_t>{NumThreads()} : o.threads;
  sweep.isas = o.isas.empty() ? std::vector<std::string>{ActiveIsa()} : o.isas;
  const std::vector<std::string> supported = SupportedIsas();
  for (const std::string& isa : sweep.isas) {
    if (std::find(supported.begin(), supported.end(), isa) == supported.end())
      throw UsageError("--isas: " + UnknownName("SIMD target of this machine", isa, supported));
  }
  sweep.implementations = {ops::ActiveImpl()};
  if (!o.implementations.empty()) sweep.implementations.clear();
  for (const std::string& name : o.implementations)
    sweep.implementations.push_back(ops::ParseImpl(name));
  std::vector<std::string> set;
  for (const std::string& assignment : o.set) set.push_back(PlainAssignment(assignment));
  bench::AddOptions(sweep, set);
  return sweep;
}

}  // namespace cistern::cli
