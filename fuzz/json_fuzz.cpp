// Reads arbitrary text as a skeleton, rules, metadata, recipes, a plan and a receipt: expects an
// Error or a result. An accepted receipt must not change when it is written and read again.
#include <string_view>

#include "fuzz/require.h"
#include "loadstone/catalog.h"
#include "loadstone/error.h"
#include "loadstone/plan.h"
#include "loadstone/receipt.h"
#include "loadstone/recipe.h"
#include "loadstone/skeleton.h"
#include "support/memory_storage.h"

namespace {

template <typename Read>
void try_to(Read read) {
  try {
    read();
  } catch (const loadstone::Error&) {
    return;
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  try_to([&] { (void)loadstone::Skeleton::from_json(text); });
  try_to([&] { (void)loadstone::rules_from_json(text); });
  try_to([&] { (void)loadstone::metadata_from_json(text); });
  static const loadstone::Catalog catalog("/", {}, {}, {}, {});
  try_to([&] { (void)loadstone::recipes_from_json(catalog, text); });
  loadstone::test::MemoryStorage storage;
  storage.add_file("/model.safetensors", {});
  try_to([&] { (void)loadstone::plan_from_json(text, {.storage = &storage}, {.root = "/"}); });
  try_to([&] {
    const std::string receipt = to_json(loadstone::receipt_from_json(text));
    loadstone::fuzz::require(to_json(loadstone::receipt_from_json(receipt)) == receipt);
  });
  return 0;
}
