#include "catalog/dcp_parts.h"

#include <string_view>
#include <variant>

#include "base/json_dom.h"
#include "base/text.h"

namespace loadstone {

namespace {

constexpr std::string_view rank_prefix = "__";
constexpr std::string_view rank_suffix = ".metadata";

// Returns true if the part does not begin at the tensor's first element. `info`: the tensor's
// entry, such as {"saved_offsets": [0, 128]}.
bool begins_inside(const dom::element& info) {
  dom::array offsets;
  if (info["saved_offsets"].get(offsets) != simdjson::SUCCESS) return false;
  for (const dom::element each : offsets) {
    std::int64_t offset = 0;
    if (each.get(offset) == simdjson::SUCCESS && offset != 0) return true;
  }
  return false;
}

bool is_rank_metadata(std::string_view name) noexcept {
  if (!name.starts_with(rank_prefix) || !name.ends_with(rank_suffix)) return false;
  if (name.size() <= rank_prefix.size() + rank_suffix.size()) return false;
  name.remove_prefix(rank_prefix.size());
  name.remove_suffix(rank_suffix.size());
  return is_digits(name);
}

}  // namespace

void require_no_dcp_part(const FileHeader& header) {
  const auto found = header.metadata.find(dcp_sharding_key);
  if (found == header.metadata.end()) return;
  const auto* text = std::get_if<std::string>(&found->second.value);
  dom::parser parser;
  dom::object all;
  // Another program's text under this key does not describe parts.
  if (text == nullptr || parsed_json(parser, *text).get(all) != simdjson::SUCCESS) return;
  for (const auto& [name, info] : all) {
    if (!begins_inside(info)) continue;
    refuse(header.shard.path,
           {"dcp.unsupported",
            "the file contains one rank's part of a tensor, which torch.distributed.checkpoint did "
            "not consolidate",
            dcp_sharding_key, "saved_offsets that do not begin at 0",
            "whole tensors (torch's consolidate_safetensors_files makes them, or "
            "enable_consolidation=True)"},
           name);
  }
}

void require_common_dcp_metadata(const std::string& folder, const std::vector<std::string>& names) {
  for (const std::string& name : names) {
    if (!is_rank_metadata(name)) continue;
    refuse(folder, {"dcp.unsupported",
                    "each rank saved metadata only for its own part, so no metadata describes the "
                    "whole checkpoint",
                    "folder", "'" + name + "'", "'.metadata' (save with use_collectives=True)"});
  }
}

}  // namespace loadstone
