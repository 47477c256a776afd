// Decoding from C++: open a model folder, put a prompt into the state, draw the likeliest tokens one by one.
//   cistern_example_decode MODEL_FOLDER [PROMPT [TOKENS]]
#include <ATen/ATen.h>

#include <cstdio>
#include <cstdlib>
#include <iostream>

#include "cistern/base/error.h"
#include "cistern/decode/lm_folder.h"

namespace {

// [begin decode]
// Writes `count` tokens after `prompt`, greedily. The state is all the model remembers: how large it is does not depend on the length of
// the text (softmax attention excepted).
void Decode(const std::string& folder, const std::string& prompt, int64_t count) {
  const cistern::LmFolder lm = cistern::OpenLmFolder(folder);
  at::NoGradGuard no_grad;

  // Prefill: any number of tokens per extend, here all at once. A long prompt goes in piece by piece, with the same result.
  const std::vector<int32_t> ids = lm.tokenizer->Encode(prompt);
  cistern::ModelState state = lm.model->EmptyState(/*batch=*/1);
  at::Tensor logits = lm.model->Extend(at::tensor(ids, at::kLong).unsqueeze(0), state);  // [1,T,V]
  const int64_t state_bytes = state.Bytes();

  // Decode: extend by one token. Utf8Stream holds back the bytes of a character until it is whole.
  cistern::Utf8Stream characters;
  for (int64_t i = 0; i < count; ++i) {
    const at::Tensor next = logits.select(1, logits.size(1) - 1).argmax(-1, /*keepdim=*/true);  // [1,1]
    std::cout << characters.Push(lm.tokenizer->Bytes(int32_t(next.item<int64_t>()))) << std::flush;
    logits = lm.model->Extend(next, state);
  }
  std::cout << characters.Finish() << "\n";
  std::fprintf(stderr, "state: %lld bytes after the prompt, %lld after %lld more tokens\n", static_cast<long long>(state_bytes),
               static_cast<long long>(state.Bytes()), static_cast<long long>(count));
}
// [end decode]

}  // namespace

int main(int argc, char** argv) {
  if (argc < 2 || argc > 4) {
    std::fprintf(stderr, "usage: %s MODEL_FOLDER [PROMPT [TOKENS]]\n", argv[0]);
    return 2;
  }
  try {
    Decode(argv[1], argc > 2 ? argv[2] : "\n", argc > 3 ? std::atoll(argv[3]) : 100);
  } catch (const cistern::Error& e) {
    std::fprintf(stderr, "error: %s\n", e.what());
    return 1;
  }
}
