// Inspects the place where an output is written.
#pragma once

#include <string>
#include <vector>

#include "loadstone/convert.h"
#include "loadstone/finding.h"
#include "loadstone/storage.h"

namespace loadstone {

struct TargetPlace {
  std::string path;    // without a slash at the end
  std::string parent;  // its folder
  std::string shown;   // the target as messages name it
  std::string record;  // the file that records a finished conversion, see finished.h
  std::string work;    // the folder for incomplete files
  bool exists = false;
  bool is_fixed = false;   // true for a folder that cannot be replaced by another folder
  bool has_files = false;  // true for a folder that is not empty
  // True for a folder without subfolders. Its other files can be linked into a new folder, and then
  // both folders can be exchanged in one step.
  bool is_exchangeable = false;
  std::vector<std::string> others;  // files that stay
  std::vector<std::string> older;   // files of an older output, which are removed
  // Files of the work folder that an interrupted run has already renamed.
  std::vector<std::string> named;
  std::vector<Finding> findings;  // warnings about files that stay next to the output
};

// Returns the path of the file that records the conversion to a target, see finished.h.
[[nodiscard]] std::string record_path(const std::string& target, WritableStorage& storage);
// Returns the work folder of a target whose files are replaced one at a time. The files wait inside
// the target, because they must be on its file system.
[[nodiscard]] std::string work_inside(const TargetPlace& place);
// Returns the paths of the target, without looking at its files. Throws Error "convert.target" for
// a name that no target can have, and "io.not_found" if the parent folder does not exist.
[[nodiscard]] TargetPlace place_of(const Conversion& conversion, const std::string& target,
                                   WritableStorage& storage);
// Inspects the target. Throws Error "convert.target" if it must not be written, and "io.not_found"
// if its parent folder does not exist.
[[nodiscard]] TargetPlace look_at_target(const Conversion& conversion, const std::string& target,
                                         WritableStorage& storage);

// Implements check_target() for a given file system.
[[nodiscard]] std::vector<Finding> check_target_in(WritableStorage& storage,
                                                   const Conversion& conversion,
                                                   const std::string& target,
                                                   const ConvertRun& run);

}  // namespace loadstone
