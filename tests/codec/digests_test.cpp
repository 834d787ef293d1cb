// Compares the bytes of all encoders and decoders, and of the arithmetic of merges, with the
// digests in tests/golden/kernels.txt, which are those of x86-64: every machine must give the same
// bytes. tests/golden has casts and GGUF blocks of libraries in addition. After an intended change,
// write the file again with
//   LOADSTONE_WRITE_GOLDENS=1 build/release/bin/codec_test --gtest_filter='Digests.*'
#include <gtest/gtest.h>

#include <array>
#include <bit>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <map>
#include <memory>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/digest.h"
#include "codec/encode.h"
#include "codec/families.h"
#include "kernels/cast.h"
#include "kernels/golden_words.h"
#include "kernels/merge.h"
#include "kernels/task_vectors.h"

namespace loadstone {
namespace {

using Bytes = std::vector<std::byte>;
using Numbers = std::vector<float>;

constexpr std::array dtypes = {Dtype::f32, Dtype::f16, Dtype::bf16};
const std::string goldens_path = std::string(LOADSTONE_GOLDEN_DIR) + "/kernels.txt";

std::map<std::string, std::string> goldens() {
  std::map<std::string, std::string> read;
  std::ifstream file(goldens_path);
  for (std::string name, digest; file >> name >> digest;) read[name] = digest;
  return read;
}

// ---- inputs, which are computed without functions whose results depend on the C library

// Returns finite values of different magnitudes, some of them zero.
Numbers numbers_of(std::uint64_t count, std::uint64_t seed) {
  Numbers numbers(count);
  for (std::uint64_t i = 0; i < count; ++i) {
    const std::uint64_t word = splitmix(i, seed);
    const auto value = static_cast<float>(static_cast<std::int32_t>(word >> 32)) * 0x1p-30f;
    const std::uint64_t shift = word & 31;
    numbers[i] = shift == 31 ? std::bit_cast<float>(static_cast<std::uint32_t>(word >> 63 << 31))
                             : value / static_cast<float>(1u << (shift % 12));
  }
  return numbers;
}

// Returns the bytes of a component. F32 scales include zeros, infinities and NaNs.
Bytes bytes_of(const DecodePart& part, std::uint64_t seed) {
  Bytes bytes(*part.encoding.byte_count(*part.shape.numel()));
  for (std::size_t i = 0; i < bytes.size(); ++i) {
    bytes[i] = static_cast<std::byte>(splitmix(i, seed) >> 56);
  }
  if (part.encoding != Encoding(Dtype::f32)) return bytes;
  constexpr std::array<std::uint32_t, 8> special = {0,          0x80000000, 0x7f800000, 0xff800000,
                                                    0x7fc12345, 0xffc00001, 0x7f812345, 0xff800001};
  for (std::size_t at = 0; at < bytes.size(); at += 4) {
    const std::uint64_t word = splitmix(at, seed + 1);
    if (word % 4 == 0) std::memcpy(&bytes[at], &special[word / 4 % 8], 4);
  }
  return bytes;
}

// ---- encoders

void add_encoded(Digest& digest, const Quantization& quantization, Dtype dtype) {
  const Shape shape = {10, 768};
  QuantizedLayout form;
  const auto problem = prepare_quantization(quantization, shape, dtype, form);
  ASSERT_FALSE(problem) << quantization.encoding << ": " << problem->message;
  const Numbers numbers = numbers_of(form.elements, 1);
  Bytes given(form.elements * element_bytes(dtype));
  cast_between(Dtype::f32, dtype)
      .run(reinterpret_cast<const std::byte*>(numbers.data()), given.data(), form.elements);
  std::vector<Bytes> parts;
  for (const QuantizedPart& part : form.parts) parts.emplace_back(part.byte_count());
  std::vector<std::byte*> places;
  for (Bytes& part : parts) places.push_back(part.data());
  Numbers amax(form.needs_amax ? form.stack : 0);
  if (form.needs_amax) measure_window(form, 0, form.elements, given.data(), amax);
  Bytes scratch(form.scratch_bytes);
  EXPECT_EQ(quantize_window(form, 0, form.elements, given.data(), places, amax, scratch.data()),
            form.elements);
  finish_quantized(form, places, amax, scratch.data());
  for (const Bytes& part : parts) digest.update(part);
  if (is_bitsandbytes(form.kind)) return;
  const std::vector<const std::byte*> sources(places.begin(), places.end());
  for (const Dtype target : dtypes) {
    Bytes decoded(form.elements * element_bytes(target));
    dequantize_window(form, 0, form.elements, sources, target, decoded.data());
    digest.update(decoded);
  }
}

// Adds a digest for each encoding and dialect.
void add_encoders(std::map<std::string, std::string>& found) {
  Numbers importance(768);
  for (std::size_t i = 0; i < importance.size(); ++i) {
    importance[i] = static_cast<float>(i * 37 % 100);
  }
  const auto given = std::make_shared<const Numbers>(importance);
  for (const QuantizedEncoding& each : quantized_encodings()) {
    if (each.dialects.empty()) continue;
    const WrittenEncoding& written = *find_written_encoding(each.name);
    for (const std::string_view dialect : each.dialects) {
      Digest digest;
      Quantization quantization = {.encoding = std::string(each.name), .nested_offset = {}};
      quantization.dialect = dialect;
      for (const Dtype dtype : dtypes) {
        if (!written.needs_importance) add_encoded(digest, quantization, dtype);
        Quantization other = quantization;
        other.nested = written.takes_block_size;
        if (written.is_gguf()) other.importance = given;
        if (other != quantization) add_encoded(digest, other, dtype);
      }
      found["encode:" + quantization.encoding + ":" + quantization.dialect] = digest.hex();
    }
  }
}

// ---- decoders

struct Case {
  const char* kernel;
  std::vector<DecodePart> parts;
  Shape shape;
  std::uint64_t group_size = 0;
  bool makes_bytes = false;
};

const std::vector<Case>& cases() {
  using enum Dtype;
  static const std::vector<Case> all = {
      {"fp8_block", {{f8_e4m3, {12, 40}}, {f32, {6, 4}}}, {12, 40}},
      {"fp8_block", {{f8_e5m2, {12, 40}}, {bf16, {6, 4}}}, {12, 40}},
      {"fp8_block", {{f8_e4m3, {12, 40}}, {f8_e8m0, {6, 4}}}, {12, 40}},
      {"fp8_block_128", {{f8_e5m2, {130, 140}}, {f32, {2, 2}}}, {130, 140}},
      {"fp8_rows", {{f8_e4m3, {24, 40}}, {f32, {24, 1}}}, {24, 40}},
      {"mxfp8", {{f8_e4m3, {24, 64}}, {u8, {24, 2}}}, {24, 64}},
      {"fp4_block", {{u8, {24, 32}}, {u8, {24, 2}}}, {24, 64}},
      {"fp4_block", {{u8, {24, 32}}, {f32, {24, 4}}}, {24, 64}},
      {"nvfp4", {{u8, {24, 32}}, {f8_e4m3, {24, 4}}, {f32, {}}}, {24, 64}},
      {"nvfp4_divided", {{u8, {24, 32}}, {f8_e4m3, {24, 4}}, {f32, {}}}, {24, 64}},
      {"mxfp4", {{u8, {24, 2, 16}}, {u8, {24, 2}}}, {24, 64}},
      {"mxfp4_blocks", {{u8, {24, 32}}, {u8, {24, 2}}}, {24, 34}, 0, true},
      {"mxfp4_codes", {{BlockFormat::mxfp4, {24, 64}}}, {24, 32}, 0, true},
      {"mxfp4_scales", {{BlockFormat::mxfp4, {24, 64}}}, {24, 2}, 0, true},
      {"gguf", {{BlockFormat::q4_k, {24, 256}}}, {24, 256}},
      {"gguf_half", {{BlockFormat::q4_0, {24, 256}}}, {24, 256}},
      {"gguf_scaled", {{BlockFormat::nvfp4, {16, 3, 64}}, {f32, {16}}}, {16, 3, 64}},
      {"bytes", {{BlockFormat::q4_0, {2, 64}}}, {2, 36}, 0, true},
      {"int4_blocks", {{u8, {24, 128}}, {f32, {48, 1}}}, {24, 256}},
      {"int4_row_pairs", {{u8, {12, 256}}, {f32, {24, 2}}}, {24, 256}},
      {"int8_rows", {{i8, {24, 40}}, {f32, {24, 1}}, {i8, {24, 1}}}, {24, 40}},
      {"int8_block", {{i8, {24, 40}}, {f16, {6, 4}}}, {24, 40}},
      {"int8_block_128", {{i8, {130, 140}}, {f32, {2, 2}}}, {130, 140}},
      {"packed_int4", {{i32, {16, 8}}, {f32, {16, 2}}, {i32, {2, 2}}}, {16, 64}, 32},
      {"packed_int8", {{i32, {16, 16}}, {f16, {16, 2}}, {i32, {4, 2}}}, {16, 64}, 32},
      {"gptq_v1", {{i32, {8, 16}}, {f32, {2, 16}}, {i32, {2, 2}}}, {64, 16}, 32},
      {"gptq_v2", {{i32, {8, 16}}, {f16, {2, 16}}, {i32, {2, 2}}}, {64, 16}, 32},
      {"awq", {{i32, {64, 2}}, {f32, {2, 16}}, {i32, {2, 2}}}, {64, 16}, 32},
      {"bnb_nf4", {{u8, {768, 1}}, {f32, {24}}}, {24, 64}},
      {"bnb_nf4", {{u8, {768, 1}}, {u8, {24}}, {f32, {1}}, {f32, {256}}}, {24, 64}},
      {"bnb_fp4", {{u8, {768, 1}}, {f32, {24}}}, {24, 64}},
      {"bnb_int8", {{i8, {24, 64}}, {f32, {24}}}, {24, 64}},
      {"comfy_nvfp4", {{u8, {144, 48}}, {f8_e4m3, {256, 8}}, {f32, {}}}, {144, 96}},
      {"comfy_mxfp8", {{f8_e4m3, {144, 96}}, {u8, {256, 4}}}, {144, 96}},
      {"mlx_affine", {{u32, {8, 12}}, {f32, {8, 2}}, {f32, {8, 2}}}, {8, 128}},
      {"mlx_affine", {{u32, {8, 16}}, {bf16, {8, 4}}, {bf16, {8, 4}}}, {8, 128}},
      {"mlx_mxfp4", {{u32, {8, 16}}, {u8, {8, 4}}}, {8, 128}},
      {"mlx_nvfp4", {{u32, {8, 16}}, {u8, {8, 8}}}, {8, 128}},
      {"mlx_mxfp8", {{u32, {8, 32}}, {u8, {8, 4}}}, {8, 128}},
  };
  return all;
}

// Decodes with components of several seeds, so that also a single scale has special values.
std::string decoded(const Case& one) {
  Digest digest;
  for (std::uint64_t seed = 0; seed < 16; ++seed) {
    std::vector<Bytes> bytes;
    std::vector<const std::byte*> places;
    for (const DecodePart& part : one.parts) {
      bytes.push_back(bytes_of(part, 100 * seed + 10 * bytes.size()));
      places.push_back(bytes.back().data());
    }
    for (const Dtype dtype : dtypes) {
      const Dtype target = one.makes_bytes ? Dtype::u8 : dtype;
      PreparedDecoder form;
      const auto problem =
          prepare_decoding(one.kernel, one.parts, one.shape, target, 0, form, one.group_size);
      EXPECT_FALSE(problem) << one.kernel << ": " << problem->message;
      if (problem) return {};
      Bytes result(form.elements * element_bytes(target));
      decode(form, 0, form.elements, places, result.data());
      digest.update(result);
    }
  }
  return digest.hex();
}

void add_decoders(std::map<std::string, std::string>& found) {
  std::set<std::string> kernels;
  for (const Case& one : cases()) {
    kernels.insert(one.kernel);
    std::string name = std::string("decode:") + one.kernel;
    for (const DecodePart& part : one.parts) name += ":" + std::string(part.encoding.name());
    found[name] = decoded(one);
  }
  for (const Family* const family : families()) {
    for (const DecodeKernel& kernel : family->kernels) {
      EXPECT_TRUE(kernels.contains(std::string(kernel.name))) << kernel.name << " has no case";
    }
  }
}

// ---- merges

void add_merges(std::map<std::string, std::string>& found) {
  constexpr std::uint64_t rows = 9;
  constexpr std::uint64_t columns = 77;
  constexpr std::uint64_t rank = 5;
  constexpr std::uint64_t count = rows * columns;
  const Numbers given = numbers_of(count, 2);
  const Numbers other = numbers_of(count, 3);
  const auto add = [&](const std::string& name, const auto& change) {
    Numbers numbers = given;
    change(numbers.data());
    Digest digest;
    digest.update(std::as_bytes(std::span(numbers)));
    found["merge:" + name] = digest.hex();
  };
  add("scale", [&](float* all) { scale(all, count, 0.3f); });
  add("add_scaled", [&](float* all) { add_scaled(all, other.data(), count, 0.3f); });
  add("norm", [&](float* all) { all[0] = norm(all, count); });
  add("add_product", [&](float* all) {
    Numbers panels(rank * (columns + panel_columns));
    for (std::uint64_t k = 0; k < rank; ++k) {
      pack_row(other.data() + k * columns, k, rank, 0, columns, panels.data());
    }
    add_product({.sum = all,
                 .sum_stride = columns,
                 .left = given.data(),
                 .panels = panels.data(),
                 .rank = rank,
                 .rows = rows,
                 .columns = columns,
                 .factor = 0.7f});
  });
  add("subtract", [&](float* all) { subtract(all, other.data(), count); });
  add("divide", [&](float* all) { divide(all, count, 0.3f); });
  add("drop_random", [&](float* all) { drop_random(all, 7, count, random_key(1, {}, 2), 0.4); });
  add("drop_small", [&](float* all) { drop_small(all, count, 0.01f); });
  add("add_elected", [&](float* all) {
    Numbers second = other;
    const std::array<float*, 2> values = {all, second.data()};
    add_elected(values, std::array{0.3f, 0.9f}, count);
  });
  add("add_dots", [&](float* all) {
    DotSums sums;
    add_dots(given.data(), other.data(), count, sums);
    std::memcpy(all, &sums, sizeof(sums));
  });
}

TEST(Digests, AreTheSameOnEveryMachine) {
  std::map<std::string, std::string> found;
  add_encoders(found);
  add_decoders(found);
  add_merges(found);
  if (std::getenv("LOADSTONE_WRITE_GOLDENS") != nullptr) {
    std::ofstream file(goldens_path, std::ios::binary);
    for (const auto& [name, digest] : found) file << name << " " << digest << "\n";
  }
  const auto expected = goldens();
  for (const auto& [name, digest] : found) {
    const auto golden = expected.find(name);
    ASSERT_NE(golden, expected.end()) << name << " has no digest";
    EXPECT_EQ(digest, golden->second) << name;
  }
  EXPECT_EQ(found.size(), expected.size());
}

}  // namespace
}  // namespace loadstone
