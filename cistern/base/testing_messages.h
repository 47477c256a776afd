#pragma once
// Helpers for tests of what a program or an error says.
#include <gtest/gtest.h>

#include <exception>
#include <string>
#include <vector>

namespace cistern::testing {

// The message that f throws, or "no error".
template <class F>
std::string Thrown(F&& f) {
  try {
    f();
  } catch (const std::exception& e) {
    return e.what();
  }
  return "no error";
}

inline void ExpectContains(const std::string& text, const std::vector<std::string>& parts) {
  for (const std::string& part : parts)
    EXPECT_NE(text.find(part), std::string::npos)
        << "'" << part << "' is missing in: " << text.substr(0, 400);
}

}  // namespace cistern::testing
