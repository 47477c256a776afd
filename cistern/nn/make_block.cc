// Which block a mechanism has.
#include "cistern/nn/latent_block.h"
#include "cistern/nn/memory_block.h"

namespace cistern {

std::shared_ptr<Block> MakeBlock(const BlockOptions& options) {
  switch (FindMechanism(options.attention.mechanism).memory) {
    case MemoryUse::kStream:
    case MemoryUse::kReplaced:
      return std::make_shared<MemoryBlock>(options);
    case MemoryUse::kLatents:
      return std::make_shared<LatentBlock>(options);
    case MemoryUse::kNone:
    case MemoryUse::kFixed:
      break;
  }
  return std::make_shared<Block>(options);
}

}  // namespace cistern
