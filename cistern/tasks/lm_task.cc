#include "cistern/tasks/lm_task.h"

#include <ATen/ATen.h>

#include "cistern/base/error.h"
#include "cistern/base/hash.h"
#include "cistern/base/progress.h"
#include "cistern/base/random.h"
#include "cistern/tasks/cache.h"

namespace cistern {

void LmTask::Prepare() {
  TextSource source(options_.text);
  const std::string cache = CacheFolder(options_.cache);
  {
    ProgressBar bar({source.bytes(), "read text", "bytes"});
    source.Scan([&](int64_t done, int64_t) { bar.Update(done); });
  }
  text_hash_ = source.Hash();
  const TextSplits splits = SplitText(source);
  if (options_.tokenizer == "bytes") {
    tokenizer_ = MakeByteTokenizer();
  } else {
    ProgressBar bar({0, "learn BPE", "merges"});
    tokenizer_ = OpenBpe(source, splits.train, options_.vocab_size,
                         StrCat(cache, "/bpe-", options_.vocab_size, "-", HexText(text_hash_)),
                         &notes_, [&](int64_t done, int64_t) { bar.Update(done); });
  }
  {
    ProgressBar bar({source.bytes(), "encode text", "bytes"});
    data_ = std::make_unique<TokenSplits>(OpenTokenSplits(
        source, *tokenizer_,
        StrCat(cache, "/tokens-", HexText(text_hash_), "-", HexText(tokenizer_->Hash())),
        [&](int64_t done, int64_t) { bar.Update(done); }));
  }
  notes_.insert(notes_.end(), source.notes().begin(), source.notes().end());
  notes_.insert(notes_.end(), data_->notes.begin(), data_->notes.end());
  token_bytes_ = TokenBytes(*tokenizer_);
  const int64_t train = data_->train.size(), needed = 2 * options_.length + 1;
  CISTERN_CHECK(train >= needed, options_.text, ": too short: the training part (90 %) has ", train,
                " tokens, and rows of length ", options_.length, " need at least ", needed,
                "; use a longer text or a smaller task.length");
  for (const Split split : {Split::kValid, Split::kTest}) {
    CISTERN_CHECK(tokens(split).size() >= 2, options_.text, ": too short: the ",
                  split == Split::kValid ? "validation" : "test", " part (5 %) has ",
                  tokens(split).size(), " tokens; use a longer text");
  }
  order_ = std::make_unique<ShuffledOrder>((train - 1 - (options_.length - 1)) / options_.length);
}

const TokenFile& LmTask::tokens(Split split) const {
  return split == Split::kTrain   ? data_->train
         : split == Split::kValid ? data_->valid
                                  : data_->test;
}

void LmTask::Complete(ModelConfig& config) const {
  config.kind = "decoder_lm";
  config.vocab_size = tokenizer_->vocab_size();
  config.max_length = std::max(config.max_length, options_.length);
}

Batch LmTask::TrainBatch(uint64_t seed, int64_t step, int64_t rows) const {
  const int64_t length = options_.length,
                blocks = (data_->train.size() - 1 - (length - 1)) / length;
  Batch batch;
  const at::Tensor window = at::empty({rows, length + 1}, at::kLong);
  for (int64_t r = 0; r < rows; ++r) {
    const int64_t index = step * rows + r;
    const int64_t offset = int64_t(Philox(seed, 0x0ff5e7, uint64_t(index / blocks))[0]) % length;
    data_->train.Copy(offset + order_->At(seed, index, rows) * length, length + 1,
                      window.mutable_data_ptr<int64_t>() + r * (length + 1));
  }
  batch.ids = window.narrow(1, 0, length);
  batch.targets = window.narrow(1, 1, length);
  batch.tokens = rows * length;
  return batch;
}

at::Tensor LmTask::Loss(Model& model, const Batch& batch, double label_smoothing) const {
  auto& lm = dynamic_cast<DecoderLm&>(model);
  ModelState state = lm.EmptyState(batch.ids.size(0));
  return lm.Loss(lm.Hidden(batch.ids, state), batch.targets, label_smoothing);
}

Json LmTask::Evaluate(Model& model, Split split, const EvalOptions& options) const {
  const TokenFile& file = tokens(split);
  LmEvalOptions eval;
  eval.length = options_.length;
  eval.max_tokens = options.max_tokens;
  eval.interrupt = options.interrupted;
  const LmScore score = EvaluateBlocks(
      dynamic_cast<DecoderLm&>(model),
      [&](int64_t begin, int64_t count, int64_t* out) { file.Copy(begin, count, out); },
      file.size(), token_bytes_, eval);
  return {{"bits_per_byte", score.bits_per_byte()},
          {"nats_per_token", score.nats_per_token()},
          {"perplexity", score.perplexity()},
          {"accuracy", 100.0 * score.accuracy()},
          {"tokens", score.tokens},
          {"bytes", score.bytes}};
}

Json LmTask::DataSummary() const {
  auto split = [](const TokenFile& f) { return Json{{"tokens", f.size()}, {"bytes", f.bytes()}}; };
  return {{"text", options_.text},
          {"xxh64", HexText(text_hash_)},
          {"tokenizer_xxh64", HexText(tokenizer_->Hash())},
          {"tokenizer", tokenizer_->kind()},
          {"vocab_size", tokenizer_->vocab_size()},
          {"train", split(data_->train)},
          {"valid", split(data_->valid)},
          {"test", split(data_->test)},
          {"notes", notes_}};
}

void LmTask::SaveAssets(const std::string& folder) const {
  tokenizer_->Save(folder + "/tokenizer.json");
}

}  // namespace cistern
