// Latents of another width than the tokens that they attend to (input_dim), as in the released
// Perceiver (lucidrains/perceiver-pytorch; spec 2.9): against a computation in double, sizes,
// files, refusals.
#include <cmath>
#include <map>

#include "cistern/attention/testing_mechanisms.h"
#include "cistern/base/error.h"
#include "cistern/io/test_folder.h"
#include "cistern/models/encoder_classifier.h"
#include "cistern/models/testing_models.h"

namespace cistern {
namespace {

using namespace cistern::testing;

constexpr int64_t kVocab = 11, kTokens = 10, kLatent = 12, kLatents = 5, kBands = 2, kLength = 9;
constexpr int64_t kInner = 6;  // one cross head of that width

ModelConfig Perceiver() {
  ModelConfig c;
  c.kind = "encoder_classifier";
  c.vocab_size = kVocab, c.classes = 3, c.max_length = kLength;
  c.dim = kLatent, c.input_dim = kTokens, c.heads = 2, c.layers = 3;
  c.attention = {"perceiver", "softmax", "perceiver"};
  c.attention_options = Json{
      {"perceiver",
       {{"latents", kLatents}, {"heads", 1}, {"head_dim", kInner}, {"fourier_bands", kBands}}}};
  c.activation = Activation::kGeglu, c.ffn_bias = true;
  c.pooling = PoolingKind::kMean, c.norm_pooled = true, c.head = HeadKind::kLinear;
  return c;
}

at::Tensor Logits(EncoderClassifier& m, const at::Tensor& ids,
                  const std::vector<int64_t>& lengths) {
  return m.Logits(NamedTensors{{"ids", ids}, {"lengths", Lengths(lengths)}});
}

class Plain {
 public:
  explicit Plain(EncoderClassifier& model) {
    for (auto& p : model.named_parameters()) weights_[p.key()] = p.value().detach();
  }
  // ids [T] -> [classes]
  at::Tensor Logits(const at::Tensor& ids) const {
    std::vector<at::Tensor> rows;  // a token and the features of its place
    for (int64_t t = 0; t < ids.size(0); ++t) {
      const double x = 2.0 * double(t) / double(kLength - 1) - 1;
      std::vector<double> features;
      for (const double f : {1.0, 5.0}) features.push_back(std::sin(M_PI * f * x));
      for (const double f : {1.0, 5.0}) features.push_back(std::cos(M_PI * f * x));
      features.push_back(x);
      rows.push_back(at::cat({weights_.at("embed_tokens.weight")[ids[t].item<int64_t>()],
                              at::tensor(features, at::kDouble)}));
    }
    const at::Tensor tokens = at::stack(rows);
    at::Tensor z = weights_.at("layers.0.attention.core.latents")[0];
    for (int64_t l = 0; l < 3; ++l) {
      const std::string at = StrCat("layers.", l, ".");
      const at::Tensor h = Norm(z, at + "attention_norm");
      z = z + (l == 1 ? Attend(h, h, 2, at + "attention.")
                      : Attend(h, Norm(tokens, at + "source_norm"), 1, at + "attention."));
      const std::vector<at::Tensor> halves =
          Map(Norm(z, at + "ffn_norm"), at + "ffn.up_proj").chunk(2, 1);
      z = z + Map(halves[0] * at::gelu(halves[1]), at + "ffn.down_proj");
    }
    return Map(Norm(z.mean(0, true), "norm"), "classifier.out_proj")[0];
  }

