// Tables of rows: each row has a cell for each column, whatever the form, and the lines go up. The
// first byte chooses the form, the header and what happens to bad rows.
#include "cistern/io/table_reader.h"
#include "cistern/tasks/labelled_rows.h"
#include "fuzz/fuzz_input.h"

namespace cistern {
namespace {

void ReadTable(const std::string& path, const TableOptions& options) {
  TableReader table(path, options);
  int64_t line = 0, rows = 0;
  for (std::vector<std::string> cells; table.Next(&cells); ++rows) {
    if (cells.size() != table.columns().size() || table.line() < line) __builtin_trap();
    line = table.line();
  }
  if (table.skipped() > 0 && !options.skip_bad) __builtin_trap();
}

// What the columns are found to be can be read.
void ReadRows(const std::string& path, const TableOptions& options, bool numbers) {
  const RowColumns columns = FindColumns(path, {"", {}, numbers}, options);
  const auto rows = OpenRows(path, columns, options, true);
  for (LabelledRow row; rows->Next(&row);) {
    if (row.inputs.size() != columns.inputs.size()) __builtin_trap();
  }
}

}  // namespace
}  // namespace cistern

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace cistern;
  static FuzzFile files[] = {FuzzFile(".tsv"), FuzzFile(".csv"), FuzzFile(".jsonl"),
                             FuzzFile(".csv.gz"), FuzzFile(".tsv.xz")};
  if (size == 0) return 0;
  const uint8_t how = data[0];
  const std::string& path =
      files[how % 5].Holding(std::string_view(reinterpret_cast<const char*>(data) + 1, size - 1));
  TableOptions options;
  options.header = TableOptions::Header(how / 5 % 3);
  options.skip_bad = how / 15 % 2 == 1;
  FuzzOne(data, size, [&](std::string_view) { ReadTable(path, options); });
  return FuzzOne(data, size, [&](std::string_view) { ReadRows(path, options, how / 30 % 2 == 1); });
}
