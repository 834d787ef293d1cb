// Decodes codes with a scale for each block of a matrix: the common part of FP8, FP4, INT8 and
// INT4. Code and scale become F32, are multiplied or divided, and the result is rounded once.
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
  bytes,           // one code per byte, a value of the dtype `weight`
  fp4,             // two E2M1 codes per byte, the low half first
  fp4_high_first,  // the high half first
  offset_nibbles,  // two integers per byte, offset by 8, the high half first; scales are inverse
  row_pairs,  // two's complement; low halves of the bytes are one row, high halves the next row
};

// Use of the third component, F32, which multiplies or divides every scale. It contains one value,
// or one per matrix.
enum class Global : std::uint8_t { none, factor, divisor };

// Values are numbered row by row. Each matrix is divided into blocks with one scale each. Value
// type.
struct Layout {
  Codes codes = Codes::bytes;
  Dtype weight = Dtype::f8_e4m3;
  Dtype scale = Dtype::f32;  // u8 if scales are bytes that mean powers of two
  Dtype dtype = Dtype::f32;  // dtype of the result
  bool by_exponent = false;  // adds scales to exponents, because F32 cannot represent 2^128
  std::uint64_t elements = 0;
  std::uint64_t matrix_elements = 1;
  std::uint64_t columns = 1;
  std::uint64_t block_rows = 1;
  std::uint64_t block_columns = 1;
  std::uint64_t scale_columns = 1;
  std::uint64_t scale_count = 1;    // number of all scales
  std::uint64_t matrix_scales = 0;  // number of scales of one matrix; 0 if all matrices share them
  Global global = Global::none;
  std::uint64_t global_count = 1;
  // True if scales are stored in tiles of 128 rows by 4 columns, padded with zeros, in the order of
  // cuBLAS: the scale of row r and column c of a tile is at r % 32 * 16 + r / 32 * 4 + c.
  bool is_tiled = false;
  bool has_zeros = false;  // true if a third component has I8 zero points, one per scale
};

// Creates the decoder. All other fields of `form` must be set.
void finish(const Layout& form, PreparedDecoder& made);

// ---- Steps of preparing a decoder. Each returns the problem if a component does not fit

[[nodiscard]] bool is_one_of(Encoding encoding, std::initializer_list<Dtype> dtypes) noexcept;

// Checks the number of components, and that the codes have one of these dtypes and the requested
// shape. Each byte has `per_byte` codes along the dimension `from_end`, counted from the end.
[[nodiscard]] std::optional<Problem> check_codes(const DecodeRequest& request, std::size_t parts,
                                                 std::initializer_list<Dtype> dtypes,
                                                 const char* expected, std::uint64_t per_byte = 1,
                                                 std::size_t from_end = 1);

[[nodiscard]] std::optional<Problem> set_scale_dtype(const DecodePart& scales,
                                                     std::initializer_list<Dtype> dtypes,
                                                     const char* expected, Layout& form);
// Accepts F32, BF16, F16, F8_E8M0, and U8 as powers of two.
[[nodiscard]] std::optional<Problem> set_scale_dtype(const DecodePart& scales, Layout& form);

// Divides each matrix into as many equal blocks as there are scales.
[[nodiscard]] std::optional<Problem> cut_evenly(const DecodeRequest& request, Layout& form);

// Divides each matrix into blocks of this size; the last blocks may be short. Expects a scale for
// each block of each matrix, or, as a vector, one for each row. `block_columns` 0 means whole rows.
[[nodiscard]] std::optional<Problem> cut_by(const DecodeRequest& request, std::uint64_t block_rows,
                                            std::uint64_t block_columns, Layout& form);

// Divides the rows of a matrix into blocks whose scales are tiled.
[[nodiscard]] std::optional<Problem> cut_in_tiles(const DecodeRequest& request,
                                                  std::uint64_t block_columns, Layout& form);

// Checks and sets the third component.
[[nodiscard]] std::optional<Problem> set_global(const DecodeRequest& request, Global global,
                                                Layout& form);

[[nodiscard]] std::optional<Problem> set_zeros(const DecodeRequest& request, Layout& form);

// ---- Block sizes, which shapes alone do not determine

struct BlockCodec {
  std::string_view encoding;
  const char* even;    // the kernel for blocks of equal size
  const char* by_128;  // the kernel for blocks of 128 by 128, the last of which may be short
};

// Decodes codes (the first source) with a grid of scales (the second source). Blocks have the size
// that the config declares. Otherwise they are 128 by 128, whole rows or whole columns, or their
// extents are powers of two. Rejects other grids.
void decode_blocks(const TensorTable& table, QuantizedTensor& made, const BlockCodec& codec,
                   Decoding decoding);

// ---- Steps of preparing an encoder, for encodings that ModelOpt or compressed-tensors read

// Sets the dialect, and the number of columns, rows and matrices.
[[nodiscard]] std::optional<Problem> begin_encoding(const Quantization& quantization,
                                                    const Shape& shape, QuantizedLayout& form);
// Like begin_encoding(), for encodings that do not support vectors.
[[nodiscard]] std::optional<Problem> begin_matrices(const Quantization& quantization,
                                                    const Shape& shape, QuantizedLayout& form);

// Returns the shape with its last `taken` dimensions replaced by `others`.
[[nodiscard]] Shape with_last(const Shape& shape, std::size_t taken,
                              std::initializer_list<std::uint64_t> others);

// Returns the dtype of scales: F32, or the dtype of the values in the dialect of compressed models.
[[nodiscard]] Dtype scale_dtype(const QuantizedLayout& form) noexcept;

// Returns the smallest window in elements: one block if rows are whole blocks, otherwise one row.
[[nodiscard]] std::uint64_t window_of_blocks(const QuantizedLayout& form,
                                             std::uint64_t block) noexcept;

}  // namespace loadstone::scaled
