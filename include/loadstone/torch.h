// Loads checkpoints into modules of LibTorch. Header only: your program compiles it against its own
// LibTorch, because loadstone does not depend on torch. loadstone.h does not include this header.
//
//   auto bert = std::make_shared<Bert>();
//   auto catalog = loadstone::open_checkpoint("all-MiniLM-L6-v2");
//   loadstone::load_into(*bert, catalog);
//   torch::Tensor words = loadstone::read_tensor(catalog, "embeddings.word_embeddings.weight");
#pragma once

#include <torch/torch.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "loadstone/audit.h"
#include "loadstone/catalog.h"
#include "loadstone/error.h"
#include "loadstone/execute.h"
#include "loadstone/plan.h"
#include "loadstone/skeleton.h"
#include "loadstone/tensor_reader.h"

namespace loadstone {

// Returns nullopt for dtypes that LibTorch lacks (4 and 6 bits).
[[nodiscard]] inline std::optional<at::ScalarType> scalar_type(Dtype dtype) {
  switch (dtype) {
    case Dtype::boolean:
      return at::kBool;
    case Dtype::u8:
      return at::kByte;
    case Dtype::i8:
      return at::kChar;
    case Dtype::u16:
      return at::kUInt16;
    case Dtype::i16:
      return at::kShort;
    case Dtype::u32:
      return at::kUInt32;
    case Dtype::i32:
      return at::kInt;
    case Dtype::u64:
      return at::kUInt64;
    case Dtype::i64:
      return at::kLong;
    case Dtype::f16:
      return at::kHalf;
    case Dtype::bf16:
      return at::kBFloat16;
    case Dtype::f32:
      return at::kFloat;
    case Dtype::f64:
      return at::kDouble;
    case Dtype::c64:
      return at::kComplexFloat;
    case Dtype::c128:
      return at::kComplexDouble;
    case Dtype::f8_e4m3:
      return at::kFloat8_e4m3fn;
    case Dtype::f8_e5m2:
      return at::kFloat8_e5m2;
    case Dtype::f8_e4m3fnuz:
      return at::kFloat8_e4m3fnuz;
    case Dtype::f8_e5m2fnuz:
      return at::kFloat8_e5m2fnuz;
    default:
      return std::nullopt;
  }
}

// Throws Error "plan.dtype" for a type that files cannot store, such as torch's quantized types.
[[nodiscard]] inline Dtype dtype_of(at::ScalarType type, const std::string& tensor = {}) {
  for (int i = 0; i < static_cast<int>(dtype_count); ++i) {
    const auto dtype = static_cast<Dtype>(i);
    if (scalar_type(dtype) == type) return dtype;
  }
  throw Error("plan.dtype", "loadstone has no such dtype",
              {.tensor = tensor, .found = c10::toString(type)});
}

// Returns a skeleton of the module's parameters, then of its buffers, all of which LibTorch saves.
// Tensors with the same elements in the same memory are ties to the first such tensor.
[[nodiscard]] inline Skeleton skeleton_of(const ::torch::nn::Module& module) {
  Skeleton skeleton;
  skeleton.values_known = false;
  std::vector<::torch::Tensor> seen;
  const auto add = [&](const std::string& name, const ::torch::Tensor& tensor, TargetKind kind) {
    const std::vector<std::uint64_t> extents(tensor.sizes().begin(), tensor.sizes().end());
    Target target = {.name = name,
                     .shape = Shape(extents),
                     .dtype = dtype_of(tensor.scalar_type(), name),
                     .kind = kind};
    for (std::size_t i = 0; i < seen.size() && tensor.numel() > 0; ++i) {
      const ::torch::Tensor& other = seen[i];
      if (other.is_alias_of(tensor) && other.sizes() == tensor.sizes() &&
          other.strides() == tensor.strides() &&
          other.storage_offset() == tensor.storage_offset() &&
          other.scalar_type() == tensor.scalar_type()) {
        target.tie_of = skeleton.targets[i].tie_of.empty() ? skeleton.targets[i].name
                                                           : skeleton.targets[i].tie_of;
        break;
      }
    }
    seen.push_back(tensor);
    skeleton.targets.push_back(std::move(target));
  };
  for (const auto& item : module.named_parameters()) {
    if (item.value().defined()) add(item.key(), item.value(), TargetKind::parameter);
  }
  for (const auto& item : module.named_buffers()) {
    if (item.value().defined()) add(item.key(), item.value(), TargetKind::persistent_buffer);
  }
  return skeleton;
}

// Reads one tensor, decoded if it is quantized, into new CPU memory. `type`: dtype of the result;
// nullopt: the file's dtype, or F32 for decoded values. Throws like TensorReader, and Error
// "plan.dtype" for a type that LibTorch lacks.
[[nodiscard]] inline ::torch::Tensor read_tensor(std::shared_ptr<const Catalog> catalog,
                                                 std::string_view name,
                                                 std::optional<at::ScalarType> type = {}) {
  std::optional<Dtype> wanted;
  if (type) wanted = dtype_of(*type);
  TensorReader reader(std::move(catalog), name, wanted);
  const auto has = scalar_type(reader.dtype());
  if (!has) {
    throw Error(
        "plan.dtype", "LibTorch has no such dtype: ask for another one",
        {.tensor = std::string(name), .found = std::string(loadstone::name(reader.dtype()))});
  }
  const auto extents = reader.shape().extents();
  const std::vector<std::int64_t> sizes(extents.begin(), extents.end());
  ::torch::Tensor tensor = ::torch::empty(sizes, *has);
  reader.read(0, reader.elements(), {static_cast<std::byte*>(tensor.data_ptr()), tensor.nbytes()});
  return tensor;
}

// Plans, loads and audits. Reads the values into new memory. When all values are complete, the
// module's tensors get that memory (set_data), so an Error leaves the module unchanged, and old and
// new values coexist until the end. Tensors stay the same objects on the same devices, so
// optimizers keep them. Throws the first error of the plan (make_plan() with skeleton_of() returns
// all findings), and "memory.device" for a tensor on meta, because LibTorch cannot give it memory.
inline Report load_into(::torch::nn::Module& module, std::shared_ptr<const Catalog> catalog,
                        const PlanOptions& plan_options = {},
                        const ExecuteOptions& execute_options = {}) {
  const Plan plan = make_plan(std::move(catalog), skeleton_of(module), plan_options);
  std::vector<::torch::Tensor> tensors;
  for (const auto& item : module.named_parameters()) tensors.push_back(item.value());
  for (const auto& item : module.named_buffers()) tensors.push_back(item.value());
  std::erase_if(tensors, [](const ::torch::Tensor& tensor) { return !tensor.defined(); });

  std::vector<::torch::Tensor> values(tensors.size());
  std::vector<Destination> destinations(tensors.size());
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const PlannedTarget& target = plan.targets[i];
    if (tensors[i].is_meta()) {
      throw Error("memory.device",
                  "LibTorch cannot give a tensor on meta memory: build the module "
                  "on a device",
                  {.tensor = target.name});
    }
    if (target.delivery != Delivery::memory) continue;
    const ::torch::Device device = tensors[i].device();
    const bool is_there = device.is_cuda() && device.str() == target.device;
    const auto kind = is_there ? MemoryKind::device : MemoryKind::host;
    auto options = ::torch::TensorOptions().dtype(tensors[i].scalar_type());
    if (is_there) options = options.device(device);
    values[i] = ::torch::empty(tensors[i].sizes(), options);
    destinations[i] = {.data = static_cast<std::byte*>(values[i].data_ptr()),
                       .byte_count = values[i].nbytes(),
                       .dtype = target.dtype,
                       .parts = {},
                       .kind = kind};
    // Copies run on separate streams, so work in flight on this memory must end before the load.
    if (is_there) ::torch::cuda::synchronize(device.index());
  }
  Report report = execute(plan, destinations, execute_options);
  audit(plan, report).require_real();
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    if (values[i].defined()) values[i] = values[i].to(tensors[i].device());
  }
  const ::torch::NoGradGuard no_grad;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    if (values[i].defined()) tensors[i].set_data(values[i]);
  }
  // Ties share their target's new memory.
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const std::string& other = plan.targets[i].recipe.tie_of;
    for (std::size_t k = 0; k < tensors.size() && !other.empty(); ++k) {
      if (plan.targets[k].name == other) tensors[i].set_data(tensors[k].data());
    }
  }
  return report;
}

}  // namespace loadstone
