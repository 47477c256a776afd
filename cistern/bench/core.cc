#include "cistern/bench/core.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <malloc.h>
#include <torch/csrc/autograd/autograd.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "cistern/base/memory.h"
#include "cistern/base/parallel.h"
#include "cistern/kernels/isa.h"

namespace cistern::bench {

const EnumNames<Way>& Ways() {
  static const EnumNames<Way> names = {{Way::kCausal, "causal"},
                                       {Way::kBidirectional, "bidirectional"},
                                       {Way::kCross, "cross"},
                                       {Way::kDecode, "decode"}};
  return names;
}

Form FormOf(Way way) {
  if (way == Way::kBidirectional) return Form::kBidirectional;
  return way == Way::kCross ? Form::kCross : Form::kCausal;
}

const EnumNames<Pass>& Passes() {
  static const EnumNames<Pass> names = {{Pass::kForward, "forward"},
                                        {Pass::kBoth, "forward+backward"}};
  return names;
}

const EnumNames<Layout>& Layouts() {
  static const EnumNames<Layout> names = {{Layout::kHeadsFirst, "heads_first"},
                                          {Layout::kHeadsLast, "heads_last"}};
  return names;
}

const EnumNames<at::ScalarType>& Dtypes() {
  static const EnumNames<at::ScalarType> names = {
      {at::kFloat, "float32"}, {at::kDouble, "float64"}, {at::kBFloat16, "bfloat16"}};
  return names;
}

Json Case::What() const {
  return {{"mechanism", info->name},
          {"options", options},
          {"form", NameOf(way, Ways())},
          {"pass", NameOf(pass, Passes())},
          {"length", length},
          {"batch", batch},
          {"heads", heads},
          {"width", width},
          {"dtype", NameOf(dtype, Dtypes())},
          {"layout", NameOf(layout, Layouts())},
          {"implementation", ops::ImplName(implementation)},
          {"isa", isa},
          {"threads", threads}};
}

std::string Case::Contest() const {
  return StrCat(threads, " ", int(way), " ", int(pass), " ", length, " ", batch, " ", heads, " ",
                width, " ", int(layout));
}

Setting::Setting(const Case& c)
    : threads_(NumThreads()),
      torch_threads_(at::get_num_threads()),
      isa_(ActiveIsa()),
      implementation_(ops::ActiveImpl()) {
  at::set_num_threads(int(c.threads));
  SetNumThreads(int(c.threads));
  ForceIsa(c.isa);
  ops::SetImpl(c.implementation);
}

Setting::~Setting() {
  at::set_num_threads(torch_threads_);
  SetNumThreads(threads_);
  ForceIsa(isa_);
  ops::SetImpl(implementation_);
}

at::Tensor Inputs::Get(at::IntArrayRef sizes, at::ScalarType dtype, Layout layout, size_t number) {
  const std::string key = StrCat(sizes, " ", int(dtype), " ", int(layout), " ", number);
  for (const auto& [known, value] : made_) {
    if (known == key) return value;
  }
  at::Tensor x;
  if (layout == Layout::kHeadsFirst) {
    x = at::randn(sizes, at::kFloat).to(dtype);
  } else {
    x = at::randn({sizes[0], sizes[2], sizes[1], sizes[3]}, at::kFloat).to(dtype).transpose(1, 2);
  }
  made_.emplace_back(key, x);
  return x;
}

namespace {

constexpr int64_t kPiece = 1024;         // tokens of a prefill at once
constexpr int64_t kDecodeRepeats = 256;  // tokens of a sample at most
// A sample adds its tokens to the state. What grows may grow by a small share of the length.
constexpr int64_t kGrowthShare = 32;

// As verify::Subject::Has, with the reason.
void RequireWay(const verify::Subject& subject, Way way) {
  const MechanismInfo& info = subject.info();
  const Form form = FormOf(way);
  RequireForm(info, form);
  if (!info.verbs && form != Form::kBidirectional)
    FailUsage("[", info.name, "] has no ", FormName(form),
              " form: it takes whole sequences alone; use bidirectional");
  if (const std::string why = subject.mechanism().FormRefusal(form); !why.empty())
    FailUsage("[", info.name, "] has no ", why);
}

int64_t MaxLength(const Case& c) {
  return c.length + (c.way == Way::kDecode ? kDecodeRepeats + 1 : 0);
}

// What a run of this case needs at least, whatever the mechanism.
void RequireMemory(const Case& c) {
  const double numbers = 3.0 * double(c.batch) * double(c.heads) * double(c.width) *
                         double(c.way == Way::kDecode ? 2 * std::min(c.length, kPiece) : c.length);
  const double bytes =
      numbers * double(c10::elementSize(c.dtype)) * (c.pass == Pass::kBoth ? 4 : 2);
  const int64_t available = AvailableBytes();
  if (available > 0 && bytes > double(available))
    FailUsage("needs more than the ", available / 1'000'000,
              " MB that are free; lower the length, the batch or the width");
}

// As after some training: an initial memory of identical rows, such as the identity split into
// heads, weighs tokens exactly alike, and then which of them are among a slot's first ones is
// nobody's to say. Numbers that float holds.
void Disturb(Mechanism& m) {
  at::NoGradGuard guard;
  for (const at::Tensor& p : m.parameters())
    p.copy_((p + verify::Normal(p.sizes(), 0.02)).to(at::kFloat));
}

}  // namespace

Core::Core(const Case& c, Inputs& inputs, uint64_t seed)
    : case_(c), subject_(*c.info, c.options, seed, c.heads, MaxLength(c), c.width) {
  RequireWay(subject_, c.way);
  if (c.way == Way::kDecode && c.pass == Pass::kBoth)
    FailUsage("decoding has no backward pass; use the pass forward, or the form causal");
  RequireMemory(c);
  Disturb(subject_.In(at::kDouble));
  mechanism_ = &subject_.In(c.dtype);
  at::NoGradGuard guard;
  std::vector<std::pair<std::vector<int64_t>, size_t>> seen;
  const int64_t tokens = c.way == Way::kDecode ? 1 : c.length;
  for (const Projection& p : mechanism_->Projections()) {
    if (!p.OfTokens()) continue;
    const int64_t heads = p.heads > 0 ? p.heads : c.heads;
    const std::vector<int64_t> sizes = {c.batch, heads, tokens, p.width / heads};
    const auto same =
        std::count_if(seen.begin(), seen.end(), [&](const auto& s) { return s.first == sizes; });
    seen.emplace_back(sizes, size_t(same));
    x_.push_back(inputs.Get(sizes, c.dtype, c.layout, size_t(same)));
  }
  if (c.pass == Pass::kBoth)
    gradient_ = inputs.Get({c.batch, c.heads, c.length, c.width}, c.dtype, Layout::kHeadsFirst, 99);
}

at::Tensor Core::Forward() {
  if (case_.way != Way::kDecode) return verify::Whole(*mechanism_, FormOf(case_.way), x_, x_);
  return mechanism_->Extend(x_, state_, {});
}

verify::Tensors Core::Leaves() const {
  verify::Tensors leaves = verify::Leaves(x_);
  for (const at::Tensor& p : mechanism_->parameters()) {
    if (p.requires_grad()) leaves.push_back(p);
  }
  return leaves;
}

void Core::Once() {
  if (case_.pass == Pass::kForward) {
    at::NoGradGuard guard;
    Forward();
    return;
  }
  const verify::Tensors leaves = Leaves();
  const verify::Tensors x(leaves.begin(), leaves.begin() + int64_t(x_.size()));
  const at::Tensor y = verify::Whole(*mechanism_, FormOf(case_.way), x, x);
  torch::autograd::grad({y}, leaves, {gradient_}, false, false, true);
}

Contestant Core::Run() {
  Contestant c;
  const auto set = [this] {
    ForceIsa(case_.isa);
    ops::SetImpl(case_.implementation);
  };
  c.before = set;
  c.run = [this] { Once(); };
  if (case_.way != Way::kDecode) return c;
  c.most = case_.info->bounded
               ? kDecodeRepeats
               : std::clamp<int64_t>(case_.length / kGrowthShare, 1, kDecodeRepeats);
  c.before = [this, set] {
    set();
    at::NoGradGuard guard;
    const int64_t kept = case_.length - 1;
    if (kept_.tensors.empty()) {  // the first time
      kept_ = mechanism_->EmptyState(case_.batch, x_[0].options());
      for (int64_t done = 0; done < kept; done += kPiece) {
        verify::Tensors piece;
        for (const at::Tensor& x : x_)
          piece.push_back(
              at::randn({x.size(0), x.size(1), std::min(kPiece, kept - done), x.size(3)},
                        at::kFloat)
                  .to(case_.dtype));
        mechanism_->Extend(piece, kept_, {});
      }
      if (case_.info->truncates) state_ = kept_;
    }
    if (case_.info->truncates) {
      mechanism_->Truncate(state_, kept);
    } else {
      state_ = kept_.Clone();
    }
    // The last of the tokens before. Where decoding begins, the state takes another form
    // (ops/slot_decoding.h), and a cache moves to where it has room to grow.
    Forward();
  };
  return c;
}

int64_t Core::PeakBytesOfRun() {
  const Contestant c = Run();
  if (c.before) c.before();
  malloc_trim(0);
  ResetPeakMemory();
  const int64_t before = ResidentBytes();
  c.run();
  const int64_t peak = PeakBytes();
  return peak > 0 && before > 0 ? std::max<int64_t>(0, peak - before) : 0;
}

double Core::Operations() const {
  const auto* counts = dynamic_cast<const CountsOperations*>(mechanism_);
  if (counts == nullptr) return 0;
  const bool decode = case_.way == Way::kDecode;
  const LeastOperations one =
      counts->Operations(FormOf(case_.way), decode ? 1 : case_.length, decode ? case_.length : 0);
  return double(case_.batch) * (one.forward + (case_.pass == Pass::kBoth ? one.backward : 0));
}

double Core::Bytes() const {
  double numbers = double(case_.batch * case_.heads * case_.width) *
                   double(case_.way == Way::kDecode ? 1 : case_.length);
  for (const at::Tensor& x : x_) numbers += double(x.numel());
  const double bytes = numbers * double(c10::elementSize(case_.dtype));
  if (case_.pass == Pass::kBoth) return 2 * bytes;
  if (case_.way != Way::kDecode) return bytes;
  return bytes + double(StateBytes()) * (case_.info->bounded ? 2 : 1);
}

int64_t Core::StateBytes() const {
  if (!case_.info->verbs) return 0;
  return mechanism_->StateBytes(case_.batch, case_.length, x_[0].options(), true);
}

}  // namespace cistern::bench
