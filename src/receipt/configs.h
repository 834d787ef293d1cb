// Rows of a receipt for files without tensors.
#pragma once

#include <string>

#include "loadstone/catalog.h"
#include "loadstone/receipt.h"
#include "loadstone/storage.h"

namespace loadstone {

// Returns a row with one digest of all bytes.
[[nodiscard]] ReceiptFile whole_file(DigestKind kind, std::string path, ByteSource& file);

// Adds the configs that decided values: of each source checkpoint those that describe its
// quantization, and adapter_config.json.
void add_configs(Receipt& receipt, const Catalog& catalog, Storage& storage);

}  // namespace loadstone
