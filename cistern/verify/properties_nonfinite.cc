#include <ATen/ATen.h>

#include <cmath>
#include <limits>

#include "cistern/verify/properties.h"

namespace cistern::verify {
namespace {

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr double kInf = std::numeric_limits<double>::infinity();

// x with `value` in the tokens from `begin` on of one row, or of every row (-1).
Tensors FilledWith(const Tensors& x, int64_t row, int64_t begin, int64_t count, double value) {
  Tensors out;
  for (const at::Tensor& t : x) {
    out.push_back(t.detach().clone());
    const at::Tensor rows = row < 0 ? out.back() : out.back().narrow(0, row, 1);
    rows.narrow(2, begin, count).fill_(value);
  }
  return out;
}

std::vector<Form> FormsAskedFor(const Subject& subject, const Settings& settings) {
  std::vector<Form> forms;
  for (const Form form : {Form::kBidirectional, Form::kCausal, Form::kCross}) {
    if (settings.Has(form) && subject.Has(form)) forms.push_back(form);
  }
  return forms;
}

at::Tensor RunForm(Mechanism& m, Form form, const Tensors& queries, const Tensors& x,
                   const std::vector<int64_t>& cuts, const ops::Mask& mask) {
  return form == Form::kCausal ? Pieces(m, x, cuts, mask) : Whole(m, form, queries, x, mask);
}

// The output and the gradients of the inputs and of the parameters do not know what padding holds.
void PaddingNotFinite(Subject& subject, const Settings& settings, Meter& meter) {
  Mechanism& m = subject.In(at::kDouble);
  const int64_t length = 19, count = 8;
  const Tensors x = subject.Inputs(3, length), queries = subject.Inputs(3, 4);
  const ops::Mask mask = {LengthsOf({length, count, 0}), {}};
  for (const Form form : FormsAskedFor(subject, settings)) {
    const at::Tensor g = subject.Weights(3, form == Form::kCross ? 4 : length);
    std::vector<std::vector<int64_t>> ways = {{0, length}};
    if (form == Form::kCausal) ways.push_back({0, 5, 12, length});
    for (const std::vector<int64_t>& cuts : ways) {
      const auto everything = [&](double value) {
        const Tensors leaves =
            Leaves(FilledWith(FilledWith(x, 1, count, length - count, value), 2, 0, length, value));
        const at::Tensor out = RunForm(m, form, queries, leaves, cuts, mask);
        Tensors all = leaves, parameters = m.parameters();
        all.insert(all.end(), parameters.begin(), parameters.end());
        Tensors results = Gradients((out * g).sum(), all);
        results.insert(results.begin(), out.detach());
        return results;
      };
      const Tensors want = everything(0);
      for (const double value : {kNan, kInf, -kInf}) {
        const Tensors got = everything(value);
        for (size_t i = 0; i < got.size(); ++i) {
          const std::string part = i == 0          ? "output"
                                   : i <= x.size() ? "gradient of " + m.Projections()[i - 1].name
                                                   : "gradient of a parameter";
          meter.Close(got[i], want[i], subject.Tolerance(at::kDouble), FormName(form), ", ", value,
                      " in padding, ", part, cuts.size() > 2 ? ", in pieces" : "");
        }
      }
    }
  }
}

// A token that is not finite reaches its own output, no output before it, and no other row.
void FutureNotFinite(Subject& subject, Meter& meter) {
  const int64_t length = 90;
  const Tensors problem = subject.Inputs(2, length);
  const auto check = [&](at::ScalarType dtype, const std::vector<int64_t>& cuts,
                         const std::vector<std::pair<int64_t, double>>& values, bool each_alone) {
    Mechanism& m = subject.In(dtype);
    const Tensors x = Cast(problem, dtype);
    const at::Tensor want = Pieces(m, x, cuts);
    const auto compare = [&](const Tensors& y, int64_t t, const std::string& what) {
      const std::string where = StrCat("causal, ", at::toString(dtype), ", ", what, " token ", t,
                                       cuts.size() > 2 ? ", in pieces" : "");
      const at::Tensor got = Pieces(m, y, cuts);
      meter.Close(got.narrow(0, 1, 1).narrow(2, 0, t), want.narrow(0, 1, 1).narrow(2, 0, t),
                  subject.Tolerance(dtype), where, ", tokens before it");
      meter.Close(got.narrow(0, 0, 1), want.narrow(0, 0, 1), subject.Tolerance(dtype), where,
                  ", the other row");
      return got[1].select(1, t).isnan().any(-1).all().item<bool>();  // a NaN in every head
    };
    for (const auto& [t, value] : values) {
      const bool own = compare(FilledWith(x, 1, t, 1, value), t, StrCat(value, " at"));
      if (std::isnan(value)) meter.True(own, "causal, NaN at token ", t, ", its own output");
    }
    for (size_t i = 0; each_alone && i < x.size(); ++i) {
      Tensors one = x;
      one[i] = FilledWith({x[i]}, 1, 20, 1, kNan)[0];
      compare(one, 20, "NaN in " + m.Projections()[i].name + " of");
    }
  };
  check(at::kDouble, {0, length},
        {{1, kNan}, {63, kNan}, {64, kNan}, {20, kNan}, {20, kInf}, {20, -kInf}}, true);
  check(at::kDouble, {0, 40, length}, {{20, kNan}, {70, kNan}}, false);
  check(at::kFloat, {0, length}, {{20, kNan}}, false);
}

// Rows of a batch, and documents packed in a row.
void OthersNotFinite(Subject& subject, Form form, Meter& meter) {
  Mechanism& m = subject.In(at::kDouble);
  const int64_t length = 19;
  const Tensors x = subject.Inputs(2, length), queries = subject.Inputs(2, 4);
  const double tolerance = subject.Tolerance(at::kDouble);
  const auto run = [&](const Tensors& q, const Tensors& y, const ops::Mask& mask) {
    return RunForm(m, form, q, y, {0, length}, mask);
  };
  const at::Tensor want = run(queries, x, {});
  for (const double value : {kNan, kInf}) {
    const at::Tensor got = run(queries, FilledWith(x, 1, 3, 1, value), {});
    meter.Close(got.narrow(0, 0, 1), want.narrow(0, 0, 1), tolerance, FormName(form), ", ", value,
                " in another row");
    if (std::isnan(value) && form == Form::kBidirectional)
      meter.True(got[1].select(1, 3).isnan().any(-1).all().item<bool>(), FormName(form),
                 ", NaN at token 3, its own output");
  }
  if (form == Form::kCross) {
    const at::Tensor got = run(FilledWith(queries, 1, 2, 1, kNan), x, {});
    const bool own = got[1].select(1, 2).isnan().any(-1).all().item<bool>();
    meter.True(own, "cross, a query of NaN reads NaN");
    meter.Close(got.narrow(2, 0, 2), want.narrow(2, 0, 2), tolerance,
                "cross, the queries before one of NaN");
    meter.Close(got.narrow(2, 3, 1), want.narrow(2, 3, 1), tolerance,
                "cross, the queries after one of NaN");
    return;
  }
  const ops::Mask packed = {{}, StartsAt(2, length, {{0, 0}, {1, 5}, {1, 12}})};
  const at::Tensor alone = run(x, x, packed), beside = run(x, FilledWith(x, 1, 6, 1, kNan), packed);
  meter.Close(beside.narrow(2, 0, 5), alone.narrow(2, 0, 5), tolerance, FormName(form),
              ", the document before one with NaN");
  meter.Close(beside.narrow(2, 12, length - 12), alone.narrow(2, 12, length - 12), tolerance,
              FormName(form), ", the document after one with NaN");
}

}  // namespace

Outcome CheckNonFinite(Subject& subject, const Settings& settings) {
  Meter meter;
  PaddingNotFinite(subject, settings, meter);
  at::NoGradGuard guard;
  for (const Form form : FormsAskedFor(subject, settings)) {
    OthersNotFinite(subject, form, meter);
    if (form == Form::kCausal) FutureNotFinite(subject, meter);
  }
  return meter.result();
}

}  // namespace cistern::verify
