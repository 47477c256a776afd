// Tests of the tests: a slot memory written plainly, token by token, passes the suite; the same
// with one defect is caught by the property that is there for it.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <map>
#include <tuple>

#include "cistern/attention/definition.h"
#include "cistern/attention/mechanisms/reuse.h"
#include "cistern/attention/mechanisms/softmax.h"
#include "cistern/attention/mechanisms/t2r.h"
#include "cistern/base/parallel.h"
#include "cistern/kernels/isa.h"
#include "cistern/ops/slot_memory.h"
#include "cistern/ops/testing.h"
#include "cistern/verify/suite.h"

namespace cistern::verify {
namespace {

enum class Defect {
  kNone,
  kDropsNormaliser,      // z does not pass from piece to piece
  kLooksAhead,           // a token reads what the next one wrote
  kPaddingInSum,         // padding is written, though its output is zero
  kSharedStatistic,      // log-weights are kept within 30 of the largest in the batch
  kFloatZ,               // z is rounded to float after every piece
  kLeaksOverStart,       // a new document sees the one before it
  kStartAtPieceIgnored,  // the same, only where the document begins with the piece
  kHiddenState,          // z is kept in the mechanism, not in the state
  kDetachesState,        // no gradient reaches the pieces before
  kLosesReadGradient,    // half the gradient of the read weights
  kPieceMaximum,     // exponentials refer to the largest log-weight of the piece, the future's too
  kReadsUnset,       // memory nobody wrote enters, times zero
  kGrows,            // every token leaves something in the state
  kMergeForgets,     // a merge takes the second piece's z for the whole's
  kCoarse,           // float read weights are rounded to bfloat16
  kCoarseDecoding,   // those of a single token
  kSettlesEmpty,     // the state in the tensors of an empty one is an empty one
  kOverflows,        // sums of plain exponentials
  kEmptyIsNan,       // an empty memory divides zero by zero
  kOneHeadTurned,    // one row of one head comes out in reverse
  kStepReadsFirst,   // a single token reads, then is written
  kThreadDependent,  // a last bit depends on the number of threads
  kIsaDependent,     // one instruction set is wrong
  kBidirectionalScaled,  // bidirectional reads are scaled by the wrong power of the latents
  kPaddingTimesZero,     // padding is written with weight zero
  kFutureTimesZero,      // every output has zero times all later values in it
  kNanIsZero,            // NaN reads as zero
  kSourceKept,           // what was written from a source is kept in the mechanism
  kClaimsPadding,        // says that padding takes part, which it does not
  kClaimsBatch,          // says that rows change each other, which they do not
  kClaimsAtOnce,         // says that a source is written at once, and takes pieces
};

Defect active = Defect::kNone;

const double kInf = std::numeric_limits<double>::infinity();

class Plain : public Mechanism {
 public:
  Plain(const MechanismInfo& info, const AttentionDims& dims) : Mechanism(info, dims) {
    AddProjection({"q", Side::kQuery, 3 * dims.heads});
    AddProjection({"k", Side::kKey, 3 * dims.heads});
    AddProjection({"v", Side::kKey, dims.dim});
    AddState("memory");
    AddState("z");
  }

  State EmptyState(int64_t batch, const at::TensorOptions& options) const override {
    const ops::SlotState slots =
        ops::EmptySlots(batch, dims().heads, 3, dims().dim / dims().heads, options);
    State state = {{{"memory", slots.memory}, {"z", slots.z}}};
    if (active == Defect::kGrows) state.tensors.push_back({"log", at::zeros({batch, 0})});
    return state;
  }

  at::Tensor DoExtend(const Tensors& x, State& state, const ops::Mask& mask) override {
    return Tokens(x, state, mask, true);
  }
  void DoWrite(const Tensors& x, State& state, const ops::Mask& mask) override {
    Tokens(x, state, mask, false);
    if (active == Defect::kSourceKept) {
      source_ = state["memory"];
      state["memory"] = at::zeros_like(source_);
    }
  }
  bool SeesPadding() const override {
    return active == Defect::kPaddingTimesZero || active == Defect::kClaimsPadding;
  }
  bool SeesBatch() const override { return active == Defect::kClaimsBatch; }
  bool WritesAtOnce() const override { return active == Defect::kClaimsAtOnce; }

