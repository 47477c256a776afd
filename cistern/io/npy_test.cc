#include "cistern/io/npy.h"

#include <gtest/gtest.h>

#include <chrono>
#include <cmath>
#include <cstring>
#include <filesystem>

#include "cistern/base/error.h"
#include "cistern/io/atomic_file.h"
#include "cistern/io/test_folder.h"

namespace cistern {
namespace {

class NpyTest : public ::testing::Test {
 protected:
  // A file of version 1 (or 2, 3) with this header and data.
  std::string File(const std::string& header, const std::string& data, char version = 1) {
    std::string text = "\x93NUMPY";
    text += version;
    text += '\0';
    for (int i = 0; i < (version == 1 ? 2 : 4); ++i) text += char(header.size() >> (8 * i) & 255);
    WriteFileAtomically(folder_ / "a.npy", text + header + data);
    return folder_ / "a.npy";
  }
  static std::string Header(const std::string& descr, const std::string& shape,
                            const std::string& fortran = "False") {
    return "{'descr': '" + descr + "', 'fortran_order': " + fortran + ", 'shape': " + shape +
           ", }          \n";
  }
  std::string Message(const std::string& header, const std::string& data, char version = 1) {
    return ErrorMessage([&] { NpyFile file(File(header, data, version)); });
  }
  static void Says(const std::string& message, const std::string& part) {
    EXPECT_NE(message.find(part), message.npos) << "no '" << part << "' in " << message;
  }
  TestFolder folder_;
};

template <class T>
std::string Raw(std::initializer_list<T> x) {
  std::string out(x.size() * sizeof(T), '\0');
  std::memcpy(out.data(), x.begin(), out.size());
  return out;
}

TEST_F(NpyTest, EveryTypeAndVersion) {
  const auto read = [&](const std::string& descr, const std::string& data, char version) {
    const NpyFile file(File(Header(descr, "(3,)"), data, version));
    EXPECT_EQ(file.shape(), (std::vector<int64_t>{3}));
    std::vector<double> out(3);
    file.Read(0, 3, out.data());
    double last = 0;
    file.Read(2, 1, &last);
    EXPECT_EQ(last, out[2]);
    return out;
  };
  using Doubles = std::vector<double>;
  EXPECT_EQ(read("<f4", Raw<float>({1.5f, -2, 3}), 1), (Doubles{1.5, -2, 3}));
  EXPECT_EQ(read("<f8", Raw<double>({.1, -2, 1e300}), 2), (Doubles{.1, -2, 1e300}));
  EXPECT_EQ(read("|i1", Raw<int8_t>({-128, 0, 127}), 3), (Doubles{-128, 0, 127}));
  EXPECT_EQ(read("<i2", Raw<int16_t>({-300, 0, 300}), 1), (Doubles{-300, 0, 300}));
  EXPECT_EQ(read("<i4", Raw<int32_t>({-70000, 0, 1}), 1), (Doubles{-70000, 0, 1}));
  EXPECT_EQ(read("<i8", Raw<int64_t>({-(int64_t{1} << 53), 0, 1}), 1),
            (Doubles{-9007199254740992.0, 0, 1}));
  EXPECT_EQ(read("|u1", Raw<uint8_t>({255, 0, 1}), 1), (Doubles{255, 0, 1}));
  EXPECT_EQ(read("<u2", Raw<uint16_t>({65535, 0, 1}), 1), (Doubles{65535, 0, 1}));
  EXPECT_EQ(read("<u4", Raw<uint32_t>({4000000000u, 0, 1}), 1), (Doubles{4e9, 0, 1}));
  EXPECT_EQ(read("|b1", Raw<uint8_t>({1, 0, 1}), 1), (Doubles{1, 0, 1}));
  EXPECT_EQ(NpyFile(File(Header("<f4", "(2, 0)"), "")).size(), 0);
  EXPECT_EQ(NpyFile(File(Header("<f4", "()"), Raw<float>({1}))).size(), 1);
  EXPECT_EQ(NpyFile(File("{\"shape\": (1,2), \"fortran_order\":False, \"descr\":\"<f4\"}",
                         Raw<float>({1, 2})))
                .ShapeText(),
            "(1, 2)");
}

TEST_F(NpyTest, RefusesWhatItDoesNotRead) {
  const std::string two = Raw<float>({1, 2});
  Says(Message(Header(">f4", "(2,)"), two), "big-endian");
  Says(Message(Header("<f4", "(1, 2)", "True"), two), "Fortran order");
  Says(Message(Header("<f2", "(4,)"), two), "type '<f2'");
  Says(Message(Header("<U2", "(1,)"), two), "numpy.unique");
  Says(Message(Header("<c8", "(1,)"), two), "type '<c8'");
  Says(Message(Header("|O", "(1,)"), two), "type '|O'");
  Says(Message("{'descr': [('a', '<f4')], 'fortran_order': False, 'shape': (2,), }", two),
       "arrays of records");
  Says(Message(Header("<f4", "(3,)"), two), "expected 12 bytes of data for the shape (3,), got 8");
  Says(Message(Header("<f4", "(1,)"), two), "expected 4 bytes");
  Says(Message(Header("<f4", "(281474976710655, 9)"), two), "too large");
  Says(Message(Header("<f4", "(-2,)"), two), "not a tuple of sizes");
  Says(Message(Header("<f4", "2"), two), "no '('");
  Says(Message(Header("<f4", "(2,)") + "x", two), "its header is not");
  Says(Message("{'descr': '<f4', 'descr': '<f4', 'shape': (2,), }", two), "twice");
  Says(Message("{'descr': '<f4', 'shape': (2,), }", two), "its header is not");
  Says(Message("{'order': '<f4', }", two), "the key 'order'");
  Says(Message(Header("<f4", "(2,)"), two, 4), "version 4");
  WriteFileAtomically(folder_ / "b.npy", "PK\x03\x04 something");
  Says(ErrorMessage([&] { NpyFile file(folder_ / "b.npy"); }), ".npz archive");
  WriteFileAtomically(folder_ / "b.npy", "\x93NUM");
  Says(ErrorMessage([&] { NpyFile file(folder_ / "b.npy"); }), "no .npy file");
  Says(ErrorMessage([&] { NpyFile file(folder_.path()); }), "is no file");
  Says(ErrorMessage([&] { NpyFile file(folder_ / "none.npy"); }), "cannot read");
}

TEST_F(NpyTest, RefusesAFileThatChangedInPlace) {
  const std::string path = File(Header("<f4", "(2,)"), Raw<float>({1, 2}));
  const NpyFile file(path);
  double number = 0;
  file.Read(1, 1, &number);
  EXPECT_EQ(number, 2);
  const auto modified = std::filesystem::last_write_time(path);
  std::filesystem::last_write_time(path, modified + std::chrono::seconds(1));
  Says(ErrorMessage([&] { file.Read(1, 1, &number); }), "a.npy changed after it was opened");
}

TEST_F(NpyTest, RefusesNumbersThatDoNotFit) {
  const NpyFile file(File(Header("<f8", "(3,)"), Raw<double>({1e39, NAN, -INFINITY})));
  double number = 0;
  file.Read(0, 1, &number);
  EXPECT_EQ(number, 1e39);
  file.Read(1, 1, &number);
  EXPECT_TRUE(std::isnan(number));
  Says(ErrorMessage([&] { file.Read(2, 1, &number); }), "number 3 is -inf, which is not finite");
  Says(ErrorMessage([&] { file.Read(2, 2, &number); }), "are asked for");
}

}  // namespace
}  // namespace cistern
