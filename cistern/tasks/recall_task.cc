#include "cistern/tasks/recall_task.h"

#include <algorithm>
#include <numeric>

#include "cistern/base/error.h"

namespace cistern {

Fields RecallTask::Describe(Options& o) {
  Fields f;
  DescribeRows(f, o, "numbers of pairs; each training step and each row has one");
  f.Add("keys", &o.keys, "different keys", {1, 1 << 20});
  f.Add("values", &o.values, "different values", {2, 1 << 20});
  f.Add("queries", &o.queries, "keys that are asked for in a row; 0: all of its pairs",
        {0, 1 << 20});
  return f;
}

const TaskInfo& recall_task() {
  static const TaskInfo info = [] {
    TaskInfo t;
    t.name = "recall";
    t.summary =
        "associative recall: the value of a key among many pairs; how many a memory holds "
        "(generated)";
    t.models = {"decoder_lm"};
    t.metrics = {RecallTask::AccuracyMetric()};
    t.defaults = RecallTask::MemoryDefaults();
    t.mechanisms = RecallTask::MemoryMechanisms();
    BindTask<RecallTask>(t);
    return t;
  }();
  return info;
}

RecallTask::RecallTask(const Options& options, const std::string&)
    : GeneratedRowsTask("pairs", options),
      keys_(options.keys),
      values_(options.values),
      queries_(options.queries) {
  const int64_t most = *std::max_element(options.sizes.begin(), options.sizes.end());
  if (most > options.keys)
    FailUsage("task.recall: sizes has ", most, " pairs and there are keys=", options.keys,
              ", each of which comes once in a row; use keys=", most, " or more");
}

int64_t RecallTask::Queries(int64_t size) const {
  return queries_ > 0 ? std::min(queries_, size) : size;
}

GeneratedRow RecallTask::MakeRow(Random& random, int64_t size) const {
  const int64_t blank = keys_ + values_;
  std::vector<int64_t> keys(static_cast<size_t>(keys_)), values;
  std::iota(keys.begin(), keys.end(), 0);
  const auto shuffle_first = [&](std::vector<int64_t>& all, int64_t count) {
    for (int64_t i = 0; i < count; ++i)
      std::swap(all[size_t(i)], all[size_t(i + random.Below(int64_t(all.size()) - i))]);
  };
  shuffle_first(keys, size);
  GeneratedRow row;
  for (int64_t i = 0; i < size; ++i) {
    values.push_back(keys_ + random.Below(values_));
    row.ids.push_back(keys[size_t(i)]);
    row.ids.push_back(values.back());
  }
  row.ids.insert(row.ids.end(), size_t(distance()), blank);
  row.targets.assign(row.ids.size(), -100);
  std::vector<int64_t> order(static_cast<size_t>(size));
  std::iota(order.begin(), order.end(), 0);
  shuffle_first(order, Queries(size));
  for (int64_t i = 0; i < Queries(size); ++i) {
    const auto pair = size_t(order[size_t(i)]);
    if (i > 0) row.targets.push_back(-100);
    row.ids.push_back(keys[pair]);
    row.targets.push_back(values[pair]);
    if (i + 1 < Queries(size)) row.ids.push_back(values[pair]);
  }
  return row;
}

}  // namespace cistern
