#pragma once
// Labelled images as they are published: CIFAR-10's binary batches (Krizhevsky 2009) and the IDX
// files of MNIST and its kind (LeCun et al.; Fashion-MNIST), each also .gz or .xz. Readers hold
// the pixels, a byte for each, and nothing else; every Error names the file and the record.
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "cistern/io/byte_source.h"
#include "cistern/io/fields.h"

namespace cistern {

// What of a colour image is kept (spec 3.4).
enum class ImageColour {
  kGrey,           // TensorFlow's rgb_to_grayscale of bytes, as Long Range Arena calls it
  kGreyTruncated,  // the weighted sum, truncated: Latte's repository
  kRgb,
};
const EnumNames<ImageColour>& ImageColours();  // grey, grey_truncated, rgb

// floor(255.5 (0.2989 R + 0.5870 G + 0.1140 B) / 255), in float as TensorFlow computes it: bytes
// are scaled by 1/255, weighted, scaled by 255.5 and truncated.
uint8_t GreyOfTensorFlow(uint8_t r, uint8_t g, uint8_t b);
// floor(0.2989 R + 0.5870 G + 0.1140 B), exactly.
uint8_t GreyTruncated(uint8_t r, uint8_t g, uint8_t b);

struct ImageSet {
  int64_t height = 0, width = 0, channels = 0;
  std::vector<uint8_t> pixels;  // [n,height,width,channels]
  std::vector<uint8_t> labels;  // [n]

  int64_t size() const { return int64_t(labels.size()); }
  int64_t image_bytes() const { return height * width * channels; }
  std::span<const uint8_t> Image(int64_t i) const {
    return {pixels.data() + i * image_bytes(), size_t(image_bytes())};
  }
};

// Appends the records of a CIFAR-10 batch: 3,073 bytes each, the label 0 to 9, then 1,024 bytes of
// red, of green and of blue.
void ReadCifar(ByteSource& source, ImageColour colour, ImageSet* set);
// Appends the images of an IDX file of bytes [n,height,width], magic 00 00 08 03, and the labels
// [n] of another, magic 00 00 08 01; null: they are 0.
void ReadIdx(ByteSource& images, ByteSource* labels, ImageSet* set);

// The file of labels that belongs to a file of images: "...-images-idx3-ubyte.gz" to
// "...-labels-idx1-ubyte.gz". Error where the name is not such a one.
std::string IdxLabelsPath(const std::string& images);

struct ImageFiles {
  std::vector<std::string> train, test;  // batches, or files of images
  std::string names;                     // batches.meta.txt; empty: there is none
};
// What of a folder is which: data_batch_*.bin and test*.bin, or train-images* and t10k-images*,
// each also compressed. Error where there are none, and where one is there plain and compressed.
ImageFiles FindImages(const std::string& folder);
// Whether a folder or a file has such names.
bool LooksLikeImages(const std::string& path);

// The images of files of one kind, joined in their order. Error where sizes or colours differ,
// where a grey image is asked for its colours or for Latte's grey. Unless labelled, files of labels
// may be missing, and are not looked at: labels are 0.
ImageSet ReadImages(const std::vector<std::string>& files, ImageColour colour,
                    bool labelled = true);
// The images of one file, or of the folder's part.
ImageSet ReadImages(const std::string& path, bool test, ImageColour colour, bool labelled = true);

// XXH64 of sizes, pixels and labels.
uint64_t HashImages(const ImageSet& set);

}  // namespace cistern
