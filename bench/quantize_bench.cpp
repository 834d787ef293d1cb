// Measures the kernels of ModelOpt's encodings, MX and GGUF blocks on one thread, in bytes of BF16
// per second of CPU time. bench/modelopt_bench.py compares the first two with ModelOpt. If
// LOADSTONE_GGML_ORACLE names the library of tools/ggml_oracle.py, its functions run as well, on
// the same values as F32 (counted as if they were BF16).
#include <benchmark/benchmark.h>
#include <dlfcn.h>

#include <cstdint>
#include <cstdlib>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "codec/encode.h"
#include "kernels/cast.h"
#include "kernels/quantize.h"

namespace {

using loadstone::Dtype;
using loadstone::QuantizedLayout;
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
  QuantizedLayout form;
  std::vector<Bytes> parts;
  std::vector<std::byte*> places;
  std::vector<float> amax;

  Value(const std::string& encoding, const std::string& dialect) {
    loadstone::Quantization quantization = {
        .encoding = encoding, .dialect = dialect, .nested_offset = {}};
    if (loadstone::find_written_encoding(encoding)->needs_importance) {
      quantization.importance = std::make_shared<const std::vector<float>>(columns, 1.0f);
    }
    (void)loadstone::prepare_quantization(quantization, {rows, columns}, Dtype::bf16, form);
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

// Signature of ggml's encoders: values, blocks, rows, columns, importance.
using GgmlEncode = std::size_t (*)(const float*, void*, std::int64_t, std::int64_t, const float*);
using GgmlPrepare = void (*)(const char*);

void encode_by_ggml(benchmark::State& state, GgmlEncode function, const std::string& encoding) {
  const Bytes numbers = weights();
  std::vector<float> wide(rows * columns);
  loadstone::cast_between(Dtype::bf16, Dtype::f32)
      .run(numbers.data(), reinterpret_cast<std::byte*>(wide.data()), rows * columns);
  Value value(encoding, "");
  const float* const importance =
      value.form.importance != nullptr ? value.form.importance->data() : nullptr;
  for (auto _ : state) {
    function(wide.data(), value.places[0], rows, columns, importance);
    benchmark::ClobberMemory();
  }
  count_bytes(state);
}

void register_gguf() {
  const char* const library = std::getenv("LOADSTONE_GGML_ORACLE");
  void* const ggml = library != nullptr ? dlopen(library, RTLD_NOW) : nullptr;
  for (const char* const encoding :
       {"q4_0",   "q4_1",  "q5_0",    "q5_1",   "q8_0",  "q2_k",  "q3_k",       "q4_k",
        "q5_k",   "q6_k",  "iq4_nl",  "iq4_xs", "tq1_0", "tq2_0", "mxfp4-gguf", "iq2_xxs",
        "iq2_xs", "iq2_s", "iq3_xxs", "iq3_s",  "iq1_s", "iq1_m"}) {
    const std::string name = encoding;
    benchmark::RegisterBenchmark(("encode/" + name).c_str(), encode, name, std::string());
    if (ggml == nullptr) continue;
    std::string symbol = "quantize_" + name.substr(0, name.find('-'));
    if (symbol.ends_with("_k")) symbol.back() = 'K';
    const auto function = reinterpret_cast<GgmlEncode>(dlsym(ggml, symbol.c_str()));
    if (function == nullptr) continue;
    const auto prepare = reinterpret_cast<GgmlPrepare>(dlsym(ggml, "oracle_prepare"));
    prepare(name.c_str());
    benchmark::RegisterBenchmark(("ggml/" + name).c_str(), encode_by_ggml, function, name);
  }
}

int register_all() {
  register_gguf();
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
