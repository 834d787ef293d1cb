// Measures the machine's own limits: a plain read of files into new memory, 4 MiB at a time.
//
//   limits THREADS FILE...                        the limit that loads are compared with
//   limits --memory fresh|prefaulted|reused ...   the same read into other kinds of memory
//   limits --direct THREADS FILE...               bypass the page cache (O_DIRECT)
//
// Prints "ready", waits for a line on standard input, does the work, and prints one line of JSON.
// The time includes opening the files, but not freeing the memory.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

namespace {

constexpr std::size_t chunk_bytes = 4 << 20;
constexpr std::size_t page_bytes = 4096;

// Kinds of memory to read into. populated: MADV_POPULATE_WRITE just before the read, the fastest
// way to get new memory. fresh: the read faults pages in. prefaulted: pages exist before the clock
// starts. reused: one buffer per thread, without faults.
enum class Memory { populated, fresh, prefaulted, reused };

struct File {
  std::string path;
  std::size_t bytes;
  std::size_t place;  // offset of the file's bytes in the memory
};

struct Chunk {
  int descriptor;
  std::size_t offset;
  std::size_t bytes;
  std::size_t place;
};

[[noreturn]] void fail(const std::string& what) {
  std::fprintf(stderr, "limits: %s: %s\n", what.c_str(), std::strerror(errno));
  std::exit(1);
}

std::byte* fresh_memory(std::size_t bytes) {
  void* pages = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (pages == MAP_FAILED) fail("mmap");
  return static_cast<std::byte*>(pages);
}

void populate(std::byte* data, std::size_t bytes) {
  const auto begin = reinterpret_cast<std::uintptr_t>(data) / page_bytes * page_bytes;
  const auto end = reinterpret_cast<std::uintptr_t>(data) + bytes;
  if (::madvise(reinterpret_cast<void*>(begin), end - begin, MADV_POPULATE_WRITE) != 0) {
    fail("madvise");
  }
}

std::vector<Chunk> open_all(const std::vector<File>& files, int flags) {
  std::vector<Chunk> chunks;
  for (const File& file : files) {
    const int descriptor = ::open(file.path.c_str(), O_RDONLY | O_CLOEXEC | flags);
    if (descriptor < 0) fail(file.path);
    for (std::size_t offset = 0; offset < file.bytes; offset += chunk_bytes) {
      const std::size_t bytes = std::min(chunk_bytes, file.bytes - offset);
      chunks.push_back({descriptor, offset, bytes, file.place + offset});
    }
  }
  return chunks;
}

// Reads whole pages, as O_DIRECT requires; the last read of a file may be short.
void read_chunk(const Chunk& chunk, std::byte* to) {
  const std::size_t pages = (chunk.bytes + page_bytes - 1) / page_bytes * page_bytes;
  for (std::size_t done = 0; done < chunk.bytes;) {
    const ssize_t count =
        ::pread(chunk.descriptor, to + done, pages - done, static_cast<off_t>(chunk.offset + done));
    if (count <= 0) fail("pread");
    done += static_cast<std::size_t>(count);
  }
}

void read_all(const std::vector<File>& files, int flags, unsigned thread_count, Memory kind,
              std::byte* memory) {
  const std::vector<Chunk> chunks = open_all(files, flags);
  std::atomic<std::size_t> next = 0;
  std::vector<std::thread> threads;
  for (unsigned i = 0; i < thread_count; ++i) {
    threads.emplace_back([&] {
      std::byte* own = kind == Memory::reused ? fresh_memory(chunk_bytes) : nullptr;
      for (std::size_t at = next++; at < chunks.size(); at = next++) {
        std::byte* to = own != nullptr ? own : memory + chunks[at].place;
        if (kind == Memory::populated) populate(to, chunks[at].bytes);
        read_chunk(chunks[at], to);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

Memory memory_from(std::string_view name) {
  if (name == "fresh") return Memory::fresh;
  if (name == "prefaulted") return Memory::prefaulted;
  if (name == "reused") return Memory::reused;
  return Memory::populated;
}

}  // namespace

int main(int argc, char** argv) {
  int at = 1;
  Memory kind = Memory::populated;
  int flags = 0;
  if (argc > 1 && std::string_view(argv[1]) == "--direct") {
    flags = O_DIRECT;
    at = 2;
  }
  if (argc > 2 && std::string_view(argv[1]) == "--memory") {
    kind = memory_from(argv[2]);
    at = 3;
  }
  if (argc - at < 2) {
    std::fprintf(stderr, "usage: limits [--memory KIND | --direct] THREADS FILE...\n");
    return 2;
  }
  const auto thread_count = static_cast<unsigned>(std::atoi(argv[at]));
  std::vector<File> files;
  std::size_t total = 0;
  for (int i = at + 1; i < argc; ++i) {
    struct stat status = {};
    if (::stat(argv[i], &status) != 0) fail(argv[i]);
    files.push_back({argv[i], static_cast<std::size_t>(status.st_size), total});
    total += (files.back().bytes + page_bytes - 1) / page_bytes * page_bytes;
  }
  std::byte* memory = fresh_memory(total + 1);
  if (kind == Memory::prefaulted) populate(memory, total);
  std::printf("ready\n");
  std::fflush(stdout);
  while (std::getchar() != '\n') {
    if (std::feof(stdin)) return 1;
  }
  const auto begin = std::chrono::steady_clock::now();
  read_all(files, flags, thread_count, kind, memory);
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begin;
  std::printf("{\"seconds\": %.6f, \"bytes\": %zu}\n", seconds.count(), total);
  return 0;
}
