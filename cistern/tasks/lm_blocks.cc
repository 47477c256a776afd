#include "cistern/tasks/lm_blocks.h"

#include <ATen/ops/argmax.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/logsumexp.h>

#include <algorithm>
#include <cmath>

#include "cistern/base/error.h"

namespace cistern {
namespace {

class BlockReader : public BatchReader {
 public:
  BlockReader(const TokenText& text, const TextBlocks& blocks, std::shared_ptr<void> keep)
      : text_(text),
        blocks_(blocks),
        rows_(text, blocks.length - blocks.context, blocks.max_tokens, 1, blocks.context),
        keep_(std::move(keep)) {}

  std::optional<Batch> Next() override {
    const auto [begins, measured, before] = rows_.Next(blocks_.rows);
    if (begins.empty()) return std::nullopt;
    const int64_t rows = int64_t(begins.size()), length = before + measured;
    const at::Tensor ids = at::empty({rows, length + 1}, at::kLong);
    int64_t* out = ids.mutable_data_ptr<int64_t>();
    for (const int64_t begin : begins) {
      text_.read(begin - before, length + 1, out);
      out += length + 1;
    }
    Batch batch;
    batch.rows = rows;
    batch.tokens = rows * measured;
    batch.Add("ids", ids.narrow(1, 0, length));
    batch.Add("targets", ids.narrow(1, 1 + before, measured));
    return batch;
  }
  int64_t total() const override { return rows_.total(); }
  int64_t done() const override { return rows_.done(); }
  const char* unit() const override { return "tokens"; }
  Json Facts() const override {
    Json facts = {{"length", blocks_.length}};
    if (blocks_.context > 0) facts["context"] = blocks_.context;
    if (const std::string part = rows_.Part(); !part.empty()) facts["part"] = part;
    return facts;
  }

 private:
  TokenText text_;
  TextBlocks blocks_;
  TextRows rows_;
  std::shared_ptr<void> keep_;
};

class TextRowReader : public BatchReader {
 public:
  TextRowReader(TokenText text, int64_t length, int64_t most, int64_t max_tokens, MakeTextRows make,
                std::shared_ptr<void> keep)
      : text_(std::move(text)),
        length_(length),
        most_(most),
        rows_(text_, length, max_tokens, 0),
        make_(std::move(make)),
        keep_(std::move(keep)) {}

  std::optional<Batch> Next() override {
    const TextRows::Rows rows = rows_.Next(most_);
    if (rows.begins.empty()) return std::nullopt;
    const at::Tensor tokens = at::empty({int64_t(rows.begins.size()), rows.length}, at::kLong);
    int64_t* out = tokens.mutable_data_ptr<int64_t>();
    for (const int64_t begin : rows.begins) {
      text_.read(begin, rows.length, out);
      out += rows.length;
    }
    return make_(tokens, rows.begins);
  }
  int64_t total() const override { return rows_.total(); }
  int64_t done() const override { return rows_.done(); }
  const char* unit() const override { return "tokens"; }
  Json Facts() const override {
    Json facts = {{"length", length_}};
    if (const std::string part = rows_.Part(); !part.empty()) facts["part"] = part;
    return facts;
  }

