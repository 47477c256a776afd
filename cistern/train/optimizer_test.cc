// Every optimizer against plain loops in double, written from its definition; what all share.
#include "cistern/train/optimizer.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <map>
#include <set>

#include "cistern/base/error.h"
#include "cistern/io/test_folder.h"
#include "cistern/models/testing_models.h"

namespace cistern {
namespace {

using cistern::testing::ExpectContains;

std::shared_ptr<Model> TinyModel(at::ScalarType type = at::kDouble) {
  ModelConfig c;
  c.vocab_size = 17, c.dim = 8, c.layers = 2, c.heads = 2, c.init_std = 0.3;
  c.attention = {"softmax", "t2r"};  // the map of T2R has three dimensions
  c.bias = true, c.tie_embeddings = false;
  const auto model = MakeModel(c, 1);
  model->to(type);
  return model;
}

// A parameter as plain numbers: `rows` times `columns` of each matrix, one after the other.
struct Numbers {
  std::vector<double> w, a, b;  // weights, state
  int64_t rows = 1, columns = 1;
  bool matrix = false, map_of_block = false;
  int updates = 0;
};

struct Setting {
  double lr, before;  // the rate, and that of the update before it; below 0: there was none
  double decay;
};

using Rule = std::function<void(Numbers&, const std::vector<double>&, const OptimizerOptions&,
                                const Setting&)>;

void AdamRule(Numbers& p, const std::vector<double>& given, const OptimizerOptions& o,
              const Setting& s) {
  const bool decoupled = o.kind == OptimizerKind::kAdamW;
  for (size_t i = 0; i < p.w.size(); ++i) {
    const double g = given[i] + (decoupled ? 0 : s.decay * p.w[i]);
    p.a[i] = o.beta1 * p.a[i] + (1 - o.beta1) * g;
    p.b[i] = o.beta2 * p.b[i] + (1 - o.beta2) * g * g;
    const double mean = p.a[i] / (1 - std::pow(o.beta1, p.updates)),
                 square = p.b[i] / (1 - std::pow(o.beta2, p.updates));
    if (decoupled) p.w[i] -= s.lr * s.decay * p.w[i];
    p.w[i] -= s.lr * mean / (std::sqrt(square) + o.eps);
  }
}

void SgdRule(Numbers& p, const std::vector<double>& g, const OptimizerOptions& o,
             const Setting& s) {
  for (size_t i = 0; i < p.w.size(); ++i) {
    p.a[i] = o.momentum * p.a[i] + g[i] + s.decay * p.w[i];
    p.w[i] -= s.lr * p.a[i];
  }
}

// Nesterov's: u is what the last update moved by; the gradient is taken where momentum has already
// led, and the weights that are kept lie a step of momentum ahead:
//   u' = m c u - lr g,  w' = (w - m u) + u' + ... in fairseq's form: w' = w + m (c m u - lr g) - lr
//   g
void NagRule(Numbers& p, const std::vector<double>& g, const OptimizerOptions& o,
             const Setting& s) {
  const double c = s.before > 0 ? s.lr / s.before : 1, m = o.momentum;
  for (size_t i = 0; i < p.w.size(); ++i) {
    const double moved = m * c * p.a[i] - s.lr * g[i];
    p.w[i] = p.w[i] * (1 - s.lr * s.decay) + m * moved - s.lr * g[i];
    p.a[i] = moved;
  }
}

void AdafactorRule(Numbers& p, const std::vector<double>& g, const OptimizerOptions& o,
                   const Setting& s) {
  const AdafactorOptions& f = o.adafactor;
  const double keep = 1 - std::pow(double(p.updates), -f.decay_power);
  const auto count = int64_t(p.w.size());
  std::vector<double> u(p.w.size());
  if (!p.matrix) {
    for (size_t i = 0; i < p.w.size(); ++i) {
      p.a[i] = keep * p.a[i] + (1 - keep) * (g[i] * g[i] + f.eps);
      u[i] = g[i] / std::sqrt(p.a[i]);
    }
  } else {
    const int64_t size = p.rows * p.columns;
    for (int64_t begin = 0; begin < count; begin += size) {
      double mean = 0;
      std::vector<double> row(size_t(p.rows)), column(size_t(p.columns));
      for (int64_t r = 0; r < p.rows; ++r) {
        for (int64_t c = 0; c < p.columns; ++c) {
          const double x = g[size_t(begin + r * p.columns + c)], square = x * x + f.eps;
          row[size_t(r)] += square / double(p.columns);
          column[size_t(c)] += square / double(p.rows);
        }
      }
      double* rows = &p.a[size_t(begin / p.columns)];
      double* columns = &p.b[size_t(begin / p.rows)];
      for (int64_t r = 0; r < p.rows; ++r) {
        rows[r] = keep * rows[r] + (1 - keep) * row[size_t(r)];
        mean += rows[r] / double(p.rows);
      }
      for (int64_t c = 0; c < p.columns; ++c)
        columns[c] = keep * columns[c] + (1 - keep) * column[size_t(c)];
      for (int64_t r = 0; r < p.rows; ++r) {
        for (int64_t c = 0; c < p.columns; ++c) {
          const auto i = size_t(begin + r * p.columns + c);
          u[i] = g[i] / std::sqrt(rows[r] * columns[c] / mean);
        }
      }
    }
  }
  double update = 0, weights = 0;
  for (size_t i = 0; i < p.w.size(); ++i) {
    update += u[i] * u[i] / double(count);
    weights += p.w[i] * p.w[i] / double(count);
  }
  const double clip = std::max(1.0, std::sqrt(update) / f.update_clip),
               scale = f.relative ? std::max(f.min_scale, std::sqrt(weights)) : 1;
  for (size_t i = 0; i < p.w.size(); ++i)
    p.w[i] = p.w[i] * (1 - s.lr * s.decay) - s.lr * scale * u[i] / clip;
}

using Matrix = std::vector<std::vector<double>>;

Matrix Times(const Matrix& a, const Matrix& b) {
  Matrix c(a.size(), std::vector<double>(b[0].size()));
  for (size_t i = 0; i < a.size(); ++i) {
    for (size_t j = 0; j < b[0].size(); ++j) {
      for (size_t k = 0; k < b.size(); ++k) c[i][j] += a[i][k] * b[k][j];
    }
  }
  return c;
}

Matrix Transposed(const Matrix& a) {
  Matrix t(a[0].size(), std::vector<double>(a.size()));
  for (size_t i = 0; i < a.size(); ++i) {
    for (size_t j = 0; j < a[0].size(); ++j) t[j][i] = a[i][j];
  }
  return t;
}

// Jordan et al. 2024: X <- a X + (b X X^T + c (X X^T)^2) X, from X of norm 1.
void MuonRule(Numbers& p, const std::vector<double>& g, const OptimizerOptions& o,
              const Setting& s) {
  if (!p.map_of_block) {
    OptimizerOptions adamw = o;
    adamw.kind = OptimizerKind::kAdamW;
    return AdamRule(p, g, adamw, s);
  }
  const double m = o.muon.momentum;
  const auto rows = size_t(p.rows), columns = size_t(p.columns);
  Matrix x(rows, std::vector<double>(columns));
  double squares = 0;
  for (size_t i = 0; i < g.size(); ++i) {
    p.a[i] = m * p.a[i] + (1 - m) * g[i];
    const double ahead = m * p.a[i] + (1 - m) * g[i];
    x[i / columns][i % columns] = ahead;
    squares += ahead * ahead;
  }
  for (auto& row : x) {
    for (double& value : row) value /= std::sqrt(squares) + 1e-7;
  }
  for (int64_t iteration = 0; iteration < o.muon.iterations; ++iteration) {
    const Matrix square = Times(x, Transposed(x)), cubed = Times(square, x),
                 fifth = Times(square, cubed);
    for (size_t i = 0; i < rows; ++i) {
      for (size_t j = 0; j < columns; ++j)
        x[i][j] = 3.4445 * x[i][j] - 4.7750 * cubed[i][j] + 2.0315 * fifth[i][j];
    }
  }
  const double size = 0.2 * std::sqrt(double(std::max(rows, columns)));
  for (size_t i = 0; i < g.size(); ++i)
    p.w[i] = p.w[i] * (1 - s.lr * s.decay) - s.lr * size * x[i / columns][i % columns];
}

struct Case {
  std::string name;
  OptimizerOptions options;
  Rule rule;
};

std::vector<Case> Cases() {
  const auto make = [](const std::string& name, OptimizerKind kind, const Rule& rule) {
    Case c{name, {}, rule};
    c.options.kind = kind;
    c.options.weight_decay = 0.1;
    return c;
  };
  std::vector<Case> all;
  for (const DecayOf decay : {DecayOf::kMatrices, DecayOf::kAll}) {
    const std::string of = " " + NameOf(decay, DecayOfNames());
    const size_t begin = all.size();
    all.push_back(make("adamw" + of, OptimizerKind::kAdamW, AdamRule));
    all.push_back(make("adam" + of, OptimizerKind::kAdam, AdamRule));
    all.push_back(make("sgd" + of, OptimizerKind::kSgd, SgdRule));
    all.push_back(make("nag" + of, OptimizerKind::kNag, NagRule));
    all.push_back(make("adafactor" + of, OptimizerKind::kAdafactor, AdafactorRule));
    all.push_back(make("muon" + of, OptimizerKind::kMuon, MuonRule));
    for (size_t i = begin; i < all.size(); ++i) all[i].options.decay = decay;
  }
  all.push_back(make("sgd without momentum", OptimizerKind::kSgd, SgdRule));
  all.back().options.momentum = 0;
  all.push_back(make("nag .99", OptimizerKind::kNag, NagRule));
  all.back().options.momentum = 0.99;
  all.push_back(make("muon, three iterations", OptimizerKind::kMuon, MuonRule));
  all.back().options.muon = {0.8, 3};
  all.push_back(make("adafactor absolute", OptimizerKind::kAdafactor, AdafactorRule));
  all.back().options.adafactor.relative = false;
  all.back().options.adafactor.update_clip = 0.7;
  return all;
}

// The maps of TinyModel's blocks.
const std::set<std::string> kMapsOfBlocks = [] {
  std::set<std::string> names;
  for (const char* layer : {"layers.0.", "layers.1."}) {
    for (const char* map : {"attention.q_proj", "attention.k_proj", "attention.v_proj",
                            "attention.o_proj", "ffn.up_proj", "ffn.down_proj"})
      names.insert(StrCat(layer, map, ".weight"));
  }
  return names;
}();

// The rates of five updates: rising, falling, and one of zero at the beginning.
constexpr double kRates[] = {0, 0.01, 0.03, 0.02, 0.001};

// The gradient of parameter `i` at an update; the second parameter never has one, the fourth not at
// the third update.
at::Tensor Gradient(const at::Tensor& p, size_t i, int update) {
  if (i == 1 || (i == 3 && update == 2)) return {};
  at::manual_seed(uint64_t(100 * update) + i);
  return at::randn(p.sizes(), at::kDouble).to(p.scalar_type());
}

void SetGradients(const Model& model, int update) {
  const auto parameters = model.parameters();
  for (size_t i = 0; i < parameters.size(); ++i)
    parameters[i].mutable_grad() = Gradient(parameters[i], i, update);
}

std::vector<double> List(const at::Tensor& x) {
  const at::Tensor flat = x.detach().to(at::kDouble).contiguous();
  return {flat.const_data_ptr<double>(), flat.const_data_ptr<double>() + flat.numel()};
}

TEST(Optimizer, FollowsItsDefinition) {
  for (const Case& c : Cases()) {
    const auto model = TinyModel();
    const auto optimizer = MakeOptimizer(*model, c.options);
    const auto parameters = model->parameters();
    const std::vector<std::string> names = model->named_parameters().keys();
    std::vector<Numbers> expected;
    for (const at::Tensor& p : parameters) {
      Numbers n;
      n.map_of_block = kMapsOfBlocks.count(names[expected.size()]) > 0;
      n.w = List(p);
      n.a.resize(n.w.size()), n.b.resize(n.w.size());
      n.matrix = p.dim() >= 2;
      if (n.matrix) n.rows = p.size(-2), n.columns = p.size(-1);
      expected.push_back(n);
    }
    double before = -1;
    for (int update = 0; update < 5; ++update) {
      SetGradients(*model, update);
      for (size_t i = 0; i < parameters.size(); ++i) {
        const at::Tensor g = Gradient(parameters[i], i, update);
        if (!g.defined()) continue;
        Numbers& n = expected[i];
        ++n.updates;
        const bool decayed = c.options.decay == DecayOf::kAll ||
                             (n.matrix && !names[i].ends_with(".bias"));  // T2R's has two
        c.rule(n, List(g), c.options,
               {kRates[update], before, decayed ? c.options.weight_decay : 0});
      }
      before = kRates[update];
      optimizer->Step(kRates[update], 0);
    }
    double most = 0;
    for (size_t i = 0; i < parameters.size(); ++i) {
      const std::vector<double> w = List(parameters[i]);
      for (size_t k = 0; k < w.size(); ++k)
        most = std::max(most, std::abs(w[k] - expected[i].w[k]));
      EXPECT_FALSE(parameters[i].grad().defined()) << c.name;
    }
    EXPECT_LT(most, 1e-7) << c.name;
  }
}

// In evaluation t2r keeps the product of its maps.
TEST(Optimizer, EvaluationSeesItsUpdate) {
  for (const auto& [kind, name] : OptimizerKinds()) {
    const auto model = std::dynamic_pointer_cast<LanguageModel>(TinyModel());
    model->eval();
    const at::Tensor ids = at::arange(12).unsqueeze(0);
    const auto logits = [&] {
      const at::NoGradGuard guard;
      ModelState state = model->EmptyState(1);
      return model->Extend(ids, state);
    };
    const at::Tensor before = logits();
    model->TrainingLoss({{"ids", ids}, {"targets", ids}}).backward();
    OptimizerOptions o;
    o.kind = kind;
    MakeOptimizer(*model, o)->Step(0.1, 0);
    const at::Tensor got = logits();
    model->train();
    model->eval();
    EXPECT_FALSE(at::equal(got, before)) << name;
    EXPECT_TRUE(at::equal(got, logits())) << name;
  }
}

// Saved after two updates and loaded into an optimizer of a copy, all later updates are the same
// bits; a parameter that had no gradient is as it was.
TEST(Optimizer, ContinuesFromWhatItSaved) {
  for (const Case& c : Cases()) {
    const auto model = TinyModel(at::kFloat), other = TinyModel(at::kFloat),
               untouched = TinyModel(at::kFloat);
    const auto whole = MakeOptimizer(*model, c.options);
    for (int update = 0; update < 2; ++update) {
      SetGradients(*model, update);
      whole->Step(kRates[update], 1.0);
    }
    const auto resumed = MakeOptimizer(*other, c.options);
    std::vector<NamedTensor> saved;
    for (const NamedTensor& t : whole->Save()) saved.push_back({t.name, t.value.clone()});
    resumed->Load(saved, "saved");
    {
      const at::NoGradGuard guard;
      for (size_t i = 0; i < model->parameters().size(); ++i)
        other->parameters()[i].copy_(model->parameters()[i]);
    }
    for (int update = 2; update < 5; ++update) {
      for (const auto& [m, optimizer] : {std::pair(model, whole.get()), {other, resumed.get()}}) {
        SetGradients(*m, update);
        optimizer->Step(kRates[update], 1.0);
      }
    }
    const auto a = model->parameters(), b = other->parameters(), as_made = untouched->parameters();
    for (size_t i = 0; i < a.size(); ++i) {
      EXPECT_TRUE(at::equal(a[i], b[i])) << c.name << " " << i;
      EXPECT_EQ(at::equal(a[i], as_made[i]), i == 1) << c.name << " " << i;
    }
    if (!saved.empty()) {
      saved.pop_back();
      ExpectContains(ErrorMessage([&] { resumed->Load(saved, "saved"); }), {"saved", "is missing"});
    }
    EXPECT_EQ(whole->FirstNonFiniteMoment(), "") << c.name;
  }
}

// Each map has one moment, all other parameters two.
TEST(Optimizer, MuonIsOfTheMapsOfBlocks) {
  const auto model = TinyModel();
  OptimizerOptions muon;
  muon.kind = OptimizerKind::kMuon;
  std::set<std::string> moved;
  size_t others = 0;
  for (const NamedTensor& t : MakeOptimizer(*model, muon)->Save()) {
    if (t.name.starts_with("momentum.")) moved.insert(t.name.substr(9));
    others += t.name.starts_with("exp_avg.");
  }
  EXPECT_EQ(moved, kMapsOfBlocks);
  EXPECT_EQ(others, model->parameters().size() - kMapsOfBlocks.size());
}

// Biases and scales that have more than one dimension are no matrices; all others that do are.
TEST(Optimizer, DecayLeavesVectorsAloneWhateverTheirShape) {
  ModelConfig c;
  c.kind = "encoder_classifier", c.vocab_size = 17, c.classes = 3, c.max_length = 16, c.dim = 8;
  c.layers = 3, c.heads = 2, c.pooling = PoolingKind::kCls, c.bias = true;
  c.positions = PositionKind::kLearned, c.attention = {"rfa", "t2r", "luna"};
  c.attention_options = Json{{"rfa", {{"variant", "fork"}, {"input_gate", true}}}};
  for (const DecayOf decay : {DecayOf::kMatrices, DecayOf::kAll}) {
    const auto model = MakeModel(c, 1);
    OptimizerOptions options;
    options.weight_decay = 0.5, options.decay = decay;
    const auto optimizer = MakeOptimizer(*model, options);
    {
      const at::NoGradGuard guard;
      for (at::Tensor& p : model->parameters()) p.fill_(1), p.mutable_grad() = at::zeros_like(p);
    }
    optimizer->Step(0.1, 0);
    std::set<std::string> left;
    for (const auto& p : model->named_parameters()) {
      const bool decayed = p.value().max().item<double>() < 0.96;
      EXPECT_NEAR(p.value().min().item<double>(), decayed ? 0.95 : 1, 1e-6) << p.key();
      if (!decayed && p.value().dim() >= 2) left.insert(p.key());
      EXPECT_EQ(decayed && p.value().dim() < 2, decay == DecayOf::kAll && p.value().dim() < 2)
          << p.key();
    }
    const std::set<std::string> vectors = {"cls_token", "layers.0.attention.core.input_gate.bias",
                                           "layers.0.attention.core.sigma",
                                           "layers.1.attention.core.map.bias"};
    EXPECT_EQ(left, decay == DecayOf::kAll ? std::set<std::string>() : vectors);
  }
}

// The names of an AdamW's state in the checkpoints of version 0.1.
TEST(Optimizer, AdamWKeepsItsNames) {
  const auto model = TinyModel();
  const auto saved = MakeOptimizer(*model, {})->Save();
  const std::string first = model->named_parameters().keys()[0];
  ASSERT_EQ(saved.size(), 3 * model->parameters().size());
  EXPECT_EQ(saved[0].name, "exp_avg." + first);
  EXPECT_EQ(saved[1].name, "exp_avg_sq." + first);
  EXPECT_EQ(saved[2].name, "step." + first);
}

TEST(Optimizer, ClipsTheGlobalNorm) {
  const auto model = TinyModel(), clipped = TinyModel();
  OptimizerOptions sgd;
  sgd.kind = OptimizerKind::kSgd, sgd.momentum = 0, sgd.weight_decay = 0;
  double squares = 0;
  for (const auto& m : {model, clipped}) {
    squares = 0;
    for (const at::Tensor& p : m->parameters()) {
      p.mutable_grad() = at::ones_like(p);
      squares += double(p.numel());
    }
  }
  const std::vector<double> before = List(model->parameters()[0]);
  EXPECT_NEAR(MakeOptimizer(*model, sgd)->Step(1.0, 0), std::sqrt(squares), 1e-3);
  EXPECT_NEAR(MakeOptimizer(*clipped, sgd)->Step(1.0, 2.0), std::sqrt(squares), 1e-3);
  EXPECT_NEAR(List(model->parameters()[0])[0], before[0] - 1, 1e-9);
  EXPECT_NEAR(List(clipped->parameters()[0])[0], before[0] - 2 / std::sqrt(squares), 1e-6);
}

// Gradients set aside are each clipped by their own norm; then one update is made of their sum.
TEST(Optimizer, SetsAsideGradientsClippedEach) {
  const auto model = TinyModel();
  OptimizerOptions sgd;
  sgd.kind = OptimizerKind::kSgd, sgd.momentum = 0, sgd.weight_decay = 0;
  const auto optimizer = MakeOptimizer(*model, sgd);
  const auto parameters = model->parameters();
  std::vector<std::vector<double>> expected;
  for (const at::Tensor& p : parameters) expected.push_back(List(p));
  for (int batch = 0; batch < 3; ++batch) {
    const double size = batch == 1 ? 1e-4 : 10;  // the second is below the limit
    double squares = 0;
    SetGradients(*model, batch);
    for (const at::Tensor& p : parameters) {
      if (!p.grad().defined()) continue;
      p.mutable_grad().mul_(size);
      for (const double g : List(p.grad())) squares += g * g;
    }
    const double norm = std::sqrt(squares), factor = norm > 0.5 ? 0.5 / norm : 1;
    for (size_t i = 0; i < parameters.size(); ++i) {
      if (!parameters[i].grad().defined()) continue;
      const std::vector<double> g = List(parameters[i].grad());
      for (size_t k = 0; k < g.size(); ++k) expected[i][k] -= 0.2 * factor * g[k];
    }
    EXPECT_NEAR(optimizer->SetAside(0.5), norm, 1e-9 * norm);
    for (const at::Tensor& p : parameters) EXPECT_FALSE(p.grad().defined());
  }
  optimizer->Step(0.2, 0);
  for (size_t i = 0; i < parameters.size(); ++i) {
    const std::vector<double> w = List(parameters[i]);
    for (size_t k = 0; k < w.size(); ++k) ASSERT_NEAR(w[k], expected[i][k], 1e-12) << i;
  }
  // Nothing is left of them.
  SetGradients(*model, 1);
  const std::vector<double> before = List(parameters[0]), g = List(parameters[0].grad());
  optimizer->Step(0.2, 0);
  EXPECT_NEAR(List(parameters[0])[0], before[0] - 0.2 * g[0], 1e-12);
}

TEST(Optimizer, NonFiniteGradientChangesNothing) {
  for (const Case& c : Cases()) {
    const auto model = TinyModel();
    const auto optimizer = MakeOptimizer(*model, c.options);
    const at::Tensor before = model->parameters()[0].detach().clone();
    for (const at::Tensor& p : model->parameters())
      p.mutable_grad() = at::full_like(p, std::nan(""));
    EXPECT_FALSE(std::isfinite(optimizer->SetAside(1.0)));
    EXPECT_FALSE(std::isfinite(optimizer->Step(0.1, 1.0)));
    EXPECT_TRUE(at::equal(before, model->parameters()[0])) << c.name;
    EXPECT_FALSE(optimizer->FirstNonFinite(true).empty());
    EXPECT_TRUE(optimizer->FirstNonFinite(false).empty());
    EXPECT_TRUE(optimizer->FirstNonFiniteMoment().empty());
  }
}

TEST(Optimizer, OptionsOfOthersAreRefused) {
  const auto message = [](const std::vector<std::string>& assignments) {
    OptimizerOptions o;
    Fields f;
    o.AddTo(f);
    for (const std::string& a : assignments) f.Set(a);
    return ErrorMessage([&] { o.Validate(); });
  };
  ExpectContains(message({"optimizer=sgd", "beta1=0.8"}), {"train.beta1", "sgd", "adamw"});
  ExpectContains(message({"momentum=0.8"}), {"train.momentum", "adamw", "nag"});
  ExpectContains(message({"optimizer=nag", "adafactor.update_clip=2"}),
                 {"train.adafactor.update_clip", "nag"});
  ExpectContains(message({"optimizer=adafactor", "eps=1e-3"}), {"train.eps", "adafactor"});
  ExpectContains(
      message({"optimizer=adafactor", "adafactor.relative=false", "adafactor.min_scale=0.1"}),
      {"min_scale", "relative=false"});
  ExpectContains(message({"weight_decay=0", "decay=all"}), {"train.decay=all", "weight_decay=0"});
  ExpectContains(message({"muon.momentum=0.9"}), {"train.muon.momentum", "adamw", "muon"});
  ExpectContains(message({"optimizer=muon", "momentum=0.8"}), {"train.momentum", "muon", "nag"});
  EXPECT_EQ(message({"optimizer=adafactor", "adafactor.update_clip=2", "decay=all"}), "no error");
  Fields f;
  OptimizerOptions zero;
  zero.AddTo(f);
  // Rows of an embedding whose tokens were not seen would be 0 / 0.
  ExpectContains(ErrorMessage([&] { f.Set("eps=0"); }), {"eps"});
  EXPECT_EQ(message({"optimizer=muon", "muon.iterations=6", "beta1=0.8"}), "no error");
}

}  // namespace
}  // namespace cistern