  at::Tensor Read(const Tensors& x, const State& state) override {
    at::Tensor memory =
        (active == Defect::kSourceKept ? source_ : state["memory"]).to(x[0].scalar_type());
    if (active == Defect::kEmptyIsNan)
      memory =
          memory / at::isneginf(state["z"]).logical_not().to(memory.scalar_type()).unsqueeze(-1);
    if (active == Defect::kThreadDependent && NumThreads() > 2) memory = memory * (1 + 1e-7);
    return at::matmul(at::softmax(x[0], -1), memory);
  }

  State Merge(const State& first, const State& second) const override {
    const ops::SlotState whole =
        ops::MergeSlots({first["memory"], first["z"]}, {second["memory"], second["z"]});
    return {
        {{"memory", whole.memory}, {"z", active == Defect::kMergeForgets ? second["z"] : whole.z}}};
  }

  State Settled(const State& state) const override {
    return active == Defect::kSettlesEmpty
               ? EmptyState(state["z"].size(0), state["z"].options().dtype(at::kFloat))
               : state;
  }

  at::Tensor Definition(Form form, const Tensors& queries, const Tensors& x) const override {
    return EachQuery(form, queries, x, x[2].size(3), [](const auto& query, const auto& seen) {
      return at::matmul(at::softmax(query[0], 3),
                        at::matmul(at::softmax(seen[1], 2).transpose(2, 3), seen[2]));
    });
  }

 protected:
  at::Tensor BidirectionalRows(const Tensors& x, const ops::Mask& mask) override {
    const at::Tensor out = Mechanism::BidirectionalRows(x, mask);
    return active == Defect::kBidirectionalScaled ? out * 1.001 : out;
  }

 private:
  // rows [B] bool: where it holds, `value`, else x.
  static at::Tensor Where(const at::Tensor& rows, const at::Tensor& value, const at::Tensor& x) {
    std::vector<int64_t> shape(size_t(x.dim()), 1);
    shape[0] = x.size(0);
    return at::where(rows.view(shape), value, x);
  }

  at::Tensor Tokens(const Tensors& x, State& state, const ops::Mask& mask, bool reads) {
    const int64_t batch = x[2].size(0), length = x[2].size(2);
    at::Tensor memory = state["memory"], z = state["z"], weights = x[1].to(at::kDouble);
    if (active == Defect::kDetachesState) memory = memory.detach(), z = z.detach();
    if (active == Defect::kHiddenState && hidden_.defined() && !at::isneginf(z).all().item<bool>())
      z = hidden_;
    if (active == Defect::kSharedStatistic && weights.numel() > 0)
      weights = at::maximum(weights, weights.amax({0}, true) - 30.0);
    const at::Tensor top =
        active == Defect::kPieceMaximum && length > 0 ? weights.amax({2}) : at::Tensor();
    Tensors outs;
    for (int64_t t = 0; t < length; ++t) {
      at::Tensor real = mask.lengths ? *mask.lengths > t : at::ones({batch}, at::kBool);
      const at::Tensor s = weights.select(2, t), v = x[2].select(2, t).unsqueeze(2);
      const bool restarts = mask.starts && active != Defect::kLeaksOverStart &&
                            !(active == Defect::kStartAtPieceIgnored && t == 0);
      if (restarts) {
        const at::Tensor begins = mask.starts->select(1, t).logical_and(real);
        z = Where(begins, at::full({}, -kInf, z.options()), z);
        memory = Where(begins, at::zeros({}, memory.options()), memory);
      }
      if (active == Defect::kPaddingInSum) real = at::ones({batch}, at::kBool);
      const at::Tensor before = memory;
      at::Tensor next = at::logaddexp(z, s), share = at::exp(s - next);
      if (active == Defect::kOverflows) {
        next = at::log(at::exp(z) + at::exp(s));
        share = at::exp(s) / (at::exp(z) + at::exp(s));
      }
      if (top.defined()) share = at::exp(s - top) / at::exp(next - top);
      if (active == Defect::kPaddingTimesZero) {
        memory = memory + share.unsqueeze(-1) * (v - memory) * real.view({-1, 1, 1, 1});
      } else {
        memory = Where(real, memory + share.unsqueeze(-1) * (v - memory), memory);
      }
      z = Where(real, next, z);
      if (reads)
        outs.push_back(ReadOne(x[0].select(2, t),
                               active == Defect::kStepReadsFirst && length == 1 ? before : memory,
                               length == 1));
    }
    Keep(state, memory, z, length);
    if (!reads) return {};
    return Finish(outs, x[2], mask);
  }

