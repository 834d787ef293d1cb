#include "cli/machine_limits.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstddef>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <span>

#include "base/team.h"
#include "cli/interrupt.h"
#include "codec/encode.h"
#include "engine/limits.h"
#include "engine/pages.h"
#include "kernels/cast.h"
#include "kernels/quantize.h"
#include "loadstone/error.h"
#include "loadstone/storage.h"
#include "storage/descriptor.h"
#include "storage/new_file.h"
#include "storage/regular_file.h"

namespace loadstone::cli {

namespace {

constexpr std::uint64_t piece_bytes = 4 << 20;
// Alignment that every device and file system accepts for direct reads.
constexpr std::uint64_t sector_bytes = 4096;

// Matrices that each thread encodes, and their size.
constexpr std::uint64_t encoded_per_thread = 4;
constexpr std::uint64_t encoded_rows = 256;
constexpr std::uint64_t encoded_columns = 4096;
constexpr std::uint64_t encoded_piece_bytes = 1 << 20;

// A part of an extent, with its offset in memory.
struct Piece {
  const Extent* extent = nullptr;
  std::uint64_t begin = 0;
  std::uint64_t bytes = 0;
  std::uint64_t place = 0;
};

std::vector<Piece> pieces_of(const std::vector<Extent>& extents) {
  std::vector<Piece> pieces;
  std::uint64_t place = 0;
  for (const Extent& extent : extents) {
    for (std::uint64_t begin = extent.begin; begin < extent.end; begin += piece_bytes) {
      const std::uint64_t bytes = std::min(piece_bytes, extent.end - begin);
      pieces.push_back({&extent, begin, bytes, place});
      place += bytes;
    }
  }
  return pieces;
}

// Runs the work on `count` items with several threads, and returns the seconds that it takes. Each
// thread calls `worker` to get its function, and calls that function with indices in order.
double seconds_of(std::size_t count, unsigned threads,
                  const std::function<std::function<void(std::size_t)>()>& worker) {
  std::atomic<bool> stop = false;
  std::atomic<std::size_t> next = 0;
  const auto begin = std::chrono::steady_clock::now();
  {
    Team team(stop);
    team.start(threads, [&] {
      const auto work = worker();
      for (std::size_t i = next++; i < count && !stop; i = next++) work(i);
    });
    if (!team.wait([] { return !InterruptibleWork::interrupted(); })) {
      throw Error("cancelled", "interrupted");
    }
  }
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

double seconds_of(std::size_t count, unsigned threads,
                  const std::function<void(std::size_t)>& work) {
  return seconds_of(count, threads, [&] { return work; });
}

std::size_t pieces_in(std::uint64_t bytes) {
  return static_cast<std::size_t>((bytes + piece_bytes - 1) / piece_bytes);
}

class OpenFiles {
 public:
  OpenFiles(const std::vector<Extent>& extents, int flags) {
    for (const Extent& extent : extents) {
      if (files_.contains(extent.path)) continue;
      const int descriptor = ::open(extent.path.c_str(), O_RDONLY | O_CLOEXEC | flags);
      if (descriptor < 0) fail_open(extent.path, errno, "cannot open");
      files_.emplace(extent.path, Descriptor(descriptor));
    }
  }
  [[nodiscard]] int descriptor(const Extent& extent) const {
    return files_.find(extent.path)->second.get();
  }

 private:
  std::map<std::string, Descriptor> files_;
};

// Returns the number of bytes read, which is smaller at the end of the file. Returns -1 and sets
// errno on failure.
std::int64_t read_at(int descriptor, std::byte* to, std::uint64_t bytes, std::uint64_t offset) {
  std::uint64_t done = 0;
  while (done < bytes) {
    const ssize_t count =
        ::pread(descriptor, to + done, bytes - done, static_cast<off_t>(offset + done));
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) return -1;
    done += static_cast<std::uint64_t>(count);
    // A direct read that ends within a sector has reached the end of the file.
    if (count == 0 || done % sector_bytes != 0) break;
  }
  return static_cast<std::int64_t>(done);
}

void check_read(const Piece& piece, std::int64_t count, std::uint64_t wanted) {
  if (count >= 0 && static_cast<std::uint64_t>(count) >= wanted) return;
  Where where;
  where.path = piece.extent->path;
  where.byte_offset = piece.begin;
  if (count < 0) {
    where.system_error = errno;
    throw Error("io.read", "cannot read", where);
  }
  throw Error("io.short_read", "the file ends before its data", where);
}

}  // namespace

std::uint64_t byte_count(const std::vector<Extent>& extents) noexcept {
  std::uint64_t bytes = 0;
  for (const Extent& extent : extents) bytes += extent.end - extent.begin;
  return bytes;
}

double seconds_to_populate(std::uint64_t bytes, unsigned threads) {
  const AnonymousMemory memory(bytes);
  return seconds_of(pieces_in(bytes), threads, [&](std::size_t i) {
    const std::uint64_t begin = i * piece_bytes;
    populate(memory.data() + begin, std::min(piece_bytes, bytes - begin));
  });
}

double seconds_to_copy(std::uint64_t bytes, unsigned threads) {
  const AnonymousMemory source(bytes);
  const AnonymousMemory target(bytes);
  // Write to the memory: pages that were only populated may all be the same page of zeros.
  std::memset(source.data(), 1, bytes);
  std::memset(target.data(), 2, bytes);
  return seconds_of(pieces_in(bytes), threads, [&](std::size_t i) {
    const std::uint64_t begin = i * piece_bytes;
    std::memcpy(target.data() + begin, source.data() + begin, std::min(piece_bytes, bytes - begin));
  });
}

double seconds_to_read(const std::vector<Extent>& extents, unsigned threads, ReadInto into) {
  const std::vector<Piece> pieces = pieces_of(extents);
  const AnonymousMemory memory(byte_count(extents));
  if (into == ReadInto::memory_at_hand) populate(memory.data(), memory.size());
  const OpenFiles files(extents, 0);
  return seconds_of(pieces.size(), threads, [&](std::size_t i) {
    const Piece& piece = pieces[i];
    std::byte* const to = memory.data() + piece.place;
    if (into == ReadInto::new_memory) populate(to, piece.bytes);
    check_read(piece, read_at(files.descriptor(*piece.extent), to, piece.bytes, piece.begin),
               piece.bytes);
  });
}

std::optional<double> seconds_to_read_direct(const std::vector<Extent>& extents, unsigned threads) {
  const std::vector<Piece> pieces = pieces_of(extents);
  std::atomic<bool> is_supported = true;
  std::optional<OpenFiles> files;
  try {
    files.emplace(extents, O_DIRECT);
  } catch (const Error& error) {
    if (error.where().system_error == EINVAL) return std::nullopt;
    throw;
  }
  const auto worker = [&]() -> std::function<void(std::size_t)> {
    // A std::function must be copyable, so its copies share the buffer.
    const auto buffer = std::make_shared<AnonymousMemory>(piece_bytes + 2 * sector_bytes);
    populate(buffer->data(), buffer->size());
    return [&, buffer](std::size_t i) {
      const Piece& piece = pieces[i];
      const std::uint64_t begin = piece.begin / sector_bytes * sector_bytes;
      const std::uint64_t end = piece.begin + piece.bytes;
      const std::uint64_t bytes = (end - begin + sector_bytes - 1) / sector_bytes * sector_bytes;
      const std::int64_t count =
          read_at(files->descriptor(*piece.extent), buffer->data(), bytes, begin);
      if (count < 0 && errno == EINVAL) {
        is_supported = false;
        return;
      }
      check_read(piece, count, end - begin);
    };
  };
  const double seconds = seconds_of(pieces.size(), threads, worker);
  return is_supported ? std::optional(seconds) : std::nullopt;
}

double seconds_to_write(const std::string& folder, std::uint64_t bytes) {
  std::vector<std::uint64_t> values(piece_bytes / sizeof(std::uint64_t));
  std::mt19937_64 random;
  std::ranges::generate(values, random);
  const auto piece = std::as_bytes(std::span(values));
  WritableStorage& storage = local_storage().writable();
  const std::string path = folder + "/" + unique_part_name();
  const auto file = storage.create(path);
  const std::shared_ptr<void> removed(nullptr, [&](void*) { storage.remove(path); });
  const auto begin = std::chrono::steady_clock::now();
  for (std::uint64_t at = 0; at < bytes; at += piece_bytes) {
    if (InterruptibleWork::interrupted()) throw Error("cancelled", "interrupted");
    file->write(at, piece.first(std::min(piece_bytes, bytes - at)));
  }
  file->sync();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

std::uint64_t bytes_to_encode(unsigned threads) noexcept {
  return std::uint64_t{threads} * encoded_per_thread * encoded_rows * encoded_columns *
         element_bytes(Dtype::bf16);
}

// Encodes a matrix as the engine does, with all steps from the first window to the last.
static void encode_matrix(const QuantizedLayout& form, const std::byte* values,
                          std::vector<std::vector<std::byte>>& parts,
                          std::vector<std::byte>& scratch) {
  std::vector<float> amax(form.needs_amax ? form.stack : 0, 0.0F);
  if (form.needs_amax) static_cast<void>(measure_window(form, 0, form.elements, values, amax));
  const std::uint64_t step = elements_in(form, encoded_piece_bytes);
  std::vector<PartRange> ranges(parts.size());
  std::vector<std::byte*> places(parts.size());
  for (std::uint64_t begin = 0; begin < form.elements; begin += step) {
    const std::uint64_t end = std::min(form.elements, begin + step);
    part_ranges(form, begin, end, ranges);
    for (std::size_t i = 0; i < parts.size(); ++i) places[i] = parts[i].data() + ranges[i].begin;
    const std::byte* const from = values + begin * element_bytes(form.dtype);
    static_cast<void>(quantize_window(form, begin, end, from, places, amax, scratch.data()));
  }
  for (std::size_t i = 0; i < parts.size(); ++i) places[i] = parts[i].data();
  finish_quantized(form, places, amax, scratch.data());
}

double seconds_to_encode(const std::string& encoding, unsigned threads) {
  Quantization quantization;
  quantization.encoding = encoding;
  QuantizedLayout form;
  const Shape shape = {encoded_rows, encoded_columns};
  if (const auto problem = prepare_quantization(quantization, shape, Dtype::bf16, form)) {
    // Some encodings need an importance matrix, and others reject it.
    quantization.importance = std::make_shared<const std::vector<float>>(encoded_columns, 1.0F);
    if (prepare_quantization(quantization, shape, Dtype::bf16, form)) {
      throw Error("usage", "--quantize: " + problem->message);
    }
  }
  std::mt19937_64 random;
  std::normal_distribution<float> normal;
  std::vector<float> floats(form.elements);
  std::ranges::generate(floats, [&] { return normal(random); });
  std::vector<std::byte> values(form.elements * element_bytes(Dtype::bf16));
  cast_between(Dtype::f32, Dtype::bf16)
      .run(reinterpret_cast<const std::byte*>(floats.data()), values.data(), form.elements);
  const auto worker = [&]() -> std::function<void(std::size_t)> {
    const auto scratch = std::make_shared<std::vector<std::byte>>(form.scratch_bytes);
    const auto parts = std::make_shared<std::vector<std::vector<std::byte>>>();
    for (const QuantizedPart& part : form.parts) parts->emplace_back(part.byte_count());
    return
        [&, scratch, parts](std::size_t) { encode_matrix(form, values.data(), *parts, *scratch); };
  };
  return seconds_of(std::size_t{threads} * encoded_per_thread, threads, worker);
}

bool drop_from_page_cache(const std::vector<Extent>& extents) {
  const OpenFiles files(extents, 0);
  std::uint64_t pages = 0;
  std::uint64_t left = 0;
  const auto page_bytes = static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE));
  for (const Extent& extent : extents) {
    const int descriptor = files.descriptor(extent);
    // The kernel does not drop partial pages, so request the whole pages around the extent.
    const std::uint64_t begin = extent.begin / page_bytes * page_bytes;
    const std::uint64_t bytes = (extent.end - begin + page_bytes - 1) / page_bytes * page_bytes;
    ::posix_fadvise(descriptor, static_cast<off_t>(begin), static_cast<off_t>(bytes),
                    POSIX_FADV_DONTNEED);
    void* const view =
        ::mmap(nullptr, bytes, PROT_READ, MAP_SHARED, descriptor, static_cast<off_t>(begin));
    if (view == MAP_FAILED) return false;
    std::vector<unsigned char> resident(bytes / page_bytes);
    const int status = ::mincore(view, bytes, resident.data());
    ::munmap(view, bytes);
    if (status != 0) return false;
    pages += resident.size();
    left += static_cast<std::uint64_t>(
        std::ranges::count_if(resident, [](unsigned char page) { return (page & 1) != 0; }));
  }
  return left * 100 <= pages;
}

}  // namespace loadstone::cli
