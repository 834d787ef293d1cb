// Recognises files of DeepSpeed's ZeRO, and gives advice about them.
#pragma once

#include <string_view>

#include "loadstone/shape.h"

namespace loadstone {

inline constexpr const char* zero_message =
    "this is a DeepSpeed ZeRO checkpoint, in which each rank wrote a share of each tensor; join "
    "the shares with the script that DeepSpeed puts into the folder: 'python zero_to_fp32.py "
    "FOLDER OUTPUT'";

// "zero_pp_rank_0_mp_rank_00_model_states.pt", "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"
[[nodiscard]] inline bool is_share_of_zero(std::string_view name) noexcept {
  return name.find("zero_pp_rank_") != std::string_view::npos && name.ends_with(".pt");
}

// Returns advice if a tensor's shape differs from the model's, or "". A rank of ZeRO-3 that saves
// its model writes tensors of shape [0].
[[nodiscard]] inline std::string_view shape_advice(const Shape& found) noexcept {
  if (found.rank() != 1 || found[0] != 0) return {};
  return "DeepSpeed ZeRO-3 leaves such empty tensors: write the whole tensors with 'python "
         "zero_to_fp32.py FOLDER OUTPUT', the script that DeepSpeed puts into the checkpoint's "
         "folder";
}

}  // namespace loadstone
