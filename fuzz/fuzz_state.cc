// Saved states of a text. The input says how a good file is changed (tensors left out, renamed,
// with another type, size or value; metadata); the checksum is that of what comes out. What is read
// can be gone on with, and saved and read again as it is.
#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>

#include "cistern/base/progress.h"
#include "cistern/decode/text_state.h"
#include "cistern/models/model_state_file.h"
#include "fuzz/fuzz_input.h"

namespace cistern {
namespace {

struct Whole {
  Whole() {
    SetQuiet(true);
    at::manual_seed(1);
    config.kind = "decoder_lm";
    config.vocab_size = 256, config.dim = 8, config.heads = 2, config.max_length = 64;
    config.attention = {"latte", "softmax", "abc_mlp", "window", "abc_compressive", "gated_slots"};
    config.layers = int64_t(config.attention.size());
    config.positions = PositionKind::kLearned, config.conv = 3;
    model = std::dynamic_pointer_cast<LanguageModel>(MakeModel(config, 1));
    model->eval();
    const char* folder = std::getenv("TMPDIR");
    path =
        std::string(folder ? folder : "/tmp") + "/cistern-fuzz-state-" + std::to_string(getpid());
    TextState text = EmptyTextState(*model, 2);
    const at::Tensor ids = at::randint(0, 256, {2, 9}, at::kLong);
    model->Hidden(ids.narrow(1, 0, 8), text.model);
    // One token alone: the state of slots is that of decoding (ops/slot_decoding.h).
    text.hidden = model->Hidden(ids.narrow(1, 8, 1), text.model);
    for (TokenHistory& h : text.history) {
      for (const int32_t token : {7, 0, 255}) h.Push(token);
    }
    SaveTextState(path, *model, *tokenizer, text);
    good = LoadTensors(path);
  }
  ~Whole() { unlink(path.c_str()); }

  const at::NoGradGuard guard;
  ModelConfig config;
  std::shared_ptr<LanguageModel> model;
  const std::unique_ptr<Tokenizer> tokenizer = MakeByteTokenizer();
  std::string path;
  TensorFile good;
};

struct Input {
  std::string_view left;
  size_t Below(size_t n) {
    if (left.empty()) return 0;
    const size_t byte = static_cast<unsigned char>(left[0]);
    left.remove_prefix(1);
    return byte % n;
  }
};

at::Tensor Changed(const at::Tensor& x, Input& input) {
  const int64_t dim = x.dim() > 0 ? int64_t(input.Below(size_t(x.dim()))) : 0;
  switch (input.Below(6)) {
    case 0:
      return x.dim() > 0 ? x.narrow(dim, 0, x.size(dim) / 2) : x;
    case 1:
      return x.dim() > 0 ? at::cat({x, x}, dim) : x;
    case 2: {
      const at::ScalarType types[] = {at::kFloat, at::kDouble, at::kLong,    at::kInt,
                                      at::kBool,  at::kHalf,   at::kBFloat16};
      return x.to(types[input.Below(7)]);
    }
    case 3:
      return x.unsqueeze(dim);
    case 4:
      return x.dim() > 0 && x.size(dim) > 0 ? x.select(dim, 0) : x;
    default: {  // one number
      at::Tensor y = x.clone();
      if (y.numel() == 0) return y;
      const int64_t at = int64_t(input.Below(256)) % y.numel();
      const double values[] = {0,    1,   -1,      64, 255, 256, 2147483647, 4611686018427387904.0,
                               1e30, NAN, INFINITY};
      const double value = values[input.Below(at::isFloatingType(y.scalar_type()) ? 11 : 8)];
      const at::Tensor number = at::scalar_tensor(
          y.scalar_type() == at::kInt ? std::min(value, 2147483647.0) : value, at::kDouble);
      y.view({-1})[at].copy_(number);  // not fill_, which refuses what overflows half precision
      return y;
    }
  }
}

void Change(TensorFile& file, Input& input) {
  const size_t at = input.Below(file.tensors.size());
  NamedTensor& tensor = file.tensors[at];
  const char* names[] = {"", "layers.0", "layers.99.memory", "text.more", "positions"};
  const char* values[] = {"", "0", "1", "2", "3", "-1", "99999999999999999999", "latte"};
  switch (input.Below(8)) {
    case 0:
      if (file.tensors.size() > 1) file.tensors.erase(file.tensors.begin() + int64_t(at));
      return;
    case 1: {
      const std::string name = names[input.Below(5)];
      const bool taken = std::any_of(file.tensors.begin(), file.tensors.end(),
                                     [&](const NamedTensor& t) { return t.name == name; });
      if (!taken) tensor.name = name;
      return;
    }
    case 2:
      file.metadata[input.Below(file.metadata.size())].second = values[input.Below(8)];
      return;
    default:
      tensor.value = Changed(tensor.value, input).contiguous();
  }
}

void Run(std::string_view bytes) {
  static Whole whole;
  const at::NoGradGuard guard;
  Input input{bytes};
  TensorFile file = whole.good;
  for (int i = 0; i < 8 && !input.left.empty(); ++i) Change(file, input);
  const std::string sum = ModelStateChecksum(file);
  for (auto& [key, value] : file.metadata) {
    if (key == "checksum") value = sum;
  }
  SaveTensors(whole.path, file);
  TextState text = LoadTextState(whole.path, *whole.model, *whole.tokenizer);
  SaveTextState(whole.path, *whole.model, *whole.tokenizer, text);
  const TextState again = LoadTextState(whole.path, *whole.model, *whole.tokenizer);
  if (again.drawn != text.drawn || !at::equal(again.model.positions, text.model.positions))
    __builtin_trap();
  // Sizes within a state that decodes are its operation's to refuse.
  try {
    whole.model->Hidden(at::zeros({text.rows(), 3}, at::kLong), text.model);
  } catch (const c10::Error& e) {
    if (!std::string_view(e.what_without_backtrace()).starts_with("[")) throw;
  }
}

}  // namespace
}  // namespace cistern

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  return cistern::FuzzOne(data, size, cistern::Run);
}
