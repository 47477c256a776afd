#include <ATen/ATen.h>

#include <algorithm>

#include "cistern/verify/machine_scopes.h"
#include "cistern/verify/properties.h"

namespace cistern::verify {
namespace {

// The output, then the gradients of the inputs.
Tensors Everything(Mechanism& m, Form form, const Tensors& x, const at::Tensor& g) {
  const Tensors leaves = Leaves(x);
  const at::Tensor out = Whole(m, form, leaves, leaves);
  Tensors all = Gradients((out * g.to(out.scalar_type())).sum(), leaves);
  all.insert(all.begin(), out.detach());
  return all;
}

std::vector<Form> FormsOf(const Subject& subject, const Settings& settings) {
  std::vector<Form> forms;
  for (const Form form : {Form::kBidirectional, Form::kCausal, Form::kCross}) {
    if (settings.Has(form) && subject.Has(form)) forms.push_back(form);
  }
  return forms;
}

// Whether our kernels alone decide its bits. Those of torch's operations may depend on how threads
// share them out: products in mechanisms without a causal form and of scores that are kept
// (reuse), logarithms of features (performer with eps).
bool OfOurKernels(const Subject& subject) {
  const Json& options = subject.options();
  const bool logarithms = subject.info().name == "performer" && options.value("eps", 0.0) > 0;
  return subject.Has(Form::kCausal) && options.value("keep", "") != "scores" && !logarithms;
}

std::string Part(const Mechanism& m, size_t i) {
  return i == 0 ? "output" : "gradient of " + m.Projections()[i - 1].name;
}

}  // namespace

Outcome CheckThreads(Subject& subject, const Settings& settings) {
  Meter meter;
  Mechanism& m = subject.In(at::kFloat);
  const ThreadScope threads;
  const int64_t batch = 24,
                length = settings.full
                             ? 300
                             : 100;  // enough work for three threads, by the kernels' reckoning
  const Tensors x = Cast(subject.Inputs(batch, length), at::kFloat);
  const at::Tensor g = subject.Weights(batch, length);
  for (const Form form : FormsOf(subject, settings)) {
    threads.Use(1, 1);
    const Tensors want = Everything(m, form, x, g);
    for (const int count : settings.full ? std::vector<int>{2, 3, 5} : std::vector<int>{2, 3}) {
      threads.Use(count, count);
      Tensors got = Everything(m, form, x, g);
      // A gradient is a sum of more terms than an output.
      for (size_t i = 0; i < got.size(); ++i)
        meter.Close(got[i], want[i], subject.Tolerance(at::kFloat) * (i == 0 ? 1 : 10),
                    FormName(form), ", ", Part(m, i), ", ", count, " threads");
      if (!OfOurKernels(subject)) continue;
      threads.Use(count, 1);
      got = Everything(m, form, x, g);
      for (size_t i = 0; i < got.size(); ++i)
        meter.Same(got[i], want[i], FormName(form), ", ", Part(m, i), ", ", count,
                   " threads of ours");
    }
  }
  return meter.result();
}

Outcome CheckSimd(Subject& subject, const Settings& settings) {
  const std::vector<std::string> targets = SupportedIsas();
  if (targets.size() < 2) return NotApplicable("this machine has one instruction set");
  Meter meter;
  const IsaScope restored;
  for (const auto dtype : {at::kDouble, at::kFloat}) {
    const Tensors x = subject.Inputs(2, 70);
    const at::Tensor g = subject.Weights(2, 70);
    for (const Form form : FormsOf(subject, settings)) {
      Tensors want;
      {
        const ops::ImplScope reference(ops::Impl::kReference);
        want = Everything(subject.In(at::kDouble), form, x, g);
      }
      for (const std::string& isa : targets) {
        ForceIsa(isa);
        Mechanism& m = subject.In(dtype);
        const Tensors got = Everything(m, form, Cast(x, dtype), g);
        const double tolerance = subject.Tolerance(dtype);
        for (size_t i = 0; i < got.size(); ++i)
          meter.Close(got[i], want[i], i == 0 ? tolerance : 10 * tolerance, FormName(form), ", ",
                      at::toString(dtype), ", ", Part(m, i), ", ", isa);
      }
    }
  }
  return meter.result();
}

Outcome CheckPoison(Subject& subject, const Settings& settings) {
  Meter meter;
  for (const auto dtype : {at::kDouble, at::kFloat}) {
    Mechanism& m = subject.In(dtype);
    for (const int64_t length : {1, 17, 70}) {
      const Tensors x = Cast(subject.Inputs(2, length), dtype);
      const at::Tensor g = subject.Weights(2, length);
      for (const Form form : FormsOf(subject, settings)) {
        const Tensors want = Everything(m, form, x, g);
        Tensors got;
        at::Tensor steps;
        {
          const PoisonScope poisoned;
          got = Everything(m, form, x, g);
          at::NoGradGuard guard;
          if (form == Form::kCausal) steps = Pieces(m, x, EachToken(length), {});
        }
        for (size_t i = 0; i < got.size(); ++i)
          meter.Close(got[i], want[i], subject.Tolerance(dtype), FormName(form), ", ",
                      at::toString(dtype), ", T=", length, ", ", Part(m, i));
        if (steps.defined())
          meter.Close(steps, want[0], subject.Tolerance(dtype), "token by token, ",
                      at::toString(dtype), ", T=", length);
      }
    }
  }
  return meter.result();
}

}  // namespace cistern::verify
