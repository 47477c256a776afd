#pragma once
// What a comparison says should be taken (bench/decide.h), in words and pictures.
#include <string>
#include <vector>

#include "cistern/bench/decide.h"
#include "cistern/cli/compare_report.h"

namespace cistern::cli {

// Quality first, then training speed, peak memory of training, and of language models the bytes of
// state and the milliseconds per token at the last position that was measured. Those that no row
// has are left out.
std::vector<Criterion> Criteria(const Comparison& c);

// Empty where the rows are of several lengths.
Decision Decide(const Comparison& c);

// Quality against each other criterion, the front of the two drawn as a line.
std::vector<std::string> DecisionPictures(const Comparison& c);

}  // namespace cistern::cli
