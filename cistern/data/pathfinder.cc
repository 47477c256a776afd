#include "cistern/data/pathfinder.h"

#include <algorithm>
#include <cmath>
#include <numbers>
#include <optional>

#include "cistern/base/error.h"
#include "cistern/base/random.h"

namespace cistern {
namespace {

using Point = PathfinderScene::Point;
using Dash = PathfinderScene::Dash;

constexpr int64_t kFine = 2;      // dashes are drawn at this many times the size
constexpr int64_t kLanczos = 3;   // lobes of the filter
constexpr double kOverlap = 1.8;  // masks that meet may add up to less than this
constexpr double kLeastWeight = 1e-4;
constexpr double kMaskSpread = 1.5;  // of a mask, which the filter's ringing is no part of
constexpr int kDashTries = 3, kSnakeTries = 4;
constexpr int kSeedTries = 200;  // of a free place
constexpr int kImageTries = 100000;
constexpr uint64_t kGrowthFailures = 500;  // of two contours, until they begin anew

double Lanczos(double x) {
  if (x == 0) return 1;
  if (std::abs(x) >= kLanczos) return 0;
  const double a = std::numbers::pi * x;
  return kLanczos * std::sin(a) * std::sin(a / kLanczos) / (a * a);
}

// A part of an image: pixels from (top, left) on.
struct Patch {
  int64_t top = 0, left = 0, height = 0, width = 0;
  std::vector<double> value;  // [height,width]
};

// A dash of `radius` fine pixels around its line, resized; 0..1 up to the filter's overshoot.
class DashPainter {
 public:
  explicit DashPainter(int64_t size) : size_(size) {
    for (int64_t k = -kFine * kLanczos; k < kFine * kLanczos; ++k)
      weights_.push_back(Lanczos((double(k) + 0.5) / kFine));
    for (int64_t place = 0; place <= size; ++place) {
      const Window w = WindowOf(place);
      double total = 0;
      for (int64_t k = w.begin; k < w.end; ++k) total += weights_[size_t(k)];
      totals_.push_back(total);
    }
  }

  // Pixels up to `spread` from its edge; the filter reaches 3.
  Patch Paint(const Dash& dash, double radius, double spread = kLanczos + 1) const {
    const double reach = radius / kFine + spread;
    Patch p;
    const auto clamp = [this](double x) {
      return std::clamp<int64_t>(int64_t(std::floor(x)), 0, size_);
    };
    p.top = clamp(std::min(dash.tail.y, dash.head.y) - reach);
    p.left = clamp(std::min(dash.tail.x, dash.head.x) - reach);
    p.height = clamp(std::max(dash.tail.y, dash.head.y) + reach + 1) - p.top;
    p.width = clamp(std::max(dash.tail.x, dash.head.x) + reach + 1) - p.left;
    if (p.height <= 0 || p.width <= 0) return {};
    // Fine pixels that any of these sees, lit where their centre is within the radius of the line.
    const int64_t support = kFine * kLanczos, top = p.top * kFine - support,
                  left = p.left * kFine - support, height = p.height * kFine + 2 * support,
                  width = p.width * kFine + 2 * support;
    std::vector<double> fine(size_t(height * width), 0.0);
    const Point a = Fine(dash.tail), b = Fine(dash.head);
    const double dy = b.y - a.y, dx = b.x - a.x, length2 = dy * dy + dx * dx;
    // Nothing is lit outside of these; what is 0 adds nothing to a filter's sum.
    const auto lit = [&](double from, double to, int64_t begin, int64_t count) {
      return Window{std::clamp<int64_t>(int64_t(std::floor(from - radius)) - begin, 0, count),
                    std::clamp<int64_t>(int64_t(std::ceil(to + radius)) + 1 - begin, 0, count)};
    };
    const Window rows = lit(std::min(a.y, b.y), std::max(a.y, b.y), top, height),
                 columns = lit(std::min(a.x, b.x), std::max(a.x, b.x), left, width);
    for (int64_t y = rows.begin; y < rows.end; ++y) {
      for (int64_t x = columns.begin; x < columns.end; ++x) {
        const double py = double(top + y) - a.y, px = double(left + x) - a.x;
        const double t = length2 > 0 ? std::clamp((py * dy + px * dx) / length2, 0.0, 1.0) : 0;
        const double ey = py - t * dy, ex = px - t * dx;
        if (ey * ey + ex * ex <= radius * radius) fine[size_t(y * width + x)] = 1;
      }
    }
    // Columns, then rows; at the border the filter takes what is there.
    std::vector<double> half(size_t(height * p.width));
    for (int64_t y = rows.begin; y < rows.end; ++y) {
      for (int64_t x = 0; x < p.width; ++x)
        half[size_t(y * p.width + x)] = Filtered(fine.data() + y * width, 1, x, p.left, columns);
    }
    p.value.resize(size_t(p.height * p.width));
    for (int64_t y = 0; y < p.height; ++y) {
      for (int64_t x = 0; x < p.width; ++x)
        p.value[size_t(y * p.width + x)] =
            std::clamp(Filtered(half.data() + x, p.width, y, p.top, rows), 0.0, 1.0);
    }
    return p;
  }

