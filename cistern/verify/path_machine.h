#pragma once
// The checks of a fused path that are about the machine: threads, SIMD targets, memory that nobody
// has set. `results(type)` gives the tensors that are compared.
#include <ATen/ATen.h>

#include <string>
#include <utility>

#include "cistern/ops/impl.h"
#include "cistern/verify/machine_scopes.h"
#include "cistern/verify/paths.h"
#include "cistern/verify/properties.h"

namespace cistern::verify {

// The same bits with 1, 2 and 3 threads, of which torch's own operators have `of_torch`; 0: as
// many.
template <class Results>
void SameOnThreads(Meter& meter, const std::string& name, const Results& results,
                   int of_torch = 0) {
  const ThreadScope threads;
  threads.Use(1, 1);
  const Tensors want = results(at::kFloat);
  for (const int count : {2, 3}) {
    threads.Use(count, of_torch > 0 ? of_torch : count);
    const Tensors got = results(at::kFloat);
    for (size_t i = 0; i < want.size(); ++i)
      meter.Same(got[i], want[i], name, ", result ", i, ", ", count, " threads");
  }
}

// As `want` on every SIMD target of this machine, within these tolerances.
template <class Results>
void CloseOnTargets(Meter& meter, const std::string& name, const Tensors& want,
                    const Results& results, double of_double, double of_float) {
  const IsaScope restored;
  for (const std::string& isa : SupportedIsas()) {
    ForceIsa(isa);
    for (const auto dtype : {at::kDouble, at::kFloat}) {
      const Tensors got = results(dtype);
      for (size_t i = 0; i < want.size(); ++i)
        meter.Close(got[i], want[i], dtype == at::kDouble ? of_double : of_float, name, ", result ",
                    i, ", ", isa);
    }
  }
}

// The same, as the reference in double: everything(paths, type) gives the tensors.
template <class Everything>
void CloseToReferenceOnTargets(Meter& meter, const std::string& name, const Paths& paths,
                               double of_float, const Everything& everything) {
  Tensors want;
  {
    const ops::ImplScope reference(ops::Impl::kReference);
    want = everything(OurPaths(), at::kDouble);
  }
  CloseOnTargets(
      meter, name, want, [&](at::ScalarType dtype) { return everything(paths, dtype); }, 1e-11,
      of_float);
}

// Memory that nobody has set holds NaN: no bit of the results may follow from it.
template <class Results>
void SameWithPoison(Meter& meter, const std::string& name, const Results& results) {
  const Tensors want = results(at::kFloat);
  const PoisonScope poisoned;
  const Tensors got = results(at::kFloat);
  for (size_t i = 0; i < want.size(); ++i) meter.Same(got[i], want[i], name, ", result ", i);
}

inline bool HasOneTarget() { return SupportedIsas().size() < 2; }
inline Outcome OneTarget() { return NotApplicable("this machine has one instruction set"); }

}  // namespace cistern::verify
