// Measures the kernels of bitsandbytes' formats on one thread, in input bytes per second of CPU
// time. bench/bnb_bench.py compares them with bitsandbytes.
#include <benchmark/benchmark.h>

#include <cstdint>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "kernels/bnb.h"
#include "kernels/cast.h"

namespace {

using loadstone::Bnb4;
using loadstone::Bnb4Code;
using loadstone::BnbDialect;
using loadstone::Dtype;
using Bytes = std::vector<std::byte>;

constexpr std::uint64_t count = 1u << 24;
constexpr std::uint64_t columns = 4096;

Bytes weights(Dtype dtype) {
  std::mt19937 random(0);
  std::normal_distribution<float> normal(0.0f, 0.02f);
  std::vector<float> numbers(count);
  for (float& number : numbers) number = normal(random);
  Bytes bytes(count * loadstone::element_bytes(dtype));
  loadstone::cast_between(Dtype::f32, dtype)
      .run(reinterpret_cast<const std::byte*>(numbers.data()), bytes.data(), count);
  return bytes;
}

void count_bytes(benchmark::State& state, const Bytes& numbers) {
  state.SetBytesProcessed(state.iterations() * static_cast<std::int64_t>(numbers.size()));
}

void encode4(benchmark::State& state, const Bnb4& form, Dtype dtype) {
  const Bytes numbers = weights(dtype);
  Bytes data(count / 2);
  Bytes absmax(count / form.block_size * 4);
  for (auto _ : state) {
    loadstone::encode_bnb4(form, dtype, numbers.data(), count, data.data(), absmax.data());
    benchmark::ClobberMemory();
  }
  count_bytes(state, numbers);
}

void decode4(benchmark::State& state, const Bnb4& form, Dtype dtype) {
  Bytes numbers = weights(dtype);
  Bytes data(count / 2);
  Bytes absmax(count / form.block_size * 4);
  loadstone::encode_bnb4(form, dtype, numbers.data(), count, data.data(), absmax.data());
  for (auto _ : state) {
    loadstone::decode_bnb4(form, 0, count, data.data(), absmax.data(), dtype, numbers.data());
    benchmark::ClobberMemory();
  }
  count_bytes(state, numbers);
}

void encode8(benchmark::State& state, Dtype dtype) {
  const Bytes numbers = weights(dtype);
  Bytes data(count);
  Bytes absmax(count / columns * 4);
  for (auto _ : state) {
    loadstone::encode_bnb_int8(BnbDialect::cpu, dtype, numbers.data(), count / columns, columns,
                               data.data(), absmax.data());
    benchmark::ClobberMemory();
  }
  count_bytes(state, numbers);
}

void decode8(benchmark::State& state, Dtype dtype) {
  Bytes numbers = weights(dtype);
  Bytes data(count);
  Bytes absmax(count / columns * 4);
  loadstone::encode_bnb_int8(BnbDialect::cpu, dtype, numbers.data(), count / columns, columns,
                             data.data(), absmax.data());
  for (auto _ : state) {
    loadstone::decode_bnb_int8(0, count, columns, data.data(), absmax.data(), dtype,
                               numbers.data());
    benchmark::ClobberMemory();
  }
  count_bytes(state, numbers);
}

// Encodes as many scales as there are blocks of 64 in the weights above.
void encode_nested(benchmark::State& state) {
  const Bytes scales = weights(Dtype::f32);
  constexpr std::uint64_t blocks = count / 64;
  Bytes data(blocks);
  Bytes absmax(blocks / 256 * 4);
  for (auto _ : state) {
    const float offset = loadstone::bnb_nested_offset(scales.data(), blocks);
    loadstone::encode_bnb_nested(BnbDialect::cpu, scales.data(), blocks, offset,
                                 std::numeric_limits<float>::max(), data.data(), absmax.data());
    benchmark::ClobberMemory();
  }
  state.SetBytesProcessed(state.iterations() * static_cast<std::int64_t>(2 * count));
}

int register_all() {
  for (const Dtype dtype : {Dtype::bf16, Dtype::f16, Dtype::f32}) {
    const std::string text(loadstone::name(dtype));
    for (const auto& [code, name] :
         {std::pair{Bnb4Code::nf4, "nf4/"}, std::pair{Bnb4Code::fp4, "fp4/"}}) {
      const Bnb4 form{.code = code};
      benchmark::RegisterBenchmark(("encode/" + (name + text)).c_str(), encode4, form, dtype);
      benchmark::RegisterBenchmark(("decode/" + (name + text)).c_str(), decode4, form, dtype);
    }
    benchmark::RegisterBenchmark(("encode/int8/" + text).c_str(), encode8, dtype);
    benchmark::RegisterBenchmark(("decode/int8/" + text).c_str(), decode8, dtype);
  }
  benchmark::RegisterBenchmark("encode/nested statistics, as of BF16", encode_nested);
  return 0;
}

const int registered = register_all();

}  // namespace
