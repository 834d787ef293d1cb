// Codes with a scale for each block of a matrix: what FP8, FP4 and integers of 8 and 4 bits share.
// Each number and its scale as F32, their product (or quotient), one rounding to the wanted dtype.
#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <optional>
#include <string_view>

#include "codec/decode.h"
#include "codec/tensor_table.h"
#include "kernels/quantize.h"
#include "loadstone/quantization.h"

namespace loadstone::scaled {

// Storage of the codes in the first component.
enum class Codes : std::uint8_t {
  bytes,           // a number of `weight` each
  fp4,             // two E2M1 a byte, the low half first
  offset_nibbles,  // two integers a byte, offset by 8, the high half first; scales are inverse
  row_pairs,  // two's complement; the low halves of a row's bytes one row, the high ones the next
};

// A third part, F32, that every scale is multiplied with or divided by: one, or one a matrix.
enum class Global : std::uint8_t { none, factor, divisor };

// Values are indexed row by row. A matrix is cut into blocks, each with one scale. Value type.
struct Layout {
  Codes codes = Codes::bytes;
  Dtype weight = Dtype::f8_e4m3;
  Dtype scale = Dtype::f32;  // u8: the byte's power of two
  Dtype dtype = Dtype::f32;  // of the result
  bool by_exponent = false;  // a scale is added to the exponent: 2^128 too, which no F32 is
  std::uint64_t elements = 0;
  std::uint64_t matrix_elements = 1;
  std::uint64_t columns = 1;
  std::uint64_t block_rows = 1;
  std::uint64_t block_columns = 1;
  std::uint64_t scale_columns = 1;
  std::uint64_t scale_count = 1;    // of all scales
  std::uint64_t matrix_scales = 0;  // scales of one matrix; 0: all matrices share them
  Global global = Global::none;
  std::uint64_t global_count = 1;
  bool has_zeros = false;  // a third component, I8: subtracted from codes, one per scale
};

// Makes the decoder, after all other members are set.
void finish(const Layout& form, PreparedDecoder& made);

// ---- steps of preparing, each with what does not fit

[[nodiscard]] bool is_one_of(Encoding encoding, std::initializer_list<Dtype> dtypes) noexcept;

// Checks the number of components, and codes of these dtypes for values of the requested shape:
// `per_byte` codes per byte, along the dimension `from_end`.
[[nodiscard]] std::optional<Problem> check_codes(const DecodeRequest& request, std::size_t parts,
                                                 std::initializer_list<Dtype> dtypes,
                                                 const char* expected, std::uint64_t per_byte = 1,
                                                 std::size_t from_end = 1);

[[nodiscard]] std::optional<Problem> set_scale_dtype(const DecodePart& scales,
                                                     std::initializer_list<Dtype> dtypes,
                                                     const char* expected, Layout& form);
// F32, BF16, F16, F8_E8M0, or U8 that are powers of two.
[[nodiscard]] std::optional<Problem> set_scale_dtype(const DecodePart& scales, Layout& form);

// Blocks of whatever size divides the matrix into as many as there are scales.
[[nodiscard]] std::optional<Problem> cut_evenly(const DecodeRequest& request, Layout& form);

// Blocks of this size, the last of which may be cut: a scale for each block of each matrix, or (a
// vector of them) one for each row. `block_columns` 0: of whole rows.
[[nodiscard]] std::optional<Problem> cut_by(const DecodeRequest& request, std::uint64_t block_rows,
                                            std::uint64_t block_columns, Layout& form);

// The third part.
[[nodiscard]] std::optional<Problem> set_global(const DecodeRequest& request, Global global,
                                                Layout& form);

[[nodiscard]] std::optional<Problem> set_zeros(const DecodeRequest& request, Layout& form);

// ---- the size of blocks with a scale each, for shapes alone do not determine it

struct BlockCodec {
  std::string_view encoding;
  const char* even;    // the kernel for blocks that divide the matrix
  const char* by_128;  // the kernel for blocks of 128 by 128, the last of which may be cut
};

// Decodes codes, the first source, by a grid of scales, the second. The config claims the block
// size; otherwise it is 128 by 128, whole rows, whole columns, or has extents that are powers of
// two. Rejects other grids.
void decode_blocks(const TensorTable& table, QuantizedTensor& made, const BlockCodec& codec,
                   Decoding decoding);

// ---- steps of preparing an encoding: what those that ModelOpt and compressed-tensors read have in
// common

// Sets the dialect, and columns, rows and matrices.
[[nodiscard]] std::optional<Problem> begin_encoding(const Quantization& quantization,
                                                    const Shape& shape, QuantizedLayout& form);
// The same, for encodings that do not support vectors.
[[nodiscard]] std::optional<Problem> begin_matrices(const Quantization& quantization,
                                                    const Shape& shape, QuantizedLayout& form);

// The shape with its last dimensions replaced: `taken` of them by `others`.
[[nodiscard]] Shape with_last(const Shape& shape, std::size_t taken,
                              std::initializer_list<std::uint64_t> others);

// Scales have the values' dtype in formats in which ModelOpt writes it.
[[nodiscard]] Dtype scale_dtype(const QuantizedLayout& form) noexcept;

// Rows of whole blocks can be cut between blocks.
[[nodiscard]] std::uint64_t window_of_blocks(const QuantizedLayout& form,
                                             std::uint64_t block) noexcept;

}  // namespace loadstone::scaled