  at::Tensor ReadOne(const at::Tensor& q, const at::Tensor& memory, bool single) const {
    at::Tensor p = at::softmax(q, -1);
    if (active == Defect::kLosesReadGradient) p = 0.5 * p + 0.5 * p.detach();
    const bool coarse = active == Defect::kCoarse || (active == Defect::kCoarseDecoding && single);
    if (coarse && p.scalar_type() == at::kFloat) p = p.to(at::kBFloat16).to(at::kFloat);
    return at::matmul(p.unsqueeze(2), memory.to(p.scalar_type()));
  }

  void Keep(State& state, const at::Tensor& memory, const at::Tensor& z, int64_t length) {
    state["memory"] = memory;
    state["z"] = z;
    if (active == Defect::kDropsNormaliser) state["z"] = at::full_like(z, -kInf);
    if (active == Defect::kFloatZ) state["z"] = z.to(at::kFloat).to(at::kDouble);
    if (active == Defect::kHiddenState) {
      hidden_ = z.detach();
      state["z"] = at::zeros_like(z);
    }
    if (active == Defect::kGrows)
      state["log"] = at::cat({state["log"], at::zeros({memory.size(0), length})}, 1);
  }

  at::Tensor Finish(Tensors outs, const at::Tensor& like, const ops::Mask& mask) const {
    if (outs.empty()) return at::zeros_like(like);
    if (active == Defect::kLooksAhead) {
      outs.push_back(outs.back());
      outs.erase(outs.begin());
    }
    at::Tensor out = at::cat(outs, 2);
    const bool single = like.size(0) * like.size(1) == 1;
    if (active == Defect::kOneHeadTurned && single) out = out.flip({2});
    if (active == Defect::kReadsUnset) out = out + 0.0 * at::empty(out.sizes(), out.options());
    if (active == Defect::kFutureTimesZero) out = out + 0.0 * like.sum(2, true);
    if (active == Defect::kNanIsZero) out = at::nan_to_num(out, 0.0);
    if (active == Defect::kThreadDependent && NumThreads() > 2) out = out * (1 + 1e-7);
    if (active == Defect::kIsaDependent && ActiveIsa() == SupportedIsas().back()) out = out * 1.001;
    if (!mask.lengths) return out;
    const at::Tensor pad = at::arange(out.size(2)).unsqueeze(0) >= mask.lengths->unsqueeze(1);
    return out.masked_fill(pad.unsqueeze(1).unsqueeze(-1), 0.0);
  }

