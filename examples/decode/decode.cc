// Decoding from C++: open a model folder, read a prompt into the state, generate the most likely
// tokens one by one.
//   cistern_example_decode MODEL_FOLDER [PROMPT [TOKENS [STATE_FILE]]]
// With STATE_FILE the prompt is read once, saved to that file, and continued several times.
#include <ATen/ATen.h>

#include <cstdio>
#include <cstdlib>
#include <iostream>

#include "cistern/base/error.h"
#include "cistern/decode/generate.h"
#include "cistern/decode/lm_folder.h"

namespace {

// [begin decode]
// Generates `count` tokens after `prompt`, greedily. The state is all that the model remembers; its
// size does not depend on the length of the text (except with softmax attention).
void Decode(const std::string& folder, const std::string& prompt, int64_t count) {
  const cistern::LmFolder lm = cistern::OpenLmFolder(folder);
  at::NoGradGuard no_grad;

  // Prefill: any number of tokens per extend, here all at once. Passing a long prompt piece by
  // piece gives the same result.
  const std::vector<int32_t> ids = lm.tokenizer->Encode(prompt);
  cistern::ModelState state = lm.model->EmptyState(/*batch=*/1);
  at::Tensor logits = lm.model->Extend(at::tensor(ids, at::kLong).unsqueeze(0), state);  // [1,T,V]
  const int64_t state_bytes = state.Bytes();

  // Decode: extend by one token. Utf8Stream holds back the bytes of an incomplete character.
  cistern::Utf8Stream characters;
  for (int64_t i = 0; i < count; ++i) {
    const at::Tensor next =
        logits.select(1, logits.size(1) - 1).argmax(-1, /*keepdim=*/true);  // [1,1]
    std::cout << characters.Push(lm.tokenizer->Bytes(int32_t(next.item<int64_t>()))) << std::flush;
    logits = lm.model->Extend(next, state);
  }
  std::cout << characters.Finish() << "\n";
  std::fprintf(stderr, "state: %lld bytes after the prompt, %lld after %lld more tokens\n",
               static_cast<long long>(state_bytes), static_cast<long long>(state.Bytes()),
               static_cast<long long>(count));
}
// [end decode]

// [begin text]
// Reads `prompt` once, saves the state to a file, and continues from it any number of times, in the
// same program or in another one.
void ReadOnceUseOften(const std::string& folder, const std::string& prompt, int64_t count,
                      const std::string& file) {
  const cistern::LmFolder lm = cistern::OpenLmFolder(folder);
  cistern::Generator generator(lm.model, lm.tokenizer);
  cistern::GenerateOptions options;
  options.max_tokens = 0;
  cistern::TextState read = generator.Empty();
  generator.Continue(read, {cistern::StringSource(prompt)},
                     options);  // FileSource("book.txt") reads piece by piece
  cistern::SaveTextState(file, *lm.model, *lm.tokenizer, read);

  options.max_tokens = count;
  const cistern::TextState loaded = cistern::LoadTextState(file, *lm.model, *lm.tokenizer);
  // A batch of prompts, each continuing the text that was read; `loaded` does not change.
  for (const auto& g : generator.Run({cistern::StringSource(" And"), cistern::StringSource(" But")},
                                     options, {}, nullptr, &loaded)) {
    std::cout << "[" << g.text << "]\n";
  }
  // A text that keeps growing; the clone is the checkpoint.
  cistern::TextState text = loaded.Clone();
  for (const char* line : {" And", " But"})
    std::cout << generator.Continue(text, {cistern::StringSource(line)}, options)[0].text << "\n";
}
// [end text]

}  // namespace

int main(int argc, char** argv) {
  if (argc < 2 || argc > 5) {
    std::fprintf(stderr, "usage: %s MODEL_FOLDER [PROMPT [TOKENS [STATE_FILE]]]\n", argv[0]);
    return 2;
  }
  try {
    const std::string prompt = argc > 2 ? argv[2] : "\n";
    const int64_t count = argc > 3 ? std::atoll(argv[3]) : 100;
    if (argc > 4) {
      ReadOnceUseOften(argv[1], prompt, count, argv[4]);
    } else {
      Decode(argv[1], prompt, count);
    }
  } catch (const cistern::Error& e) {
    std::fprintf(stderr, "error: %s\n", e.what());
    return 1;
  }
}
