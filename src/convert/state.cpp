#include "convert/state.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <bit>
#include <span>

#include "base/json_fields.h"
#include "base/json_writer.h"
#include "base/text.h"
#include "boxes/merges.h"
#include "convert/container.h"
#include "convert/extras.h"
#include "formats/metadata.h"
#include "loadstone/error.h"
#include "loadstone/version.h"

namespace loadstone {

namespace {

constexpr std::uint64_t state_version = 1;
constexpr const char* state_code = "convert.state";

void add_numbers(Digest& digest, std::span<const std::uint64_t> numbers) noexcept {
  add_number(digest, numbers.size());
  for (const std::uint64_t number : numbers) add_number(digest, number);
}

void add_source(Digest& digest, const Catalog& catalog, std::uint32_t source) {
  const TensorInfo& tensor = catalog.tensors().at(source);
  add_text(digest, tensor.name);
  add_text(digest, tensor.encoding.name());
  add_numbers(digest, tensor.shape.extents());
}

void add_tensor(Digest& digest, const PlannedTarget& target) {
  add_text(digest, target.name);
  add_text(digest, name(target.dtype));
  add_numbers(digest, target.shape.extents());
  add_number(digest, target.quantization ? 1 : 0);
  if (!target.quantization) return;
  const Quantization& quantization = *target.quantization;
  add_text(digest, quantization.encoding);
  add_text(digest, quantization.dialect);
  add_text(digest, quantization.group);
  add_number(digest, quantization.block_size);
  add_number(digest, quantization.nested ? 1 : 0);
  add_number(digest, quantization.nested_offset ? 1 : 0);
  add_number(digest, std::bit_cast<std::uint32_t>(quantization.nested_offset.value_or(0)));
  add_number(digest, quantization.importance ? quantization.importance->size() + 1 : 0);
  if (quantization.importance) digest.update(std::as_bytes(std::span(*quantization.importance)));
}

void add_boxes(Digest& digest, const Catalog& catalog, const std::vector<Box>& boxes) {
  add_number(digest, boxes.size());
  for (const Box& box : boxes) {
    add_source(digest, catalog, box.source);
    add_number(digest, box.source_offset);
    add_number(digest, box.target_offset);
    add_number(digest, box.decoding);
    add_number(digest, box.dims.size());
    for (const BoxDim& dim : box.dims) {
      add_numbers(digest, std::array{dim.extent, dim.source_stride, dim.target_stride});
    }
  }
}

// Checkpoints that are merged have the same names: only shards tell them apart.
void add_operand(Digest& digest, const Catalog& catalog, const std::vector<Box>& boxes) {
  for (const Box& box : boxes) add_number(digest, catalog.tensors().at(box.source).shard);
  add_boxes(digest, catalog, boxes);
}

void add_merge(Digest& digest, const Catalog& catalog, const Merge& merge) {
  add_number(digest, std::bit_cast<std::uint32_t>(merge.factor));
  add_number(digest, merge.row_elements);
  for (const auto form : {static_cast<int>(merge.form), static_cast<int>(merge.pruning),
                          static_cast<int>(merge.elects_signs), static_cast<int>(merge.is_mean)}) {
    add_number(digest, static_cast<std::uint64_t>(form));
  }
  add_number(digest, std::bit_cast<std::uint64_t>(merge.density));
  add_number(digest, merge.seed);
  add_number(digest, merge.terms.size());
  for (const Term& term : merge.terms) {
    add_number(digest, std::bit_cast<std::uint32_t>(term.factor));
    add_number(digest, term.low_rank ? 1 : 0);
    if (!term.low_rank) continue;
    const LowRank& product = *term.low_rank;
    add_numbers(digest, std::array{product.row_begin, product.column_begin, product.rows,
                                   product.columns, product.rank});
  }
  for_each_operand(merge, [&](const Operand& each) { add_operand(digest, catalog, each.boxes); });
}

void add_recipe(Digest& digest, const Catalog& catalog, const Recipe& recipe) {
  add_boxes(digest, catalog, recipe.boxes);
  add_number(digest, recipe.constant ? recipe.constant->size() + 1 : 0);
  if (recipe.constant) digest.update(*recipe.constant);
  if (recipe.merge != nullptr) add_merge(digest, catalog, *recipe.merge);
}

void add_decoding(Digest& digest, const Catalog& catalog, const Decoding& decoding) {
  add_text(digest, decoding.kernel);
  add_text(digest, name(decoding.dtype));
  add_number(digest, std::bit_cast<std::uint32_t>(decoding.offset));
  add_number(digest, decoding.group_size);
  add_numbers(digest, decoding.shape.extents());
  add_number(digest, decoding.sources.size());
  for (const std::uint32_t source : decoding.sources) add_source(digest, catalog, source);
}

SourceState source_state(const Shard& shard) {
  return {.path = printable(shard.relative_path, 4096),
          .bytes = shard.identity.bytes,
          .modified_ns = shard.identity.modified_ns,
          .inode = shard.identity.inode,
          .version = shard.identity.version,
          .header_digest = shard.header_digest};
}

[[noreturn]] void refuse_state(const std::string& folder, std::string message,
                               std::string found = {}, std::string expected = {}) {
  message += "; finish it as it was begun, or remove the folder";
  throw Error(state_code, std::move(message),
              {.path = folder, .found = std::move(found), .expected = std::move(expected)});
}

void require_same_sources(const WorkState& found, const WorkState& expected,
                          const std::string& folder) {
  for (std::size_t i = 0; i < std::min(found.sources.size(), expected.sources.size()); ++i) {
    const SourceState& then = found.sources[i];
    const SourceState& now = expected.sources[i];
    const std::string_view what = then.path != now.path                     ? "name"
                                  : then.bytes != now.bytes                 ? "size"
                                  : then.header_digest != now.header_digest ? "header"
                                                                            : "";
    if (what.empty()) continue;  // a copy has another time and inode
    refuse_state(folder, fmt::format("the work was begun with another source: '{}' has another {}",
                                     printable(now.path), what));
  }
  if (found.sources.size() != expected.sources.size()) {
    refuse_state(folder, "the work was begun with another source",
                 fmt::format("{} files then", found.sources.size()),
                 fmt::format("{} files now", expected.sources.size()));
  }
}

}  // namespace

void add_text(Digest& digest, std::string_view text) noexcept {
  add_number(digest, text.size());
  digest.update(std::as_bytes(std::span(text)));
}

void add_number(Digest& digest, std::uint64_t number) noexcept {
  std::array<std::byte, 8> bytes;
  for (std::size_t i = 0; i < bytes.size(); ++i) {
    bytes[i] = static_cast<std::byte>(number >> (8 * i) & 0xff);
  }
  digest.update(bytes);
}

WorkState state_of(const Conversion& conversion, WritableStorage& storage) {
  const Plan& plan = conversion.plan;
  WorkState state;
  state.program = LOADSTONE_VERSION;
  state.stem = conversion.stem;
  for (const Shard& shard : plan.catalog->shards()) state.sources.push_back(source_state(shard));
  Digest metadata;
  for (const auto& [key, item] : conversion.metadata) {
    add_text(metadata, key);
    JsonWriter json;
    write_json(json, item);
    add_text(metadata, type_name(item));
    add_text(metadata, json.take());
  }
  Digest tensors;
  Digest values;
  std::vector<const PlannedTarget*> targets;  // by name: their order is that of the files
  for (const PlannedTarget& target : plan.targets) targets.push_back(&target);
  std::ranges::sort(targets, {},
                    [](const PlannedTarget* target) -> std::string_view { return target->name; });
  for (const PlannedTarget* target : targets) {
    add_tensor(tensors, *target);
    add_recipe(values, *plan.catalog, target->recipe);
  }
  for (const Decoding& decoding : plan.decodings) add_decoding(values, *plan.catalog, decoding);
  add_number(values, conversion.plan.allow_non_finite ? 1 : 0);
  Digest files;
  add_text(files, conversion.index_name);
  const Container& container = container_of(conversion.format);
  for (std::size_t f = 0; f < conversion.files.size(); ++f) {
    const OutputFile& file = conversion.files[f];
    add_text(files, file.name);
    add_number(files, file.data_bytes);
    add_text(files, container.header(conversion, f));
    for (const OutputTensor& tensor : file.tensors) {
      add_number(files, tensor.is_inverted ? 1 : 0);
      add_number(files, tensor.constant ? tensor.constant->size() + 1 : 0);
      if (tensor.constant) files.update(*tensor.constant);
    }
  }
  Digest extras;
  add_extras(conversion, storage, extras);
  state.metadata = metadata.hex();
  state.tensors = tensors.hex();
  state.values = values.hex();
  state.files = files.hex();
  state.extras = extras.hex();
  for (const ExtraFile& extra : conversion.extras) state.extra_names.push_back(extra.name);
  return state;
}

void visit_fields(auto& visitor, Like<SourceState> auto& source) {
  visitor.member("path", source.path);
  visitor.member("bytes", source.bytes);
  visitor.member("modified_ns", source.modified_ns);
  visitor.member("inode", source.inode);
  visitor.optional("version", source.version);
  visitor.member("header_digest", source.header_digest);
}

template <typename Visitor>
void visit_fields(Visitor& visitor, Like<WorkState> auto& state) {
  std::uint64_t version = state_version;
  visitor.member("version", version);
  if constexpr (Visitor::is_reading) {
    if (version != state_version) {
      visitor.refuse("version", "the work was begun by another version of loadstone");
    }
  }
  visitor.member("program", state.program);
  std::uint64_t parts = state.parts;
  visitor.member("parts", parts);
  if constexpr (Visitor::is_reading) {
    if (parts > UINT32_MAX) visitor.refuse("parts", "too many");
    state.parts = static_cast<std::uint32_t>(parts);
  }
  visitor.member("stem", state.stem);
  visitor.member("sources", state.sources);
  visitor.optional("has_copies", state.has_copies);
  visitor.member("metadata", state.metadata);
  visitor.member("tensors", state.tensors);
  visitor.member("values", state.values);
  visitor.member("files", state.files);
  visitor.member("extras", state.extras);
  visitor.member("extra_names", state.extra_names);
}

std::string to_json(const WorkState& state) { return json_text(state, 2) + "\n"; }

WorkState work_state_from_json(std::string_view text) {
  const JsonDocument document(text, state_code, state_bytes_max);
  WorkState state;
  JsonReader(state_code).read(document.root(), {}, state);
  return state;
}

void join_work(WorkState& state, const WorkState& found, const std::string& folder) {
  if (found.program != state.program) {
    refuse_state(folder, "the work was begun by another version of loadstone", found.program,
                 state.program);
  }
  require_same_sources(found, state, folder);
  const auto require = [&](const std::string& then, const std::string& now, const char* message) {
    if (then != now) refuse_state(folder, message);
  };
  require(found.metadata, state.metadata, "the work was begun with other metadata");
  require(found.tensors, state.tensors,
          "the work was begun with other options: names, shapes, dtypes or encodings of tensors "
          "differ");
  require(found.values, state.values,
          "the work was begun with other rules: tensors are made of others, or in another way");
  require(found.files, state.files,
          "the work was begun with other shards: their size or names differ");
  require(found.extras, state.extras, "the work was begun with other companion files");
  state.has_copies = found.has_copies || found.sources != state.sources;
}

}  // namespace loadstone
