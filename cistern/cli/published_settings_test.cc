// The settings of each file in configs/, as the program reads them, against spec.md sections 4 and
// 7: the tables here are written from that page, not from the files. What a file inherits counts as
// its own.
#include <algorithm>
#include <cmath>
#include <set>

#include "cistern/cli/testing_cli.h"
#include "cistern/cli/testing_published_language.h"
#include "cistern/cli/testing_published_translation.h"

namespace cistern {
namespace {

using namespace cistern::testing;

// ---- spec 4.1 (P000 Table 2), 1.1 to 1.4, 2.11

std::vector<Family> ConvLuna() {
  const Settings all =
      Adam("adamw", .9, .999, 1e-8) +
      Settings{
          {"train.schedule", "rsqrt"},    {"train.schedule_from", 0.},  {"train.clip", 0.},
          {"train.decay", "all"},         {"model.norm", "post"},       {"model.norm_eps", 1e-6},
          {"model.positions", "learned"}, {"model.activation", "gelu"}, {"model.bias", "true"},
          {"model.dropout", 0.}};
  const Settings replayed = {{"train.order", "replay_all"}};
  const Settings bytes = {{"task.length", 4000.}, {"task.pad_to", "length"}};
  // The output of the feed-forward is dropped, that of attention is not.
  const Settings dropped = {{"model.ffn_out_dropout", .1}};
  const auto stops = [](double every, double patience) {
    return Settings{{"train.eval_every", every}, {"train.patience", patience}};
  };
  std::vector<Family> families = {
      {"P000/", all},
      {"P000/text/", Sizes(4, 4, 128, 512) + Training(32, 25'000, .005, 8000, .01) +
                         Dropouts(0, .1, .1) + dropped + bytes + replayed + stops(500, 25) +
                         Settings{{"task.kind", "classify"},
                                  {"task.valid_from", "test"},
                                  {"model.final_norm", "true"}}},  // 1.3: LN, then the mean
      {"P000/matching/", Sizes(4, 4, 128, 512) + Training(32, 30'000, .015, 8000, .04) +
                             Dropouts(0, .1, .1) + dropped + bytes + stops(500, 50) +
                             Settings{{"task.kind", "retrieval"},
                                      {"train.order", "replay"},
                                      {"train.eval_drop_last", "true"},
                                      {"model.final_norm", "false"},  // 1.3: no LN
                                      {"model.two_tower.match", "conv_luna"}}},
      {"P000/listops/",
       Sizes(6, 4, 128, 512) + Training(32, 50'000, .005, 1000, .01) + Dropouts(0, .1, .1) +
           dropped + replayed + stops(200, 300) +
           Settings{{"task.kind", "listops"}, {"task.length", 2000.}, {"task.pad_to", "length"}}},
      {"P000/cifar/", Sizes(8, 4, 128, 512) + Training(64, 30'000, .01, 700, .01) +
                          Dropouts(0, 0, 0) + stops(500, 50) +
                          Settings{{"task.kind", "image"},
                                   {"task.scale", "conv_luna"},
                                   {"train.order", "endless"},
                                   {"train.eval_drop_last", "true"}}}};
  for (const char* task : {"text", "matching", "listops", "cifar"}) {
    const bool conv = std::string(task) == "listops";
    for (const double slots : {1., 16., 256.}) {
      const auto row = [&](const std::string& mechanism, const Settings& more) {
        const std::string options = "model.attention_options." + mechanism + ".";
        Settings settings = {{"model.attention", mechanism}, {options + "slots", slots}};
        for (const auto& [key, value] : more) settings.push_back({options + key, value});
        families.push_back(
            {StrCat("P000/", task, "/", mechanism, "-", int64_t(slots), ".toml"), settings});
      };
      const Settings filter = {{"filter", conv ? "conv" : "maxpool"},
                               {"kernel", conv ? 32. : 4.},
                               {"stride", 1.},
                               {"mask", "none"}};
      row("conv_luna", filter);
      row("only_filtering", filter);
      row("only_scaling", {});
      const bool image = std::string(task) == "cifar";
      families.push_back({StrCat("P000/", task, "/luna-", int64_t(slots), ".toml"),
                          {{"model.init.cls", image ? "normal(1)" : "xavier_uniform"},
                           {"model.pooling", "cls"},
                           {"model.cls_place", "after"}}});
      row("luna", {{"tie_kv", "false"}, {"sharing", "all"}, {"packed_output", "shared"}});
    }
  }
  return families;
}

// ---- spec 4.2, 4.3 (P004 Tables 4, 5), 1.1, 1.4

std::vector<Family> Latte() {
  // Epochs are counted in whole batches, or in fractions of one: to 0.1 %. The best of them counts,
  // of AAN the best of every 2,000 steps (4.2).
  const auto epochs = [](double number, double rows, double batch) {
    const double steps = rows / batch;
    return Settings{{"~train.steps", number * steps}, {"~train.eval_every", steps}};
  };
  const auto task = [](const char* kind, double batch, double rate, double dropout) {
    return Settings{{"task.kind", kind},        {"train.batch", batch}, {"train.lr", rate},
                    {"model.dropout", dropout}, {"model.layers", 6.},   {"model.heads", 4.},
                    {"train.warmup", 0.}};
  };
  std::vector<Family> families = {
      {"P004/", Adam("adamw", .9, .999, 1e-8) + Settings{{"train.weight_decay", .01},
                                                         {"train.clip", 1.},
                                                         {"train.schedule", "cosine"},
                                                         // 1.4: optax, which counts from 0
                                                         {"train.schedule_from", 0.},
                                                         {"train.min_lr", 0.},
                                                         {"model.norm", "pre"},
                                                         {"model.norm_eps", 1e-6},
                                                         {"model.ffn_dim", 0.},  // 4 D
                                                         {"model.activation", "gelu_tanh"},
                                                         {"model.ffn_bias", "true"},
                                                         {"model.positions", "sinusoidal"}}},
      {"P004/listops/", task("listops", 64, 1e-3, .1) + epochs(50, 96'000, 64) +
                            Settings{{"model.dim", 128.}, {"task.length", 2048.}}},
      {"P004/text/", task("classify", 32, 1e-3, .1) + epochs(32, 25'000, 32) +
                         Settings{{"model.dim", 256.}, {"task.group_by_length", "false"}}},
      {"P004/image/",
       task("image", 32, 1e-3, .1) + epochs(200, 45'000, 32) + Settings{{"model.dim", 512.}}},
      {"P004/pathfinder/",
       task("pathfinder", 64, 1e-3, .2) + epochs(200, 160'000, 64) + PathfinderImages() +
           Settings{{"model.dim", 256.},
                    {"task.scale", "half"},
                    // 3.5: real values through a map, Dense(D); 1.1: its weights
                    {"model.encoder_classifier.input", "values"},
                    {"model.init.embedding", "default"},
                    {"model.init.linear", "lecun_normal"}}},
      {"P004/retrieval/", Settings{{"task.kind", "retrieval"},
                                   {"~train.steps", 20 * 147'086 / 32.},
                                   {"train.eval_every", 2000.},
                                   {"train.batch", 32.},
                                   {"train.lr", 1e-4},
                                   {"~train.warmup", .08 * 91'929},
                                   {"model.dropout", .1},
                                   {"model.layers", 6.},
                                   {"model.dim", 128.},
                                   {"model.two_tower.match", "latte"}}}};
  for (const auto& [name, dim] : std::vector<std::pair<std::string, double>>{{"listops", 128},
                                                                             {"text", 256},
                                                                             {"image", 512},
                                                                             {"pathfinder", 256},
                                                                             {"retrieval", 128}}) {
    const std::string key = "model.attention_options.latte.latents";
    families.push_back({"P004/" + name + "/latte-l40", {{key, 40.}}});
    families.push_back({"P004/" + name + "/latte-ld", {{key, dim}}});
  }
  const Settings lm = {{"task.kind", "lm"},        {"model.layers", 12.},
                       {"model.heads", 12.},       {"model.dim", 516.},
                       {"model.dropout", 0.},      {"train.lr", 6e-4},
                       {"train.warmup", 1800.},    {"train.schedule_steps", 600'000.},
                       {"train.clip_each", "true"}};
  families.push_back({"P004/openweb/", lm + Settings{{"task.length", 1024.}}});
  families.push_back({"P004/openweb/latte",
                      {{"train.batch", 12.}, {"train.accumulate", 2.}, {"train.steps", 300'000.}}});
  families.push_back({"P004/openweb/softmax",
                      {{"train.batch", 8.}, {"train.accumulate", 3.}, {"train.steps", 200'000.}}});
  families.push_back({"P004/enwik8/", lm + Settings{{"task.length", 2000.},
                                                    {"train.batch", 2.},
                                                    {"train.accumulate", 4.},
                                                    {"train.steps", 150'000.}}});
  return families;
}

// ---- spec 4.4 (Long Range Arena), and P001 Table 5 on it (2.16, 4.11)

std::vector<Family> LongRangeArena() {
  const Settings listops = Sizes(4, 8, 512, 1024) + Training(32, 5000, .05, 1000, .1) +
                           Settings{{"task.kind", "listops"},
                                    {"task.length", 2000.},
                                    {"train.schedule", "rsqrt"},
                                    {"model.pooling", "cls"},
                                    {"model.dropout", .1}};
  const Settings text = Sizes(4, 4, 256, 1024) + Training(32, 20'000, .05, 8000, .1) +
                        Settings{{"task.kind", "classify"},        {"task.length", 4000.},
                                 {"task.valid_from", "test"},      {"train.schedule", "rsqrt"},
                                 {"model.pooling", "cls"},         {"model.dropout", .1},
                                 {"task.group_by_length", "false"}};
  const Settings matching = Sizes(4, 4, 128, 512) + Training(32, 5000, .05, 8000, .1) +
                            Settings{{"task.kind", "retrieval"},       {"task.length", 4000.},
                                     {"train.schedule", "rsqrt"},      {"model.pooling", "first"},
                                     {"model.two_tower.match", "lra"}, {"model.dropout", .1}};
  const Settings image = Sizes(1, 8, 128, 128) + Training(256, 35'000, 5e-4, 175, 0) +
                         Dropouts(.3, -1, .3) +
                         Settings{{"task.kind", "image"},
                                  {"model.qkv_dim", 64.},
                                  {"train.schedule", "cosine"},
                                  {"model.pooling", "cls"},
                                  {"model.positions", "learned"}};
  const Settings pathfinder =
      Sizes(4, 4, 32, 32) + Training(512, 62'400, 1e-3, 312, 0) + Dropouts(.2, -1, .2) +
      PathfinderImages() + Settings{{"task.kind", "pathfinder"}, {"task.contour", 14.},
                                    {"model.qkv_dim", 16.},      {"train.schedule", "cosine"},
                                    {"model.pooling", "mean"},   {"model.positions", "sinusoidal"}};
  const Settings path_x =
      Sizes(1, 2, 32, 32) + Training(64, 500'000, 1e-3, 2500, 0) + PathfinderImages() +
      Settings{
          {"task.kind", "pathfinder"},    {"task.size", 128.},         {"model.qkv_dim", 16.},
          {"model.dropout", .1},          {"train.clip", 1.},          {"model.pooling", "mean"},
          {"model.positions", "learned"}, {"train.schedule", "cosine"}};
  const Settings all =
      Adam("adamw", .9, .98, 1e-9) +
      Settings{{"model.norm", "pre"}, {"model.activation", "gelu_tanh"}, {"model.head", "relu"}};
  const char* length = "model.attention_options.linformer.length";  // pooling=cls: one more
  std::vector<Family> families = {
      {"lra/", all},
      {"lra/listops", listops},
      {"lra/text", text},
      {"lra/retrieval", matching},
      {"lra/image", image},
      {"lra/pathfinder", pathfinder},
      {"lra/path-x", path_x},
      {"lra/image.toml", {{"model.attention_dropout", .2}, {"task.zero_is_padding", "true"}}},
      {"lra/image-linformer", {{"model.attention_dropout", .2}}},
      {"lra/path-x", {{"model.attention_dropout", .1}}},
      {"P001/pathfinder/", {{"model.attention_dropout", .1}}},
      {"lra/listops-linformer", {{length, 2001.}}},
      {"lra/text-linformer", {{length, 4001.}}},
      {"lra/image-linformer", {{length, 1025.}}},
      {"P001/listops/", all + listops},
      {"P001/text/", all + text},
      {"P001/retrieval/", all + matching},
      {"P001/pathfinder/", all + pathfinder}};
  // Of the token pairs, or of a token and Linformer's slots.
  for (const char* task : {"listops", "text", "retrieval", "pathfinder"}) {
    for (const char* row : {".toml", "-linformer.toml"})
      families.push_back({StrCat("lra/", task, row), {{"model.attention_dropout", .1}}});
  }
  for (const char* task : {"listops", "text", "retrieval", "pathfinder"}) {
    const bool eight = std::string(task) == "listops";  // heads; others have four
    const std::string reuse = "model.attention_options.reuse.";
    const std::string many = StrCat("P001/", task, eight ? "/full-k8-p" : "/k8-p");
    families.push_back({StrCat("P001/", task, "/base"), {{"model.attention", "softmax"}}});
    families.push_back({many + "2", {{reuse + "layers", 2.}, {reuse + "placement", "full"}}});
    families.push_back({many + "3", {{reuse + "layers", 3.}, {reuse + "placement", "full"}}});
    families.push_back({StrCat("P001/", task, "/k4-p2"), {{reuse + "layers", 2.}}});
  }
  return families;
}

// ---- spec 4.5, 4.6, 4.7

std::vector<Family> OthersCode() {
  // 4.5: fairseq's adam, whose decay is decoupled, on all parameters; it counts from 0.
  const Settings luna = {{"train.optimizer", "adamw"},
                         {"train.beta1", .9},
                         {"train.beta2", .98},
                         {"train.schedule", "inverse_sqrt"},
                         {"train.schedule_from", 0.},
                         {"model.norm", "post"},
                         {"model.attention", "luna"},
                         {"model.embedding_norm", "true"},
                         {"model.final_norm", "false"},
                         {"model.attention_options.luna.tie_kv", "false"},
                         {"model.attention_options.luna.slots", 128.}};
  const Settings xavier = {{"model.init.linear", "torch"},
                           {"model.init.query_key", "xavier_uniform(0.70710678)"},
                           {"model.init.value", "xavier_uniform(0.70710678)"},
                           {"model.init.attention_out", "xavier_uniform"}};
  // --apply-bert-init of its commands: all but the memory.
  Settings bert = {{"model.init.bias", "zeros"}};
  for (const char* key : {"linear", "query_key", "value", "attention_out", "head", "embedding"})
    bert.push_back({StrCat("model.init.", key), "normal(0.02)"});
  // A byte of 0 is no padding.
  const Settings black = {{"task.zero_is_padding", "false"},
                          {"model.init.zero_pad_row", "default"},
                          {"model.init.head_bias", "zeros"}};
  const Settings decays = {{"train.decay", "all"}};
  const Settings shuffled = {{"task.group_by_length", "false"}};
  // 4.6, and the warm-ups of its lra_config.py.
  const auto nystrom = [](double batch, double steps, double warmup) {
    return Training(batch, steps, 1e-4, warmup, 0);
  };
  const Settings fig4 =
      Sizes(4, 8, 256, 512) + Dropouts(0, 0, 0) +
      Settings{{"seed", 42.},          {"task.kind", "image"},   {"task.colour", "rgb"},
               {"task.valid", "test"}, {"model.norm_eps", 1e-5}, {"train.schedule", "cosine"},
               {"train.warmup", 0.},   {"train.clip", 0.}};
  std::vector<Family> families = {
      {"luna/", luna},
      {"luna/listops",
       Sizes(1, 8, 512, 2048) + Training(32, 5000, 1e-4, 1000, 1e-4) + decays + bert},
      {"luna/text", Sizes(4, 4, 256, 1024) + Training(32, 20'000, 5e-5, 8000, 1e-4) + decays +
                        bert + shuffled + Settings{{"model.dropout", .3}}},
      {"luna/retrieval", Sizes(4, 4, 128, 512) + Training(32, 20'000, 5e-4, 8000, 1e-4) + decays +
                             xavier + Settings{{"model.two_tower.match", "luna"}}},
      {"luna/image", Sizes(1, 8, 64, 128) + Training(256, 35'000, 5e-3, 4000, 0) + xavier + black +
                         Settings{{"model.dropout", .3}, {"model.attention_dropout", .1}}},
      {"luna/pathfinder", Sizes(1, 4, 128, 128) + Training(512, 62'500, 1e-3, 4000, 0) +
                              PathfinderImages() + xavier + black +
                              Settings{{"model.dropout", .2}, {"model.pooling", "mean"}}},
      {"nystrom/", Sizes(2, 2, 64, 128) + Settings{{"train.optimizer", "adamw"},
                                                   {"train.schedule", "linear"},
                                                   {"model.positions", "learned"}}},
      {"nystrom/listops", nystrom(32, 5000, 1000)},
      {"nystrom/image", nystrom(256, 35'000, 175)},
      {"nystrom/pathfinder", nystrom(256, 62'400, 312) + PathfinderImages()},
      {"nystrom/retrieval", nystrom(32, 30'000, 800)},
      {"nystrom/text", nystrom(32, 20'000, 8000) + shuffled},
      {"P002/", fig4}};
  for (const char* row : {"linear", "linformer", "nystrom", "rfa", "softmax"}) {
    families.push_back({StrCat("P002/", row, ".toml"),
                        {{"train.optimizer", "adam"},
                         {"train.weight_decay", 0.},
                         {"train.lr", 5e-4},
                         {"train.batch", 256.},
                         {"train.steps", 41. * 195},
                         {"train.schedule_steps", 50. * 195},
                         {"train.schedule_every", 195.},
                         {"train.order", "drop_last"}}});
    families.push_back({StrCat("P002/later/", row, ".toml"),
                        {{"train.optimizer", "adamw"},
                         {"train.weight_decay", .01},
                         {"train.lr", 1e-4},
                         {"train.batch", 64.},
                         {"train.steps", 200. * 781},
                         {"train.schedule_steps", 200. * 781},
                         {"train.schedule_every", 781.},
                         {"train.patience", 5.}}});
  }
  for (const char* file : {"P002/linear", "P002/later/linear"}) {  // 2.3: elu + 1 + 1e-6
    families.push_back(
        {file, {{"model.attention", "linear"}, {"model.attention_options.linear.map_eps", 1e-6}}});
  }
  families.push_back({"P002/linformer", {{"model.attention_options.linformer.slots", 128.}}});
  families.push_back({"P002/nystrom",
                      {{"model.attention_options.nystrom.landmarks", 64.},
                       {"model.attention_options.nystrom.iterations", 6.}}});
  families.push_back({"P002/later/nystrom",
                      {{"model.attention_options.nystrom.landmarks", 128.},
                       {"model.attention_options.nystrom.inverse", "svd"}}});
  return families;
}

// ---- the files
class PublishedSettings : public CliTest {
 protected:
  static std::string Root() {
    const char* source = std::getenv("CISTERN_SOURCE_DIR");
    return StrCat(source ? source : ".", "/configs/");
  }

  // All rows of the papers, by path from configs/, with their settings as the program reads them.
  static const std::map<std::string, Json>& Files() {
    static const std::map<std::string, Json> files = [] {
      std::map<std::string, Json> all;
      std::vector<std::string> names;
      for (const auto& entry : fs::recursive_directory_iterator(Root())) {
        const fs::path path = fs::relative(entry.path(), Root());
        // Our own mark is nobody's published setting.
        if (path.extension() != ".toml" || path.filename().string()[0] == '_' ||
            !path.has_parent_path() || *path.begin() == "protocols" || *path.begin() == "tables" ||
            *path.begin() == "own-mark")
          continue;
        names.push_back(path.string());
      }
      const TestFolder out;
      constexpr size_t kAtOnce = 4;
      for (size_t i = 0; i < names.size(); i += kAtOnce) {
        std::vector<std::pair<std::string, pid_t>> running;
        for (size_t j = i; j < std::min(names.size(), i + kAtOnce); ++j) {
          running.push_back({names[j], Start({"train", Root() + names[j], "--print-config"},
                                             out / std::to_string(j))});
        }
        for (size_t j = 0; j < running.size(); ++j) {
          const Outcome o = Wait(running[j].second, out / std::to_string(i + j));
          EXPECT_EQ(o.code, 0) << running[j].first << "\n" << o;
          const std::string copy = out / "config.toml";
          WriteFileAtomically(copy, o.out);
          all[running[j].first] = ReadTomlFile(copy);
        }
      }
      return all;
    }();
    return files;
  }

  // The value of "train.lr"; "task.length" is of the chosen task.
  static std::optional<Json> Find(const Json& config, const std::string& key) {
    const Json* at = &config;
    std::string rest = key;
    if (key.starts_with("task.") && key != "task.kind") {
      const std::string kind = config["task"]["kind"];
      if (config["task"].contains(kind)) rest = StrCat("task.", kind, ".", key.substr(5));
    }
    while (!rest.empty()) {
      const std::string word = rest.substr(0, rest.find('.'));
      rest = rest.size() > word.size() ? rest.substr(word.size() + 1) : "";
      if (!at->is_object() || !at->contains(word)) return std::nullopt;
      at = &(*at)[word];
    }
    return at->is_array() && at->size() == 1 ? (*at)[0] : *at;
  }
};

TEST_F(PublishedSettings, AreThoseOfTheSources) {
  std::map<std::string, std::set<std::string>> checked;  // settings of each file
  for (const auto& families :
       {ConvLuna(), Latte(), LongRangeArena(), OthersCode(), LanguageModels(), Translators()}) {
    for (const Family& family : families) {
      int fits = 0;
      for (const auto& file : Files()) {
        const std::string& name = file.first;
        if (!name.starts_with(family.files)) continue;
        ++fits;
        for (const auto& setting : family.settings) {
          const bool about = setting.first[0] == '~';
          const std::string key = about ? setting.first.substr(1) : setting.first;
          checked[name].insert(key);
          const std::optional<Json> found = Find(file.second, key);
          if (!found && setting.second == Value("default")) continue;  // not printed
          if (!found) {
            ADD_FAILURE() << name << " has no " << key;
          } else if (const auto* number = std::get_if<double>(&setting.second)) {
            EXPECT_NEAR(found->is_number() ? found->get<double>() : NAN, *number,
                        (about ? 1e-3 : 1e-12) * std::max(1e-300, std::abs(*number)))
                << name << " " << key;
          } else {
            EXPECT_EQ(found->is_string() ? found->get<std::string>() : found->dump(),
                      std::get<std::string>(setting.second))
                << name << " " << key;
          }
        }
      }
      EXPECT_GT(fits, 0) << "no file begins with " << family.files;
    }
  }
  for (const auto& file : Files()) {
    std::set<std::string>& keys = checked[file.first];
    if (keys.contains("task.batch_tokens")) keys.insert("train.batch");
    for (const char* key :
         {"optimizer", "lr", "batch", "steps", "warmup", "weight_decay", "schedule"})
      EXPECT_TRUE(keys.contains(StrCat("train.", key)))
          << "no table of this test has train." << key << " of " << file.first;
  }
}

// Appendix A.5 of P001, read the other way (4.11): the peaks of rsqrt, lr / sqrt(warm-up), are
// rates.
TEST_F(PublishedSettings, TheOtherReadingOfReuse) {
  for (const char* row : {"listops/k4-p2", "text/k4-p2", "retrieval/k4-p2", "pathfinder/k4-p2"}) {
    const std::string file = folder_ / "other.toml", root = fs::absolute(Root()).string();
    WriteFileAtomically(file, StrCat("extends = [\"", root, "P001/", row, ".toml\", \"", root,
                                     "protocols/reuse.toml\"]\n"));
    const Outcome o = Run({"train", file, "--print-config"});
    ASSERT_EQ(o.code, 0) << o;
    WriteFileAtomically(folder_ / "read.toml", o.out);
    const Json config = ReadTomlFile(folder_ / "read.toml"), train = config["train"];
    EXPECT_EQ(train["schedule"], "rsqrt");
    EXPECT_EQ(train["weight_decay"], 0.1);
    const double peak = train["lr"].get<double>() / std::sqrt(train["warmup"].get<double>());
    EXPECT_GT(peak, 5e-4) << row;
    EXPECT_LT(peak, 3e-3) << row;
  }
}

}  // namespace
}  // namespace cistern
