#include "cistern/io/checked_json.h"

#include <gtest/gtest.h>

#include "cistern/base/error.h"
#include "cistern/io/atomic_file.h"
#include "cistern/io/test_folder.h"

namespace cistern {
namespace {

TEST(CheckedJson, ADigitThatIsDamagedIsSeen) {
  const TestFolder folder;
  const std::string path = folder / "a.json";
  const Json json = {{"steps", 17}, {"rate", 0.1}, {"name", "a b"}, {"none", nullptr}};
  WriteCheckedJson(path, json);
  EXPECT_EQ(ReadCheckedJson(path), json);
  WriteCheckedJson(path, ReadJsonFile(path));  // its checksum is no part of what is summed
  EXPECT_EQ(ReadCheckedJson(path), json);

  std::string text = ReadFile(path);
  text.replace(text.find("17"), 2, "19");
  WriteFileAtomically(path, text);
  try {
    ReadCheckedJson(path);
    FAIL() << "the damage was not seen";
  } catch (const Error& e) {
    EXPECT_NE(std::string(e.what()).find(path + ": the contents do not fit their checksum"),
              std::string::npos)
        << e.what();
  }
  ::testing::internal::CaptureStderr();
  EXPECT_EQ(ReadCheckedJson(path, "it may mean something else")["steps"], 19);
  EXPECT_EQ(
      ::testing::internal::GetCapturedStderr(),
      "note: " + path + " is not as it was written, by its checksum; it may mean something else\n");
}

TEST(CheckedJson, FilesWithoutAChecksumAreRead) {
  const TestFolder folder;
  WriteFileAtomically(folder / "a.json", R"({"steps": 3})");
  EXPECT_EQ(ReadCheckedJson(folder / "a.json")["steps"], 3);
  WriteFileAtomically(folder / "b.json", "[1]");
  EXPECT_THROW(ReadCheckedJson(folder / "b.json"), Error);
}

}  // namespace
}  // namespace cistern
