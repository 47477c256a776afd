// What is timed is checked first: every mechanism in every way it has, and broken ones.
#include "cistern/bench/core.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "cistern/bench/ops.h"
#include "cistern/kernels/isa.h"

namespace cistern::bench {
namespace {

MeasureSettings Quick() {
  MeasureSettings settings;
  settings.timer.seconds = 0, settings.timer.runs = 1, settings.timer.shortest = 0;
  return settings;
}

Case Small(const std::string& mechanism, Way way = Way::kCausal, Pass pass = Pass::kForward) {
  Case c;
  c.info = &FindMechanism(mechanism);
  c.way = way, c.pass = pass;
  c.length = 80, c.batch = 2, c.heads = 2, c.width = 8;
  c.isa = ActiveIsa();
  return c;
}

// Latte, which gives its outputs times `factor` from token `from` on, in whole sequences or, with
// steps, one token at a time alone; or loses a part of a gradient.
struct Defect {
  double factor = 1;
  int64_t from = 0;
  bool steps = false;
  bool gradient = false;
};
Defect defect;

class Broken : public Mechanism {
 public:
  Broken(const MechanismInfo& info, const AttentionDims& dims)
      : Mechanism(info, dims), latte_(FindMechanism("latte").Make(Json::object(), dims)) {
    for (const Projection& p : latte_->Projections()) AddProjection(p);
    for (const std::string& name : latte_->StateNames()) AddState(name);
  }
  State EmptyState(int64_t batch, const at::TensorOptions& options) const override {
    return latte_->EmptyState(batch, options);
  }
  at::Tensor Definition(Form form, const std::vector<at::Tensor>& queries,
                        const std::vector<at::Tensor>& x) const override {
    return latte_->Definition(form, queries, x);
  }

 protected:
  at::Tensor DoExtend(const std::vector<at::Tensor>& x, State& state,
                      const ops::Mask& mask) override {
    std::vector<at::Tensor> y = x;
    // As of a kernel: the reference implementation is right.
    if (defect.gradient && ops::ActiveImpl() == ops::Impl::kKernel)
      y[2] = y[2] * 0.5 + y[2].detach() * 0.5;
    at::Tensor out = latte_->Extend(y, state, mask);
    const int64_t length = out.size(2);
    if (defect.steps ? length > 1 : length <= defect.from) return out;
    const int64_t from = defect.steps ? 0 : defect.from;
    return at::cat({out.narrow(2, 0, from), out.narrow(2, from, length - from) * defect.factor}, 2);
  }

