// The sections of a config that declare an encoding.
#pragma once

#include <simdjson.h>

#include <functional>

namespace loadstone {

// Visits the values of quantization_members except null, in the configs of a model's parts too.
void for_each_section(simdjson::dom::element config,
                      const std::function<void(simdjson::dom::element)>& visit);

}  // namespace loadstone
