#include "convert/groups.h"

#include <algorithm>
#include <utility>

#include "kernels/cast.h"
#include "loadstone/error.h"

namespace loadstone {

QuantizeForm form_of(const PlannedTarget& target) {
  QuantizeForm form;
  auto problem = prepare_quantization(target.quantization.value_or(Quantization()), target.shape,
                                      target.dtype, form);
  if (!problem) return form;
  Where where;
  where.tensor = target.name;
  where.found = std::move(problem->found);
  where.expected = std::move(problem->expected);
  throw Error("plan.quantize", std::move(problem->message), std::move(where));
}

std::uint64_t elements_in(const QuantizeForm& form, std::uint64_t bytes) noexcept {
  const std::uint64_t step = form.step_elements();
  const std::uint64_t elements = bytes / element_bytes(form.dtype) / step * step;
  return std::min(std::max(elements, step), form.elements);
}

std::uint64_t held_bytes_of(const QuantizeForm& form) {
  std::vector<PartRange> ranges(form.parts.size());
  part_ranges(form, 0, form.elements, ranges);
  std::uint64_t bytes = form.scratch_bytes;
  for (std::size_t i = 0; i < ranges.size(); ++i) {
    if (ranges[i].begin == ranges[i].end) bytes += form.parts[i].byte_count();
  }
  return bytes + (form.needs_amax ? form.stack * sizeof(float) : 0);
}

std::uint64_t encoded_bytes_of(const QuantizeForm& form, std::uint64_t elements) {
  std::vector<PartRange> ranges(form.parts.size());
  part_ranges(form, 0, elements, ranges);
  std::uint64_t bytes = 0;
  for (const PartRange& range : ranges) {
    bytes += aligned_part(range.end - range.begin);
  }
  return bytes;
}

std::shared_ptr<Group> make_group(const Conversion& conversion, std::uint32_t file,
                                  std::span<const std::uint32_t> tensors) {
  auto group = std::make_shared<Group>();
  group->file = file;
  for (const std::uint32_t index : tensors) {
    const OutputTensor& tensor = conversion.files[file].tensors[index];
    if (group->members.empty() || group->members.back().target != tensor.target) {
      GroupMember& member = group->members.emplace_back();
      member.target = tensor.target;
      member.form = form_of(conversion.plan.targets[tensor.target]);
      member.parts.resize(member.form.parts.size(), nullptr);
      member.held.resize(member.form.parts.size());
      member.left = member.form.elements;
      group->numbers += aligned_part(member.form.elements * element_bytes(member.form.dtype));
      if (member.form.needs_amax) group->amax.assign(member.form.stack, 0.0F);
    }
    GroupMember& member = group->members.back();
    if (tensor.part == OutputTensor::no_part) {
      member.constants.push_back(&tensor);
    } else {
      member.parts.at(tensor.part) = &tensor;
    }
  }
  for (GroupMember& member : group->members) {
    std::vector<PartRange> ranges(member.form.parts.size());
    part_ranges(member.form, 0, member.form.elements, ranges);
    for (std::size_t i = 0; i < ranges.size(); ++i) {
      if (ranges[i].begin == ranges[i].end) {
        member.held[i].resize(member.form.parts[i].byte_count());
      }
    }
    if (member.form.scratch_bytes > 0) member.scratch = AnonymousMemory(member.form.scratch_bytes);
  }
  return group;
}

}  // namespace loadstone
