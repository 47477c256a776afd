// Pathfinder against the rules of its specification, by what is drawn: dashes are found again in
// the pixels, contours by flood filling. The generator's own geometry is used only to draw one
// contour at a time.
#include "cistern/data/pathfinder.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <deque>
#include <filesystem>
#include <fstream>
#include <set>

#include "cistern/base/error.h"
#include "cistern/base/parallel.h"
#include "cistern/base/random.h"
#include "cistern/io/atomic_file.h"
#include "cistern/io/png.h"
#include "cistern/io/test_folder.h"

namespace cistern {
namespace {

using Image = std::vector<float>;
using Pixel = std::pair<int64_t, int64_t>;

// Pixels of at least this share of the peak.
std::set<Pixel> Lit(const Image& image, int64_t size, float share = 0.5F) {
  const float peak = *std::max_element(image.begin(), image.end());
  std::set<Pixel> lit;
  for (int64_t i = 0; i < int64_t(image.size()); ++i) {
    if (image[size_t(i)] >= share * peak) lit.insert({i / size, i % size});
  }
  return lit;
}

// What can be reached from the pixels within `step` of (y, x), by steps of up to `step` pixels.
std::set<Pixel> Flood(const std::set<Pixel>& lit, double y, double x, double step) {
  std::set<Pixel> reached;
  std::deque<Pixel> next;
  const auto visit = [&](double cy, double cx) {
    for (const Pixel& p : lit) {
      if (std::hypot(double(p.first) - cy, double(p.second) - cx) <= step &&
          reached.insert(p).second)
        next.push_back(p);
    }
  };
  visit(y, x);
  while (!next.empty()) {
    const Pixel p = next.front();
    next.pop_front();
    visit(double(p.first), double(p.second));
  }
  return reached;
}

double Nearest(const std::set<Pixel>& pixels, double y, double x) {
  double least = 1e9;
  for (const Pixel& p : pixels)
    least = std::min(least, std::hypot(double(p.first) - y, double(p.second) - x));
  return least;
}

struct Setting {
  int64_t size, contour, dash;
  double thickness, marker, continuity;
  std::vector<int64_t> margins;
  int64_t padding, seed_distance, distractor_dashes, distractors;
  int dash_level, disc_level;  // of 255
};

// Spec 3.5's table, written out.
const std::vector<Setting>& Settings() {
  static const std::vector<Setting> all = {
      {32, 14, 2, 0.5, 1.5, 1.0, {1}, 1, 7, 4, 5, 255, 128},
      {32, 9, 2, 0.5, 1.5, 1.0, {1}, 1, 7, 3, 6, 255, 128},
      {32, 6, 2, 0.5, 1.5, 1.0, {1}, 1, 7, 2, 10, 255, 128},
      {64, 14, 5, 1.0, 2.5, 1.8, {1}, 1, 12, 4, 5, 204, 255},
      {128, 14, 5, 1.5, 3.0, 1.8, {2, 3}, 1, 20, 4, 8, 230, 255},
      {256, 9, 5, 2.0, 5.0, 1.8, {3}, 22, 27, 3, 10, 255, 255},
  };
  return all;
}

double Length(const PathfinderScene::Dash& d) {
  return std::hypot(d.head.y - d.tail.y, d.head.x - d.tail.x);
}

TEST(Pathfinder, ScenesKeepTheRules) {
  for (const Setting& s : Settings()) {
    const int count = s.size <= 64 ? 12 : 4;
    std::set<int64_t> margins;
    for (int example = 0; example < count; ++example) {
      const PathfinderOptions options = {s.size, s.contour};
      const PathfinderScene scene = MakePathfinderScene(options, 5, example);
      const std::string what = StrCat(s.size, "/", s.contour, " example ", example);
      margins.insert(scene.margin);
      EXPECT_TRUE(std::count(s.margins.begin(), s.margins.end(), scene.margin) == 1) << what;
      EXPECT_LE(int64_t(scene.distractors.size()), s.distractors) << what;
      EXPECT_GE(scene.distractors.size(), 1u) << what;
      const auto margin = double(scene.margin);
      for (int c = 0; c < 2; ++c) {
        const auto& dashes = scene.contours[size_t(c)];
        ASSERT_EQ(int64_t(dashes.size()), s.contour) << what;
        for (size_t i = 0; i < dashes.size(); ++i) {
          // The first head is rounded up to a pixel, in both directions.
          EXPECT_NEAR(Length(dashes[i]), double(s.dash), i == 0 ? 1.5 : 1e-9) << what << " " << i;
          if (i == 0) continue;
          const double gap = std::hypot(dashes[i].tail.y - dashes[i - 1].head.y,
                                        dashes[i].tail.x - dashes[i - 1].head.x);
          EXPECT_LE(gap, 2 * margin + 3) << what << " " << i;
          const double turn = std::abs(std::remainder(
              std::atan2(dashes[i].head.y - dashes[i].tail.y, dashes[i].head.x - dashes[i].tail.x) -
                  std::atan2(dashes[i - 1].head.y - dashes[i - 1].tail.y,
                             dashes[i - 1].head.x - dashes[i - 1].tail.x),
              2 * M_PI));
          // Beyond a quarter of the circle (times continuity) the weight is 0; the first dash's
          // own direction differs from the one that was drawn for it by its rounding.
          if (i > 1) {
            EXPECT_LT(s.continuity * turn, M_PI / 2 + 1e-6) << what << " " << i;
          }
        }
      }
      const auto &a = scene.contours[0][0].tail, &b = scene.contours[1][0].tail;
      EXPECT_NEAR(std::hypot(a.y - b.y, a.x - b.x), double(s.seed_distance), 0.75) << what;
      EXPECT_GE(std::min({a.y, a.x, double(s.size - 1) - a.y, double(s.size - 1) - a.x}),
                double(2 * s.seed_distance))
          << what;
      for (const auto& distractor : scene.distractors) {
        EXPECT_GE(distractor.size(), 1u) << what;
        EXPECT_LE(int64_t(distractor.size()), s.distractor_dashes) << what;
      }
    }
    if (s.margins.size() > 1) {
      for (int example = count; example < 40; ++example)
        margins.insert(MakePathfinderScene({s.size, s.contour}, 5, example).margin);
    }
    EXPECT_EQ(margins.size(), s.margins.size());
  }
}

TEST(Pathfinder, DiscsAreJoinedWhereTheLabelSaysSo) {
  for (const Setting& s : Settings()) {
    const int count = s.size == 32 ? 40 : s.size == 64 ? 12 : 3;
    int ones = 0;
    for (int example = 0; example < count; ++example) {
      const PathfinderOptions options = {s.size, s.contour};
      const PathfinderScene scene = MakePathfinderScene(options, 17, example);
      const std::string what = StrCat(s.size, "/", s.contour, " example ", example);
      ones += scene.label;
      const std::set<Pixel> contours[] = {Lit(DrawDashes(options, scene.contours[0]), s.size),
                                          Lit(DrawDashes(options, scene.contours[1]), s.size)};
      // A gap of 2 margin (and the rounding of the heads) is one step.
      const double step = 2 * double(scene.margin) + 2.5;
      const auto& [first, second] = scene.discs;
      EXPECT_GT(std::hypot(first.y - second.y, first.x - second.x), 1) << what;
      // The contour that the first disc lies on, all of it connected.
      const int own =
          Nearest(contours[0], first.y, first.x) < Nearest(contours[1], first.y, first.x) ? 0 : 1;
      EXPECT_LE(Nearest(contours[own], first.y, first.x), 1.0) << what;
      EXPECT_EQ(Flood(contours[own], first.y, first.x, step), contours[own]) << what;
      const int other = scene.label == 1 ? own : 1 - own;
      EXPECT_LE(Nearest(contours[other], second.y, second.x), 1.0) << what;
      EXPECT_GT(Nearest(contours[1 - other], second.y, second.x), 1.0) << what;
      EXPECT_EQ(Flood(contours[other], second.y, second.x, step), contours[other]) << what;
      // No two of all of them touch.
      std::vector<std::vector<PathfinderScene::Dash>> all = {scene.contours[0], scene.contours[1]};
      all.insert(all.end(), scene.distractors.begin(), scene.distractors.end());
      std::vector<std::set<Pixel>> drawn;
      for (const auto& d : all) drawn.push_back(Lit(DrawDashes(options, d), s.size, 0.75F));
      for (size_t i = 0; i < drawn.size(); ++i) {
        for (const Pixel& p : drawn[i]) {
          for (const Pixel& q : {p, Pixel(p.first + 1, p.second), Pixel(p.first - 1, p.second),
                                 Pixel(p.first, p.second + 1), Pixel(p.first, p.second - 1)}) {
            for (size_t j = 0; j < i; ++j) ASSERT_EQ(drawn[j].count(q), 0u) << what;
          }
        }
        for (const Pixel& p : drawn[i]) {
          EXPECT_GE(std::min({p.first, p.second, s.size - 1 - p.first, s.size - 1 - p.second}),
                    s.padding)
              << what;
        }
      }
    }
    EXPECT_GT(ones, 0);
    EXPECT_LT(ones, count);
  }
}

TEST(Pathfinder, BrightnessIsThatOfThePublishedImages) {
  for (const Setting& s : Settings()) {
    const PathfinderOptions options = {s.size, s.contour};
    const PathfinderScene scene = MakePathfinderScene(options, 3, 1);
    const std::vector<uint8_t> image = DrawPathfinder(options, scene);
    EXPECT_EQ(*std::min_element(image.begin(), image.end()), 0);
    EXPECT_EQ(*std::max_element(image.begin(), image.end()), 255);
    // A distractor away from the discs has its dashes' brightness; a disc's centre the larger one.
    const auto at = [&](double y, double x) {
      return int{image[size_t(std::lround(y) * s.size + std::lround(x))]};
    };
    int brightest = 0;
    for (const auto& d : scene.distractors.front()) {
      for (double y = -3; y <= 3; ++y) {
        for (double x = -3; x <= 3; ++x)
          brightest = std::max(brightest, at(d.head.y + y, d.head.x + x));
      }
    }
    if (s.size != 256) {
      EXPECT_NEAR(brightest, s.dash_level, 1) << s.size;
    }
    for (const auto& disc : scene.discs) {
      EXPECT_GE(at(disc.y, disc.x), s.disc_level - 1) << s.size;
      int count = 0;  // a whole disc where nothing is cut off
      for (double y = -s.marker; y <= s.marker; ++y) {
        for (double x = -s.marker; x <= s.marker; ++x) {
          const double py = std::round(disc.y) + std::round(y),
                       px = std::round(disc.x) + std::round(x);
          if (std::min(py, px) < 0 || std::max(py, px) > double(s.size - 1)) continue;
          const double dy = std::round(y), dx = std::round(x);
          if (dy * dy + dx * dx > s.marker * s.marker) continue;
          EXPECT_GE(at(py, px), s.disc_level - 1);
          ++count;
        }
      }
      EXPECT_GE(count, 4);
    }
  }
}

TEST(Pathfinder, LabelsAreBalancedAndExamplesTheirOwn) {
  const PathfinderOptions options = {32, 6};
  int ones = 0;
  std::set<std::vector<uint8_t>> images;
  constexpr int kCount = 400;
  std::vector<PathfinderScene> scenes(kCount);
  ParallelFor(kCount, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) scenes[size_t(i)] = MakePathfinderScene(options, 11, i);
  });
  for (const auto& scene : scenes) {
    ones += scene.label;
    images.insert(DrawPathfinder(options, scene));
  }
  EXPECT_EQ(images.size(), size_t(kCount));
  EXPECT_NEAR(ones, kCount / 2, 4 * std::sqrt(kCount) / 2);  // four deviations
  EXPECT_EQ(images.count(DrawPathfinder(options, MakePathfinderScene(options, 11, 7))), 1u);
  EXPECT_EQ(images.count(DrawPathfinder(options, MakePathfinderScene(options, 12, 7))), 0u);
  EXPECT_NE(ErrorMessage([] {
              MakePathfinderScene({48, 14}, 1, 0);
            }).find("32, 64, 128 or 256"),
            std::string::npos);
  EXPECT_NE(ErrorMessage([] {
              MakePathfinderScene({32, 10}, 1, 0);
            }).find("6, 9 or 14"),
            std::string::npos);
}

