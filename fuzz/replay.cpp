// Runs a fuzz target without a fuzzer, once for each given file and each file in a given folder. So
// the corpora are tests with any compiler and any sanitizer.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size);

namespace {

namespace fs = std::filesystem;

std::vector<fs::path> files_of(const fs::path& path) {
  std::vector<fs::path> files;
  if (!fs::is_directory(path)) return {path};
  for (const auto& entry : fs::recursive_directory_iterator(path)) {
    if (entry.is_regular_file()) files.push_back(entry.path());
  }
  std::ranges::sort(files);
  return files;
}

}  // namespace

int main(int count, char** arguments) {
  std::size_t done = 0;
  for (int i = 1; i < count; ++i) {
    for (const fs::path& path : files_of(arguments[i])) {
      std::ifstream file(path, std::ios::binary);
      std::vector<std::uint8_t> bytes{std::istreambuf_iterator<char>(file), {}};
      if (!file) return std::fprintf(stderr, "cannot read %s\n", path.c_str()), 1;
      // The path is printed first, so the last line names the input if the process ends.
      std::printf("%s\n", path.c_str());
      std::fflush(stdout);
      LLVMFuzzerTestOneInput(bytes.data(), bytes.size());
      ++done;
    }
  }
  std::printf("%zu inputs\n", done);
  return done == 0 ? 1 : 0;
}
