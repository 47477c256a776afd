#pragma once
// The processes that train one model together, on one machine or several, by torchrun's variables.
// Each holds all weights, takes its share of the rows of every batch, and adds its gradients to the
// others' by torch's Gloo; all then make the same update.
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

namespace cistern {

class Processes {
 public:
  // This process alone: every function below returns what it is given.
  Processes();
  // By RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT; alone where WORLD_SIZE is unset or 1.
  // UsageError, naming the variable, where one is missing or no number that fits.
  static std::shared_ptr<Processes> FromEnvironment();
  // Where they meet, and how long one waits there for the others.
  struct Meeting {
    std::string address;
    int64_t port = 0;
    bool served = false;  // torchrun listens there; else the first process does
    int64_t attempt = 0;  // of several meetings at a served address
    double seconds = 300;
    double silence = 120;  // seconds without a sign of life after which a process counts as lost
  };
  // The process of this rank, from 0, of `count`. Waits for all: else an Error; UsageError where
  // the address is none. GLOO_SOCKET_IFNAME names the network interface that they talk by. From
  // then on the process ignores SIGPIPE.
  Processes(int64_t rank, int64_t count, const Meeting& meeting);
  ~Processes();
  Processes(const Processes&) = delete;
  Processes& operator=(const Processes&) = delete;

  int64_t rank() const { return rank_; }
  int64_t count() const { return count_; }
  bool alone() const { return count_ == 1; }
  bool first() const { return rank_ == 0; }
  // "process 1 of 2", for messages.
  std::string Name() const;

  // What follows is called by all processes in the same order, with the same shapes and types;
  // Error where another has ended, or has given no sign of life for as long as the meeting says.

  // Each tensor, dense and on the CPU, becomes its sum over all processes: the same bits in each,
  // and in each run with as many.
  void Sum(const std::vector<at::Tensor>& tensors) const;
  // Each tensor becomes the first process's.
  void TakeFirst(const std::vector<at::Tensor>& tensors) const;
  std::string OfFirst(const std::string& text) const;
  // The texts of all, by rank.
  std::vector<std::string> Gather(const std::string& text) const;
  // How many of them, this one included, run on its machine, or in its container.
  int64_t Here() const;
  bool Any(bool value) const;

 private:
  struct Group;
  int64_t rank_ = 0, count_ = 1;
  std::unique_ptr<Group> group_;  // null: alone
};

// UsageError where WORLD_SIZE says that this is one of several processes: all would do the whole
// work of `command`, over each other.
void RequireOneProcess(const std::string& command);

}  // namespace cistern
