// Determines the device and the delivery of each target.
#include <fmt/format.h>

#include <algorithm>

#include "base/text.h"
#include "codec/encode.h"
#include "loadstone/name_hash.h"
#include "loadstone/remote.h"
#include "plan/balance.h"
#include "plan/costs.h"
#include "plan/devices.h"
#include "plan/planner.h"

namespace loadstone {

namespace {

constexpr std::size_t names_listed_max = 1000;

}  // namespace

void Planner::place() {
  std::vector<std::string> devices;
  const DeviceMap& map = options_.device_map;
  if (map.mode) {
    std::vector<Placeable> tensors;
    tensors.reserve(plan_.targets.size());
    for (std::size_t i = 0; i < plan_.targets.size(); ++i) {
      tensors.push_back({plan_.targets[i].name, plan_.targets[i].byte_count(), roots_[i]});
    }
    Capacities capacities;
    for (const auto& [device, bytes] : options_.max_memory) {
      capacities.emplace_back(device_name(device), bytes);
    }
    const std::vector<std::string> whole = options_.no_split_modules
                                               ? *options_.no_split_modules
                                               : numbered_modules(tensors, capacities);
    devices = balanced_devices(tensors, *map.mode, std::move(capacities), whole);
    plan_.device_map = device_map_entries(tensors, devices);
  } else {
    place_by_entries(devices);
  }
  for (std::size_t i = 0; i < plan_.targets.size(); ++i) {
    if (roots_[i] == i) settle(plan_.targets[i], devices[i]);
    if (plan_.targets[i].device == "disk") refuse_slice_on_disk(i);
  }
  for (std::size_t i = 0; i < plan_.targets.size(); ++i) {
    if (roots_[i] != i) plan_.targets[i].device = plan_.targets[roots_[i]].device;
  }
  check_offload();
}

void Planner::place_by_entries(std::vector<std::string>& devices) {
  devices.assign(plan_.targets.size(), "cpu");
  if (options_.device_map.entries.empty()) {
    place_as_held(devices);
    return;
  }
  NameMap<std::size_t> entries;
  for (const auto& [path, device] : options_.device_map.entries) {
    entries.emplace(path, plan_.device_map.size());
    plan_.device_map.emplace_back(path, device_name(device));
    if (is_device_name(plan_.device_map.back().second)) continue;
    add({.severity = Severity::error,
         .code = "plan.device_map",
         .message = fmt::format("device map{}: {}",
                                path.empty() ? "" : fmt::format(", '{}'", printable(path)),
                                unknown_device(device)),
         .found = device,
         .expected = device_examples});
  }
  std::vector<bool> is_used(plan_.device_map.size(), false);
  std::vector<std::size_t> uncovered;
  for (std::size_t i = 0; i < plan_.targets.size(); ++i) {
    std::string_view path = plan_.targets[i].name;
    auto entry = entries.find(path);
    while (entry == entries.end() && !path.empty()) {
      const std::size_t end = parent_end(path);
      path = end == std::string_view::npos ? std::string_view() : path.substr(0, end);
      entry = entries.find(path);
    }
    if (entry == entries.end()) {
      if (roots_[i] == i) uncovered.push_back(i);
      continue;
    }
    is_used[entry->second] = true;
    const std::string& device = plan_.device_map[entry->second].second;
    devices[i] = is_device_name(device) ? device : "cpu";
  }
  report_uncovered(uncovered);
  for (std::size_t e = 0; e < is_used.size(); ++e) {
    if (!is_used[e] && !plan_.device_map[e].first.empty()) report_idle(plan_.device_map[e].first);
  }
  for (std::size_t i = 0; i < plan_.targets.size(); ++i) {
    if (devices[i] == devices[roots_[i]]) continue;
    add({.severity = Severity::info,
         .code = "plan.tie",
         .target = plan_.targets[i].name,
         .message =
             fmt::format("'{}' is tied to '{}', so it is also placed on {}, not on {}",
                         printable(plan_.targets[i].name), printable(plan_.targets[roots_[i]].name),
                         devices[roots_[i]], devices[i])});
  }
}

// Without a device map, values go to the devices of the live model's tensors.
void Planner::place_as_held(std::vector<std::string>& devices) {
  for (std::size_t i = 0; i < plan_.targets.size(); ++i) {
    const Held* const held = roots_[i] == i ? held_by_model(i) : nullptr;
    if (held == nullptr || held->device == "cpu") continue;
    devices[i] = device_name(held->device);
    if (is_device_name(devices[i])) continue;
    add({.severity = Severity::error,
         .code = "plan.device_map",
         .target = plan_.targets[i].name,
         .message = fmt::format("'{}' is on '{}', a device that loadstone cannot load to",
                                printable(plan_.targets[i].name), printable(held->device)),
         .suggestion = "pass a device map, or move the model",
         .found = held->device,
         .expected = device_examples});
    devices[i] = "cpu";
  }
}

// Reports an entry that places no tensor, because other entries place its tensors or its path is
// mistyped.
void Planner::report_idle(const std::string& path) {
  const DeviceMap& map = options_.device_map;
  const auto known = std::ranges::find_if(
      plan_.targets, [&](const PlannedTarget& target) { return is_path_of(path, target.name); });
  if (map.bare_modules.contains(path)) return;
  if (known != plan_.targets.end()) {
    add({.severity = Severity::warning,
         .code = "plan.device_map",
         .message = fmt::format(
             "the device map's entry '{}' has no effect: other entries place all its tensors",
             printable(path))});
    return;
  }
  add({.severity = map.allows_unknown ? Severity::warning : Severity::error,
       .code = "plan.device_map",
       .message = fmt::format("the device map's entry '{}' is not a module or tensor of the model",
                              printable(path)),
       .suggestion = "correct the entry, or remove it",
       .found = path});
}

void Planner::report_uncovered(const std::vector<std::size_t>& uncovered) {
  if (uncovered.empty()) return;
  const std::string& first = plan_.targets[uncovered.front()].name;
  add({.severity = Severity::error,
       .code = "plan.device_map",
       .target = first,
       .message = fmt::format("the device map does not cover {}",
                              name_list({&first, 1}, uncovered.size())),
       .suggestion = "add an entry for the module \"\", which covers all other tensors"});
}

// Determines device, origin and delivery.
void Planner::settle(PlannedTarget& target, const std::string& device) {
  target.device = device;
  Recipe& recipe = target.recipe;
  const bool has_bytes = is_delivered(recipe.origin);
  if (device == "meta") {
    if (recipe.origin != Origin::excluded) recipe.reason = "the device map places it on meta";
    recipe.origin = Origin::excluded;
    recipe.boxes.clear();
    recipe.merge.reset();
    recipe.constant.reset();
    target.quantization.reset();
    return;
  }
  if (!has_bytes) {
    // An offload folder cannot store a value that the caller writes, so the target moves to the
    // CPU.
    if (device == "disk" && recipe.origin != Origin::excluded) target.device = "cpu";
    return;
  }
  if (device == "disk") {
    target.delivery = can_keep_on_disk(plan_, target) ? Delivery::disk_keep : Delivery::disk_write;
    return;
  }
  if (target.quantization && target.quantization->dialect.empty() && device.starts_with("cuda")) {
    const auto* const encoding = find_written_encoding(target.quantization->encoding);
    if (encoding != nullptr) target.quantization->dialect = encoding->cuda_dialect;
  }
  const bool is_view = options_.mmap && device == "cpu" && can_view_file(plan_, target);
  target.delivery = is_view ? Delivery::file_view : Delivery::memory;
}

// Rejects a slice, because readers of an offload folder expect whole tensors.
void Planner::refuse_slice_on_disk(std::size_t target) {
  const Target& wanted = skeleton_.targets[target];
  if (!wanted.slice) return;
  fail(target,
       {.code = "plan.slice",
        .message = fmt::format("the model contains only {} of '{}', {}: an offload folder can "
                               "contain only whole tensors",
                               wanted.slice->text(), printable(wanted.name), wanted.shape.text()),
        .found = "disk"});
}

void Planner::check_offload() {
  std::size_t written = 0;
  bool is_far = false;
  Finding unaligned = {.severity = Severity::info, .code = "plan.mmap"};
  for (const PlannedTarget& target : plan_.targets) {
    const bool is_written = target.delivery == Delivery::disk_write;
    if (is_written) ++written;
    if (is_written && !is_offload_name(target.name)) {
      add({.severity = Severity::error,
           .code = "offload.name",
           .target = target.name,
           .message = fmt::format("'{}' is placed on disk, but its name is not a valid file name",
                                  printable(target.name))});
    }
    if (options_.mmap && target.delivery == Delivery::memory && target.device == "cpu" &&
        target.byte_count() > 0 && is_whole_source(plan_, target) &&
        unaligned.sources.size() < names_listed_max) {
      is_far = is_far || comes_over_network(plan_, target);
      const std::uint32_t source = target.recipe.boxes.front().source;
      unaligned.sources.push_back(plan_.catalog->tensors()[source].name);
    }
  }
  if (!unaligned.sources.empty()) {
    unaligned.message =
        name_list(unaligned.sources, unaligned.sources.size(), 1) +
        (is_far ? " cannot be a view of a file on another machine, so loadstone copies it"
                : " cannot be a view of the file, because its offset is not aligned, so loadstone "
                  "copies it");
    add(std::move(unaligned));
  }
  if (written == 0 || !options_.offload_folder.empty()) return;
  add({.severity = Severity::error,
       .code = "plan.offload_folder",
       .message = fmt::format(
           "{} placed on disk must be written there, but the plan has no offload folder",
           counted(written, "target")),
       .suggestion = "pass an offload folder, or give other devices more memory"});
}

void Planner::check_budget() {
  for (const auto& [name, limit] : options_.max_memory) {
    const std::string device = device_name(name);
    const auto peak = plan_.peak_bytes.find(device);
    std::uint64_t needed = peak == plan_.peak_bytes.end() ? 0 : peak->second;
    if (options_.device_map.mode) {
      // A computed device map applies the limits only to tensors, and not to staging memory.
      needed = 0;
      for (const PlannedTarget& target : plan_.targets) {
        if (target.device == device && target.delivery == Delivery::memory) {
          needed += target.byte_count();
        }
      }
    }
    if (needed <= limit) continue;
    add({.severity = Severity::error,
         .code = "plan.over_budget",
         .message = fmt::format("{} needs {}, but its limit is {}", device, human_bytes(needed),
                                human_bytes(limit)),
         .suggestion = "raise the limit, place modules elsewhere, or choose a smaller dtype",
         .found = counted(needed, "byte"),
         .expected = fmt::format("at most {} bytes", limit)});
  }
}

}  // namespace loadstone
