#include "formats/dcp_metadata.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <map>
#include <unordered_map>
#include <utility>

#include "base/checked.h"
#include "base/natural_order.h"
#include "base/text.h"
#include "formats/dcp_tiling.h"
#include "formats/sharded_index.h"
#include "formats/torch.h"
#include "formats/torch_pickle.h"
#include "loadstone/name_hash.h"

namespace loadstone {

namespace {

constexpr std::string_view metadata_module = "torch.distributed.checkpoint.metadata.";
constexpr std::string_view storage_info = "torch.distributed.checkpoint.filesystem._StorageInfo";
constexpr std::string_view megatron_metadata =
    "megatron.core.dist_checkpointing.strategies.torch.MCoreMetadata";
// Name of TensorProperties in torch before 2.3.
constexpr std::string_view old_properties =
    "torch.distributed._shard.sharded_tensor.metadata.TensorProperties";
constexpr std::string_view get_layout = "torch.serialization._get_layout";
constexpr auto other_globals = std::to_array<std::string_view>({
    storage_info,
    megatron_metadata,
    old_properties,
    get_layout,
    "torch.distributed._shard.sharded_tensor.metadata.MEM_FORMAT_ENCODING",
    "collections.OrderedDict",
    "torch.Size",
    "pathlib.Path",  // StorageMeta may contain the checkpoint's path
    "pathlib.PosixPath",
    "pathlib.PurePosixPath",
    "pathlib.WindowsPath",
    "pathlib._local.Path",
    "pathlib._local.PosixPath",
    "pathlib._local.WindowsPath",
});
constexpr auto metadata_classes = std::to_array<std::string_view>({
    "Metadata",
    "TensorStorageMetadata",
    "BytesStorageMetadata",
    "TensorProperties",
    "_MEM_FORMAT_ENCODING",
    "ChunkStorageMetadata",
    "MetadataIndex",
    "StorageMeta",
});
constexpr std::size_t torch_rank_max = 64;  // torch's limit
using Items = std::vector<std::uint32_t>;

bool is_class(std::string_view global, std::string_view name) noexcept {
  return global.starts_with(metadata_module) && global.substr(metadata_module.size()) == name;
}

std::optional<Dtype> dtype_of_global(std::string_view global) noexcept {
  constexpr std::string_view module = "torch.";
  if (!global.starts_with(module)) return std::nullopt;
  const auto dtype = parse_dtype(global.substr(module.size()));
  return dtype && bits(*dtype) % 8 == 0 ? dtype : std::nullopt;
}

// Also accepts dtypes that loadstone cannot read. They are rejected only if a tensor has one.
bool is_torch_dtype(std::string_view global) noexcept {
  constexpr auto beginnings = std::to_array<std::string_view>(
      {"torch.float", "torch.bfloat", "torch.int", "torch.uint", "torch.bool", "torch.complex",
       "torch.qint", "torch.quint", "torch.bits"});
  return std::ranges::any_of(beginnings,
                             [&](std::string_view each) { return global.starts_with(each); });
}

bool is_allowed_global(std::string_view global) noexcept {
  return std::ranges::any_of(metadata_classes,
                             [&](std::string_view each) { return is_class(global, each); }) ||
         std::ranges::find(other_globals, global) != other_globals.end() || is_torch_dtype(global);
}

// Not thread-safe; used once.
class DcpReader {
 public:
  explicit DcpReader(ByteSource& source) : source_(source), path_(source.path()) {}

  DcpMetadata read() {
    const std::uint64_t bytes = source_.identity().bytes;
    Warnings warnings(path_);
    pickle_ = read_pickle(source_, 0, bytes, warnings,
                          {.is_allowed = &is_allowed_global, .keeps_state = true});
    if (pickle_.offset_end != bytes) {
      warnings.add("pt.trailing", dcp_metadata_name, "STOP",
                   "the file has bytes after the end of the pickle",
                   bytes_text(bytes - pickle_.offset_end), "none");
    }
    const std::uint32_t root = pickle_.root;
    const auto type = pickle_.callee(root);
    if (!is_class(type, "Metadata") && type != megatron_metadata) {
      bad({}, "pickle", root, "torch.distributed.checkpoint.metadata.Metadata");
    }
    require_plain_shapes(root);
    read_tensors(dict_of(member(root, "state_dict_metadata", {}), "state_dict_metadata"));
    read_storage(dict_of(member(root, "storage_data", {}), "storage_data"));
    for (const DcpTensor& tensor : metadata_.tensors) require_stored(tensor);
    sort_files();
    tell_unused(warnings);
    for (Finding& finding : warnings.take()) metadata_.findings.push_back(std::move(finding));
    return std::move(metadata_);
  }