 private:
  // The centre of pixel i is that of fine pixels 2i and 2i + 1.
  static Point Fine(Point p) { return {(p.y + 0.5) * kFine - 0.5, (p.x + 0.5) * kFine - 0.5}; }

  struct Window {
    int64_t begin, end;
  };
  // What of the filter's weights lies within the image at this pixel.
  Window WindowOf(int64_t place) const {
    const int64_t support = kFine * kLanczos, first = kFine * place + kFine / 2 - support;
    return {std::max<int64_t>(0, -first), std::min<int64_t>(2 * support, kFine * size_ - first)};
  }

  // Pixel `at` of a patch that begins at `begin`, from a line of its fine pixels, of which those in
  // `lit` alone are not 0.
  double Filtered(const double* line, int64_t step, int64_t at, int64_t begin, Window lit) const {
    const Window w = WindowOf(begin + at);
    const int64_t first = kFine * at + kFine / 2, from = std::max(w.begin, lit.begin - first),
                  to = std::min(w.end, lit.end - first);
    double sum = 0;
    for (int64_t k = from; k < to; ++k) sum += weights_[size_t(k)] * line[(first + k) * step];
    return sum / totals_[size_t(begin + at)];
  }

  int64_t size_;
  std::vector<double> weights_;
  std::vector<double> totals_;  // of the weights within the image, at each pixel
};

double Angle(Point from, Point to) { return std::atan2(to.y - from.y, to.x - from.x); }

double Turn(double from, double to) {
  return std::abs(std::remainder(to - from, 2 * std::numbers::pi));
}

// Grows the contours of one image.
class Grower {
 public:
  Grower(const PathfinderOptions& options, uint64_t seed, int64_t example)
      : settings_(SettingsOf(options)),
        size_(options.size),
        contour_(options.contour),
        painter_(options.size),
        random_(seed, uint64_t(example) * 2 + 1) {}

  PathfinderScene Make() {
    PathfinderScene scene;
    scene.label = int(random_.Below(2));
    margin_ = settings_.margins[size_t(random_.Below(int64_t(settings_.margins.size())))];
    scene.margin = margin_;
    for (int i = 0; !GrowContours(&scene); ++i)
      CISTERN_CHECK(i < kImageTries, "[pathfinder] no place for two contours of ", contour_,
                    " dashes in ", size_, " x ", size_, " pixels after ", kImageTries, " tries");
    for (int64_t i = 0; i < settings_.distractors && FreeShare() >= 0.01; ++i) {
      std::vector<Dash> dashes = GrowDistractor();
      if (!dashes.empty()) scene.distractors.push_back(std::move(dashes));
    }
    const size_t o = size_t(random_.Below(2)), other = scene.label == 1 ? o : 1 - o;
    scene.discs = {scene.contours[o].front().tail, scene.contours[other].back().head};
    return scene;
  }

 private:
  // A contour that grows: its last dash is not yet in the mask, since the next one may touch it.
  struct Snake {
    std::vector<Dash> dashes;
    Patch last;
    double angle = 0;
    Point pivot;  // `margin` behind the last tail
  };

  // Both contours with as many dashes each, and what is taken but for their last ones.
  struct Round {
    std::array<Snake, 2> snakes;
    std::vector<double> settled;
  };

  double dash() const { return double(settings_.dash); }
  // Of the drawn line, and of what it keeps clear, in fine pixels.
  double MaskRadius() const { return (settings_.thickness + double(margin_)) * kFine + 0.5; }

  double& At(int64_t y, int64_t x) { return mask_[size_t(y * size_ + x)]; }

