#include "cistern/io/safetensors.h"

#include <gtest/gtest.h>

#include <cstring>

#include "cistern/io/atomic_file.h"
#include "cistern/io/test_folder.h"

namespace cistern {
namespace {

std::string FileOf(const std::string& header, size_t data_bytes) {
  const uint64_t n = header.size();
  return std::string(reinterpret_cast<const char*>(&n), 8) + header + std::string(data_bytes, '\1');
}

std::string ParseError(const std::string& bytes) {
  return ErrorMessage([&] { SafetensorsFile file(bytes, "m.st"); });
}

TEST(Safetensors, RoundTrip) {
  TestFolder folder;
  const std::string path = folder / "m.safetensors";
  const uint8_t bytes[3] = {1, 2, 3};
  const float floats[6] = {1, 2, 3, 4, 5, 6};
  const double number = 2.5;
  WriteSafetensors(path,
                   {{"b\"\n", DType::kU8, {3}, bytes, 3},
                    {"w", DType::kF32, {2, 3}, floats, 24},
                    {"none", DType::kBF16, {0, 4}, nullptr, 0},
                    {"d", DType::kF64, {}, &number, 8}},
                   {{"format", "pt"}, {"k", "\xc3\xa9"}});
  SafetensorsFile file(path);
  ASSERT_EQ(file.entries().size(), 4u);
  EXPECT_EQ(file.entries()[0].name, "d");
  EXPECT_EQ(file.metadata().at("k"), "\xc3\xa9");
  EXPECT_EQ(std::memcmp(file.Get("w").data, floats, 24), 0);
  EXPECT_EQ(file.Get("w").shape, (std::vector<int64_t>{2, 3}));
  EXPECT_EQ(file.Get("none").shape, (std::vector<int64_t>{0, 4}));
  EXPECT_EQ(*static_cast<const double*>(file.Get("d").data), 2.5);
  EXPECT_EQ(static_cast<const uint8_t*>(file.Find("b\"\n")->data)[2], 3);
  EXPECT_EQ(file.Find("x"), nullptr);
  EXPECT_EQ(ErrorMessage([&] { file.Get("dd"); }),
            path + ": unknown tensor 'dd'; did you mean 'd'?");
  for (const TensorEntry& entry : file.entries()) {
    EXPECT_EQ(reinterpret_cast<uintptr_t>(entry.data) % uintptr_t(DTypeBytes(entry.dtype)), 0u)
        << entry.name;
  }
  uint64_t header_bytes;
  std::memcpy(&header_bytes, ReadFile(path).data(), 8);
  EXPECT_EQ(header_bytes % 8, 0u);
}

TEST(Safetensors, Empty) {
  TestFolder folder;
  WriteSafetensors(folder / "e", {});
  EXPECT_TRUE(SafetensorsFile(folder / "e").entries().empty());
}

// All of the file counts: tensors, their names, types and shapes, and the other metadata.
TEST(Safetensors, EveryFlippedBitIsSeen) {
  TestFolder folder;
  const float x[4] = {1, 2, 3, 4};
  const int32_t y[2] = {5, 6};
  WriteSafetensors(folder / "m",
                   {{"a", DType::kF32, {2, 2}, x, 16},
                    {"b", DType::kI32, {2}, y, 8},
                    {"c", DType::kF32, {0}, x, 0}},
                   {{"format", "pt"}});
  const std::string whole = ReadFile(folder / "m");
  EXPECT_TRUE(SafetensorsFile(folder / "m").checked());
  EXPECT_EQ(SafetensorsFile(folder / "m").metadata().size(), 1u);
  int accepted = 0;
  for (size_t i = 0; i < whole.size(); ++i) {
    for (int bit = 0; bit < 8; ++bit) {
      std::string changed = whole;
      changed[i] = char(changed[i] ^ (1 << bit));
      try {
        // Without its checksum a file is as one of another program: the reader says so.
        if (SafetensorsFile(changed, "m").checked()) ++accepted;
      } catch (const Error& e) {
        EXPECT_EQ(std::string(e.what()).rfind("m", 0), 0u);
      }
    }
  }
  // Blanks behind the header, and the digits' case: none of the contents.
  EXPECT_LE(accepted, 8 * 3) << accepted;
}

TEST(Safetensors, ForeignFilesHaveNoChecksum) {
  const std::string bytes = FileOf(
      R"({"__metadata__":{"format":"pt"},"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}})", 1);
  const SafetensorsFile file(bytes, "m");
  EXPECT_FALSE(file.checked());
  const std::string wrong = FileOf(
      R"({"__metadata__":{"cistern.xxh64":"0123456789abcdef"},"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}})",
      1);
  const std::string message = ParseError(wrong);
  EXPECT_EQ(message.rfind("m.st: the contents do not fit their checksum (", 0), 0u) << message;
}

TEST(Safetensors, EveryTruncationIsAnError) {
  TestFolder folder;
  const float x[4] = {1, 2, 3, 4};
  WriteSafetensors(folder / "m", {{"a", DType::kF32, {4}, x, 16}});
  const std::string whole = ReadFile(folder / "m");
  for (size_t n = 0; n < whole.size(); ++n) {
    WriteFileAtomically(folder / "t", whole.substr(0, n));
    EXPECT_EQ(ErrorMessage([&] { SafetensorsFile file(folder / "t"); }).rfind(folder / "t", 0), 0u)
        << n;
  }
  EXPECT_NE(ParseError(whole + "x"), "no error");
}

