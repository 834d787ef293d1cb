// One run of the engine that makes files of a conversion, wherever they go.
#pragma once

#include <cstdint>
#include <vector>

#include "catalog/open_shards.h"
#include "convert/output_sink.h"
#include "load/source_digests.h"
#include "loadstone/convert.h"
#include "loadstone/finding.h"
#include "loadstone/observer.h"
#include "loadstone/storage.h"

namespace loadstone {

// What the wanted files are made of. What is quantized may share scales with tensors of other
// files.
[[nodiscard]] OpenShards open_needed(const Conversion& conversion, const std::vector<bool>& wanted,
                                     Storage* storage);

struct PulledFiles {
  std::uint64_t bytes_read = 0;
  std::uint64_t bytes_read_ahead = 0;
  std::uint64_t memory_peak = 0;  // of windows
  std::vector<Finding> findings{};
};

// Makes all that the sink wants. `digests`: of what is read; null: none.
[[nodiscard]] PulledFiles pull_files(const Conversion& conversion, const OpenShards& shards,
                                     OutputSink& sink, SourceDigests* digests, Observer* observer);

}  // namespace loadstone
