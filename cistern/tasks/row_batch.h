#pragma once
// Batches made of rows of different lengths: padded, picked for training and read in order in one
// place for all tasks of single rows.
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "cistern/io/fields.h"
#include "cistern/tasks/order.h"
#include "cistern/tasks/task.h"

namespace cistern {

// What the rows of a batch are padded to: its longest row, or the task's `length`, which published
// code does whose models see the padding (spec 2.11, 1.3).
enum class PadTo { kLongest, kLength };
const EnumNames<PadTo>& PadTos();  // longest, length
inline constexpr char kPadToHelp[] =
    "rows of a batch are padded to its longest, or all to `length`, as Long Range Arena and P000 "
    "do; matters where padding takes part (model.padding)";

struct RowPadding {
  PadTo to = PadTo::kLongest;
  int64_t length = 0;  // no row is longer; read where `to` is kLength
  int64_t id = 0;      // of padding, where `to` is kLength; otherwise it is 0 and never seen

  // Tokens of a batch whose longest row has `longest` of them; at least 1.
  int64_t Width(int64_t longest) const;
};

// Adds `prefix`ids [B,T] int64, which is the rows' ids plus `shift` and padding after the end of a
// row, and `prefix`lengths [B] int64; counts rows and tokens. Where `to` is kLongest the padding
// may be left out (Batch::padded). Of uint8_t and int32_t.
template <class Id>
void AddIds(const std::vector<std::span<const Id>>& rows, const RowPadding& padding, Batch* batch,
            int64_t shift = 0, const std::string& prefix = "");

// Adds `name` [B] int64.
void AddNumbers(const std::string& name, const std::vector<int64_t>& numbers, Batch* batch);

// Whether the settings of a model let padding take part in what it computes (its mechanisms may do
// so too, Mechanism::SeesPadding).
bool PaddingTakesPart(const ModelConfig& config);
// UsageError where padding takes part in what the model computes, by its settings or by a
// mechanism's, and the task does not say how much of it there is: a row would depend on the others
// of its batch. `to`: of a task that has pad_to; other tasks pad to the longest row.
void CheckPadding(const ModelConfig& config, PadTo to);
void CheckPadding(const ModelConfig& config);

// What `predict` says of each row of a batch on its own, without padding: for models in whose
// results padding would take part.
std::vector<Json> PredictApart(const Batch& batch,
                               const std::function<std::vector<Json>(const Batch& row)>& predict);

// UsageError where a model counts the tokens that are there, and those of the task have positions
// of their own by the setting `why`.
void CheckGivenPositions(const ModelConfig& config, const char* why);

using MakeRows = std::function<Batch(const std::vector<int64_t>& rows)>;

// The rows of batch `step` in the shuffled order.
std::vector<int64_t> PickRows(const ShuffledOrder& order, uint64_t seed, int64_t step,
                              int64_t rows);
// Rows 0 .. count-1 in their order, options.rows of each batch, or `usual`. With max_tokens, which
// are then of some rows alone, in the order of SpreadRow. skipped: rows of the file that could not
// be read.
std::unique_ptr<BatchReader> ReadInOrder(int64_t count, const ReadOptions& options, int64_t usual,
                                         MakeRows make, int64_t skipped = 0);
// The row at place `i` of an order of `count` rows whose every beginning is spread evenly over all
// of them: steps of the golden section, rounded to have no divisor in common with `count`.
int64_t SpreadRow(int64_t i, int64_t count);

}  // namespace cistern