  void Clear() {
    mask_.assign(size_t(size_ * size_), 0.0);
    const int64_t border = settings_.padding;
    for (int64_t y = 0; y < size_; ++y) {
      for (int64_t x = 0; x < size_; ++x) {
        if (std::min({y, x, size_ - 1 - y, size_ - 1 - x}) < border) At(y, x) = 1;
      }
    }
  }

  void Merge(const Patch& p) {
    for (int64_t y = 0; y < p.height; ++y) {
      for (int64_t x = 0; x < p.width; ++x) {
        double& at = At(p.top + y, p.left + x);
        at = std::max(at, p.value[size_t(y * p.width + x)]);
      }
    }
  }

  bool Inside(Point p) const {
    return std::min(p.y, p.x) >= 0 && std::max(p.y, p.x) <= double(size_ - 1);
  }

  bool Fits(const Patch& p) {
    for (int64_t y = 0; y < p.height; ++y) {
      for (int64_t x = 0; x < p.width; ++x) {
        if (At(p.top + y, p.left + x) + p.value[size_t(y * p.width + x)] >= kOverlap) return false;
      }
    }
    return true;
  }

  double FreeShare() const {
    return double(std::count_if(mask_.begin(), mask_.end(), [](double m) { return m < 0.5; })) /
           double(mask_.size());
  }

  // A first dash with its tail here, in a direction of whole degrees; its head is rounded up.
  std::optional<Snake> Start(Point tail) {
    const double angle = double(random_.Below(360)) * std::numbers::pi / 180;
    Dash d{tail,
           {tail.y + std::ceil(dash() * std::sin(angle) - 1e-9),
            tail.x + std::ceil(dash() * std::cos(angle) - 1e-9)}};
    if (!Inside(d.tail) || !Inside(d.head) || Overlaps(d.head)) return std::nullopt;
    if (Crosses(d)) return std::nullopt;
    Patch p = painter_.Paint(d, MaskRadius(), kMaskSpread);
    if (!Fits(p)) return std::nullopt;
    const double back = dash() + double(margin_);
    const Point pivot{d.head.y - back * std::sin(angle), d.head.x - back * std::cos(angle)};
    return Snake{{d}, std::move(p), angle, pivot};
  }

  // The mask, dilated by a disc of what a dash keeps clear around its line.
  double Dilated(Point p) {
    const double radius = settings_.thickness + double(margin_);
    const auto reach = int64_t(radius), cy = int64_t(p.y), cx = int64_t(p.x);
    double most = 0;
    for (int64_t y = std::max<int64_t>(0, cy - reach); y <= std::min(size_ - 1, cy + reach); ++y) {
      for (int64_t x = std::max<int64_t>(0, cx - reach); x <= std::min(size_ - 1, cx + reach);
           ++x) {
        if (double((y - cy) * (y - cy) + (x - cx) * (x - cx)) <= radius * radius)
          most = std::max(most, At(y, x));
      }
    }
    return most;
  }

  // Where the line itself meets what is taken, its mask does as well: no need to paint it.
  bool Crosses(const Dash& d) {
    for (int64_t i = 0; i <= settings_.dash; ++i) {
      const double t = double(i) / dash();
      const Point p{d.tail.y + t * (d.head.y - d.tail.y), d.tail.x + t * (d.head.x - d.tail.x)};
      if (!Inside(p) || At(std::lround(p.y), std::lround(p.x)) >= kOverlap / 2) return true;
    }
    return false;
  }

  bool Overlaps(Point p) { return At(std::lround(p.y), std::lround(p.x)) >= 0.5; }

  std::optional<Snake> StartWithin(int64_t border) {
    const int64_t room = size_ - 2 * border;
    for (int i = 0; i < kSeedTries; ++i) {
      const Point tail{double(border + random_.Below(room)), double(border + random_.Below(room))};
      if (Overlaps(tail)) continue;
      if (auto snake = Start(tail)) return snake;
    }
    return std::nullopt;
  }