 private:
  TokenText text_;
  int64_t length_, most_;
  TextRows rows_;
  MakeTextRows make_;
  std::shared_ptr<void> keep_;
};

}  // namespace

TextRows::TextRows(const TokenText& text, int64_t length, int64_t max_tokens, int64_t ahead,
                   int64_t context)
    : length_(length), context_(context) {
  const std::vector<int64_t> ends =
      text.ends.empty() ? std::vector<int64_t>{text.tokens} : text.ends;
  const auto pieces = int64_t(ends.size());
  // Rows that max_tokens are, the last of them perhaps in part.
  const int64_t rows = max_tokens > 0 ? (max_tokens - 1) / length + 1 : 0;
  int64_t begin = 0;
  for (int64_t i = 0; i < pieces; ++i) {
    const int64_t end = ends[size_t(i)];
    int64_t tokens = std::max<int64_t>(end - begin - ahead, 0);
    all_ += tokens;
    if (max_tokens > 0) {
      const int64_t share = rows * (i + 1) / pieces - rows * i / pieces;
      tokens = std::min({tokens, share * length, max_tokens - total_});
    }
    parts_.push_back({begin, tokens});
    total_ += tokens;
    begin = end;
  }
}

std::string TextRows::Part() const {
  if (total_ == all_) return "";
  if (parts_.size() == 1) return StrCat("the first ", total_, " of ", all_, " tokens");
  const auto begun =
      std::count_if(parts_.begin(), parts_.end(), [](const Piece& p) { return p.tokens > 0; });
  return StrCat(total_, " of ", all_, " tokens, the first of each of ", begun, " blocks");
}

TextRows::Rows TextRows::Next(int64_t most) {
  Rows out{{}, length_, 0};
  while (!rests_ && int64_t(out.begins.size()) < most) {
    if (at_ + length_ <= parts_[part_].tokens) {
      const int64_t before = std::min(at_, context_);
      if (!out.begins.empty() && before != out.before) break;
      out.before = before;
      out.begins.push_back(parts_[part_].begin + at_);
      at_ += length_;
      continue;
    }
    at_ = 0;
    if (++part_ == parts_.size()) {
      rests_ = true;
      part_ = 0;
    }
  }
  while (out.begins.empty() && part_ < parts_.size()) {
    const Piece& part = parts_[part_++];
    out.length = part.tokens % length_;
    out.before = std::min(part.tokens - out.length, context_);
    if (out.length > 0) out.begins.push_back(part.begin + part.tokens - out.length);
  }
  done_ += int64_t(out.begins.size()) * out.length;
  return out;
}

std::vector<int32_t> TokenBytes(const Tokenizer& tokenizer) {
  std::vector<int32_t> bytes;
  const int32_t separator = tokenizer.AddedToken("<|endoftext|>");
  for (int32_t id = 0; id < tokenizer.vocab_size(); ++id)
    bytes.push_back(id == separator ? 0 : int32_t(tokenizer.Bytes(id).size()));
  return bytes;
}

std::unique_ptr<BatchReader> ReadBlocks(const TokenText& text, const TextBlocks& blocks,
                                        std::shared_ptr<void> keep) {
  if (blocks.length < 1) FailUsage("length must be 1 or above, got ", blocks.length);
  if (blocks.rows < 1) FailUsage("batch must be 1 or above, got ", blocks.rows);
  if (blocks.context < 0 || blocks.context >= blocks.length)
    FailUsage("context=", blocks.context, " must be at least 0 and below length=", blocks.length,
              ", of which the rest is measured");
  CISTERN_CHECK(text.tokens >= 2, "[eval] the text has ", text.tokens,
                " tokens; at least 2 are needed to predict one");
  return std::make_unique<BlockReader>(text, blocks, std::move(keep));
}

std::unique_ptr<BatchReader> ReadTextRows(TokenText text, const ReadOptions& o, int64_t length,
                                          MakeTextRows make, std::shared_ptr<void> keep) {
  return std::make_unique<TextRowReader>(std::move(text), o.length > 0 ? o.length : length,
                                         o.rows > 0 ? o.rows : 16, o.max_tokens, std::move(make),
                                         std::move(keep));
}

void MeasureTokens(const std::function<at::Tensor(const at::Tensor&)>& logits_of,
                   const at::Tensor& hidden, const at::Tensor& targets,
                   const std::vector<int32_t>& token_bytes, Score& score) {
  const at::Tensor flat = hidden.reshape({-1, hidden.size(-1)}), wanted = targets.reshape({-1});
  const int64_t rows = flat.size(0),
                at_once = std::max<int64_t>(
                    1, (int64_t{1} << 24) / std::max<int64_t>(1, int64_t(token_bytes.size())));
  double correct = 0, bytes = 0;
  for (int64_t i = 0; i < rows; i += at_once) {
    const int64_t n = std::min(at_once, rows - i);
    const at::Tensor logits = logits_of(flat.narrow(0, i, n)),
                     target = wanted.narrow(0, i, n).to(flat.device());
    CISTERN_CHECK(logits.size(1) == int64_t(token_bytes.size()), "[eval] the model has ",
                  logits.size(1), " tokens, the tokenizer ", token_bytes.size());
    const at::Tensor nats = at::logsumexp(logits, 1).to(at::kDouble) -
                            logits.gather(1, target.unsqueeze(1)).squeeze(1).to(at::kDouble);
    const double sum = nats.sum().item<double>();
    CISTERN_CHECK(std::isfinite(sum), "[eval] the model's loss is ", sum,
                  "; its weights are broken");
    score.Add("nats", sum);
    correct += at::argmax(logits, 1).eq(target).sum().item<double>();
  }
  const at::Tensor on_cpu = wanted.cpu().contiguous();
  for (int64_t i = 0; i < rows; ++i)
    bytes += token_bytes.at(size_t(on_cpu.const_data_ptr<int64_t>()[i]));
  score.Add("correct", correct);
  score.Add("tokens", double(rows));
  score.Add("bytes", bytes);
}

void MeasureTokens(const LanguageModel& model, const at::Tensor& hidden, const at::Tensor& targets,
                   const std::vector<int32_t>& token_bytes, Score& score) {
  MeasureTokens([&](const at::Tensor& rows) { return model.Logits(rows); }, hidden, targets,
                token_bytes, score);
}

Score MeasureBlocks(LanguageModel& model, const Batch& batch,
                    const std::vector<int32_t>& token_bytes) {
  const at::Tensor& ids = batch["ids"];
  model.config().CheckPositions(Form::kCausal, ids.size(1), "a block");
  ModelState state = model.EmptyState(ids.size(0));
  Score score;
  const at::Tensor hidden = model.Hidden(ids, state);
  const int64_t measured = batch["targets"].size(1);  // after the context
  MeasureTokens(model, hidden.narrow(1, ids.size(1) - measured, measured), batch["targets"],
                token_bytes, score);
  return score;
}

Json TokenMetrics(const Score& score) {
  const double nats = score["nats"], tokens = score["tokens"], bytes = score["bytes"];
  return {{"bits_per_byte", bytes > 0 ? nats / std::log(2.0) / bytes : std::nan("")},
          {"nats_per_token", nats / tokens},
          {"perplexity", std::exp(nats / tokens)},
          {"accuracy", 100.0 * (score["correct"] / tokens)},
          {"tokens", int64_t(tokens)},
          {"bytes", int64_t(bytes)}};
}

const Metric& BitsPerByte() {
  static const Metric metric = {
      "bits_per_byte", "bits per byte",
      "in consecutive blocks of the training length, each alone unless task.context says "
      "otherwise; lower is better",
      true, 0.02};
  return metric;
}

const Metric& Perplexity() {
  static const Metric metric = {"perplexity", "perplexity",
                                "per token, on the same blocks, so that it compares with one "
                                "tokenizer alone; lower is better",
                                true};
  return metric;
}

}  // namespace cistern
