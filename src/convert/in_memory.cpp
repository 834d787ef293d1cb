// A file of a conversion that nobody writes: its tensors in memory.
#include <fmt/format.h>

#include <cstring>

#include "base/only_errors.h"
#include "convert/cache_release.h"
#include "convert/output_sink.h"
#include "convert/source_watch.h"
#include "loadstone/convert.h"
#include "loadstone/error.h"
#include "plan/values.h"

namespace loadstone {

namespace {

// The bytes after the header of one file.
class Memory final : public OutputFiles {
 public:
  Memory(std::span<std::byte> data, std::uint64_t header_bytes)
      : data_(data), header_bytes_(header_bytes) {}

  void write(std::uint32_t, std::uint64_t offset, std::span<const std::byte> bytes) override {
    const std::span<std::byte> place = data_.subspan(offset - header_bytes_, bytes.size());
    std::memcpy(place.data(), bytes.data(), bytes.size());
  }
  void finish(std::uint32_t) override {}

 private:
  std::span<std::byte> data_;
  std::uint64_t header_bytes_ = 0;
};

std::uint64_t made(const Conversion& conversion, std::uint32_t file, std::span<std::byte> data,
                   Storage* storage) {
  require_ok(conversion.plan);
  if (file >= conversion.files.size() || data.size() != conversion.files[file].data_bytes) {
    throw Error("usage", "the memory is not that of a file of the conversion",
                {.found = fmt::format("{} bytes for file {}", data.size(), file)});
  }
  std::vector<bool> wanted(conversion.files.size(), false);
  wanted[file] = true;
  Storage& files = conversion.plan.catalog->storage(storage);
  const OpenShards shards = open_needed(conversion, wanted, &files);
  const SourceWatch watch(shards, files.writable());
  const ValueSet values = values_of(conversion.plan);
  const CacheRelease cache(conversion, values, shards, PageCache::keep);
  Memory memory(data, conversion.files[file].header_bytes);
  OutputSink sink(conversion, values, wanted, memory, cache);
  MemoryCount count;
  const std::uint64_t bytes_read = sink.make(shards.sources(), count).bytes_read;
  watch.check();
  return bytes_read;
}

}  // namespace

std::uint64_t convert_in_memory(const Conversion& conversion, std::uint32_t file,
                                std::span<std::byte> data, Storage* storage) {
  return only_errors([&] { return made(conversion, file, data, storage); });
}

}  // namespace loadstone
