// Includes all headers of loadstone, in reading order.
//
//   auto catalog = loadstone::open_checkpoint("checkpoint");
//   auto skeleton = loadstone::Skeleton::from_json(text);
//   auto plan = loadstone::make_plan(catalog, skeleton);
//   loadstone::HostMemory memory(plan);
//   auto report = loadstone::execute(plan, memory.destinations());
//   loadstone::audit(plan, report).require_real();
//
// The following applies to all headers that do not specify otherwise:
//
// - Errors. Functions throw loadstone::Error (error.h) and nothing else, even when memory runs out
//   ("memory.host"). Only an exception from the caller's own Observer passes through unchanged.
//   RE2, which compiles the patterns of rules, is built without exceptions, so the process may end
//   if memory runs out in RE2. Copies of plain data throw what standard containers throw.
// - Threads. Several threads may call functions at once. Structs are plain data: thread-safe while
//   no thread writes to them. Classes document their own rules.
// - Ownership. The caller owns a Storage, Device or Observer that it passes by pointer, which must
//   outlive the call, or the object that it was passed to. loadstone keeps no span or string_view
//   that a caller passes in; a returned one lives as long as the object that returned it.
// - Units. Sizes are bytes if the name contains "bytes", otherwise elements. Ranges are
//   [begin, end). Tensors in memory are contiguous, row-major and little-endian. Times are in
//   seconds. Names are UTF-8; paths are bytes as the system gives them.
#pragma once

// clang-format off
#include "loadstone/export.h"
#include "loadstone/version.h"
#include "loadstone/build_info.h"
#include "loadstone/byte_range.h"
#include "loadstone/dtype.h"
#include "loadstone/shape.h"
#include "loadstone/error.h"
#include "loadstone/decoding.h"
#include "loadstone/defaults.h"
#include "loadstone/finding.h"
#include "loadstone/storage.h"
#include "loadstone/remote.h"
#include "loadstone/catalog.h"
#include "loadstone/quantized_tensors.h"
#include "loadstone/tensor_reader.h"
#include "loadstone/save.h"
#include "loadstone/skeleton.h"
#include "loadstone/quantization.h"
#include "loadstone/recipe.h"
#include "loadstone/merge.h"
#include "loadstone/recipe_builder.h"
#include "loadstone/plan.h"
#include "loadstone/receipt.h"
#include "loadstone/budget.h"
#include "loadstone/device.h"
#include "loadstone/execute.h"
#include "loadstone/machine.h"
#include "loadstone/page.h"
#include "loadstone/audit.h"
#include "loadstone/verify.h"
#include "loadstone/merge_options.h"
#include "loadstone/importance.h"
#include "loadstone/convert.h"
#include "loadstone/observer.h"
// clang-format on
