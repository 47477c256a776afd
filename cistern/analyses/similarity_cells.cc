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
  if (c.layers < 3) {
    check.answer = "cannot be said: of two layers each is adjacent to the other";
    return check;
  }
  Mean far;
  for (int64_t apart = 2; apart < c.layers; ++apart) {
    const int64_t pairs = c.layers - apart;
    far.Add(MeanApart(c, c.most, apart) * double(pairs), pairs);
  }
  const double near = MeanApart(c, c.most, 1), others = far.Value().get<double>();
  const int64_t most = MostLikeAdjacent(c);
  check.measured = StrCat("adjacent ", Short(near), ", others ", Short(others), "; ", most, " of ",
                          c.layers, " layers are most like an adjacent one");
  check.answer = near > others && 2 * most > c.layers ? "holds" : "does not hold";
  return check;
}

PaperClaim ModelOrData(const std::vector<SimilarityCell>& cells) {
  PaperClaim check;
  check.claim = "similarity depends more on the model than on the data";
  Mean by_model, by_data;
  for (size_t i = 0; i < cells.size(); ++i) {
    for (size_t j = 0; j < i; ++j) {
      if (cells[i].layers != cells[j].layers) continue;
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
  for (int64_t l = 0; l < c.layers; ++l) {
    for (int64_t to = 0; to < c.layers; ++to) {
      if (l == to || (apart > 0 && std::abs(l - to) != apart)) continue;
      sum += map[size_t(l * c.layers + to)];
      ++count;
    }
  }
  return sum / double(count);
}

double MapDifference(const SimilarityCell& a, const SimilarityCell& b) {
  CISTERN_CHECK(a.layers == b.layers && a.layers >= 2, "[similarity] maps of ", a.layers, " and ",
                b.layers, " layers");
  double sum = 0;
  for (int64_t l = 0; l < a.layers; ++l) {
    for (int64_t to = 0; to < a.layers; ++to) {
      const size_t i = size_t(l * a.layers + to);
      if (l != to) sum += std::abs(a.most[i] - b.most[i]);
    }
  }
  return sum / double(a.layers * (a.layers - 1));
}

int64_t MostLikeAdjacent(const SimilarityCell& c) {
  int64_t count = 0;
  for (int64_t l = 0; l < c.layers; ++l) {
    double most = -1, adjacent = -1;
    for (int64_t to = 0; to < c.layers; ++to) {
      const double x = c.most[size_t(l * c.layers + to)];
      if (to != l) most = std::max(most, x);
      if (std::abs(to - l) == 1) adjacent = std::max(adjacent, x);
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
      map.rows = map.columns = c.layers;
      map.values = c.most;
      map.low = 0, map.high = 1;
      map.width = 420;
      maps.push_back(RenderSvg(map));
      table.rows.push_back({c.model, c.data, c.layers, c.rows, c.tokens, MeanApart(c, c.most, 1),
                            MeanApart(c, c.most, 0), MeanApart(c, c.mean, 1),
                            StrCat(MostLikeAdjacent(c), " of ", c.layers)});
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
