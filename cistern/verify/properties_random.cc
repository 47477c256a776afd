#include <ATen/ATen.h>

#include <algorithm>

#include "cistern/base/random.h"
#include "cistern/verify/properties.h"

namespace cistern::verify {
namespace {

std::string Listed(const std::vector<int64_t>& numbers) {
  std::string text;
  for (const int64_t n : numbers) text += (text.empty() ? "" : ",") + std::to_string(n);
  return text;
}

RandomCase Draw(Random& random) {
  RandomCase c;
  c.batch = 1 + random.Below(3);
  c.length = 1 + random.Below(random.Below(4) == 0 ? 100 : 30);
  if (random.Below(2) == 0) {
    for (int64_t b = 0; b < c.batch; ++b) c.lengths.push_back(random.Below(c.length + 1));
  }
  if (random.Below(2) == 0) {
    for (int64_t i = random.Below(6); i >= 0; --i)
      c.starts.emplace_back(random.Below(c.batch), random.Below(c.length));
  }
  for (int64_t i = random.Below(5); i > 0; --i) c.cuts.push_back(random.Below(c.length + 1));
  c.cuts.push_back(0);
  c.cuts.push_back(c.length);
  std::sort(c.cuts.begin(), c.cuts.end());
  c.heads_last = random.Below(2) == 0;
  c.in_float = random.Below(2) == 0;
  c.seed = random.Next() >> 32;
  return c;
}

}  // namespace

std::string Describe(const RandomCase& c) {
  std::string text = StrCat("B=", c.batch, ", T=", c.length);
  if (!c.lengths.empty()) text += ", lengths " + Listed(c.lengths);
  if (!c.starts.empty()) text += ", starts";
  for (const auto& [row, token] : c.starts) text += StrCat(" (", row, ",", token, ")");
  text += ", cuts " + Listed(c.cuts) + (c.heads_last ? ", heads last" : "") +
          (c.in_float ? ", float" : ", double");
  return text + StrCat(", seed ", c.seed);
}

// Compares with what `define` gives for the inputs. Random shapes meet ill-conditioned problems,
// such as a denominator near zero: the tolerance then follows what rounding the inputs changes.
template <class F>
void Compare(Meter& meter, Subject& subject, at::ScalarType dtype, const at::Tensor& got,
             const Tensors& inputs, F&& define, const std::string& where) {
  const at::Tensor want = define(inputs);
  double tolerance = subject.Tolerance(dtype);
  for (int i = 0; i < 4 && !(RelativeRms(got, want) <= tolerance);
       ++i) {  // one rounding may happen to change little
    tolerance = std::max(tolerance, subject.Tolerance(dtype, inputs, want, define));
  }
  meter.Close(got, want, tolerance, where);
}

Outcome CheckCase(Subject& subject, const Settings& settings, const RandomCase& any) {
  at::NoGradGuard guard;
  RandomCase c = any;
  const bool depend = !subject.RowsDepend().empty();
  if (depend) c.lengths.clear(), c.starts.clear();
  at::manual_seed(c.seed);
  Meter meter;
  const auto dtype = c.in_float ? at::kFloat : at::kDouble;
  const Tensors x = subject.Inputs(c.batch, c.length);
  Tensors y = Cast(x, dtype);
  if (c.heads_last) y = HeadsLast(y);
  ops::Mask mask;
  if (!c.lengths.empty()) mask.lengths = LengthsOf(c.lengths);
  if (!c.starts.empty()) mask.starts = StartsAt(c.batch, c.length, c.starts);
  for (const Form form : {Form::kBidirectional, Form::kCausal}) {
    if (!settings.Has(form) || !subject.Has(form)) continue;
    Mechanism& m = subject.In(dtype);
    const at::Tensor got =
        form == Form::kCausal ? Pieces(m, y, c.cuts, mask) : m.Bidirectional(y, mask);
    Compare(
        meter, subject, dtype, got, x,
        [&](const Tensors& z) {
          return depend ? subject.Definition(form, z, z) : DefinitionOf(subject, form, z, mask);
        },
        FormName(form) + ", " + Describe(c));
  }
  if (settings.Has(Form::kCross) && subject.Has(Form::kCross)) {
    const Tensors queries = subject.Inputs(c.batch, 3);
    Mechanism& m = subject.In(dtype);
    State state = m.EmptyState(c.batch, y[0].options());
    if (m.WritesAtOnce()) c.cuts = {0, c.length};
    for (size_t i = 0; i + 1 < c.cuts.size(); ++i) {
      const int64_t begin = c.cuts[i], count = c.cuts[i + 1] - begin;
      m.Write(Narrow(y, begin, count), state, mask.WithoutStarts().Narrow(begin, count));
    }
    const at::Tensor got = m.Read(Cast(queries, dtype), state);
    for (int64_t b = 0; b < c.batch; ++b) {
      const int64_t count = c.lengths.empty() ? c.length : c.lengths[size_t(b)];
      Compare(
          meter, subject, dtype, got.narrow(0, b, 1), x,
          [&](const Tensors& z) {
            return subject.Definition(Form::kCross, Rows(queries, b), Narrow(Rows(z, b), 0, count));
          },
          StrCat("cross, row ", b, ", ", Describe(c)));
    }
  }
  return meter.result();
}

Outcome CheckRandom(Subject& subject, const Settings& settings) {
  Outcome worst;
  Random random(settings.seed, 17);
  int64_t comparisons = 0;
  for (int i = 0; i < (settings.full ? 200 : 6); ++i) {
    const Outcome outcome = CheckCase(subject, settings, Draw(random));
    comparisons += outcome.comparisons;
    const auto badness = [](const Outcome& o) {
      return o.tolerance > 0 ? o.error / o.tolerance : o.error > 0 ? 1e300 : 0.0;
    };
    if (i == 0 || badness(outcome) > badness(worst)) worst = outcome;
  }
  worst.comparisons = comparisons;
  return worst;
}

}  // namespace cistern::verify
