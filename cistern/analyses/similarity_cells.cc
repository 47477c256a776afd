#include "cistern/analyses/similarity_cells.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>

#include "cistern/analyses/mean.h"
#include "cistern/base/error.h"
#include "cistern/base/format.h"

namespace cistern {
namespace {

std::string NameOfCell(const SimilarityCell& c) {
  return c.model.empty() ? c.data : c.model + " on " + c.data;
}

std::string Short(double x) { return Fixed(x, 3); }

PaperClaim Adjacent(const SimilarityCell& c, bool alone) {
  PaperClaim check;
  check.claim = "adjacent layers are the most alike" + (alone ? "" : ": " + NameOfCell(c));
  if (c.layers.size() < 3) {
    check.answer = "cannot be said: of two layers each is adjacent to the other";
    return check;
  }
  Mean adjacent, far;
  for (size_t l = 0; l < c.layers.size(); ++l) {
    for (size_t to = 0; to < c.layers.size(); ++to) {
      if (l != to)
        (std::abs(c.layers[l] - c.layers[to]) == 1 ? adjacent : far)
            .Add(c.most[l * c.layers.size() + to]);
    }
  }
  if (adjacent.count == 0) {
    check.answer = "cannot be said: no two layers are adjacent";
    return check;
  }
  const double near = adjacent.Value().get<double>(), others = far.Value().get<double>();
  const int64_t most = MostLikeAdjacent(c);
  check.measured = StrCat("adjacent ", Short(near), ", others ", Short(others), "; ", most, " of ",
                          c.layers.size(), " layers are most like an adjacent one");
  check.answer = near > others && 2 * most > int64_t(c.layers.size()) ? "holds" : "does not hold";
  return check;
}

PaperClaim ModelOrData(const std::vector<SimilarityCell>& cells) {
  PaperClaim check;
  check.claim = "similarity depends more on the model than on the data";
  Mean by_model, by_data;
  for (size_t i = 0; i < cells.size(); ++i) {
    for (size_t j = 0; j < i; ++j) {
      if (cells[i].layers.size() != cells[j].layers.size()) continue;
      const bool model = cells[i].model == cells[j].model, data = cells[i].data == cells[j].data;
      if (model != data) (model ? by_data : by_model).Add(MapDifference(cells[i], cells[j]));
    }
  }
  if (by_model.count == 0 || by_data.count == 0) {
    check.answer =
        "cannot be said: it takes two models of as many layers (--beside), each on its rows and on "
        "random ids (similarity.data=both)";
    return check;
  }
  const double model = by_model.sum / double(by_model.count),
               data = by_data.sum / double(by_data.count);
  check.measured = StrCat("mean difference of two maps: ", Short(model),
                          " where the model is another, ", Short(data), " where the data are");
  check.answer = model > data ? "holds" : "does not hold";
  return check;
}

// On the rows that were read.
PaperClaim ImagesOrText(const std::vector<SimilarityCell>& cells) {
  PaperClaim check;
  check.claim = "image models (ViT) have more of it than text models (BERT)";
  Mean images, text;
  for (const SimilarityCell& c : cells) {
    if (!c.random) (c.images ? images : text).Add(MeanApart(c, c.most, 1));
  }
  const double a = images.sum / double(images.count), b = text.sum / double(text.count);
  check.measured = StrCat("adjacent layers: images ", Short(a), ", text ", Short(b));
  check.answer = a > b ? "holds" : "does not hold";
  return check;
}

}  // namespace

double MeanApart(const SimilarityCell& c, const std::vector<double>& map, int64_t apart) {
  double sum = 0;
  int64_t count = 0;
  const size_t layers = c.layers.size();
  for (size_t l = 0; l < layers; ++l) {
    for (size_t to = 0; to < layers; ++to) {
      if (l == to || (apart > 0 && std::abs(c.layers[l] - c.layers[to]) != apart)) continue;
      sum += map[l * layers + to];
      ++count;
    }
  }
  return sum / double(count);
}

double MapDifference(const SimilarityCell& a, const SimilarityCell& b) {
  const size_t layers = a.layers.size();
  CISTERN_CHECK(layers == b.layers.size() && layers >= 2, "[similarity] maps of ", layers, " and ",
                b.layers.size(), " layers");
  double sum = 0;
  for (size_t l = 0; l < layers; ++l) {
    for (size_t to = 0; to < layers; ++to) {
      const size_t i = l * layers + to;
      if (l != to) sum += std::abs(a.most[i] - b.most[i]);
    }
  }
  return sum / double(layers * (layers - 1));
}

int64_t MostLikeAdjacent(const SimilarityCell& c) {
  int64_t count = 0;
  const size_t layers = c.layers.size();
  for (size_t l = 0; l < layers; ++l) {
    double most = -1, adjacent = -2;
    for (size_t to = 0; to < layers; ++to) {
      const double x = c.most[l * layers + to];
      if (to != l) most = std::max(most, x);
      if (std::abs(c.layers[to] - c.layers[l]) == 1) adjacent = std::max(adjacent, x);
    }
    count += adjacent == most ? 1 : 0;
  }
  return count;
}

void AddCells(const std::vector<SimilarityCell>& cells, Figures* f) {
  CISTERN_CHECK(!cells.empty(), "[similarity] no cell");
  bool images = false, text = false, models = false, data = false;
  for (const SimilarityCell& c : cells) {
    (c.images ? images : text) = true;
    models = models || c.model != cells[0].model;
    data = data || c.data != cells[0].data;
  }
  if (cells.size() > 1) {
    std::vector<std::string> maps;
    Figures::Table table{"cells",
                         "Each model on each kind of data",
                         {"model", "data", "layers", "rows", "tokens a row", "adjacent layers",
                          "all layers", "mean over heads, adjacent", "most like an adjacent one"},
                         {}};
    for (const SimilarityCell& c : cells) {
      HeatMap map;
      map.title = NameOfCell(c);
      map.x_label = "layer compared with", map.y_label = "layer";
      map.rows = map.columns = int64_t(c.layers.size());
      for (const int64_t number : c.layers) map.row_names.push_back(std::to_string(number));
      map.column_names = map.row_names;
      map.values = c.most;
      map.low = 0, map.high = 1;
      map.width = 420;
      maps.push_back(RenderSvg(map));
      table.rows.push_back({c.model, c.data, int64_t(c.layers.size()), c.rows, c.tokens,
                            MeanApart(c, c.most, 1), MeanApart(c, c.most, 0),
                            MeanApart(c, c.mean, 1),
                            StrCat(MostLikeAdjacent(c), " of ", c.layers.size())});
    }
    f->Svg("cells", SideBySide(maps, 2),
           "Most similar heads of two layers, all on one scale. Maps that are alike within a line "
           "and differ between lines say that similarity is a property of the model, whatever it "
           "reads; maps that are alike within a column, that it is one of the data.");
    f->Add(std::move(table));
  }
  std::vector<PaperClaim> checks;
  for (const SimilarityCell& c : cells) checks.push_back(Adjacent(c, cells.size() == 1));
  if (models || data) checks.push_back(ModelOrData(cells));
  if (images && text) checks.push_back(ImagesOrText(cells));
  f->Add(ChecksTable("P001", checks));
}

}  // namespace cistern
