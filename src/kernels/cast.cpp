#include "kernels/cast.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

#include "kernels/cast_simd.h"
#include "kernels/number.h"
#include "kernels/overflow_inl.h"

namespace loadstone {

namespace {

// The dtypes that casts are defined for.
constexpr auto numbers = [] {
  std::array<Dtype, std::ranges::count(dtype_table, true, &DtypeInfo::has_casts)> dtypes{};
  auto next = dtypes.begin();
  for (const DtypeInfo& known : dtype_table) {
    if (known.has_casts) *next++ = known.dtype;
  }
  return dtypes;
}();

template <Dtype source, Dtype target>
void strided(const std::byte* from, std::uint64_t source_stride, std::byte* to,
             std::uint64_t target_stride, std::uint64_t count) noexcept {
  const std::uint64_t from_step = source_stride * number::bytes_of<source>;
  const std::uint64_t to_step = target_stride * number::bytes_of<target>;
  for (std::uint64_t i = 0; i < count; ++i) {
    number::convert<source, target>(from + i * from_step, to + i * to_step);
  }
}

template <Dtype source, Dtype target>
void run(const std::byte* from, std::byte* to, std::uint64_t count) noexcept {
  strided<source, target>(from, 1, to, 1, count);
}

// Copies elements for a cast that does not change their bytes.
template <std::size_t size>
void copy_strided(const std::byte* from, std::uint64_t source_stride, std::byte* to,
                  std::uint64_t target_stride, std::uint64_t count) noexcept {
  for (std::uint64_t i = 0; i < count; ++i) {
    std::memcpy(to + i * target_stride * size, from + i * source_stride * size, size);
  }
}

template <std::size_t size>
void copy_run(const std::byte* from, std::byte* to, std::uint64_t count) noexcept {
  if (count != 0) std::memcpy(to, from, count * size);
}

using Table = std::array<std::array<Cast, dtype_count>, dtype_count>;

constexpr std::size_t at(Dtype dtype) { return static_cast<std::size_t>(dtype); }

template <std::size_t pair>
constexpr void fill(Table& table) {
  constexpr Dtype source = numbers[pair / numbers.size()];
  constexpr Dtype target = numbers[pair % numbers.size()];
  if constexpr (source != target && target != Dtype::f8_e8m0) {
    table[at(source)][at(target)] = {.run = run<source, target>,
                                     .strided = strided<source, target>,
                                     .overflow = overflow::counter<source, target>()};
  }
}

template <std::size_t... pairs>
constexpr void fill_all(Table& table, std::index_sequence<pairs...>) {
  (fill<pairs>(table), ...);
}

static_assert(element_bytes_max == 16, "copy_of() must support every width");

constexpr Cast copy_of(std::size_t size) {
  if (size == 1) return {.run = copy_run<1>, .strided = copy_strided<1>};
  if (size == 2) return {.run = copy_run<2>, .strided = copy_strided<2>};
  if (size == 4) return {.run = copy_run<4>, .strided = copy_strided<4>};
  if (size == 8) return {.run = copy_run<8>, .strided = copy_strided<8>};
  if (size == 16) return {.run = copy_run<16>, .strided = copy_strided<16>};
  return {};
}

template <CastWatched watched>
void run_watched(const std::byte* from, std::byte* to, std::uint64_t count) noexcept {
  static_cast<void>(watched(from, to, count));
}

template <CastWatched watched>
constexpr void watch(Cast& cast) {
  cast.run = run_watched<watched>;
  cast.watched = watched;
}

constexpr Table make_table() {
  Table table = {};
  fill_all(table, std::make_index_sequence<numbers.size() * numbers.size()>{});
  for (std::size_t i = 0; i < dtype_count; ++i) {
    table[i][i] = copy_of(element_bytes(static_cast<Dtype>(i)));
  }
  // The casts that most loads need have vectorized versions.
  table[at(Dtype::bf16)][at(Dtype::f32)].run = simd::f32_from_bf16;
  table[at(Dtype::f16)][at(Dtype::f32)].run = simd::f32_from_f16;
  watch<simd::bf16_from_f32>(table[at(Dtype::f32)][at(Dtype::bf16)]);
  watch<simd::f16_from_f32>(table[at(Dtype::f32)][at(Dtype::f16)]);
  watch<simd::f16_from_bf16>(table[at(Dtype::bf16)][at(Dtype::f16)]);
  table[at(Dtype::f16)][at(Dtype::bf16)].run = simd::bf16_from_f16;
  table[at(Dtype::f8_e4m3)][at(Dtype::f32)].run = simd::f32_from_f8_e4m3;
  table[at(Dtype::f8_e4m3)][at(Dtype::bf16)].run = simd::bf16_from_f8_e4m3;
  return table;
}

constinit const Table casts = make_table();

}  // namespace

Cast cast_between(Dtype source, Dtype target) noexcept { return casts[at(source)][at(target)]; }

std::uint64_t finite_numbers(Dtype dtype, const std::byte* numbers, std::uint64_t count) noexcept {
  switch (dtype) {
    case Dtype::f64:
      return overflow::finite<Dtype::f64>(numbers, count);
    case Dtype::f32:
      return overflow::finite<Dtype::f32>(numbers, count);
    case Dtype::f16:
      return overflow::finite<Dtype::f16>(numbers, count);
    case Dtype::bf16:
      return overflow::finite<Dtype::bf16>(numbers, count);
    case Dtype::f8_e4m3:
      return overflow::finite<Dtype::f8_e4m3>(numbers, count);
    case Dtype::f8_e5m2:
      return overflow::finite<Dtype::f8_e5m2>(numbers, count);
    case Dtype::f8_e8m0:
      return overflow::finite<Dtype::f8_e8m0>(numbers, count);
    default:
      return count;
  }
}

bool can_cast(Dtype source, Dtype target) noexcept {
  return cast_between(source, target).run != nullptr;
}

}  // namespace loadstone
