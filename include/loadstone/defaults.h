// Defaults of the library, which the command shows and the Python package repeats.
#pragma once

#include <array>
#include <cstdint>
#include <string_view>

namespace loadstone::defaults {

// Memory for bytes under way, all threads together.
inline constexpr std::uint64_t staging_bytes_max = std::uint64_t{64} << 20;          // of a load
inline constexpr std::uint64_t convert_staging_bytes_max = std::uint64_t{32} << 20;  // beside lists
inline constexpr std::uint64_t chunk_bytes = std::uint64_t{4} << 20;                 // one read
// Tensors in a file of a conversion's folder.
inline constexpr std::uint64_t shard_bytes_max = 5'000'000'000;
// Threads are as many as cores, at most so many; a load begins with a few of them.
inline constexpr unsigned threads_max = 16;
inline constexpr unsigned first_readers_max = 4;
// How far ahead of readers the system is asked for what its page cache lacks.
inline constexpr std::uint64_t read_ahead_bytes = std::uint64_t{16} << 20;
inline constexpr unsigned verify_threads_max = 8;
// Nobody may ask for more.
inline constexpr unsigned threads_most = 256;

// ggml knows tensors of at most 4 dims. Files of video models hold patch embeddings of 5, which the
// programs that read them accept: a caller that serves these allows more.
inline constexpr std::uint32_t gguf_rank_max = 4;
inline constexpr std::uint32_t gguf_rank_most = 8;

// Of DataParallel and torch.compile.
inline constexpr std::array<std::string_view, 2> strip_prefixes = {"module.", "_orig_mod."};

}  // namespace loadstone::defaults