// ---- files

void ExpectSays(const std::string& message, std::initializer_list<const char*> phrases) {
  for (const char* phrase : phrases)
    EXPECT_NE(message.find(phrase), std::string::npos) << message << "\n  lacks: " << phrase;
}

TEST(PathfinderFiles, PackedAndPublishedAreTheSame) {
  const TestFolder folder;
  const PathfinderOptions options = {32, 9};
  const std::string packed = folder / "a.pathfinder", published = folder / "pf";
  const int threads = NumThreads();
  SetNumThreads(1);
  WritePackedPathfinder(options, 4, 30, packed);
  SetNumThreads(2);
  WritePackedPathfinder(options, 4, 30, folder / "b.pathfinder");
  WritePathfinderFolder(options, 4, 30, published);
  SetNumThreads(threads);
  EXPECT_EQ(ReadFile(packed), ReadFile(folder / "b.pathfinder"));
  EXPECT_TRUE(LooksLikePathfinder(packed) && LooksLikePathfinder(published));
  const auto a = OpenPathfinder(packed), b = OpenPathfinder(published);
  ASSERT_EQ(a->size(), 30);
  ASSERT_EQ(b->size(), 30);
  EXPECT_EQ(a->side(), 32);
  EXPECT_EQ(a->Hash(), b->Hash());
  for (int64_t i = 0; i < 30; ++i) {
    std::vector<uint8_t> x(1024), y(1024);
    a->Read(i, x.data());
    b->Read(i, y.data());
    const PathfinderScene scene = MakePathfinderScene(options, 4, i);
    EXPECT_EQ(x, DrawPathfinder(options, scene));
    EXPECT_EQ(x, y);
    EXPECT_EQ(a->Label(i), scene.label);
    EXPECT_EQ(b->Label(i), scene.label);
  }
  // The published data have empty images; they are passed over.
  std::ofstream(published + "/imgs/0/sample_3.png", std::ios::trunc);
  const auto c = OpenPathfinder(published);
  EXPECT_EQ(c->size(), 29);
  EXPECT_EQ(c->skipped(), 1);
  ExpectSays(ErrorMessage([&] { WritePathfinderFolder(options, 4, 3, published); }),
             {"another folder"});
}

