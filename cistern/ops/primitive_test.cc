// The scaffold below Autograd: a tensor's own device is served by the kernels that are registered
// for it. A device is made up here, whose kernels count their calls and know shapes alone.
#include "cistern/ops/primitive.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/impl/FakeGuardImpl.h>

#include <map>

#include "cistern/ops/short_conv.h"
#include "cistern/ops/slot_attention.h"
#include "cistern/ops/sum_memory.h"
#include "cistern/ops/testing.h"

namespace c10::impl {
C10_REGISTER_GUARD_IMPL(PrivateUse1, FakeGuardImpl<DeviceType::PrivateUse1>)
}  // namespace c10::impl

namespace cistern::ops {
namespace {

using namespace cistern::testing;

std::map<std::string, int>& Calls() {
  static std::map<std::string, int> calls;
  return calls;
}

at::Tensor OnDevice(const at::Tensor& x) {
  auto impl =
      c10::make_intrusive<c10::TensorImpl>(c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                           x.dtype(), c10::Device(c10::DeviceType::PrivateUse1, 0));
  impl->set_sizes_and_strides(x.sizes(), x.strides());
  return at::Tensor(std::move(impl));
}
at::Tensor ShapeOf(const at::Tensor& x) {
  return x.defined() ? at::empty_strided(x.sizes(), x.strides(), x.options().device(at::kMeta)) : x;
}

template <class Change>
c10::IValue Changed(const c10::IValue& value, Change&& change) {
  if (value.isTensor()) return change(value.toTensor());
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& t : value.toTensorVector()) list.push_back(change(t));
    return list;
  }
  if (value.isList()) {  // Tensor?[]
    c10::List<OptionalTensor> list;
    for (const c10::IValue& v : value.toListRef())
      list.push_back(v.isNone() ? std::nullopt : OptionalTensor(change(v.toTensor())));
    return list;
  }
  return value;
}

// Every op of the made-up device: the shapes that the op has for meta tensors.
void Count(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  ++Calls()[op.operator_name().name];
  for (c10::IValue& value : *stack) value = Changed(value, &ShapeOf);
  op.callBoxed(stack);
  for (c10::IValue& value : *stack) value = Changed(value, &OnDevice);
}

constexpr const char* kOps[] = {"slot_read", "slot_match", "sum_read", "sum_match",
                                "latte",     "favor",      "abc",      "short_conv"};

TORCH_LIBRARY_IMPL(cistern, PrivateUse1, m) {
  for (const std::string name : kOps) {
    m.impl(name.c_str(), torch::CppFunction::makeFromBoxedFunction<&Count>());
    m.impl((name + "_backward").c_str(), torch::CppFunction::makeFromBoxedFunction<&Count>());
  }
}

// An op on inputs of its own, as fields in declared order; the state in double.
struct Problem {
  std::string name;
  Tensors x;
  std::function<at::Tensor(const Tensors&)> run;
};

std::vector<Problem> Problems() {
  const int64_t B = 2, H = 3, T = 9, n = 4, d = 5;
  const auto tokens = [&](int64_t width) { return Normal({B, H, T, width}); };
  const at::Tensor memory = Normal({B, H, n, d}), z = Normal({B, H, n});
  const Mask none;
  return {{"slot_read",
           {tokens(n), tokens(n), tokens(d), memory, z},
           [=](const Tensors& x) {
             return SlotRead(x[0], x[1], x[2], {x[3], x[4]}, none, true).out;
           }},
          {"slot_match",
           {tokens(d), tokens(n), tokens(d), memory, z},
           [=](const Tensors& x) {
             return SlotMatch(x[0], x[1], x[2], {x[3], x[4]}).out;
           }},
          {"sum_read",
           {tokens(n), tokens(n), tokens(d), memory},
           [=](const Tensors& x) { return SumRead(x[0], x[1], x[2], x[3]).out; }},
          {"sum_match",
           {tokens(d), tokens(n), tokens(d), memory, -tokens(n).abs()},
           [=](const Tensors& x) { return SumMatch(x[0], x[1], x[2], x[3], none, x[4]).out; }},
          {"latte",
           {tokens(n), tokens(n), tokens(d), memory, z},
           [=](const Tensors& x) {
             return LatteAttention(x[0], x[1], x[2], {x[3], x[4]}).out;
           }},
          {"favor",
           {tokens(n), tokens(n), tokens(d), memory, z},
           [=](const Tensors& x) {
             return FavorAttention(x[0], x[1], x[2], {x[3], x[4]}).out;
           }},
          {"abc",
           {tokens(d), tokens(d), tokens(d), tokens(n), memory, memory, z},
           [=](const Tensors& x) {
             return AbcAttention(x[0], x[1], x[2], x[3], {x[4], x[5], x[6]}, 0.5).out;
           }},
          {"short_conv",
           {Normal({B, T, d}), Normal({d, 3}), Normal({B, 2, d})},
           [=](const Tensors& x) { return std::get<0>(ShortConv(x[0], x[1], x[2])); }}};
}

