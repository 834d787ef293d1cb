#include <memory>
#include <span>
#include <vector>

#include "base/only_errors.h"
#include "load/mapped_shard.h"
#include "loadstone/execute.h"
#include "loadstone/name_hash.h"

namespace loadstone {

struct FileViews::Impl {
  std::vector<std::shared_ptr<MappedShard>> shards;
  std::vector<std::span<std::byte>> targets;
};

FileViews::FileViews(const Plan& plan) try : impl_(std::make_unique<Impl>()) {
  require_ok(plan);
  const Catalog& catalog = *plan.catalog;
  impl_->shards.resize(catalog.shards().size());
  impl_->targets.resize(plan.targets.size());
  NameMap<std::size_t> index;
  for (std::size_t i = 0; i < plan.targets.size(); ++i) {
    const PlannedTarget& target = plan.targets[i];
    index.emplace(target.name, i);
    if (target.delivery != Delivery::file_view) continue;
    const TensorInfo& tensor = catalog.tensors()[target.recipe.boxes.front().source];
    auto& shard = impl_->shards[tensor.shard];
    if (shard == nullptr) shard = MappedShard::open(catalog.shards()[tensor.shard]);
    impl_->targets[i] = shard->bytes(tensor.offset_begin, tensor.offset_end);
  }
  for (std::size_t i = 0; i < plan.targets.size(); ++i) {
    const auto found = index.find(plan.targets[i].recipe.tie_of);
    const bool is_tie = plan.targets[i].recipe.origin == Origin::tie;
    if (is_tie && found != index.end()) impl_->targets[i] = impl_->targets[found->second];
  }
} catch (...) {
  throw_as_error();
}

FileViews::FileViews(FileViews&&) noexcept = default;
FileViews& FileViews::operator=(FileViews&&) noexcept = default;
FileViews::~FileViews() = default;

const std::vector<std::span<std::byte>>& FileViews::targets() const noexcept {
  return impl_->targets;
}

}  // namespace loadstone