// What a killed run left of a packed file goes; what another run writes at the same time stays.
TEST(PathfinderFiles, AKilledRunsPackedFileIsRemoved) {
  const TestFolder folder;
  const pid_t dead = ::fork();
  if (dead == 0) ::_exit(0);
  ::waitpid(dead, nullptr, 0);
  const std::string path = folder / "a.pathfinder", left = StrCat(path, ".tmp-", dead, "-0"),
                    other = StrCat(path, ".tmp-", ::getppid(), "-0");
  for (const std::string& part : {left, other}) WriteFileAtomically(part, "a part");
  WritePackedPathfinder({32, 6}, 4, 3, path);
  EXPECT_EQ(OpenPathfinder(path)->size(), 3);
  EXPECT_FALSE(std::filesystem::exists(left));
  EXPECT_TRUE(std::filesystem::exists(other));
}

// Images without metadata, as a killed run leaves them, are no set, and another run replaces them.
TEST(PathfinderFiles, AKilledRunLeavesNoSet) {
  const TestFolder folder;
  const std::string pf = folder / "pf";
  const pid_t dead = ::fork();
  if (dead == 0) ::_exit(0);
  ::waitpid(dead, nullptr, 0);
  const std::string left = StrCat(pf, "/metadata.tmp-", dead, "-0"),
                    part = StrCat(pf, "/imgs/0/sample_2.png.tmp-", dead, "-1");
  std::filesystem::create_directories(pf + "/imgs/0");
  std::filesystem::create_directories(left);
  WriteFileAtomically(left + "/0.npy", "imgs/0 sample_0.png 0 1\n");
  WriteFileAtomically(part, "a part");
  WriteFileAtomically(pf + "/imgs/0/sample_0.png", "of other settings");
  EXPECT_FALSE(LooksLikePathfinder(pf));
  ExpectSays(ErrorMessage([&] { OpenPathfinder(pf); }), {"metadata/*.npy"});
  int64_t reports = 0;
  WritePathfinderFolder({32, 6}, 4, 300, pf, [&](int64_t, int64_t) {
    ++reports;
    EXPECT_FALSE(std::filesystem::exists(pf + "/metadata"));
  });
  EXPECT_EQ(reports, 2);
  EXPECT_EQ(OpenPathfinder(pf)->size(), 300);
  EXPECT_FALSE(std::filesystem::exists(left) || std::filesystem::exists(part));
  EXPECT_FALSE(std::filesystem::exists(pf + "/lock"));
  // An empty folder of metadata is none; one with anything in it is not touched.
  std::filesystem::remove(pf + "/metadata/0.npy");
  WritePathfinderFolder({32, 6}, 4, 3, pf);
  EXPECT_EQ(OpenPathfinder(pf)->size(), 3);
  std::filesystem::remove(pf + "/metadata/0.npy");
  WriteFileAtomically(pf + "/metadata/notes.txt", "mine");
  ExpectSays(ErrorMessage([&] { WritePathfinderFolder({32, 6}, 4, 3, pf); }), {"another folder"});
}

