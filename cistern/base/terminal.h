#pragma once
// Text for people on a terminal.
#include <string>
#include <string_view>

namespace cistern {

// The text with control characters other than newline and tab as \\x1b: names from a file must not
// steer a terminal.
std::string Printable(std::string_view text);

// "note: TEXT" on standard error, unless SetQuiet(true).
void Note(const std::string& text);

}  // namespace cistern
