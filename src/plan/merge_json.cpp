#include "plan/merge_json.h"

#include <bit>
#include <string>

#include "boxes/merges.h"

namespace loadstone {

namespace {

void write_box(JsonWriter& json, const Box& box, const PlanNumbers& numbers) {
  json.begin_object();
  if (box.decoding == no_decoding) {
    json.member("source", numbers.sources.at(box.source));
  } else {
    json.member("decoding", numbers.decodings.at(box.decoding));
  }
  json.member("source_offset", box.source_offset);
  json.member("target_offset", box.target_offset);
  json.key("dims");
  json.begin_array();
  for (const BoxDim& dim : box.dims) {
    json.begin_array();
    json.value(dim.extent);
    json.value(dim.source_stride);
    json.value(dim.target_stride);
    json.end_array();
  }
  json.end_array();
  json.end_object();
}

Box read_box(const JsonReader& reader, JsonReader::Element value, const JsonPlace& place) {
  JsonObject fields(reader, value, place);
  const auto number = [&](std::string_view field) {
    return reader.unsigned_number(fields.required(field), fields.at(field));
  };
  Box box;
  const bool is_decoded = fields.optional("decoding").has_value();
  const std::string_view from = is_decoded ? "decoding" : "source";
  const std::uint64_t index = number(from);
  if (index >= no_decoding) {
    reader.refuse(fields.at(from), "there is no such one", std::to_string(index));
  }
  (is_decoded ? box.decoding : box.source) = static_cast<std::uint32_t>(index);
  box.source_offset = number("source_offset");
  box.target_offset = number("target_offset");
  const JsonPlace dims_place = fields.at("dims");
  for (const auto item : reader.array(fields.required("dims"), dims_place)) {
    const JsonPlace dim_place = {&dims_place, {}, box.dims.size()};
    const auto parts = reader.array(item, dim_place);
    if (parts.size() != 3) {
      reader.refuse(dim_place, "a dimension has three numbers", std::to_string(parts.size()),
                    "[extent, source_stride, target_stride]");
    }
    box.dims.push_back({reader.unsigned_number(parts.at(0).value_unsafe(), dim_place),
                        reader.unsigned_number(parts.at(1).value_unsafe(), dim_place),
                        reader.unsigned_number(parts.at(2).value_unsafe(), dim_place)});
  }
  fields.done();
  return box;
}

// Bits, so that what is read back is what was written.
float read_factor(const JsonReader& reader, JsonObject& fields) {
  return std::bit_cast<float>(
      small_number(reader, fields.required("factor_bits"), fields.at("factor_bits")));
}

// The members of a product that are numbers.
template <typename AnyProduct, typename Visit>
void visit_place(AnyProduct& product, Visit visit) {
  visit("row_begin", product.row_begin);
  visit("column_begin", product.column_begin);
  visit("rows", product.rows);
  visit("columns", product.columns);
  visit("rank", product.rank);
}

void write_term(JsonWriter& json, const Term& term, const PlanNumbers& numbers) {
  json.begin_object();
  json.member("factor_bits", std::uint64_t{std::bit_cast<std::uint32_t>(term.factor)});
  if (!term.low_rank) {
    write_boxes(json, "boxes", term.boxes, numbers);
  } else {
    const LowRank& product = *term.low_rank;
    json.key("low_rank");
    json.begin_object();
    visit_place(product,
                [&](std::string_view key, std::uint64_t number) { json.member(key, number); });
    write_boxes(json, "left", product.left, numbers);
    write_boxes(json, "right", product.right, numbers);
    if (!product.magnitudes.empty()) {
      write_boxes(json, "magnitudes", product.magnitudes, numbers);
    }
    json.end_object();
  }
  json.end_object();
}

LowRank read_low_rank(const JsonReader& reader, JsonReader::Element value, const JsonPlace& place) {
  JsonObject fields(reader, value, place);
  LowRank product;
  visit_place(product, [&](std::string_view key, std::uint64_t& number) {
    number = reader.unsigned_number(fields.required(key), fields.at(key));
  });
  product.left = read_boxes(reader, fields.required("left"), fields.at("left"));
  product.right = read_boxes(reader, fields.required("right"), fields.at("right"));
  if (const auto magnitudes = fields.optional("magnitudes")) {
    product.magnitudes = read_boxes(reader, *magnitudes, fields.at("magnitudes"));
  }
  fields.done();
  return product;
}

Term read_term(const JsonReader& reader, JsonReader::Element value, const JsonPlace& place) {
  JsonObject fields(reader, value, place);
  Term term;
  term.factor = read_factor(reader, fields);
  if (const auto product = fields.optional("low_rank")) {
    term.low_rank = read_low_rank(reader, *product, fields.at("low_rank"));
  } else {
    term.boxes = read_boxes(reader, fields.required("boxes"), fields.at("boxes"));
  }
  fields.done();
  return term;
}

}  // namespace

std::uint32_t small_number(const JsonReader& reader, JsonReader::Element value,
                           const JsonPlace& place) {
  const std::uint64_t found = reader.unsigned_number(value, place);
  if (found > UINT32_MAX) reader.refuse(place, "too large", std::to_string(found));
  return static_cast<std::uint32_t>(found);
}

void write_boxes(JsonWriter& json, std::string_view key, const std::vector<Box>& boxes,
                 const PlanNumbers& numbers) {
  json.key(key);
  json.begin_array();
  for (const Box& box : boxes) write_box(json, box, numbers);
  json.end_array();
}

std::vector<Box> read_boxes(const JsonReader& reader, JsonReader::Element value,
                            const JsonPlace& place) {
  std::vector<Box> boxes;
  for (const auto item : reader.array(value, place)) {
    boxes.push_back(read_box(reader, item, {&place, {}, boxes.size()}));
  }
  return boxes;
}

void write_merge(JsonWriter& json, const Merge& merge, const PlanNumbers& numbers) {
  json.key("merge");
  json.begin_object();
  json.member("form", name(merge.form));
  json.member("factor_bits", std::uint64_t{std::bit_cast<std::uint32_t>(merge.factor)});
  json.member("row_elements", merge.row_elements);
  if (merge.form == MergeForm::differences) {
    json.member("pruning", name(merge.pruning));
    json.member("density_bits", std::bit_cast<std::uint64_t>(merge.density));
    json.member("seed", merge.seed);
    if (!merge.draws_as.empty()) json.member("draws_as", merge.draws_as);
    json.member("elects_signs", merge.elects_signs);
    json.member("is_mean", merge.is_mean);
  }
  json.key("terms");
  json.begin_array();
  for (const Term& term : merge.terms) write_term(json, term, numbers);
  json.end_array();
  json.end_object();
}

Merge read_merge(const JsonReader& reader, JsonReader::Element value, const JsonPlace& place) {
  JsonObject fields(reader, value, place);
  const auto number = [&](std::string_view key) {
    return reader.unsigned_number(fields.required(key), fields.at(key));
  };
  const auto flag = [&](std::string_view key) {
    return reader.boolean(fields.required(key), fields.at(key));
  };
  Merge merge;
  merge.form = reader.named<MergeForm>(fields.required("form"), fields.at("form"));
  merge.factor = read_factor(reader, fields);
  merge.row_elements = number("row_elements");
  if (merge.form == MergeForm::differences) {
    merge.pruning = reader.named<Pruning>(fields.required("pruning"), fields.at("pruning"));
    merge.density = std::bit_cast<double>(number("density_bits"));
    merge.seed = number("seed");
    if (const auto name = fields.optional("draws_as")) {
      merge.draws_as = reader.string(*name, fields.at("draws_as"));
    }
    merge.elects_signs = flag("elects_signs");
    merge.is_mean = flag("is_mean");
  }
  const JsonPlace terms = fields.at("terms");
  for (const auto item : reader.array(fields.required("terms"), terms)) {
    merge.terms.push_back(read_term(reader, item, {&terms, {}, merge.terms.size()}));
  }
  fields.done();
  return merge;
}

}  // namespace loadstone
