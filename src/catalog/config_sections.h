// Finds the sections of a config that declare an encoding.
#pragma once

#include <simdjson.h>

#include <functional>

namespace loadstone {

// Visits all values of quantization_members except null, also in the configs of a model's parts.
void for_each_section(simdjson::dom::element config,
                      const std::function<void(simdjson::dom::element)>& visit);

}  // namespace loadstone
