#pragma once
// The device that models are made on, of the whole process (`--device`), and autocast there.
#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

namespace cistern {

// Those that this build and this machine have, by name: "cpu", "cuda:0", ...
std::vector<std::string> Devices();
// "cpu", "cuda" (its first) or "cuda:1". UsageError that lists what there is.
at::Device ParseDevice(const std::string& name);

at::Device ActiveDevice();  // the CPU until SetActiveDevice is called
void SetActiveDevice(at::Device device);
// x there. Weights are drawn on the CPU, so that a seed gives the same ones on every device.
at::Tensor ToActiveDevice(const at::Tensor& x);
// Weights there from N(0, std^2). On meta, where only shapes are wanted, none are drawn.
at::Tensor NormalWeights(at::IntArrayRef sizes, double std);

// Linear maps in bfloat16 on `device` while it lives; sums, norms and the cores of mechanisms stay
// in float32.
class BFloat16Scope {
 public:
  BFloat16Scope(bool on, at::Device device);
  ~BFloat16Scope();
  BFloat16Scope(const BFloat16Scope&) = delete;
  BFloat16Scope& operator=(const BFloat16Scope&) = delete;

 private:
  bool on_;
  at::DeviceType type_;
};

// Whether linear maps on the CPU take x, in float, as bfloat16.
bool MapsTakeBFloat16(const at::Tensor& x);

}  // namespace cistern
