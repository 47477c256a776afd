#pragma once
// One mechanism at one shape: what `bench ops` checks and times.
#include <memory>
#include <string>
#include <vector>

#include "cistern/attention/operations.h"
#include "cistern/bench/timer.h"
#include "cistern/ops/impl.h"
#include "cistern/verify/outcome.h"
#include "cistern/verify/subject.h"

namespace cistern::bench {

// A form over a whole sequence; or one more token of each of `batch` sequences, after `length`.
enum class Way { kCausal, kBidirectional, kCross, kDecode };
const EnumNames<Way>& Ways();  // causal, bidirectional, cross, decode
Form FormOf(Way way);          // decode: causal

enum class Pass { kForward, kBoth };
const EnumNames<Pass>& Passes();  // forward, forward+backward

// How inputs lie in memory: [B,H,T,w], or [B,T,H,w] as the projections of a layer leave them.
enum class Layout { kHeadsFirst, kHeadsLast };
const EnumNames<Layout>& Layouts();  // heads_first, heads_last

const EnumNames<at::ScalarType>& Dtypes();  // float32, float64, bfloat16

struct Case {
  const MechanismInfo* info = nullptr;
  Json options = Json::object();  // of the mechanism
  Way way = Way::kCausal;
  Pass pass = Pass::kForward;
  int64_t length = 1024, batch = 1, heads = 8, width = 64;  // width: of the values, per head
  at::ScalarType dtype = at::kFloat;
  int64_t threads = 1;
  std::string isa;  // SIMD target of the kernels
  ops::Impl implementation = ops::Impl::kKernel;
  Layout layout = Layout::kHeadsFirst;

  Json What() const;            // Row::what
  std::string Contest() const;  // cases of one contest take turns
};

// Threads, SIMD target and implementation of a case while it lives.
class Setting {
 public:
  explicit Setting(const Case& c);
  ~Setting();
  Setting(const Setting&) = delete;
  Setting& operator=(const Setting&) = delete;

 private:
  int threads_, torch_threads_;
  std::string isa_;
  ops::Impl implementation_;
};

// Inputs of cases that take turns: those of equal shape and type are shared.
class Inputs {
 public:
  // The `number`-th of this shape.
  at::Tensor Get(at::IntArrayRef sizes, at::ScalarType dtype, Layout layout, size_t number);

 private:
  std::vector<std::pair<std::string, at::Tensor>> made_;
};

class Core {
 public:
  // UsageError where the mechanism, with these options, cannot be run this way: why, and what works
  // instead. Draws parameters from the seed.
  Core(const Case& c, Inputs& inputs, uint64_t seed = 1);

  // Whether it computes what it should, at up to kCheckedTokens tokens: outputs against the
  // mechanism's definition (tolerances of cistern verify), gradients against the reference
  // implementation in double; causal at full length: the first outputs, which know nothing of the
  // rest. Outputs at full length have to be finite. Call under a Setting.
  verify::Outcome Check();
  static constexpr int64_t kCheckedTokens = 67;

  // What is timed; `this` has to live. Sets SIMD target and implementation by itself. Decoding: the
  // first run of a sample is the token after `length` others; of a state that grows, a sample has
  // so few runs that the others hardly differ from it.
  Contestant Run();
  // Highest memory beyond the inputs (and the state before, where it decodes) in one run, outputs
  // and gradients included; 0 where the system does not say. Call under a Setting.
  int64_t PeakBytesOfRun();

  // Per run, for all rows. Operations: 0 where the mechanism does not say (operations.h).
  double Operations() const;
  // Inputs read, outputs written, with gradients the same once more, decoding the state read, and
  // written where it is of bounded size.
  double Bytes() const;
  // Of the state after `length` tokens of each row; 0 without verbs.
  int64_t StateBytes() const;

 private:
  void Once();  // a run
  at::Tensor Forward();
  verify::Tensors Leaves() const;  // inputs, then parameters, that gradients are wanted of

  Case case_;
  verify::Subject subject_;
  Mechanism* mechanism_ = nullptr;  // of case_.dtype
  verify::Tensors x_;
  at::Tensor gradient_;  // of the output
  State kept_, state_;   // decoding: after `length` - 1 tokens; that which is extended
};

}  // namespace cistern::bench
