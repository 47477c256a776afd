#include "cistern/base/error.h"

#include <algorithm>
#include <numeric>

namespace cistern {
namespace {

size_t EditDistance(const std::string& a, const std::string& b) {
  std::vector<size_t> row(b.size() + 1);
  std::iota(row.begin(), row.end(), size_t{0});
  for (size_t i = 1; i <= a.size(); ++i) {
    size_t diagonal = row[0];
    row[0] = i;
    for (size_t j = 1; j <= b.size(); ++j) {
      const size_t replaced = diagonal + (a[i - 1] == b[j - 1] ? 0 : 1);
      diagonal = row[j];
      row[j] = std::min({replaced, row[j] + 1, row[j - 1] + 1});
    }
  }
  return row.back();
}

}  // namespace

std::string UnknownName(const std::string& what, const std::string& name,
                        const std::vector<std::string>& known) {
  const std::string head = StrCat("unknown ", what, " '", name, "'");
  const auto nearest =
      std::min_element(known.begin(), known.end(), [&](const std::string& a, const std::string& b) {
        return EditDistance(name, a) < EditDistance(name, b);
      });
  if (nearest != known.end() &&
      EditDistance(name, *nearest) <= std::max<size_t>(2, name.size() / 3)) {
    return StrCat(head, "; did you mean '", *nearest, "'?");
  }
  std::string all;
  for (const std::string& k : known) all += (all.empty() ? "" : ", ") + k;
  return StrCat(head, "; known are: ", all);
}

}  // namespace cistern
