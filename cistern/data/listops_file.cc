#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <string_view>

#include "cistern/base/error.h"
#include "cistern/base/hash.h"
#include "cistern/data/interruptible.h"
#include "cistern/data/listops.h"
#include "cistern/data/made_folder.h"
#include "cistern/io/atomic_file.h"
#include "cistern/io/file_lock.h"

namespace cistern {
namespace {

constexpr const char* kListOpsNames[] = {"<pad>", "0",    "1",   "2", "3",        "4",
                                         "5",     "6",    "7",   "8", "9",        "[MIN",
                                         "[MAX",  "[MED", "[SM", "]", "<unknown>"};
constexpr char kListOpsSums[] = "xxh64sums";      // as the program xxh64sum writes them
constexpr char kListOpsUnfinished[] = "listops";  // the folder of files that are being written
constexpr const char* kListOpsFiles[] = {"basic_train.tsv", "basic_val.tsv", "basic_test.tsv"};

uint8_t TokenOf(std::string_view word) {
  if (word.size() == 1 && word[0] >= '0' && word[0] <= '9')
    return uint8_t(kListOpsDigit0 + word[0] - '0');
  if (word == "]" || word == "X") return kListOpsClose;  // LRA's pipeline writes X
  for (uint8_t token = kListOpsMin; token <= kListOpsSm; ++token) {
    if (word == kListOpsNames[token]) return token;
  }
  return kListOpsUnknown;
}

std::string ListOpsSums(const std::string& folder) {
  std::string text;
  for (const char* name : kListOpsFiles)
    text += HexText(HashFile(folder + "/" + name)) + "  " + name + "\n";
  return text;
}

}  // namespace

std::string ListOpsText(std::span<const uint8_t> tokens) {
  // An operator with n arguments is opened by n + 1 parentheses; each argument and the bracket
  // close one.
  std::vector<int64_t> opened(tokens.size(), 0), stack;
  for (size_t i = 0; i < tokens.size(); ++i) {
    if (!stack.empty()) ++opened[stack.back()];
    if (tokens[i] >= kListOpsMin && tokens[i] <= kListOpsSm) stack.push_back(int64_t(i));
    if (tokens[i] == kListOpsClose) {
      CISTERN_CHECK(!stack.empty(), "listops: a bracket at token ", i, " closes nothing");
      stack.pop_back();
    }
  }
  CISTERN_CHECK(stack.empty(), "listops: the operator at token ", stack.back(), " is not closed");
  std::string text;
  int64_t depth = 0;
  for (size_t i = 0; i < tokens.size(); ++i) {
    if (i > 0) text += ' ';
    for (int64_t n = 0; n < opened[i]; ++n) text += "( ";
    text += kListOpsNames[std::min<uint8_t>(tokens[i], kListOpsUnknown)];
    if (opened[i] > 0) {
      ++depth;
      continue;
    }
    if (depth > 0) text += " )";
    if (tokens[i] == kListOpsClose && --depth > 0)
      text += " )";  // the list itself is an argument of the one around it
  }
  return text;
}

void WriteListOpsFile(const ListOpsSet& set, const std::string& path,
                      const std::function<void()>& each) {
  AtomicFile file(path);
  file.Write("Source\tTarget\n");
  for (int64_t i = 0; i < set.size(); ++i) {
    file.Write(StrCat(ListOpsText(set.Row(i)), '\t', int(set.labels[i]), '\n'));
    if (each) each();
  }
  file.Commit();
}

void CheckNoListOps(const std::string& folder) {
  std::error_code ignored;
  for (const char* name : kListOpsFiles) {
    if (std::filesystem::symlink_status(folder + "/" + name, ignored).type() !=
        std::filesystem::file_type::not_found)
      FailUsage(folder, " holds ", name, " already; name another folder");
  }
}

void WriteListOps(const ListOpsSplits& splits, const std::string& folder,
                  const ListOpsProgress& progress) {
  const MadeFolder made(folder);
  const FileLock lock(folder + "/lock", "the data set in " + folder);
  CheckNoListOps(folder);
  RemoveLeftovers(folder, kListOpsUnfinished);
  const int64_t total = splits.train.size() + splits.valid.size() + splits.test.size();
  int64_t done = 0;
  const auto each = [&] {
    if (++done % 500 != 0) return;
    InterruptibleData::Check();
    if (progress) progress(done, total);
  };
  const ListOpsSet* const sets[] = {&splits.train, &splits.valid, &splits.test};
  // All three take their places together, or none does.
  namespace fs = std::filesystem;
  const std::string fresh = TemporaryName(folder + "/" + kListOpsUnfinished) + "/";
  std::error_code error, ignored;
  int placed = 0;
  try {
    EnsureDirectory(fresh);
    for (int i = 0; i < 3; ++i) WriteListOpsFile(*sets[i], fresh + kListOpsFiles[i], each);
    InterruptibleData::Check();
    lock.Check();
    for (const char* name : kListOpsFiles) {
      const std::string path = folder + "/" + name;
      fs::rename(fresh + name, path, error);
      CISTERN_CHECK(!error, "cannot make ", path, ": ", error.message());
      ++placed;
    }
  } catch (...) {
    for (int i = 0; i < placed; ++i) fs::remove(folder + "/" + kListOpsFiles[i], ignored);
    fs::remove_all(fresh, ignored);
    throw;
  }
  fs::remove_all(fresh, ignored);
  SyncDirectory(folder);
  if (progress) progress(done, total);
}

ListOpsSet ReadListOps(const std::string& path, const ListOpsReadOptions& options) {
  std::error_code ignored;
  CISTERN_CHECK(!std::filesystem::is_directory(path, ignored), path,
                " is a folder; a file is expected");
  std::ifstream file(path, std::ios::binary);
  CISTERN_CHECK(file, "cannot open ", path, ": ", std::strerror(errno));
  ListOpsSet set = ReadListOps(file, path, options);
  CISTERN_CHECK(!file.bad(), "cannot read ", path, ": ", std::strerror(errno));
  return set;
}

ListOpsSet ReadListOps(std::istream& file, const std::string& path,
                       const ListOpsReadOptions& options) {
  ListOpsSet set;
  std::vector<uint8_t> row;
  std::string line;
  for (int64_t number = 1; std::getline(file, line); ++number) {
    const auto where = [&] { return StrCat(path, " line ", number, ": "); };
    if (!line.empty() && line.back() == '\r') line.pop_back();
    if (number == 1) {
      CISTERN_CHECK(line == "Source\tTarget" || (line == "Source" && !options.labelled), where(),
                    "expected the header \"Source<tab>Target\"",
                    options.labelled ? "" : ", or \"Source\" alone");
      continue;
    }
    if (line.empty()) continue;
    const size_t tab = line.find('\t');
    int label = 0;
    if (options.labelled) {
      CISTERN_CHECK(tab != line.npos && line.find('\t', tab + 1) == line.npos, where(),
                    "expected an expression, a tab and a label");
      CISTERN_CHECK(tab + 2 == line.size() && line[tab + 1] >= '0' && line[tab + 1] <= '9', where(),
                    "the label is not a digit: '", line.substr(tab + 1, 20), "'");
      label = line[tab + 1] - '0';
    }
    row.clear();
    const std::string_view source = std::string_view(line).substr(0, tab);
    for (size_t begin = 0, end; begin < source.size(); begin = end + 1) {
      end = std::min(source.find(' ', begin), source.size());
      const std::string_view word = source.substr(begin, end - begin);
      if (word.empty() || word == "(" || word == ")") continue;
      row.push_back(TokenOf(word));
      CISTERN_CHECK(!options.check || row.back() != kListOpsUnknown, where(), "unknown word '",
                    word.substr(0, 40), "'");
    }
    CISTERN_CHECK(!row.empty(), where(), "the expression is empty");
    if (options.check) {
      const int value = EvaluateListOps(row);
      CISTERN_CHECK(value >= 0, where(), "the expression is not well-formed");
      CISTERN_CHECK(value == label, where(), "the label is ", label,
                    ", but the expression's value is ", value);
    }
    if (options.max_length > 0 && int64_t(row.size()) > options.max_length)
      row.resize(options.max_length);
    set.Add(row, uint8_t(label));
  }
  CISTERN_CHECK(file.bad() || set.size() > 0, path, " holds no examples");
  return set;
}

ListOpsSplits OpenListOps(const ListOpsOptions& generate, uint64_t seed, const std::string& folder,
                          const ListOpsReadOptions& options, std::vector<std::string>* notes,
                          const ListOpsProgress& progress) {
  namespace fs = std::filesystem;
  const fs::path path(folder);
  const std::string parent = path.has_parent_path() ? path.parent_path().string() : ".",
                    sums = folder + "/" + kListOpsSums;
  EnsureDirectory(parent);
  const FileLock lock(folder + ".lock", folder, FileLock::Wait::kYes);
  RemoveLeftovers(parent, path.filename().string());
  if (fs::exists(folder)) {
    try {
      CISTERN_CHECK(ReadFile(sums) == ListOpsSums(folder), folder,
                    " is damaged: its files do not fit their checksums in ", kListOpsSums);
      return ReadListOpsFolder(folder, options);
    } catch (const Error& e) {
      notes->push_back(StrCat("made ", folder, " anew: ", e.what()));
    }
    std::error_code error;
    fs::remove_all(folder, error);
    CISTERN_CHECK(!error, "cannot remove ", folder, ": ", error.message());
  }
  const std::string fresh = TemporaryName(folder);
  std::error_code error;
  try {
    WriteListOps(GenerateListOps(generate, seed, progress), fresh);
    WriteFileAtomically(fresh + "/" + kListOpsSums, ListOpsSums(fresh));
    fs::rename(fresh, folder, error);
    CISTERN_CHECK(!error, "cannot make ", folder, ": ", error.message());
  } catch (...) {
    fs::remove_all(fresh, error);
    throw;
  }
  return ReadListOpsFolder(folder, options);
}

ListOpsSplits ReadListOpsFolder(const std::string& folder, const ListOpsReadOptions& options) {
  ListOpsSplits splits;
  ListOpsSet* const sets[] = {&splits.train, &splits.valid, &splits.test};
  for (int i = 0; i < 3; ++i) *sets[i] = ReadListOps(folder + "/" + kListOpsFiles[i], options);
  return splits;
}

}  // namespace cistern
