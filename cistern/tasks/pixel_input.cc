#include "cistern/tasks/pixel_input.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <array>

#include "cistern/base/error.h"

namespace cistern {
namespace {

constexpr int64_t kLevels = 256;

// What a byte x becomes: (x/255 - mean) / deviation, by channel (spec 3.4, 3.5, 4.7).
struct Normalisation {
  std::array<double, 3> mean, deviation;
};

Normalisation PixelNormalisation(PixelInput::Scale scale) {
  switch (scale) {
    case PixelInput::Scale::kUnit:
      return {{0, 0, 0}, {1, 1, 1}};
    case PixelInput::Scale::kHalf:
      return {{0.5, 0.5, 0.5}, {0.5, 0.5, 0.5}};
    case PixelInput::Scale::kConvLuna:
      return {{0.48, 0, 0}, {0.24, 1, 1}};
    case PixelInput::Scale::kUcu:
      return {{0.4914, 0.4822, 0.4465}, {0.2470, 0.2435, 0.2616}};
  }
  Fail("[tasks] a scale of pixels without constants");
}

const EnumNames<PixelInput::Scale>& PixelScales() {
  static const EnumNames<PixelInput::Scale> names = {{PixelInput::Scale::kUnit, "unit"},
                                                     {PixelInput::Scale::kHalf, "half"},
                                                     {PixelInput::Scale::kConvLuna, "conv_luna"},
                                                     {PixelInput::Scale::kUcu, "ucu"}};
  return names;
}

}  // namespace

void PixelInput::Describe(Fields* fields) {
  Fields& f = *fields;
  f.Add("input", &kind,
        "ids: a token for each byte of the image (0 to 255); values: a vector of real numbers for "
        "each pixel, through a linear map",
        {{Kind::kIds, "ids"}, {Kind::kValues, "values"}});
  f.Add("zero_is_padding", &zero_is_padding,
        "of ids: bytes of 0 are padding, as in Long Range Arena: the model does not see them, and "
        "the others keep their positions");
  f.Add("pad_to", &pad_to,
        "with zero_is_padding: rows of a batch are padded to its longest, or all to the image's "
        "length by its black bytes, at their own positions; matters where padding takes part "
        "(model.padding, model.pooling)",
        PadTos());
  f.Add("scale", &scale,
        "of values, (x/255 - mean) / deviation: unit 0, 1; half .5, .5 (Latte's Pathfinder, P000's "
        "code); conv_luna .48, .24 (P000's grey CIFAR); ucu CIFAR's own by colour (P002)",
        PixelScales());
  f.Add("patch", &patch,
        "of values: side of the squares of pixels that are one token each, as in a vision "
        "transformer",
        {1, 1024});
}

void PixelInput::Check() const {
  if (pad_to == PadTo::kLength && !zero_is_padding)
    FailUsage(
        "pad_to=length is of zero_is_padding=true; else all images are as long as each other");
  if (kind == Kind::kValues) {
    if (zero_is_padding)
      FailUsage("zero_is_padding=true is about ids; with input=values every pixel is seen");
    return;
  }
  const PixelInput unset;
  if (scale != unset.scale || patch != unset.patch)
    FailUsage("scale and patch are about real values; set input=values, or leave them out");
}

void PixelInput::CheckShape(const PixelShape& shape) const {
  if (shape.height % patch != 0 || shape.width % patch != 0)
    FailUsage("patch=", patch, " does not divide images of ", shape.height, " x ", shape.width,
              " pixels");
  if (scale == Scale::kUcu && shape.channels != 3)
    FailUsage("scale=ucu is for three colours, and the images have ", shape.channels,
              "; take colour=rgb or another scale");
  if (scale == Scale::kConvLuna && shape.channels != 1)
    FailUsage("scale=conv_luna is for grey images; take colour=grey, or scale=ucu or half");
}

int64_t PixelInput::Tokens(const PixelShape& shape) const {
  const int64_t pixels = shape.height * shape.width;
  return kind == Kind::kIds ? pixels * shape.channels : pixels / (patch * patch);
}

void PixelInput::Complete(const PixelShape& shape, ModelConfig* config) const {
  config->max_length = std::max(config->max_length, Tokens(shape));
  config->vocab_size = kind == Kind::kIds ? kLevels : 0;
  if (zero_is_padding) {
    CheckPadding(*config, pad_to);
    CheckGivenPositions(*config, "task.zero_is_padding=true");
  }
  if (kind == Kind::kIds) return;
  Json own = config->Own();
  own["input"] = "values";
  own["channels"] = shape.channels * patch * patch;
  config->own[config->kind] = own;
}

void PixelInput::AddImages(const std::vector<std::span<const uint8_t>>& images,
                           const PixelShape& shape, Batch* batch) const {
  const int64_t rows = int64_t(images.size()), tokens = Tokens(shape);
  if (kind == Kind::kValues) {
    const int64_t c = shape.channels, side = patch, across = shape.width / side,
                  width = c * side * side;
    const Normalisation by = PixelNormalisation(scale);
    const at::Tensor values = at::empty({rows, tokens, width}, at::kFloat);
    float* to = values.mutable_data_ptr<float>();
    for (const auto& image : images) {
      for (int64_t t = 0; t < tokens; ++t) {
        const int64_t top = t / across * side, left = t % across * side;
        for (int64_t y = top; y < top + side; ++y) {
          for (int64_t i = left * c; i < (left + side) * c; ++i) {
            const auto channel = size_t(i % c);
            *to++ = float((image[size_t(y * shape.width * c + i)] / 255.0 - by.mean[channel]) /
                          by.deviation[channel]);
          }
        }
      }
    }
    batch->rows = rows;
    batch->tokens = rows * tokens;
    batch->Add("values", values);
    batch->Add("lengths", at::full({rows}, tokens, at::kLong));
    return;
  }
  if (!zero_is_padding) return AddIds<uint8_t>(images, {}, batch);
  const bool whole = pad_to == PadTo::kLength;
  std::vector<std::vector<uint8_t>> seen(images.size());
  std::vector<std::vector<int32_t>> places(images.size());
  for (size_t r = 0; r < images.size(); ++r) {
    std::vector<int32_t> black;
    for (size_t i = 0; i < images[r].size(); ++i) {
      if (images[r][i] != 0) seen[r].push_back(images[r][i]);
      (images[r][i] != 0 ? places[r] : black).push_back(int32_t(i));
    }
    if (whole) places[r].insert(places[r].end(), black.begin(), black.end());
  }
  AddIds<uint8_t>({seen.begin(), seen.end()}, {pad_to, tokens}, batch);
  Batch positions;
  AddIds<int32_t>({places.begin(), places.end()}, {}, &positions);
  batch->Add("positions", positions["ids"]);
  if (!whole) batch->padded.push_back({"positions", "lengths"});
}

}  // namespace cistern
