#include "cistern/tensors/device.h"

#include <ATen/ATen.h>
#include <ATen/Context.h>
#include <ATen/autocast_mode.h>
#include <dlfcn.h>
#include <link.h>

#include <algorithm>
#include <filesystem>

#include "cistern/base/error.h"

namespace cistern {
namespace {

at::Device& Active() {
  static at::Device device(at::kCPU);
  return device;
}

// Loads torch's libraries for GPUs from the folder of its library for CPUs, which is all that
// programs link: operators for a GPU are registered as its library is loaded. Why one that is there
// cannot be loaded, or nothing.
std::string LoadGpuLibraries() {
  void* const cpu = ::dlopen("libtorch_cpu.so", RTLD_NOW | RTLD_NOLOAD);
  link_map* loaded = nullptr;
  if (cpu == nullptr || ::dlinfo(cpu, RTLD_DI_LINKMAP, &loaded) != 0) return "";
  std::string failure;
  for (const char* name : {"libtorch_cuda.so", "libtorch_hip.so", "libtorch_xpu.so"}) {
    const auto library = std::filesystem::path(loaded->l_name).parent_path() / name;
    if (std::filesystem::exists(library) && !::dlopen(library.c_str(), RTLD_NOW | RTLD_GLOBAL))
      failure = ::dlerror();
  }
  return failure;
}

const std::string& GpuFailure() {
  static const std::string failure = LoadGpuLibraries();
  return failure;
}

}  // namespace

std::vector<std::string> Devices() {
  GpuFailure();
  std::vector<std::string> names = {"cpu"};
  const auto add = [&](bool there, at::DeviceType type, const char* name) {
    if (!there) return;
    const int count = at::globalContext().getAcceleratorHooksInterface(type).deviceCount();
    for (int i = 0; i < count; ++i) names.push_back(StrCat(name, ":", i));
  };
  add(at::hasCUDA(), at::kCUDA, "cuda");
  add(at::hasXPU(), at::kXPU, "xpu");
  return names;
}

at::Device ParseDevice(const std::string& name) {
  if (name == "cpu") return at::kCPU;  // without the libraries of GPUs
  const std::vector<std::string> known = Devices();
  for (const std::string& whole : {name, name + ":0"}) {
    if (std::find(known.begin(), known.end(), whole) != known.end()) return at::Device(whole);
  }
  std::string list;
  for (const std::string& device : known) list += (list.empty() ? "" : ", ") + device;
  if (!GpuFailure().empty()) {
    list += StrCat("; torch's library for GPUs cannot be loaded: ", GpuFailure(),
                   " (`./run` installs torch without what its GPU library needs: install torch "
                   "itself, `pip install torch`, and build with CISTERN_TORCH set to it)");
  }
  FailUsage("there is no device '", name, "' for this build on this machine; available: ", list);
}

at::Device ActiveDevice() { return Active(); }
void SetActiveDevice(at::Device device) { Active() = device; }

at::Tensor ToActiveDevice(const at::Tensor& x) {
  return ActiveDevice() == x.device() ? x : x.to(ActiveDevice());
}

at::Tensor NormalWeights(at::IntArrayRef sizes, double std) {
  if (ActiveDevice().is_meta()) return at::empty(sizes, ActiveDevice());
  return ToActiveDevice(at::randn(sizes) * std);
}

BFloat16Scope::BFloat16Scope(bool on, at::Device device) : on_(on), type_(device.type()) {
  if (!on_) return;
  at::autocast::set_autocast_enabled(type_, true);
  at::autocast::set_autocast_dtype(type_, at::kBFloat16);
  at::autocast::increment_nesting();
}

BFloat16Scope::~BFloat16Scope() {
  if (!on_) return;
  if (at::autocast::decrement_nesting() == 0) at::autocast::clear_cache();
  at::autocast::set_autocast_enabled(type_, false);
}

bool MapsTakeBFloat16(const at::Tensor& x) {
  return x.device().is_cpu() && x.scalar_type() == at::kFloat &&
         at::autocast::is_autocast_enabled(at::kCPU) &&
         at::autocast::get_autocast_dtype(at::kCPU) == at::kBFloat16;
}

}  // namespace cistern
