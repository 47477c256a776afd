#pragma once
// A made-up device (c10::DeviceType::HPU) for tests of what runs elsewhere than on the CPU, on
// machines without a GPU. Its memory is the CPU's behind addresses that fault when they are read.
// Every torch operator runs by the CPU's kernel; one that is given tensors of both devices fails,
// as on a GPU. It has no kernels of ours. Include it in one file of a test program.
#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/HPUHooksInterface.h>
#include <c10/core/impl/FakeGuardImpl.h>
#include <torch/library.h>

#include <algorithm>
#include <string>
#include <vector>

namespace c10::impl {
C10_REGISTER_GUARD_IMPL(HPU, FakeGuardImpl<DeviceType::HPU>)
}  // namespace c10::impl

namespace cistern::testing {

inline const at::Device kMadeUpDevice(at::DeviceType::HPU, 0);

// What torch asks before it runs a backward pass on a device.
struct MadeUpHooks : at::HPUHooksInterface {
  explicit MadeUpHooks(at::HPUHooksArgs) {}
  bool hasHPU() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  void init() const override {}
  c10::DeviceIndex deviceCount() const override { return 0; }  // of generators to seed
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
};

class MadeUpDevice {
 public:
  // One operator, as a boxed fallback.
  static void Run(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
    TORCH_CHECK_NOT_IMPLEMENTED(op.schema().name().rfind("cistern::", 0) != 0, "could not run ",
                                op.schema().name(), ": ", kMadeUpDevice, " has no kernels of ours");
    MadeUpDevice call;
    const size_t count = op.schema().arguments().size();
    const auto first = stack->end() - std::ptrdiff_t(count);
    for (auto value = first; value != stack->end(); ++value) *value = call.ToHost(*value);
    TORCH_CHECK(call.host_tensors_ == 0 || call.tensors_.empty() || MayMix(op.schema().name()),
                "expected all tensors on one device: ", op.schema().name(), " got some on ",
                kMadeUpDevice, " and some on the CPU");
    RunOnHost(op, stack);
    for (const Pair& pair : call.tensors_) call.KeepMetadata(pair);
    for (c10::IValue& value : *stack) value = call.ToDevice(value);
  }

  // Operators that torch asks of each device by another name.
  static constexpr const char* kConvolution = "aten::convolution_overrideable";
  static constexpr const char* kConvolutionBackward = "aten::convolution_backward_overrideable";

 private:
  struct Pair {
    at::Tensor device, host;
  };
  static constexpr uintptr_t kFault = uintptr_t{1} << 63;  // no address has this bit alone

  static bool MayMix(const std::string& name) {
    for (const char* one : {"aten::_copy_from", "aten::copy_", "aten::_to_copy", "aten::index",
                            "aten::index_put_", "aten::_index_put_impl_", "aten::set_"}) {
      if (name == one) return true;
    }
    return false;
  }

  static void RunOnHost(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
    const std::string& name = op.schema().name();
    const auto instead = [](const char* other) {
      return c10::Dispatcher::singleton().findSchemaOrThrow(other, "");
    };
    if (name == "aten::_copy_from") {
      const at::Tensor to = stack->end()[-2].toTensor(), from = stack->end()[-3].toTensor();
      torch::jit::drop(*stack, 3);
      stack->push_back(to.copy_(from));
    } else if (name == kConvolution) {
      instead("aten::convolution").callBoxed(stack);
    } else if (name == kConvolutionBackward) {
      stack->insert(stack->end() - 7, c10::IValue());  // the sizes of no bias
      instead("aten::convolution_backward").callBoxed(stack);
    } else {
      op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
    }
  }

  static void Release(void* storage) { delete static_cast<c10::Storage*>(storage); }
  // The same memory, for the other side; it lives as long as either.
  static c10::Storage Mirror(const c10::Storage& of, at::Device device) {
    const auto address = reinterpret_cast<uintptr_t>(of.data());
    void* const data = address == 0 ? nullptr : reinterpret_cast<void*>(address ^ kFault);
    return c10::Storage(c10::make_intrusive<c10::StorageImpl>(
        c10::StorageImpl::use_byte_size_t(), of.nbytes(),
        c10::DataPtr(data, new c10::Storage(of), &Release, device), c10::GetAllocator(at::kCPU),
        true));
  }
  static at::Tensor Made(c10::Storage storage, c10::DispatchKey key, const at::Tensor& like) {
    auto impl = c10::make_intrusive<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(key),
                                                     like.dtype());
    impl->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
    return at::Tensor(std::move(impl));
  }

