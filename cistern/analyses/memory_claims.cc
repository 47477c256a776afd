#include "cistern/analyses/memory_claims.h"

#include <cmath>

#include "cistern/attention/mechanism.h"
#include "cistern/base/format.h"

namespace cistern {
namespace {

constexpr double kNearlyUniform = 0.9;  // of ln(keys)

using Numbers = MemorySummary::Numbers;

double Of(const Mean& m) { return m.count > 0 ? m.sum / double(m.count) : std::nan(""); }
std::string Text(double x) { return std::isnan(x) ? "-" : Significant(x, 3); }
std::string Text(const Mean& m) { return Text(Of(m)); }

std::string Named(const std::string& claim, const MemorySummary& m) {
  return m.label.empty() ? claim : m.label + ": " + claim;
}

bool HasMemory(const MemorySummary& m) { return !m.mechanism.empty(); }
bool IsConvLuna(const std::string& mechanism) {
  return mechanism == "conv_luna" || mechanism == "only_scaling" || mechanism == "only_filtering";
}
bool IsConv(const MemorySummary& m) { return IsConvLuna(m.mechanism); }
bool IsLuna(const MemorySummary& m) { return m.mechanism == "luna"; }
std::string Temperature(const MemorySummary& m) {
  if (!IsConv(m)) return "";
  return m.options.value("temperature", m.mechanism == "only_filtering" ? "sqrt" : "learn");
}
// What the products of packing are divided by; empty: it forms none that are divided.
std::string Divisor(const MemorySummary& m) {
  if (IsConv(m)) return Temperature(m);
  if (!HasMemory(m)) return m.options.value("scale", "sqrt");
  if (m.mechanism == "shared_workspace") return "unit";
  return IsLuna(m) || m.mechanism == "set_transformer" ? "sqrt" : "";
}
int64_t Kernel(const MemorySummary& m) {
  return m.mechanism == "only_scaling" ? 1 : m.options.value("kernel", int64_t{4});
}

// Whether packing has what P000 gives against the degradation: then the explanation, which is of
// packing as Luna does it, says nothing of it.
bool IsRemedied(const MemorySummary& m) {
  return IsConv(m) && (Temperature(m) != "sqrt" || Kernel(m) > 1);
}

// The means of the models that `is` picks.
template <class Pick, class Get>
Mean Over(const std::vector<MemorySummary>& models, const Pick& is, const Get& get) {
  Mean mean;
  for (const MemorySummary& m : models) {
    if (is(m)) mean.AddMean(get(m));
  }
  return mean;
}

PaperClaim Against(const std::string& claim, const std::string& one, const Mean& a,
                   const std::string& other, const Mean& b, bool above,
                   const std::string& missing) {
  PaperClaim check{claim, "", ""};
  if (a.count == 0 || b.count == 0) {
    check.answer = "cannot be said: " + missing;
    return check;
  }
  check.measured = StrCat(one, " ", Text(a), ", ", other, " ", Text(b));
  check.answer = (above ? Of(a) > Of(b) : Of(a) < Of(b)) ? "holds" : "does not hold";
  return check;
}

// With the defaults; of ConvLuna's ablations as ConvLuna's own.
Json AllOptions(const std::string& mechanism, const Json& given) {
  Json all = FindMechanism(mechanism).options().Write();
  if (mechanism == "only_scaling" || mechanism == "only_filtering") {
    const Json own = all;
    all = FindMechanism("conv_luna").options().Write();
    all.update(own);
    if (mechanism == "only_scaling") all["kernel"] = 1;
    if (mechanism == "only_filtering") all["temperature"] = "sqrt";
  }
  all.update(given);
  return all;
}

// Whether all is the same but this option of ConvLuna, be it in all layers that have it.
bool AlikeBut(const std::string& option, const MemorySummary& a, const MemorySummary& b) {
  const auto rest = [&](const MemorySummary& m) {
    Json first = AllOptions(m.mechanism, m.options);
    const Json value = first[option];
    first.erase(option);
    Json all = {m.config, first};
    for (const auto& [mechanism, given] : m.layers) {
      Json options = AllOptions(mechanism, given);
      const bool conv = IsConvLuna(mechanism);
      if (conv && options[option] == value) options.erase(option);
      all.push_back({conv ? "conv_luna" : mechanism, options});
    }
    return all;
  };
  return rest(a) == rest(b);
}

// Two arms that differ in one option alone: what the option does, as later minus earlier.
struct Effect {
  std::string name;
  const MemorySummary *from, *to;
};

std::vector<Effect> Effects(const std::vector<MemorySummary>& models) {
  std::vector<Effect> effects;
  for (const MemorySummary& a : models) {
    for (const MemorySummary& b : models) {
      if (!IsConv(a) || !IsConv(b)) continue;
      const std::string from = Temperature(a), to = Temperature(b);
      const std::string kernel = Kernel(a) == 1 ? "no filter" : StrCat("filter of ", Kernel(a));
      if (from == "sqrt" && to == "unit" && AlikeBut("temperature", a, b))
        effects.push_back({"the divisor is 1 in place of sqrt(d), frozen; " + kernel, &a, &b});
      if (from == "unit" && to == "learn" && AlikeBut("temperature", a, b))
        effects.push_back({"the divisor that begins at 1 is learned; " + kernel, &a, &b});
      if (Kernel(a) == 1 && Kernel(b) > 1 && AlikeBut("kernel", a, b))
        effects.push_back({StrCat("a filter of ", Kernel(b), "; divisor: ", from), &a, &b});
    }
  }
  return effects;
}

double Result(const MemorySummary& m) {
  return m.result.contains("value") && m.result["value"].is_number()
             ? m.result["value"].get<double>()
             : std::nan("");
}

Json Difference(double a, double b) { return std::isnan(b - a) ? Json() : Json(b - a); }

// What of the temperature matters more: where it begins, or that it is learned.
std::vector<PaperClaim> StartOrTraining(const std::vector<Effect>& effects) {
  Mean start, training;
  bool any = false;
  for (const Effect& e : effects) {
    const double off = Result(*e.to) - Result(*e.from);
    const bool begins = e.name.starts_with("the divisor is 1");
    if (!begins && !e.name.starts_with("the divisor that")) continue;
    any = true;
    (begins ? start : training).Add(e.from->result.value("lower_is_better", false) ? -off : off);
  }
  PaperClaim check{"the temperature's start matters more than its training", "", ""};
  if (!any) return {};
  if (start.count == 0 || training.count == 0) {
    check.answer =
        "cannot be said: it takes arms with temperature sqrt, unit and learn that are alike "
        "otherwise (configs/memory-arm-*.toml), trained where their results can be read";
    return {check};
  }
  check.measured =
      StrCat("better by ", Text(start), " with a divisor of 1 in place of sqrt(d), by ",
             Text(training), " where it is learned from there");
  check.answer = Of(start) > Of(training) ? "holds" : "does not hold";
  return {check};
}

void AddArms(const std::vector<MemorySummary>& models, Figures* f) {
  Figures::Table arms{
      "arms",
      "The models; means over their layers, where any has slots over those alone. Trained, and in "
      "brackets the columns of "
      "random weights, which are those before the first step",
      {"model", "mechanism", "divisor", "filter", "result", "entropy / ln(keys)", "(random)",
       "effective rank / slots", "(random) ", "unique share", "variance of products", "(random)  ",
       "variance of outputs", "(random)   ", "cosine over tokens"},
      {}};
  for (const MemorySummary& m : models) {
    const Numbers &t = m.trained, &r = m.random;
    arms.rows.push_back({m.label, HasMemory(m) ? m.mechanism : "softmax", Divisor(m),
                         IsConv(m) ? Json(Kernel(m)) : Json(),
                         std::isnan(Result(m)) ? Json() : Json(Result(m)), t.entropy.Value(),
                         r.entropy.Value(), t.rank.Value(), r.rank.Value(), t.unique.Value(),
                         t.products.Value(), r.products.Value(), t.output.Value(), r.output.Value(),
                         t.tokens.Value()});
  }
  f->Add(std::move(arms));
}

void AddCurves(const std::vector<MemorySummary>& models, Figures* f) {
  LineChart chart;
  for (const MemorySummary& m : models) {
    if (!m.result.contains("steps") || m.result["steps"].size() < 2) continue;
    if (chart.series.empty()) {
      chart.y_label = m.result["label"].get<std::string>();
      chart.title = chart.y_label + " over training", chart.x_label = "step";
    }
    if (m.result["label"] != chart.y_label) continue;  // another metric
    chart.series.push_back({m.label, m.result["steps"].get<std::vector<double>>(),
                            m.result["values"].get<std::vector<double>>()});
  }
  if (chart.series.size() > 1)
    f->Add("results", chart,
           "On the validation split. Curves of arms that rise earlier learn faster; those that end "
           "together reach the same.");
}

}  // namespace

std::vector<PaperClaim> MemoryChecks(const MemorySummary& m) {
  std::vector<PaperClaim> checks;
  if (!HasMemory(m)) return checks;
  const Numbers &t = m.trained, &r = m.random;
  if (t.cosine.count > 0 && r.cosine.count > 0) {
    PaperClaim check{Named("training makes the slots alike", m), "", ""};
    check.measured =
        StrCat("cosine ", Text(r.cosine), " with random weights, ", Text(t.cosine),
               " trained; effective rank / slots ", Text(r.rank), " and ", Text(t.rank),
               "; unique share ", Text(r.unique), " and ", Text(t.unique));
    const bool closer = Of(t.cosine) > Of(r.cosine), fewer = Of(t.rank) < Of(r.rank);
    check.answer = closer && fewer ? "holds" : closer || fewer ? "in part" : "does not hold";
    checks.push_back(check);
  }
  if (t.entropy.count > 0) {
    PaperClaim check{Named("packing is nearly uniform", m), "", ""};
    check.measured = StrCat("entropy / ln(keys) ", Text(t.entropy), " (nearly: above ",
                            Text(kNearlyUniform), "); with random weights ", Text(r.entropy));
    check.answer = Of(t.entropy) > kNearlyUniform ? "holds" : "does not hold";
    checks.push_back(check);
  }
  return checks;
}

Figures CompareMemories(const std::vector<MemorySummary>& models) {
  Figures f;
  AddArms(models, &f);
  AddCurves(models, &f);
  const std::vector<Effect> effects = Effects(models);
  if (!effects.empty()) {
    Figures::Table table{"effects",
                         "What one option changes where all else is the same: trained, less "
                         "trained without it",
                         {"option", "from", "to", "result", "entropy / ln(keys)",
                          "effective rank / slots", "variance of outputs, random weights"},
                         {}};
    for (const Effect& e : effects)
      table.rows.push_back({e.name, e.from->label, e.to->label,
                            Difference(Result(*e.from), Result(*e.to)),
                            Difference(Of(e.from->trained.entropy), Of(e.to->trained.entropy)),
                            Difference(Of(e.from->trained.rank), Of(e.to->trained.rank)),
                            Difference(Of(e.from->random.output), Of(e.to->random.output))});
    f.Add(std::move(table));
  }
  std::vector<PaperClaim> checks;
  for (const MemorySummary& m : models) {
    if (IsRemedied(m)) continue;
    for (const PaperClaim& c : MemoryChecks(m)) checks.push_back(c);
  }
  const auto packs = [](const MemorySummary& m) {
    return HasMemory(m) && !m.softmax && !IsRemedied(m);
  };
  const auto vanilla = [](const MemorySummary& m) { return !HasMemory(m) && m.softmax; };
  const auto get = [](Mean Numbers::*figure, bool trained) {
    return [=](const MemorySummary& m) { return (trained ? m.trained : m.random).*figure; };
  };
  const std::string none =
      "it takes a model of softmax and one with a memory on the same rows (--beside)";
  const auto add = [&](const std::string& claim, Mean Numbers::*figure, bool trained, bool above) {
    checks.push_back(Against(claim, "memory", Over(models, packs, get(figure, trained)), "softmax",
                             Over(models, vanilla, get(figure, trained)), above, none));
  };
  add("packing has more entropy than the attention of a vanilla Transformer", &Numbers::entropy,
      true, true);
  add("the outputs are more alike for all tokens (cosine)", &Numbers::tokens, true, true);
  add("memory-input products vary less than input-input products, before training",
      &Numbers::products, false, false);
  add("memory-input products vary less than input-input products, after training",
      &Numbers::products, true, false);
  Mean unit, root;
  for (const Effect& e : effects) {
    if (!e.name.starts_with("the divisor is 1")) continue;
    root.AddMean(e.from->random.output), unit.AddMean(e.to->random.output);
  }
  if (unit.count > 0)
    checks.push_back(Against("a divisor of 1 gives outputs more variance before the first step",
                             "divisor 1", unit, "sqrt(d)", root, true, ""));
  for (const PaperClaim& c : StartOrTraining(effects)) checks.push_back(c);
  const Mean luna = Over(models, IsLuna, get(&Numbers::rank, true)),
             conv = Over(models, IsConv, get(&Numbers::rank, true));
  checks.push_back(Against("slots collapse in Luna and less in ConvLuna (effective rank / slots)",
                           "Luna", luna, "ConvLuna", conv, false,
                           "it takes a model of luna and one of conv_luna"));
  int64_t holds = 0, fails = 0, open = 0;
  for (const PaperClaim& c : checks) {
    holds += c.answer == "holds" ? 1 : 0;
    fails += c.answer == "does not hold" ? 1 : 0;
    open += c.answer.starts_with("cannot") ? 1 : 0;
  }
  const int64_t part = int64_t(checks.size()) - holds - fails - open;
  f.Fact("holds", holds).Fact("does_not_hold", fails).Fact("in_part", part).Fact("open", open);
  std::string verdict = StrCat("Does P000's explanation hold for these models? Of ", checks.size(),
                               " claims ", holds, " hold, ", part, " in part, ", fails, " do not, ",
                               open, " cannot be said from what is here. ");
  if (open > 0 && holds + part + fails == 0) {
    verdict += "So nothing is decided.";
  } else if (fails == 0 && part == 0) {
    verdict += open == 0 ? "So it holds." : "What can be said speaks for it.";
  } else {
    verdict +=
        "It fails where the table says so: one link that does not hold breaks the chain "
        "from uniform packing over like outputs to like slots.";
  }
  f.Text(verdict);
  f.Add(ChecksTable("P000", checks));
  return f;
}

}  // namespace cistern
