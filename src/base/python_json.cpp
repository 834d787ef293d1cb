#include "base/python_json.h"

#include <cstddef>

namespace loadstone {

std::string without_number_words(std::string_view text) {
  std::string changed(text);
  bool in_string = false;
  for (std::size_t at = 0; at < changed.size(); ++at) {
    if (changed[at] == '"') {
      in_string = !in_string;
    } else if (in_string) {
      if (changed[at] == '\\') ++at;
    } else {
      for (const std::string_view word : {"Infinity", "NaN"}) {
        if (text.substr(at, word.size()) != word) continue;
        changed.replace(at, word.size(), word.size(), ' ');
        changed[at] = '0';
        at += word.size() - 1;
        break;
      }
    }
  }
  return changed;
}

}  // namespace loadstone
