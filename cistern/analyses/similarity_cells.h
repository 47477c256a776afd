#pragma once
// Similarity maps of several models on several kinds of data beside each other (P001 Fig 4: a model
// trained on text and one trained on random ids, each on both), and what the paper says of them as
// checks: adjacent layers are the most alike; similarity depends more on the model than on the
// data; image models have more of it than text models.
#include <string>
#include <vector>

#include "cistern/analyses/figures.h"

namespace cistern {

// One model on one kind of data.
struct SimilarityCell {
  std::string model, data;  // model: empty where there is one alone; data: "rows", "random ids"
  bool random = false, images = false;
  std::vector<int64_t> layers;  // their numbers in the model: some attend to nothing
  int64_t rows = 0;
  double tokens = 0;  // of a row, the mean
  // [L,L]: the most similar heads of two layers; the mean over the heads of the line's layer of
  // their best matches in the column's.
  std::vector<double> most, mean;
};

// Mean over the pairs of layers that are so far apart (both directions); 0: over all pairs of two.
// NaN where there are none.
double MeanApart(const SimilarityCell& cell, const std::vector<double>& map, int64_t apart);

// How many layers are as like an adjacent one as any.
int64_t MostLikeAdjacent(const SimilarityCell& cell);

// Mean absolute difference of two maps of as many layers, off the diagonal.
double MapDifference(const SimilarityCell& a, const SimilarityCell& b);

// The maps in one picture and a table where there are several cells, and the checks.
void AddCells(const std::vector<SimilarityCell>& cells, Figures* figures);

}  // namespace cistern
