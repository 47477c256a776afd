#include <ATen/ATen.h>

#include "cistern/verify/properties.h"

namespace cistern::verify {
namespace {

// Cuts to try at a length: each point, or those around the kernels' chunks of 64 rows.
std::vector<int64_t> SplitPoints(int64_t length, bool each) {
  std::vector<int64_t> points;
  for (int64_t t = 0; t <= length; ++t) {
    if (each || t == 0 || t == 1 || (t >= 63 && t <= 65) || t >= length - 1) points.push_back(t);
  }
  return points;
}

const char* kNoCausal = "it has no causal form";

void CrossPieces(Subject& subject, Meter& meter) {
  Mechanism& m = subject.In(at::kDouble);
  const Tensors queries = subject.Inputs(2, 5), x = subject.Inputs(2, 13);
  const at::Tensor want = Whole(m, Form::kCross, queries, x);
  const double tolerance = subject.Tolerance(at::kDouble);
  for (int64_t cut = 0; cut <= 13; ++cut) {
    if (m.WritesAtOnce() && cut != 0 && cut != 13) continue;
    State state = m.EmptyState(2, x[0].options());
    m.Write(Narrow(x, 0, cut), state, {});
    if (cut < 13) m.Write(Narrow(x, cut, 13 - cut), state, {});
    meter.Close(m.Read(queries, state), want, tolerance, "cross, written in two pieces, cut at ",
                cut);
    meter.Close(m.Read(Narrow(queries, 2, 1), state), want.narrow(2, 2, 1), tolerance,
                "cross, a second read of one query, cut at ", cut);
  }
}

}  // namespace

Outcome CheckPieces(Subject& subject, const Settings& settings) {
  const bool causal = settings.Has(Form::kCausal) && subject.Has(Form::kCausal);
  const bool cross = settings.Has(Form::kCross) && subject.Has(Form::kCross);
  if (!causal && !cross) return NotApplicable("it has no state to extend");
  at::NoGradGuard guard;  // states may be updated in place
  Meter meter;
  if (cross) CrossPieces(subject, meter);
  if (!causal) return meter.result();
  Mechanism& m = subject.In(at::kDouble);
  const double tolerance = subject.Tolerance(at::kDouble);
  for (const int64_t length : {21, 130}) {
    const Tensors x = HeadsLast(subject.Inputs(2, length));
    const at::Tensor whole = Pieces(m, x, {0, length});
    for (const int64_t cut : SplitPoints(length, length < 64 || settings.full))
      meter.Close(Pieces(m, x, {0, cut, length}), whole, tolerance, "T=", length, ", cut at ", cut);
    if (length > 64 && !settings.full) continue;
    meter.Close(Pieces(m, x, EachToken(length)), whole, tolerance, "T=", length,
                ", token by token");
    meter.Close(Pieces(m, x, {0, 0, 5, 5, 20, 21, length}), whole, tolerance, "T=", length,
                ", some pieces empty");
    const Tensors y = Cast(x, at::kFloat);
    meter.Close(Pieces(subject.In(at::kFloat), y, EachToken(length)), whole,
                subject.Tolerance(at::kFloat), "T=", length, ", token by token in float");
    meter.Close(Pieces(subject.In(at::kFloat), y, {0, 8, length}), whole,
                subject.Tolerance(at::kFloat), "T=", length, ", cut at 8 in float");
    subject.In(at::kDouble);
  }
  return meter.result();
}

Outcome CheckPieceGradients(Subject& subject, const Settings& settings) {
  if (!settings.Has(Form::kCausal) || !subject.Has(Form::kCausal)) return NotApplicable(kNoCausal);
  Meter meter;
  Mechanism& m = subject.In(at::kDouble);
  const double tolerance =
      10 * subject.Tolerance(at::kDouble);  // sums of more terms than the outputs
  for (const int64_t length : {19, 70}) {
    if (length == 70 && !settings.full) continue;
    const Tensors x = Leaves(subject.Inputs(2, length));
    const at::Tensor g = subject.Weights(2, length);
    const Tensors want = Gradients((Pieces(m, x, {0, length}) * g).sum(), x);
    auto compare = [&](const std::vector<int64_t>& cuts, const std::string& where) {
      const Tensors got = Gradients((Pieces(m, x, cuts) * g).sum(), x);
      for (size_t i = 0; i < x.size(); ++i)
        meter.Close(got[i], want[i], tolerance, "gradient of ", m.Projections()[i].name,
                    ", T=", length, ", ", where);
    };
    for (int64_t cut = 0; cut <= length; cut += settings.full ? 1 : 4)
      compare({0, cut, length}, StrCat("cut at ", cut));
    compare(EachToken(length), "token by token");
  }
  return meter.result();
}

Outcome CheckFuture(Subject& subject, const Settings& settings) {
  if (!settings.Has(Form::kCausal) || !subject.Has(Form::kCausal)) return NotApplicable(kNoCausal);
  at::NoGradGuard guard;
  Meter meter;
  // Composites of torch's operations promise no bits.
  const bool bitwise = ops::ActiveImpl() == ops::Impl::kKernel;
  const int64_t length = 150;
  for (const auto dtype : {at::kDouble, at::kFloat}) {
    Mechanism& m = subject.In(dtype);
    const Tensors x = Cast(subject.Inputs(2, length), dtype);
    const at::Tensor want = Pieces(m, x, {0, length});
    for (const int64_t t : {1, 63, 64, 65, 149}) {
      Tensors changed;
      for (const at::Tensor& y : x)
        changed.push_back(
            at::cat({y.narrow(2, 0, t), y.narrow(2, t, length - t) * -50.0 + 3.0}, 2));
      const at::Tensor got = Pieces(m, changed, {0, length}), past = got.narrow(2, 0, t),
                       known = want.narrow(2, 0, t);
      if (at::equal(got, want)) {  // then the definition has to say so as well: all later tokens
                                   // may see the first alone
        const Tensors before = Cast(x, at::kDouble), after = Cast(changed, at::kDouble);
        const bool none = at::equal(subject.Definition(Form::kCausal, after, after),
                                    subject.Definition(Form::kCausal, before, before));
        subject.In(dtype);
        meter.True(none, "the change after t=", t, " changed nothing at all");
      }
      if (bitwise) {
        meter.Same(past, known, at::toString(dtype), ", tokens from ", t, " on changed");
      } else {
        meter.Close(past, known, subject.Tolerance(dtype), at::toString(dtype), ", tokens from ", t,
                    " on changed");
      }
    }
  }
  return meter.result();
}

}  // namespace cistern::verify
