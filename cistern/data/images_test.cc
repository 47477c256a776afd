// Images as they are published: CIFAR-10's batches and IDX files, whole, cut short and changed.
#include "cistern/data/images.h"

#include <gtest/gtest.h>
#include <zlib.h>

#include <filesystem>
#include <fstream>

#include "cistern/base/error.h"
#include "cistern/base/random.h"
#include "cistern/io/test_folder.h"

namespace cistern {
namespace {

void WriteBytes(const std::string& path, const std::string& bytes) {
  std::ofstream(path, std::ios::binary) << bytes;
}

void WriteGzip(const std::string& path, const std::string& bytes) {
  const gzFile file = gzopen(path.c_str(), "wb");
  ASSERT_EQ(gzwrite(file, bytes.data(), unsigned(bytes.size())), int(bytes.size()));
  gzclose(file);
}

std::string RandomBytes(size_t count, uint64_t seed) {
  Random random(seed);
  std::string bytes;
  for (size_t i = 0; i < count; ++i) bytes += char(random.Below(256));
  return bytes;
}

// Records of CIFAR-10, labels 0, 1, 2, ...
std::string Batch(int records, uint64_t seed) {
  std::string bytes;
  for (int i = 0; i < records; ++i) bytes += char(i % 10) + RandomBytes(3072, seed + uint64_t(i));
  return bytes;
}

std::string BigEndian(uint32_t n) { return {char(n >> 24), char(n >> 16), char(n >> 8), char(n)}; }

std::string IdxImages(uint32_t n, uint32_t height, uint32_t width) {
  return std::string("\0\0\x08\x03", 4) + BigEndian(n) + BigEndian(height) + BigEndian(width) +
         RandomBytes(size_t(n) * height * width, 5);
}

std::string IdxLabels(uint32_t n) {
  std::string bytes = std::string("\0\0\x08\x01", 4) + BigEndian(n);
  for (uint32_t i = 0; i < n; ++i) bytes += char(i % 3);
  return bytes;
}

void ExpectSays(const std::string& message, std::initializer_list<const char*> phrases) {
  for (const char* phrase : phrases)
    EXPECT_NE(message.find(phrase), std::string::npos) << message << "\n  lacks: " << phrase;
}

TEST(Images, CifarIsReadByColour) {
  const TestFolder folder;
  const std::string bytes = Batch(7, 1), path = folder / "data_batch_1.bin";
  WriteBytes(path, bytes);
  WriteGzip(path + ".gz", bytes);
  const ImageSet rgb = ReadImages(path + ".gz", false, ImageColour::kRgb),
                 grey = ReadImages(path, false, ImageColour::kGrey),
                 cut = ReadImages(path, false, ImageColour::kGreyTruncated);
  ASSERT_EQ(rgb.size(), 7);
  EXPECT_EQ(rgb.channels, 3);
  EXPECT_EQ(grey.image_bytes(), 1024);
  for (int64_t i = 0; i < 7; ++i) {
    const auto* record = reinterpret_cast<const uint8_t*>(bytes.data()) + i * 3073;
    EXPECT_EQ(rgb.labels[size_t(i)], record[0]);
    for (int64_t p = 0; p < 1024; ++p) {
      const int r = record[1 + p], g = record[1025 + p], b = record[2049 + p];
      const int64_t sum = 2989 * r + 5870 * g + 1140 * b;  // ten-thousandths
      EXPECT_EQ(rgb.Image(i)[size_t(3 * p)], r);
      EXPECT_EQ(rgb.Image(i)[size_t(3 * p + 1)], g);
      EXPECT_EQ(rgb.Image(i)[size_t(3 * p + 2)], b);
      EXPECT_EQ(cut.Image(i)[size_t(p)], sum / 10000);
      EXPECT_EQ(grey.Image(i)[size_t(p)], GreyOfTensorFlow(uint8_t(r), uint8_t(g), uint8_t(b)));
    }
  }
}

// Against exact arithmetic of TensorFlow's rule, over every third level of each colour: float
// rounding may move a value that lies on a whole number's edge, and no other.
TEST(Images, GreyIsTensorFlowsRule) {
  int64_t differ = 0, all = 0;
  for (int r = 0; r < 256; r += 3) {
    for (int g = 0; g < 256; g += 3) {
      for (int b = 0; b < 256; b += 3, ++all) {
        const int64_t sum = 2989 * r + 5870 * g + 1140 * b, product = sum * 511;
        const int got = GreyOfTensorFlow(uint8_t(r), uint8_t(g), uint8_t(b));
        if (got == product / 5100000) continue;
        ++differ;
        const int64_t edge = (product + 2550000) / 5100000 * 5100000;
        EXPECT_LT(std::abs(product - edge), 300) << r << " " << g << " " << b;  // 6e-5 of a level
      }
    }
  }
  EXPECT_LT(differ, all / 2000);
  EXPECT_EQ(GreyOfTensorFlow(255, 255, 255), 255);
  EXPECT_EQ(GreyTruncated(255, 255, 255), 254);  // the weights' sum is 0.9999
  EXPECT_EQ(GreyOfTensorFlow(0, 0, 0), 0);
}

TEST(Images, IdxFilesAndTheirLabels) {
  const TestFolder folder;
  const std::string images = IdxImages(6, 5, 4);
  WriteGzip(folder / "train-images-idx3-ubyte.gz", images);
  WriteGzip(folder / "train-labels-idx1-ubyte.gz", IdxLabels(6));
  WriteBytes(folder / "t10k-images-idx3-ubyte", IdxImages(2, 5, 4));
  WriteBytes(folder / "t10k-labels-idx1-ubyte", IdxLabels(2));
  EXPECT_TRUE(LooksLikeImages(folder.path()));
  const ImageSet train = ReadImages(folder.path(), false, ImageColour::kGrey);
  ASSERT_EQ(train.size(), 6);
  EXPECT_EQ(train.height, 5);
  EXPECT_EQ(train.width, 4);
  EXPECT_EQ(train.labels, (std::vector<uint8_t>{0, 1, 2, 0, 1, 2}));
  EXPECT_TRUE(std::equal(train.pixels.begin(), train.pixels.end(), images.begin() + 16,
                         [](uint8_t a, char b) { return a == uint8_t(b); }));
  EXPECT_EQ(ReadImages(folder.path(), true, ImageColour::kGrey).size(), 2);
  EXPECT_EQ(ReadImages(folder / "t10k-images-idx3-ubyte", false, ImageColour::kGrey).size(), 2);
  ExpectSays(ErrorMessage([&] { ReadImages(folder.path(), false, ImageColour::kRgb); }),
             {"colour=grey"});
  std::filesystem::remove(folder / "t10k-labels-idx1-ubyte");
  ExpectSays(ErrorMessage([&] { ReadImages(folder.path(), true, ImageColour::kGrey); }),
             {"t10k-images", "labels are missing", "t10k-labels-idx1-ubyte"});
  const ImageSet unlabelled = ReadImages(folder.path(), true, ImageColour::kGrey, false);
  EXPECT_EQ(unlabelled.labels, (std::vector<uint8_t>{0, 0}));
  EXPECT_EQ(unlabelled.pixels.size(), size_t{2 * 5 * 4});
}

// Read twice, images would be in the training part and in validation.
TEST(Images, APlainFileBesideItsCompressedOneIsRefused) {
  const TestFolder folder;
  const std::string bytes = Batch(3, 1);
  WriteBytes(folder / "data_batch_1.bin", bytes);
  WriteBytes(folder / "data_batch_1.bin-old.bin", bytes);
  WriteBytes(folder / "test_batch.bin", bytes);
  EXPECT_EQ(ReadImages(folder.path(), false, ImageColour::kGrey).size(), 6);
  WriteGzip(folder / "data_batch_1.bin.gz", bytes);
  ExpectSays(ErrorMessage([&] { ReadImages(folder.path(), false, ImageColour::kGrey); }),
             {"data_batch_1.bin and ", "data_batch_1.bin.gz would both be read"});
}

TEST(Images, ErrorsNameFileAndRecord) {
  const TestFolder folder;
  const std::string bin = folder / "data_batch_1.bin", images = folder / "train-images-idx3-ubyte",
                    labels = folder / "train-labels-idx1-ubyte";
  const auto cifar = [&](const std::string& bytes) {
    WriteBytes(bin, bytes);
    return ErrorMessage([&] { ReadImages(bin, false, ImageColour::kRgb); });
  };
  const std::string batch = Batch(3, 2);
  EXPECT_EQ(cifar(batch), "no error");
  ExpectSays(cifar(""), {"data_batch_1.bin", "empty", "3073"});
  ExpectSays(cifar(batch.substr(0, 3073 + 100)), {"record 2", "after 100 bytes", "3073"});
  std::string label = batch;
  label[2 * 3073] = 77;
  ExpectSays(cifar(label), {"record 3", "label 77", "0 to 9"});
  ExpectSays(ErrorMessage([&] { ReadImages(folder / "missing.bin", false, ImageColour::kRgb); }),
             {"missing.bin"});
  ExpectSays(ErrorMessage([&] { ReadImages(folder / "a.png", false, ImageColour::kRgb); }),
             {"a.png", "CIFAR-10", "idx3"});
  const auto idx = [&](const std::string& a, const std::string& b) {
    WriteBytes(images, a);
    WriteBytes(labels, b);
    return ErrorMessage([&] { ReadImages(images, false, ImageColour::kGrey); });
  };
  EXPECT_EQ(idx(IdxImages(4, 3, 3), IdxLabels(4)), "no error");
  ExpectSays(idx(IdxImages(4, 3, 3).substr(0, 3), IdxLabels(4)), {"images", "has 3 bytes"});
  ExpectSays(idx(IdxImages(4, 3, 3).substr(0, 13), IdxLabels(4)), {"header", "16 bytes"});
  ExpectSays(idx(IdxLabels(4), IdxLabels(4)), {"00 00 08 03", "00 00 08 01"});
  ExpectSays(idx(IdxImages(4, 3, 3), IdxLabels(5)), {"4 images", "5 labels"});
  ExpectSays(idx(IdxImages(4, 3, 3).substr(0, 16 + 20), IdxLabels(4)),
             {"record 3 of 4", "after 2 bytes", "expected 9"});
  ExpectSays(idx(IdxImages(4, 3, 3), IdxLabels(4).substr(0, 10)), {"labels", "label 3 of 4"});
  ExpectSays(idx(IdxImages(4, 3, 3) + "x", IdxLabels(4)), {"more bytes", "4 records"});
  ExpectSays(idx(IdxImages(4, 0, 3), IdxLabels(4)), {"0 x 3", "4096"});
  // A header that says more than there is costs no memory.
  ExpectSays(idx(std::string("\0\0\x08\x03", 4) + BigEndian(0xffffffff) + BigEndian(4096) +
                     BigEndian(4096),
                 std::string("\0\0\x08\x01", 4) + BigEndian(0xffffffff)),
             {"record 1", "ends after 0 bytes"});
}

// Cut anywhere, or with a byte changed anywhere, a file is read or is an Error: nothing else.
TEST(Images, TruncatedAndMutatedFiles) {
  const TestFolder folder;
  const std::string images = folder / "train-images-idx3-ubyte",
                    labels = folder / "train-labels-idx1-ubyte", bin = folder / "data_batch_1.bin";
  const std::string good = IdxImages(3, 4, 5), good_labels = IdxLabels(3);
  WriteBytes(labels, good_labels);
  for (size_t cut = 0; cut < good.size(); ++cut) {
    WriteBytes(images, good.substr(0, cut));
    EXPECT_NE(ErrorMessage([&] { ReadImages(images, false, ImageColour::kGrey); }), "no error")
        << cut;
  }
  Random random(9);
  int failed = 0;
  for (int trial = 0; trial < 300; ++trial) {
    std::string a = good, b = good_labels;
    a[size_t(random.Below(20))] = char(random.Below(256));
    b[size_t(random.Below(int64_t(b.size())))] = char(random.Below(256));
    WriteBytes(images, a);
    WriteBytes(labels, b);
    failed += ErrorMessage([&] { ReadImages(images, false, ImageColour::kGrey); }) != "no error";
  }
  EXPECT_GT(failed, 200);
  const std::string batch = Batch(2, 3);
  for (const size_t cut : {size_t{1}, size_t{3072}, size_t{3074}, batch.size() - 1}) {
    WriteBytes(bin, batch.substr(0, cut));
    EXPECT_NE(ErrorMessage([&] { ReadImages(bin, false, ImageColour::kGrey); }), "no error") << cut;
  }
  WriteGzip(bin + ".gz", batch);
  std::ifstream in(bin + ".gz", std::ios::binary);
  const std::string packed{std::istreambuf_iterator<char>(in), {}};
  WriteBytes(bin + ".gz", packed.substr(0, packed.size() / 2));
  ExpectSays(ErrorMessage([&] { ReadImages(bin + ".gz", false, ImageColour::kGrey); }),
             {"gzip", "ends early"});
}

}  // namespace
}  // namespace cistern