 private:
  struct Place {
    std::uint32_t tensor;
    std::uint32_t chunk;
  };

  [[noreturn]] void refuse(HeaderProblem problem, std::string_view culprit = {}) const {
    loadstone::refuse(path_, std::move(problem), culprit);
  }
  [[noreturn]] void bad(std::string_view culprit, std::string_view field, std::uint32_t node,
                        std::string expected) const {
    refuse({"dcp.metadata", "the metadata does not have torch's format", field,
            pickle_.describe(node), std::move(expected)},
           culprit);
  }

  void spend(std::uint64_t bytes) { budget_.take(path_, bytes, pickle_.bytes); }

  // ---- the pickle

  // Finds an attribute of an object; nullopt if it is not set.
  [[nodiscard]] std::optional<std::uint32_t> find_member(std::uint32_t object,
                                                         std::string_view name) const {
    const auto& parts = pickle_.items(object);
    if (parts.size() < 3 || pickle_.kind(parts[2]) != PickleKind::dict) return std::nullopt;
    const auto& items = pickle_.items(parts[2]);
    // If a key repeats, the last value counts, as in Python. Reads at most 32 attributes, because
    // valid objects have only a few.
    for (std::size_t at = std::min<std::size_t>(items.size(), 64); at >= 2; at -= 2) {
      const std::uint32_t key = items[at - 2];
      if (pickle_.kind(key) == PickleKind::text && pickle_.text(key) == name) return items[at - 1];
    }
    return std::nullopt;
  }
  [[nodiscard]] std::uint32_t member(std::uint32_t object, std::string_view name,
                                     std::string_view culprit) const {
    const auto found = find_member(object, name);
    if (!found) bad(culprit, name, object, "an object with this attribute");
    return *found;
  }

  [[nodiscard]] const Items& dict_of(std::uint32_t node, std::string_view field) const {
    if (pickle_.kind(node) != PickleKind::dict) bad({}, field, node, "a dict");
    return pickle_.items(node);
  }

  [[nodiscard]] std::string text_of(std::uint32_t node, std::string_view culprit,
                                    std::string_view field) {
    if (pickle_.kind(node) != PickleKind::text) bad(culprit, field, node, "a string");
    spend(pickle_.text(node).size());
    return std::string(pickle_.text(node));
  }

  [[nodiscard]] std::uint64_t number_of(std::uint32_t node, std::string_view culprit,
                                        std::string_view field) const {
    const bool is_number =
        pickle_.kind(node) == PickleKind::integer && pickle_.node(node).number >= 0;
    if (!is_number) bad(culprit, field, node, "an integer, 0 or more");
    return static_cast<std::uint64_t>(pickle_.node(node).number);
  }

  [[nodiscard]] std::vector<std::uint64_t> numbers_of(std::uint32_t node, std::string_view culprit,
                                                      std::string_view field) {
    const PickleKind kind = pickle_.kind(node);
    if (kind != PickleKind::tuple && kind != PickleKind::list) {
      bad(culprit, field, node, "a torch.Size");
    }
    spend(pickle_.items(node).size() * sizeof(std::uint64_t));
    std::vector<std::uint64_t> numbers;
    for (const std::uint32_t item : pickle_.items(node)) {
      numbers.push_back(number_of(item, culprit, field));
    }
    return numbers;
  }

