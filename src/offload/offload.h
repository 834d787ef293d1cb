// Entries of an offload folder's index, in the layout that accelerate reads.
// Described in docs/formats/offload-folder.md.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "loadstone/plan.h"
#include "loadstone/storage.h"

namespace loadstone {

// A member of index.json. The reader takes weight_name from safetensors_file and casts it to dtype;
// without a file it reads NAME.dat.
struct OffloadEntry {
  std::string target{};
  std::string safetensors_file{};  // absolute; empty until an OffloadFolder has written the value
  std::string weight_name{};
  std::string_view dtype{};
  Shape shape{};
  std::string tie_of{};     // another entry, with whose value it is written
  bool is_written = false;  // by an OffloadFolder
};

// One entry for each offloaded target, in the plan's order, followed by one for each name tied to
// one of these; for each component of a quantized target: the data has the target's name, the
// others that, a dot and theirs. Throws Error "plan.dtype" for a dtype that the layout does not
// have.
[[nodiscard]] std::vector<OffloadEntry> offload_entries(const Plan& plan, Storage& storage);

// Components of a quantized target as separate tensors, or the target itself.
[[nodiscard]] std::vector<QuantizedPart> named_parts(const PlannedTarget& target);

}  // namespace loadstone
