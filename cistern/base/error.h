#pragma once
// Errors of the whole project. The program turns them into exit codes: Error 1, UsageError 2.
#include <cmath>
#include <concepts>
#include <limits>
#include <sstream>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

namespace cistern {

// The work failed: a missing or broken file, a full disk, a NaN. Exit code 1.
class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// The command line or a configuration is wrong; nothing has been done yet. Exit code 2.
class UsageError : public Error {
 public:
  using Error::Error;
};

// x, but NaN without a sign: which one an operation leaves differs from processor to processor, and
// a message should not.
template <std::floating_point T>
T NanUnsigned(T x) {
  return std::isnan(x) ? std::numeric_limits<T>::quiet_NaN() : x;
}

// Joins anything printable into one string: StrCat("length ", 12).
template <class... Args>
std::string StrCat(const Args&... args) {
  std::ostringstream out;
  const auto put = [&out](const auto& x) {
    if constexpr (std::is_floating_point_v<std::decay_t<decltype(x)>>) {
      out << NanUnsigned(x);
    } else {
      out << x;
    }
  };
  (put(args), ...);
  return out.str();
}

template <class... Args>
[[noreturn]] void Fail(const Args&... args) {
  throw Error(StrCat(args...));
}

template <class... Args>
[[noreturn]] void FailUsage(const Args&... args) {
  throw UsageError(StrCat(args...));
}

// "unknown mechanism 'late'; did you mean 'latte'?": the nearest of `known` by edit distance, or
// all of them when none is near.
std::string UnknownName(const std::string& what, const std::string& name,
                        const std::vector<std::string>& known);

}  // namespace cistern

#define CISTERN_CHECK(condition, ...) \
  do {                                \
    if (!(condition)) [[unlikely]]    \
      ::cistern::Fail(__VA_ARGS__);   \
  } while (false)
