// The values of a core, before it is timed.
#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>

#include "cistern/bench/core.h"

namespace cistern::bench {
namespace {

using verify::Tensors;

// Of bfloat16, relative RMS: outputs rounded to 8 bits, and what rounding the inputs changes, which
// the float tolerance says for 2^-23 and sixteen times as much as it is.
double ToleranceOf(verify::Subject& subject, at::ScalarType dtype, Form form, const Tensors& x) {
  const double known = subject.Tolerance(dtype, form, x, x);
  if (dtype != at::kBFloat16) return known;
  const double change = (known - subject.Tolerance(dtype)) / 16 * std::ldexp(1, 14);
  return 5e-3 + 4 * std::min(change, 0.01);
}

Tensors GradientsOf(Mechanism& m, Form form, const Tensors& x, const at::Tensor& g) {
  const Tensors leaves = verify::Leaves(x);
  return verify::Gradients((verify::Whole(m, form, leaves, leaves) * g).sum(), leaves);
}

}  // namespace

verify::Outcome Core::Check() {
  verify::Meter meter;
  const Form form = FormOf(case_.way);
  const bool decode = case_.way == Way::kDecode;
  const int64_t rows = std::min<int64_t>(case_.batch, 2),
                tokens = std::min(case_.length, kCheckedTokens);
  const auto type = at::toString(case_.dtype);
  const Tensors x = verify::Cast(subject_.Inputs(rows, tokens), case_.dtype),
                wide = verify::Cast(x, at::kDouble);
  const at::Tensor want = subject_.Definition(form, wide, wide);
  const double tolerance = ToleranceOf(subject_, case_.dtype, form, wide);
  {
    at::NoGradGuard guard;
    Mechanism& m = subject_.In(case_.dtype);
    const at::Tensor got =
        decode ? verify::Pieces(m, x, verify::EachToken(tokens)) : verify::Whole(m, form, x, x);
    meter.Close(got, want, tolerance, case_.info->name, ", ", NameOf(case_.way, Ways()), ", ", type,
                ", B=", rows, ", T=", tokens);
  }
  if (case_.pass == Pass::kBoth) {
    const at::Tensor g = subject_.Weights(rows, tokens).to(case_.dtype);
    Tensors expected;
    {
      const ops::ImplScope reference(ops::Impl::kReference);
      expected = GradientsOf(subject_.In(at::kDouble), form, wide, g.to(at::kDouble));
    }
    const Tensors got = GradientsOf(subject_.In(case_.dtype), form, x, g);
    double largest = 0;
    for (const at::Tensor& e : expected) largest = std::max(largest, e.norm().item<double>());
    // A gradient is a sum of more terms than an output. It may be what is left of them, where slots
    // are alike, say: then it counts beside a hundredth of the largest one.
    for (size_t i = 0; i < got.size(); ++i) {
      const double difference = (got[i].to(at::kDouble) - expected[i]).norm().item<double>(),
                   size = std::max(expected[i].norm().item<double>(), largest / 100);
      const double error = difference == 0 ? 0 : difference / size;
      meter.Add(error, 10 * tolerance, case_.info->name, ", gradient of ",
                mechanism_->Projections()[i].name, ", ", type, ", T=", tokens);
    }
  }
  if (!decode && case_.length > tokens) {
    at::NoGradGuard guard;
    subject_.In(case_.dtype);
    const at::Tensor whole = Forward();
    meter.True(at::isfinite(whole).all().item<bool>(), case_.info->name,
               ", finite outputs at T=", case_.length);
    if (form == Form::kCausal) {
      const Tensors first =
          verify::Cast(verify::Narrow(verify::Rows(x_, 0, rows), 0, tokens), at::kDouble);
      const at::Tensor defined = subject_.Definition(form, first, first);
      const double allowed = ToleranceOf(subject_, case_.dtype, form, first);
      meter.Close(whole.narrow(0, 0, rows).narrow(2, 0, tokens), defined, allowed, case_.info->name,
                  ", the first ", tokens, " outputs at T=", case_.length);
    }
  }
  subject_.In(case_.dtype);
  return meter.result();
}

}  // namespace cistern::bench
