#include "cistern/decode/measure.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/randint.h>

#include <algorithm>
#include <chrono>
#include <string>

#include "cistern/attention/mechanism.h"
#include "cistern/base/error.h"
#include "cistern/base/memory.h"
#include "cistern/base/random.h"
#include "cistern/decode/eval_scope.h"
#include "cistern/kernels/peak.h"

namespace cistern {
void CheckStateGrowth(const ModelConfig& config, int64_t state_bytes, int64_t position,
                      int64_t available) {
  if (available < 0) available = AvailableBytes();
  if (available == 0 || 2 * state_bytes <= available) return;
  for (const Form form : config.info().forms) {
    if (form == Form::kBidirectional) continue;
    const std::vector<std::string> names = config.Stack(form).options().attention;
    const auto grows = [](const std::string& name) { return !FindMechanism(name).bounded; };
    const auto name = std::find_if(names.begin(), names.end(), grows);
    if (name == names.end()) continue;
    Fail("the state of ", *name, " attention grows with the text: it holds ", state_bytes / 1000000,
         " MB after ", position, " tokens, and its next doubling does not fit into the ",
         available / 1000000,
         " MB that are free; shorten the text, or use a mechanism with bounded state (`cistern "
         "info` "
         "lists them)");
  }
}

DecodeLimits MeasureDecodeLimits(const LanguageModel& model, bool bfloat16) {
  DecodeLimits limits;
  limits.gb_per_s = TriadBandwidth();
  limits.gflops = MultiplyAddPeak<float>();
  for (const auto& p : model.named_parameters()) {
    const std::string& name = p.key();
    if (name.starts_with("embed_positions")) continue;
    if (name.starts_with("embed_tokens") && !model.config().tie_embeddings) continue;
    limits.weights += p.value().numel();
    const bool kept = bfloat16 && p.value().dim() == 2;  // a linear map's
    limits.weight_bytes += p.value().numel() * (kept ? 2 : int64_t(p.value().element_size()));
  }
  return limits;
}

std::vector<double> TimeDecodeSteps(LanguageModel& model, ModelState& state, int64_t count,
                                    const std::function<bool()>& stop) {
  using Clock = std::chrono::steady_clock;
  const DecodeScope scope(model);
  const at::Tensor ids =
      at::randint(model.config().vocab_size, {state.positions.size(0), 1}, at::kLong)
          .to(model.options().device());
  std::vector<double> times;
  for (int64_t i = 0; i < count && !(stop && stop()); ++i) {
    const auto began = Clock::now();
    model.Extend(ids, state);
    times.push_back(std::chrono::duration<double, std::milli>(Clock::now() - began).count());
  }
  return times;
}

std::vector<DecodePoint> MeasureDecoding(LanguageModel& model,
                                         const std::vector<int64_t>& positions, int64_t tokens,
                                         const std::atomic<bool>* interrupt,
                                         const SamplerOptions& sampling) {
  using Clock = std::chrono::steady_clock;
  CISTERN_CHECK(std::is_sorted(positions.begin(), positions.end()),
                "[measure] positions must ascend");
  const DecodeScope scope(model);
  const ModelConfig& config = model.config();
  ModelState state = model.EmptyState(1);
  Random random(1);
  const auto draw = [&](int64_t count) {
    const at::Tensor ids = at::empty({1, count}, model.options().dtype(at::kLong).device(at::kCPU));
    for (int64_t i = 0; i < count; ++i)
      ids.mutable_data_ptr<int64_t>()[i] = random.Below(config.vocab_size);
    return ids.to(model.options().device());
  };
  const Sampler sampler(sampling);
  SeenTokens seen(config.vocab_size, sampling.repetition_window);
  std::vector<DecodePoint> points;
  int64_t done = 0;
  {  // the first call of every operation is slow
    ModelState warm = model.EmptyState(1);
    for (int i = 0; i < 3; ++i) model.Extend(draw(1), warm);
  }
  for (const int64_t position : positions) {
    if (std::max(position, done) + tokens > config.PositionLimit(Form::kCausal)) break;
    while (done < position) {
      if (interrupt && *interrupt) return points;
      CheckStateGrowth(config, state.Bytes(), done);
      const int64_t piece = std::min<int64_t>(1024, position - done);
      model.Hidden(draw(piece), state);
      done += piece;
    }
    std::vector<double> times;
    at::Tensor id = draw(1);
    for (int64_t i = 0; i < tokens; ++i) {
      if (interrupt && *interrupt) return points;
      const auto begin = Clock::now();
      const at::Tensor logits = model.Extend(id, state).to(at::kCPU, at::kDouble).contiguous();
      const Choice choice = sampler.Choose(
          {logits.const_data_ptr<double>(), size_t(logits.numel())}, &seen, 0, done + i);
      seen.Push(choice.token);
      id = at::full({1, 1}, choice.token, id.options());
      times.push_back(std::chrono::duration<double, std::milli>(Clock::now() - begin).count());
    }
    std::nth_element(times.begin(), times.begin() + tokens / 2, times.end());
    points.push_back({done, times[size_t(tokens / 2)], model.StateBytes(1, done)});
    done += tokens;
  }
  return points;
}

}  // namespace cistern
