#include "cistern/attention/mechanisms/abc_cluster.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <bit>

#include "cistern/base/random.h"
#include "cistern/kernels/sign_clusters.h"
#include "cistern/ops/sign_clusters.h"

namespace cistern {

MechanismInfo abc_cluster_mechanism() {
  MechanismInfo i = InfoOf<AbcClusterMechanism>("abc_cluster");
  i.title = "ABC, clustering";
  i.source =
      "P003 sec. 3.2, eq. 6, Table 1; k-means of Vyas et al. 2020; causal and cross ours; spec "
      "2.14";
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
  i.time = "O(T n d), bidirectional O(iterations T n) more";
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
      at::empty({dims.heads, kMostPlanes, dims.dim / dims.heads + 1}, at::kFloat);
  float* plane = planes.mutable_data_ptr<float>();
  for (int64_t i = 0; i < planes.numel(); ++i) plane[i] = float(random.Normal());
  AddWeight("planes", planes_, planes, CoreWeight::Kind::kDrawn);
}

at::Tensor AbcClusterMechanism::LogWeights(const std::vector<at::Tensor>& x, const Piece&) const {
  const at::Tensor code = ops::SignCodes(x[k_], planes_, HashBits(slots())).to(at::kLong);
  return OneHotLogWeights(code.remainder(slots()), slots(), x[k_].options());
}

at::Tensor AbcClusterMechanism::BidirectionalRows(const std::vector<at::Tensor>& x,
                                                  const ops::Mask& mask) {
  State state = EmptyState(x[k_].size(0), x[k_].options());
  if (x[k_].size(2) == 0) return Read(x, state);
  const at::Tensor clusters =
      ops::SignClusters(ops::SignCodes(x[k_], planes_, kMostPlanes), slots(), iterations_, mask);
  WriteWith(OneHotLogWeights(clusters, slots(), x[k_].options()), x, state, mask);
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
        for (int64_t p = 0; p < kMostPlanes; ++p) {
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
            for (int64_t p = 0; p < kMostPlanes; ++p) {
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
