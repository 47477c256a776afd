#include "cistern/io/checked_json.h"

#include "cistern/base/error.h"
#include "cistern/base/hash.h"
#include "cistern/base/terminal.h"
#include "cistern/io/atomic_file.h"

namespace cistern {
namespace {

constexpr char kChecksum[] = "checksum";

}  // namespace

Json WithChecksum(Json json) {
  json.erase(kChecksum);
  json[kChecksum] = HexText(XxHash64(JsonLine(json)));
  return json;
}

void WriteCheckedJson(const std::string& path, Json json) {
  WriteFileAtomically(path, JsonFileText(WithChecksum(std::move(json))));
}

Json ReadCheckedJson(const std::string& path, const std::string& meaning) {
  Json json = ParseJson(ReadFile(path), path);
  CISTERN_CHECK(json.is_object(), path, " is broken: it is no object");
  if (!json.contains(kChecksum)) return json;
  const Json found = json[kChecksum];
  json.erase(kChecksum);
  if (found == HexText(XxHash64(JsonLine(json)))) return json;
  if (meaning.empty()) Fail(path, ": the contents do not fit their checksum; the file is damaged");
  Note(StrCat(path, " is not as it was written, by its checksum; ", meaning));
  return json;
}

}  // namespace cistern
