#pragma once
// Rows of a batch that go through a model some at a time: with little padding, and with the memory
// of a few thousand tokens, however large the batch.
#include <vector>

#include "cistern/tasks/task.h"

namespace cistern {

// Whether a mechanism of the model draws features or slots anew in training: from one generator, so
// that rows in several threads would draw different ones each time. (Dropout and layer_drop draw by
// counter, ops/draws.h.)
bool DrawsFromGenerator(const ModelConfig& config);
// Whether what a row of a batch becomes depends on the others.
bool RowsMeet(const Model& model);
// Whether rows may go through the model apart from the others of their batch, and without padding:
// no row depends on the others, none on how much padding stands behind it, and nothing is drawn
// from the generator.
bool RowsStandAlone(const Model& model);
// How many rows of a batch of rows of so many tokens go through such a model at once, at most, in
// all parts together: of others, all.
int64_t RowsAtOnce(const ModelConfig& config, int64_t rows, int64_t tokens, int64_t parts);

// Rows begin .. end - 1 of a batch, which go through the model together.
struct RowGroup {
  int64_t begin = 0, end = 0;
  double tokens = 0;  // with their padding, or rows in their place; compared with others
};

// The numbers [rows] int64 of the rows of a batch in the order of their tokens, the longest first.
at::Tensor OrderByLength(const Batch& batch);
// Of a batch in that order: a multiple of `parts` groups of about as many tokens, where each part
// has 4,096 or more some 4,096. Fewer where there are fewer rows, more where one would have more
// than 6,144 with its padding. A part that more than four threads share has groups of some 1,024
// tokens for each of them.
std::vector<RowGroup> GroupsByLength(const Batch& batch, int64_t parts);
// Of rows that are as long as each other: as many groups, of about as many rows.
std::vector<RowGroup> GroupsOfRows(const Batch& batch, int64_t parts);
// `count` groups of about as many rows.
std::vector<RowGroup> EvenGroups(int64_t rows, int64_t count);

}  // namespace cistern