  at::Tensor hidden_, source_;
};

const MechanismInfo& PlainInfo() {
  static MechanismInfo info = [] {
    MechanismInfo i;
    i.name = "plain";
    i.forms = {Form::kBidirectional, Form::kCausal, Form::kCross};
    i.merges = true;
    i.construct = [](const MechanismInfo& self, const Json&, const AttentionDims& dims) {
      return std::make_shared<Plain>(self, dims);
    };
    return i;
  }();
  return info;
}

class DefectScope {
 public:
  explicit DefectScope(Defect defect) { active = defect; }
  ~DefectScope() { active = Defect::kNone; }
};

std::string Text(const Outcome& o) {
  return StrCat("error ", o.error, ", tolerance ", o.tolerance, ", at ", o.where, " ", o.reason);
}

TEST(Mutants, ThePlainCopyPassesEveryProperty) {
  Subject subject(PlainInfo(), Json::object(), 1);
  for (const Property& property : Properties()) {
    const Outcome outcome = RunCheck(property, subject, ops::Impl::kKernel, {});
    EXPECT_FALSE(outcome.failed()) << property.name << ": " << Text(outcome);
  }
}

TEST(Mutants, EachDefectIsCaughtByItsProperty) {
  const std::multimap<Defect, std::string> caught_by = {{Defect::kDropsNormaliser, "pieces"},
                                                        {Defect::kDropsNormaliser, "resume"},
                                                        {Defect::kLooksAhead, "future"},
                                                        {Defect::kLooksAhead, "definition"},
                                                        {Defect::kPaddingInSum, "padding"},
                                                        {Defect::kPaddingInSum, "resume"},
                                                        {Defect::kPaddingInSum, "masked"},
                                                        {Defect::kLeaksOverStart, "masked"},
                                                        {Defect::kSharedStatistic, "batch"},
                                                        {Defect::kFloatZ, "pieces"},
                                                        {Defect::kLeaksOverStart, "packed"},
                                                        {Defect::kStartAtPieceIgnored, "packed"},
                                                        {Defect::kLeaksOverStart, "random"},
                                                        {Defect::kHiddenState, "state"},
                                                        {Defect::kHiddenState, "file"},
                                                        {Defect::kDetachesState, "gradient"},
                                                        {Defect::kDetachesState, "piece-grad"},
                                                        {Defect::kLosesReadGradient, "gradient"},
                                                        {Defect::kPieceMaximum, "future"},
                                                        {Defect::kReadsUnset, "poison"},
                                                        {Defect::kGrows, "state"},
                                                        {Defect::kMergeForgets, "merge"},
                                                        {Defect::kCoarse, "float"},
                                                        {Defect::kCoarse, "device"},
                                                        {Defect::kCoarseDecoding, "decoding"},
                                                        {Defect::kSettlesEmpty, "decoding"},
                                                        {Defect::kStepReadsFirst, "decoding"},
                                                        {Defect::kHiddenState, "decoding"},
                                                        {Defect::kGrows, "decoding"},
                                                        {Defect::kLeaksOverStart, "decoding"},
                                                        {Defect::kOverflows, "extreme"},
                                                        {Defect::kEmptyIsNan, "empty"},
                                                        {Defect::kOneHeadTurned, "one-head"},
                                                        {Defect::kStepReadsFirst, "pieces"},
                                                        {Defect::kThreadDependent, "threads"},
                                                        {Defect::kIsaDependent, "simd"},
                                                        {Defect::kBidirectionalScaled, "prefix"},
                                                        {Defect::kFutureTimesZero, "nonfinite"},
                                                        {Defect::kNanIsZero, "nonfinite"},
                                                        {Defect::kClaimsPadding, "declared"},
                                                        {Defect::kClaimsBatch, "declared"},
                                                        {Defect::kClaimsAtOnce, "declared"}};
  for (const auto& [defect, property] : caught_by) {
    const DefectScope scope(defect);
    Subject subject(PlainInfo(), Json::object(), 1);
    const Outcome outcome = RunCheck(FindProperty(property), subject, ops::Impl::kKernel, {});
    EXPECT_TRUE(outcome.failed() || outcome.kind == Outcome::Kind::kNotApplicable)
        << "defect " << int(defect) << " passed " << property << ": " << Text(outcome);
    if (outcome.kind == Outcome::Kind::kNotApplicable) {
      EXPECT_EQ(property, "simd") << outcome.reason;
    }
  }
  // Nothing stays behind that would make the next check fail.
  Subject subject(PlainInfo(), Json::object(), 1);
  EXPECT_FALSE(RunCheck(FindProperty("pieces"), subject, ops::Impl::kKernel, {}).failed());
}

// Exact mechanisms, and forms beside the causal one, are compared bit for bit too.
TEST(Mutants, ALastBitIsCaughtInEveryForm) {
  MechanismInfo exact = PlainInfo();
  exact.exact = true;
  for (const auto& [defect, property, form] :
       {std::tuple(Defect::kPieceMaximum, "future", Form::kCausal),
        std::tuple(Defect::kThreadDependent, "threads", Form::kBidirectional)}) {
    const DefectScope scope(defect);
    Subject subject(exact, Json::object(), 1);
    Settings settings;
    settings.forms = {form};
    const Outcome outcome = RunCheck(FindProperty(property), subject, ops::Impl::kKernel, settings);
    EXPECT_TRUE(outcome.failed()) << property << " " << Text(outcome);
  }
}

// It says that padding takes part, so as to be given it; the check itself is asked.
TEST(Mutants, PaddingTimesZeroIsCaught) {
  const DefectScope scope(Defect::kPaddingTimesZero);
  Subject subject(PlainInfo(), Json::object(), 1);
  Settings causal;  // bidirectional rows of several documents are refused
  causal.forms = {Form::kCausal};
  EXPECT_TRUE(FindProperty("nonfinite").check(subject, causal).failed());
}

TEST(Mutants, WhatWasWrittenFromASourceIsWatchedToo) {
  Settings cross;
  cross.forms = {Form::kCross};
  const std::multimap<Defect, std::string> caught_by = {{Defect::kSourceKept, "state"},
                                                        {Defect::kSourceKept, "file"},
                                                        {Defect::kPaddingInSum, "resume"},
                                                        {Defect::kDropsNormaliser, "resume"},
                                                        {Defect::kPaddingInSum, "masked"}};
  for (const auto& [defect, property] : caught_by) {
    Subject sound(PlainInfo(), Json::object(), 1);
    EXPECT_EQ(RunCheck(FindProperty(property), sound, ops::Impl::kKernel, cross).kind,
              Outcome::Kind::kPass)
        << property;
    const DefectScope scope(defect);
    Subject subject(PlainInfo(), Json::object(), 1);
    EXPECT_TRUE(RunCheck(FindProperty(property), subject, ops::Impl::kKernel, cross).failed())
        << "defect " << int(defect) << " passed " << property;
  }
}

// T2R whose map, folded into the projections, forgets the queries' 1/sqrt(d).
class WrongFold : public T2rMechanism {
 public:
  using T2rMechanism::T2rMechanism;
  HeadMap FirstMap(size_t projection) const override {
    return T2rMechanism::FirstMap(projection == 0 ? 1 : projection);
  }
};

TEST(Mutants, ALayerThatIsNotItsPartsIsCaught) {
  MechanismInfo info = FindMechanism("t2r");
  info.construct = InfoOf<WrongFold>("t2r").construct;
  Subject wrong(info, {{"features", 6}}, 1), sound(FindMechanism("t2r"), {{"features", 6}}, 1);
  EXPECT_TRUE(RunCheck(FindProperty("layer"), wrong, ops::Impl::kKernel, {}).failed());
  EXPECT_FALSE(RunCheck(FindProperty("definition"), wrong, ops::Impl::kKernel, {}).failed())
      << "the core alone is sound";
  EXPECT_FALSE(RunCheck(FindProperty("layer"), sound, ops::Impl::kKernel, {}).failed());
}

// Reuse that takes the heads over in the wrong order.
class TurnedHeads : public ReuseMechanism {
 public:
  using ReuseMechanism::ReuseMechanism;
  at::Tensor DoAttend(Form form, const Tensors& x, State* state, const ops::Mask& mask,
                      Handles& handles) override {
    for (HeadScores& s : handles) {
      for (at::Tensor* t : {&s.q, &s.k, &s.p}) {
        if (t->defined()) *t = t->flip({1});
      }
    }
    return ReuseMechanism::DoAttend(form, x, state, mask, handles);
  }
};

TEST(Mutants, ScoresCopiedFromTheWrongHeadsAreCaught) {
  MechanismInfo info = FindMechanism("reuse");
  info.construct = InfoOf<TurnedHeads>("reuse").construct;
  for (const char* keep : {"handles", "scores"}) {
    const Json options = {{"heads", -1}, {"keep", keep}};
    Subject wrong(info, options, 1), sound(FindMechanism("reuse"), options, 1);
    EXPECT_TRUE(RunCheck(FindProperty("copying"), wrong, ops::Impl::kKernel, {}).failed()) << keep;
    EXPECT_FALSE(RunCheck(FindProperty("definition"), wrong, ops::Impl::kKernel, {}).failed());
    EXPECT_EQ(RunCheck(FindProperty("copying"), sound, ops::Impl::kKernel, {}).kind,
              Outcome::Kind::kPass)
        << keep;
  }
}

// Exact attention whose cache is cut one token late.
class LateCut : public SoftmaxMechanism {
 public:
  using SoftmaxMechanism::SoftmaxMechanism;
  void Truncate(State& state, int64_t count) const override {
    SoftmaxMechanism::Truncate(state,
                               std::min(count + 1, state["count"].const_data_ptr<int64_t>()[0]));
  }
};

TEST(Mutants, ACacheCutLateIsCaught) {
  MechanismInfo info = FindMechanism("softmax");
  info.construct = InfoOf<LateCut>("softmax").construct;
  Subject late(info, Json::object(), 1), sound(FindMechanism("softmax"), Json::object(), 1);
  EXPECT_TRUE(RunCheck(FindProperty("truncate"), late, ops::Impl::kKernel, {}).failed());
  EXPECT_FALSE(RunCheck(FindProperty("truncate"), sound, ops::Impl::kKernel, {}).failed());
}

TEST(Mutants, AnExceptionIsAFailureWithItsMessage) {
  static MechanismInfo info = PlainInfo();
  info.construct = [](const MechanismInfo&, const Json&,
                      const AttentionDims& dims) -> std::shared_ptr<Mechanism> {
    struct Throws : Plain {
      using Plain::Plain;
      at::Tensor DoExtend(const Tensors&, State&, const ops::Mask&) override {
        Fail("no room left");
      }
    };
    return std::make_shared<Throws>(info, dims);
  };
  Subject subject(info, Json::object(), 1);
  const Outcome outcome = RunCheck(FindProperty("pieces"), subject, ops::Impl::kKernel, {});
  EXPECT_TRUE(outcome.failed());
  EXPECT_EQ(outcome.reason, "no room left");
}

TEST(Meters, KeepTheWorstAndCountNanAsFar) {
  Meter meter;
  const at::Tensor one = at::ones({4}, at::kDouble);
  meter.Close(one + 1e-9, one, 1e-6, "small");
  meter.Close(one + 5e-7, one, 1e-6, "larger");
  meter.Close(one, one, 1e-6, "none");
  EXPECT_EQ(meter.result().where, "larger");
  EXPECT_NEAR(meter.result().error, 5e-7, 1e-12);
  EXPECT_EQ(meter.result().kind, Outcome::Kind::kPass);
  EXPECT_EQ(meter.result().comparisons, 3);
  meter.Close(one * (0.0 / 0.0), one, 1e-6, "nan");
  EXPECT_EQ(meter.result().where, "nan");
  EXPECT_TRUE(meter.result().failed());
  EXPECT_EQ(RelativeRms(at::zeros({2}), at::zeros({2})), 0);
  EXPECT_EQ(RelativeRms(at::ones({2}), at::zeros({2})), kInf);
  EXPECT_EQ(RelativeRms(at::ones({2}), at::ones({3})), kInf);
  EXPECT_EQ(RelativeRms(at::full({2}, -kInf), at::full({2}, kInf)), kInf);
  EXPECT_EQ(RelativeRms(at::full({2}, -kInf), at::full({2}, -kInf)), 0);
  Meter zeros;
  zeros.Zero(at::zeros({2}), "zeros");
  EXPECT_FALSE(zeros.result().failed());
  zeros.Zero(at::full({2}, 0.0 / 0.0), "not a number");
  EXPECT_TRUE(zeros.result().failed());
  Meter bits;
  bits.Same(one, one, "same");
  EXPECT_FALSE(bits.result().failed());
  bits.Same(one + 1e-16 * 3, one, "a bit");
  EXPECT_TRUE(bits.result().failed());
}

}  // namespace
}  // namespace cistern::verify