TEST(Safetensors, UnalignedTensorsAreCopied) {
  const std::string bytes = FileOf(
      R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"b":{"dtype":"F64","shape":[1],"data_offsets":[1,9]}})",
      9);
  SafetensorsFile file(bytes, "m");
  EXPECT_EQ(reinterpret_cast<uintptr_t>(file.Get("b").data) % 8, 0u);
  EXPECT_EQ(std::memcmp(file.Get("b").data, bytes.data() + bytes.size() - 8, 8), 0);
}

TEST(Safetensors, ErrorsNameThePlace) {
  EXPECT_EQ(ParseError(""),
            "m.st: 0 bytes are too few for a safetensors file; it is empty or truncated");
  EXPECT_EQ(ParseError(std::string(8, '\xff')),
            "m.st: offset 0: header length 18446744073709551615 is over 100000000; this is not a "
            "safetensors file");
  EXPECT_EQ(ParseError(FileOf("{}", 0).substr(0, 9)),
            "m.st: offset 0: the header should have 2 bytes, the file has 1 after its length; it "
            "is truncated");
  EXPECT_EQ(ParseError(FileOf("{]", 0)).rfind("m.st (header):1:2: not valid JSON", 0), 0u)
      << ParseError(FileOf("{]", 0));
  EXPECT_EQ(ParseError(FileOf("[]", 0)), "m.st: the header is not a JSON object");
  EXPECT_EQ(ParseError(FileOf("{}", 3)),
            "m.st: the tensors end at byte 0 of the data, which has 3");
  const auto tensor = [](const std::string& dtype, const std::string& shape,
                         const std::string& offsets) {
    return ParseError(FileOf(
        R"({"a":{"dtype":)" + dtype + ",\"shape\":" + shape + ",\"data_offsets\":" + offsets + "}}",
        8));
  };
  EXPECT_EQ(tensor("\"F32\"", "[2]", "[0,8]"), "no error");
  EXPECT_EQ(tensor("\"F31\"", "[2]", "[0,8]")
                .rfind("m.st: tensor 'a': dtype is \"F31\"; expected one of F64, F32", 0),
            0u);
  EXPECT_EQ(tensor("\"F32\"", "[-2]", "[0,8]"),
            "m.st: tensor 'a': shape holds -2; expected whole numbers of at least 0");
  EXPECT_EQ(tensor("\"F32\"", "[3]", "[0,8]"),
            "m.st: tensor 'a': shape [3] of F32 needs 12 bytes, data_offsets give 8");
  EXPECT_EQ(tensor("\"F32\"", "[2]", "[8,16]"),
            "m.st: tensor 'a': data_offsets [8,16] leave the data, which has 8 bytes; the file is "
            "truncated or corrupt");
  EXPECT_EQ(tensor("\"F32\"", "[1]", "[4,8]"),
            "m.st: tensor 'a': data begins at 4, leaving a gap after 0");
  EXPECT_EQ(tensor("\"F32\"", "[4611686018427387904, 4]", "[0,8]"),
            "m.st: tensor 'a': shape [4611686018427387904,4] is too large");
  EXPECT_EQ(tensor("\"F32\"", "[2]", "[0]"),
            "m.st: tensor 'a': data_offsets is missing or not two whole numbers");
  const std::string a = R"("a":{"dtype":"U8","shape":[8],"data_offsets":[0,8]})";
  EXPECT_EQ(ParseError(FileOf("{" + a + "," + a + "}", 8)),
            "m.st (header): key 'a' is given twice in one object");
  EXPECT_EQ(
      ParseError(FileOf("{" + a + R"(,"b":{"dtype":"U8","shape":[4],"data_offsets":[4,8]}})", 8)),
      "m.st: tensor 'b': data begins at 4, inside the tensor that ends at 8");
  EXPECT_EQ(ParseError(FileOf(R"({"__metadata__":{"k":1}})", 0)),
            "m.st: __metadata__: 'k' is 1; expected a text");
}

TEST(Safetensors, WriteChecks) {
  TestFolder folder;
  const float x[4] = {};
  EXPECT_EQ(ErrorMessage([&] {
              WriteSafetensors("m", {{"a", DType::kF32, {3}, x, 16}});
            }),
            "m: tensor 'a': shape [3] of F32 does not have the 16 bytes given");
  EXPECT_NE(
      ErrorMessage([&] {
        WriteSafetensors("m", {{"a", DType::kF32, {4}, x, 16}, {"a", DType::kF32, {4}, x, 16}});
      }),
      "no error");
  EXPECT_EQ(ErrorMessage([&] {
              WriteSafetensors("m", {{"a\xff", DType::kF32, {4}, x, 16}});
            }),
            "m: 'a\xff' is not UTF-8");
  EXPECT_EQ(ErrorMessage([&] {
              WriteSafetensors("/dev/full", {{"a", DType::kF32, {4}, x, 16}});
            }),
            "cannot write /dev/full: No space left on device");
  EXPECT_EQ(ErrorMessage([&] { SafetensorsFile file(folder / "none"); }),
            "cannot read " + (folder / "none") + ": No such file or directory");
}

}  // namespace
}  // namespace cistern