 private:
  std::shared_ptr<Mechanism> latte_;
};

const MechanismInfo& BrokenInfo() {
  static const MechanismInfo info = [] {
    MechanismInfo i = FindMechanism("latte");
    i.name = "broken";
    i.forms = {Form::kCausal};
    i.refusals = {"cross: it is broken; use latte instead"};
    i.construct = [](const MechanismInfo& self, const Json&, const AttentionDims& dims) {
      return std::make_shared<Broken>(self, dims);
    };
    return i;
  }();
  return info;
}

Row MeasureBroken(Way way, Pass pass, const Defect& with) {
  defect = with;
  Case c = Small("latte", way, pass);
  c.info = &BrokenInfo();
  Peaks peaks;
  const Row row = Measure({c}, Quick(), peaks).at(0);
  defect = {};
  return row;
}

TEST(Core, WrongValuesAreNotTimed) {
  EXPECT_EQ(MeasureBroken(Way::kCausal, Pass::kForward, {}).skipped, "");
  EXPECT_EQ(MeasureBroken(Way::kCausal, Pass::kBoth, {}).skipped, "");
  EXPECT_EQ(MeasureBroken(Way::kDecode, Pass::kForward, {}).skipped, "");
  const auto refused = [](const Row& row, const std::string& where) {
    EXPECT_TRUE(row.wrong);
    EXPECT_EQ(row.ms.runs, 0);
    EXPECT_TRUE(row.figures.empty());
    EXPECT_NE(row.skipped.find("WRONG VALUES"), std::string::npos) << row.skipped;
    EXPECT_NE(row.skipped.find(where), std::string::npos) << row.skipped;
  };
  refused(MeasureBroken(Way::kCausal, Pass::kForward, {.factor = 1.001}), "relative error 0.001");
  // Right in the short run, wrong in what is timed.
  refused(MeasureBroken(Way::kCausal, Pass::kForward, {.factor = std::nan(""), .from = 70}),
          "finite outputs at T=80");
  refused(MeasureBroken(Way::kDecode, Pass::kForward, {.factor = 1.001, .steps = true}), "decode");
  EXPECT_EQ(MeasureBroken(Way::kCausal, Pass::kForward, {.factor = 1.001, .steps = true}).skipped,
            "");
  refused(MeasureBroken(Way::kCausal, Pass::kBoth, {.gradient = true}), "gradient of v");
  EXPECT_EQ(MeasureBroken(Way::kCausal, Pass::kForward, {.gradient = true}).skipped, "");
}

// A cache that was cut back or cloned has no room for the next token, and moves: before what is
// timed, or decoding with softmax would be as slow as a copy of all keys and values.
TEST(Core, NoMoveOfACacheIsTimed) {
  Case c = Small("softmax", Way::kDecode);
  c.length = 4096, c.batch = 4, c.heads = 8, c.width = 64;  // a cache of 67 MB
  Inputs inputs;
  Core core(c, inputs);
  for (int run = 0; run < 2; ++run) {
    const int64_t peak = core.PeakBytesOfRun();
    EXPECT_LT(peak, int64_t{16} << 20) << run;
  }
}

// Softmax that notes how many tokens its cache holds when a single one comes.
std::vector<int64_t> held;

class Counting : public Mechanism {
 public:
  Counting(const MechanismInfo& info, const AttentionDims& dims)
      : Mechanism(info, dims), softmax_(FindMechanism("softmax").Make(Json::object(), dims)) {
    for (const Projection& p : softmax_->Projections()) AddProjection(p);
    for (const std::string& name : softmax_->StateNames()) AddState(name);
  }
  State EmptyState(int64_t batch, const at::TensorOptions& options) const override {
    return softmax_->EmptyState(batch, options);
  }
  void Truncate(State& state, int64_t count) const override { softmax_->Truncate(state, count); }
  at::Tensor Definition(Form form, const std::vector<at::Tensor>& queries,
                        const std::vector<at::Tensor>& x) const override {
    return softmax_->Definition(form, queries, x);
  }

 protected:
  at::Tensor DoExtend(const std::vector<at::Tensor>& x, State& state,
                      const ops::Mask& mask) override {
    if (x[0].size(2) == 1) held.push_back(state["count"][0].item<int64_t>());
    return softmax_->Extend(x, state, mask);
  }

