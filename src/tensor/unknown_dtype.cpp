#include "tensor/unknown_dtype.h"

#include <algorithm>
#include <cctype>

#include "base/unknown_word.h"
#include "loadstone/dtype.h"

namespace loadstone {

std::string unknown_dtype(std::string_view text, std::vector<std::string> others) {
  for (const DtypeInfo& known : dtype_table) {
    std::string& name = others.emplace_back(known.name);
    std::ranges::transform(name, name.begin(), [](unsigned char letter) {
      return static_cast<char>(std::tolower(letter));
    });
    if (!known.torch_name.empty() && known.torch_name != name)
      others.emplace_back(known.torch_name);
  }
  return unknown_word("dtype", text, others);
}

}  // namespace loadstone