TEST(PathfinderFiles, BrokenFilesAreErrors) {
  const TestFolder folder;
  const PathfinderOptions options = {32, 6};
  const std::string packed = folder / "a.pathfinder", published = folder / "pf";
  WritePackedPathfinder(options, 4, 3, packed);
  WritePathfinderFolder(options, 4, 3, published);
  const std::string good = ReadFile(packed);
  const auto message = [&](const std::string& bytes) {
    std::ofstream(packed, std::ios::binary) << bytes;
    return ErrorMessage([&] { OpenPathfinder(packed); });
  };
  EXPECT_EQ(message(good), "no error");
  for (size_t cut = 0; cut < good.size(); cut += cut < 100 ? 1 : 97)
    EXPECT_NE(message(good.substr(0, cut)), "no error") << cut;
  Random random(8);
  for (int trial = 0; trial < 200; ++trial) {
    std::string bytes = good;
    bytes[size_t(random.Below(trial % 2 ? 70 : int64_t(bytes.size())))] ^=
        char(1 + random.Below(255));
    EXPECT_NE(message(bytes), "no error");
  }
  ExpectSays(message(good + "x"), {"bytes; its 3 images need"});
  const std::string rows = published + "/metadata/0.npy", text = ReadFile(rows);
  const auto folder_message = [&](const std::string& metadata) {
    std::ofstream(rows, std::ios::binary) << metadata;
    return ErrorMessage([&] { OpenPathfinder(published); });
  };
  EXPECT_EQ(folder_message(text), "no error");
  ExpectSays(folder_message(text + "imgs/0 sample_1.png\n"), {"0.npy:4", "2 columns"});
  ExpectSays(folder_message("imgs/0 sample_1.png 0 7 1\n"), {"0.npy:1", "'7'"});
  ExpectSays(folder_message("imgs/0 sample_9.png 0 1 1\n"), {"sample_9.png", "0.npy:1"});
  ExpectSays(folder_message("../x sample_1.png 0 1 1\n"), {"outside"});
  ExpectSays(folder_message("\x93NUMPY\x01\n"), {"numpy", "lines of text"});
  ExpectSays(folder_message(""), {"no images"});
  std::ofstream(published + "/imgs/0/sample_1.png") << "no image";
  ExpectSays(folder_message(text), {"sample_1.png", "not a PNG"});
  WriteFileAtomically(published + "/imgs/0/sample_1.png",
                      PngBytes({8, 8, std::vector<uint8_t>(64)}));
  ExpectSays(folder_message(text), {"8 x 8", "32 x 32"});
  ExpectSays(ErrorMessage([&] { OpenPathfinder(folder.path()); }), {"metadata/*.npy"});
}

}  // namespace
}  // namespace cistern