 private:
  std::shared_ptr<Mechanism> softmax_;
};

// A sample repeats its token: at short lengths it would be the time of longer ones.
TEST(Core, DecodingIsTimedAtItsLength) {
  for (const bool truncates : {true, false}) {
    MechanismInfo info = FindMechanism("softmax");
    info.name = "counting", info.truncates = truncates;
    info.construct = [](const MechanismInfo& self, const Json&, const AttentionDims& dims) {
      return std::make_shared<Counting>(self, dims);
    };
    for (const int64_t length : {1, 64, 640}) {
      Case c = Small("softmax", Way::kDecode);
      c.info = &info, c.length = length;
      Inputs inputs;
      Core core(c, inputs);
      const Contestant timed = core.Run();
      EXPECT_LE(timed.most, std::max<int64_t>(1, length / 20));
      for (int sample = 0; sample < 2; ++sample) {
        timed.before();
        held.clear();
        for (int64_t i = 0; i < timed.most; ++i) timed.run();
        ASSERT_EQ(int64_t(held.size()), timed.most);
        EXPECT_EQ(held.front(), length) << sample;
      }
    }
  }
  Inputs inputs;
  EXPECT_GT(Core(Small("latte", Way::kDecode), inputs).Run().most, 100);
}

// Its slots are nearly alike, so that the gradient of the queries is 10^-4 of that of the values
// and has few bits left in float.
TEST(Core, AGradientThatNearlyCancelsIsNotWrong) {
  Case c = Small("set_transformer", Way::kBidirectional, Pass::kBoth);
  c.heads = 8, c.width = 64;
  c.length = 70;
  Peaks peaks;
  EXPECT_EQ(Measure({c}, Quick(), peaks).at(0).skipped, "");
}

// One token has all the weight, whatever its query and key are: their gradients are 0.
TEST(Core, AGradientOfZeroIsNotWrong) {
  std::vector<Case> cases;
  for (const char* mechanism : {"softmax", "window", "dilated", "reuse", "latte"})
    cases.push_back(Small(mechanism, Way::kCausal, Pass::kBoth));
  for (const char* mechanism : {"abc_mlp", "perceiver", "nystrom"})
    cases.push_back(Small(mechanism, Way::kBidirectional, Pass::kBoth));
  for (Case& c : cases) c.length = 1;
  Peaks peaks;
  for (const Row& row : Measure(cases, Quick(), peaks)) EXPECT_EQ(row.skipped, "") << row.what;
}

// Wrong from a token on that the short run does not have, but within the first ones of the long.
TEST(Core, TheTimedOutputsAreChecked) {
  class Long : public Broken {
   public:
    using Broken::Broken;

   protected:
    at::Tensor DoExtend(const std::vector<at::Tensor>& x, State& state,
                        const ops::Mask& mask) override {
      const at::Tensor out = Broken::DoExtend(x, state, mask);
      return out.size(2) > Core::kCheckedTokens ? out * 1.01 : out;
    }
  };
  MechanismInfo info = BrokenInfo();
  info.construct = [](const MechanismInfo& self, const Json&, const AttentionDims& dims) {
    return std::make_shared<Long>(self, dims);
  };
  Case c = Small("latte");
  c.info = &info;
  Peaks peaks;
  const Row row = Measure({c}, Quick(), peaks).at(0);
  EXPECT_TRUE(row.wrong);
  EXPECT_NE(row.skipped.find("outputs at T=80"), std::string::npos) << row.skipped;
}

// Each either is measured, with its figures, or says why not; nothing is wrong.
TEST(Core, EveryMechanismInEveryWay) {
  for (const Way way : {Way::kCausal, Way::kBidirectional, Way::kCross, Way::kDecode}) {
    std::vector<Case> cases;
    for (const MechanismInfo* info : Mechanisms()) {
      cases.push_back(Small(info->name, way));
      if (way != Way::kDecode) cases.push_back(Small(info->name, way, Pass::kBoth));
    }
    Peaks peaks;
    const std::vector<Row> rows = Measure(cases, Quick(), peaks);
    int64_t measured = 0;
    for (size_t i = 0; i < rows.size(); ++i) {
      const Row& row = rows[i];
      EXPECT_FALSE(row.wrong) << row.what << row.skipped;
      if (!row.skipped.empty()) {
        EXPECT_NE(row.skipped.find("not supported: "), std::string::npos)
            << row.what << row.skipped;
        continue;
      }
      ++measured;
      EXPECT_EQ(row.ms.runs, 1);
      const double tokens = way == Way::kDecode ? 2 : 160;
      EXPECT_NEAR(row.figures["tokens_per_s"].get<double>() * row.ms.median, 1e3 * tokens,
                  1e-6 * tokens);
      EXPECT_GT(row.figures["gb_per_s"].get<double>(), 0);
      EXPECT_EQ(row.figures.contains("ns_per_head"), way == Way::kDecode);
    }
    EXPECT_GT(measured, 15) << NameOf(way, Ways());
  }
}

TEST(Core, TypesTargetsAndLayouts) {
  std::vector<Case> cases;
  for (const auto dtype : {at::kFloat, at::kDouble, at::kBFloat16}) {
    for (const std::string& isa : SupportedIsas()) {
      for (const Layout layout : {Layout::kHeadsFirst, Layout::kHeadsLast}) {
        for (const auto impl : {ops::Impl::kKernel, ops::Impl::kComposite}) {
          Case c = Small("latte", Way::kCausal, Pass::kBoth);
          c.dtype = dtype, c.isa = isa, c.layout = layout, c.implementation = impl;
          cases.push_back(c);
        }
      }
    }
  }
  const std::string before = ActiveIsa();
  Peaks peaks;
  for (const Row& row : Measure(cases, Quick(), peaks)) EXPECT_EQ(row.skipped, "") << row.what;
  EXPECT_EQ(ActiveIsa(), before);
  EXPECT_EQ(ops::ActiveImpl(), ops::Impl::kKernel);
}

TEST(Core, RefusalsSayWhy) {
  Peaks peaks;
  const auto refused = [&](const Case& c, const std::string& why) {
    try {
      Measure({c}, Quick(), peaks);
      ADD_FAILURE() << "no refusal of " << c.What();
    } catch (const UsageError& e) {
      EXPECT_NE(std::string(e.what()).find(why), std::string::npos) << e.what();
    }
  };
  refused(Small("nystrom", Way::kCausal), "[nystrom] has no causal");
  refused(Small("latte", Way::kDecode, Pass::kBoth), "decoding has no backward pass");
  Case c = Small("latte");
  c.options = {{"latents", 7}};
  refused(c, "latents=7 is not divisible by heads=2");
  c = Small("latte");
  c.length = int64_t{1} << 40;
  refused(c, "MB that are free");
  // In a sweep they are rows.
  const auto rows = Measure({Small("nystrom", Way::kCausal), Small("latte")}, Quick(), peaks);
  EXPECT_TRUE(rows[0].skipped.starts_with("not supported: [nystrom] has no causal"));
  EXPECT_EQ(rows[1].skipped, "");
}

TEST(Core, OptionsMakeASweep) {
  Sweep sweep;
  sweep.mechanisms = {{&FindMechanism("latte"), Json::object()},
                      {&FindMechanism("abc_mlp"), Json::object()}};
  sweep.threads = {1}, sweep.isas = {"a", "b"};
  sweep.lengths = {16, 32};
  AddOptions(sweep, {"latte.latents=16,32", "abc_mlp.slots=4", "latte.dropout=published"});
  ASSERT_EQ(sweep.mechanisms.size(), 3u);
  EXPECT_EQ(sweep.mechanisms[1].second, (Json{{"latents", 32}, {"dropout", "published"}}));
  EXPECT_EQ(sweep.mechanisms[2].second, (Json{{"slots", 4}}));
  EXPECT_EQ(sweep.Cases().size(), size_t(3 * 2 * 2 * 2));
  sweep.ways = {Way::kDecode, Way::kCausal};  // decoding has one pass
  EXPECT_EQ(sweep.Cases().size(), size_t(3 * 2 * 2 * 3));
  const auto wrong = [&](const std::string& assignment, const std::string& why) {
    try {
      AddOptions(sweep, {assignment});
      ADD_FAILURE() << assignment;
    } catch (const UsageError& e) {
      EXPECT_NE(std::string(e.what()).find(why), std::string::npos) << e.what();
    }
  };
  wrong("latte.latent=3", "did you mean 'latents'?");
  wrong("late.latents=3", "did you mean 'latte'?");
  wrong("latents=3", "MECHANISM.OPTION=VALUE");
}

}  // namespace
}  // namespace cistern::bench
