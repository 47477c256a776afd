#include "cistern/tasks/copy_task.h"

namespace cistern {

Fields CopyTask::Describe(Options& o) {
  Fields f;
  DescribeRows(f, o, "numbers of tokens to be copied; each training step and each row has one");
  f.Add("symbols", &o.symbols, "different tokens among them", {2, 1 << 20});
  return f;
}

const TaskInfo& copy_task() {
  static const TaskInfo info = [] {
    TaskInfo t;
    t.name = "copy";
    t.summary =
        "copying: give random tokens again, after a distance; how many a memory holds (generated)";
    t.models = {"decoder_lm"};
    t.metrics = {CopyTask::AccuracyMetric()};
    t.defaults = CopyTask::MemoryDefaults();
    t.mechanisms = CopyTask::MemoryMechanisms();
    BindTask<CopyTask>(t);
    return t;
  }();
  return info;
}

CopyTask::CopyTask(const Options& options, const std::string&)
    : GeneratedRowsTask("tokens to copy", options), symbols_(options.symbols) {}

GeneratedRow CopyTask::MakeRow(Random& random, int64_t size) const {
  const int64_t blank = symbols_, go = symbols_ + 1;
  GeneratedRow row;
  for (int64_t i = 0; i < size; ++i) row.ids.push_back(random.Below(symbols_));
  const std::vector<int64_t> text = row.ids;
  row.ids.insert(row.ids.end(), size_t(distance()), blank);
  row.targets.assign(row.ids.size(), -100);
  row.ids.push_back(go);
  row.ids.insert(row.ids.end(), text.begin(), text.end() - 1);
  row.targets.insert(row.targets.end(), text.begin(), text.end());
  return row;
}

}  // namespace cistern
