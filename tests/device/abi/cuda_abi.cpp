// Compares the declarations in src/device/cuda_driver.h with the real cuda.h, if installed.
#include <gtest/gtest.h>

#include <cstddef>
#include <type_traits>

#include "device/cuda_driver.h"

// This macro makes cuda.h declare every version of a function under its exported name.
#define __CUDA_API_VERSION_INTERNAL
#include <cuda.h>

namespace loadstone {
namespace {

// True if values of the two types can be passed in place of each other. cuda.h has enumerations
// where loadstone has integers, and its structures have the same layout.
template <typename Ours, typename Real>
struct Agrees : std::bool_constant<std::is_same_v<Ours, Real>> {};

template <typename Real>
requires std::is_enum_v<Real>
struct Agrees<int, Real>
    : std::bool_constant<sizeof(int) == sizeof(Real) && alignof(int) == alignof(Real)> {
};

template <typename Ours, typename Real>
struct Agrees<Ours*, Real*> : Agrees<Ours, Real> {};

template <typename... Ours, typename... Real, typename OursResult, typename RealResult>
requires(sizeof...(Ours) ==
         sizeof...(Real)) struct Agrees<OursResult (*)(Ours...), RealResult (*)(Real...)>
    : std::bool_constant<Agrees<OursResult, RealResult>::value &&
                         (Agrees<Ours, Real>::value && ...)> {
};

#if CUDA_VERSION >= 12080

// Compares offset and type of a structure's member.
template <typename Ours, typename Real>
constexpr bool is_member(std::size_t ours_offset, std::size_t real_offset) {
  return ours_offset == real_offset && Agrees<Ours, Real>::value;
}

#define LOADSTONE_MEMBER(structure, member)                              \
  is_member<decltype(structure::member), decltype(::structure::member)>( \
      offsetof(structure, member), offsetof(::structure, member))

template <>
struct Agrees<CUmemLocation, ::CUmemLocation>
    : std::bool_constant<sizeof(CUmemLocation) == sizeof(::CUmemLocation) &&
                         LOADSTONE_MEMBER(CUmemLocation, type) &&
                         LOADSTONE_MEMBER(CUmemLocation, id)> {};

template <>
struct Agrees<CUmemcpyAttributes, ::CUmemcpyAttributes>
    : std::bool_constant<sizeof(CUmemcpyAttributes) == sizeof(::CUmemcpyAttributes) &&
                         LOADSTONE_MEMBER(CUmemcpyAttributes, srcAccessOrder) &&
                         LOADSTONE_MEMBER(CUmemcpyAttributes, srcLocHint) &&
                         LOADSTONE_MEMBER(CUmemcpyAttributes, dstLocHint) &&
                         LOADSTONE_MEMBER(CUmemcpyAttributes, flags)> {};

static_assert(cuda::source_in_stream_order == CU_MEMCPY_SRC_ACCESS_ORDER_STREAM);
static_assert(CU_MEM_LOCATION_TYPE_INVALID == 0 && CU_MEMCPY_FLAG_DEFAULT == 0);
static_assert(
    Agrees<decltype(CudaDriver::cuMemcpyBatchAsync), decltype(&::cuMemcpyBatchAsync)>::value);

#endif

#if CUDA_VERSION >= 13000
static_assert(
    Agrees<decltype(CudaDriver::cuMemcpyBatchAsync_v2), decltype(&::cuMemcpyBatchAsync_v2)>::value);
// Control: the older version of the function has one more argument.
static_assert(
    !Agrees<decltype(CudaDriver::cuMemcpyBatchAsync), decltype(&::cuMemcpyBatchAsync_v2)>::value);
#endif

#define LOADSTONE_AGREES(function)                                                    \
  static_assert(Agrees<decltype(CudaDriver::function), decltype(&::function)>::value, \
                #function " is declared in another way in cuda.h");
LOADSTONE_CUDA_FUNCTIONS(LOADSTONE_AGREES)

static_assert(cuda::success == CUDA_SUCCESS);
static_assert(cuda::out_of_memory == CUDA_ERROR_OUT_OF_MEMORY);
static_assert(cuda::not_supported == CUDA_ERROR_NOT_SUPPORTED);
static_assert(cuda::host_memory_portable == CU_MEMHOSTALLOC_PORTABLE);
static_assert(cuda::stream_non_blocking == CU_STREAM_NON_BLOCKING);
static_assert(cuda::event_flags == (CU_EVENT_BLOCKING_SYNC | CU_EVENT_DISABLE_TIMING));

// Controls: the comparison detects differences.
static_assert(!Agrees<CUresult (*)(CUevent), decltype(&::cuStreamDestroy_v2)>::value);
static_assert(
    !Agrees<CUresult (*)(void*, CUdeviceptr, unsigned), decltype(&::cuMemcpyDtoH_v2)>::value);
static_assert(!Agrees<CUresult (*)(void*, CUdeviceptr), decltype(&::cuMemcpyDtoH_v2)>::value);
static_assert(!Agrees<long long (*)(unsigned), decltype(&::cuInit)>::value);

// The compiler makes all comparisons. The test only records the version of cuda.h.
TEST(CudaAbi, TheDeclarationsAreThoseOfTheHeader) { RecordProperty("CUDA_VERSION", CUDA_VERSION); }

}  // namespace
}  // namespace loadstone
