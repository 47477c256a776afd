#pragma once
// The checks behind suite.h's table of properties, by family. Each runs with the active
// implementation and says where its worst error was.
#include "cistern/verify/suite.h"

namespace cistern::verify {

// The ways to run a padded, masked or packed batch that a property is checked in.
struct Way {
  Form form;
  std::string name;
  // Causal: where pieces begin and end; for another length they are cut off or go on.
  std::vector<int64_t> cuts;
};
std::vector<Way> Ways(const Subject& subject, const Settings& settings, int64_t length);
at::Tensor RunWay(Mechanism& m, const Way& way, const Tensors& x, const ops::Mask& mask);

// properties_definition.cc: the right numbers
Outcome CheckDefinition(Subject& subject, const Settings& settings);
Outcome CheckFloat(Subject& subject, const Settings& settings);
Outcome CheckOneHead(Subject& subject, const Settings& settings);
Outcome CheckPrefix(Subject& subject, const Settings& settings);
Outcome CheckExtreme(Subject& subject, const Settings& settings);
Outcome CheckEmpty(Subject& subject, const Settings& settings);

// properties_pieces.cc: any way to cut a sequence
Outcome CheckPieces(Subject& subject, const Settings& settings);
Outcome CheckPieceGradients(Subject& subject, const Settings& settings);
Outcome CheckFuture(Subject& subject, const Settings& settings);

// properties_gradient.cc: finite differences
Outcome CheckGradient(Subject& subject, const Settings& settings);
// Gradients of the scalar f(x) against its slope along a random direction of each tensor in turn.
// Infinite entries stay where they are.
void Differences(const std::function<at::Tensor(const Tensors&)>& f, const Tensors& x,
                 double tolerance, const std::string& where, const std::vector<std::string>& names,
                 Meter& meter);

// properties_batch.cc: rows of a batch know nothing of each other
Outcome CheckPadding(Subject& subject, const Settings& settings);
Outcome CheckResume(Subject& subject, const Settings& settings);
Outcome CheckBatch(Subject& subject, const Settings& settings);
Outcome CheckPacked(Subject& subject, const Settings& settings);

// properties_masked.cc: tokens as if they were not there
Outcome CheckMasked(Subject& subject, const Settings& settings);

// properties_nonfinite.cc: what is not finite stays where it may be seen
Outcome CheckNonFinite(Subject& subject, const Settings& settings);

// properties_random.cc: shapes, masks and cuts nobody thought of
struct RandomCase {
  int64_t batch = 1, length = 1;
  std::vector<int64_t> lengths;                     // one per row, or none: no padding
  std::vector<std::pair<int64_t, int64_t>> starts;  // (row, token); none: no packed rows
  std::vector<int64_t> cuts;                        // 0, ..., length
  bool heads_last = false, in_float = false;
  uint64_t seed = 0;  // of the numbers
};
std::string Describe(const RandomCase& c);
Outcome CheckCase(Subject& subject, const Settings& settings, const RandomCase& c);
Outcome CheckRandom(Subject& subject, const Settings& settings);

// properties_state.cc: the state is everything, and a value
Outcome CheckState(Subject& subject, const Settings& settings);
Outcome CheckFile(Subject& subject, const Settings& settings);
Outcome CheckDecoding(Subject& subject, const Settings& settings);
Outcome CheckMerge(Subject& subject, const Settings& settings);
Outcome CheckTruncate(Subject& subject, const Settings& settings);

// properties_layer.cc: what stands around a core
Outcome CheckLayer(Subject& subject, const Settings& settings);
Outcome CheckCopying(Subject& subject, const Settings& settings);
Outcome CheckDeclared(Subject& subject, const Settings& settings);

// properties_machine.cc: threads, instruction sets, memory
Outcome CheckThreads(Subject& subject, const Settings& settings);
Outcome CheckSimd(Subject& subject, const Settings& settings);
Outcome CheckPoison(Subject& subject, const Settings& settings);

// properties_device.cc: another device than the CPU
Outcome CheckDevice(Subject& subject, const Settings& settings);

}  // namespace cistern::verify
