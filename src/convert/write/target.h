// The place of a target.
#pragma once

#include <string>
#include <vector>

#include "loadstone/convert.h"
#include "loadstone/finding.h"
#include "loadstone/storage.h"

namespace loadstone {

struct TargetPlace {
  std::string path;    // without a slash at its end
  std::string parent;  // the folder that it is in
  std::string work;    // the folder of files that are not whole yet
  bool exists = false;
  bool is_fixed = false;   // a folder whose name cannot be given to another one
  bool has_files = false;  // a folder that is not empty
  // A folder without folders: its other files can be linked into a new folder, and the two be
  // exchanged in one step.
  bool is_exchangeable = false;
  std::vector<std::string> others;  // its files that stay, when it is
  std::vector<std::string> older;   // an older output, that goes
  // Files of the work folder that an ended run has given their names already.
  std::vector<std::string> named;
  std::vector<Finding> findings;  // warnings about files that stay next to the output
};

// Looks at the place. Throws Error "convert.target" where it may not be written, and
// "io.not_found" if its parent folder does not exist.
[[nodiscard]] TargetPlace look_at_target(const Conversion& conversion, const std::string& target,
                                         WritableStorage& storage);

// Does the work of check_target() in a given file system.
[[nodiscard]] std::vector<Finding> check_target_in(WritableStorage& storage,
                                                   const Conversion& conversion,
                                                   const std::string& target,
                                                   const ConvertRun& run);

}  // namespace loadstone
