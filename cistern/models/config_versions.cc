// config.json of earlier versions, made into one of this version.
#include "cistern/base/error.h"
#include "cistern/models/config.h"

namespace cistern {
namespace {

// Version 1 had no groups: the decoder and the cross attention of an encoder_decoder had keys of
// their own, which the other kinds also wrote but did not use.
Json FromVersion1(Json config) {
  const bool both = config.contains("kind") && config["kind"] == "encoder_decoder";
  const auto take = [&config](const char* key) {
    Json value = config.contains(key) ? config[key] : Json();
    config.erase(key);
    return value;
  };
  const Json layers = take("decoder_layers"), decoder = take("decoder_attention"),
             cross = take("cross_attention"), share = take("share_embeddings");
  if (!both) {
    config.erase("target_vocab_size");
    return config;
  }
  if (!layers.is_null() && layers != 0) config["decoder"]["layers"] = layers;
  if (!decoder.empty()) config["decoder"]["attention"] = decoder;
  if (!cross.is_null()) config["cross"]["attention"] = cross;
  if (!share.is_null() && share != true) config["encoder_decoder"]["share_embeddings"] = share;
  return config;
}

// Keys that have moved since, whatever the version says: `from` of the group `kind` is now a key of
// the same name in [init].
void MoveToInit(Json& config, const char* kind, const char* key) {
  if (!config.contains(kind) || !config[kind].is_object() || !config[kind].contains(key)) return;
  const Json value = config[kind][key];
  if (config.contains("init") && config["init"].is_object() && config["init"].contains(key)) {
    FailUsage(kind, ".", key, " is the former name of init.", key,
              ", and both are given; leave out the former");
  }
  config[kind].erase(key);
  if (config[kind].empty()) config.erase(kind);
  if (value.is_number() && value == 0) return;  // the default, which was written down
  config["init"][key] = value;
}

}  // namespace

Json ConvertModelConfig(Json config) {
  if (!config.is_object()) return config;
  for (const char* key : {"values_std", "values_bias_std"})
    MoveToInit(config, "encoder_classifier", key);
  if (!config.contains("version") || !config["version"].is_number_integer()) return config;
  const int64_t version = config["version"].get<int64_t>();
  if (version < 1 || version > kConfigVersion) {
    FailUsage("config version ", version, " is not known to this build, which reads versions 1 to ",
              kConfigVersion, version > kConfigVersion ? "; a newer cistern wrote it" : "");
  }
  if (version == 1) config = FromVersion1(std::move(config));
  config["version"] = kConfigVersion;
  return config;
}

}  // namespace cistern
