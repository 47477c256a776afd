#pragma once
// What the test of published settings writes down of spec.md: settings by the key of an experiment,
// of families of files.
#include <string>
#include <utility>
#include <variant>
#include <vector>

namespace cistern::testing {

using Value = std::variant<double, std::string>;
using Settings = std::vector<std::pair<std::string, Value>>;

// What holds for all files of configs/ whose path begins so.
struct Family {
  std::string files;
  Settings settings;
};

inline Settings operator+(Settings a, const Settings& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

inline Settings Sizes(double layers, double heads, double dim, double ffn) {
  return {
      {"model.layers", layers}, {"model.heads", heads}, {"model.dim", dim}, {"model.ffn_dim", ffn}};
}

inline Settings Training(double batch, double steps, double rate, double warmup, double decay) {
  return {{"train.batch", batch},
          {"train.steps", steps},
          {"train.lr", rate},
          {"train.warmup", warmup},
          {"train.weight_decay", decay}};
}

inline Settings Dropouts(double all, double attention, double ffn) {  // attention < 0: not checked
  Settings dropouts = {{"model.dropout", all}, {"model.ffn_dropout", ffn}};
  if (attention >= 0) dropouts.push_back({"model.attention_dropout", attention});
  return dropouts;
}

inline Settings Adam(const char* kind, double beta1, double beta2, double eps) {
  return {{"train.optimizer", kind},
          {"train.beta1", beta1},
          {"train.beta2", beta2},
          {"train.eps", eps}};
}

// Spec 3.5: 160,000, 20,000 and 20,000 images.
inline Settings PathfinderImages() {
  return {{"task.examples", 200'000.}, {"task.valid_share", .1}, {"task.test_share", .1}};
}

}  // namespace cistern::testing
