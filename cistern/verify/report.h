#pragma once
// Results for people and for programs.
#include <string>
#include <vector>

#include "cistern/io/fields.h"
#include "cistern/verify/suite.h"

namespace cistern::verify {

struct MatrixStyle {
  int columns = 100;    // of the terminal; wider matrices are cut into blocks
  bool colour = false;  // green, red and grey
};

// A row for each mechanism, a column for each property. A cell is the error that came nearest to
// its tolerance over all options and implementations, and that tolerance ("2e-16/1e-12"; "0" where
// every bit agrees), "FAIL", or "-a": it does not apply, for reason a of the legend. Above: what a
// cell is. Below: what failed, where, how to repeat it.
std::string MatrixText(const std::vector<Result>& results, const MatrixStyle& style);

// How many failed.
int64_t Failures(const std::vector<Result>& results);

// One object for each result.
Json ResultsJson(const std::vector<Result>& results);
Json OutcomeJson(const Outcome& outcome);

// "2e-16", "0".
std::string ErrorText(double error);
// "error 3e-4, tolerance 2e-6, at causal, T=65", or the message of an exception.
std::string FailureText(const Outcome& outcome);

}  // namespace cistern::verify
