// Encodes blocks in groups of 16 runs, and computes the weights of their values. Included by files
// that Highway compiles once for each instruction set.

#include <algorithm>
#include <array>

#include "kernels/gguf.h"
#include "kernels/gguf/groups.h"

#if defined(LOADSTONE_KERNELS_GGUF_GROUPS_INL_H) == defined(HWY_TARGET_TOGGLE)
#ifdef LOADSTONE_KERNELS_GGUF_GROUPS_INL_H
#undef LOADSTONE_KERNELS_GGUF_GROUPS_INL_H
#else
#define LOADSTONE_KERNELS_GGUF_GROUPS_INL_H
#endif

#include <hwy/highway.h>

#include "kernels/gguf/fit_inl.h"

HWY_BEFORE_NAMESPACE();
namespace loadstone::simd::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

template <std::size_t run>
HWY_INLINE void weigh_squares(const LaneRows<run>& rows, LaneRows<run>& weights) {
  for (std::size_t i = 0; i < run * lane_count; i += hn::Lanes(F32())) {
    hn::StoreU(square(row_at(rows.data() + i)), F32(), weights.data() + i);
  }
}

// Replaces the importance in `weights` by importance * sqrt(mean square + value * value).
template <std::size_t run>
HWY_INLINE void weigh_importance(const LaneRows<run>& rows, const LaneNumbers& mean_squares,
                                 LaneRows<run>& weights) {
  for (std::size_t lane = 0; lane < lane_count; lane += hn::Lanes(F32())) {
    const VF mean = row_at(mean_squares.data() + lane);
    for (std::size_t i = 0; i < run; ++i) {
      float* const place = weights.data() + i * lane_count + lane;
      const VF number = row_at(rows.data() + i * lane_count + lane);
      hn::StoreU(hn::Mul(row_at(place), hn::Sqrt(hn::Add(mean, square(number)))), F32(), place);
    }
  }
}

// Sums the weights of each lane.
template <std::size_t run>
HWY_INLINE void sum_weights(const LaneRows<run>& weights, LaneNumbers& sums) {
  for (std::size_t lane = 0; lane < lane_count; lane += hn::Lanes(F32())) {
    VF sum = hn::Zero(F32());
    for (std::size_t i = 0; i < run; ++i) {
      sum = hn::Add(sum, row_at(weights.data() + i * lane_count + lane));
    }
    hn::StoreU(sum, F32(), sums.data() + lane);
  }
}

// A group has these members:
//   elements, block_bytes   size of a block
//   blocks                  number of blocks in a group, which has 16 runs of values
//   encode(GroupNumbers, blocks)
// If the last blocks are fewer than a group, zeros are appended and encoded with them.
template <class Group>
HWY_INLINE void encode_groups(const float* numbers, std::uint64_t block_count,
                              const BlockImportance* importance, std::byte* blocks) {
  constexpr std::size_t elements = Group::blocks * Group::elements;
  const float* weights = importance != nullptr ? importance->numbers : nullptr;
  const float mean_square = importance != nullptr ? importance->mean_square : 0;
  for (; block_count >= Group::blocks; block_count -= Group::blocks) {
    Group::encode({numbers, weights, mean_square}, blocks);
    numbers += elements;
    if (weights != nullptr) weights += elements;
    blocks += Group::blocks * Group::block_bytes;
  }
  if (block_count == 0) return;
  std::array<float, elements> padded{};
  std::array<float, elements> padded_weights{};
  std::array<std::byte, Group::blocks * Group::block_bytes> made;
  std::copy_n(numbers, block_count * Group::elements, padded.data());
  if (weights != nullptr) {
    std::copy_n(weights, block_count * Group::elements, padded_weights.data());
    weights = padded_weights.data();
  }
  Group::encode({padded.data(), weights, mean_square}, made.data());
  std::copy_n(made.data(), block_count * Group::block_bytes, blocks);
}

}  // namespace loadstone::simd::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
