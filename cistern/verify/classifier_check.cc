#include <ATen/ATen.h>

#include <cmath>

#include "cistern/ops/impl.h"
#include "cistern/verify/model_check.h"
#include "cistern/verify/subject.h"

namespace cistern::verify {
namespace {

at::Tensor LogitsOf(EncoderClassifier& model, const at::Tensor& ids,
                    const std::vector<int64_t>& lengths) {
  return model.Forward(ids, LengthsOf(lengths));
}

// [B,T]: the input, other tokens of it in other rows (turned round by a third), and their lengths,
// from the whole to a single token.
struct Batch {
  at::Tensor ids;
  std::vector<int64_t> lengths;

  at::Tensor Row(int64_t b) const { return ids.narrow(0, b, 1).narrow(1, 0, lengths[size_t(b)]); }
};

Batch BatchOf(const at::Tensor& ids) {
  const int64_t length = ids.size(1), third = length / 3;
  return {at::cat({ids, ids.roll(third, 1), ids.roll(2 * third, 1), ids.flip(1)}),
          {length, length / 2 + 1, third, 1}};
}

}  // namespace

std::vector<ModelResult> CheckClassifier(EncoderClassifier& model, EncoderClassifier& twin,
                                         const at::Tensor& ids,
                                         const std::function<bool(const ModelResult&)>& done) {
  CISTERN_CHECK(ids.dim() == 1 && ids.size(0) >= 16,
                "[verify] expected ids of shape [T] with T of at least 16, got ", ids.sizes());
  at::NoGradGuard guard;
  model.eval();
  twin.eval();
  at::manual_seed(1);
  const Batch batch = BatchOf(ids.unsqueeze(0));
  auto run = [&] { return LogitsOf(twin, batch.ids, batch.lengths); };
  const at::Tensor logits = run();
  const double in_float = 1e-6 + 16 * Sensitivity(twin, run, logits, std::ldexp(1, -23));
  const double in_double = 1e-12 + 16 * Sensitivity(twin, run, logits, std::ldexp(1, -52));
  const int64_t rows = batch.ids.size(0), length = batch.ids.size(1),
                vocab = model.config().vocab_size;

  auto precision = [&] {
    Meter meter;
    meter.Close(LogitsOf(model, batch.ids, batch.lengths), logits, in_float, "T=", length);
    return meter.result();
  };
  auto padding = [&] {
    if (const std::string by = twin.SeesPadding(); !by.empty())
      return NotApplicable("padding takes part, by " + by);
    Meter meter;
    for (int64_t b = 0; b < rows; ++b) {
      const int64_t count = batch.lengths[size_t(b)];
      meter.Close(LogitsOf(twin, batch.Row(b), {count}), logits.narrow(0, b, 1), in_double,
                  "row of ", count, " tokens");
    }
    at::Tensor other = batch.ids.clone();
    for (int64_t b = 0; b < rows; ++b) {
      const int64_t count = batch.lengths[size_t(b)];
      other[b].narrow(0, count, length - count).add_(1).remainder_(vocab);
    }
    meter.Close(LogitsOf(twin, other, batch.lengths), logits, in_double,
                "other tokens in the padding");
    return meter.result();
  };
  auto neighbours = [&] {
    Meter meter;
    for (int64_t b = 0; b < rows; ++b) {
      at::Tensor other = (batch.ids + 1).remainder(vocab);
      other[b].copy_(batch.ids[b]);
      std::vector<int64_t> lengths(size_t(rows), length);
      lengths[size_t(b)] = batch.lengths[size_t(b)];
      meter.Close(LogitsOf(twin, other, lengths)[b], logits[b], in_double, "row ", b,
                  " among others");
    }
    return meter.result();
  };
  auto implementations = [&] {
    Meter meter;
    for (const ops::Impl impl :
         {ops::Impl::kKernel, ops::Impl::kComposite, ops::Impl::kReference}) {
      const ops::ImplScope scope(impl);
      meter.Close(LogitsOf(twin, batch.ids, batch.lengths), logits, in_double, ops::ImplName(impl),
                  ", double");
      meter.Close(LogitsOf(model, batch.ids, batch.lengths), logits, in_float, ops::ImplName(impl),
                  ", float");
    }
    return meter.result();
  };
  return RunModelChecks(
      {{"float", "the model in float = its copy in double", precision},
       {"padding", "rows padded to one length = each alone, whatever the padding holds", padding},
       {"batch", "a row's answer does not depend on the other rows", neighbours},
       {"implementations", "kernel = composite = reference", implementations}},
      done);
}

}  // namespace cistern::verify