  // Rejects tensors that Megatron-Core has saved in a different shape and lists in `mcore_data`.
  void require_plain_shapes(std::uint32_t root) const {
    const auto noted = find_member(root, "mcore_data");
    if (!noted || pickle_.kind(*noted) != PickleKind::dict) return;
    const auto& items = pickle_.items(*noted);
    for (std::size_t at = 0; at + 1 < items.size(); at += 2) {
      const bool is_plain =
          pickle_.kind(items[at + 1]) == PickleKind::dict && pickle_.items(items[at + 1]).empty();
      if (is_plain) continue;
      refuse({"dcp.unsupported", "Megatron-Core saved the tensor in a different shape than its own",
              "mcore_data", pickle_.describe(items[at + 1]), "tensors in their own shapes"},
             pickle_.kind(items[at]) == PickleKind::text ? pickle_.text(items[at])
                                                         : std::string_view());
    }
  }

  // ---- tensors

  void read_tensors(const Items& items) {
    for (std::size_t at = 0; at + 1 < items.size(); at += 2) {
      const std::string name = text_of(items[at], {}, "state_dict_metadata");
      if (!is_utf8(name)) {
        refuse({"pt.utf8", "the tensor's name is not UTF-8", "state_dict_metadata",
                "'" + printable(name) + "'", "UTF-8"},
               name);
      }
      spend(sizeof(DcpTensor) / 4);
      const std::uint32_t value = items[at + 1];
      const std::string_view type = pickle_.callee(value);
      const bool is_object = is_class(type, "BytesStorageMetadata");
      if (!is_object && !is_class(type, "TensorStorageMetadata")) {
        bad(name, "state_dict_metadata", value, "TensorStorageMetadata or BytesStorageMetadata");
      }
      const auto index = static_cast<std::uint32_t>(metadata_.tensors.size());
      const std::size_t object = objects_begin + metadata_.objects.size();
      if (!names_.emplace(name, is_object ? object : index).second) {
        refuse({"dcp.duplicate", "a name occurs twice", "state_dict_metadata", "a second value",
                "one"},
               name);
      }
      if (is_object) {
        metadata_.objects.push_back({.name = name});
      } else {
        metadata_.tensors.push_back(read_tensor(name, value));
        add_places(index);
      }
    }
  }

  DcpTensor read_tensor(const std::string& name, std::uint32_t node) {
    DcpTensor tensor;
    tensor.name = name;
    tensor.dtype = read_dtype(name, member(node, "properties", name));
    tensor.shape = Shape(numbers_of(member(node, "size", name), name, "size"));
    if (tensor.shape.rank() > torch_rank_max) {
      refuse({"dcp.metadata", "the tensor has more dimensions than torch supports", "size",
              std::to_string(tensor.shape.rank()), fmt::format("at most {}", torch_rank_max)},
             name);
    }
    const auto numel = tensor.shape.numel();
    if (!numel || !Encoding(tensor.dtype).byte_count(*numel)) {
      refuse({"pt.overflow", "the tensor's size does not fit in 64 bits", "size",
              tensor.shape.text(), "fewer elements"},
             name);
    }
    const std::uint32_t chunks = member(node, "chunks", name);
    if (pickle_.kind(chunks) != PickleKind::list) bad(name, "chunks", chunks, "a list");
    for (const std::uint32_t item : pickle_.items(chunks)) {
      spend(sizeof(DcpChunk));
      DcpChunk chunk;
      if (!is_class(pickle_.callee(item), "ChunkStorageMetadata")) {
        bad(name, "chunks", item, "ChunkStorageMetadata");
      }
      chunk.offsets = numbers_of(member(item, "offsets", name), name, "offsets");
      chunk.sizes = Shape(numbers_of(member(item, "sizes", name), name, "sizes"));
      if (check_chunk(tensor, chunk)) tensor.chunks.push_back(std::move(chunk));
    }
    check_dcp_chunks(path_, tensor);
    return tensor;
  }

  [[nodiscard]] Dtype read_dtype(const std::string& name, std::uint32_t node) const {
    const std::string_view type = pickle_.callee(node);
    if ((!is_class(type, "TensorProperties") && type != old_properties) ||
        pickle_.items(node).size() < 3) {
      bad(name, "properties", node, "TensorProperties");
    }
    const std::uint32_t state = pickle_.items(node)[2];
    if (pickle_.kind(state) != PickleKind::tuple || pickle_.items(state).size() < 2) {
      bad(name, "properties", state, "a dtype, a layout ...");
    }
    const auto& parts = pickle_.items(state);
    require_strided(name, parts[1]);
    const bool is_global = pickle_.kind(parts[0]) == PickleKind::global;
    const auto dtype = is_global ? dtype_of_global(pickle_.text(parts[0])) : std::nullopt;
    if (dtype) return *dtype;
    refuse({"dcp.dtype", "loadstone does not support this dtype", "dtype",
            pickle_.describe(parts[0]), "torch.float32, torch.bfloat16 ..."},
           name);
  }

