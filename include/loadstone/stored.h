// Values that a checkpoint holds quantized: tensors of it that only together mean numbers. Told by
// names, dtypes and shapes, and by the small states that bitsandbytes writes.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "loadstone/catalog.h"
#include "loadstone/finding.h"
#include "loadstone/recipe.h"
#include "loadstone/storage.h"

namespace loadstone {

struct StoredValue {
  std::string name;      // of the numbers: "model.layers.0.mlp.up_proj.weight"
  std::string encoding;  // "fp8", "fp8-channel", "fp8-block", "int8-channel", "nvfp4", "mxfp4",
                         // "mxfp8", "int4", "int4-awq", "nf4", "fp4", "int8"
  Decoding decoding;     // what gives the numbers; its sources are the parts, the data first
  // What belongs to it and is needed no more once it is decoded: tables, states, scales of
  // activations.
  std::vector<std::uint32_t> beside;
  // The model has the last two dims in the other order: GPT-OSS multiplies from the right.
  bool is_turned = false;

  // Of the model's tensor.
  [[nodiscard]] Shape shape() const;
};

struct StoredValues {
  std::vector<StoredValue> values;  // in the catalog's order
  // Errors "q.scale_missing", "q.scale_shape", "q.quant_state" ... for values that cannot be read,
  // and warnings "q.scale_unused" for scales of nothing.
  std::vector<Finding> findings;
};

// The layouts of DeepSeek (weight_scale_inv), ModelOpt and compressed-tensors (weight_scale,
// weight_scale_2; weight_packed, weight_global_scale), GPT-OSS (_blocks, _scales) and bitsandbytes.
// Reads the states and tables of bitsandbytes, some 200 bytes each and 1 KiB where scales are
// nested; null: through the catalog's storage.
[[nodiscard]] StoredValues find_stored_values(const Catalog& catalog, Storage* storage = nullptr);

}  // namespace loadstone
