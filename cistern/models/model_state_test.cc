// States of whole models: sizes, cutting back, and files that continue to the bit.
#include <fcntl.h>

#include <algorithm>
#include <filesystem>

#include "cistern/attention/testing_mechanisms.h"
#include "cistern/base/error.h"
#include "cistern/io/atomic_file.h"
#include "cistern/io/test_folder.h"
#include "cistern/models/decoder_lm.h"
#include "cistern/models/model_state_file.h"
#include "cistern/tensors/testing_device.h"

namespace cistern {
namespace {

using namespace cistern::testing;

ModelConfig Config(std::vector<std::string> attention) {
  ModelConfig c;
  c.vocab_size = 23, c.dim = 12, c.heads = 2, c.max_length = 256;
  c.layers = int64_t(attention.size());
  c.attention = std::move(attention);
  for (const MechanismInfo* info : Mechanisms()) c.attention_options[info->name] = info->cases[0];
  c.init_std = 0.5;
  return c;
}

// Two layers of every mechanism that decodes, and all of them in one model, with and without a
// convolution.
std::vector<ModelConfig> Configs() {
  std::vector<ModelConfig> all;
  std::vector<std::string> names;
  for (const MechanismInfo* info : Mechanisms()) {
    if (!info->verbs || !info->Supports(Form::kCausal)) continue;
    all.push_back(Config({info->name, info->name}));
    names.push_back(info->name);
  }
  all.push_back(Config(names));
  all.push_back(Config(names));
  all.back().conv = 3;
  all.push_back(Config({"softmax:1+latte:1", "softmax:1+softmax:1"}));  // groups of heads
  all.back().attention_options["latte"] = {{"latents", 3}};
  return all;
}

std::shared_ptr<DecoderLm> Make(const ModelConfig& config, at::ScalarType dtype = at::kFloat,
                                uint64_t seed = 1) {
  auto model = std::dynamic_pointer_cast<DecoderLm>(MakeModel(config, seed));
  model->to(dtype);
  model->eval();
  return model;
}

at::Tensor Ids(int64_t batch, int64_t length) {
  return at::randint(0, 23, {batch, length}, at::kLong);
}

void ExpectSame(const ModelState& got, const ModelState& want, const std::string& what) {
  ASSERT_EQ(got.layers.size(), want.layers.size()) << what;
  ExpectSameBits(got.positions, want.positions, what);
  for (size_t i = 0; i < want.layers.size(); ++i) {
    for (const NamedTensor& t : want.layers[i].tensors) {
      const at::Tensor& other = got.layers[i][t.name];
      ASSERT_EQ(other.defined(), t.value.defined()) << what << " " << t.name;
      if (t.value.defined()) ExpectSameBits(other, t.value, what + " " + t.name);
    }
  }
}

// A row that is shorter than the others of its piece needs no positions beyond its own tokens.
TEST(ModelState, PaddingNeedsNoLearnedPositions) {
  at::NoGradGuard guard;
  ModelConfig config = Config({"latte", "softmax"});
  config.positions = PositionKind::kLearned, config.max_length = 16;
  const auto m = Make(config, at::kDouble);
  const auto lengths = [](int64_t a, int64_t b) { return at::tensor({a, b}, at::kLong); };
  const at::Tensor first = Ids(2, 14), second = Ids(2, 10);
  ModelState state = m->EmptyState(2);
  m->Extend(first, state, {lengths(14, 1), {}});
  const at::Tensor y = m->Extend(second, state, {lengths(2, 10), {}});
  EXPECT_TRUE(at::equal(state.positions, lengths(16, 11)));
  const at::Tensor one =
                       at::cat({first.narrow(0, 0, 1), second.narrow(0, 0, 1).narrow(1, 0, 2)}, 1),
                   other =
                       at::cat({first.narrow(0, 1, 1).narrow(1, 0, 1), second.narrow(0, 1, 1)}, 1);
  ModelState alone = m->EmptyState(1), beside = m->EmptyState(1);
  ExpectClose(y.narrow(0, 0, 1).narrow(1, 0, 2), m->Extend(one, alone).narrow(1, 14, 2), 1e-12, "");
  ExpectClose(y.narrow(0, 1, 1), m->Extend(other, beside).narrow(1, 1, 10), 1e-12, "");
  m->Extend(Ids(2, 1), state, {lengths(0, 1), {}});  // the first row is full
  EXPECT_TRUE(at::equal(state.positions, lengths(16, 12)));
}

TEST(ModelState, BytesAreKnownBeforeARun) {
  at::NoGradGuard guard;
  for (const ModelConfig& config : Configs()) {
    const auto m = Make(config);
    for (const int64_t tokens : {0, 1, 70}) {
      ModelState state = m->EmptyState(2);
      m->Extend(Ids(2, tokens / 2), state);
      m->Extend(Ids(2, tokens - tokens / 2), state);
      // A state that decodes floats has a form of its own, which the second piece is too long for.
      const int64_t bytes = m->Compact(state).Bytes(), foretold = m->StateBytes(2, tokens);
      EXPECT_LE(bytes, foretold) << config.Summary() << ", " << tokens << " tokens";
      for (int64_t i = 0; i < 2; ++i) m->Extend(Ids(2, 1), state);
      EXPECT_EQ(m->Compact(state).Bytes(), m->StateBytes(2, tokens + 2))
          << config.Summary() << ", " << tokens << " tokens and one by one";
    }
  }
  const auto latte = Make(Config({"latte", "latte"})), softmax = Make(Config({"softmax"}));
  EXPECT_EQ(latte->StateBytes(1, 0), latte->StateBytes(1, 1'000'000'000));
  EXPECT_EQ(softmax->StateBytes(3, 1'000'000), 3 * (8 + 8 + 1'000'000 * 2 * 12 * 4));
}

TEST(ModelState, AFileGoesOnToTheBit) {
  at::NoGradGuard guard;
  const TestFolder folder;
  const std::string path = folder / "a.state";
  for (const ModelConfig& config : Configs()) {
    for (const auto dtype : {at::kFloat, at::kDouble}) {
      const auto m = Make(config, dtype);
      at::manual_seed(3);
      const ops::Mask masks[] = {
          {}, {Lengths({11, 4, 0}), {}}, {{}, Starts(3, 11, {{0, 0}, {0, 7}, {2, 3}})}};
      for (const ops::Mask& mask : masks) {
        ModelState state = m->EmptyState(3);
        m->Extend(Ids(3, 11), state, mask);
        for (int i = 0; i < 3; ++i) m->Extend(Ids(3, 1), state);  // caches have room to spare now
        const at::Tensor extra = Normal({3, 2});
        SaveModelState(path, *m, {state, {{"mine", extra}}, {{"tokenizer", "17"}}});
        ModelStateFile loaded = LoadModelState(path, *m, {{"tokenizer", "17"}});
        ExpectSame(loaded.state, m->Compact(state), config.Summary());
        ASSERT_EQ(loaded.extra.size(), 1u);
        ExpectSameBits(loaded.extra[0].value, extra, "extra");
        for (const int64_t length : {5, 1, 1, 70, 1}) {
          const at::Tensor ids = Ids(3, length);
          ExpectSameBits(m->Extend(ids, loaded.state), m->Extend(ids, state), config.Summary());
        }
        ExpectSame(m->Compact(loaded.state), m->Compact(state), config.Summary() + " at the end");
      }
    }
  }
  // What was saved without spare room is small: 14 tokens of softmax and not 28 or 64.
  const auto m = Make(Config({"softmax", "softmax"}));
  ModelState state = m->EmptyState(1);
  for (int i = 0; i < 14; ++i) m->Extend(Ids(1, 1), state);
  SaveModelState(path, *m, {state, {}, {}});
  EXPECT_LT(int64_t(std::filesystem::file_size(path)), m->StateBytes(1, 14) + 1500);
}

// Writes are put off on the CPU alone (Settled), and so the form of the state is another there.
TEST(ModelState, AFileOfTheCpuGoesOnOnAnotherDevice) {
  at::NoGradGuard guard;
  const TestFolder folder;
  const std::string path = folder / "a.state";
  const std::vector<std::vector<std::string>> all = {{"latte", "softmax"},
                                                     {"abc_mlp", "gated_slots"},
                                                     {"linear", "performer"},
                                                     {"softmax:1+latte:1", "latte"}};
  for (const auto& attention : all) {
    ModelConfig config = Config(attention);
    config.conv = 3;
    config.attention_options["latte"] = {{"latents", 4}};
    const auto here = Make(config), there = Make(config);
    there->to(kMadeUpDevice);
    at::manual_seed(3);
    ModelState state = here->EmptyState(2);
    for (int i = 0; i < 5; ++i) here->Extend(Ids(2, 1), state);
    SaveModelState(path, *here, {state, {}, {}});
    ModelState loaded = LoadModelState(path, *there).state;
    for (const int64_t length : {1, 1, 7}) {
      const at::Tensor ids = Ids(2, length);
      ExpectClose(there->Extend(ids.to(kMadeUpDevice), loaded).cpu(), here->Extend(ids, state),
                  1e-4, config.Summary());
    }
  }
}

TEST(ModelState, ItIsCutBackWhereEveryLayerCan) {
  at::NoGradGuard guard;
  ModelConfig config = Config({"softmax", "softmax"});
  config.positions = PositionKind::kRotary;
  const auto m = Make(config, at::kDouble);
  const at::Tensor ids = Ids(2, 12), next = Ids(2, 4);
  ModelState state = m->EmptyState(2), want = m->EmptyState(2);
  m->Extend(ids, state);
  const ModelState kept = state.Clone();
  m->Truncate(state, 5);
  m->Extend(ids.narrow(1, 0, 5), want);
  EXPECT_EQ(m->Compact(state).Bytes(), m->StateBytes(2, 5));
  ExpectClose(m->Extend(next, state), m->Extend(next, want), 1e-12, "cut back");
  EXPECT_TRUE(at::equal(state.positions, want.positions));
  ModelState back = kept;  // what was kept did not change
  ModelState whole = m->EmptyState(2);
  m->Extend(ids, whole);
  ExpectClose(m->Extend(next, back), m->Extend(next, whole), 1e-12, "rolled back");

  ExpectContains(Thrown([&] { m->Truncate(state, 10); }), {"9 tokens", "10"});
  ExpectContains(Thrown([&] { m->Truncate(state, -1); }), {"9 tokens", "-1"});
  for (const ops::Mask& mask : {ops::Mask{Lengths({12, 7}), {}}, ops::Mask{Lengths({7, 7}), {}},
                                ops::Mask{{}, Starts(2, 12, {{0, 3}, {1, 3}})}}) {
    ModelState uneven = m->EmptyState(2);
    m->Extend(ids, uneven, mask);
    ExpectContains(Thrown([&] { m->Truncate(uneven, 2); }), {"padded or packed", "Clone"});
  }
  const auto mixed = Make(Config({"softmax", "latte"}));
  ModelState fixed = mixed->EmptyState(1);
  mixed->Extend(Ids(1, 6), fixed);
  const ModelState before = fixed.Clone();
  ExpectContains(Thrown([&] { mixed->Truncate(fixed, 3); }),
                 {"layer 1", "latte", "single tokens", "Clone"});
  ExpectSame(fixed, before, "a refusal changes nothing");
  config.conv = 3;
  const auto convolved = Make(config);
  ModelState last = convolved->EmptyState(1);
  convolved->Extend(Ids(1, 6), last);
  ExpectContains(Thrown([&] { convolved->Truncate(last, 3); }), {"layer 0", "conv=3"});
}

TEST(ModelState, ATokenBeyondTheLastPositionChangesNothing) {
  at::NoGradGuard guard;
  for (const auto& attention :
       std::vector<std::vector<std::string>>{{"latte", "linformer"},
                                             {"softmax", "linformer"},
                                             {"softmax", "softmax:1+linformer:1"}}) {
    ModelConfig config = Config(attention);
    config.max_length = 16, config.conv = 3;
    config.attention_options["latte"] = {{"latents", 4}};
    const auto m = Make(config, at::kDouble);
    const at::Tensor ids = Ids(2, 19);
    ModelState state = m->EmptyState(2);
    m->Extend(ids.narrow(1, 0, 10), state);
    const ModelState before = state.Clone();
    ExpectContains(ErrorMessage([&] { m->Extend(ids.narrow(1, 10, 9), state); }),
                   {"linformer", "] position 18 is beyond max_length=16"});
    ExpectSame(state, before, config.Summary());
    m->Extend(ids.narrow(1, 10, 9), state, {Lengths({6, 2}), {}});  // padding may lie beyond
  }
}

TEST(ModelState, MasksAndRowsOfOthersAreNamed) {
  at::NoGradGuard guard;
  const auto m = Make(Config({"latte"}));
  ModelState state = m->EmptyState(2);
  ExpectContains(ErrorMessage([&] {
                   m->Extend(Ids(2, 8), state, {Lengths({3, 9}), {}});
                 }),
                 {"[decoder_lm] lengths[1] = 9", "0..T = 8"});
  ExpectContains(ErrorMessage([&] {
                   state.Reorder(at::tensor({0, 2}, at::kLong));
                 }),
                 {"row 2", "state's 2"});
}

TEST(ModelState, PiecesOfOtherRowsAreRefused) {
  at::NoGradGuard guard;
  for (const PositionKind positions : {PositionKind::kLearned, PositionKind::kNone}) {
    for (const char* name : {"softmax", "latte", "window"}) {
      ModelConfig config = Config({name});
      config.positions = positions;
      const auto m = Make(config);
      const auto error = [&](int64_t rows, const at::Tensor& ids, const ops::Mask& mask) {
        ModelState state = m->EmptyState(rows);
        return Thrown([&] { m->Extend(ids, state, mask); });
      };
      EXPECT_EQ(error(3, Ids(3, 4), {}), "no error") << name;
      ExpectContains(error(3, Ids(1, 4), {}), {"state has 3 rows, the tokens have 1"});
      ExpectContains(error(1, Ids(3, 4), {}), {"state has 1 rows, the tokens have 3"});
      const at::Tensor narrow = at::ones({3, 3}, at::kBool), one = at::ones({1, 4}, at::kBool);
      ExpectContains(error(3, Ids(3, 4), {{}, {}, narrow}), {"valid of shape", "[3, 3]"});
      ExpectContains(error(3, Ids(3, 4), {{}, one}), {"starts of shape", "[1, 4]"});
      ExpectContains(error(3, Ids(3, 4), {Lengths({4, 4, 5}), {}}), {"lengths[2] = 5"});
    }
  }
}

TEST(ModelStateFile, KeysOfTheStatesOwnAreRefused) {
  at::NoGradGuard guard;
  const TestFolder folder;
  const auto m = Make(Config({"latte"}));
  for (const char* key : {"model", "batch", "checksum"}) {
    ExpectContains(ErrorMessage([&] {
                     SaveModelState(folder / "a.state", *m, {m->EmptyState(1), {}, {{key, "x"}}});
                   }),
                   {StrCat("'", key, "' is a key of the state's own")});
  }
  EXPECT_FALSE(std::filesystem::exists(folder / "a.state"));
}

TEST(ModelStateFile, BrokenFilesAndOtherModelsAreNamed) {
  at::NoGradGuard guard;
  const TestFolder folder;
  const std::string path = folder / "a.state";
  const auto m = Make(Config({"latte", "softmax"}));
  ModelState state = m->EmptyState(2);
  m->Extend(Ids(2, 9), state, {Lengths({9, 4}), {}});
  const auto save = [&] { SaveModelState(path, *m, {state, {}, {{"tokenizer", "17"}}}); };
  const auto load = [&](const DecoderLm& model) {
    return LoadModelState(path, model, {{"tokenizer", "17"}});
  };
  const auto error = [&](const DecoderLm& model) { return ErrorMessage([&] { load(model); }); };
  const auto usage = [&](const DecoderLm& model) -> std::string {
    try {
      load(model);
    } catch (const UsageError& e) {
      return e.what();
    } catch (const Error& e) {
      return StrCat("an Error and no UsageError: ", e.what());
    }
    return "no error";
  };
  save();
  EXPECT_EQ(error(*m), "no error");
  const std::string whole = ReadFile(path);

  // Any bit of the file.
  for (size_t at = 0; at < whole.size(); at += 1 + whole.size() / 150) {
    std::string changed = whole;
    changed[at] = char(changed[at] ^ 4);
    WriteFileAtomically(path, changed);
    EXPECT_NE(error(*m).find(path), std::string::npos) << "byte " << at << " of " << whole.size();
  }
  for (const size_t size :
       {size_t(0), size_t(4), size_t(100), whole.size() / 2, whole.size() - 1}) {
    WriteFileAtomically(path, whole.substr(0, size));
    ExpectContains(error(*m), {path});
  }
  std::filesystem::remove(path);
  ExpectContains(error(*m), {"cannot read", path});
  SaveTensors(path, {{{"wte", at::ones({2})}}, {}});
  ExpectContains(error(*m), {path, "is not a saved state", "--save-state"});

  // Files that somebody else made, with a checksum that fits: `change` works on a state whose
  // tensors are then saved under this model's name.
  const auto changed = [&](auto&& change) {
    save();
    TensorFile file = LoadTensors(path);
    change(file);
    SaveTensors(path, file);
    return usage(*m);
  };
  const auto metadata = [](TensorFile& file, const std::string& key) -> std::string& {
    return std::find_if(file.metadata.begin(), file.metadata.end(),
                        [&](const auto& pair) { return pair.first == key; })
        ->second;
  };
  ExpectContains(changed([&](TensorFile& f) { metadata(f, "version") = "4"; }),
                 {path, "version 4", "a newer cistern", "reads version 3"});
  // Of the first version, whose hashes were others: that it is old, not that it is another model's.
  ExpectContains(changed([&](TensorFile& f) {
                   metadata(f, "version") = "1";
                   metadata(f, "model") = "0123456789abcdef";
                 }),
                 {path, "version 1", "an older cistern", "reads version 3", "--save-state FILE"});
  ExpectContains(changed([&](TensorFile& f) { metadata(f, "model") = "0"; }),
                 {"an Error", path, "corrupt"});
  ExpectContains(changed([&](TensorFile& f) { f.tensors[0].value.add_(1); }),
                 {"an Error", path, "corrupt"});
  ExpectContains(changed([&](TensorFile& f) { f.tensors.pop_back(); }),
                 {"an Error", path, "corrupt"});

  save();
  ModelConfig other = Config({"latte", "latte"});
  ExpectContains(usage(*Make(other)), {path, "another model", "latte,softmax", "latte,latte"});
  ExpectContains(usage(*Make(Config({"latte", "softmax"}), at::kDouble)),
                 {path, "float32", "float64", "--dtype"});
  ExpectContains(usage(*Make(Config({"latte", "softmax"}), at::kFloat, 2)),
                 {path, "another model", "hash"});
  other = Config({"latte", "softmax"});
  other.positions = PositionKind::kSinusoidal;  // the same weights, other numbers
  ExpectContains(usage(*Make(other)), {path, "another model", "hash"});
  other = Config({"latte", "softmax"});
  EXPECT_EQ(usage(*Make(other)), "no error");
  EXPECT_EQ(ModelHash(*Make(other)), ModelHash(*m));
  ExpectContains(ErrorMessage([&] {
                   LoadModelState(path, *m, {{"tokenizer", "18"}});
                 }),
                 {path, "another tokenizer", "17", "18"});
  ExpectContains(ErrorMessage([&] {
                   LoadModelState(path, *m, {{"alphabet", "18"}});
                 }),
                 {path, "alphabet"});

  ExpectContains(ErrorMessage([&] {
                   SaveModelState(folder / "no/such/folder", *m, {state, {}, {}});
                 }),
                 {"cannot write", "no/such/folder"});
  ExpectContains(ErrorMessage([&] {
                   SaveModelState("/dev/full", *m, {state, {}, {}});
                 }),
                 {"/dev/full", "No space left"});
  ExpectContains(ErrorMessage([&] {
                   SaveModelState(path, *m, {state, {{"layers.0.x", at::ones({1})}}, {}});
                 }),
                 {"layers.0.x"});
  ExpectContains(ErrorMessage([&] {
                   SaveModelState(path, *m, {m->EmptyState(0), {}, {}});
                 }),
                 {"no row"});
  EXPECT_EQ(error(*m), "no error");  // failed writes left the old file
  EXPECT_EQ(folder.Count(), 1);
}

// Tensors of other shapes, in a file whose checksum fits: as a program that writes such files
// wrongly would make it.
TEST(ModelStateFile, TensorsThatDoNotFitAreNamed) {
  at::NoGradGuard guard;
  const TestFolder folder;
  const std::string path = folder / "a.state";
  const auto m = Make(Config({"latte", "softmax"}));
  const auto message = [&](auto&& change) {
    ModelState state = m->EmptyState(2);
    m->Extend(Ids(2, 9), state);
    std::vector<NamedTensor> extra;
    change(state, extra);
    SaveModelState(path, *m, {state, extra, {}});
    return ErrorMessage([&] { LoadModelState(path, *m); });
  };
  EXPECT_EQ(message([](ModelState&, auto&) {}), "no error");
  ExpectContains(message([](ModelState& s, auto&) {
                   s.layers[0]["memory"] = at::ones({2, 2, 3, 7});
                 }),
                 {path, "layers.0.memory", "[2, 2, 3, 7]", "expected"});
  ExpectContains(
      message([](ModelState& s, auto&) { s.layers[0]["z"] = s.layers[0]["z"].to(at::kFloat); }),
      {path, "layers.0.z", "Float", "Double"});
  ExpectContains(message([](ModelState& s, auto&) { s.layers[0]["z"] = at::Tensor(); }),
                 {path, "layers.0.z", "missing"});
  ExpectContains(message([](ModelState& s, auto&) {
                   s.layers[0].tensors.push_back({"more", at::ones({2})});
                 }),
                 {path, "layers.0.more"});
  ExpectContains(message([](ModelState& s, auto&) {
                   s.layers[1]["v"] = at::ones({2, 2, 20, 6});
                 }),
                 {"no error"});
  ExpectContains(message([](ModelState& s, auto&) {
                   s.layers[1]["valid"] = at::ones({2, 8}, at::kBool);
                 }),
                 {path, "layers.1", "valid"});
  ExpectContains(message([](ModelState& s, auto&) {
                   s.positions = at::tensor({-1, 3}, at::kLong);
                 }),
                 {path, "positions", "below 0"});
  ExpectContains(message([](ModelState& s, auto&) { s.positions = at::ones({2}); }),
                 {path, "positions", "Float"});
  ExpectContains(message([](ModelState& s, auto&) {
                   s.positions = at::tensor({1, 2, 3}, at::kLong);
                 }),
                 {path, "layers.0", "expected [3,"});
  ExpectContains(message([&](ModelState& s, auto&) {
                   m->Extend(Ids(2, 1), s);
                   s.layers[0]["decoding"].narrow(2, 8, 8).fill_(1);  // how many slots it has
                 }),
                 {path, "layers.0", "slots of width 6, got one of"});
}

}  // namespace
}  // namespace cistern