  void require_strided(const std::string& name, std::uint32_t node) const {
    if (pickle_.callee(node) == get_layout) {
      const std::uint32_t arguments = pickle_.items(node)[1];
      const auto& given = pickle_.items(arguments);
      if (given.size() == 1 && pickle_.kind(given[0]) == PickleKind::text &&
          pickle_.text(given[0]) == "torch.strided") {
        return;
      }
    }
    refuse({"dcp.unsupported", "loadstone does not support this kind of tensor", "layout",
            pickle_.describe(node), "torch.strided"},
           name);
  }

  // Returns false for a chunk without elements, which a rank saves if it has no rows of the tensor.
  [[nodiscard]] bool check_chunk(const DcpTensor& tensor, const DcpChunk& chunk) const {
    const Shape& shape = tensor.shape;
    bool is_inside = chunk.offsets.size() == shape.rank() && chunk.sizes.rank() == shape.rank();
    for (std::size_t d = 0; d < shape.rank() && is_inside; ++d) {
      const auto end = checked_add(chunk.offsets[d], chunk.sizes[d]);
      is_inside = end && *end <= shape[d];
    }
    if (!is_inside) {
      refuse({"dcp.chunk_bounds", "a chunk exceeds its tensor", "chunks",
              fmt::format("{} at {}", chunk.sizes.text(), Shape(chunk.offsets).text()),
              "a part of " + shape.text()},
             tensor.name);
    }
    return std::ranges::find(chunk.sizes.extents(), 0u) == chunk.sizes.extents().end();
  }

  // ---- Offsets

  // Returns a map key of the tensor's name and the chunk's offsets.
  static std::string key_of(std::string_view name, const std::vector<std::uint64_t>& offsets) {
    std::string key(name);
    key += '\0';
    key.append(reinterpret_cast<const char*>(offsets.data()), 8 * offsets.size());
    return key;
  }

  void add_places(std::uint32_t index) {
    const DcpTensor& tensor = metadata_.tensors[index];
    for (std::uint32_t i = 0; i < tensor.chunks.size(); ++i) {
      spend(tensor.name.size());
      places_.emplace(key_of(tensor.name, tensor.chunks[i].offsets), Place{index, i});
    }
  }

  void read_storage(const Items& items) {
    for (std::size_t at = 0; at + 1 < items.size(); at += 2) {
      const std::uint32_t index = items[at];
      if (!is_class(pickle_.callee(index), "MetadataIndex")) {
        bad({}, "storage_data", index, "MetadataIndex");
      }
      const std::string name = text_of(member(index, "fqn", {}), {}, "fqn");
      const auto known = names_.find(name);
      if (known == names_.end()) {
        unused_.push_back(name);
      } else if (known->second < objects_begin) {
        read_item(static_cast<std::uint32_t>(known->second), index, items[at + 1]);
      } else {
        note_place(metadata_.objects[known->second - objects_begin], items[at + 1]);
      }
    }
  }

  void note_place(DcpObject& object, std::uint32_t info) {
    const auto file = find_member(info, "relative_path");
    if (!file || pickle_.kind(*file) != PickleKind::text) return;
    object.item_begin = number_of(member(info, "offset", object.name), object.name, "offset");
    object.item_bytes = number_of(member(info, "length", object.name), object.name, "length");
    object.file = plain_relative_path(text_of(*file, object.name, "relative_path"));
  }

