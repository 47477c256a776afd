#pragma once
// Padding that reads (Stream::padding_reads, Long Range Arena): it is not read, and reads what the
// tokens wrote as they do. That is defined where a token reads a written state that any query can
// read, so that the bidirectional form is the cross form of a row's own tokens.
#include "cistern/attention/mechanism.h"

namespace cistern {

// UsageError where the mechanism has no such reading: why, and what works instead.
void RequirePaddingReads(const Mechanism& mechanism);

}  // namespace cistern
