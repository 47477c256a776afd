// A classifier for which padding counts is not asked to ignore it; nothing else is left out.
#include "cistern/models/testing_models.h"
#include "cistern/verify/model_check.h"

namespace cistern {
namespace {

using namespace cistern::testing;

ModelConfig Classifier(const std::string& pooling) {
  ModelConfig c = SmallLm({"softmax"});
  c.kind = "encoder_classifier", c.classes = 5, c.pooling = ValueOf(pooling, PoolingKinds());
  c.positions = PositionKind::kLearned, c.head = HeadKind::kLinear;
  return c;
}

std::shared_ptr<EncoderClassifier> Double(const EncoderClassifier& from) {
  const auto m = Make<EncoderClassifier>(from.config());
  at::NoGradGuard guard;
  const auto weights = from.named_parameters();
  for (const auto& p : m->named_parameters()) p.value().copy_(weights[p.key()]);
  return m;
}

TEST(Padding, TheSuiteLeavesOutWhatIsSaidToSeeIt) {
  for (const auto& [padding, pooling, runs] :
       std::vector<std::tuple<std::string, std::string, bool>>{{"masked", "mean", true},
                                                               {"reads", "mean", true},
                                                               {"reads", "mean_all", false},
                                                               {"masked", "mean_zeros", false},
                                                               {"seen", "mean", false},
                                                               {"zeros", "cls", false}}) {
    ModelConfig c = Classifier(pooling);
    c.padding = ValueOf(padding, PaddingKinds());
    const auto single = Make<EncoderClassifier>(c, at::kFloat), twin = Double(*single);
    const auto results =
        verify::CheckRows(*single, *twin, Ids(1, 24)[0], [](const auto&) { return true; });
    ASSERT_EQ(results.size(), 4u);
    for (const auto& r : results) {
      EXPECT_FALSE(r.outcome.failed()) << padding << " " << pooling << " " << r.property << " "
                                       << r.outcome.where << " " << r.outcome.reason;
      const bool applies = r.outcome.kind == verify::Outcome::Kind::kPass;
      EXPECT_EQ(applies, runs || r.property != std::string("padding")) << padding << " " << pooling;
    }
  }
}

// Nystrom's inverse may begin with a number that all rows of a batch share.
TEST(Padding, RowsThatChangeEachOtherAreNotAskedToBeAlone) {
  for (const char* start : {"head", "batch"}) {
    ModelConfig c = Classifier("mean");
    c.attention = {"nystrom"},
    c.attention_options["nystrom"] = {{"landmarks", 4}, {"start", start}};
    const auto single = std::dynamic_pointer_cast<EncoderClassifier>(MakeModel(c, 1));
    const auto twin = Double(*single);
    const auto results =
        verify::CheckRows(*single, *twin, Ids(1, 24)[0], [](const auto&) { return true; });
    ASSERT_EQ(results.size(), 4u);
    for (const auto& r : results) {
      const bool alone = r.property == "padding" || r.property == "batch";
      EXPECT_FALSE(r.outcome.failed()) << start << " " << r.property << " " << r.outcome.where;
      EXPECT_EQ(r.outcome.kind == verify::Outcome::Kind::kNotApplicable,
                alone && start == std::string("batch"))
          << start << " " << r.property;
    }
  }
}

}  // namespace
}  // namespace cistern
