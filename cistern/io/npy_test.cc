#include "cistern/io/npy.h"

#include <gtest/gtest.h>

#include "cistern/io/atomic_file.h"
#include "cistern/io/test_folder.h"

namespace cistern {
namespace {

std::string FileOf(std::string header, const std::string& data) {
  return std::string("\x93NUMPY\x01\x00", 8) + char(header.size()) + '\0' + header + data;
}
std::string ParseError(const std::string& bytes) {
  return ErrorMessage([&] { ParseNpy(bytes, "a.npy"); });
}

TEST(Npy, RoundTrip) {
  TestFolder folder;
  const std::vector<float> x = {1, 2, 3, 4, 5, 6};
  WriteNpy(folder / "a.npy", {2, 3}, x.data());
  const NpyArray a = ReadNpy(folder / "a.npy");
  EXPECT_EQ(a.shape, (std::vector<int64_t>{2, 3}));
  EXPECT_EQ(std::vector<float>(a.data<float>(), a.data<float>() + a.size()), x);
  EXPECT_EQ(ErrorMessage([&] { a.data<double>(); }),
            (folder / "a.npy") + ": expected F64, it holds F32");
  const std::string bytes = ReadFile(folder / "a.npy");
  EXPECT_EQ(bytes.size(), 128u + 24u);
  EXPECT_EQ(bytes.substr(10, 60), "{'descr': '<f4', 'fortran_order': False, 'shape': (2, 3), } ");
  for (size_t n = 0; n < bytes.size(); ++n)
    EXPECT_NE(ParseError(bytes.substr(0, n)), "no error") << n;

  const int64_t one[1] = {7};
  WriteNpy(folder / "b.npy", {1}, one);
  EXPECT_EQ(ReadFile(folder / "b.npy").substr(10, 57),
            "{'descr': '<i8', 'fortran_order': False, 'shape': (1,), }");
  EXPECT_EQ(ReadNpy(folder / "b.npy").data<int64_t>()[0], 7);
  WriteNpy(folder / "c.npy", {}, one);
  EXPECT_TRUE(ReadNpy(folder / "c.npy").shape.empty());
  WriteNpy(folder / "d.npy", DType::kU8, {0, 3}, nullptr);
  EXPECT_EQ(ReadNpy(folder / "d.npy").size(), 0);
}

TEST(Npy, ErrorsNameThePlace) {
  EXPECT_EQ(
      ParseError("PK"),
      "a.npy: offset 0: not a .npy file (or a truncated one): expected \\x93NUMPY and a version");
  EXPECT_EQ(
      ParseError(FileOf("{'descr': '>f4', 'fortran_order': False, 'shape': ()}", ""))
          .rfind(
              "a.npy: header, offset 25: element type '>f4' is not supported; expected one of <f8",
              0),
      0u);
  EXPECT_EQ(
      ParseError(FileOf("{'descr': '<f4', 'fortran_order': True, 'shape': ()}", "")),
      "a.npy: header, offset 44: the array is in Fortran order; save numpy.ascontiguousarray(x)");
  EXPECT_EQ(ParseError(FileOf("{'descr': '<f4', 'fortran_order': False, 'shape': (2,)}", "1234")),
            "a.npy: offset 65: shape [2] of F32 needs 8 bytes, the file has 4");
  EXPECT_EQ(ParseError(FileOf("{'descr': '<f4'}", "")),
            "a.npy: header, offset 26: descr, fortran_order or shape is missing");
  EXPECT_EQ(ParseError(FileOf(
                "{'descr': '<f4', 'fortran_order': False, 'shape': (99999999999999999999,)}", "")),
            "a.npy: header, offset 79: shape: too large");
}

}  // namespace
}  // namespace cistern
