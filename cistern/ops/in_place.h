#pragma once
// Whether a state may be written where it lies, so that a token costs no copy of it.
#include <ATen/core/Tensor.h>

namespace cistern::ops {

// An ordinary tensor in the memory of the CPU: no subclass, no wrapper of a transformation.
bool IsPlain(const at::Tensor& x);

// Whether `x` is the only handle of a plain, contiguous tensor that owns its memory and has no
// gradient: then nobody else can see what is written there. Copies of a handle, views, what
// autograd saved, and Python's objects all count as others.
bool OwnedAlone(const at::Tensor& x);

// No tracing, no mode of dispatch and no transformation that has to see every op.
bool NobodyWatchesOps();

}  // namespace cistern::ops
