#pragma once
// What a check finds: the worst error against its tolerance, and where it happened; or why the
// check does not apply.
#include <ATen/core/Tensor.h>

#include <string>

#include "cistern/base/error.h"

namespace cistern::verify {

struct Outcome {
  enum class Kind { kPass, kFail, kNotApplicable };
  Kind kind = Kind::kPass;
  double error = 0,
         tolerance =
             0;  // of the comparison that came nearest to its tolerance, or passed it furthest
  int64_t comparisons = 0;
  std::string where;   // of that comparison: form, shape, piece
  std::string reason;  // not applicable: why; failed by an exception: its message

  bool failed() const { return kind == Kind::kFail; }
};

Outcome NotApplicable(const std::string& reason);

// |got - want| / |want| in root mean square, in double; where `want` is all zero, infinite unless
// `got` is too. Infinities have to be in the same places. NaN and different shapes count as
// infinitely far.
double RelativeRms(const at::Tensor& got, const at::Tensor& want);

// Collects comparisons and keeps the worst. `where` is anything StrCat takes; it becomes text only
// for the worst so far.
class Meter {
 public:
  template <class... Where>
  void Close(const at::Tensor& got, const at::Tensor& want, double tolerance,
             const Where&... where) {
    Add(RelativeRms(got, want), tolerance, where...);
  }
  // Every bit; the error is the relative difference.
  template <class... Where>
  void Same(const at::Tensor& got, const at::Tensor& want, const Where&... where) {
    Add(BitDifference(got, want), 0, where...);
  }
  // Exactly zero; the error is the largest magnitude.
  template <class... Where>
  void Zero(const at::Tensor& got, const Where&... where) {
    Add(Largest(got), 0, where...);
  }
  // A condition that has no error to measure.
  template <class... Where>
  void True(bool condition, const Where&... where) {
    Add(condition ? 0 : 1, 0, where...);
  }
  template <class... Where>
  void Add(double error, double tolerance, const Where&... where) {
    if (Count(error, tolerance)) worst_.where = StrCat(where...);
  }
  const Outcome& result() const { return worst_; }

 private:
  bool Count(double error, double tolerance);  // true when it is the worst so far
  static double BitDifference(const at::Tensor& got, const at::Tensor& want);
  static double Largest(const at::Tensor& x);

  Outcome worst_;
  double badness_ = -1;
};

}  // namespace cistern::verify
