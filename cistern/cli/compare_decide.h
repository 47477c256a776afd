#pragma once
// What a comparison says should be taken (bench/decide.h), in words and pictures.
#include <string>
#include <vector>

#include "cistern/bench/decide.h"
#include "cistern/cli/compare_report.h"

namespace cistern::cli {

// Quality first, then training speed, peak memory of training (of all seeds), and of language
// models the bytes of state and the milliseconds per token at the last position that was measured.
// Those that no row has are left out.
std::vector<Criterion> Criteria(const Comparison& c);

// Empty where the rows are of several lengths.
Decision Decide(const Comparison& c);

// Efficiency lengths (--efficiency): from which length on the compared mechanisms need less time,
// or memory, than exact softmax on this machine, measured as `cistern bench efficiency` does
// (bench/efficiency.h), with the heads, widths and options of the compared models.
// Causal models: causal, forward and forward+backward, and decoding; others bidirectional. Lengths
// double from 64 to `longest`. Interrupted: the rows so far.
std::vector<bench::EfficiencyRow> EfficiencyOf(const ModelConfig& config,
                                               const std::vector<std::string>& mechanisms,
                                               int64_t longest, uint64_t seed);

// What is to be said of the mechanism: a sentence for each way and pass. None: it was not measured,
// or is softmax itself.
std::vector<std::string> EfficiencySentences(const std::vector<bench::EfficiencyRow>& rows,
                                             const std::string& mechanism);

// Quality against each other criterion, the front of the two drawn as a line.
std::vector<std::string> DecisionPictures(const Comparison& c);

}  // namespace cistern::cli
