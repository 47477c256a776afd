#include "cistern/io/tfevents.h"

#include <gtest/gtest.h>

#include <filesystem>

#include "cistern/io/atomic_file.h"
#include "cistern/io/test_folder.h"

namespace cistern {
namespace {

TEST(Crc32c, KnownAnswers) {  // RFC 3720, B.4
  EXPECT_EQ(Crc32c("123456789"), 0xE3069283u);
  EXPECT_EQ(Crc32c(std::string(32, '\0')), 0x8A9136AAu);
  EXPECT_EQ(Crc32c(std::string(32, '\xff')), 0x62A8AB43u);
  EXPECT_EQ(Crc32c(""), 0u);
}

TEST(TfEvents, BytesOfAScalar) {
  TestFolder folder;
  TfEventsWriter writer(folder / "run");
  const size_t head = ReadFile(writer.path()).size();
  EXPECT_EQ(head, 16u + 9u + 2u + 13u);
  writer.AddScalar("loss", 1.5, 300, 2.0);
  const std::string event(
      "\x09\0\0\0\0\0\0\0\x40\x10\xac\x02\x2a\x0d\x0a\x0b\x0a\x04loss\x15\0\0\xc0\x3f", 27);
  EXPECT_EQ(ReadFile(writer.path()).substr(head), TfRecord(event));
  EXPECT_EQ(
      std::filesystem::path(writer.path()).filename().string().rfind("events.out.tfevents.", 0),
      0u);
  EXPECT_NE(TfEventsWriter(folder / "run").path(), writer.path());
}

TEST(TfEvents, BytesOfAStart) {
  TestFolder folder;
  TfEventsWriter writer(folder / "run");
  const size_t head = ReadFile(writer.path()).size();
  writer.AddStart(300);
  const std::string record = ReadFile(writer.path()).substr(head);
  // After the frame's 12 bytes and the time: step 300, session_log {status: START}.
  EXPECT_EQ(record.substr(12 + 9),
            TfRecord(record.substr(12, 9) + "\x10\xac\x02\x3a\x02\x08\x01").substr(12 + 9));
}

TEST(TfEvents, Errors) {
  TestFolder folder;
  WriteFileAtomically(folder / "f", "");
  EXPECT_NE(
      ErrorMessage([&] { TfEventsWriter writer(folder / "f"); }).find("cannot create directory"),
      std::string::npos);
}

}  // namespace
}  // namespace cistern