  // One more dash; false where there is no place. `mask_` holds everything but the snake's last
  // dash.
  bool Extend(Snake* snake) {
    const double ahead = dash() + 2 * double(margin_), radius = dash() + double(margin_);
    const Point pivot{snake->pivot.y + ahead * std::sin(snake->angle),
                      snake->pivot.x + ahead * std::cos(snake->angle)};
    const auto samples = int64_t(std::ceil(2 * std::numbers::pi * radius));
    heads_.clear();
    double total = 0;
    for (int64_t i = 0; i < samples; ++i) {
      const double a = 2 * std::numbers::pi * double(i) / double(samples);
      const Point head{std::round(pivot.y + radius * std::sin(a)),
                       std::round(pivot.x + radius * std::cos(a))};
      if (!heads_.empty() && heads_.back().head.y == head.y && heads_.back().head.x == head.x)
        continue;
      if (!Inside(head)) continue;
      const double turn = std::min(settings_.continuity * Turn(snake->angle, Angle(pivot, head)),
                                   std::numbers::pi / 2);
      total += (1 - Dilated(head)) * std::cos(turn) * std::cos(turn);
      heads_.push_back({head, total});
    }
    for (int i = 0; i < kDashTries && total >= kLeastWeight; ++i) {
      const double draw = random_.Uniform() * total;
      const Point head =
          std::upper_bound(heads_.begin(), heads_.end() - 1, draw, [](double x, const Head& h) {
            return x < h.below;
          })->head;
      const double angle = Angle(pivot, head);
      const Dash d{{head.y - dash() * std::sin(angle), head.x - dash() * std::cos(angle)}, head};
      if (Crosses(d)) continue;
      Patch p = painter_.Paint(d, MaskRadius(), kMaskSpread);
      if (!Fits(p)) continue;
      Merge(snake->last);
      snake->dashes.push_back(d);
      snake->last = std::move(p);
      snake->angle = angle;
      snake->pivot = pivot;
      return true;
    }
    return false;
  }

  // Both contours, a dash of each in turn; false where one of them cannot grow.
  bool GrowContours(PathfinderScene* scene) {
    Clear();
    std::array<std::optional<Snake>, 2> snakes;
    snakes[0] = StartWithin(2 * settings_.seed_distance);
    if (!snakes[0]) return false;
    const std::vector<double> empty = mask_;
    Merge(snakes[0]->last);
    const double angle = random_.Uniform() * 2 * std::numbers::pi;
    const auto distance = double(settings_.seed_distance);
    const Point tail = snakes[0]->dashes[0].tail;
    snakes[1] = Start({std::round(tail.y + distance * std::sin(angle)),
                       std::round(tail.x + distance * std::cos(angle))});
    if (!snakes[1]) return false;
    std::vector<Round> rounds = {{{*snakes[0], *snakes[1]}, empty}};
    // Where a contour cannot go on, the last dashes of both are drawn anew, now one of them, now
    // more. The published generator begins both again, which takes longer.
    for (uint64_t failures = 1; int64_t(rounds.size()) < contour_;) {
      if (GrowRound(rounds.back())) {
        rounds.push_back(std::move(grown_));
        continue;
      }
      if (failures > kGrowthFailures) return false;
      const size_t back = failures & (~failures + 1);  // 1, 2, 1, 4, 1, 2, 1, 8, ...
      rounds.resize(rounds.size() - std::min(back, rounds.size() - 1));
      ++failures;
    }
    Round& last = rounds.back();
    mask_ = std::move(last.settled);
    for (size_t s = 0; s < 2; ++s) {
      Merge(last.snakes[s].last);
      scene->contours[s] = std::move(last.snakes[s].dashes);
    }
    return true;
  }

  // A dash more of each contour, in turn, into grown_; false where one of them cannot grow.
  bool GrowRound(const Round& from) {
    grown_ = from;
    for (size_t s = 0; s < 2; ++s) {
      mask_ = grown_.settled;
      Merge(grown_.snakes[1 - s].last);
      const Patch before = grown_.snakes[s].last;
      if (!Extend(&grown_.snakes[s])) return false;
      mask_ = grown_.settled;
      Merge(before);
      grown_.settled = mask_;
    }
    return true;
  }

  // As many dashes as it has room for, up to those of a distractor.
  std::vector<Dash> GrowDistractor() {
    const std::vector<double> before = mask_;
    std::vector<double> best_mask;
    std::vector<Dash> best;
    for (int i = 0; i < kSnakeTries && int64_t(best.size()) < settings_.distractor_dashes; ++i) {
      mask_ = before;
      auto snake = StartWithin(settings_.padding);
      if (!snake) continue;
      while (int64_t(snake->dashes.size()) < settings_.distractor_dashes && Extend(&*snake)) {
      }
      if (snake->dashes.size() <= best.size()) continue;
      Merge(snake->last);
      best = std::move(snake->dashes);
      best_mask = mask_;
    }
    mask_ = best.empty() ? before : best_mask;
    return best;
  }

