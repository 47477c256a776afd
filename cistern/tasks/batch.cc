#include "cistern/tasks/batch.h"

#include <ATen/ATen.h>

namespace cistern {

Batch Batch::Rows(int64_t begin, int64_t end) const {
  Batch part;
  part.rows = end - begin;
  for (const NamedTensor& t : tensors.all()) part.Add(t.name, t.value.narrow(0, begin, part.rows));
  part.tokens = part.tensors.Has("lengths") ? part["lengths"].sum().item<int64_t>()
                                            : tokens / rows * part.rows;
  return part;
}

}  // namespace cistern
