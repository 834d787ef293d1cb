#include "codec/families.h"

#include <array>

#include "codec/awq/awq.h"
#include "codec/bnb/bnb.h"
#include "codec/fp4/fp4.h"
#include "codec/fp8/fp8.h"
#include "codec/gguf/gguf.h"
#include "codec/gptq/gptq.h"
#include "codec/int4/int4.h"
#include "codec/int8/int8.h"
#include "codec/packed/packed.h"
#include "codec/unknown/unknown.h"

namespace loadstone {

namespace {

// In the order in which they are asked.
constexpr std::array all = {
    &unknown_family,  //
    &gptq_family,     //
    &awq_family,      //
    &packed_family,   //
    &bnb_family,      //
    &fp8_family,      //
    &int8_family,     //
    &int4_family,     //
    &fp4_family,      //
    &gguf_family,     //
};

}  // namespace

std::span<const Family* const> families() noexcept { return all; }

}  // namespace loadstone
