#pragma once
// The conformance suite: properties that every mechanism must have, checked from what it declares
// alone. `cistern verify` runs it on the user's machine, the tests run it on every mechanism, and
// mutants_test.cc proves that it catches defects.
#include <c10/core/Device.h>

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "cistern/ops/impl.h"
#include "cistern/verify/outcome.h"
#include "cistern/verify/subject.h"

namespace cistern::verify {

struct Settings {
  std::vector<ops::Impl> implementations = {ops::Impl::kKernel, ops::Impl::kComposite,
                                            ops::Impl::kReference};
  std::vector<Form> forms = {Form::kBidirectional, Form::kCausal, Form::kCross};
  std::vector<int64_t> lengths;  // that the definition is compared at; empty: a choice of ours
  bool full = false;             // more lengths, every split point, more random shapes
  uint64_t seed = 1;
  at::Device device = at::kCPU;  // another: whether it computes as the CPU, and nothing else

  bool Has(Form form) const;
  std::vector<int64_t> Lengths() const;
};

// Runs with the implementation that is active. Throwing is failing.
using Check = Outcome (*)(Subject& subject, const Settings& settings);

struct Property {
  // The implementations it is checked in: all of them; all, but the reference only in a full run or
  // when nothing else is asked for; the kernels alone; another device than the CPU.
  enum class Scope { kNumbers, kForms, kMachine, kDevice };

  std::string name;         // a word: a column of the matrix
  std::string description;  // what must hold
  Check check;
  Scope scope = Scope::kForms;
  bool together = false;  // compares forms with each other: run in all of them at once
  bool rows = false;  // rows are compared with what each is alone: not where Subject::RowsDepend

  bool Runs(ops::Impl impl, const Settings& settings) const;
};
const std::vector<Property>& Properties();
const Property& FindProperty(const std::string& name);  // UsageError with the nearest name

// One check: the property of the subject in an implementation. Seeds torch, so that it can be
// repeated alone. An exception is a failure with its message.
Outcome RunCheck(const Property& property, Subject& subject, ops::Impl impl,
                 const Settings& settings);

// A cell of the result: one mechanism with one set of options, one form, one property, one
// implementation.
struct Result {
  std::string mechanism;
  Json options;
  std::string property;
  ops::Impl implementation;
  Outcome outcome;
  double seconds = 0;
  std::optional<Form> form = {};  // that it was run in; none: in several at once
};

// All cases, each form by itself of the mechanisms. `done` hears of each result and stops the run
// by returning false.
std::vector<Result> RunSuite(const std::vector<const MechanismInfo*>& mechanisms,
                             const std::vector<const Property*>& properties,
                             const Settings& settings,
                             const std::function<bool(const Result&)>& done = nullptr);
int64_t CountChecks(const std::vector<const MechanismInfo*>& mechanisms,
                    const std::vector<const Property*>& properties, const Settings& settings);

}  // namespace cistern::verify
