// Defaults of the library, which the command and the Python package show.
#pragma once

#include <array>
#include <cstdint>
#include <string_view>

namespace loadstone::defaults {

// Memory for bytes in flight, all threads together.
inline constexpr std::uint64_t staging_bytes_max = std::uint64_t{64} << 20;  // of a load
inline constexpr std::uint64_t convert_staging_bytes_max = std::uint64_t{32}
                                                           << 20;     // without lists
inline constexpr std::uint64_t chunk_bytes = std::uint64_t{4} << 20;  // one read
// Bytes of tensors per file in the folder of a conversion.
inline constexpr std::uint64_t shard_bytes_max = 5'000'000'000;
// One thread per core up to this maximum; a load begins with fewer.
inline constexpr unsigned threads_max = 16;
inline constexpr unsigned first_readers_max = 4;
// Distance ahead of the readers at which loadstone asks the system for bytes that its page cache
// lacks.
inline constexpr std::uint64_t read_ahead_bytes = std::uint64_t{16} << 20;
inline constexpr unsigned verify_threads_max = 8;
// Upper limit for the options of callers.
inline constexpr unsigned threads_most = 256;

// ggml allows 4 dims. Files of video models have patch embeddings with 5, which the programs that
// read them accept; callers for such programs set a higher maximum.
inline constexpr std::uint32_t gguf_rank_max = 4;
inline constexpr std::uint32_t gguf_rank_most = 8;

// A limit of memory that nothing exceeds.
inline constexpr std::uint64_t memory_unlimited = INT64_MAX;

// Prefixes that DataParallel and torch.compile add.
inline constexpr std::array<std::string_view, 2> strip_prefixes = {"module.", "_orig_mod."};

}  // namespace loadstone::defaults
