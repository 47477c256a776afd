// The rows of `cistern bench papers` that are cores, as data: shapes and claims of each figure
// (spec 6; figures of P002 read off its repository's pictures, to about 0.3 ms).
#include "cistern/bench/papers.h"

namespace cistern::bench {
namespace {

using Kind = Claim::Kind;

// P002 Fig. 3 at one width, with its times at n = 1,024 and where softmax's curve crosses.
struct UcuTimes {
  double softmax, elu, linformer, nystrom, rfa;
};

Protocol Ucu(int64_t width, const UcuTimes& at1024, const UcuTimes& crossing) {
  Protocol p = {
      StrCat("ucu-fig3-d", width),
      StrCat("P002 Fig. 3, d = ", width),
      "Core alone, q, k, v [32,4,n,d], on a T4, milliseconds of the GPU's kernels; here wall time "
      "on this processor, normal inputs.",
      Way::kBidirectional,
      Pass::kForward,
      32,
      4,
      width,
      {128, 256, 512, 768, 1024, 2048},
      {{"softmax", "softmax"},
       {"ELU", "linear"},
       {"Linformer", "linformer", {{"slots", 128}}},
       {"Nystrom", "nystrom", {{"landmarks", 64}, {"inverse", "iterative"}, {"iterations", 6}}},
       {"RFA", "rfa", {{"features", width}, {"variant", "ucu_notebook"}}}},
      {}};
  const auto arm = [&](const char* name, double time, double length) {
    p.claims.push_back({Kind::kFaster, name, "softmax", 1024, at1024.softmax / time});
    p.claims.push_back({Kind::kCrossing, name, "softmax", 0, length});
    p.claims.push_back({Kind::kSlope, name, "", 0, 1});
  };
  arm("ELU", at1024.elu, crossing.elu);
  arm("Linformer", at1024.linformer, crossing.linformer);
  arm("Nystrom", at1024.nystrom, crossing.nystrom);
  arm("RFA", at1024.rfa, crossing.rfa);
  p.claims.push_back({Kind::kFaster, "ELU", "RFA", 2048, width == 32 ? 10.2 / 3.5 : 15.3 / 6.9});
  p.claims.push_back(
      {Kind::kFaster, "Linformer", "Nystrom", 2048, width == 32 ? 8.1 / 6.6 : 9.0 / 7.6});
  p.claims.push_back({Kind::kSlope, "softmax", "", 0, 2});
  return p;
}

Protocol AbcFig1() {
  return {"abc-fig1",
          "P003 Fig. 1",
          "Greedy decoding of a transformer-base, batch 16, speed and attention memory against the "
          "length; here the causal core alone, one token of 16 sequences after each length "
          "(lengths of ours: the paper prints none). RFA's 128 are sines and cosines of 64 rows.",
          Way::kDecode,
          Pass::kForward,
          16,
          8,
          64,
          {128, 256, 512, 1024, 2048},
          {{"softmax", "softmax"},
           {"RFA 128", "rfa", {{"features", 64}}},
           {"T2R 4", "t2r", {{"features", 4}}},
           {"ABC 8", "abc_mlp", {{"slots", 8}}}},
          {{Kind::kFlat, "RFA 128", "", 0, 0},
           {Kind::kFlat, "T2R 4", "", 0, 0},
           {Kind::kFlat, "ABC 8", "", 0, 0},
           {Kind::kFaster, "ABC 8", "softmax", 2048, 0},
           {Kind::kFaster, "ABC 8", "RFA 128", 2048, 1.25},
           {Kind::kFaster, "T2R 4", "ABC 8", 2048, 1.2}}};
}

Protocol AbcTable6() {
  return {"abc-table6",
          "P003 Table 6",
          "Inference of a RoBERTa-base encoder, 512 tokens, batch 16, V100; here the core of one "
          "layer, so ratios are further from 1 than a whole model's (abc-table6-model).",
          Way::kBidirectional,
          Pass::kForward,
          16,
          12,
          64,
          {512},
          {{"base", "softmax"},
           {"Linformer 64", "linformer", {{"slots", 64}}},
           {"Linformer 128", "linformer", {{"slots", 128}}},
           {"ABC 64", "abc_mlp", {{"slots", 64}}},
           {"ABC 128", "abc_mlp", {{"slots", 128}}}},
          {{Kind::kFaster, "Linformer 64", "base", 512, 1.7},
           {Kind::kFaster, "Linformer 128", "base", 512, 1.5},
           {Kind::kFaster, "ABC 64", "base", 512, 1.5},
           {Kind::kFaster, "ABC 128", "base", 512, 1.3},
           {Kind::kFaster, "Linformer 64", "ABC 64", 512, 1.7 / 1.5},
           {Kind::kMemory, "Linformer 64", "base", 512, 0.5},
           {Kind::kMemory, "Linformer 128", "base", 512, 0.6},
           {Kind::kMemory, "ABC 64", "base", 512, 0.5},
           {Kind::kMemory, "ABC 128", "base", 512, 0.6}}};
}

Protocol LatteFig2(Way way) {
  const bool causal = way == Way::kCausal;
  Protocol p = {StrCat("latte-fig2-", NameOf(way, Ways())),
                StrCat("P004 Fig. 2, ", NameOf(way, Ways())),
                "A10, float32, B 2, D 128, L 128, H 4, with the projections of queries, keys and "
                "values; here the core without them.",
                way,
                Pass::kForward,
                2,
                4,
                32,
                {1000, 3000, 5000, 7000, 10000, 12000, 14000, 16000},
                {{"attention", "softmax"}, {"Latte", "latte", {{"latents", 128}}}},
                {{Kind::kSlope, "Latte", "", 0, 1},
                 {Kind::kSlope, "attention", "", 0, 2},
                 {Kind::kFaster, "Latte", "attention", 16000, 0}}};
  if (causal) p.claims.push_back({Kind::kCrossing, "Latte", "attention", 0, 0});
  return p;
}

Protocol LatteFig4() {
  Protocol p = {
      "latte-fig4",
      "P004 Fig. 4",
      "B 4, T 5,000, D 512, H 4, latents 64 to 512: Latte slower than causal attention at "
      "L = D = 512 alone, on a GPU.",
      Way::kCausal,
      Pass::kForward,
      4,
      4,
      128,
      {5000},
      {{"attention", "softmax"}},
      {{Kind::kFaster, "Latte 64", "Latte 512", 5000, 0},
       {Kind::kFaster, "Latte 64", "attention", 5000, 0},
       {Kind::kFaster, "Latte 256", "attention", 5000, 0},
       {Kind::kSlower, "Latte 512", "attention", 5000, 0}}};
  for (int64_t latents = 64; latents <= 512; latents += 64)
    p.arms.push_back({StrCat("Latte ", latents), "latte", {{"latents", latents}}});
  return p;
}

Protocol ConvLuna() {
  const auto conv = [](int64_t slots, int64_t kernel, int64_t stride, const char* temperature) {
    return Json{
        {"slots", slots}, {"kernel", kernel}, {"stride", stride}, {"temperature", temperature}};
  };
  return {
      "convluna",
      "P000, claims of its text",
      "No table in the paper: Luna beside ConvLuna over slots (M), stride (S), kernel (K), with "
      "a fixed and a learned temperature; the core, forward and backward.",
      Way::kBidirectional,
      Pass::kBoth,
      4,
      4,
      64,
      {1024, 2048, 4096},
      {{"Luna M=16", "luna", {{"slots", 16}}},
       {"Luna M=256", "luna", {{"slots", 256}}},
       {"ConvLuna M=16 K=1 S=1 fixed", "conv_luna", conv(16, 1, 1, "sqrt")},
       {"ConvLuna M=16 K=1 S=1", "conv_luna", conv(16, 1, 1, "learn")},
       {"ConvLuna M=16 K=4 S=1", "conv_luna", conv(16, 4, 1, "learn")},
       {"ConvLuna M=16 K=4 S=4", "conv_luna", conv(16, 4, 4, "learn")},
       {"ConvLuna M=256 K=4 S=1", "conv_luna", conv(256, 4, 1, "learn")},
       {"ConvLuna M=256 K=4 S=4", "conv_luna", conv(256, 4, 4, "learn")},
       {"ConvLuna M=16 K=32 S=4", "conv_luna", conv(16, 32, 4, "learn")}},
      {{Kind::kLevel, "ConvLuna M=16 K=1 S=1", "ConvLuna M=16 K=1 S=1 fixed", 4096, 1},
       {Kind::kFaster, "ConvLuna M=256 K=4 S=4", "ConvLuna M=256 K=4 S=1", 4096, 0},
       {Kind::kFaster, "ConvLuna M=16 K=4 S=1", "ConvLuna M=256 K=4 S=1", 4096, 0},
       {Kind::kFaster, "Luna M=16", "Luna M=256", 4096, 0},
       {Kind::kSlope, "ConvLuna M=16 K=4 S=1", "", 0, 1},
       {Kind::kSlope, "Luna M=16", "", 0, 1}}};
}

}  // namespace

const std::vector<Protocol>& Protocols() {
  static const std::vector<Protocol> all = [] {
    std::vector<Protocol> rows = {Ucu(32, {16.8, 1.8, 4.0, 5.1, 5.5}, {0, 130, 255, 370, 275}),
                                  Ucu(64, {18.1, 3.4, 4.8, 5.8, 9.5}, {0, 170, 270, 385, 400}),
                                  AbcFig1(),
                                  AbcTable6(),
                                  LatteFig2(Way::kCausal),
                                  LatteFig2(Way::kBidirectional),
                                  LatteFig4(),
                                  ConvLuna()};
    for (Protocol& p : WholeModelProtocols()) rows.push_back(std::move(p));
    return rows;
  }();
  return all;
}

}  // namespace cistern::bench