  static at::Tensor View(const at::Tensor& of, const at::Tensor& like) {
    auto impl = c10::make_intrusive<c10::TensorImpl>(
        c10::TensorImpl::VIEW, c10::Storage(of.storage()), of.key_set(), like.dtype());
    impl->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
    return at::Tensor(std::move(impl));
  }

  at::Tensor HostOf(const at::Tensor& t) {
    if (!t.defined()) return t;
    if (t.device().type() != kMadeUpDevice.type()) {
      host_tensors_ += t.dim() > 0;
      return t;
    }
    for (const Pair& p : tensors_) {
      if (p.device.is_same(t)) return p.host;
    }
    const auto* storage = t.storage().unsafeGetStorageImpl();
    const auto known = std::find_if(tensors_.begin(), tensors_.end(), [&](const Pair& p) {
      return p.device.storage().unsafeGetStorageImpl() == storage;
    });
    tensors_.push_back(
        {t, Made(known != tensors_.end() ? known->host.storage() : Mirror(t.storage(), at::kCPU),
                 c10::DispatchKey::CPU, t)});
    return tensors_.back().host;
  }
  at::Tensor DeviceOf(const at::Tensor& host) {
    if (!host.defined()) return host;
    for (const Pair& p : tensors_) {
      if (p.host.is_same(host)) return p.device;
    }
    for (const Pair& p : tensors_) {
      if (p.host.storage().unsafeGetStorageImpl() == host.storage().unsafeGetStorageImpl())
        return View(p.device, host);
    }
    return Made(Mirror(host.storage(), kMadeUpDevice), c10::DispatchKey::HPU, host);
  }
  // An operator may have resized its output.
  static void KeepMetadata(const Pair& p) {
    if (p.device.sizes() == p.host.sizes() && p.device.strides() == p.host.strides() &&
        p.device.storage_offset() == p.host.storage_offset() &&
        p.device.storage().nbytes() == p.host.storage().nbytes())
      return;
    p.device.unsafeGetTensorImpl()->set_storage_keep_dtype(Mirror(p.host.storage(), kMadeUpDevice));
    p.device.unsafeGetTensorImpl()->set_sizes_and_strides(p.host.sizes(), p.host.strides(),
                                                          p.host.storage_offset());
  }

  template <class Change>
  static c10::IValue Changed(const c10::IValue& value, Change&& change) {
    if (value.isTensor()) return change(value.toTensor());
    if (value.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& t : value.toTensorVector()) list.push_back(change(t));
      return list;
    }
    if (value.isList()) {
      const auto of = value.toListRef();
      const bool tensors = std::any_of(of.begin(), of.end(), [](auto& v) { return v.isTensor(); });
      if (!tensors) return value;
      c10::List<std::optional<at::Tensor>> list;
      for (const c10::IValue& v : of)
        list.push_back(v.isNone() ? std::nullopt : std::optional(change(v.toTensor())));
      return list;
    }
    return value;
  }
  c10::IValue ToHost(const c10::IValue& value) {
    if (value.isDevice() && value.toDevice().type() == kMadeUpDevice.type()) {
      made_here_ = true;
      return at::Device(at::kCPU);
    }
    return Changed(value, [this](const at::Tensor& t) { return HostOf(t); });
  }
  c10::IValue ToDevice(const c10::IValue& value) {
    if (tensors_.empty() && !made_here_) return value;
    return Changed(value, [this](const at::Tensor& t) { return DeviceOf(t); });
  }

  std::vector<Pair> tensors_;
  int host_tensors_ = 0;
  bool made_here_ = false;  // a factory function
};

TORCH_LIBRARY_IMPL(_, HPU, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&MadeUpDevice::Run>());
}
TORCH_LIBRARY_IMPL(aten, HPU, m) {
  for (const char* name : {MadeUpDevice::kConvolution, MadeUpDevice::kConvolutionBackward})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&MadeUpDevice::Run>());
}

}  // namespace cistern::testing

namespace at {  // where the macro looks for its registry
C10_REGISTER_CLASS(HPUHooksRegistry, HPUHooks, cistern::testing::MadeUpHooks)
}  // namespace at
