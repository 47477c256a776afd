// Every mechanism of the registry, with every set of options it lists, through every property.
#include "cistern/verify/suite.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cctype>

#include "cistern/ops/testing.h"
#include "cistern/tensors/testing_device.h"

namespace cistern::verify {
namespace {

struct Row {
  const MechanismInfo* info;
  size_t number;  // of the options in info->cases
  const Property* property;
};

std::vector<Row> Rows() {
  std::vector<Row> rows;
  for (const MechanismInfo* info : Mechanisms()) {
    for (size_t i = 0; i < info->cases.size(); ++i) {
      for (const Property& property : Properties()) rows.push_back({info, i, &property});
    }
  }
  return rows;
}

std::string NameOf(const ::testing::TestParamInfo<Row>& row) {
  std::string name =
      StrCat(row.param.info->name, "_", row.param.number, "_", row.param.property->name);
  for (char& c : name) c = std::isalnum(static_cast<unsigned char>(c)) ? c : '_';
  return name;
}

class Conformance : public ::testing::TestWithParam<Row> {};

TEST_P(Conformance, Holds) {
  const Row& row = GetParam();
  Settings settings;
  if (row.property->scope == Property::Scope::kDevice) settings.device = testing::kMadeUpDevice;
  Subject subject(*row.info, row.info->cases[row.number], settings.seed);
  for (const ops::Impl impl : settings.implementations) {
    if (!row.property->Runs(impl, settings)) continue;
    const Outcome outcome = RunCheck(*row.property, subject, impl, settings);
    EXPECT_FALSE(outcome.failed())
        << subject.Name() << ", " << ops::ImplName(impl) << ": " << row.property->description
        << "\nerror " << outcome.error << ", tolerance " << outcome.tolerance << ", at "
        << outcome.where << " " << outcome.reason << "\nseed " << settings.seed;
  }
}

INSTANTIATE_TEST_SUITE_P(All, Conformance, ::testing::ValuesIn(Rows()), NameOf);

TEST(Suite, NamesAreKnownAndCounted) {
  EXPECT_EQ(FindProperty("packed").name, "packed");
  testing::ExpectContains(testing::Thrown([] { FindProperty("pakced"); }),
                          {"property 'pakced'", "did you mean 'packed'?"});
  const std::vector<const MechanismInfo*> latte = {&FindMechanism("latte")};
  const std::vector<const Property*> some = {&FindProperty("empty"), &FindProperty("simd")};
  const Settings settings;
  int64_t heard = 0;
  const auto results = RunSuite(latte, some, settings, [&](const Result& r) {
    EXPECT_EQ(r.mechanism, "latte");
    return ++heard < 3;
  });
  EXPECT_EQ(heard, 3) << "the run stops when it is told to";
  EXPECT_EQ(results.size(), 3u);
  EXPECT_EQ(CountChecks(latte, some, settings), int64_t(3 * 3 * latte[0]->cases.size()));
}

TEST(Suite, FormsAreRunApart) {
  Settings settings;
  settings.implementations = {ops::Impl::kKernel};
  const std::vector<const MechanismInfo*> some = {&FindMechanism("gated_slots"),
                                                  &FindMechanism("latte")};
  const std::vector<const Property*> properties = {&FindProperty("definition"),
                                                   &FindProperty("prefix")};
  std::vector<std::string> rows;
  for (const Result& r : RunSuite(some, properties, settings)) {
    if (r.options != FindMechanism(r.mechanism).cases[0]) continue;
    rows.push_back(r.mechanism + " " + (r.form ? FormName(*r.form) : "all") + " " + r.property);
    if (r.form && r.outcome.comparisons > 0) {
      EXPECT_EQ(r.outcome.where.rfind(FormName(*r.form), 0), 0u) << r.outcome.where;
    }
  }
  EXPECT_EQ(rows,
            (std::vector<std::string>{"gated_slots causal definition", "gated_slots all prefix",
                                      "latte bidirectional definition", "latte causal definition",
                                      "latte cross definition", "latte all prefix"}));
}

TEST(Suite, EveryCaseReachesWhatItNames) {
  // A case that changes nothing in the core changes its layer, and the layer's property covers it.
  const auto parameters = [](const Json& options) {
    AttentionDims dims;
    dims.dim = 10, dims.heads = 2, dims.max_length = 64;
    std::string names;
    const auto luna = FindMechanism("luna").Make(options, dims);
    for (const Projection& p : luna->Projections()) names += p.name + "(" + p.map + ") ";
    return names;
  };
  std::vector<std::string> seen;
  for (const Json& options : FindMechanism("luna").cases) seen.push_back(parameters(options));
  std::sort(seen.begin(), seen.end());
  EXPECT_GT(std::unique(seen.begin(), seen.end()) - seen.begin(), 2);
  for (const MechanismInfo* info : Mechanisms()) {
    for (const Json& options : info->cases) {
      Subject subject(*info, options, 1);
      const Outcome layer = RunCheck(FindProperty("layer"), subject, ops::Impl::kKernel, {});
      EXPECT_EQ(layer.kind, Outcome::Kind::kPass) << subject.Name() << " " << layer.where;
    }
  }
}

TEST(Suite, AnotherDeviceIsComparedWithTheCpuAlone) {
  const std::vector<const MechanismInfo*> latte = {&FindMechanism("latte")};
  const std::vector<const Property*> some = {&FindProperty("pieces"), &FindProperty("device")};
  Settings settings;
  const int64_t pieces = CountChecks(latte, {some[0]}, settings);
  EXPECT_EQ(CountChecks(latte, some, settings), pieces);
  settings.device = at::kMeta;
  EXPECT_EQ(CountChecks(latte, some, settings), int64_t(3 * latte[0]->cases.size()));
}

TEST(Suite, HeadGroupsAreAMechanismToo) {
  Subject subject(FindMechanism("softmax:2+latte:1"), Json::object(), 1);
  EXPECT_EQ(subject.heads(), 3);
  for (const char* name : {"definition", "pieces", "packed", "file"}) {
    const Outcome outcome = RunCheck(FindProperty(name), subject, ops::Impl::kKernel, {});
    EXPECT_EQ(outcome.kind, Outcome::Kind::kPass)
        << name << ": " << outcome.where << outcome.reason;
  }
  EXPECT_EQ(RunCheck(FindProperty("one-head"), subject, ops::Impl::kKernel, {}).kind,
            Outcome::Kind::kNotApplicable);
}

TEST(Suite, OnlyTheFormsAskedForAreRun) {
  Settings settings;
  settings.forms = {Form::kCross};
  Subject subject(FindMechanism("latte"), {{"latents", 6}}, 1);
  EXPECT_EQ(RunCheck(FindProperty("future"), subject, ops::Impl::kKernel, settings).kind,
            Outcome::Kind::kNotApplicable);
  const Outcome definition =
      RunCheck(FindProperty("definition"), subject, ops::Impl::kKernel, settings);
  EXPECT_EQ(definition.kind, Outcome::Kind::kPass);
  EXPECT_NE(definition.where.find("cross"), std::string::npos) << definition.where;
  EXPECT_GT(definition.error, 0);
}

}  // namespace
}  // namespace cistern::verify
