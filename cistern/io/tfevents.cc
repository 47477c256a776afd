#include "cistern/io/tfevents.h"

#include <unistd.h>

#include <array>
#include <atomic>
#include <bit>
#include <chrono>

#include "cistern/base/error.h"
#include "cistern/io/atomic_file.h"

namespace cistern {
namespace {

constexpr std::array<uint32_t, 256> kCrcTable = [] {
  std::array<uint32_t, 256> table{};
  for (uint32_t i = 0; i < 256; ++i) {
    uint32_t crc = i;
    for (int bit = 0; bit < 8; ++bit) crc = crc >> 1 ^ (crc & 1 ? 0x82F63B78u : 0u);
    table[i] = crc;
  }
  return table;
}();

template <class T>
std::string LittleEndian(T value) {
  std::string bytes;
  for (size_t i = 0; i < sizeof(T); ++i) bytes += char(value >> (8 * i) & 255);
  return bytes;
}

uint32_t Masked(std::string_view bytes) {
  const uint32_t crc = Crc32c(bytes);
  return (crc >> 15 | crc << 17) + 0xa282ead8u;
}

// Protobuf: a field is (number << 3 | wire type), then a varint (0), 8 bytes (1), length and bytes
// (2), or 4 bytes (5).
std::string Varint(uint64_t value) {
  std::string bytes;
  for (; value >= 128; value >>= 7) bytes += char(value | 128);
  return bytes + char(value);
}
std::string Key(int number, int wire) { return Varint(uint64_t(number) << 3 | uint64_t(wire)); }
std::string BytesField(int number, std::string_view bytes) {
  return Key(number, 2) + Varint(bytes.size()) + std::string(bytes);
}
std::string DoubleField(int number, double value) {
  return Key(number, 1) + LittleEndian(std::bit_cast<uint64_t>(value));
}
std::string FloatField(int number, float value) {
  return Key(number, 5) + LittleEndian(std::bit_cast<uint32_t>(value));
}

double Now() {
  return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
}

}  // namespace

uint32_t Crc32c(std::string_view bytes) {
  uint32_t crc = ~0u;
  for (const char c : bytes)
    crc = crc >> 8 ^ kCrcTable[(crc ^ static_cast<unsigned char>(c)) & 255];
  return ~crc;
}

std::string TfRecord(std::string_view data) {
  const std::string length = LittleEndian(uint64_t(data.size()));
  return length + LittleEndian(Masked(length)) + std::string(data) + LittleEndian(Masked(data));
}

TfEventsWriter::TfEventsWriter(const std::string& directory) {
  EnsureDirectory(directory);
  char host[256] = "localhost";
  if (::gethostname(host, sizeof(host) - 1) != 0) host[0] = '\0';
  static std::atomic<int> count{0};
  file_ = std::make_unique<AppendFile>(StrCat(directory, "/events.out.tfevents.", int64_t(Now()),
                                              ".", host, ".", ::getpid(), ".", count++));
  file_->Append(TfRecord(DoubleField(1, Now()) +
                         BytesField(3, "brain.Event:2")));  // Event{wall_time, file_version}
}

void TfEventsWriter::AddScalar(const std::string& tag, double value, int64_t step,
                               double wall_time) {
  const std::string scalar =
      BytesField(1, tag) + FloatField(2, float(value));  // Summary.Value{tag, simple_value}
  file_->Append(TfRecord(DoubleField(1, wall_time < 0 ? Now() : wall_time) + Key(2, 0) +
                         Varint(uint64_t(step)) +
                         BytesField(5, BytesField(1, scalar))));  // Event{wall_time, step, summary}
}

void TfEventsWriter::AddStart(int64_t step) {
  file_->Append(TfRecord(
      DoubleField(1, Now()) + Key(2, 0) + Varint(uint64_t(step)) +
      BytesField(7, Key(1, 0) + Varint(1))));  // Event{wall_time, step, session_log{status START}}
}

}  // namespace cistern
