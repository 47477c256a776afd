#include <ATen/ATen.h>

#include "cistern/attention/head_groups.h"
#include "cistern/verify/properties.h"

namespace cistern::verify {
namespace {

constexpr Form kForms[] = {Form::kBidirectional, Form::kCausal, Form::kCross};

// Every form that is asked for at every length, against the definition.
void CompareForms(Subject& subject, const Settings& settings, at::ScalarType dtype,
                  const std::vector<int64_t>& lengths, int64_t batch, Meter& meter) {
  at::NoGradGuard guard;
  for (const int64_t length : lengths) {
    const Tensors x = subject.Inputs(batch, length);
    for (const Form form : kForms) {
      if (!settings.Has(form) || !subject.Has(form)) continue;
      const Tensors queries = form == Form::kCross ? subject.Inputs(batch, length / 2 + 3) : x;
      const at::Tensor want = subject.Definition(form, queries, x);
      // One row with one head may be five numbers, all of them what cancelling terms leave (weights
      // of both signs, as linformer's): then rounding the problem once changes them as much.
      const double tolerance =
          batch == 1 ? subject.Tolerance(dtype, form, queries, x) : subject.Tolerance(dtype);
      for (const bool heads_last : {false, true}) {
        if (heads_last && length > 65) continue;
        const Tensors y = heads_last ? HeadsLast(Cast(x, dtype)) : Cast(x, dtype);
        const Tensors q = form == Form::kCross ? Cast(queries, dtype) : y;
        meter.Close(Whole(subject.In(dtype), form, q, y), want, tolerance, FormName(form), ", ",
                    at::toString(dtype), ", B=", batch, ", H=", subject.heads(), ", T=", length,
                    heads_last ? ", heads last" : "");
      }
    }
  }
}

}  // namespace

Outcome CheckDefinition(Subject& subject, const Settings& settings) {
  Meter meter;
  CompareForms(subject, settings, at::kDouble, settings.Lengths(), 2, meter);
  return meter.result();
}

Outcome CheckFloat(Subject& subject, const Settings& settings) {
  Meter meter;
  CompareForms(subject, settings, at::kFloat, settings.Lengths(), 2, meter);
  return meter.result();
}

Outcome CheckOneHead(Subject& subject, const Settings& settings) {
  if (IsHeadGroups(subject.info().name)) return NotApplicable("its groups have several heads");
  Subject single = subject.Again(1);
  Meter meter;
  for (const auto dtype : {at::kDouble, at::kFloat})
    CompareForms(single, settings, dtype, {1, 37}, 1, meter);
  return meter.result();
}

Outcome CheckPrefix(Subject& subject, const Settings& settings) {
  if (!subject.info().causal_is_prefix)
    return NotApplicable("its causal form is not a prefix of the bidirectional one");
  if (!subject.Has(Form::kCausal) || !subject.Has(Form::kBidirectional))
    return NotApplicable("it does not have both forms");
  if (!settings.Has(Form::kCausal) || !settings.Has(Form::kBidirectional))
    return NotApplicable("needs the causal and bidirectional forms");
  at::NoGradGuard guard;
  Meter meter;
  Mechanism& m = subject.In(at::kDouble);
  const int64_t length = settings.full ? 70 : 13;
  const Tensors x = subject.Inputs(2, length);
  const at::Tensor causal = Pieces(m, x, {0, length});
  for (int64_t t = 0; t < length; ++t) {
    meter.Close(causal.select(2, t), m.Bidirectional(Narrow(x, 0, t + 1), {}).select(2, t),
                subject.Tolerance(at::kDouble), "t=", t);
  }
  return meter.result();
}

Outcome CheckExtreme(Subject& subject, const Settings& settings) {
  at::NoGradGuard guard;
  Meter meter;
  for (const double scale : {1.0, 10.0, 1000.0}) {
    const Tensors x = subject.Inputs(2, 33, scale), others = subject.Inputs(2, 7, scale);
    for (const Form form : kForms) {
      if (!settings.Has(form) || !subject.Has(form)) continue;
      const Tensors& queries = form == Form::kCross ? others : x;
      const at::Tensor want = subject.Definition(form, queries, x);
      for (const auto dtype : {at::kDouble, at::kFloat}) {
        const double tolerance = subject.Tolerance(dtype, form, queries, x);
        meter.Close(Whole(subject.In(dtype), form, Cast(queries, dtype), Cast(x, dtype)), want,
                    tolerance, FormName(form), ", ", at::toString(dtype), ", inputs times ", scale);
      }
    }
  }
  return meter.result();
}

Outcome CheckEmpty(Subject& subject, const Settings& settings) {
  Meter meter;
  Mechanism& m = subject.In(at::kDouble);
  const Tensors x = subject.Inputs(2, 4), none = subject.Inputs(2, 0),
                rowless = subject.Inputs(0, 4);
  const ops::Mask masked = {LengthsOf({0, 0}), {}},
                  started = {LengthsOf({0, 0}), StartsAt(2, 4, {{0, 0}, {1, 2}})};
  for (const Form form : {Form::kBidirectional, Form::kCausal}) {
    if (!settings.Has(form) || !subject.Has(form)) continue;
    if (!m.SeesPadding()) {  // padding that takes part has outputs and gradients like any token
      meter.Zero(Whole(m, form, x, x, masked), FormName(form), ", every row fully masked");
      meter.Zero(Whole(m, form, x, x, started), FormName(form),
                 ", every row fully masked, starts in the padding");
      const Tensors leaves = Leaves(x);
      for (const at::Tensor& g : Gradients(Whole(m, form, leaves, leaves, masked).sum(), leaves))
        meter.Zero(g, FormName(form), ", gradient of fully masked rows");
    }
    for (const Tensors* y : {&none, &rowless}) {
      const at::Tensor out = Whole(m, form, *y, *y);
      const bool shaped = out.dim() == 4 && out.size(0) == (*y)[0].size(0) &&
                          out.size(2) == (*y)[0].size(2) && out.numel() == 0;
      meter.True(shaped, FormName(form), ", ", y == &none ? "T=0" : "B=0");
    }
  }
  if (settings.Has(Form::kCross) && subject.Has(Form::kCross)) {
    meter.Zero(Whole(m, Form::kCross, x, none), "cross, nothing written");
    meter.Zero(Whole(m, Form::kCross, x, x, masked), "cross, every row fully masked");
    const Tensors leaves = Leaves(x);
    for (const at::Tensor& g :
         Gradients(Whole(m, Form::kCross, leaves, leaves, masked).sum(), leaves))
      meter.Zero(g, "cross, gradient of fully masked rows");
  }
  if (settings.Has(Form::kCausal) && subject.Has(Form::kCausal)) {
    // A start in the padding of an empty piece does not count: the previous document continues.
    State state;
    const Tensors first = subject.Inputs(2, 3), whole = Joined(first, x);
    Pieces(m, first, {0, 3}, {}, &state);
    m.Extend(x, state, started);
    m.Extend(none, state, {});
    meter.Close(m.Extend(x, state, {}),
                subject.Definition(Form::kCausal, whole, whole).narrow(2, 3, 4),
                subject.Tolerance(at::kDouble), "causal, after a masked and an empty piece");
  }
  return meter.result();
}

}  // namespace cistern::verify
