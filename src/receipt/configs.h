// Makes a receipt's entries for files without tensors.
#pragma once

#include <string>

#include "loadstone/catalog.h"
#include "loadstone/receipt.h"
#include "loadstone/storage.h"

namespace loadstone {

// Returns an entry with one digest of the whole file.
[[nodiscard]] ReceiptFile whole_file(DigestKind kind, std::string path, ByteSource& file);

// Adds the configs that affected values: for each source checkpoint, the configs that describe its
// quantization, and adapter_config.json.
void add_configs(Receipt& receipt, const Catalog& catalog, Storage& storage);

}  // namespace loadstone
