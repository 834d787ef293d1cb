// Measures the time to open the header of a checkpoint with 125,000 tensors (16 MB of JSON). The
// baseline in the same run only parses the JSON, which every reader must do.
#include <benchmark/benchmark.h>
#include <fmt/format.h>
#include <simdjson.h>

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <string>

#include "loadstone/catalog.h"

namespace {

constexpr int tensor_count = 125'000;

std::string make_header() {
  std::string header = "{";
  std::uint64_t begin = 0;
  for (int i = 0; i < tensor_count; ++i) {
    if (i > 0) header += ',';
    header += fmt::format(R"("model.layers.{}.mlp.experts.{}.some_longer_name.down_proj.weight":)"
                          R"({{"dtype":"BF16","shape":[2,4],"data_offsets":[{},{}]}})",
                          i / 512, i % 512, begin, begin + 16);
    begin += 16;
  }
  return header + "}";
}

std::string write_file(const std::string& header) {
  const auto path = std::filesystem::temp_directory_path() / "loadstone-header-bench.safetensors";
  std::ofstream file(path, std::ios::binary);
  const std::uint64_t length = header.size();
  file.write(reinterpret_cast<const char*>(&length), sizeof length);
  file.write(header.data(), static_cast<std::streamsize>(header.size()));
  file.close();
  std::filesystem::resize_file(path, 8 + header.size() + 16 * tensor_count);
  return path.string();
}

void open_125k_tensors(benchmark::State& state) {
  const std::string header = make_header();
  const std::string path = write_file(header);
  for (auto each : state) {
    (void)each;
    benchmark::DoNotOptimize(loadstone::open_checkpoint(path));
  }
  state.SetBytesProcessed(static_cast<std::int64_t>(header.size()) * state.iterations());
  std::filesystem::remove(path);
}
BENCHMARK(open_125k_tensors)->Unit(benchmark::kMillisecond);

void parse_the_same_json(benchmark::State& state) {
  const std::string header = make_header();
  for (auto each : state) {
    (void)each;
    simdjson::dom::parser parser;
    benchmark::DoNotOptimize(parser.parse(header).error());
  }
  state.SetBytesProcessed(static_cast<std::int64_t>(header.size()) * state.iterations());
}
BENCHMARK(parse_the_same_json)->Unit(benchmark::kMillisecond);

}  // namespace
