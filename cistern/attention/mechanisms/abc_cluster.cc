#include "cistern/attention/mechanisms/abc_cluster.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <bit>

#include "cistern/base/random.h"

namespace cistern {

MechanismInfo abc_cluster_mechanism() {
  MechanismInfo i = InfoOf<AbcClusterMechanism>("abc_cluster");
  i.title = "ABC, clustering";
  i.source = "P003 Table 1, App. A; k-means of Vyas et al. 2020; causal and cross ours; spec 2.14";
  i.summary =
      "Keys near each other share a slot, which holds their mean; a query attends to the slots "
      "by softmax. Encoders cluster by k-means, "
      "the causal and the cross form by a locality-sensitive hash.";
  i.definition = "as abc_mlp, phi_s = e_c / |c|, c the cluster of k_s and |c| its size";
  i.forms = {Form::kBidirectional, Form::kCausal, Form::kCross};
  i.causal_is_prefix = false;  // a hash against k-means
  i.padding_refusal = "its clusters are those of a whole row, and a written state has others";
  i.positions = AddedPositions();
  i.slots = true;
  i.time = "O(T n d), bidirectional O(iterations T n 32) more";
  i.state = "n (2 d + 1) per head";
  i.cases = {Json{{"slots", 5}},
             Json{{"slots", 3}, {"iterations", 3}, {"empty_slots", "take_part"}}};
  i.merges = true;
  return i;
}

Fields AbcClusterMechanism::Describe(Options& options) {
  Fields f;
  DescribeMemory(f, options.memory);
  f.Add("iterations", &options.iterations, "of k-means, in the bidirectional form", {0, 1000});
  f.Add("seed", &options.seed, "of the random hyperplanes", {0});
  return f;
}

namespace {

constexpr int64_t kHyperplanes = 32;

int64_t HashBits(int64_t slots) {
  return int64_t(std::bit_width(uint64_t(slots - 1)));
}  // ceil(log2 n)

}  // namespace

AbcClusterMechanism::AbcClusterMechanism(const MechanismInfo& info, const Options& options,
                                         const AttentionDims& dims)
    : AbcMechanism(info, options.memory, Weights::kSomeSlots, dims),
      iterations_(options.iterations) {
  Random random(uint64_t(options.seed), uint64_t(dims.layer));
  const at::Tensor planes =
      at::empty({dims.heads, kHyperplanes, dims.dim / dims.heads + 1}, at::kFloat);
  float* plane = planes.mutable_data_ptr<float>();
  for (int64_t i = 0; i < planes.numel(); ++i) plane[i] = float(random.Normal());
  AddWeight("planes", planes_, planes, CoreWeight::Kind::kDrawn);
}

// +1 or -1 for each of the first `count` hyperplanes: [B,H,T,count], double.
at::Tensor AbcClusterMechanism::Signs(const at::Tensor& k, int64_t count) const {
  const at::Tensor planes = planes_.narrow(1, 0, count).to(at::kDouble);
  const int64_t width = k.size(3);
  const at::Tensor side =
      at::matmul(k.detach().to(at::kDouble), planes.narrow(2, 0, width).transpose(1, 2)) +
      planes.select(2, width).unsqueeze(1);  // [B,H,T,count] + [H,1,count]
  return (side > 0).to(at::kDouble) * 2 - 1;
}

at::Tensor AbcClusterMechanism::LogWeights(const std::vector<at::Tensor>& x, const Piece&) const {
  const int64_t bits = HashBits(slots());
  const at::Tensor powers =
      at::pow(2.0, at::arange(bits, x[k_].options().dtype(at::kDouble).requires_grad(false)));
  const at::Tensor code = ((Signs(x[k_], bits) + 1) * 0.5 * powers).sum(3).to(at::kLong);
  return OneHotLogWeights(code.remainder(slots()), slots(), x[k_].options());
}

// Lloyd's algorithm on sign vectors, all rows and heads at once. Distances and votes are integers
// that floats hold, so nothing is rounded.
at::Tensor AbcClusterMechanism::BidirectionalRows(const std::vector<at::Tensor>& x,
                                                  const ops::Mask& mask) {
  const int64_t batch = x[k_].size(0), heads = x[k_].size(1), length = x[k_].size(2), n = slots();
  State state = EmptyState(batch, x[k_].options());
  if (length == 0) return Read(x, state);
  constexpr int64_t kFloatCounts = int64_t{1} << 24;
  const auto type = std::max(length, kHyperplanes * n) < kFloatCounts ? at::kFloat : at::kDouble;
  at::Tensor signs = Signs(x[k_], kHyperplanes).to(type);
  const at::Tensor row = at::arange(length, x[k_].options().dtype(at::kLong).requires_grad(false)),
                   lengths =
                       mask.lengths ? *mask.lengths : at::full({batch}, length, row.options());
  if (mask.lengths) signs = signs.masked_fill(mask.HeadsPadding(length), 0.0);  // moves no centre
  // Centres begin at tokens l * length / n; of equal centres the first takes all.
  const at::Tensor slot = at::arange(n, row.options());
  const at::Tensor first =
      at::floor_divide(slot.unsqueeze(0) * lengths.unsqueeze(1), n).view({batch, 1, n, 1});
  at::Tensor centres = signs.gather(2, first.expand({batch, heads, n, kHyperplanes}));
  auto nearest =
      [&] {  // the first of the nearest centres: agreement is an integer, the slot breaks ties
        return (at::matmul(signs, centres.transpose(2, 3)) * double(n) - slot).argmax(3);
      };
  for (int64_t i = 0; i < iterations_; ++i) {
    const at::Tensor member = (nearest().unsqueeze(-1) == slot).to(type);
    const at::Tensor votes = at::matmul(member.transpose(2, 3), signs);
    centres = at::where(votes == 0, centres, votes.sign());  // a tie, or nobody: the sign stays
  }
  WriteWith(OneHotLogWeights(nearest(), n, x[k_].options()), x, state, mask);
  return Read(x, state);
}

at::Tensor AbcClusterMechanism::DefinedWeights(Form form,
                                               const std::vector<at::Tensor>& seen) const {
  const int64_t batch = seen[k_].size(0), heads = seen[k_].size(1), length = seen[k_].size(2),
                width = seen[k_].size(3), n = slots();
  const at::Tensor phi = at::zeros({batch, heads, n, length}, seen[k_].options()),
                   planes = planes_.to(at::kDouble);
  const auto key = seen[k_].accessor<double, 4>();
  const auto plane = planes.accessor<double, 3>();
  for (int64_t b = 0; b < batch; ++b) {
    for (int64_t h = 0; h < heads; ++h) {
      std::vector<uint32_t> code(size_t(length), 0);
      for (int64_t t = 0; t < length; ++t) {
        for (int64_t p = 0; p < kHyperplanes; ++p) {
          double side = plane[h][p][width];
          for (int64_t j = 0; j < width; ++j) side += key[b][h][t][j] * plane[h][p][j];
          if (side > 0) code[size_t(t)] |= 1u << p;
        }
      }
      std::vector<int64_t> cluster(size_t(length), 0);
      if (form != Form::kBidirectional) {
        const uint64_t used = (uint64_t{1} << HashBits(n)) - 1;
        for (size_t t = 0; t < code.size(); ++t)
          cluster[t] = int64_t((code[t] & used) % uint64_t(n));
      } else {
        std::vector<uint32_t> centre;
        for (int64_t l = 0; l < n; ++l) centre.push_back(code[size_t(l * length / n)]);
        auto assign = [&] {
          for (size_t t = 0; t < code.size(); ++t) {
            auto far = [&](uint32_t c) { return std::popcount(code[t] ^ c); };
            cluster[t] = std::min_element(centre.begin(), centre.end(),
                                          [&](uint32_t a, uint32_t c) { return far(a) < far(c); }) -
                         centre.begin();
          }
        };
        for (int64_t i = 0; i < iterations_; ++i) {
          assign();
          for (int64_t l = 0; l < n; ++l) {
            for (int64_t p = 0; p < kHyperplanes; ++p) {
              int64_t votes = 0;
              for (size_t t = 0; t < code.size(); ++t)
                votes += cluster[t] != l ? 0 : (code[t] >> p & 1) != 0 ? 1 : -1;
              if (votes > 0) centre[size_t(l)] |= 1u << p;
              if (votes < 0) centre[size_t(l)] &= ~(1u << p);
            }
          }
        }
        assign();
      }
      for (int64_t t = 0; t < length; ++t) phi[b][h][cluster[size_t(t)]][t].fill_(1.0);
    }
  }
  return phi / phi.sum({3}, true).clamp_min(1.0);
}

}  // namespace cistern
