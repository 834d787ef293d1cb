// A receipt's list of tensors compared with the headers of the files that it is of.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "loadstone/catalog.h"
#include "loadstone/receipt.h"
#include "loadstone/storage.h"
#include "loadstone/verify.h"

namespace loadstone {

// Opens each checkpoint once. Not thread-safe.
class ReceiptHeaders {
 public:
  explicit ReceiptHeaders(Storage& storage) : storage_(storage) {}

  // Adds a difference for each tensor that only one of both lists, or whose dtype, shape or place
  // is another; `is_whole`: the receipt lists all tensors of the file. A file of which it lists no
  // tensor has one digest of all its bytes, and is not opened.
  void compare(const ReceiptFile& file, const std::string& path, bool is_whole,
               std::vector<Difference>& differences);

 private:
  const Catalog& catalog_of(const std::string& path);

  Storage& storage_;
  std::map<std::string, std::shared_ptr<const Catalog>> catalogs_;  // by the path of each shard
};

}  // namespace loadstone
