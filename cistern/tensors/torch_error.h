#pragma once
// What torch's errors say to people.
#include <exception>
#include <string>

namespace cistern {

// The first line of any exception's message: torch appends a stack trace to its own.
std::string FirstLine(const std::exception& e);

}  // namespace cistern
