// All of loadstone, in reading order.
//
//   auto catalog = loadstone::open_checkpoint("checkpoint");
//   auto skeleton = loadstone::Skeleton::from_json(text);
//   auto plan = loadstone::make_plan(catalog, skeleton);
//   loadstone::HostMemory memory(plan);
//   auto report = loadstone::execute(plan, memory.destinations());
//   loadstone::audit(plan, report).require_real();
#pragma once

// clang-format off
#include "loadstone/dtype.h"
#include "loadstone/shape.h"
#include "loadstone/error.h"
#include "loadstone/defaults.h"
#include "loadstone/finding.h"
#include "loadstone/storage.h"
#include "loadstone/catalog.h"
#include "loadstone/quantized_tensors.h"
#include "loadstone/tensor_reader.h"
#include "loadstone/skeleton.h"
#include "loadstone/quantization.h"
#include "loadstone/recipe.h"
#include "loadstone/recipe_builder.h"
#include "loadstone/plan.h"
#include "loadstone/budget.h"
#include "loadstone/execute.h"
#include "loadstone/audit.h"
#include "loadstone/verify.h"
#include "loadstone/convert.h"
#include "loadstone/observer.h"
// clang-format on