 private:
  at::Tensor Map(const at::Tensor& x, const std::string& name) const {
    const at::Tensor y = at::matmul(x, weights_.at(name + ".weight").t());
    const auto bias = weights_.find(name + ".bias");
    return bias == weights_.end() ? y : y + bias->second;
  }
  at::Tensor Norm(const at::Tensor& x, const std::string& name) const {
    const at::Tensor centred = x - x.mean(1, true);
    return centred / (centred.square().mean(1, true) + 1e-5).sqrt() *
               weights_.at(name + ".weight") +
           weights_.at(name + ".bias");
  }
  at::Tensor Attend(const at::Tensor& x, const at::Tensor& source, int64_t heads,
                    const std::string& at) const {
    const at::Tensor q = Map(x, at + "q_proj"), k = Map(source, at + "k_proj"),
                     v = Map(source, at + "v_proj");
    const int64_t width = q.size(1) / heads;
    std::vector<at::Tensor> out;
    for (int64_t h = 0; h < heads; ++h) {
      const auto head = [&](const at::Tensor& of) { return of.narrow(1, h * width, width); };
      out.push_back(at::matmul(
          at::softmax(at::matmul(head(q), head(k).t()) / std::sqrt(double(width)), 1), head(v)));
    }
    return Map(at::cat(out, 1), at + "o_proj");
  }

  std::map<std::string, at::Tensor> weights_;
};

TEST(PerceiverWidth, LatentsAreOfAnotherWidthThanTheTokens) {
  const auto m = Make<EncoderClassifier>(Perceiver());
  at::manual_seed(3);
  const at::Tensor ids = at::randint(0, kVocab, {3, kLength}, at::kLong);
  const std::vector<int64_t> lengths = {kLength, 4, 1};
  const at::Tensor got = Logits(*m, ids, lengths);
  const Plain plain(*m);
  for (int64_t b = 0; b < 3; ++b)
    ExpectClose(got[b], plain.Logits(ids[b].narrow(0, 0, lengths[size_t(b)])), 1e-11,
                StrCat("row ", b));
}

// The released modules, counted one by one; theirs have a bias in each output map of attention.
TEST(PerceiverWidth, ParametersAreThoseOfTheReleasedCode) {
  const int64_t D = kLatent, C = kTokens + 2 * kBands + 1;
  const int64_t ffn = 2 * D + D * 8 * D + 8 * D + 4 * D * D + D;  // a norm, two maps
  const int64_t cross = 2 * D + 2 * C + D * kInner + C * 2 * kInner + kInner * D + D;
  const int64_t self = 2 * D + 4 * D * D + D;
  const int64_t want =
      kVocab * kTokens + kLatents * D + 2 * (cross + ffn) + (self + ffn) + 2 * D + 3 * D + 3;
  EXPECT_EQ(MakeModel(Perceiver(), 1)->ParameterCount(), want - 3 * D);
}

TEST(PerceiverWidth, FoldersRoundTripAndPositionsHaveTheTokensWidth) {
  for (const int64_t width : {4, 40}) {
    ModelConfig c = Perceiver();
    c.input_dim = width, c.positions = PositionKind::kLearned, c.embedding_norm = true;
    const auto m = Make<EncoderClassifier>(c);
    EXPECT_EQ(m->named_parameters()["embed_positions.weight"].size(1), width);
    EXPECT_EQ(m->named_parameters()["embed_norm.weight"].size(0), width);
    EXPECT_EQ(m->named_parameters()["norm.weight"].size(0), kLatent);
    const TestFolder folder;
    SaveModel(*m, folder.path());
    const auto loaded = std::dynamic_pointer_cast<EncoderClassifier>(LoadModel(folder.path()));
    const at::Tensor ids = at::randint(0, kVocab, {2, 6}, at::kLong);
    ExpectSameBits(Logits(*loaded, ids, {6, 3}), Logits(*m, ids, {6, 3}), StrCat(width));
  }
}

TEST(PerceiverWidth, OtherModelsHaveOneWidth) {
  const auto error = [](auto&& change) {
    ModelConfig c = Perceiver();
    change(c);
    return Thrown([&] { MakeModel(c, 1); });
  };
  ExpectContains(error([](ModelConfig& c) {
                   c.attention = {"softmax", "perceiver", "softmax"};
                 }),
                 {"input_dim=10", "dim=12", "softmax", "attention=perceiver"});
  ExpectContains(error([](ModelConfig& c) {
                   c.kind = "decoder_lm", c.attention = {"latte"};
                   c.classes = 0, c.norm_pooled = false, c.head = HeadKind::kRelu;
                 }),
                 {"input_dim=10"});
}

}  // namespace
}  // namespace cistern
