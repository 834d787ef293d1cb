// Recognises and decodes AWQ, with codes in the order of its GEMM kernel. See docs/formats/awq.md
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <utility>

#include "codec/families.h"
#include "codec/words/words.h"

namespace loadstone {

namespace {

constexpr std::uint64_t word_outputs = 8;

// ---- Decoding: qweight I32 [in, out / 8], scales [groups, out], qzeros I32 [groups, out / 8]. The
// result is [in, out].

std::optional<Problem> prepare(const DecodeRequest& request, PreparedDecoder& made) {
  words::Packing form = {.layout = words::Layout::interleaved, .bits = 4};
  if (auto wrong = words::check_module(request, form)) return wrong;
  const Shape codes({form.rows, form.columns / word_outputs});
  const Shape zeros({form.groups, form.columns / word_outputs});
  if (form.columns % word_outputs != 0 || request.parts[0].shape != codes || form.has_order) {
    return Problem{"the number of words does not fit the shape", request.parts[0].shape.text(),
                   codes.text()};
  }
  if (request.parts[2].shape != zeros) {
    return Problem{"the numbers of scales and zero points differ", request.parts[2].shape.text(),
                   zeros.text()};
  }
  words::finish(form, made);
  return std::nullopt;
}

constexpr std::array kernels = {DecodeKernel{"awq", prepare, false, false, true}};

// ---- recognising

bool is_of_gemm(const std::string& layout) {
  return layout.empty() || layout == "gemm" || layout == "GEMM" || layout == "auto_round:auto_awq";
}

// Recognises "P.qweight" if each of its columns contains eight outputs.
std::optional<QuantizedTensor> recognise(const TensorTable& table, std::uint32_t tensor) {
  const auto module = words::module_of(table, tensor);
  if (!module || module->scales == TensorTable::none) return std::nullopt;
  const TensorInfo& codes = table[tensor];
  const TensorInfo& scales = table[module->scales];
  if (codes.shape[1] * word_outputs != scales.shape[1]) return std::nullopt;
  const QuantizationClaim& claim = table.claim();
  QuantizedTensor made = module->quantized();
  const auto mismatch = [&](const char* what, std::string found, std::string expected) {
    refuse(made, "plan.config_mismatch", what, {codes.name}, std::move(found), std::move(expected));
    return made;
  };
  if (!module->lacks.empty()) {
    refuse(made, "q.scale_missing", "lacks components", module->lacks);
    return made;
  }
  if (claim.method == "gptq") {
    return mismatch("is packed as AWQ, but the config declares GPTQ", "awq", "gptq");
  }
  if (!is_of_gemm(claim.layout)) {
    refuse(made, "plan.encoding",
           "is packed in a layout that this version of loadstone does not decode", {codes.name},
           claim.layout, "gemm");
    return made;
  }
  if (claim.bits && *claim.bits != 4) {
    return mismatch("has a different number of bits than the config declares", "4",
                    std::to_string(*claim.bits));
  }
  const TensorInfo& zeros = table[module->zeros];
  const std::uint64_t inputs = codes.shape[0];
  const std::uint64_t groups = scales.shape[0];
  if (groups == 0 || inputs % groups != 0 || zeros.shape[0] != groups) {
    refuse(made, "q.scale_shape", "has scales and zero points that do not fit its words",
           {scales.name, zeros.name}, scales.shape.text(), codes.shape.text());
    return made;
  }
  const std::uint64_t size = inputs / groups;
  if (claim.group_size && std::min(*claim.group_size, inputs) != size) {
    return mismatch("has a different group size than the config declares",
                    fmt::format("groups of {}", size),
                    fmt::format("groups of {}", *claim.group_size));
  }
  set_decoding(table, made, "awq",
               {"awq",
                {module->codes, module->scales, module->zeros},
                Shape({inputs, scales.shape[1]}),
                Dtype::f16,
                0,
                size});
  made.is_transposed = true;
  return made;
}

}  // namespace

constexpr std::array<std::string_view, 1> encodings = {"awq"};

extern const Family awq_family = {.kernels = kernels,
                                  .recognise = recognise,
                                  .reads_all = true,
                                  .encodings = encodings,
                                  .method = "awq",
                                  .stores_conv1d_transposed = true};

}  // namespace loadstone
