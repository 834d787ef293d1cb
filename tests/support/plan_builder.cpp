#include "support/plan_builder.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/digest.h"
#include "codec/decode.h"
#include "kernels/cast.h"
#include "plan/values.h"

namespace loadstone::testing {

std::uint64_t bytes_promised(const Plan& plan) {
  const ValueSet values = values_of(plan);
  return limits_of(plan, values).bytes_promised(promise_of(plan));
}

namespace {

constexpr std::size_t header_bytes = 100;

}  // namespace

// A file of MemoryStorage. Thread-safe if the storage is.
class MemorySource final : public ByteSource {
 public:
  MemorySource(MemoryStorage& storage, std::string path, MemoryStorage::File& file)
      : storage_(storage), path_(std::move(path)), file_(file) {}

  [[nodiscard]] const std::string& path() const noexcept override { return path_; }
  [[nodiscard]] FileIdentity identity() const override {
    return {.bytes = file_.bytes.size(), .modified_ns = file_.modified_ns};
  }

  std::uint64_t prefetch(std::uint64_t offset, std::uint64_t bytes) noexcept override {
    const std::lock_guard lock(storage_.mutex_);
    storage_.asked_.push_back({.path = path_, .offset = offset, .bytes = bytes});
    return bytes;
  }

  using ByteSource::read;
  void read(std::uint64_t offset, std::span<const std::span<std::byte>> pieces) override {
    ReadEvent event = {.path = path_, .offset = offset};
    for (const auto piece : pieces) event.bytes += piece.size();
    std::size_t number = 0;
    {
      const std::lock_guard lock(storage_.mutex_);
      number = storage_.reads_.size();
      storage_.reads_.push_back(event);
    }
    if (storage_.before_read) storage_.before_read(number, event);
    for (const auto piece : pieces) {
      if (offset + piece.size() > file_.bytes.size()) {
        Where where;
        where.path = path_;
        where.byte_offset = file_.bytes.size();
        throw Error("io.short_read", "the file is shorter than when it was opened", where);
      }
      std::memcpy(piece.data(), file_.bytes.data() + offset, piece.size());
      offset += piece.size();
    }
  }

