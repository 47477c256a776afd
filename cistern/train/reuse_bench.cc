// What reuse attention costs and saves in training, at the shape of a small BERT: forward and
// backward of a classifier of 12 layers of width 256 with 4 heads, 512 tokens a row, for softmax
// and for reuse in its two ways to keep scores. `peak_MB`: resident memory that one step takes
// beyond what was there before. One thread: OMP_NUM_THREADS=1. A kind alone:
// --benchmark_filter=scores.
#include <ATen/ATen.h>
#include <benchmark/benchmark.h>
#include <malloc.h>

#include "cistern/base/memory.h"
#include "cistern/models/decoder_lm.h"
#include "cistern/models/encoder_classifier.h"
#include "cistern/train/trainer.h"

namespace cistern {
namespace {

void Step(benchmark::State& run, const char* mechanism, const char* keep) {
  const int64_t rows = run.range(0), length = 512;
  ModelConfig config;
  config.kind = "encoder_classifier", config.classes = 2, config.vocab_size = 1000,
  config.max_length = length;
  config.dim = 256, config.heads = 4, config.layers = 12, config.attention = {mechanism};
  if (*keep) config.attention_options["reuse"] = {{"placement", "full"}, {"keep", keep}};
  const auto model = std::dynamic_pointer_cast<EncoderClassifier>(MakeModel(config, 1));
  const at::Tensor ids = at::randint(0, config.vocab_size, {rows, length}, at::kLong),
                   labels = at::zeros({rows}, at::kLong);
  const at::Tensor lengths = at::full({rows}, length, at::kLong);
  const auto step = [&] {
    NextTokenLoss(model->Forward(ids, lengths), labels).backward();
    for (at::Tensor& p : model->parameters()) p.mutable_grad() = at::Tensor();
  };
  step();  // warm
  malloc_trim(0);
  ResetPeakMemory();
  const int64_t before = ResidentBytes();
  step();
  run.counters["peak_MB"] = double(PeakBytes() - before) / 1e6;
  for (auto _ : run) step();
  run.counters["tokens/s"] =
      benchmark::Counter(double(rows * length), benchmark::Counter::kIsIterationInvariantRate);
}

BENCHMARK_CAPTURE(Step, softmax, "softmax", "")
    ->Arg(2)
    ->Unit(benchmark::kMillisecond)
    ->UseRealTime();
BENCHMARK_CAPTURE(Step, handles, "reuse", "handles")
    ->Arg(2)
    ->Unit(benchmark::kMillisecond)
    ->UseRealTime();
BENCHMARK_CAPTURE(Step, scores, "reuse", "scores")
    ->Arg(2)
    ->Unit(benchmark::kMillisecond)
    ->UseRealTime();

}  // namespace
}  // namespace cistern
