#include "storage/network_file_system.h"

#include <sys/vfs.h>

#include <algorithm>
#include <array>

namespace loadstone {

namespace {

// Magic numbers from linux/magic.h and from the sources of file systems.
constexpr std::array<std::uint32_t, 16> network_types = {
    0x6969,      // NFS
    0x517b,      // SMB
    0xff534d42,  // CIFS
    0xfe534d42,  // SMB 2 and later
    0x5346414f,  // AFS
    0x6b414653,  // AFS client of the kernel
    0x73757245,  // Coda
    0x564c,      // NCP
    0x01021997,  // 9P: folders of the host in WSL and in virtual machines
    0x00c36400,  // Ceph
    0x0bd00bd0,  // Lustre
    0x47504653,  // GPFS
    0x19830326,  // BeeGFS
    0x20030528,  // OrangeFS
    0x786f4256,  // shared folders of VirtualBox
    0x65735546,  // FUSE
};

}  // namespace

bool is_network_file_system(std::uint32_t type) noexcept {
  return std::ranges::find(network_types, type) != network_types.end();
}

bool is_on_network(int descriptor) noexcept {
  struct statfs system {};
  // The magic number has 32 bits, but the type of f_type is signed, and its width varies.
  return ::fstatfs(descriptor, &system) == 0 &&
         is_network_file_system(static_cast<std::uint32_t>(system.f_type));
}

}  // namespace loadstone
