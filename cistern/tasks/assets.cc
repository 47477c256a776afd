#include "cistern/tasks/assets.h"

#include "cistern/base/error.h"
#include "cistern/base/hash.h"
#include "cistern/base/terminal.h"
#include "cistern/io/atomic_file.h"

namespace cistern {
namespace {

constexpr char kAssetChecksum[] = "checksum";

}  // namespace

void SaveAssetFile(const std::string& path, Json json) {
  json[kAssetChecksum] = HexText(XxHash64(JsonLine(json)));
  WriteFileAtomically(path, JsonFileText(json));
}

Json LoadAssetFile(const std::string& path) {
  Json json = ReadJsonFile(path);
  CISTERN_CHECK(json.is_object(), path, " is broken: it is no object");
  if (!json.contains(kAssetChecksum)) return json;
  const Json found = json[kAssetChecksum];
  json.erase(kAssetChecksum);
  if (found != HexText(XxHash64(JsonLine(json))))
    Note(StrCat(path, " is not as it was written, by its checksum; predictions may be others"));
  return json;
}

}  // namespace cistern
