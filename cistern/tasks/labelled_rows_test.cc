// Rows of a folder of classes.
#include "cistern/tasks/labelled_rows.h"

#include <gtest/gtest.h>
#include <sys/stat.h>
#include <zlib.h>

#include <filesystem>
#include <fstream>

#include "cistern/base/error.h"
#include "cistern/io/test_folder.h"

namespace cistern {
namespace {

void WriteText(const std::string& path, const std::string& text) {
  std::filesystem::create_directories(std::filesystem::path(path).parent_path());
  std::ofstream(path, std::ios::binary) << text;
}

void WriteGzip(const std::string& path, const std::string& text) {
  const gzFile file = gzopen(path.c_str(), "wb");
  ASSERT_EQ(gzwrite(file, text.data(), unsigned(text.size())), int(text.size()));
  gzclose(file);
}

using Pairs = std::vector<std::pair<std::string, std::string>>;

Pairs TextsAndLabels(const std::string& folder) {
  const auto rows = OpenRows(folder, {}, {}, true);
  Pairs all;
  for (LabelledRow row; rows->Next(&row);) {
    EXPECT_EQ(row.inputs.size(), 1u);
    all.emplace_back(row.inputs[0], row.label);
  }
  return all;
}

TEST(LabelledRows, HiddenFoldersAreNoClasses) {
  const TestFolder folder;
  WriteText(folder / "mail/ham/1.txt", "one");
  WriteText(folder / "mail/.ipynb_checkpoints/1.txt", "none");
  EXPECT_FALSE(IsClassFolder(folder / "mail"));
  WriteText(folder / "mail/spam/1.txt", "two");
  WriteText(folder / "mail/spam/.hidden", "none");
  EXPECT_TRUE(IsClassFolder(folder / "mail"));
  EXPECT_EQ(TextsAndLabels(folder / "mail"), (Pairs{{"one", "ham"}, {"two", "spam"}}));
}

TEST(LabelledRows, WhatIsNotReadOfAFolderIsNoted) {
  const TestFolder folder;
  const std::string mail = folder / "mail";
  WriteText(mail + "/ham/1.txt", "one");
  WriteText(mail + "/ham/more/2.txt", "none");
  WriteText(mail + "/spam/1.txt", "two");
  std::filesystem::create_symlink(mail + "/ham/1.txt", mail + "/spam/2.txt");
  std::filesystem::create_symlink("none", mail + "/spam/3.txt");
  std::filesystem::create_symlink("none", mail + "/third");
  EXPECT_EQ(TextsAndLabels(mail), (Pairs{{"one", "ham"}, {"two", "spam"}, {"one", "spam"}}));
  const std::vector<std::string> notes = OpenRows(mail, {}, {}, true)->notes();
  ASSERT_EQ(notes.size(), 2u);
  EXPECT_EQ(notes[0], "skipped 1 folder: " + mail + "/ham/more");
  EXPECT_NE(notes[1].find("skipped 2 broken links: "), std::string::npos) << notes[1];
  EXPECT_NE(notes[1].find(mail + "/spam/3.txt"), std::string::npos) << notes[1];
  EXPECT_NE(notes[1].find(mail + "/third"), std::string::npos) << notes[1];
}

TEST(LabelledRows, PandasIndexIsNoInput) {
  const TestFolder folder;
  WriteText(folder / "a.csv", ",said,spam\n0,some text,yes\n1,more,no\n");
  RowColumns found = FindColumns(folder / "a.csv", {}, {});
  EXPECT_EQ(found.inputs, (std::vector<std::string>{"said"}));
  EXPECT_EQ(found.label, "spam");
  WriteText(folder / "n.csv", ",x,label,y\n0,5,a,1\n1,6,b,2\n");
  found = FindColumns(folder / "n.csv", {"", {}, true}, {});
  EXPECT_EQ(found.inputs, (std::vector<std::string>{"x", "y"}));
}

TEST(LabelledRows, APipeIsRefused) {
  const TestFolder folder;
  ASSERT_EQ(mkfifo((folder / "a.tsv").c_str(), 0600), 0);  // whoever opens it waits
  EXPECT_EQ(ErrorMessage([&] { FindColumns(folder / "a.tsv", {}, {}); }),
            folder /
                "a.tsv is a pipe, and rows to train on are read several times; write them to "
                "a file, and give that");
}

TEST(LabelledRows, ATextIsThereANumberMayBeMissing) {
  const TestFolder folder;
  WriteText(folder / "a.jsonl", "{\"x\": \"1\", \"label\": \"a\"}\n{\"z\": \"2\"}\n");
  LabelledRow row;
  const auto texts = OpenRows(folder / "a.jsonl", {"label", {"x"}}, {}, false);
  ASSERT_TRUE(texts->Next(&row));
  const std::string said = ErrorMessage([&] { texts->Next(&row); });
  EXPECT_NE(said.find("a.jsonl:2: the row has no 'x'"), std::string::npos) << said;
  const auto numbers = OpenRows(folder / "a.jsonl", {"label", {"x"}, true}, {}, false);
  ASSERT_TRUE(numbers->Next(&row) && numbers->Next(&row));
  EXPECT_EQ(row.inputs, (std::vector<std::string>{""}));
}

TEST(LabelledRows, CompressedFilesAreTheirTexts) {
  const TestFolder folder;
  WriteText(folder / "mail/ham/1.txt", "one");
  WriteText(folder / "mail/ham/2.txt", "");
  WriteText(folder / "mail/spam/1.txt", "two");
  WriteGzip(folder / "mail/spam/2.txt.gz", "three");
  EXPECT_EQ(TextsAndLabels(folder / "mail"),
            (Pairs{{"one", "ham"}, {"", "ham"}, {"two", "spam"}, {"three", "spam"}}));
  WriteGzip(folder / "mail/spam/1.txt.gz", "two");
  const std::string said = ErrorMessage([&] { TextsAndLabels(folder / "mail"); });
  EXPECT_NE(said.find("spam/1.txt and "), std::string::npos) << said;
  EXPECT_NE(said.find("spam/1.txt.gz would both be read"), std::string::npos) << said;
}

}  // namespace
}  // namespace cistern
