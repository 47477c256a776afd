#include <chrono>
#include <filesystem>
#include <fstream>
#include <iterator>

#include "cistern/base/error.h"
#include "cistern/io/test_folder.h"
#include "cistern/models/testing_models.h"

namespace cistern {
namespace {

using namespace cistern::testing;

std::string ReadFile(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}
void WriteFile(const std::string& path, const std::string& text) {
  std::ofstream(path, std::ios::binary) << text;
}

TEST(ModelFiles, RoundTripIsBitwise) {
  std::vector<ModelConfig> configs = Lms();
  configs.push_back(SmallLm({"latte"}));
  configs.back().kind = "encoder_classifier", configs.back().classes = 3,
  configs.back().pooling = PoolingKind::kCls, configs.back().ffn_bias = true;
  configs.push_back(SmallLm({"performer", "abc_cluster", "latte"}));  // mechanisms with buffers
  configs.push_back(TiedLm(true));
  for (const ModelConfig& config : configs) {
    const TestFolder folder;
    const auto m = MakeModel(config, 7);
    for (const auto& buffer : m->named_buffers())
      buffer.value().add_(1);  // as drawn anew in training
    SaveModel(*m, folder / "model");
    const auto loaded = LoadModel(folder / "model");
    const auto a = m->named_parameters(), b = loaded->named_parameters();
    ASSERT_EQ(a.size(), b.size());
    for (const auto& p : a) ExpectSameBits(b[p.key()], p.value(), p.key());
    for (const auto& p : m->named_buffers())
      ExpectSameBits(loaded->named_buffers()[p.key()], p.value(), p.key());
    ModelConfig x = config, y = loaded->config();
    EXPECT_EQ(x.Describe().Write(), y.Describe().Write());
    EXPECT_FALSE(loaded->is_training());
    SaveModel(*loaded, folder / "again");
    EXPECT_EQ(ReadFile(folder / "model/model.safetensors"),
              ReadFile(folder / "again/model.safetensors"));
    EXPECT_EQ(ReadFile(folder / "model/config.json"), ReadFile(folder / "again/config.json"));
    // The same seed, the same model; another seed, another one.
    const std::string embedding = "embed_tokens.weight";
    ExpectSameBits(MakeModel(config, 7)->named_parameters()[embedding], a[embedding], "seed");
    EXPECT_FALSE(at::equal(MakeModel(config, 8)->named_parameters()[embedding], a[embedding]));
  }
}

TEST(ModelFiles, BrokenWeightsNameFileAndTensor) {
  const TestFolder folder;
  const auto m = MakeModel(SmallLm(), 1);
  SaveModel(*m, folder.path());
  const std::string path = folder / "model.safetensors", whole = ReadFile(path);
  auto message = [&](auto&& change) {
    TensorFile file = LoadTensors(path);
    change(file);
    SaveTensors(path, file);
    const std::string text = ErrorMessage([&] { LoadModel(folder.path()); });
    WriteFile(path, whole);
    return text;
  };
  auto find = [](TensorFile& file, const std::string& name) {
    return std::find_if(file.tensors.begin(), file.tensors.end(),
                        [&](const NamedTensor& t) { return t.name == name; });
  };
  const std::string name = "layers.1.attention.q_proj.weight";
  ExpectContains(message([&](TensorFile& f) { f.tensors.erase(find(f, name)); }),
                 {path, name, "missing"});
  ExpectContains(message([&](TensorFile& f) {
                   f.tensors.push_back({"layers.1.attention.q_proj.weights", at::ones({2})});
                 }),
                 {path, "unknown tensor 'layers.1.attention.q_proj.weights'", "did you mean"});
  ExpectContains(message([&](TensorFile& f) {
                   find(f, name)->value = at::ones({12, 11});
                 }),
                 {path, name, "[12, 11]", "[12, 12]"});
  ExpectContains(message([&](TensorFile& f) {
                   find(f, name)->value = at::ones({12, 12}, at::kLong);
                 }),
                 {path, name, "Long"});
  // Half precision is read into the model's own.
  EXPECT_EQ(message([&](TensorFile& f) {
              find(f, name)->value = at::ones({12, 12}, at::kHalf);
            }),
            "no error");
  for (const size_t size :
       {size_t(0), size_t(4), size_t(100), whole.size() / 2, whole.size() - 1}) {
    WriteFile(path, whole.substr(0, size));
    ExpectContains(ErrorMessage([&] { LoadModel(folder.path()); }), {path});
  }
  std::filesystem::remove(path);
  ExpectContains(ErrorMessage([&] { LoadModel(folder.path()); }), {path});
  // A failed load leaves the model as it was.
  WriteFile(path, whole);
  TensorFile file = LoadTensors(path);
  for (NamedTensor& t : file.tensors) t.value.zero_();
  file.tensors.pop_back();
  SaveTensors(path, file);
  const at::Tensor before = m->parameters()[0].clone();
  EXPECT_NE(ErrorMessage([&] { LoadWeights(*m, path); }), "no error");
  ExpectSameBits(m->parameters()[0], before, "untouched");
}

// Compared with the file's header before anything is allocated: these would take minutes, or all of
// the memory.
TEST(ModelFiles, SizesOfAnotherModelAreRefusedAtOnce) {
  const TestFolder folder;
  SaveModel(*MakeModel(SmallLm(), 1), folder.path());
  const std::string path = folder / "config.json";
  const Json good = Json::parse(ReadFile(path));
  for (const auto& [key, value] :
       std::vector<std::pair<std::string, int64_t>>{{"dim", 49152}, {"ffn_dim", 1 << 20}}) {
    Json json = good;
    json[key] = value;
    WriteFile(path, json.dump());
    const auto begin = std::chrono::steady_clock::now();
    ExpectContains(ErrorMessage([&] { LoadModel(folder.path()); }),
                   {"model.safetensors: its shapes hold", path, key + "=" + std::to_string(value)});
    EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(10)) << key;
  }
}

TEST(ModelFiles, FlippedBitsAreSeen) {
  const TestFolder folder;
  SaveModel(*MakeModel(SmallLm(), 1), folder.path());
  const std::string path = folder / "model.safetensors", whole = ReadFile(path);
  for (size_t i = whole.size() / 3; i < whole.size(); i += whole.size() / 40) {
    std::string changed = whole;
    changed[i] = char(changed[i] ^ 64);
    WriteFile(path, changed);
    ExpectContains(ErrorMessage([&] { LoadModel(folder.path()); }), {path, "checksum"});
  }
}

TEST(ModelFiles, BrokenConfigsSayWhatToDo) {
  const TestFolder folder;
  SaveModel(*MakeModel(SmallLm(), 1), folder.path());
  const std::string path = folder / "config.json";
  const Json good = Json::parse(ReadFile(path));
  auto message = [&](auto&& change) {
    Json json = good;
    change(json);
    WriteFile(path, json.dump());
    return ErrorMessage([&] { LoadModel(folder.path()); });
  };
  EXPECT_EQ(message([](Json&) {}), "no error");
  ExpectContains(message([](Json& j) { j["version"] = 99, j["new_key"] = 1; }),
                 {"version 99", "newer"});
  ExpectContains(message([](Json& j) { j["version"] = 0; }), {"version 0"});
  ExpectContains(message([](Json& j) { j["layer"] = 3; }), {path, "layer", "layers"});
  ExpectContains(message([](Json& j) { j["attention"] = "lattte"; }), {path, "lattte", "latte"});
  ExpectContains(message([](Json& j) {
                   j["attention"] = Json{"latte", "softmax"};
                 }),
                 {"2 mechanisms", "3 layers"});
  ExpectContains(message([](Json& j) {
                   j["attention_options"] = Json{{"latte", {{"latent", 4}}}};
                 }),
                 {"latte", "latent", "latents"});
  ExpectContains(message([](Json& j) { j["heads"] = 5; }), {"dim=12", "heads=5"});
  ExpectContains(message([](Json& j) { j["heads"] = 0; }), {path, "heads", "0"});
  ExpectContains(message([](Json& j) { j["dim"] = "wide"; }), {path, "dim", "wide"});
  ExpectContains(message([](Json& j) { j["positions"] = "rotary"; }), {"rotary", "latte"});
  ExpectContains(message([](Json& j) { j["tie_embeddings"] = false, j["scale_logits"] = true; }),
                 {"scale_logits", "tie_embeddings=true"});
  WriteFile(path, "{");
  ExpectContains(ErrorMessage([&] { LoadModel(folder.path()); }), {path});
  ModelConfig c = SmallLm();
  c.vocab_size = 0;
  ExpectContains(ErrorMessage([&] { MakeModel(c, 0); }), {"vocab_size"});
  c = SmallLm();
  c.kind = "encoder_classifier", c.conv = 4, c.classes = 3;
  ExpectContains(ErrorMessage([&] { MakeModel(c, 0); }), {"conv=4", "conv=0"});
}

}  // namespace
}  // namespace cistern
