// All of loadstone, in reading order.
//
//   auto catalog = loadstone::open_checkpoint("checkpoint");
//   auto skeleton = loadstone::Skeleton::from_json(text);
//   auto plan = loadstone::make_plan(catalog, skeleton);
//   loadstone::HostMemory memory(plan);
//   auto report = loadstone::execute(plan, memory.destinations());
//   loadstone::audit(plan, report).require_real();
//
// For all headers, where they do not say otherwise:
//
// - Errors. Functions throw loadstone::Error (error.h) and nothing else: also when memory ends
//   ("memory.host"). Only what a caller's own Observer throws comes back as it is. RE2, which
//   compiles the patterns of rules, knows no exceptions: memory that ends inside of it may end the
//   process. Copying plain data throws what its standard containers do.
// - Threads. Functions may be called from several threads at once. Structs are plain data:
//   thread-safe while nobody writes to them. Classes say what they are.
// - Ownership. A Storage, Device or Observer that is passed by pointer stays the caller's, and
//   lives longer than the call, or the object that it was passed to. A span or string_view that is
//   passed in is not kept; one that is returned lives as long as what it was asked of.
// - Units. Sizes are bytes where the name says bytes, else elements. Ranges are [begin, end).
//   Tensors in memory are contiguous, row-major and little-endian. Times are in seconds. Names are
//   UTF-8, paths are the system's bytes.
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
#include "loadstone/page.h"
#include "loadstone/audit.h"
#include "loadstone/verify.h"
#include "loadstone/merge_options.h"
#include "loadstone/importance.h"
#include "loadstone/convert.h"
#include "loadstone/observer.h"
// clang-format on
