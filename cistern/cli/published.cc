#include "cistern/cli/published.h"

#include <algorithm>
#include <charconv>
#include <cmath>

#include "cistern/base/error.h"
#include "cistern/base/format.h"

namespace cistern::cli {

Fields Published::Describe() {
  Fields f;
  const Json none = Json::object();
  f.Add("source", &source, "where the figures are printed: P004 Table 2").OmitWhen("");
  f.Add("row", &row, "what the source calls this experiment").OmitWhen("");
  f.Add("parameters", &parameters, "the size of the model as printed: 90313105, 246.9M")
      .OmitWhen("");
  f.Add("relative_to", &relative_to, "the file whose model has the size 1: base.toml").OmitWhen("");
  f.Add("results", &results, "metrics as printed: {accuracy = 40.18}").OmitWhen(none);
  f.Add("spread", &spread, "their standard deviations as printed").OmitWhen(none);
  f.Add("differences", &differences, "what this file does otherwise than the source, and why")
      .OmitWhen(Json::array());
  return f;
}

void Published::Validate(const TaskInfo& task) const {
  std::vector<std::string> metrics;
  for (const Metric& metric : task.metrics) metrics.push_back(metric.name);
  for (const Json* values : {&results, &spread}) {
    const std::string key = values == &results ? "published.results" : "published.spread";
    if (!values->is_object()) FailUsage(key, " must be a table of metrics and values");
    for (const auto& [name, value] : values->items()) {
      if (std::find(metrics.begin(), metrics.end(), name) == metrics.end())
        throw UsageError(UnknownName(key + ": metric of the task " + task.name, name, metrics));
      if (!value.is_number()) FailUsage(key, ".", name, " must be a number, not ", value.dump());
    }
  }
  if (!parameters.empty()) IsPrintedAs(0, parameters);
  if (!relative_to.empty() && parameters.empty())
    FailUsage("published.relative_to needs published.parameters, such as .95");
}

std::string Published::Line() const {
  if (results.empty()) return "";
  std::string text = source + (row.empty() ? "" : ", " + row) + ":";
  for (const auto& [name, value] : results.items()) {
    text += " " + name + " " + value.dump();
    if (spread.contains(name)) text += " +- " + spread[name].dump();
  }
  return text;
}

bool IsPrintedAs(double size, const std::string& text) {
  double value = 0;
  const char* end = text.data() + text.size();
  const auto [rest, error] = std::from_chars(text.data(), end, value);
  const std::string unit(rest, end);
  double scale = unit == "B" ? 1e9 : unit == "M" ? 1e6 : unit == "K" ? 1e3 : 1;
  if (error != std::errc() || !(value > 0) || (scale == 1 && !unit.empty()))
    FailUsage("published.parameters='", text, "' is not a size, such as 90313105 or 246.9M");
  const std::string number = text.substr(0, text.size() - unit.size());
  const size_t point = number.find('.');
  if (point != std::string::npos) {
    const double shift = std::pow(10.0, double(number.size() - point - 1));
    value *= shift, scale /= shift;
  }
  return std::llround(size / scale) == std::llround(value);
}

}  // namespace cistern::cli
