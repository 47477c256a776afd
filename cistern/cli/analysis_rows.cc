#include "cistern/cli/analysis_rows.h"

#include <algorithm>
#include <filesystem>

#include "cistern/base/error.h"
#include "cistern/base/interrupt.h"
#include "cistern/base/progress.h"
#include "cistern/text/tokenizer.h"

namespace cistern::cli {
namespace {

// What token ids stand for, where the model reads text.
std::function<std::string(int64_t)> TokenTexts(const RunFolder& run) {
  const std::string path = run.folder + "/tokenizer.json";
  if (!std::filesystem::exists(path)) return nullptr;
  const std::shared_ptr<const Tokenizer> tokenizer = LoadTokenizer(path);
  // Bytes may be counted from 1, with 0 for padding.
  RunFolder copy = run;
  const Json options = copy.options.Write();
  const bool shifted = options.contains(run.options.kind) &&
                       options[run.options.kind].value("byte_ids", std::string()) == "shifted";
  return [tokenizer, shifted](int64_t id) {
    id -= shifted ? 1 : 0;
    if (id < 0) return std::string("<pad>");
    if (id >= tokenizer->vocab_size()) return std::string("<mask>");
    return std::string(tokenizer->Bytes(int32_t(id)));
  };
}

}  // namespace

AnalysisContext ContextOf(const RunFolder& run, const std::string& dtype, uint64_t seed) {
  AnalysisContext context;
  context.model = LoadRunModel(run, dtype);
  context.config = run.config;
  context.token = TokenTexts(run);
  context.seed = seed;
  context.task = run.options.kind;
  return context;
}

RowsDone AddRows(const AnalysisRows& c, const RunFolder& run, const AnalysisContext& context,
                 const std::vector<std::unique_ptr<Analysis>>& analyses,
                 const LeaveOut& leave_out) {
  RowsDone done;
  std::vector<Analysis*> left;
  for (const auto& analysis : analyses) left.push_back(analysis.get());
  const auto none_left = [&] {
    return std::all_of(left.begin(), left.end(), [](const Analysis* a) { return a == nullptr; });
  };
  const bool labelled = !run.config.info().classifies;
  ReadOptions read{c.batch > 0 ? c.batch : 8, 0, c.length};
  if (c.length == 0 && !run.recorded) {
    const LayerStack reads = run.config.Stack(run.config.info().forms[0]);
    read.length = std::min<int64_t>(reads.options().max_length, 1024);
  }
  if (c.rows > 0) read.rows = std::min(read.rows, c.rows);
  ProgressBar bar({.total = c.rows, .label = "analyze", .unit = "rows"});
  std::vector<std::string> paths = c.data;
  if (paths.empty()) paths.push_back("");
  for (const std::string& path : paths) {
    if ((c.rows > 0 && done.rows >= c.rows) || none_left()) break;
    const auto reader = path.empty() ? run.task->Read(c.split == "train"   ? Split::kTrain
                                                      : c.split == "valid" ? Split::kValid
                                                                           : Split::kTest,
                                                      read)
                                     : run.task->ReadFile(path, labelled, read);
    if (c.length > 0 && !reader->Facts().contains("length"))
      FailUsage("--length is of blocks of text, and the rows of the task ", run.options.kind,
                " have lengths of their own; leave it out");
    done.facts.update(reader->Facts());
    while ((c.rows == 0 || done.rows < c.rows) && !none_left()) {
      if (Interrupted()) {
        done.complete = false;
        return done;
      }
      std::optional<Batch> batch = reader->Next();
      if (!batch) break;
      if (c.rows > 0 && done.rows + batch->rows > c.rows)
        batch = batch->Rows(0, c.rows - done.rows);
      const Batch there = batch->To(context.model->options().device());
      const at::NoGradGuard no_grad;
      const std::vector<CapturedLayer> layers = RunLayers(*context.model, there);
      for (size_t i = 0; i < left.size(); ++i) {
        if (left[i] == nullptr) continue;
        try {
          left[i]->Add(there, layers);
        } catch (const Error& e) {
          bar.Clear();
          if (!leave_out || !leave_out(i, e)) throw;
          left[i] = nullptr;
        }
      }
      done.rows += batch->rows;
      bar.Update(done.rows);
    }
    bar.Clear();
    NoteSkipped(*reader, path.empty() ? c.split : path);
  }
  bar.Finish();
  return done;
}

std::vector<std::string> RecommendedReuse(const std::string& folder, double threshold) {
  const RunFolder run = OpenRun(folder);
  const AnalysisInfo& similarity = FindAnalysis("similarity");
  if (const std::string refusal = similarity.refusal(run.config); !refusal.empty())
    FailUsage("reuse:recommended does not fit ", folder, ": ", refusal);
  for (const Form form : run.config.info().forms) {
    const LayerStack stack = run.config.Stack(form);
    for (int64_t l = 0; l < stack.layers(); ++l) {
      if (stack.Mechanism(l) != "softmax")
        FailUsage(
            "reuse:recommended: a Reuse model copies scores of exact softmax, and a layer of ",
            folder, " has ", stack.Mechanism(l),
            "; start from a model with model.attention=softmax");
      if (!stack.Alike(0, l))
        FailUsage(
            "reuse:recommended: all layers of a Reuse model share their options, and layer ", l + 1,
            " of ", folder,
            " has other options of softmax than layer 1; start from a model whose layers have "
            "the same");
    }
  }
  if (!run.recorded)
    FailUsage(folder, " has no experiment.json, which would name its data; cistern analyze ",
              folder, " DATA --of similarity prints the settings to give");
  run.Prepare();
  Json options = Json::object();
  if (threshold >= 0) options["threshold"] = threshold;
  const AnalysisContext context = ContextOf(run, "float32", 1);
  std::vector<std::unique_ptr<Analysis>> analyses;
  analyses.push_back(similarity.make(options, context));
  AnalysisRows rows;
  rows.split = "valid";
  const RowsDone done = AddRows(rows, run, context, analyses);
  CISTERN_CHECK(done.complete, "interrupted while the heads of ", folder, " were compared");
  const Figures figures = analyses[0]->Report();
  const Json& facts = figures.facts();
  if (!facts.contains("reuse_settings"))
    FailUsage("reuse:recommended: no head of ", folder,
              " is like one of the layer before; a lower similarity copies what is less alike: "
              "model.attention=reuse:recommended:0.5");
  std::vector<std::string> settings;
  const std::string text = facts["reuse_settings"].get<std::string>();
  const std::string flag = "--set ";
  for (size_t begin = text.find(flag); begin != std::string::npos;) {
    const size_t next = text.find(" " + flag, begin);
    settings.push_back(text.substr(begin + flag.size(), next == std::string::npos
                                                            ? std::string::npos
                                                            : next - begin - flag.size()));
    begin = next == std::string::npos ? next : next + 1;
  }
  return settings;
}

}  // namespace cistern::cli
