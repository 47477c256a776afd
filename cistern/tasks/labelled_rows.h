#pragma once
// Rows of a text and a label from a user's own files: a table (io/table_reader.h) or a folder with
// a folder for each class.
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "cistern/io/table_reader.h"

namespace cistern {

// What of a table is what. Empty names are found by the look of the first rows.
struct RowColumns {
  std::string label;
  std::vector<std::string> inputs;  // one or two columns of text, or any count of numbers
  bool numbers = false;
};

struct LabelledRow {
  std::vector<std::string> inputs;
  std::string label;  // empty where the file has none
  int64_t line = 0;   // of the table; of a folder the number of the file, from 1
};

// A stream of rows. The label's column may be missing, and a label empty, unless `labelled`.
class RowSource {
 public:
  virtual ~RowSource() = default;
  virtual bool Next(LabelledRow* row) = 0;
  virtual int64_t skipped() const { return 0; }
  virtual int64_t done() const = 0;  // of total(), for progress
  virtual int64_t total() const = 0;
  const std::vector<std::string>& notes() const { return notes_; }  // of a folder: what is not read

 protected:
  std::vector<std::string> notes_;
};

// A folder that holds folders: each file in one of them, plain, .gz or .xz, is a row, its label the
// folder's name; hidden ones, folders in it and links that lead nowhere are left out with a note.
// Beside `pos` and `neg`, aclImdb's folder `unsup` of reviews without a label is left out.
bool IsClassFolder(const std::string& path);
// A folder that holds two such folders, `train` and `test`, as aclImdb does.
bool IsTrainTestFolder(const std::string& path);
// Whether a table or such a folder, by its name.
bool IsRows(const std::string& path);

// Errors name the file and the line. Of JSON lines a text must be there, a number may be missing.
std::unique_ptr<RowSource> OpenRows(const std::string& path, const RowColumns& columns,
                                    const TableOptions& options, bool labelled);

// The columns that are not named, from the first rows: the label is the column of such a name
// (label, class, target, category) or the only one besides the text; the text is the column with
// the longest cells (of numbers: all columns but the label). UsageError that lists the columns, and
// what to set, where that does not decide. A column without a name, pandas' index, is none of them.
// Folders have one input and no columns.
RowColumns FindColumns(const std::string& path, const RowColumns& named,
                       const TableOptions& options);

}  // namespace cistern
