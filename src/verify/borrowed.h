#pragma once

#include <memory>

#include "loadstone/catalog.h"

namespace loadstone {

// Owns nothing: the catalog must outlive all copies.
[[nodiscard]] inline std::shared_ptr<const Catalog> borrowed(const Catalog& catalog) {
  return {std::shared_ptr<const Catalog>(), &catalog};
}

}  // namespace loadstone
