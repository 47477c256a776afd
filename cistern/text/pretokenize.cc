#include "cistern/text/pretokenize.h"

#include <algorithm>

#include "cistern/text/utf8.h"

namespace cistern {
namespace {

struct Char {
  CharClass kind;
  size_t length;
};

Char CharAt(std::string_view text, size_t position) {
  const Utf8Char c = DecodeUtf8(text, position);
  return {ClassOf(c.code), size_t(c.length)};
}

size_t RunEnd(std::string_view text, size_t position, CharClass kind) {
  while (position < text.size()) {
    const Char c = CharAt(text, position);
    if (c.kind != kind) break;
    position += c.length;
  }
  return position;
}

// The length of 's 't 're 've 'm 'll 'd at an apostrophe, or 0.
size_t Contraction(std::string_view rest) {
  if (rest.size() >= 2 && std::string_view("stmd").find(rest[1]) != std::string_view::npos)
    return 2;
  const std::string_view three = rest.substr(0, 3);
  return three == "'re" || three == "'ve" || three == "'ll" ? 3 : 0;
}

// Whether the character that ends at text[end] (which an ASCII byte follows) is anything but white
// space.
bool EndsInNonSpace(std::string_view text, size_t end) {
  for (size_t length = 1; length <= std::min<size_t>(4, end); ++length) {
    const Utf8Char c = DecodeUtf8(text, end - length);
    if (c.code >= 0 && size_t(c.length) == length) return ClassOf(c.code) != CharClass::kSpace;
  }
  return end > 0;
}

}  // namespace

size_t PreTokenEnd(std::string_view text, size_t begin) {
  if (text[begin] == '\'') {
    if (const size_t length = Contraction(text.substr(begin))) return begin + length;
  }
  const Char first = CharAt(text, begin);
  if (first.kind != CharClass::kSpace) return RunEnd(text, begin + first.length, first.kind);
  size_t last = begin,
         position =
             begin +
             first.length;  // a run of white space: [begin, position), its last character at `last`
  while (position < text.size()) {
    const Char c = CharAt(text, position);
    if (c.kind != CharClass::kSpace) {
      if (last != begin) return last;  // \s+(?!\S) leaves the last one to the next pre-token
      return text[begin] == ' ' ? RunEnd(text, position, c.kind)
                                : position;  // " ?" joins, any other white space stands alone
    }
    last = position;
    position += c.length;
  }
  return position;
}

std::string_view PreTokenStream::Push(std::string_view bytes) {
  buffer_.erase(0, used_);
  searched_ -= std::min(searched_, used_);
  used_ = 0;
  buffer_ += bytes;
  for (size_t i = buffer_.size(); i-- > std::max<size_t>(searched_, 1);) {
    const char c = buffer_[i];
    if ((c == ' ' || (c >= '\t' && c <= '\r')) && EndsInNonSpace(buffer_, i)) {
      used_ = i;
      break;
    }
  }
  searched_ = buffer_.size();
  return std::string_view(buffer_).substr(0, used_);
}

std::string_view PreTokenStream::Finish() {
  buffer_.erase(0, used_);
  used_ = buffer_.size();
  return buffer_;
}

}  // namespace cistern
