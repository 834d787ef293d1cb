// Makes the entries of an offload folder's index, in the layout that accelerate reads. The layout
// is described in docs/formats/offload-folder.md.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "loadstone/plan.h"
#include "loadstone/storage.h"

namespace loadstone {

// A member of index.json. A reader loads the tensor `weight_name` from safetensors_file and casts
// it to `dtype`. If safetensors_file is empty, the reader loads NAME.dat.
struct OffloadEntry {
  std::string target{};
  std::string safetensors_file{};  // absolute; empty until an OffloadFolder has written the value
  std::string weight_name{};
  std::string_view dtype{};
  Shape shape{};
  std::string tie_of{};     // name of a different entry that has the same value
  bool is_written = false;  // an OffloadFolder has written it
};

// Returns one entry for each offloaded target, in the plan's order, followed by one for each name
// that is tied to such a target. A quantized target has one entry per component: the data has the
// target's name, and the other components have the target's name followed by a dot and the
// component's name. Throws Error "plan.dtype" for a dtype that the layout does not support.
[[nodiscard]] std::vector<OffloadEntry> offload_entries(const Plan& plan, Storage& storage);

// Returns the components of a quantized target as separate tensors, or the target itself.
[[nodiscard]] std::vector<QuantizedPart> named_parts(const PlannedTarget& target);

}  // namespace loadstone
