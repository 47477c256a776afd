// The figures that the sources print, in the [published] table of each file in configs/, against
// spec.md section 7: the table here is written from that page, not from the files.
#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "cistern/base/error.h"
#include "cistern/io/json_text.h"

namespace cistern {
namespace {

namespace fs = std::filesystem;

struct Row {
  std::string file;
  double value, spread;  // spread < 0: none is printed
  std::string metric = "accuracy";
};

std::vector<Row> Figures() {
  std::vector<Row> rows;
  // P000 Tables 1 and 3: text, matching, ListOps, CIFAR.
  const auto p000 = [&](const std::string& file, const std::vector<double>& f) {
    const char* tasks[] = {"text", "matching", "listops", "cifar"};
    for (size_t i = 0; i < 4; ++i)
      rows.push_back({StrCat("P000/", tasks[i], "/", file, ".toml"), f[2 * i], f[2 * i + 1]});
  };
  p000("luna-1", {65.67, .18, 75.46, 1.36, 37.02, .12, 49.06, .64});
  p000("luna-16", {65.53, .08, 75.93, .89, 36.98, .30, 50.36, .43});
  p000("luna-256", {65.65, .35, 79.44, .76, 37.21, .22, 50.90, .51});
  p000("conv_luna-1", {82.10, .45, 81.76, .73, 43.95, 1.75, 56.66, .44});
  p000("conv_luna-16", {84.25, .16, 80.47, 1.03, 44.14, .69, 56.93, .59});
  p000("conv_luna-256", {83.29, .15, 80.74, 1.08, 43.56, 2.55, 56.69, .64});
  p000("only_scaling-1", {65.45, .30, 72.46, .68, 37.12, .47, 49.23, 1.35});
  p000("only_scaling-16", {66.81, .21, 74.99, 1.67, 37.08, .18, 48.67, .65});
  p000("only_scaling-256", {66.95, .20, 75.55, .61, 37.52, .33, 48.90, 1.01});
  p000("only_filtering-1", {82.39, .62, 82.38, .73, 40.44, 2.31, 58.69, 1.13});
  p000("only_filtering-16", {80.89, .44, 82.66, 1.46, 41.48, 1.74, 58.06, .59});
  p000("only_filtering-256", {80.27, .97, 82.10, 1.68, 41.24, 1.42, 58.12, .66});
  // P001 Table 5: ListOps, Text, Retrieval, Path.
  const auto p001 = [&](const std::string& of_listops, const std::string& file,
                        const std::vector<double>& f) {
    const char* tasks[] = {"listops", "text", "retrieval", "pathfinder"};
    for (size_t i = 0; i < 4; ++i)
      rows.push_back(
          {StrCat("P001/", tasks[i], "/", i == 0 ? of_listops : file, ".toml"), f[i], -1});
  };
  p001("base", "base", {36.65, 63.29, 58.91, 76.49});
  p001("k4-p2", "k4-p2", {37.4, 64.07, 58.08, 78.33});
  p001("full-k8-p2", "k8-p2", {40.2, 64.07, 58.08, 78.33});
  p001("full-k8-p3", "k8-p3", {39.95, 63.95, 58.72, 82.4});
  // P004 Table 2: ListOps, Text, Retrieval, Image, Pathfinder.
  const auto p004 = [&](const std::string& before, const std::string& after,
                        const std::vector<double>& f) {
    const char* tasks[] = {"listops", "text", "retrieval", "image", "pathfinder"};
    for (size_t i = 0; i < f.size(); ++i)
      rows.push_back({StrCat(before, tasks[i], after, ".toml"), f[i], -1});
  };
  p004("P004/", "/latte-l40", {40.18, 64.51, 73.39, 47.55, 75.61});
  p004("P004/", "/latte-ld", {41.74, 65.15, 72.39, 48.05, 73.68});
  p004("luna/", "-128", {38.01, 65.74, 79.55, 47.47, 78.89});
  p004("lra/", "", {36.37, 64.27, 57.46, 42.44, 71.40});
  p004("lra/", "-linformer", {35.70, 53.94, 52.27, 38.56, 76.34});
  p004("lra/", "-performer", {18.01, 65.40, 53.82, 42.77, 77.05});
  rows.push_back({"P001/vit/base.toml", 84.51, .13});
  rows.push_back({"P001/vit/k6-p10.toml", 84.29, .06});
  rows.push_back({"P001/vit/k12-p6.toml", 83.55, .18});
  rows.push_back({"P001/vit/13-layers-k6-p10.toml", 84.69, .24});
  // P001 Table 7: MNLI, SQuAD 1.1, SQuAD 2.0.
  const auto finetuned = [&](const std::string& file, const std::vector<double>& f) {
    const char* tasks[] = {"mnli", "squad", "squad2"};
    for (size_t i = 0; i < 3; ++i)
      rows.push_back(
          {StrCat("P001/", tasks[i], "/", file, ".toml"), f[i], -1, i == 0 ? "accuracy" : "f1"});
  };
  finetuned("large", {87.97, 91.87, 82.41});
  finetuned("large-k16-p12", {87.75, 91.92, 82.56});
  finetuned("large-alternate", {87.31, 91.56, 82.29});
  finetuned("large-all-end", {87.24, 91.55, 81.7});
  finetuned("large-skip", {87.3, 91.65, 81.83});
  // P002 Figure 4 at its end; P003 Table 5, SST-2.
  const auto other = [&](const std::string& file, const char* metric, double value) {
    rows.push_back({file + ".toml", value, -1, metric});
  };
  const char* accuracy = "accuracy";
  other("P002/linformer", accuracy, 69.9), other("P002/rfa", accuracy, 64.4);
  other("P002/nystrom", accuracy, 58.5), other("P002/softmax", accuracy, 57.2);
  other("P002/linear", accuracy, 52.8), other("P003/sst2/base", accuracy, 94.3);
  other("P003/sst2/linformer-64", accuracy, 92.4), other("P003/sst2/linformer-128", accuracy, 93.7);
  other("P003/sst2/abc_mlp-64", accuracy, 93.8), other("P003/sst2/abc_mlp-128", accuracy, 94.4);
  // P003 Table 3a, test without context; Table 3b, test with 256. P004 Table 3.
  other("P003/lm/base", "perplexity", 20.5), other("P003/lm/linformer-64", "perplexity", 27.2);
  other("P003/lm/abc_random-64", "perplexity", 24.0);
  other("P003/lm/abc_mlp-32", "perplexity", 21.9), other("P003/lm/abc_mlp-64", "perplexity", 21.1);
  other("P003/lm32/base", "perplexity", 18.5), other("P003/lm32/linear-128", "perplexity", 22.8);
  other("P003/lm32/rfa-32", "perplexity", 21.3), other("P003/lm32/t2r-32", "perplexity", 20.8);
  other("P003/lm32/abc_mlp-32", "perplexity", 19.9);
  // P003 Table 5: MNLI, QNLI, QQP.
  const auto glue = [&](const std::string& file, double mnli, double qnli, double qqp) {
    other("P003/mnli/" + file, accuracy, mnli), other("P003/qnli/" + file, accuracy, qnli);
    other("P003/qqp/" + file, accuracy, qqp);
  };
  glue("base", 87.2, 92.4, 91.7), glue("linformer-64", 85.3, 91.8, 90.8);
  glue("linformer-128", 86.1, 91.9, 91.4), glue("abc_mlp-64", 85.6, 91.8, 91.7);
  glue("abc_mlp-128", 87.1, 92.6, 91.8);
  // P003 Tables 4 and 8; 7, on the development part.
  other("P003/wmt14/base", "bleu", 27.2), other("P003/wmt14/abc_random-32-32", "bleu", 25.7);
  other("P003/wmt14/abc_random-64-64", "bleu", 26.2);
  other("P003/wmt14/linformer-32-32", "bleu", 26.6);
  other("P003/wmt14/linformer-64-64", "bleu", 26.7);
  other("P003/wmt14/abc_mlp-32-8", "bleu", 27.1), other("P003/wmt14/abc_mlp-32-32", "bleu", 27.3);
  other("P003/wmt14/window-32-32", "bleu", 26.3);
  other("P003/wmt14/abc_cluster-32-32", "bleu", 26.8);
  other("P003/wmt14/abc_mlp-relu-32-32", "bleu", 26.4);
  other("P003/wmt14/abc_mlp-sigmoid-32-8", "bleu", 26.8);
  other("P003/wmt14/abc_mlp-sigmoid-32-32", "bleu", 27.0);
  other("P003/wmt14/abc_mlp-all-32-32-32", "bleu", 27.0);
  other("P003/iwslt14/base", "bleu", 39.9);
  other("P003/iwslt14/abc_random-128-64", "bleu", 38.6);
  other("P003/iwslt14/abc_mlp-128-64", "bleu", 39.7);
  const auto dev = [&](int64_t causal, int64_t cross, double value) {
    other(StrCat("P003/wmt14-dev/abc_mlp-", cross, "-", causal), "bleu", value);
  };
  dev(8, 8, 24.7), dev(8, 16, 25.2), dev(8, 32, 25.6), dev(8, 64, 25.5);
  dev(16, 16, 25.4), dev(16, 32, 25.7), dev(16, 64, 25.6);
  dev(32, 32, 25.7), dev(32, 64, 25.8), dev(64, 64, 25.8);
  other("P004/enwik8/softmax", "bits_per_byte", 1.28);
  other("P004/enwik8/latte", "bits_per_byte", 1.40);
  return rows;
}

std::string Root() {
  const char* source = std::getenv("CISTERN_SOURCE_DIR");
  return StrCat(source ? source : ".", "/configs/");
}

// A figure of a file itself: what it extends prints others.
std::optional<double> Printed(const Json& config, const char* table, const std::string& metric) {
  if (!config.contains("published") || !config["published"].contains(table)) return std::nullopt;
  const Json& figures = config["published"][table];
  if (!figures.contains(metric)) return std::nullopt;
  return figures[metric].get<double>();
}

TEST(PublishedFigures, AreThoseOfTheTables) {
  std::set<std::string> listed;
  for (const Row& row : Figures()) {
    listed.insert(row.file);
    ASSERT_TRUE(fs::exists(Root() + row.file)) << row.file;
    const Json config = ReadTomlFile(Root() + row.file);
    const auto value = Printed(config, "results", row.metric),
               spread = Printed(config, "spread", row.metric);
    ASSERT_TRUE(value) << row.file;
    EXPECT_DOUBLE_EQ(*value, row.value) << row.file;
    EXPECT_EQ(spread.has_value(), row.spread >= 0) << row.file;
    if (spread) {
      EXPECT_DOUBLE_EQ(*spread, row.spread) << row.file;
    }
  }
  int files = 0;
  for (const auto& entry : fs::recursive_directory_iterator(Root())) {
    const fs::path path = fs::relative(entry.path(), Root());
    if (path.extension() != ".toml" || *path.begin() == "tables") continue;
    ++files;
    const Json config = ReadTomlFile(entry.path());
    if (config.contains("published") && config["published"].contains("results")) {
      EXPECT_EQ(listed.count(path.string()), 1) << path << " prints a figure of no table here";
    }
  }
  EXPECT_GT(files, 150);
}

}  // namespace
}  // namespace cistern
