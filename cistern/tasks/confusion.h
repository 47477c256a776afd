#pragma once
// Figures of a classifier from its confusion matrix: counts[expected * classes + predicted].
#include <cstdint>
#include <vector>

namespace cistern {

struct Confusion {
  int64_t classes = 0;
  std::vector<double> counts;

  double Total() const;
  double Accuracy() const;  // share, 0 to 1
  // Mean of 2 P R / (P + R) over the classes that are expected or predicted, as in scikit-learn;
  // NaN where there are none.
  double MacroF1() const;
  // Matthews' coefficient for any number of classes (Gorodkin 2004), -1 to 1; 0 where one side is
  // constant.
  double Matthews() const;
};

}  // namespace cistern
