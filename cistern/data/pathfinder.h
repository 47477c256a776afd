#pragma once
// Pathfinder (Linsley et al. 2018; Kim et al. 2020) with the settings of Long Range Arena (spec
// 3.5): two long dashed contours among short ones, and two discs, on the two ends of one contour
// (label 1) or on an end of each (label 0). Our own generator, with the rendering of the published
// images: the brightest pixel of an image is 255.
#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace cistern {

struct PathfinderOptions {
  int64_t size = 32;     // pixels on a side: 32, 64, 128, 256; 128 is Path-X
  int64_t contour = 14;  // dashes of the two contours: 6, 9, 14, of growing difficulty
};

// What Long Range Arena sets for a size.
struct PathfinderSettings {
  std::vector<int64_t> margins;  // clear pixels around a dash: one of these for each image
  int64_t padding, dash;         // pixels of the empty border; length of a dash
  double marker_radius, thickness;
  int64_t seed_distance;  // between the contours' first ends
  double continuity;      // the larger, the straighter
  int64_t distractor_dashes, distractors;
  double dash_contrast;  // brightness of a dash at its peak; a disc has 1
};
// UsageError for another size or contour.
PathfinderSettings SettingsOf(const PathfinderOptions& options);

// What is in an image. Coordinates are rows and columns of pixel centres.
struct PathfinderScene {
  struct Point {
    double y = 0, x = 0;
  };
  struct Dash {
    Point tail, head;
  };
  int label = 0;
  int64_t margin = 0;
  std::array<std::vector<Dash>, 2> contours;
  std::vector<std::vector<Dash>> distractors;
  std::array<Point, 2> discs;
};

// A function of the options, the seed and the number of the example alone (on machines whose
// sines and cosines agree). Where a contour finds no way on, its last dashes are drawn anew.
PathfinderScene MakePathfinderScene(const PathfinderOptions& options, uint64_t seed,
                                    int64_t example);

// Brightness of some dashes [size,size]: each is drawn at twice the size, resized by Lanczos'
// filter and scaled so that its peak is the contrast; overlaps take the maximum.
std::vector<float> DrawDashes(const PathfinderOptions& options,
                              const std::vector<PathfinderScene::Dash>& dashes);
std::vector<float> DrawDisc(const PathfinderOptions& options, PathfinderScene::Point centre);
// The image [size,size]: the maximum of all of it, stretched to 0..255.
std::vector<uint8_t> DrawPathfinder(const PathfinderOptions& options, const PathfinderScene& scene);

// Labelled images of one size, as a task reads them: from memory or, where there are many, from a
// packed file.
class PathfinderSet {
 public:
  virtual ~PathfinderSet() = default;
  virtual int64_t size() const = 0;  // images
  virtual int64_t side() const = 0;  // pixels
  virtual int Label(int64_t image) const = 0;
  // Its place in the file or, empty images counted, in the metadata, from 1.
  virtual int64_t Line(int64_t image) const { return image + 1; }
  // side^2 bytes to `out`; safe from any thread.
  virtual void Read(int64_t image, uint8_t* out) const = 0;
  virtual uint64_t Hash() const = 0;             // XXH64 of labels and pixels
  virtual int64_t skipped() const { return 0; }  // empty images that were passed over
};

using PathfinderProgress = std::function<void(int64_t done, int64_t total)>;

// Examples 0 .. count-1 of the seed, made by all threads, into a packed file, which appears only
// when it is complete: 64 bytes of header, a byte for each label, then the pixels.
void WritePackedPathfinder(const PathfinderOptions& options, uint64_t seed, int64_t count,
                           const std::string& path, const PathfinderProgress& progress = nullptr);
// The published layout: FOLDER/imgs/K/sample_I.png and FOLDER/metadata/K.npy, a line of text for
// each image: folder, file, number, label, continuity, dashes, dashes of a distractor, distractors,
// length of a dash, contrast. The metadata appear when all images are there: what a killed run left
// is no set, and is written over. UsageError where the folder has metadata.
void WritePathfinderFolder(const PathfinderOptions& options, uint64_t seed, int64_t count,
                           const std::string& folder, const PathfinderProgress& progress = nullptr);

// A packed file, read in place; the checksum of its header and its size are checked, that of its
// contents up to 1 GiB. Or a folder in the published layout, held in memory: column 3 of the
// metadata is the label, empty images are passed over. Errors name the file and the line.
std::unique_ptr<PathfinderSet> OpenPathfinder(const std::string& path,
                                              const PathfinderProgress& progress = nullptr);
// Whether a path is one of both.
bool LooksLikePathfinder(const std::string& path);

}  // namespace cistern
