// Files that torch or the mechanisms see, changed at random some thousand times: tensor files,
// saved states, configurations. Whatever is in them, they are read or are an Error that says
// something; and a state that is read can be continued. (The readers that need no torch have
// fuzz targets, fuzz/.) The draws are the same each time.
#include <algorithm>
#include <fstream>
#include <random>

#include "cistern/attention/testing_mechanisms.h"
#include "cistern/base/error.h"
#include "cistern/base/progress.h"
#include "cistern/io/atomic_file.h"
#include "cistern/io/json_text.h"
#include "cistern/io/test_folder.h"
#include "cistern/models/decoder_lm.h"
#include "cistern/models/model_state_file.h"

namespace cistern {
namespace {

using namespace cistern::testing;

class Draws {
 public:
  explicit Draws(uint32_t seed) : bits_(seed) {}
  size_t Below(size_t n) { return size_t(bits_()) % n; }
  template <class T>
  const T& Of(const std::vector<T>& all) {
    return all[Below(all.size())];
  }

 private:
  std::mt19937 bits_;
};

// A bit, a byte, zeros, a cut, a repeated piece.
std::string Damaged(std::string bytes, Draws& draw) {
  const size_t at = draw.Below(bytes.size());
  const size_t size = std::min(draw.Of<size_t>({1, 2, 8, 64}), bytes.size() - at);
  switch (draw.Below(6)) {
    case 0:
    case 1:
      bytes[at] = char(bytes[at] ^ (1 << draw.Below(8)));
      break;
    case 2:
      bytes[at] = char(draw.Below(256));
      break;
    case 3:
      std::fill_n(bytes.begin() + int64_t(at), size, '\0');
      break;
    case 4:
      bytes.erase(at, draw.Below(2) ? size : bytes.size() - at);
      break;
    default:
      bytes.insert(at, bytes.substr(at, size));
  }
  return bytes;
}

// How often f went well, and how often it was an Error; anything else fails the test, with `what`.
struct Outcomes {
  int fine = 0, refused = 0;
  template <class F, class What>
  void Count(const F& f, const What& what) {
    try {
      f();
      ++fine;
    } catch (const Error& e) {
      EXPECT_NE(std::string(e.what()), "") << what();
      ++refused;
    } catch (const std::exception& e) {
      ADD_FAILURE() << what() << ": not an Error but " << e.what();
    }
  }
};

struct QuietNotes {
  QuietNotes() { SetQuiet(true); }
  ~QuietNotes() { SetQuiet(false); }
};

TEST(MutatedFiles, TensorFilesAreReadOrAnError) {
  const QuietNotes quiet;
  const TestFolder folder;
  const std::string path = folder / "a.safetensors";
  at::manual_seed(1);
  SaveTensors(path, {{{"weight", at::randn({3, 4})},
                      {"double", at::randn({5}, at::kDouble)},
                      {"half", at::randn({2, 2}).to(at::kBFloat16)},
                      {"ids", at::randint(0, 9, {4}, at::kLong)},
                      {"mask", at::rand({7}) < 0.5},
                      {"none", at::zeros({0, 3})}},
                     {{"format", "pt"}}});
  // Without our checksum, as of another program: so that what lies behind it is reached.
  std::string whole = ReadFile(path);
  uint64_t size = 0;
  std::copy_n(whole.data(), 8, reinterpret_cast<char*>(&size));
  Json header = ParseJson(std::string_view(whole).substr(8, size), path);
  header["__metadata__"].erase("cistern.xxh64");
  std::string text = JsonLine(header);
  text.resize(size, ' ');
  whole.replace(8, size, text);
  Draws draw(2);
  Outcomes outcomes;
  for (int i = 0; i < 3000; ++i) {
    std::string bad = Damaged(whole, draw);
    if (draw.Below(2)) {  // in the header alone
      bad = whole;
      bad.replace(8, size, Damaged(text, draw));
    }
    std::ofstream(path, std::ios::binary) << bad;  // WriteFileAtomically waits for the disk
    outcomes.Count(
        [&] {
          for (const NamedTensor& t : LoadTensors(path).tensors) {
            at::Tensor all = t.value.to(at::kDouble).sum();  // every number can be read
            EXPECT_EQ(all.dim(), 0);
          }
        },
        [&] { return StrCat("mutation ", i, " of the tensor file"); });
  }
  EXPECT_GT(outcomes.fine, 300);
  EXPECT_GT(outcomes.refused, 1000);
}

TEST(TensorFiles, WhatCannotBeWrittenIsNamed) {
  const TestFolder folder;
  const std::string path = folder / "a.safetensors";
  const auto message = [&](const at::Tensor& x) {
    return Thrown([&] { SaveTensors(path, {{{"weight", at::ones({2})}, {"other", x}}, {}}); });
  };
  ExpectContains(message(at::zeros({2}, at::kComplexFloat)), {path, "'other'", "ComplexFloat"});
  ExpectContains(message({}), {path, "'other'", "undefined"});
  EXPECT_EQ(folder.Count(), 0);
}

at::Tensor Another(const at::Tensor& x, Draws& draw) {
  switch (draw.Below(9)) {
    case 0:
      return x.to(draw.Of<at::ScalarType>({at::kFloat, at::kDouble, at::kLong, at::kBool}));
    case 1:
      return x.unsqueeze(int64_t(draw.Below(size_t(x.dim() + 1))));
    case 2:
      return x.dim() > 0 ? x.select(0, 0) : x;
    case 3: {
      if (x.dim() == 0) return x;
      const int64_t d = int64_t(draw.Below(size_t(x.dim())));
      return x.narrow(d, 0, x.size(d) / 2);
    }
    case 4:
      return x.dim() > 0 ? at::cat({x, x}, int64_t(draw.Below(size_t(x.dim())))) : x;
    case 5:
      return x.is_floating_point() ? at::full_like(x, std::nan("")) : at::full_like(x, -1);
    case 6:
      return x.scalar_type() == at::kLong ? at::full_like(x, int64_t{1} << 62)
                                          : at::full_like(x, 1e30).to(x.scalar_type());
    case 7:
      return at::zeros_like(x);
    default:
      return x.transpose(0, x.dim() > 1 ? 1 : 0);
  }
}

TEST(MutatedFiles, StatesAreGoneOnWithOrAnError) {
  at::NoGradGuard guard;
  const QuietNotes quiet;
  const TestFolder folder;
  const std::string path = folder / "a.state";
  ModelConfig config;
  config.vocab_size = 23, config.dim = 12, config.heads = 2, config.max_length = 256;
  config.positions = PositionKind::kLearned, config.conv = 3;
  config.attention = {"latte",       "softmax",           "window",
                      "abc_cluster", "softmax:1+latte:1", "abc_compressive"};
  config.layers = int64_t(config.attention.size());
  const auto model = std::dynamic_pointer_cast<DecoderLm>(MakeModel(config, 1));
  model->eval();
  ModelState state = model->EmptyState(2);
  at::manual_seed(1);
  model->Extend(at::randint(0, 23, {2, 9}, at::kLong), state, {Lengths({9, 4}), {}});
  SaveModelState(path, *model, {state, {{"last", at::ones({2})}}, {{"tokenizer", "17"}}});
  const TensorFile good = LoadTensors(path);
  const at::Tensor more = at::randint(0, 23, {2, 3}, at::kLong);
  Draws draw(3);
  Outcomes outcomes;
  for (int i = 0; i < 300; ++i) {
    TensorFile file = good;
    NamedTensor& t = file.tensors[draw.Below(file.tensors.size())];
    const std::string name = t.name;
    std::string what;
    switch (draw.Below(8)) {
      case 0:
        file.tensors.erase(file.tensors.begin() + (&t - file.tensors.data()));
        what = "without " + name;
        break;
      case 1:
        t.name = draw.Of<std::string>({"", "layers.0", "layers.99.memory", "x", t.name + "."});
        if (std::any_of(file.tensors.begin(), file.tensors.end(),
                        [&](const NamedTensor& o) { return &o != &t && o.name == t.name; }))
          continue;
        what = name + " renamed to '" + t.name + "'";
        break;
      case 2: {
        auto& [key, value] = file.metadata[draw.Below(file.metadata.size())];
        value = draw.Of<std::string>({"", "0", "-1", "3", "99999999999999999999", "latte"});
        what = "metadata " + key + " = '" + value + "'";
        break;
      }
      default:
        t.value = Another(t.value, draw).contiguous();
        what = StrCat(name, " of shape ", t.value.sizes());
    }
    // Wrong contents under a right checksum: those are met by what lies behind it.
    const std::string sum = ModelStateChecksum(file);
    for (auto& [key, value] : file.metadata) {
      if (key == "checksum") value = sum;
    }
    SaveTensors(path, file);
    outcomes.Count(
        [&] {
          ModelState loaded = LoadModelState(path, *model, {{"tokenizer", "17"}}).state;
          const int64_t rows = loaded.positions.size(0);
          model->Extend(more.narrow(0, 0, 1).expand({rows, 3}), loaded);
        },
        [&] { return StrCat("mutation ", i, " of the state: ", what); });
  }
  EXPECT_GT(outcomes.fine, 30);
  EXPECT_GT(outcomes.refused, 100);
}

// Some value of `json`, at any depth, becomes another; or a key does.
void Change(Json& json, Draws& draw, const std::vector<Json>& values) {
  if ((json.is_object() || json.is_array()) && !json.empty() && draw.Below(4) != 0) {
    auto at = json.begin();
    std::advance(at, std::ptrdiff_t(draw.Below(json.size())));
    if (json.is_object() && draw.Below(8) == 0) {
      const std::string key = at.key();
      if (draw.Below(2)) {
        json.erase(key);
      } else {
        json[key + "s"] = draw.Of(values);
      }
      return;
    }
    Change(*at, draw, values);
    return;
  }
  json = draw.Of(values);
}

TEST(MutatedFiles, ConfigurationsAreReadOrAnError) {
  std::vector<Json> values = {0,
                              1,
                              -1,
                              2,
                              3,
                              12,
                              65536,
                              int64_t{1} << 62,
                              0.5,
                              -0.5,
                              1e300,
                              true,
                              false,
                              nullptr,
                              "",
                              "x",
                              Json::array(),
                              Json::object(),
                              "softmax",
                              Json{{"latte", {{"latents", 3}}}},
                              Json{{"latte", 3}},
                              Json{{"1", {}}},
                              Json::array({"latte", "softmax"}),
                              Json::array({0, 1, 0})};
  for (const char* groups :
       {"softmax:1+latte:1", "window:1+abc_mlp:1", "latte:2", "latte:1+latte:1",
        "latte:0+softmax:2", "latte:-1+softmax:3", "latte:1+", "+", ":", "latte:", ":1+:1",
        "latte:1+nosuch:1", "luna:1+latte:1", "nystrom:1+latte:1",
        "latte:99999999999999999999+softmax:1", "softmax:1+latte:1+abc_mlp:1",
        "latte:1 + softmax:1", "reuse:1+latte:1"})
    values.emplace_back(groups);
  for (const MechanismInfo* info : Mechanisms()) values.emplace_back(info->name);
  std::vector<Json> configs;
  for (const char* text : {
           R"({"kind": "decoder_lm", "version": 2, "vocab_size": 23, "dim": 12, "layers": 3,
               "heads": 2, "attention": ["softmax:1+latte:1", "latte", "window:1+latte:1"],
               "attention_options": {"latte": {"latents": 6}, "window": {"size": 4}},
               "layer_options": {"2": {"latte": {"latents": 4}}}, "tied_layers": [0, 1, 2]})",
           R"({"kind": "encoder_decoder", "version": 2, "vocab_size": 23, "dim": 12, "layers": 2,
               "heads": 2, "attention": "softmax", "positions": "learned",
               "decoder": {"attention": ["latte:1+abc_mlp:1"], "layers": 3, "conv": 2},
               "cross": {"attention": "abc_mlp", "attention_options": {"abc_mlp": {"slots": 3}}},
               "encoder_decoder": {"share_embeddings": false}, "target_vocab_size": 7})",
           R"({"kind": "encoder_classifier", "version": 1, "vocab_size": 23, "classes": 3,
               "dim": 12, "layers": 2, "heads": 2, "attention": ["luna"], "pooling": "memory",
               "cross_attention": ["softmax"], "head": "gelu"})",
       })
    configs.push_back(ParseJson(text, "config"));
  Draws draw(4);
  Outcomes outcomes;
  for (int i = 0; i < 6000; ++i) {
    Json json = draw.Of(configs);
    std::string text;
    if (draw.Below(4) == 0) {
      text = Damaged(JsonLine(json), draw);
    } else {
      for (size_t n = 1 + draw.Below(2); n > 0; --n) Change(json, draw, values);
      text = JsonLine(json);
    }
    outcomes.Count(
        [&] {
          ModelConfig config = ReadModelConfig(ParseJson(text, "config.json"), "config.json");
          const Json written = config.Describe().Write();
          ModelConfig again = ReadModelConfig(written, "again");
          EXPECT_EQ(again.Describe().Write(), written) << text;
          EXPECT_EQ(again.Summary(), config.Summary()) << text;
        },
        [&] { return text; });
  }
  EXPECT_GT(outcomes.fine, 150);
  EXPECT_GT(outcomes.refused, 2000);
}

}  // namespace
}  // namespace cistern
