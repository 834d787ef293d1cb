#include "formats/torch_storages.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <utility>

#include "base/checked.h"
#include "base/text.h"

namespace loadstone {

namespace {

struct StorageClass {
  std::string_view name;
  Dtype dtype;
};

constexpr auto storage_classes = std::to_array<StorageClass>({
    {"BFloat16Storage", Dtype::bf16},
    {"BoolStorage", Dtype::boolean},
    {"ByteStorage", Dtype::u8},
    {"CharStorage", Dtype::i8},
    {"ComplexDoubleStorage", Dtype::c128},
    {"ComplexFloatStorage", Dtype::c64},
    {"DoubleStorage", Dtype::f64},
    {"FloatStorage", Dtype::f32},
    {"HalfStorage", Dtype::f16},
    {"IntStorage", Dtype::i32},
    {"LongStorage", Dtype::i64},
    {"ShortStorage", Dtype::i16},
    {"UntypedStorage", Dtype::u8},
});

const StorageClass* class_of(std::string_view global) {
  for (const std::string_view module : {"torch.storage.", "torch.cuda.", "torch."}) {
    if (!global.starts_with(module)) continue;
    const auto* found =
        std::ranges::find(storage_classes, global.substr(module.size()), &StorageClass::name);
    if (found != storage_classes.end()) return found;
  }
  return nullptr;
}

[[noreturn]] void refuse_id(const std::string& path, const char* code, std::string message,
                            std::string found, std::string expected) {
  refuse(path, {code, std::move(message), "BINPERSID", std::move(found), std::move(expected)});
}

// The key is part of a zip record's name, so it must be short and have no special characters.
bool is_plain_key(std::string_view key) {
  return !key.empty() && key.size() <= 64 && std::ranges::all_of(key, [](char each) {
    return (each >= '0' && each <= '9') || (each >= 'a' && each <= 'z') ||
           (each >= 'A' && each <= 'Z') || each == '_' || each == '-';
  });
}

}  // namespace

TorchStorages collect_storages(const std::string& path, const Pickle& pickle) {
  TorchStorages storages;
  for (const PickleNode& node : pickle.nodes) {
    if (node.kind != PickleKind::storage) continue;
    const auto& parts = pickle.lists[node.items];
    const std::string_view global = pickle.text(parts[0]);
    const std::string_view key = pickle.text(parts[1]);
    const StorageClass* type = class_of(global);
    if (type == nullptr) {
      refuse_id(path, "pt.storage_type", "the class of a storage is unknown", printable(global),
                "torch.FloatStorage or another storage class of torch");
    }
    if (!is_plain_key(key)) {
      refuse_id(path, "pt.storage_key", "the key of a storage is not a plain file name",
                "'" + printable(key) + "'", "digits, usually");
    }
    TorchStorage storage = {.dtype = type->dtype,
                            .is_untyped = type->name == "UntypedStorage",
                            .elements = static_cast<std::uint64_t>(node.number)};
    const auto bytes = checked_mul(storage.elements, bits(type->dtype) / 8);
    if (!bytes) {
      refuse_id(path, "pt.storage_size",
                fmt::format("the size of storage '{}' does not fit in 64 bits", key),
                counted(storage.elements, "element"), "a number of bytes that fits in 64 bits");
    }
    storage.bytes = *bytes;
    const auto [at, is_new] = storages.emplace(key, storage);
    const TorchStorage& first = at->second;
    if (is_new) continue;
    if (first.dtype != storage.dtype || first.is_untyped != storage.is_untyped) {
      refuse_id(path, "pt.storage_type",
                fmt::format("storage '{}' is declared with two classes", key), printable(global),
                fmt::format("a storage of {}", name(first.dtype)));
    }
    if (first.elements != storage.elements) {
      refuse_id(path, "pt.storage_size",
                fmt::format("storage '{}' is declared with two sizes", key),
                counted(storage.elements, "element"), counted(first.elements, "element"));
    }
  }
  return storages;
}

}  // namespace loadstone
