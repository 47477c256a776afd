#pragma once
// How images become rows of tokens (spec 3.4, 3.5): the bytes of the pixels as ids, row by row (of
// a colour image red, green and blue of each pixel in turn), or real values, a vector of channels
// for each pixel or patch.
#include <span>
#include <string>
#include <vector>

#include "cistern/io/fields.h"
#include "cistern/models/config.h"
#include "cistern/tasks/row_batch.h"

namespace cistern {

struct PixelShape {
  int64_t height = 32, width = 32, channels = 1;
};

struct PixelInput {
  enum class Kind { kIds, kValues };
  enum class Scale { kUnit, kHalf, kConvLuna, kUcu };
  Kind kind = Kind::kIds;
  bool zero_is_padding = false;
  PadTo pad_to = PadTo::kLongest;
  Scale scale = Scale::kHalf;
  int64_t patch = 1;

  void Describe(Fields* fields);
  // UsageError where the options contradict each other, whatever the images are.
  void Check() const;
  // Or do not fit these images.
  void CheckShape(const PixelShape& shape) const;
  int64_t Tokens(const PixelShape& shape) const;
  // What ids of rows stand for, of a run's record; "": there are none.
  std::string Ids() const { return kind == Kind::kIds ? "pixels" : ""; }
  // Sets vocab_size, max_length and the encoder's input; how the map of values starts is the
  // model's own (EncoderClassifier::Options). UsageError as CheckPadding.
  void Complete(const PixelShape& shape, ModelConfig* config) const;
  // Adds what the model reads: ids [B,T] or values [B,T,C], lengths; with zero_is_padding positions
  // [B,T], too: of the bytes that are seen, and then, with pad_to=length, of the black ones. Images
  // are [height,width,channels] bytes.
  void AddImages(const std::vector<std::span<const uint8_t>>& images, const PixelShape& shape,
                 Batch* batch) const;
};

}  // namespace cistern
