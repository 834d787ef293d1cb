// Default option values of the library, which the command and the Python package show.
#pragma once

#include <array>
#include <cstdint>
#include <string_view>

namespace loadstone::defaults {

// Memory for bytes in flight, for all threads together.
inline constexpr std::uint64_t staging_bytes_max = std::uint64_t{64} << 20;  // for a load
// For a conversion, in addition to its lists of tensors.
inline constexpr std::uint64_t convert_staging_bytes_max = std::uint64_t{32} << 20;
inline constexpr std::uint64_t chunk_bytes = std::uint64_t{4} << 20;  // bytes per read
// Bytes of tensors per shard that a conversion writes.
inline constexpr std::uint64_t shard_bytes_max = 5'000'000'000;
// Number of threads: one per core up to threads_max. A load begins with at most
// first_readers_max.
inline constexpr unsigned threads_max = 16;
inline constexpr unsigned first_readers_max = 4;
// Distance in bytes ahead of the readers over which loadstone asks the system to prefetch data that
// the page cache lacks.
inline constexpr std::uint64_t read_ahead_bytes = std::uint64_t{16} << 20;
inline constexpr unsigned verify_threads_max = 8;
// Largest value that callers may set for the number of threads.
inline constexpr unsigned threads_most = 256;

// Most dims of a tensor in a GGUF file. ggml allows 4. Files of video models have patch embeddings
// with 5 dims, which the programs that read such files accept; callers may therefore set a maximum
// of up to gguf_rank_most.
inline constexpr std::uint32_t gguf_rank_max = 4;
inline constexpr std::uint32_t gguf_rank_most = 8;

// A memory limit that nothing exceeds.
inline constexpr std::uint64_t memory_unlimited = INT64_MAX;

// Prefixes that DataParallel and torch.compile add to names.
inline constexpr std::array<std::string_view, 2> strip_prefixes = {"module.", "_orig_mod."};

}  // namespace loadstone::defaults
