// The kernels of ModelOpt's encodings, and MX, by themselves, on one thread: bytes of BF16 a second
// of processor time. bench/modelopt_bench.py has them beside ModelOpt.
#include <benchmark/benchmark.h>

#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "codec/encode.h"
#include "kernels/cast.h"
#include "kernels/quantize.h"

namespace {

using loadstone::Dtype;
using loadstone::QuantizeForm;
using Bytes = std::vector<std::byte>;

constexpr std::uint64_t rows = 4096;
constexpr std::uint64_t columns = 2048;

Bytes weights() {
  std::mt19937 random(0);
  std::normal_distribution<float> normal(0.0f, 0.02f);
  std::vector<float> numbers(rows * columns);
  for (float& number : numbers) number = normal(random);
  Bytes bytes(rows * columns * 2);
  loadstone::cast_between(Dtype::f32, Dtype::bf16)
      .run(reinterpret_cast<const std::byte*>(numbers.data()), bytes.data(), rows * columns);
  return bytes;
}

struct Value {
  QuantizeForm form;
  std::vector<Bytes> parts;
  std::vector<std::byte*> places;
  std::vector<float> amax;

  Value(const std::string& encoding, const std::string& dialect) {
    (void)loadstone::prepare_quantization(
        {.encoding = encoding, .dialect = dialect, .nested_offset = {}}, {rows, columns},
        Dtype::bf16, form);
    for (const auto& part : form.parts) parts.emplace_back(part.byte_count());
    for (Bytes& part : parts) places.push_back(part.data());
  }
  void encode(const Bytes& numbers) {
    amax.assign(form.needs_amax ? 1 : 0, 0.0f);
    if (form.needs_amax) {
      (void)loadstone::measure_window(form, 0, form.elements, numbers.data(), amax);
    }
    (void)loadstone::quantize_window(form, 0, form.elements, numbers.data(), places, amax, nullptr);
    loadstone::finish_quantized(form, places, amax, nullptr);
  }
};

void count_bytes(benchmark::State& state) {
  state.SetBytesProcessed(state.iterations() * static_cast<std::int64_t>(rows * columns * 2));
}

void encode(benchmark::State& state, const std::string& encoding, const std::string& dialect) {
  const Bytes numbers = weights();
  Value value(encoding, dialect);
  for (auto _ : state) {
    value.encode(numbers);
    benchmark::ClobberMemory();
  }
  count_bytes(state);
}

void decode(benchmark::State& state, const std::string& encoding) {
  Bytes numbers = weights();
  Value value(encoding, "exact");
  value.encode(numbers);
  const std::vector<const std::byte*> places(value.places.begin(), value.places.end());
  for (auto _ : state) {
    loadstone::dequantize_window(value.form, 0, value.form.elements, places, Dtype::bf16,
                                 numbers.data());
    benchmark::ClobberMemory();
  }
  count_bytes(state);
}

int register_all() {
  for (const char* const encoding : {"fp8", "fp8-channel", "fp8-block", "int8-channel", "int4",
                                     "int4-awq", "nvfp4", "mxfp4", "mxfp8"}) {
    const std::string name = encoding;
    for (const char* const dialect : {"exact", "modelopt-compat"}) {
      benchmark::RegisterBenchmark(("encode/" + name + "/" + dialect).c_str(), encode, name,
                                   std::string(dialect));
    }
    benchmark::RegisterBenchmark(("decode/" + name).c_str(), decode, name);
  }
  return 0;
}

const int registered = register_all();

}  // namespace
