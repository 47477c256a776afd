#pragma once
// For the tests of this layer: small models, batches of them, and attention by plain loops.
#include <cmath>
#include <string>
#include <vector>

#include "cistern/analyses/analysis.h"
#include "cistern/models/testing_models.h"
#include "cistern/ops/testing.h"

namespace cistern::testing {

inline Batch IdsBatch(int64_t rows, int64_t length, const std::vector<int64_t>& lengths = {}) {
  Batch batch;
  batch.rows = rows;
  batch.tokens = rows * length;
  batch.Add("ids", Ids(rows, length));
  batch.Add("targets", Ids(rows, length));
  if (!lengths.empty()) batch.Add("lengths", Lengths(lengths));
  return batch;
}

inline ModelConfig Classifier(const std::string& mechanism, const Json& options) {
  ModelConfig c;
  c.kind = "encoder_classifier";
  c.vocab_size = 23, c.classes = 2, c.dim = 12, c.heads = 2, c.layers = 2, c.max_length = 64;
  c.attention = {mechanism};
  c.attention_options[mechanism] = options;
  return c;
}

inline AnalysisContext ContextOf(const std::shared_ptr<Model>& model) {
  AnalysisContext context;
  context.model = model;
  context.config = model->config();
  return context;
}

// [H][T][S]: softmax of the queries and keys of a row of a captured softmax layer.
using Attention = std::vector<std::vector<std::vector<double>>>;
inline Attention SoftmaxOf(const CapturedLayer& layer, int64_t row) {
  const at::Tensor q = layer.x[0][row].to(at::kDouble).contiguous(),
                   k = layer.x[1][row].to(at::kDouble).contiguous();
  const auto a = q.accessor<double, 3>(), b = k.accessor<double, 3>();
  Attention out;
  for (int64_t h = 0; h < q.size(0); ++h) {
    out.emplace_back();
    for (int64_t t = 0; t < q.size(1); ++t) {
      std::vector<double> p(size_t(q.size(1)), 0);
      double sum = 0;
      const int64_t seen = layer.form == Form::kCausal ? t + 1 : layer.RealSources(row);
      for (int64_t s = 0; s < seen; ++s) {
        double dot = 0;
        for (int64_t c = 0; c < q.size(2); ++c) dot += a[h][t][c] * b[h][s][c];
        sum += p[size_t(s)] = std::exp(dot / std::sqrt(double(q.size(2))));
      }
      for (double& x : p) x /= sum;
      out.back().push_back(p);
    }
  }
  return out;
}

inline Json Cell(const Figures::Table& table, size_t row, const std::string& column) {
  for (size_t i = 0; i < table.columns.size(); ++i) {
    if (table.columns[i] == column) return table.rows.at(row).at(i);
  }
  ADD_FAILURE() << "no column " << column;
  return {};
}

// The same rows of short texts in one classifier, whose padding is masked and whose padding reads:
// real tokens compute the same, so that every cell of every table is the same.
template <class A>
void ExpectPaddingThatReadsLeftOut(const std::string& mechanism) {
  SCOPED_TRACE(mechanism);
  const at::NoGradGuard guard;
  ModelConfig c = Classifier(mechanism, Json::object());
  const auto masked = Make<EncoderClassifier>(c);
  c.padding = PaddingKind::kReads;
  const auto reading = Make<EncoderClassifier>(c);
  for (size_t i = 0; i < masked->parameters().size(); ++i)
    reading->parameters()[i].copy_(masked->parameters()[i]);
  const Batch batch = IdsBatch(3, 9, {9, 4, 7});
  A of_masked({}, ContextOf(masked)), of_reading({}, ContextOf(reading));
  of_masked.Add(batch, RunLayers(*masked, batch));
  of_reading.Add(batch, RunLayers(*reading, batch));
  const Figures a = of_masked.Report(), b = of_reading.Report();
  ASSERT_EQ(a.tables().size(), b.tables().size());
  for (size_t i = 0; i < a.tables().size(); ++i) {
    const Figures::Table &x = a.tables()[i], &y = b.tables()[i];
    ASSERT_EQ(x.rows.size(), y.rows.size()) << x.name;
    for (size_t row = 0; row < x.rows.size(); ++row) {
      for (size_t column = 0; column < x.columns.size(); ++column) {
        const Json &want = x.rows[row][column], &got = y.rows[row][column];
        const bool numbers = want.is_number() && got.is_number() &&
                             !(std::isnan(want.get<double>()) && std::isnan(got.get<double>()));
        if (numbers) {
          EXPECT_NEAR(got.get<double>(), want.get<double>(), 1e-9)
              << x.name << ", " << x.columns[column] << " of row " << row;
        } else {
          EXPECT_EQ(CellText(got), CellText(want)) << x.name << ", " << x.columns[column];
        }
      }
    }
  }
}

}  // namespace cistern::testing
