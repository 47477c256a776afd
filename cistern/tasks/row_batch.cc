#include "cistern/tasks/row_batch.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <numeric>
#include <utility>

#include "cistern/base/error.h"
#include "cistern/nn/attention_layer.h"
#include "cistern/tasks/row_reader.h"

namespace cistern {

const EnumNames<PadTo>& PadTos() {
  static const EnumNames<PadTo> names = {{PadTo::kLongest, "longest"}, {PadTo::kLength, "length"}};
  return names;
}

int64_t RowPadding::Width(int64_t longest) const {
  if (to == PadTo::kLongest) return std::max<int64_t>(longest, 1);
  CISTERN_CHECK(longest <= length, "[tasks] a row of ", longest,
                " tokens, and rows are padded to length=", length);
  return length;
}

template <class Id>
void AddIds(const std::vector<std::span<const Id>>& rows, const RowPadding& padding, Batch* batch,
            int64_t shift, const std::string& prefix) {
  const int64_t count = int64_t(rows.size());
  int64_t longest = 0;
  for (const auto& row : rows) longest = std::max(longest, int64_t(row.size()));
  const int64_t width = padding.Width(longest);
  const at::Tensor ids = at::full({count, width}, padding.to == PadTo::kLength ? padding.id : 0,
                                  at::kLong),
                   lengths = at::empty({count}, at::kLong);
  int64_t *to = ids.mutable_data_ptr<int64_t>(), *length = lengths.mutable_data_ptr<int64_t>();
  for (const auto& row : rows) {
    std::transform(row.begin(), row.end(), to, [shift](Id id) { return int64_t(id) + shift; });
    to += width;
    *length++ = int64_t(row.size());
    batch->tokens += int64_t(row.size());
  }
  batch->rows = count;
  batch->Add(prefix + "ids", ids);
  batch->Add(prefix + "lengths", lengths);
  if (padding.to == PadTo::kLongest) batch->padded.push_back({prefix + "ids", prefix + "lengths"});
}

template void AddIds(const std::vector<std::span<const uint8_t>>&, const RowPadding&, Batch*,
                     int64_t, const std::string&);
template void AddIds(const std::vector<std::span<const int32_t>>&, const RowPadding&, Batch*,
                     int64_t, const std::string&);

void AddNumbers(const std::string& name, const std::vector<int64_t>& numbers, Batch* batch) {
  batch->Add(name, at::tensor(numbers, at::kLong));
}

bool PaddingTakesPart(const ModelConfig& config) {
  return config.padding != PaddingKind::kMasked || config.pooling == PoolingKind::kMeanAll ||
         config.pooling == PoolingKind::kMeanZeros;
}

namespace {

// Which setting lets padding take part; empty: none does.
std::string PaddingSeenBy(const ModelConfig& config) {
  if (PaddingTakesPart(config)) return "model.padding or model.pooling";
  for (const Form form : config.info().forms) {
    const LayerStack stack = config.Stack(form);
    for (int64_t layer = 0; layer < stack.layers(); ++layer) {
      const auto mechanism = MakeMechanism(stack.Attention(layer));
      if (mechanism->SeesPadding())
        return mechanism->info().name + "'s mask=none (nystrom: a padding other than tokens)";
    }
  }
  return "";
}

}  // namespace

void CheckPadding(const ModelConfig& config, PadTo to) {
  if (to == PadTo::kLength) return;
  if (const std::string by = PaddingSeenBy(config); !by.empty())
    FailUsage(by, " lets padding take part, so its number has to be said: set task.pad_to=length");
}

void CheckPadding(const ModelConfig& config) {
  if (const std::string by = PaddingSeenBy(config); !by.empty())
    FailUsage(by,
              " lets padding take part, and where rows of this task differ in length they are "
              "padded to the longest of their batch, so that a row's result would depend on the "
              "others; use model.padding=masked, "
              "model.pooling=mean and the mechanism's default");
}

std::vector<Json> PredictApart(const Batch& batch,
                               const std::function<std::vector<Json>(const Batch& row)>& predict) {
  std::vector<Json> all;
  for (int64_t r = 0; r < batch.rows; ++r) {
    for (Json& row : predict(batch.Rows(r, r + 1).WithoutPadding())) all.push_back(std::move(row));
  }
  return all;
}

void CheckGivenPositions(const ModelConfig& config, const char* why) {
  if (config.info().Has(Form::kBidirectional) &&
      *config.Stack(Form::kBidirectional).options().positions == PositionKind::kRelative)
    FailUsage(why,
              " gives tokens positions of their own, and model.positions=relative counts the "
              "tokens that are there; use learned, sinusoidal or rotary");
}

std::vector<int64_t> PickRows(const ShuffledOrder& order, uint64_t seed, int64_t step,
                              int64_t rows) {
  std::vector<int64_t> picked;
  for (int64_t r = 0; r < rows; ++r) picked.push_back(order.At(seed, step * rows + r, rows));
  return picked;
}

int64_t SpreadRow(int64_t i, int64_t count) {
  if (count < 3) return i;
  constexpr double kGolden = 0.6180339887498949;
  int64_t step = std::max<int64_t>(1, int64_t(kGolden * double(count) + 0.5));
  while (std::gcd(step, count) != 1) ++step;
  // From the middle: the first row of a file is often not like the others.
  return int64_t((__int128(i) * step + count / 2) % count);
}

std::unique_ptr<BatchReader> ReadInOrder(int64_t count, const ReadOptions& options, int64_t usual,
                                         MakeRows make, int64_t skipped) {
  const bool spread = options.max_tokens > 0;
  return std::make_unique<RowReader>(
      count, options.rows > 0 ? options.rows : usual,
      [make = std::move(make), spread, count](int64_t begin, int64_t end) {
        std::vector<int64_t> all(size_t(end - begin));
        std::iota(all.begin(), all.end(), begin);
        for (int64_t& i : all) i = spread ? SpreadRow(i, count) : i;
        return make(all);
      },
      skipped, spread);
}

}  // namespace cistern
