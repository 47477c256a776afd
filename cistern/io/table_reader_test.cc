#include "cistern/io/table_reader.h"

#include <gtest/gtest.h>
#include <lzma.h>
#include <zlib.h>

#include <fstream>

#include "cistern/base/error.h"
#include "cistern/io/test_folder.h"

namespace cistern {
namespace {

using Cells = std::vector<std::string>;

void WriteText(const std::string& path, const std::string& text) {
  std::ofstream(path, std::ios::binary) << text;
}

std::vector<Cells> ReadAll(TableReader& table) {
  std::vector<Cells> rows;
  for (Cells cells; table.Next(&cells);) rows.push_back(cells);
  return rows;
}

std::string Gzip(const std::string& text) {
  z_stream z{};
  deflateInit2(&z, 9, Z_DEFLATED, 15 + 16, 8, Z_DEFAULT_STRATEGY);
  std::string out(deflateBound(&z, text.size()) + 64, '\0');
  z.next_in = reinterpret_cast<Bytef*>(const_cast<char*>(text.data()));
  z.avail_in = uInt(text.size());
  z.next_out = reinterpret_cast<Bytef*>(out.data());
  z.avail_out = uInt(out.size());
  deflate(&z, Z_FINISH);
  out.resize(z.total_out);
  deflateEnd(&z);
  return out;
}

std::string Xz(const std::string& text) {
  std::string out(text.size() + 4096, '\0');
  size_t size = 0;
  EXPECT_EQ(lzma_easy_buffer_encode(6, LZMA_CHECK_CRC64, nullptr,
                                    reinterpret_cast<const uint8_t*>(text.data()), text.size(),
                                    reinterpret_cast<uint8_t*>(out.data()), &size, out.size()),
            LZMA_OK);
  out.resize(size);
  return out;
}

TEST(TableReader, TheSameRowsInEveryForm) {
  const TestFolder folder;
  WriteText(folder / "a.tsv", "text\tlabel\none two\tx\nthree\ty");
  WriteText(folder / "b.csv", "text,label\r\none two,x\r\n\"three\",y\r\n");
  WriteText(
      folder / "c.jsonl",
      "{\"text\": \"one two\", \"label\": \"x\"}\n\n{\"label\": \"y\", \"text\": \"three\"}\n");
  std::ifstream plain(folder / "a.tsv", std::ios::binary);
  const std::string text{std::istreambuf_iterator<char>(plain), {}};
  WriteText(folder / "d.tsv.gz", Gzip(text));
  WriteText(folder / "e.tsv.gz", Gzip(text.substr(0, 20)) + Gzip(text.substr(20)));
  WriteText(folder / "f.tsv.xz", Xz(text));
  for (const char* name : {"a.tsv", "b.csv", "c.jsonl", "d.tsv.gz", "e.tsv.gz", "f.tsv.xz"}) {
    TableReader table(folder / name);
    EXPECT_EQ(table.columns(), (Cells{"text", "label"})) << name;
    EXPECT_EQ(ReadAll(table), (std::vector<Cells>{{"one two", "x"}, {"three", "y"}})) << name;
  }
}

TEST(TableReader, QuotedCells) {
  const TestFolder folder;
  WriteText(folder / "q.csv", "a,b\n\"one, \"\"two\"\"\nthree\",4\n,\"\"\n");
  TableReader table(folder / "q.csv");
  EXPECT_EQ(ReadAll(table), (std::vector<Cells>{{"one, \"two\"\nthree", "4"}, {"", ""}}));
  EXPECT_EQ(table.line(), 4);
}

TEST(TableReader, Headers) {
  const TestFolder folder;
  WriteText(folder / "n.tsv", "1\tsome text\n0\tmore\n");
  TableReader none(folder / "n.tsv");
  EXPECT_EQ(none.columns(), (Cells{"1", "2"}));
  EXPECT_EQ(ReadAll(none).size(), 2u);
  TableOptions yes;
  yes.header = TableOptions::Header::kYes;
  TableReader forced(folder / "n.tsv", yes);
  EXPECT_EQ(forced.columns(), (Cells{"1", "some text"}));
  EXPECT_EQ(ReadAll(forced).size(), 1u);
  // pandas gives its index no name.
  WriteText(folder / "pandas.csv", ",text,label\n0,a,b\n1,c,d\n");
  TableReader pandas(folder / "pandas.csv");
  EXPECT_EQ(pandas.columns(), (Cells{"", "text", "label"}));
  EXPECT_EQ(ReadAll(pandas), (std::vector<Cells>{{"0", "a", "b"}, {"1", "c", "d"}}));
  WriteText(folder / "hole.tsv", "some text\t\nmore\tx\n");
  EXPECT_EQ(TableReader(folder / "hole.tsv").columns(), (Cells{"1", "2"}));
  WriteText(folder / "bom.csv",
            "\xef\xbb\xbf"
            "text,label\na,b\n");
  EXPECT_EQ(TableReader(folder / "bom.csv").columns()[0], "text");
  // Nor does it hide a quote, or belong to a cell where there is no header.
  WriteText(folder / "bom.csv", "\xef\xbb\xbf\"text, all\",label\na,b\n");
  EXPECT_EQ(TableReader(folder / "bom.csv").columns(), (Cells{"text, all", "label"}));
  WriteText(folder / "bom.csv", "\xef\xbb\xbfx,1\n\"\xef\xbb\xbfy\",2\n");
  TableReader marked(folder / "bom.csv");
  EXPECT_EQ(ReadAll(marked), (std::vector<Cells>{{"x", "1"}, {"\xef\xbb\xbfy", "2"}}));
}

TEST(TableReader, TextsInUtf16AreRefused) {
  using namespace std::string_literals;
  const TestFolder folder;
  for (const std::string& start : {"\xff\xfe\x61\0"s, "\xfe\xff\0\x61"s, "a\0"s}) {
    WriteText(folder / "u.tsv", start + "\n\0b\0\n"s);
    EXPECT_NE(ErrorMessage([&] {
                TableReader(folder / "u.tsv");
              }).find("u.tsv is UTF-16 or no text at all"),
              std::string::npos);
  }
}

TEST(TableReader, LongLinesAcrossPieces) {
  const TestFolder folder;
  std::string text = "text\tlabel\n";
  for (int i = 0; i < 50; ++i)
    text += std::string(size_t(i) * 5000, 'x') + "a\t" + std::to_string(i) + "\n";
  WriteText(folder / "long.tsv.gz", Gzip(text));
  TableReader table(folder / "long.tsv.gz");
  const auto rows = ReadAll(table);
  ASSERT_EQ(rows.size(), 50u);
  for (size_t i = 0; i < rows.size(); ++i) EXPECT_EQ(rows[i][0].size(), i * 5000 + 1);
}

TEST(TableReader, ErrorsNameFileAndLine) {
  const TestFolder folder;
  const auto message = [&](const std::string& name, const std::string& text) {
    WriteText(folder / name, text);
    return ErrorMessage([&] {
      TableReader table(folder / name);
      ReadAll(table);
    });
  };
  const auto expect = [](const std::string& said, const std::string& phrase) {
    EXPECT_NE(said.find(phrase), std::string::npos) << said;
  };
  expect(message("a.tsv", "x\ty\na\tb\nc\n"), "a.tsv:3: 1 cells, and 2 columns");
  expect(message("a.csv", "x,y\na,\"b\nc"), "a.csv:2: a quoted cell has no end");
  expect(message("a.csv", "x,y\na,\"b\"c\n"), "a.csv:2: text after the closing quote");
  expect(message("a.csv", "x,x\na,b\n"), "two columns are named 'x'");
  expect(message("a.jsonl", "{\"x\": 1}\n[2]\n"), "a.jsonl:2: expected an object");
  expect(message("a.jsonl", "{\"x\": 1}\n{\"x\": \n"), "a.jsonl:2");
  expect(message("a.jsonl", "{}\n{\"x\": 1}\n"), "a.jsonl:1: expected an object");
  expect(message("a.tsv", ""), "has no rows");
  expect(message("a.parquet", "x"), ".tsv, .csv or .jsonl");
  std::string packed = Gzip("x\ty\n" + std::string(1000, 'a') + "\tb\n");
  expect(message("cut.tsv.gz", packed.substr(0, packed.size() / 2)), "ends early");
  packed[packed.size() / 2] = char(packed[packed.size() / 2] ^ 0x55);
  EXPECT_FALSE(message("bad.tsv.gz", packed).empty());
  packed = Xz("x\ty\na\tb\n");
  expect(message("cut.tsv.xz", packed.substr(0, packed.size() - 9)), "xz data ends early");
  EXPECT_THROW(TableReader(folder / "none.tsv"), Error);
  TableOptions skip;
  skip.skip_bad = true;
  WriteText(folder / "s.tsv", "x\ty\na\tb\nc\nd\te\n");
  TableReader table(folder / "s.tsv", skip);
  EXPECT_EQ(ReadAll(table).size(), 2u);
  EXPECT_EQ(table.skipped(), 1);
  // The first row of JSON lines may be such a one; all that follows an open quote may not.
  WriteText(folder / "s.jsonl", "{\"x\": 1,\n{\"x\": 2}\n{\"x\": 3}\n");
  TableReader lines(folder / "s.jsonl", skip);
  EXPECT_EQ(ReadAll(lines).size(), 2u);
  EXPECT_EQ(lines.skipped(), 1);
  WriteText(folder / "s.csv", "x,y\na,\"b\nc,d\ne,f\n");
  expect(ErrorMessage([&] {
           TableReader open(folder / "s.csv", skip);
           ReadAll(open);
         }),
         "s.csv:2: a quoted cell has no end");
}

// An empty line is a row of a table of one column where others follow.
TEST(TableReader, EmptyCellsOfOneColumn) {
  const TestFolder folder;
  WriteText(folder / "one.csv", "\nx\n\n1\n\n\n\"2\n\n3\"\n4\n\n\n");
  TableReader one(folder / "one.csv");
  std::vector<std::string> cells, all;
  std::vector<int64_t> at;
  while (one.Next(&cells)) {
    ASSERT_EQ(cells.size(), 1u);
    all.push_back(cells[0]), at.push_back(one.line());
  }
  EXPECT_EQ(all, (std::vector<std::string>{"", "1", "", "", "2\n\n3", "4"}));
  EXPECT_EQ(at, (std::vector<int64_t>{3, 4, 5, 6, 7, 10}));
  WriteText(folder / "two.tsv", "x\ty\n\na\tb\n\nc\td\n");
  TableReader two(folder / "two.tsv");
  EXPECT_EQ(ReadAll(two).size(), 2u);
}

TEST(TableReader, IntegersOfJsonAreAsWritten) {
  const TestFolder folder;
  WriteText(folder / "a.jsonl",
            "{\"x\": 12345678901234567890123, \"y\": 1}\n"
            "{\"x\": 12345678901234567890124, \"y\": [-99999999999999999999]}\n"
            "{\"x\": -99999999999999999999, \"y\": 18446744073709551615}\n"
            "{\"x\": 1e22, \"y\": 2.50}\n");
  TableReader table(folder / "a.jsonl");
  const auto rows = ReadAll(table);
  ASSERT_EQ(rows.size(), 4u);
  EXPECT_EQ(rows[0], (Cells{"12345678901234567890123", "1"}));
  EXPECT_EQ(rows[1][0], "12345678901234567890124");
  EXPECT_EQ(rows[2], (Cells{"-99999999999999999999", "18446744073709551615"}));
  EXPECT_EQ(rows[3], (Cells{"1e+22", "2.5"}));
}

TEST(TableReader, FiniteNumbers) {
  const auto number = [](std::string_view text) {
    double value = 0;
    return ParseFinite(TrimmedCell(text), &value) ? std::optional(value) : std::nullopt;
  };
  EXPECT_EQ(number(" 2"), 2);
  EXPECT_EQ(number("2\t "), 2);
  EXPECT_EQ(number("+2.5e1"), 25);
  EXPECT_EQ(number("1e-310"), 1e-310);
  EXPECT_EQ(number("1e-400"), 0);
  EXPECT_EQ(number("-1e-400"), 0);
  for (const char* text : {"", " ", "1e400", "-1e400", "0x10", "nan", "inf", "2 3", "1e-400x"})
    EXPECT_EQ(number(text), std::nullopt) << text;
}

TEST(TableReader, KeysThatEveryRowNeeds) {
  const TestFolder folder;
  WriteText(folder / "a.jsonl", "{\"x\": 1, \"y\": 2}\n{\"x\": null}\n{\"y\": 3}\n{}\n");
  TableReader table(folder / "a.jsonl");
  table.Require(table.Column("x"));
  Cells cells;
  ASSERT_TRUE(table.Next(&cells) && table.Next(&cells));
  EXPECT_EQ(cells, (Cells{"", ""}));
  const std::string said = ErrorMessage([&] { table.Next(&cells); });
  EXPECT_NE(said.find("a.jsonl:3: the row has no 'x'"), std::string::npos) << said;
  TableOptions options;
  options.skip_bad = true;
  TableReader skipping(folder / "a.jsonl", options);
  skipping.Require(0);
  EXPECT_EQ(ReadAll(skipping).size(), 2u);
  EXPECT_EQ(skipping.skipped(), 2);
}

TEST(TableReader, KeysThatTheFirstRowLacks) {
  const TestFolder folder;
  WriteText(folder / "a.jsonl", "{\"x\": 1}\n{\"x\": 2, \"y\": 3}\n{\"x\": 4}\n");
  TableReader some(folder / "a.jsonl");
  EXPECT_EQ(ReadAll(some).size(), 3u);
  TableOptions options;
  options.all_columns = true;
  const std::string said = ErrorMessage([&] {
    TableReader all(folder / "a.jsonl", options);
    ReadAll(all);
  });
  EXPECT_NE(said.find("a.jsonl:2: the first row, whose keys are the columns, has no 'y'"),
            std::string::npos)
      << said;
}

}  // namespace
}  // namespace cistern
