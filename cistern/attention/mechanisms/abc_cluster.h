#pragma once
// ABC with clustered writes (P003 sec. 3.2, eq. 6, Table 1; spec 2.14): a slot holds the mean key
// and the mean value of one cluster of keys.
//   bidirectional: k-means of the whole sequence in Hamming space (Vyas et al. 2020), on the signs
//   of 32 random hyperplanes with bias causal, cross: a key's slot is its hash, the first ceil(log2
//   n) signs read as a number modulo n, so that memories may grow by pieces.
//                  P003 does not say how its decoder clustered.
// Signs are taken in double, so that a key keeps its slot whatever piece it comes in. Clusters have
// no gradient of their own.
#include "cistern/attention/abc_memory.h"

namespace cistern {

class AbcClusterMechanism : public AbcMechanism {
 public:
  struct Options {
    MemoryOptions memory;
    int64_t iterations = 10;  // of Lloyd's algorithm
    int64_t seed = 0;
  };
  static Fields Describe(Options& options);
  AbcClusterMechanism(const MechanismInfo& info, const Options& options, const AttentionDims& dims);

 protected:
  at::Tensor LogWeights(const std::vector<at::Tensor>& x, const Piece& piece) const override;
  at::Tensor BidirectionalRows(const std::vector<at::Tensor>& x, const ops::Mask& mask) override;
  at::Tensor DefinedWeights(Form form, const std::vector<at::Tensor>& seen) const override;

 private:
  int64_t iterations_;
  at::Tensor planes_;  // buffer [H,32,d+1]: normals and bias
};

}  // namespace cistern
