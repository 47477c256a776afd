#include "cistern/data/images.h"

#include <algorithm>
#include <array>
#include <filesystem>
#include <optional>

#include "cistern/base/error.h"
#include "cistern/base/hash.h"

namespace cistern {
namespace fs = std::filesystem;
namespace {

constexpr int64_t kCifarSide = 32, kCifarPlane = kCifarSide * kCifarSide, kCifarClasses = 10;
constexpr int64_t kLargestSide = 4096;

std::string FileName(const std::string& path) { return fs::path(path).filename().string(); }

bool IsCifar(const std::string& path) { return WithoutCompression(path).ends_with(".bin"); }

bool IsIdxImages(const std::string& path) {
  const std::string name = FileName(path);
  return name.find("images") != name.npos && name.find("idx3") != name.npos;
}

std::string Hex(const uint8_t* bytes, size_t count) {
  constexpr char kDigits[] = "0123456789abcdef";
  std::string text;
  for (size_t i = 0; i < count; ++i) {
    if (i > 0) text += ' ';
    text += {kDigits[bytes[i] / 16], kDigits[bytes[i] % 16]};
  }
  return text;
}

// Dimensions of an IDX file of bytes.
std::vector<int64_t> ReadIdxHeader(ByteSource& source, size_t dimensions) {
  std::array<uint8_t, 4> magic{};
  const size_t got = source.Read(magic.data(), 4);
  const std::array<uint8_t, 4> want = {0, 0, 8, uint8_t(dimensions)};
  CISTERN_CHECK(got == 4 && magic == want, source.path(), ": expected an IDX file of bytes in ",
                dimensions, " dimensions, which begins with ", Hex(want.data(), 4), ", and it ",
                got < 4 ? StrCat("has ", got, " bytes") : "begins with " + Hex(magic.data(), 4));
  std::vector<int64_t> sizes;
  for (size_t d = 0; d < dimensions; ++d) {
    std::array<uint8_t, 4> size{};  // big-endian
    CISTERN_CHECK(source.Read(size.data(), 4) == 4, source.path(),
                  ": the file ends within its header of ", 4 + 4 * dimensions, " bytes");
    sizes.push_back(int64_t{size[0]} << 24 | int64_t{size[1]} << 16 | int64_t{size[2]} << 8 |
                    int64_t{size[3]});
  }
  return sizes;
}

void ExpectEnd(ByteSource& source, int64_t records) {
  uint8_t more;
  CISTERN_CHECK(source.Read(&more, 1) == 0, source.path(), ": more bytes follow the ", records,
                " records that its header says");
}

}  // namespace

const EnumNames<ImageColour>& ImageColours() {
  static const EnumNames<ImageColour> names = {{ImageColour::kGrey, "grey"},
                                               {ImageColour::kGreyTruncated, "grey_truncated"},
                                               {ImageColour::kRgb, "rgb"}};
  return names;
}

uint8_t GreyOfTensorFlow(uint8_t r, uint8_t g, uint8_t b) {
  constexpr float kIn = 1.0F / 255.0F, kOut = 255.5F;
  const float red = 0.2989F * (float(r) * kIn), green = 0.587F * (float(g) * kIn),
              blue = 0.114F * (float(b) * kIn);
  return uint8_t((red + green + blue) * kOut);
}

uint8_t GreyTruncated(uint8_t r, uint8_t g, uint8_t b) {
  return uint8_t((2989 * int{r} + 5870 * int{g} + 1140 * int{b}) / 10000);
}

void ReadCifar(ByteSource& source, ImageColour colour, ImageSet* set) {
  set->height = set->width = kCifarSide;
  set->channels = colour == ImageColour::kRgb ? 3 : 1;
  std::array<uint8_t, size_t(1 + 3 * kCifarPlane)> record;
  for (int64_t number = 1;; ++number) {
    const size_t got = source.Read(record.data(), record.size());
    if (got == 0) {
      CISTERN_CHECK(number > 1, source.path(), " is empty; expected records of ", record.size(),
                    " bytes");
      return;
    }
    CISTERN_CHECK(got == record.size(), source.path(), ": record ", number, " ends after ", got,
                  " bytes; expected ", record.size(), ": a label and 1,024 bytes of each colour");
    CISTERN_CHECK(record[0] < kCifarClasses, source.path(), ": record ", number, " has the label ",
                  int{record[0]}, "; expected 0 to 9, as in CIFAR-10");
    set->labels.push_back(record[0]);
    const uint8_t *red = record.data() + 1, *green = red + kCifarPlane, *blue = green + kCifarPlane;
    for (int64_t i = 0; i < kCifarPlane; ++i) {
      if (colour == ImageColour::kRgb) {
        set->pixels.insert(set->pixels.end(), {red[i], green[i], blue[i]});
      } else {
        set->pixels.push_back(colour == ImageColour::kGrey
                                  ? GreyOfTensorFlow(red[i], green[i], blue[i])
                                  : GreyTruncated(red[i], green[i], blue[i]));
      }
    }
  }
}

void ReadIdx(ByteSource& images, ByteSource* labels, ImageSet* set) {
  const std::vector<int64_t> sizes = ReadIdxHeader(images, 3);
  if (labels) {
    const std::vector<int64_t> count = ReadIdxHeader(*labels, 1);
    CISTERN_CHECK(sizes[0] == count[0], images.path(), " says that it has ", sizes[0],
                  " images, and ", labels->path(), " ", count[0], " labels");
  }
  CISTERN_CHECK(sizes[0] > 0, images.path(), " has no images");
  CISTERN_CHECK(sizes[1] >= 1 && sizes[2] >= 1 && std::max(sizes[1], sizes[2]) <= kLargestSide,
                images.path(), ": images of ", sizes[1], " x ", sizes[2], " pixels; expected 1 to ",
                kLargestSide, " on a side");
  CISTERN_CHECK(set->size() == 0 || (set->height == sizes[1] && set->width == sizes[2]),
                images.path(), ": images of ", sizes[1], " x ", sizes[2],
                " pixels; those before were ", set->height, " x ", set->width);
  set->height = sizes[1], set->width = sizes[2], set->channels = 1;
  std::vector<uint8_t> image(size_t(set->image_bytes()));
  for (int64_t number = 1; number <= sizes[0]; ++number) {  // memory follows what the files hold
    const size_t got = images.Read(image.data(), image.size());
    CISTERN_CHECK(got == image.size(), images.path(), ": record ", number, " of ", sizes[0],
                  " ends after ", got, " bytes; expected ", image.size());
    uint8_t label = 0;
    CISTERN_CHECK(!labels || labels->Read(&label, 1) == 1, labels->path(),
                  ": the file ends before label ", number, " of ", sizes[0]);
    set->pixels.insert(set->pixels.end(), image.begin(), image.end());
    set->labels.push_back(label);
  }
  ExpectEnd(images, sizes[0]);
  if (labels) ExpectEnd(*labels, sizes[0]);
}

std::string IdxLabelsPath(const std::string& images) {
  CISTERN_CHECK(IsIdxImages(images), images,
                ": expected a name such as train-images-idx3-ubyte, beside which the labels lie "
                "as train-labels-idx1-ubyte");
  std::string name = FileName(images);
  name.replace(name.find("images"), 6, "labels");
  name.replace(name.find("idx3"), 4, "idx1");
  const fs::path folder = fs::path(images).parent_path();
  for (const std::string& end : {std::string(), std::string(".gz"), std::string(".xz")}) {
    const std::string path = (folder / (WithoutCompression(name) + end)).string();
    std::error_code ignored;
    if (fs::exists(path, ignored)) return path;
  }
  Fail(images, ": its labels are missing; expected ", (folder / name).string());
}

ImageFiles FindImages(const std::string& folder) {
  ImageFiles found;
  std::error_code error;
  for (const auto& entry : fs::directory_iterator(folder, error)) {
    const std::string name = entry.path().filename().string(), path = entry.path().string();
    if (name == "batches.meta.txt") found.names = path;
    if (IsCifar(name) && name.starts_with("data_batch")) found.train.push_back(path);
    if (IsCifar(name) && name.starts_with("test")) found.test.push_back(path);
    if (IsIdxImages(name)) (name.starts_with("train") ? found.train : found.test).push_back(path);
  }
  CISTERN_CHECK(!error, "cannot read ", folder, ": ", error.message());
  CISTERN_CHECK(!found.train.empty() || !found.test.empty(), folder,
                ": no images in it; expected data_batch_1.bin and test_batch.bin (CIFAR-10), or "
                "train-images-idx3-ubyte and t10k-images-idx3-ubyte with their labels (MNIST), "
                "each also .gz or .xz");
  std::sort(found.train.begin(), found.train.end());
  std::sort(found.test.begin(), found.test.end());
  CheckNoTwins(found.train);
  CheckNoTwins(found.test);
  return found;
}

bool LooksLikeImages(const std::string& path) {
  std::error_code error;
  if (fs::is_directory(path, error)) {
    for (const auto& entry : fs::directory_iterator(path, error)) {
      const std::string name = entry.path().filename().string();
      if (IsIdxImages(name) || (IsCifar(name) && name.starts_with("data_batch"))) return true;
    }
    return false;
  }
  return IsCifar(path) || IsIdxImages(path);
}

ImageSet ReadImages(const std::vector<std::string>& files, ImageColour colour, bool labelled) {
  ImageSet set;
  for (const std::string& path : files) {
    CISTERN_CHECK(IsCifar(path) || IsIdxImages(path), path,
                  ": expected the name of a CIFAR-10 batch (.bin) or of an IDX file of images "
                  "(...-images-idx3-ubyte), each also .gz or .xz");
    CISTERN_CHECK(IsCifar(path) == IsCifar(files[0]), path, " and ", files[0],
                  " are not of one kind");
    ByteSource source(path);
    if (IsCifar(path)) {
      ReadCifar(source, colour, &set);
      continue;
    }
    if (colour != ImageColour::kGrey)
      FailUsage(path, " holds grey images; colour=", NameOf(colour, ImageColours()),
                " is for images that have colours, take colour=grey");
    std::optional<ByteSource> labels;
    if (labelled) labels.emplace(IdxLabelsPath(path));
    ReadIdx(source, labels ? &*labels : nullptr, &set);
  }
  return set;
}

ImageSet ReadImages(const std::string& path, bool test, ImageColour colour, bool labelled) {
  std::error_code ignored;
  if (!fs::is_directory(path, ignored)) return ReadImages(std::vector{path}, colour, labelled);
  const ImageFiles found = FindImages(path);
  const std::vector<std::string>& files = test ? found.test : found.train;
  CISTERN_CHECK(!files.empty(), path, ": no ", test ? "test" : "training", " images in it");
  return ReadImages(files, colour, labelled);
}

uint64_t HashImages(const ImageSet& set) {
  const std::array<int64_t, 4> shape = {set.size(), set.height, set.width, set.channels};
  const auto bytes = [](const void* data, size_t size) {
    return std::string_view(static_cast<const char*>(data), size);
  };
  uint64_t hash = XxHash64(bytes(shape.data(), sizeof shape), 0);
  hash = XxHash64(bytes(set.pixels.data(), set.pixels.size()), hash);
  return XxHash64(bytes(set.labels.data(), set.labels.size()), hash);
}

}  // namespace cistern
