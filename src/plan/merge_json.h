// Converts boxes, merges and other parts of a plan from and to JSON, without checks against a
// catalog.
#pragma once

#include <bit>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "boxes/value.h"
#include "loadstone/merge.h"
#include "tensor/tensor_json.h"

namespace loadstone {

// The numbers of sources and decodings in the JSON text, assigned in the order of their first use.
struct PlanNumbers {
  std::vector<std::uint32_t> sources;  // by index into the catalog
  std::vector<std::uint32_t> decodings;
  std::vector<std::uint32_t> sources_used;  // by number
  std::vector<std::uint32_t> decodings_used;
};

// Numbers all sources and decodings that the boxes of the values use. Throws Error "plan.recipe" if
// a box belongs to a different catalog.
[[nodiscard]] PlanNumbers number_boxes(const ValueSet& values);

// A source or decoding index as one JSON number. The field is omitted for no_decoding.
template <typename Index>
struct JsonIndex {
  JsonIndex(Index& given, const std::vector<std::uint32_t>& known) : index(given), numbers(known) {}

  [[nodiscard]] bool empty() const noexcept { return index == no_decoding; }

  Index& index;
  const std::vector<std::uint32_t>& numbers;
};
inline void write_json(JsonWriter& json, JsonIndex<const std::uint32_t> each) {
  json.value(each.numbers.at(each.index));
}
void read_json(const JsonReader& reader, JsonReader::Element value, const JsonPlace& place,
               JsonIndex<std::uint32_t> each);

// A list of source or decoding indices as a JSON array. Errors name the list rather than an
// element.
template <typename List>
struct JsonIndices {
  JsonIndices(List& given, const std::vector<std::uint32_t>& known) : list(given), numbers(known) {}

  [[nodiscard]] bool empty() const noexcept { return list.empty(); }

  List& list;
  const std::vector<std::uint32_t>& numbers;
};
void write_json(JsonWriter& json, JsonIndices<const std::vector<std::uint32_t>> each);
void read_json(const JsonReader& reader, JsonReader::Element value, const JsonPlace& place,
               JsonIndices<std::vector<std::uint32_t>> each);

// The bits of a float as a JSON integer, so that the float is read back exactly. The field is
// omitted for 0 and nullopt.
template <typename Number>
struct JsonBits {
  explicit JsonBits(Number& given, std::string_view refusal = "the number is too large")
      : number(given), problem(refusal) {}

  [[nodiscard]] bool empty() const noexcept { return number == std::remove_const_t<Number>(); }

  Number& number;
  std::string_view problem;
};
template <typename Number>
void write_json(JsonWriter& json, JsonBits<Number> bits) {
  json.value(std::bit_cast<std::uint32_t>(std::optional<float>(bits.number).value_or(0)));
}
template <typename Number>
void read_json(const JsonReader& reader, JsonReader::Element value, const JsonPlace& place,
               JsonBits<Number> bits) {
  bits.number = std::bit_cast<float>(reader.small_number(value, place, bits.problem));
}

inline void write_json(JsonWriter& json, const BoxDim& dim) {
  json.array(dim.extent, dim.source_stride, dim.target_stride);
}
void read_json(const JsonReader& reader, JsonReader::Element value, const JsonPlace& place,
               BoxDim& dim);

using DeviceMapEntry = std::pair<std::string, std::string>;

void read_json(const JsonReader& reader, JsonReader::Element value, const JsonPlace& place,
               Origin& origin);
void write_json(JsonWriter& json, const Constant& constant);
void read_json(const JsonReader& reader, JsonReader::Element value, const JsonPlace& place,
               Constant& constant);
void read_json(const JsonReader& reader, JsonReader::Element value, const JsonPlace& place,
               DeviceMapEntry& entry);

template <typename Visitor>
void visit_fields(Visitor& visitor, Like<Box> auto& box, const PlanNumbers& numbers) {
  if (!visitor.optional("decoding", JsonIndex(box.decoding, numbers.decodings))) {
    visitor.member("source", JsonIndex(box.source, numbers.sources));
  }
  visitor.member("source_offset", box.source_offset);
  visitor.member("target_offset", box.target_offset);
  visitor.member("dims", box.dims);
}

template <typename Visitor>
void visit_fields(Visitor& visitor, Like<LowRank> auto& product, const PlanNumbers& numbers) {
  visitor.member("row_begin", product.row_begin);
  visitor.member("column_begin", product.column_begin);
  visitor.member("rows", product.rows);
  visitor.member("columns", product.columns);
  visitor.member("rank", product.rank);
  visitor.member("left", product.left, numbers);
  visitor.member("right", product.right, numbers);
  visitor.optional("magnitudes", product.magnitudes, numbers);
  visitor.optional("magnitude_columns", product.magnitude_columns);
}

template <typename Visitor>
void visit_fields(Visitor& visitor, Like<Term> auto& term, const PlanNumbers& numbers) {
  visitor.member("factor_bits", JsonBits(term.factor));
  if (!visitor.optional("low_rank", term.low_rank, numbers)) {
    visitor.member("boxes", term.boxes, numbers);
    visitor.optional("is_added", term.is_added);
  }
}

template <typename Visitor>
void visit_fields(Visitor& visitor, Like<Merge> auto& merge, const PlanNumbers& numbers) {
  visitor.member("form", merge.op);
  visitor.member("factor_bits", JsonBits(merge.factor));
  visitor.member("row_elements", merge.row_elements);
  if (merge.op == MergeOp::differences) {
    visitor.member("pruning", merge.pruning);
    auto density_bits = std::bit_cast<std::uint64_t>(merge.density);
    visitor.member("density_bits", density_bits);
    if constexpr (Visitor::is_reading) merge.density = std::bit_cast<double>(density_bits);
    visitor.member("seed", merge.seed);
    visitor.optional("draws_as", merge.draws_as);
    visitor.member("elects_signs", merge.elects_signs);
    visitor.member("is_mean", merge.is_mean);
  }
  visitor.member("terms", merge.terms, numbers);
}

}  // namespace loadstone
