#include "convert/write/state.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <bit>
#include <set>
#include <span>
#include <type_traits>

#include "base/json_fields.h"
#include "base/text.h"
#include "boxes/merges.h"
#include "convert/write/container.h"
#include "convert/write/extras.h"
#include "formats/metadata.h"
#include "loadstone/error.h"
#include "loadstone/version.h"

namespace loadstone {

namespace {

constexpr std::uint64_t state_version = 1;
constexpr const char* state_code = "convert.state";

// Adds numbers as eight bytes, and strings and lists with their length.
template <typename... Items>
void add_all(Digest& digest, const Items&... items) {
  const auto add_one = [&](const auto& item) {
    using Item = std::remove_cvref_t<decltype(item)>;
    if constexpr (std::is_convertible_v<Item, std::string_view>) {
      add_text(digest, item);
    } else if constexpr (std::is_same_v<Item, Shape>) {
      add_all(digest, item.extents());
    } else if constexpr (requires { item.begin(); }) {
      add_number(digest, item.size());
      for (const auto each : item) add_number(digest, each);
    } else if constexpr (std::is_same_v<Item, float>) {
      add_number(digest, std::bit_cast<std::uint32_t>(item));
    } else if constexpr (std::is_same_v<Item, double>) {
      add_number(digest, std::bit_cast<std::uint64_t>(item));
    } else {
      add_number(digest, static_cast<std::uint64_t>(item));
    }
  };
  (add_one(items), ...);
}

// Adds the content of a vector. A null pointer and an empty vector give different digests.
void add_vector(Digest& digest, const auto& vector) {
  add_all(digest, vector ? vector->size() + 1 : 0);
  if (vector) digest.update(std::as_bytes(std::span(*vector)));
}

void add_source(Digest& digest, const Catalog& catalog, std::uint32_t source) {
  const TensorInfo& tensor = catalog.tensors().at(source);
  add_all(digest, tensor.name, tensor.encoding.name(), tensor.shape);
}

void add_tensor(Digest& digest, const PlannedTarget& target) {
  add_all(digest, target.name, name(target.dtype), target.shape, target.quantization.has_value());
  if (!target.quantization) return;
  const Quantization& quantization = *target.quantization;
  add_all(digest, quantization.encoding, quantization.dialect, quantization.group,
          quantization.block_size, quantization.nested, quantization.nested_offset.has_value(),
          quantization.nested_offset.value_or(0));
  add_vector(digest, quantization.importance);
}

void add_boxes(Digest& digest, const Catalog& catalog, const std::vector<Box>& boxes) {
  add_all(digest, boxes.size());
  for (const Box& box : boxes) {
    add_source(digest, catalog, box.source);
    add_all(digest, box.source_offset, box.target_offset, box.decoding, box.dims.size());
    for (const BoxDim& dim : box.dims) {
      add_all(digest, std::array{dim.extent, dim.source_stride, dim.target_stride});
    }
  }
}

// Adds boxes with the shards of their sources, because merged checkpoints have the same tensor
// names.
void add_operand(Digest& digest, const Catalog& catalog, const std::vector<Box>& boxes) {
  for (const Box& box : boxes) add_all(digest, catalog.tensors().at(box.source).shard);
  add_boxes(digest, catalog, boxes);
}

void add_merge(Digest& digest, const Catalog& catalog, const Merge& merge) {
  add_all(digest, merge.factor, merge.row_elements, merge.op, merge.pruning, merge.elects_signs,
          merge.is_mean, merge.density, merge.seed, merge.terms.size());
  for (const Term& term : merge.terms) {
    add_all(digest, term.factor, term.low_rank.has_value(), term.is_added);
    if (!term.low_rank) continue;
    const LowRank& product = *term.low_rank;
    add_all(digest, std::array{product.row_begin, product.column_begin, product.rows,
                               product.columns, product.rank, product.magnitude_columns});
  }
  for_each_operand(merge, [&](const Operand& each) { add_operand(digest, catalog, each.boxes); });
}

void add_recipe(Digest& digest, const Catalog& catalog, const Recipe& recipe) {
  add_boxes(digest, catalog, recipe.boxes);
  add_vector(digest, recipe.constant);
  if (recipe.merge != nullptr) add_merge(digest, catalog, *recipe.merge);
}

void add_decoding(Digest& digest, const Catalog& catalog, const Decoding& decoding) {
  add_all(digest, decoding.kernel, name(decoding.dtype), decoding.offset, decoding.group_size,
          decoding.shape, decoding.sources.size());
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

std::optional<WorkDifference> source_difference(const WorkState& found, const WorkState& expected) {
  for (std::size_t i = 0; i < std::min(found.sources.size(), expected.sources.size()); ++i) {
    const SourceState& then = found.sources[i];
    const SourceState& now = expected.sources[i];
    const std::string_view what = then.path != now.path                     ? "name"
                                  : then.bytes != now.bytes                 ? "size"
                                  : then.header_digest != now.header_digest ? "header"
                                                                            : "";
    if (what.empty()) continue;  // a copy has a different time and inode
    return WorkDifference{
        fmt::format("a different source: '{}' has a different {}", printable(now.path), what)};
  }
  if (found.sources.size() == expected.sources.size()) return std::nullopt;
  return WorkDifference{"a different source", fmt::format("{} files then", found.sources.size()),
                        fmt::format("{} files now", expected.sources.size())};
}

constexpr std::size_t mark_digits = 8;

// Returns a mark that almost certainly changes if the tensor, its sources or its recipe change.
std::string mark_of(const Plan& plan, const PlannedTarget& target) {
  Digest mark;
  add_tensor(mark, target);
  for_each_box(target.recipe, [&](Box box) {
    // The index of a decoding depends on other tensors.
    const bool is_decoded = box.decoding != no_decoding;
    if (is_decoded) add_decoding(mark, *plan.catalog, plan.decodings[box.decoding]);
    box.decoding = is_decoded ? 0 : no_decoding;
    add_boxes(mark, *plan.catalog, {box});
  });
  if (target.recipe.merge != nullptr) {
    add_all(mark, target.recipe.merge->factor);
    for (const Term& term : target.recipe.merge->terms) add_all(mark, term.factor);
  }
  return mark.hex().substr(0, mark_digits);
}

// Names the first tensor that the earlier work did not have; returns an empty text without one.
std::string first_tensor(const WorkState& found, const WorkState& now) {
  std::set<std::string_view> known;
  for (std::size_t at = 0; at < found.marks.size(); at += mark_digits) {
    known.insert(std::string_view(found.marks).substr(at, mark_digits));
  }
  for (std::size_t i = 0; i < now.tensor_names.size(); ++i) {
    if (known.contains(std::string_view(now.marks).substr(i * mark_digits, mark_digits))) continue;
    return fmt::format("; the first is '{}'", printable(now.tensor_names[i]));
  }
  return {};
}

// Returns a text such as "; dtype was the default, and is F32"; empty without a difference.
std::string option_differences(const std::map<std::string, std::string>& then,
                               const std::map<std::string, std::string>& now) {
  std::map<std::string, std::string> both = then;
  both.insert(now.begin(), now.end());
  const auto shown = [](const auto& options, const std::string& name) {
    const auto found = options.find(name);
    return found == options.end() ? "the default" : printable(found->second, 200);
  };
  std::string text;
  for (const auto& [name, value] : both) {
    const std::string before = shown(then, name);
    const std::string after = shown(now, name);
    if (before != after) text += fmt::format("; {} was {}, and is now {}", name, before, after);
  }
  return text;
}

}  // namespace

void add_text(Digest& digest, std::string_view text) noexcept {
  add_number(digest, text.size());
  digest.update(std::as_bytes(std::span(text)));
}

WorkState state_of(const Conversion& conversion, WritableStorage& storage) {
  const Plan& plan = conversion.plan;
  WorkState state;
  state.program = LOADSTONE_VERSION;
  state.stem = conversion.stem;
  state.options = conversion.options;
  for (const Shard& shard : plan.catalog->shards()) state.sources.push_back(source_state(shard));
  Digest metadata;
  for (const auto& [key, item] : conversion.metadata) {
    add_all(metadata, key, type_name(item), json_of(item));
  }
  Digest tensors;
  Digest values;
  // Sorted by name, because the plan's order depends on the files.
  std::vector<const PlannedTarget*> targets;
  for (const PlannedTarget& target : plan.targets) targets.push_back(&target);
  std::ranges::sort(targets, {},
                    [](const PlannedTarget* target) -> std::string_view { return target->name; });
  for (const PlannedTarget* target : targets) {
    add_tensor(tensors, *target);
    add_recipe(values, *plan.catalog, target->recipe);
    state.marks += mark_of(plan, *target);
    state.tensor_names.push_back(target->name);
  }
  for (const Decoding& decoding : plan.decodings) add_decoding(values, *plan.catalog, decoding);
  add_all(values, plan.allow_non_finite);
  Digest files;
  add_all(files, conversion.index_name);
  const Container& container = container_of(conversion.format);
  for (std::size_t f = 0; f < conversion.files.size(); ++f) {
    const OutputFile& file = conversion.files[f];
    add_all(files, file.name, file.data_bytes, container.header(conversion, f));
    for (const OutputTensor& tensor : file.tensors) {
      add_all(files, tensor.is_inverted);
      add_vector(files, tensor.constant);
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
      visitor.refuse("version", "the conversion was started by a different version of loadstone");
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
  visitor.optional("marks", state.marks);
  visitor.optional("options", state.options);
  visitor.optional("outputs", state.outputs);
  visitor.optional("receipt", state.receipt);
}

std::string to_json(const WorkState& state) { return json_text(state, 2) + "\n"; }

WorkState work_state_from_json(std::string_view text) {
  const JsonDocument document(text, state_code, state_bytes_max);
  WorkState state;
  JsonReader(state_code).read(document.root(), {}, state);
  return state;
}

std::optional<WorkState> read_work_state(WritableStorage& storage, const std::string& folder) {
  const std::string path = folder + "/state.json";
  const auto text = storage.read_begin(path, state_bytes_max);
  if (!text) return std::nullopt;
  try {
    return work_state_from_json(*text);
  } catch (const Error& error) {
    Where where = error.where();
    where.path = path;
    throw Error(error.code(), error.message(), where);
  }
}

WorkState known_work_state(WritableStorage& storage, const std::string& folder) {
  try {
    return read_work_state(storage, folder).value_or(WorkState());
  } catch (const Error& error) {
    if (error.code() != "convert.state") throw;
    return {};
  }
}

void require_undivided(const WorkState& state, const std::string& folder) {
  if (state.parts == 0) return;
  throw Error("convert.state",
              fmt::format("the folder contains an unfinished conversion in {} parts: finish or "
                          "resume it, or remove the folder",
                          state.parts),
              {.path = folder});
}

std::optional<WorkDifference> work_difference(const WorkState& state, const WorkState& found) {
  if (found.program != state.program) {
    return WorkDifference{"a different version of loadstone", found.program, state.program};
  }
  if (auto source = source_difference(found, state)) return source;
  std::string what;
  if (found.metadata != state.metadata) {
    what = "different metadata";
  } else if (found.tensors != state.tensors) {
    what = "different options: names, shapes, dtypes or encodings of tensors differ" +
           first_tensor(found, state);
  } else if (found.values != state.values) {
    what = "different rules: tensors are made from different sources, or in a different way" +
           first_tensor(found, state);
  } else if (found.files != state.files) {
    what = "different shards: their sizes or names differ";
  } else if (found.extras != state.extras) {
    what = "different companion files";
  } else {
    return std::nullopt;
  }
  return WorkDifference{what + option_differences(found.options, state.options)};
}

void join_work(WorkState& state, const WorkState& found, const std::string& folder) {
  if (auto differs = work_difference(state, found)) {
    throw Error(state_code,
                fmt::format("the conversion was started with {}; resume it with the same options "
                            "and source, or remove the folder",
                            differs->message),
                {.path = folder,
                 .found = std::move(differs->found),
                 .expected = std::move(differs->expected)});
  }
  state.has_copies = found.has_copies || found.sources != state.sources;
}

}  // namespace loadstone