 private:
  MemoryStorage& storage_;
  std::string path_;
  MemoryStorage::File& file_;
};

Bytes pattern(std::size_t count, std::uint64_t seed) {
  Bytes bytes(count);
  std::uint64_t state = seed * 0x9e3779b97f4a7c15u + 1;
  for (std::byte& byte : bytes) {
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    byte = static_cast<std::byte>(state >> 32);
  }
  return bytes;
}

MemoryStorage::File& MemoryStorage::add(const std::string& path, Bytes bytes) {
  auto file = std::make_unique<File>();
  file->bytes = std::move(bytes);
  return *(files_[path] = std::move(file));
}

std::vector<ReadEvent> MemoryStorage::reads() const {
  const std::lock_guard lock(mutex_);
  return reads_;
}

std::uint64_t MemoryStorage::bytes_read() const {
  std::uint64_t total = 0;
  for (const ReadEvent& event : reads()) total += event.bytes;
  return total;
}

std::shared_ptr<ByteSource> MemoryStorage::open(const std::string& path) {
  const auto found = files_.find(path);
  if (found == files_.end()) throw Error("io.not_found", "no such file", {.path = path});
  return std::make_shared<MemorySource>(*this, path, *found->second);
}

EntryKind MemoryStorage::kind(const std::string& path) {
  if (files_.contains(path)) return EntryKind::file;
  throw Error("io.not_found", "no such file", {.path = path});
}

std::vector<std::string> MemoryStorage::list(const std::string& /*folder*/) {
  std::vector<std::string> names;
  for (const auto& [path, file] : files_) names.push_back(path);
  return names;
}

PlanBuilder::PlanBuilder() { add_shard(); }

void PlanBuilder::add_shard(const std::string& path) {
  if (!shards_.empty() && files_.back().size() == header_bytes) {
    shards_.pop_back();  // removes the first shard if it is unused
    files_.pop_back();
  }
  Shard shard;
  shard.path = path.empty() ? "model-" + std::to_string(shards_.size()) + ".safetensors" : path;
  shard.relative_path = shard.path;
  shard.data_begin = header_bytes;
  shards_.push_back(shard);
  files_.push_back(pattern(header_bytes, shards_.size()));
}

std::uint32_t PlanBuilder::add_tensor(const std::string& name, Encoding encoding, Shape shape,
                                      Bytes bytes, std::size_t gap) {
  Bytes& file = files_.back();
  file.resize(file.size() + gap, std::byte{0xee});
  const auto begin = static_cast<std::uint64_t>(file.size());
  file.insert(file.end(), bytes.begin(), bytes.end());
  tensors_.push_back({.name = name,
                      .encoding = encoding,
                      .shape = std::move(shape),
                      .shard = static_cast<std::uint32_t>(shards_.size() - 1),
                      .offset_begin = begin,
                      .offset_end = file.size()});
  values_.push_back(std::move(bytes));
  return static_cast<std::uint32_t>(tensors_.size() - 1);
}

PlannedTarget& PlanBuilder::add_target(const std::string& name, Dtype dtype, Shape shape,
                                       std::vector<Box> boxes) {
  PlannedTarget& target = targets_.emplace_back();
  target.name = name;
  target.dtype = dtype;
  target.shape = std::move(shape);
  target.device = "cpu";
  target.delivery = Delivery::memory;
  target.recipe.origin = Origin::checkpoint;
  target.recipe.boxes = std::move(boxes);
  return target;
}

PlannedTarget& PlanBuilder::add_plain(const std::string& name, Dtype source, Dtype target,
                                      Shape shape, Bytes bytes) {
  const std::uint32_t tensor = add_tensor(name, source, shape, std::move(bytes));
  return add_target(name, target, shape, {whole(tensor, shape)});
}

Plan PlanBuilder::build() {
  for (std::size_t i = 0; i < shards_.size(); ++i) {
    Digest digest;
    digest.update(std::span(files_[i]).first(header_bytes));
    shards_[i].header_digest = digest.hex();
    shards_[i].identity = {.bytes = files_[i].size(), .modified_ns = 1};
    storage.add(shards_[i].path, files_[i]);
  }
  Plan plan;
  plan.catalog = std::make_shared<Catalog>(
      "", shards_, tensors_, std::map<std::string, MetadataValue>(), std::vector<Finding>());
  plan.targets = std::move(targets_);
  plan.staging_bytes_max = staging_bytes_max;
  plan.decodings = decodings;
  return plan;
}

Box whole(std::uint32_t source, const Shape& shape) {
  Box box = {.source = source};
  std::uint64_t stride = 1;
  for (std::size_t i = shape.rank(); i-- > 0;) {
    box.dims.insert(box.dims.begin(),
                    {.extent = shape[i], .source_stride = stride, .target_stride = stride});
    stride *= shape[i];
  }
  return box;
}

namespace {

// Returns the whole value, decoded in one call.
Bytes decoded_value(const PlanBuilder& builder, const Decoding& decoding) {
  std::vector<DecodePart> parts;
  for (const std::uint32_t source : decoding.sources) {
    parts.push_back({builder.tensor(source).encoding, builder.tensor(source).shape});
  }
  PreparedDecoder form;
  EXPECT_FALSE(prepare_decoding(decoding.kernel, parts, decoding.shape, decoding.dtype,
                                decoding.offset, form));
  Bytes value(form.elements * element_bytes(decoding.dtype));
  std::vector<const std::byte*> bytes;
  for (const std::uint32_t source : decoding.sources)
    bytes.push_back(builder.bytes_of(source).data());
  decode(form, 0, form.elements, bytes, value.data());
  return value;
}

}  // namespace

Bytes expected_value(const PlanBuilder& builder, const PlannedTarget& target) {
  Bytes value(target.byte_count());
  const std::size_t target_bytes = element_bytes(target.dtype);
  for (const Box& box : target.recipe.boxes) {
    const bool decoded = box.decoding != no_decoding;
    const Dtype dtype = decoded ? builder.decodings[box.decoding].dtype
                                : builder.tensor(box.source).encoding.dtype();
    const Bytes source = decoded ? decoded_value(builder, builder.decodings[box.decoding])
                                 : builder.bytes_of(box.source);
    const Cast cast = cast_between(dtype, target.dtype);
    std::vector<std::uint64_t> index(box.dims.size(), 0);
    bool more = std::ranges::all_of(box.dims, [](const BoxDim& dim) { return dim.extent > 0; });
    while (more) {
      std::uint64_t from = box.source_offset;
      std::uint64_t to = box.target_offset;
      for (std::size_t d = 0; d < index.size(); ++d) {
        from += index[d] * box.dims[d].source_stride;
        to += index[d] * box.dims[d].target_stride;
      }
      cast.run(source.data() + from * element_bytes(dtype), value.data() + to * target_bytes, 1);
      std::size_t d = index.size();
      while (d > 0 && ++index[d - 1] == box.dims[d - 1].extent) index[--d] = 0;
      more = d > 0;
    }
  }
  return value;
}

void add_all_movements(PlanBuilder& builder) {
  builder.add_plain("plain", Dtype::f32, Dtype::f32, {300, 70}, pattern(84000, 1));
  builder.add_plain("tiny", Dtype::f32, Dtype::f32, {3}, pattern(12, 2));
  builder.add_plain("scalar", Dtype::i64, Dtype::i64, {}, pattern(8, 3));
  builder.add_plain("empty", Dtype::f32, Dtype::f32, {0, 5}, {});
  builder.add_plain("cast", Dtype::bf16, Dtype::f32, {123, 45}, pattern(11070, 4));
  const auto qkv = builder.add_tensor("qkv", Dtype::f16, {6, 100}, pattern(1200, 5));
  for (std::uint64_t part = 0; part < 3; ++part) {
    builder.add_target("split" + std::to_string(part), Dtype::f16, {2, 100},
                       {{.source = qkv, .source_offset = part * 200, .dims = {{200, 1, 1}}}});
    builder.add_target("interleaved" + std::to_string(part), Dtype::f16, {200},
                       {{.source = qkv, .source_offset = part, .dims = {{200, 3, 1}}}});
  }
  builder.add_shard();
  const auto matrix = builder.add_tensor("matrix", Dtype::f16, {211, 97}, pattern(40934, 6));
  builder.add_target("transposed", Dtype::f16, {97, 211},
                     {{.source = matrix, .dims = {{97, 1, 211}, {211, 97, 1}}}});
  builder.add_target("transposed_cast", Dtype::f32, {97, 211},
                     {{.source = matrix, .dims = {{97, 1, 211}, {211, 97, 1}}}});
  std::vector<Box> stack;
  for (std::uint64_t expert = 0; expert < 10; ++expert) {
    const auto source = builder.add_tensor("expert" + std::to_string(expert), Dtype::bf16, {8, 64},
                                           pattern(1024, 10 + expert), expert);
    stack.push_back({.source = source, .target_offset = expert * 512, .dims = {{512, 1, 1}}});
  }
  builder.add_target("stacked", Dtype::bf16, {10, 8, 64}, stack);
  std::vector<Box> joined = stack;
  for (std::uint64_t expert = 0; expert < 10; ++expert) {
    joined[expert].target_offset = expert * 64;
    joined[expert].dims = {{8, 64, 640}, {64, 1, 1}};
  }
  builder.add_target("joined", Dtype::bf16, {8, 640}, joined);
  builder.add_target("spread", Dtype::bf16, {5, 4},
                     {{.source = stack[3].source, .dims = {{5, 0, 4}, {4, 1, 1}}}});
}

Error error_of(const std::function<void()>& action) {
  try {
    action();
  } catch (const Error& error) {
    return error;
  }
  ADD_FAILURE() << "no error was thrown";
  return Error("none", "none");
}

Report load_and_compare(PlanBuilder& builder, const Plan& plan, ExecuteOptions options) {
  options.storage = &builder.storage;
  const HostMemory memory(plan);
  Report report = execute(plan, memory.destinations(), options);
  for (std::size_t i = 0; i < plan.targets.size(); ++i) {
    const PlannedTarget& target = plan.targets[i];
    if (target.delivery != Delivery::memory) continue;
    EXPECT_EQ(value_of(memory.destinations()[i]), expected_value(builder, target)) << target.name;
    EXPECT_EQ(report.provenance[i].bytes_written, target.byte_count()) << target.name;
  }
  return report;
}

Bytes value_of(const Destination& destination) {
  return {destination.data, destination.data + destination.byte_count};
}

}  // namespace loadstone::testing