  struct Head {
    Point head;
    double below;  // weights of the heads up to this one
  };

  PathfinderSettings settings_;
  int64_t size_, contour_, margin_ = 1;
  DashPainter painter_;
  Random random_;
  std::vector<double> mask_;  // [size,size]: what is taken, 0..1
  Round grown_;
  std::vector<Head> heads_;
};

}  // namespace

PathfinderSettings SettingsOf(const PathfinderOptions& options) {
  if (options.contour != 6 && options.contour != 9 && options.contour != 14)
    FailUsage("Pathfinder has contours of 6, 9 or 14 dashes, not ", options.contour);
  PathfinderSettings s;
  switch (options.size) {
    case 32:
      s = {{1}, 1, 2, 1.5, 0.5, 7, 1.0, 0, 20, 2.0};
      break;
    case 64:
      s = {{1}, 1, 5, 2.5, 1.0, 12, 1.8, 0, 22, 0.8};
      break;
    case 128:
      s = {{2, 3}, 1, 5, 3.0, 1.5, 20, 1.8, 0, 35, 0.9};
      break;
    case 256:
      s = {{3}, 22, 5, 5.0, 2.0, 27, 1.8, 0, 30, 1.0};
      break;
    default:
      FailUsage("Pathfinder has images of 32, 64, 128 or 256 pixels on a side, not ", options.size);
  }
  s.distractor_dashes = options.contour / 3;  // whole numbers, as Python 2 divides
  s.distractors /= s.distractor_dashes;
  return s;
}

PathfinderScene MakePathfinderScene(const PathfinderOptions& options, uint64_t seed,
                                    int64_t example) {
  return Grower(options, seed, example).Make();
}

std::vector<float> DrawDashes(const PathfinderOptions& options, const std::vector<Dash>& dashes) {
  const PathfinderSettings settings = SettingsOf(options);
  const DashPainter painter(options.size);
  std::vector<float> image(size_t(options.size * options.size), 0.0F);
  for (const Dash& dash : dashes) {
    const Patch p = painter.Paint(dash, settings.thickness * kFine + 0.5);
    const double peak = p.value.empty() ? 0 : *std::max_element(p.value.begin(), p.value.end());
    if (peak <= 0) continue;
    for (int64_t y = 0; y < p.height; ++y) {
      for (int64_t x = 0; x < p.width; ++x) {
        float& at = image[size_t((p.top + y) * options.size + p.left + x)];
        at = std::max(at, float(p.value[size_t(y * p.width + x)] / peak * settings.dash_contrast));
      }
    }
  }
  return image;
}

std::vector<float> DrawDisc(const PathfinderOptions& options, Point centre) {
  const PathfinderSettings settings = SettingsOf(options);
  const double r2 = settings.marker_radius * settings.marker_radius;
  std::vector<float> image(size_t(options.size * options.size), 0.0F);
  const double cy = std::round(centre.y), cx = std::round(centre.x);
  for (int64_t y = 0; y < options.size; ++y) {
    for (int64_t x = 0; x < options.size; ++x) {
      const double dy = double(y) - cy, dx = double(x) - cx;
      if (dy * dy + dx * dx <= r2) image[size_t(y * options.size + x)] = 1;
    }
  }
  return image;
}

std::vector<uint8_t> DrawPathfinder(const PathfinderOptions& options,
                                    const PathfinderScene& scene) {
  std::vector<Dash> dashes = scene.contours[0];
  dashes.insert(dashes.end(), scene.contours[1].begin(), scene.contours[1].end());
  for (const auto& d : scene.distractors) dashes.insert(dashes.end(), d.begin(), d.end());
  std::vector<float> image = DrawDashes(options, dashes);
  for (const Point& centre : scene.discs) {
    const std::vector<float> disc = DrawDisc(options, centre);
    for (size_t i = 0; i < image.size(); ++i) image[i] = std::max(image[i], disc[i]);
  }
  const auto [least, most] = std::minmax_element(image.begin(), image.end());
  const float low = *least, range = *most - *least;
  std::vector<uint8_t> bytes;
  for (const float x : image) bytes.push_back(uint8_t((x - low) / range * 255.0F + 0.5F));
  return bytes;
}

}  // namespace cistern