  void read_item(std::uint32_t tensor, std::uint32_t index, std::uint32_t info) {
    const std::string& name = metadata_.tensors[tensor].name;
    std::vector<std::uint64_t> offsets(metadata_.tensors[tensor].shape.rank());
    const auto given = find_member(index, "offset");
    if (given && pickle_.kind(*given) != PickleKind::none) {
      offsets = numbers_of(*given, name, "offset");
    }
    spend(name.size());
    const auto place = places_.find(key_of(name, offsets));
    if (place == places_.end()) return;  // the chunk has no elements
    DcpChunk& chunk = metadata_.tensors[place->second.tensor].chunks[place->second.chunk];
    if (chunk.file != DcpChunk::no_file) {
      refuse({"dcp.duplicate", "a chunk is stored twice", "storage_data",
              "a second item at " + Shape(offsets).text(), "one"},
             name);
    }
    if (pickle_.callee(info) != storage_info) bad(name, "storage_data", info, "_StorageInfo");
    require_untransformed(name, info);
    const std::string file = text_of(member(info, "relative_path", name), name, "relative_path");
    chunk.file = file_of(name, file);
    chunk.item_begin = number_of(member(info, "offset", name), name, "offset");
    chunk.item_bytes = number_of(member(info, "length", name), name, "length");
  }

  // Rejects items that an extension has transformed, for example compressed.
  void require_untransformed(const std::string& name, std::uint32_t info) const {
    const auto given = find_member(info, "transform_descriptors");
    if (!given || pickle_.kind(*given) == PickleKind::none) return;
    std::string found = pickle_.describe(*given);
    const PickleKind kind = pickle_.kind(*given);
    if (kind == PickleKind::list || kind == PickleKind::tuple) {
      if (pickle_.items(*given).empty()) return;
      found = pickle_.describe(pickle_.items(*given).front());
    }
    refuse({"dcp.transform", "the item was saved through a transform, such as compression",
            "transform_descriptors", std::move(found), "items without transforms"},
           name);
  }

  [[nodiscard]] std::uint32_t file_of(const std::string& name, const std::string& file) {
    const auto known = files_.find(file);
    if (known != files_.end()) return known->second;
    check_shard_name(path_, file, "relative_path", name);
    spend(file.size());
    const auto index = static_cast<std::uint32_t>(metadata_.files.size());
    const std::string plain = plain_relative_path(file);
    const auto [at, is_new] = files_.emplace(plain, index);
    if (is_new) metadata_.files.push_back(plain);
    return files_.emplace(file, at->second).first->second;
  }

  void require_stored(const DcpTensor& tensor) const {
    for (const DcpChunk& chunk : tensor.chunks) {
      if (chunk.file != DcpChunk::no_file) continue;
      refuse(
          {"dcp.item_missing", "the metadata does not specify where a chunk is stored",
           "storage_data", "no entry for " + Shape(chunk.offsets).text(), "a file and an offset"},
          tensor.name);
    }
  }

  void sort_files() {
    std::vector<std::string> sorted = metadata_.files;
    std::ranges::sort(sorted, natural_less);
    std::map<std::string_view, std::uint32_t> ranks;
    for (const std::string& file : sorted) {
      ranks.emplace(file, static_cast<std::uint32_t>(ranks.size()));
    }
    for (DcpTensor& tensor : metadata_.tensors) {
      for (DcpChunk& chunk : tensor.chunks) chunk.file = ranks.at(metadata_.files[chunk.file]);
    }
    metadata_.files = std::move(sorted);
  }

  void tell_unused(Warnings& warnings) const {
    for (const std::string& name : unused_) {
      warnings.add("dcp.unused", name, "storage_data",
                   "an item belongs to a tensor that the metadata does not list", "an item",
                   "items of the tensors in state_dict_metadata");
    }
  }

  static constexpr std::size_t objects_begin = std::size_t{1} << 32;  // in names_

  ByteSource& source_;
  std::string path_;
  Pickle pickle_;
  CopyBudget budget_;
  DcpMetadata metadata_;
  std::vector<std::string> unused_;
  std::unordered_map<std::string, std::size_t, NameHash, std::equal_to<>> names_;
  std::unordered_map<std::string, Place, NameHash, std::equal_to<>> places_;
  std::unordered_map<std::string, std::uint32_t, NameHash, std::equal_to<>> files_;
};

}  // namespace

DcpMetadata read_dcp_metadata(ByteSource& source) { return DcpReader(source).read(); }

}  // namespace loadstone
