#include "cistern/tasks/evaluate.h"

#include "cistern/decode/eval_scope.h"

namespace cistern {

Evaluation Evaluate(const Task& task, Model& model, BatchReader& reader,
                    const EvalOptions& options) {
  const EvalScope scope(model);
  Evaluation out;
  int64_t batches = 0;
  while (true) {
    if (options.interrupted && *options.interrupted) {
      out.complete = false;
      break;
    }
    if (options.read.max_tokens > 0 && out.tokens >= options.read.max_tokens) break;
    const int64_t before = reader.done();
    const std::optional<Batch> batch = reader.Next();
    if (!batch) break;
    // By the reader, for a question's rows of a batch are several.
    if (options.whole_batches && reader.done() - before < options.read.rows) continue;
    if (batches++ % options.of == options.share)
      out.score.Merge(task.Measure(model, batch->To(model.options().device())));
    out.rows += batch->rows;
    out.tokens += batch->tokens;
    if (options.progress) options.progress(reader);
  }
  return out;
}

Evaluation Evaluate(const Task& task, Model& model, Split split, const EvalOptions& options) {
  const std::unique_ptr<BatchReader> reader = task.Read(split, options.read);
  return Evaluate(task, model, *reader, options);
}

}  // namespace cistern