TEST(Primitive, AutogradSendsOnToTheKernelsOfTheDevice) {
  for (const Problem& p : Problems()) {
    Calls().clear();
    Tensors x;
    for (const at::Tensor& t : p.x) x.push_back(OnDevice(t));
    const at::Tensor out = p.run(x);
    EXPECT_EQ(out.device().type(), c10::DeviceType::PrivateUse1) << p.name;
    EXPECT_EQ(out.sizes(), p.run(p.x).sizes()) << p.name;
    EXPECT_EQ(Calls(), (std::map<std::string, int>{{"cistern::" + p.name, 1}}));

    for (at::Tensor& t : x) t.requires_grad_();
    const at::Tensor y = p.run(x);
    EXPECT_TRUE(y.requires_grad()) << p.name;
    // By hand: the engine would ask the made-up device for streams.
    at::NoGradGuard guard;
    torch::autograd::variable_list grads(y.grad_fn()->num_inputs());
    grads[y.output_nr()] = OnDevice(ShapeOf(y));
    const torch::autograd::variable_list g = (*y.grad_fn())(std::move(grads));
    EXPECT_EQ(Calls(), (std::map<std::string, int>{{"cistern::" + p.name, 2},
                                                   {"cistern::" + p.name + "_backward", 1}}));
    for (size_t i = 0; i < x.size(); ++i) EXPECT_EQ(g[i].sizes(), x[i].sizes()) << p.name;
  }
}

TEST(Primitive, OtherImplementationsPassTheKernelsOfTheDeviceBy) {
  for (const Impl impl : {Impl::kComposite, Impl::kReference}) {
    ImplScope scope(impl);
    for (const Problem& p : Problems()) {
      Calls().clear();
      Tensors x;
      for (const at::Tensor& t : p.x) x.push_back(OnDevice(t));
      // The made-up device has no other ops: the composite fails at its first.
      ExpectContains(Thrown([&] { p.run(x); }), {"aten::", "PrivateUse1"});
      EXPECT_TRUE(Calls().empty()) << p.name;
    }
  }
}

// No kernel for bfloat16: the composite and its gradient.
TEST(Primitive, WithoutAKernelTheCompositeIsDifferentiated) {
  for (const Problem& p : Problems()) {
    const auto run = [&](at::ScalarType type) {
      Tensors x;
      for (const at::Tensor& t : p.x) {
        const bool state = p.name != "short_conv" && (t.dim() == 3 || t.size(2) == 4);
        x.push_back(Leaf(state ? t : t.to(type)));
      }
      const at::Tensor y = p.run(x);
      EXPECT_EQ(y.scalar_type(), type);
      Tensors all = Gradients(y.square().sum(), x);
      all.push_back(y);
      return all;
    };
    const Tensors want = run(at::kDouble), got = run(at::kBFloat16);
    for (size_t i = 0; i < want.size(); ++i) ExpectClose(got[i], want[i], 0.1, p.name);
  }
}

TEST(Primitive, MasksOfSingleTokensAreNotForOps) {
  for (const Impl impl : kImpls) {
    ImplScope scope(impl);
    Mask mask;
    mask.valid = at::ones({2, 9}, at::kBool);
    const Tensors x = Problems()[0].x;
    ExpectContains(Thrown([&] {
                     SlotRead(x[0], x[1], x[2], {x[3], x[4]}, mask);
                   }),
                   {"[slot_read]", "lengths and starts", "ToFront"});
  }
}

}  // namespace
}  // namespace cistern::ops
