#pragma once
// Several mechanisms in one layer, each on its own heads: "window:2+latte:2" gives the first two
// heads to a window and the next two to Latte. All have the width D/H of the layer's heads; the
// output projection mixes them.
#include "cistern/attention/mechanism.h"

namespace cistern {

bool IsHeadGroups(const std::string& name);  // has the form of a list of groups, whether or not its
                                             // mechanisms exist
bool InHeadGroups(const std::string& list,
                  const std::string& mechanism);  // "latte" is in "window:2+latte:2"

// The mechanisms that a name stands for: those of its groups, or the one. UsageError as below.
std::vector<const MechanismInfo*> MechanismsOf(const std::string& name);

// Made on first use and kept. Its options are those of its mechanisms by name: {"window": {"size":
// 64}, "latte": {}}; other names are left alone. UsageError where a mechanism is unknown, a count
// is no positive number, or a mechanism has no verbs.
const MechanismInfo& HeadGroupsInfo(const std::string& name);

class HeadGroups : public Mechanism {
 public:
  struct Group {
    std::string name;  // of its tensors and projections: the mechanism's, with the group's number
                       // where one comes twice
    std::shared_ptr<Mechanism> mechanism;
  };
  HeadGroups(const MechanismInfo& info, const AttentionDims& dims, std::vector<Group> groups);
  const std::vector<Group>& groups() const { return groups_; }

  // The groups' projections and state tensors have the group's name before theirs: "latte_q",
  // "latte_memory".
  State EmptyState(int64_t batch, const at::TensorOptions& options) const override;
  at::Tensor DoExtend(const std::vector<at::Tensor>& x, State& state,
                      const ops::Mask& mask) override;
  void DoWrite(const std::vector<at::Tensor>& x, State& state, const ops::Mask& mask) override;
  at::Tensor Read(const std::vector<at::Tensor>& x, const State& state) override;
  at::Tensor Definition(Form form, const std::vector<at::Tensor>& queries,
                        const std::vector<at::Tensor>& x) const override;
  State Merge(const State& first, const State& second) const override;
  void Truncate(State& state, int64_t count) const override;
  int64_t StateBytes(int64_t batch, int64_t tokens, const at::TensorOptions& options,
                     bool decodes) const override;
  State Compact(const State& state) const override;
  State Settled(const State& state) const override;
  State StateForm(int64_t batch, const at::TensorOptions& options,
                  const std::function<bool(const std::string&)>& has) const override;
  void CheckState(const State& state) const override;
  // Of any group.
  std::string FormRefusal(Form form) const override;
  bool TakesBFloat16(Form form) const override;
  bool SeesPadding() const override;
  bool SeesBatch() const override;
  bool WritesAtOnce() const override;

 protected:
  at::Tensor BidirectionalRows(const std::vector<at::Tensor>& x, const ops::Mask& mask) override;

 private:
  // Runs f(number, mechanism, its tensors of x, its part of the state) for each group.
  template <class F>
  void Each(const std::vector<at::Tensor>& x, const State* state, F&& f) const;
  State Part(const State& state, size_t group) const;
  void PutBack(State& whole, size_t group, const State& part) const;

  std::vector<Group> groups_;
  std::vector<size_t> first_states_;  // of each group, its first tensor in the whole state
};

}  // namespace cistern
