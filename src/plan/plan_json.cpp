#include "plan/plan_json.h"

#include <fmt/format.h>

#include <bit>
#include <concepts>
#include <span>

#include "base/base64.h"
#include "base/finding_json.h"
#include "base/json_writer.h"
#include "base/only_errors.h"
#include "base/text.h"
#include "boxes/merges.h"
#include "loadstone/error.h"
#include "plan/decodings.h"
#include "plan/merge_json.h"
#include "plan/tie_checks.h"

namespace loadstone {

namespace {

constexpr std::size_t plan_bytes_max = std::size_t{2} << 30;

// Numbers and switches of a plan that are saved as they are.
template <typename AnyPlan, typename Visit>
void visit_totals(AnyPlan& plan, Visit visit) {
  visit("bytes_to_read", plan.bytes_to_read);
  visit("bytes_to_write", plan.bytes_to_write);
  visit("staging_bytes_max", plan.staging_bytes_max);
  visit("allow_non_finite", plan.allow_non_finite);
}

// ---- writing

// Its root and shards.
void write_checkpoint(JsonWriter& json, const Catalog& catalog) {
  json.member("root", catalog.root());
  const std::string& digest = catalog.quantization_claim().digest;
  if (!digest.empty()) json.member("config_digest", digest);
  json.key("shards");
  json.begin_array();
  for (const Shard& shard : catalog.shards()) {
    json.begin_object();
    json.member("path", shard.relative_path);
    json.member("bytes", shard.identity.bytes);
    json.member("modified_ns", shard.identity.modified_ns);
    if (shard.identity.inode != 0) json.member("inode", shard.identity.inode);
    if (!shard.identity.version.empty()) json.member("version", shard.identity.version);
    json.member("header_digest", shard.header_digest);
    json.end_object();
  }
  json.end_array();
}

// Adapters. Left out where there are none.
void write_others(JsonWriter& json, const Catalog& catalog) {
  if (catalog.checkpoints().size() < 2) return;
  json.key("other_checkpoints");
  json.begin_array();
  for (const auto& other : std::span(catalog.checkpoints()).subspan(1)) {
    json.begin_object();
    write_checkpoint(json, *other);
    json.end_object();
  }
  json.end_array();
}

// The checkpoint that a source is of.
std::uint32_t checkpoint_of(const Catalog& catalog, std::uint32_t source) {
  std::uint32_t checkpoint = 0;
  while (source >= catalog.tensors_of(checkpoint).end) ++checkpoint;
  return checkpoint;
}

// What boxes name, numbered in the order of its use.
PlanNumbers write_plan_sources(JsonWriter& json, const Plan& plan) {
  PlanNumbers numbers;
  std::vector<const Decoding*> decodings;
  json.key("sources");
  json.begin_array();
  for (const PlannedTarget& target : plan.targets) {
    for (const std::uint32_t index :
         sources_of(target.recipe.boxes, plan.decodings, target.recipe.merge.get())) {
      const auto next = static_cast<std::uint32_t>(numbers.sources.size());
      if (!numbers.sources.emplace(index, next).second) continue;
      const TensorInfo& source = plan.catalog->tensors()[index];
      json.begin_object();
      json.member("name", source.name);
      const std::uint32_t checkpoint = checkpoint_of(*plan.catalog, index);
      if (checkpoint != 0) json.member("checkpoint", std::uint64_t{checkpoint});
      json.member("encoding", source.encoding.name());
      json.member("shape", source.shape.extents());
      json.end_object();
    }
    for_each_box(target.recipe, [&](const Box& box) {
      if (box.decoding == no_decoding) return;
      const auto next = static_cast<std::uint32_t>(decodings.size());
      if (!numbers.decodings.emplace(box.decoding, next).second) return;
      decodings.push_back(&plan.decodings[box.decoding]);
    });
  }
  json.end_array();
  if (decodings.empty()) return numbers;
  json.key("decodings");
  json.begin_array();
  for (const Decoding* decoding : decodings) {
    json.begin_object();
    json.member("kernel", decoding->kernel);
    json.key("sources");
    json.begin_array();
    for (const std::uint32_t source : decoding->sources) json.value(numbers.sources.at(source));
    json.end_array();
    json.member("shape", decoding->shape.extents());
    json.member("dtype", name(decoding->dtype));
    if (decoding->offset != 0) {
      json.member("offset_bits", std::uint64_t{std::bit_cast<std::uint32_t>(decoding->offset)});
    }
    if (decoding->group_size != 0) json.member("group_size", decoding->group_size);
    json.end_object();
  }
  json.end_array();
  return numbers;
}

void write_quantization(JsonWriter& json, const Quantization& quantization) {
  json.key("quantization");
  json.begin_object();
  json.member("encoding", quantization.encoding);
  json.member("dialect", quantization.dialect);
  json.member("block_size", std::uint64_t{quantization.block_size});
  json.member("nested", quantization.nested);
  if (quantization.nested_offset) {
    json.member("nested_offset_bits", std::bit_cast<std::uint32_t>(*quantization.nested_offset));
  }
  if (!quantization.group.empty()) json.member("group", quantization.group);
  // Its numbers are not part of a plan, so a plan that is read back is refused without them.
  if (quantization.importance != nullptr) {
    json.member("importance", std::uint64_t{quantization.importance->size()});
  }
  json.end_object();
}

void write_target(JsonWriter& json, const PlannedTarget& target, const PlanNumbers& numbers) {
  const Recipe& recipe = target.recipe;
  json.begin_object();
  json.member("name", target.name);
  json.member("kind", name(target.kind));
  json.member("shape", target.shape.extents());
  if (!target.slice_begin.empty()) json.member("slice_begin", target.slice_begin);
  if (!target.slice_groups.empty()) json.member("slice_groups", target.slice_groups);
  json.member("dtype", name(target.dtype));
  json.member("origin", name(recipe.origin));
  json.member("device", target.device);
  json.member("delivery", name(target.delivery));
  if (target.quantization) write_quantization(json, *target.quantization);
  json.key("recipe");
  json.begin_object();
  if (!recipe.boxes.empty()) write_boxes(json, "boxes", recipe.boxes, numbers);
  if (recipe.merge != nullptr) write_merge(json, *recipe.merge, numbers);
  if (recipe.constant != nullptr) json.member("constant", base64_from(*recipe.constant));
  if (!recipe.tie_of.empty()) json.member("tie_of", recipe.tie_of);
  if (!recipe.reason.empty()) json.member("reason", recipe.reason);
  json.end_object();
  json.end_object();
}

// ---- reading

std::vector<std::uint64_t> read_numbers(const JsonReader& reader, JsonReader::Element value,
                                        const JsonPlace& place) {
  std::vector<std::uint64_t> numbers;
  for (const auto number : reader.array(value, place)) {
    numbers.push_back(reader.unsigned_number(number, {&place, {}, numbers.size()}));
  }
  return numbers;
}

Shape read_shape(const JsonReader& reader, JsonReader::Element value, const JsonPlace& place) {
  Shape shape(read_numbers(reader, value, place));
  if (!shape.numel()) reader.refuse(place, "the size does not fit 64 bits", shape.text());
  return shape;
}

SavedShard read_shard(const JsonReader& reader, JsonReader::Element value, const JsonPlace& place) {
  JsonObject fields(reader, value, place);
  SavedShard shard;
  shard.path = reader.string(fields.required("path"), fields.at("path"));
  shard.identity.bytes = reader.unsigned_number(fields.required("bytes"), fields.at("bytes"));
  shard.identity.modified_ns =
      reader.signed_number(fields.required("modified_ns"), fields.at("modified_ns"));
  if (const auto inode = fields.optional("inode")) {
    shard.identity.inode = reader.unsigned_number(*inode, fields.at("inode"));
  }
  if (const auto version = fields.optional("version")) {
    shard.identity.version = reader.string(*version, fields.at("version"));
  }
  shard.header_digest = reader.string(fields.required("header_digest"), fields.at("header_digest"));
  fields.done();
  return shard;
}

SavedSource read_source(const JsonReader& reader, JsonReader::Element value,
                        const JsonPlace& place) {
  JsonObject fields(reader, value, place);
  SavedSource source;
  if (const auto checkpoint = fields.optional("checkpoint")) {
    source.checkpoint = small_number(reader, *checkpoint, fields.at("checkpoint"));
  }
  source.name = reader.string(fields.required("name"), fields.at("name"));
  const auto text = reader.string(fields.required("encoding"), fields.at("encoding"));
  const auto encoding = Encoding::from_name(text);
  if (!encoding) reader.refuse(fields.at("encoding"), "unknown encoding", printable(text));
  source.encoding = *encoding;
  source.shape = read_shape(reader, fields.required("shape"), fields.at("shape"));
  fields.done();
  return source;
}

Decoding read_decoding(const JsonReader& reader, JsonReader::Element value,
                       const JsonPlace& place) {
  JsonObject fields(reader, value, place);
  Decoding decoding;
  decoding.kernel = reader.string(fields.required("kernel"), fields.at("kernel"));
  const JsonPlace sources_place = fields.at("sources");
  for (const auto item : reader.array(fields.required("sources"), sources_place)) {
    const auto number = reader.unsigned_number(item, sources_place);
    if (number > UINT32_MAX) reader.refuse(sources_place, "no such source", std::to_string(number));
    decoding.sources.push_back(static_cast<std::uint32_t>(number));
  }
  decoding.shape = read_shape(reader, fields.required("shape"), fields.at("shape"));
  const auto text = reader.string(fields.required("dtype"), fields.at("dtype"));
  const auto dtype = dtype_from_name(text);
  if (!dtype) reader.refuse(fields.at("dtype"), "unknown dtype", printable(text));
  decoding.dtype = *dtype;
  if (const auto bits = fields.optional("offset_bits")) {
    const auto number = reader.unsigned_number(*bits, fields.at("offset_bits"));
    if (number > UINT32_MAX) {
      reader.refuse(fields.at("offset_bits"), "more than the 32 bits of an F32",
                    std::to_string(number));
    }
    decoding.offset = std::bit_cast<float>(static_cast<std::uint32_t>(number));
  }
  if (const auto size = fields.optional("group_size")) {
    decoding.group_size = reader.unsigned_number(*size, fields.at("group_size"));
  }
  fields.done();
  return decoding;
}

Recipe read_recipe(const JsonReader& reader, JsonReader::Element value, const JsonPlace& place) {
  JsonObject fields(reader, value, place);
  Recipe recipe;
  if (const auto boxes = fields.optional("boxes")) {
    recipe.boxes = read_boxes(reader, *boxes, fields.at("boxes"));
  }
  if (const auto merge = fields.optional("merge")) {
    recipe.merge = std::make_shared<const Merge>(read_merge(reader, *merge, fields.at("merge")));
  }
  if (const auto constant = fields.optional("constant")) {
    auto bytes = bytes_from_base64(reader.string(*constant, fields.at("constant")));
    if (!bytes) reader.refuse(fields.at("constant"), "no base64");
    recipe.constant = std::make_shared<const std::vector<std::byte>>(*std::move(bytes));
  }
  if (const auto tie_of = fields.optional("tie_of")) {
    recipe.tie_of = reader.string(*tie_of, fields.at("tie_of"));
  }
  if (const auto reason = fields.optional("reason")) {
    recipe.reason = reader.string(*reason, fields.at("reason"));
  }
  fields.done();
  return recipe;
}

Quantization read_quantization(const JsonReader& reader, JsonReader::Element value,
                               const JsonPlace& place) {
  JsonObject fields(reader, value, place);
  const auto small = [&](std::string_view field, JsonReader::Element number) {
    return small_number(reader, number, fields.at(field));
  };
  Quantization quantization;
  quantization.encoding = reader.string(fields.required("encoding"), fields.at("encoding"));
  quantization.dialect = reader.string(fields.required("dialect"), fields.at("dialect"));
  quantization.block_size = small("block_size", fields.required("block_size"));
  quantization.nested = reader.boolean(fields.required("nested"), fields.at("nested"));
  if (const auto bits = fields.optional("nested_offset_bits")) {
    quantization.nested_offset = std::bit_cast<float>(small("nested_offset_bits", *bits));
  }
  if (const auto group = fields.optional("group")) {
    quantization.group = reader.string(*group, fields.at("group"));
  }
  if (fields.optional("importance")) {
    reader.refuse(fields.at("importance"), "a saved plan does not hold an importance: plan again",
                  "an importance");
  }
  fields.done();
  return quantization;
}

PlannedTarget read_target(const JsonReader& reader, JsonReader::Element value,
                          const JsonPlace& place) {
  JsonObject fields(reader, value, place);
  const auto text = [&](std::string_view field) {
    return reader.string(fields.required(field), fields.at(field));
  };
  PlannedTarget target;
  target.name = text("name");
  target.kind = reader.named<TargetKind>(fields.required("kind"), fields.at("kind"));
  target.shape = read_shape(reader, fields.required("shape"), fields.at("shape"));
  for (const auto& [field, numbers] : {std::pair("slice_begin", &target.slice_begin),
                                       std::pair("slice_groups", &target.slice_groups)}) {
    const auto found = fields.optional(field);
    if (!found) continue;
    *numbers = read_numbers(reader, *found, fields.at(field));
    if (numbers->size() != target.shape.rank()) {
      reader.refuse(fields.at(field), "one number for each dimension", {}, target.shape.text());
    }
  }
  const auto dtype = dtype_from_name(text("dtype"));
  if (!dtype) reader.refuse(fields.at("dtype"), "unknown dtype", printable(text("dtype")));
  target.dtype = *dtype;
  target.device = text("device");
  target.delivery = reader.named<Delivery>(fields.required("delivery"), fields.at("delivery"));
  if (const auto quantization = fields.optional("quantization")) {
    target.quantization = read_quantization(reader, *quantization, fields.at("quantization"));
  }
  target.recipe = read_recipe(reader, fields.required("recipe"), fields.at("recipe"));
  const auto origin = fields.required("origin");
  const bool is_old_word = text("origin") == "exception";  // in plans that 0.1.0 saved
  target.recipe.origin =
      is_old_word ? Origin::excluded : reader.named<Origin>(origin, fields.at("origin"));
  fields.done();
  return target;
}

template <typename Item, typename Read>
void read_array(const JsonReader& reader, JsonObject& fields, std::string_view field,
                std::vector<Item>& items, Read read) {
  const JsonPlace place = fields.at(field);
  for (const auto item : reader.array(fields.required(field), place)) {
    const JsonPlace item_place = {&place, {}, items.size()};
    items.push_back(read(reader, item, item_place));
  }
}

SavedCheckpoint read_root(const JsonReader& reader, JsonObject& fields) {
  SavedCheckpoint checkpoint;
  checkpoint.root = reader.string(fields.required("root"), fields.at("root"));
  if (const auto digest = fields.optional("config_digest")) {
    checkpoint.config_digest = reader.string(*digest, fields.at("config_digest"));
  }
  read_array(reader, fields, "shards", checkpoint.shards, read_shard);
  return checkpoint;
}

SavedCheckpoint read_other(const JsonReader& reader, JsonReader::Element value,
                           const JsonPlace& place) {
  JsonObject fields(reader, value, place);
  SavedCheckpoint checkpoint = read_root(reader, fields);
  fields.done();
  return checkpoint;
}

std::pair<std::string, std::string> read_entry(const JsonReader& reader, JsonReader::Element value,
                                               const JsonPlace& place) {
  const auto parts = reader.array(value, place);
  if (parts.size() != 2) reader.refuse(place, "an entry is a module and a device");
  return {std::string(reader.string(parts.at(0).value_unsafe(), place)),
          std::string(reader.string(parts.at(1).value_unsafe(), place))};
}

void read_totals(const JsonReader& reader, JsonObject& fields, Plan& plan) {
  visit_totals(plan, [&](std::string_view field, auto& total) {
    const auto value = fields.required(field);
    if constexpr (std::same_as<decltype(total), bool&>) {
      total = reader.boolean(value, fields.at(field));
    } else {
      total = reader.unsigned_number(value, fields.at(field));
    }
  });
  const auto count = [&](const char* field, JsonReader::Element value, unsigned most) {
    const auto found = reader.unsigned_number(value, fields.at(field));
    if (found == 0 || found > most) {
      reader.refuse(fields.at(field), fmt::format("no number of {}", field), std::to_string(found),
                    "1 to " + std::to_string(most));
    }
    return static_cast<unsigned>(found);
  };
  plan.threads = count("threads", fields.required("threads"), defaults::threads_most);
  if (const auto ranks = fields.optional("local_ranks")) {
    plan.local_ranks = count("local_ranks", *ranks, UINT32_MAX);
  }
  const JsonPlace place = fields.at("peak_bytes");
  simdjson::dom::object peaks;
  if (fields.required("peak_bytes").get(peaks) != simdjson::SUCCESS) {
    reader.refuse(place, "wrong type", {}, "an object");
  }
  for (const auto peak : peaks) {
    const auto bytes = reader.unsigned_number(peak.value, {&place, peak.key, 0});
    if (!plan.peak_bytes.emplace(peak.key, bytes).second) {
      reader.refuse({&place, peak.key, 0}, "the field stands here twice");
    }
  }
}

}  // namespace

static std::string plan_json(const Plan& plan) {
  JsonWriter json(1, 2);
  json.begin_object();
  json.member("version", plan_json_version);
  const auto& joined = plan.catalog->checkpoints();
  write_checkpoint(json, joined.empty() ? *plan.catalog : *joined.front());
  write_others(json, *plan.catalog);
  visit_totals(plan, [&](std::string_view field, auto total) { json.member(field, total); });
  json.key("peak_bytes");
  json.begin_object();
  for (const auto& [device, bytes] : plan.peak_bytes) json.member(device, bytes);
  json.end_object();
  json.member("threads", plan.threads);
  if (plan.local_ranks > 1) json.member("local_ranks", plan.local_ranks);
  json.member("offload_folder", plan.offload_folder);
  json.key("device_map");
  json.begin_array();
  for (const auto& [path, device] : plan.device_map) {
    json.value(std::vector<std::string>{path, device});
  }
  json.end_array();
  write_findings(json, plan.findings);
  const PlanNumbers numbers = write_plan_sources(json, plan);
  json.key("targets");
  json.begin_array();
  for (const PlannedTarget& target : plan.targets) write_target(json, target, numbers);
  json.end_array();
  write_tie_checks(json, plan);
  json.end_object();
  if (json.is_lossy()) {
    throw Error("plan.json", "a path or name in the plan is not UTF-8, which JSON cannot hold",
                {.path = plan.catalog->root(), .expected = "paths and names in UTF-8"});
  }
  return json.take() + "\n";
}

std::string to_json(const Plan& plan) {
  return only_errors([&] { return plan_json(plan); });
}

SavedPlan read_plan(std::string_view text) {
  const JsonDocument document(text, "plan.json", plan_bytes_max);
  const JsonReader reader("plan.json");
  const JsonPlace top;
  JsonObject fields(reader, document.root(), top);
  const auto version = reader.unsigned_number(fields.required("version"), fields.at("version"));
  if (version != plan_json_version) {
    reader.refuse(fields.at("version"), "a version that is not known", std::to_string(version),
                  std::to_string(plan_json_version));
  }
  SavedPlan saved;
  saved.checkpoints.push_back(read_root(reader, fields));
  if (fields.optional("other_checkpoints")) {
    read_array(reader, fields, "other_checkpoints", saved.checkpoints, read_other);
  }
  read_array(reader, fields, "sources", saved.sources, read_source);
  if (fields.optional("decodings")) {
    read_array(reader, fields, "decodings", saved.plan.decodings, read_decoding);
  }
  read_array(reader, fields, "targets", saved.plan.targets, read_target);
  read_tie_checks(reader, fields, saved);
  read_array(reader, fields, "device_map", saved.plan.device_map, read_entry);
  read_totals(reader, fields, saved.plan);
  saved.plan.offload_folder =
      reader.string(fields.required("offload_folder"), fields.at("offload_folder"));
  saved.plan.findings = read_findings(reader, fields.required("findings"), fields.at("findings"));
  fields.done();
  return saved;
}

}  // namespace loadstone
