// Recognises the work of an earlier run: its finished output, by the record that each run leaves
// next to the target, and its finished shards.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "convert/write/target.h"
#include "loadstone/convert.h"
#include "loadstone/storage.h"

namespace loadstone {

inline constexpr const char* complete_code = "convert.complete";
inline constexpr const char* resumed_code = "convert.resumed";

// Compares the target with its record. If the target is the unchanged output of this conversion,
// and the sources have not changed, returns the finding "convert.complete". If it is the unchanged
// output of a different conversion, which a resumed run must not replace, returns error
// "convert.state". Otherwise returns nullopt, and sets `difference`, such as "which was made with
// different rules", if the record shows one.
[[nodiscard]] std::optional<Finding> finished_earlier(const Conversion& conversion,
                                                      const TargetPlace& place,
                                                      const ConvertRun& run,
                                                      WritableStorage& storage,
                                                      std::string& difference);

// Returns a finding about the shards that a resumed run keeps; nullopt without work of an earlier
// run. Throws Error "convert.state" if the work belongs to a different conversion.
[[nodiscard]] std::optional<Finding> resumed_work(const Conversion& conversion,
                                                  const TargetPlace& place, const ConvertRun& run,
                                                  WritableStorage& storage);

// Returns the report of a run whose target is already complete. Removes a work folder of this
// conversion, which nothing needs any more.
[[nodiscard]] ConvertReport report_finished(const Conversion& conversion, const std::string& target,
                                            const ConvertRun& run, WritableStorage& storage);

// Adds a finding about the files that the conversion replaces: the error of kept_model(), a warning
// if the earlier output differs or is not known, otherwise an info.
void tell_replaced(const Conversion& conversion, const std::string& difference,
                   const ConvertRun& run, WritableStorage& storage, TargetPlace& place);

// Rejects the replacement of weights that no earlier conversion can write again: source and target
// may have been exchanged. Returns an error "convert.target", or nullopt.
[[nodiscard]] std::optional<Finding> kept_model(const Conversion& conversion,
                                                const TargetPlace& place, WritableStorage& storage);

// Throws the error of kept_model(), unless the run overwrites.
void require_replaceable(const Conversion& conversion, const TargetPlace& place,
                         const ConvertRun& run, WritableStorage& storage);

// Writes the record of an output that is about to be committed into the work folder. `files`: the
// folder of the finished files, or the path of the single file.
void prepare_record(const Conversion& conversion, const TargetPlace& place, const ConvertRun& run,
                    const std::string& files, WritableStorage& storage);
// Returns true if the target contains all files of the record in the work folder.
[[nodiscard]] bool is_committed(const TargetPlace& place, WritableStorage& storage);
// Copies the record from the work folder to its place next to the target, if the output has been
// committed.
void adopt_record(const TargetPlace& place, WritableStorage& storage);

}  // namespace loadstone
