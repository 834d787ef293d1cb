// Writes text files at paths that users choose: plans, HTML pages, receipts, skeletons, recipes.
#pragma once

#include <string>
#include <string_view>

namespace loadstone {

// Throws Error "io.exists" if write_document() would not replace the file. Accepts an empty path.
void require_document(const std::string& path);

// Writes a document as write_whole_file does. Replaces an older document, but never a file of
// weights or another binary file, nor a config, an index or a tokenizer of a model.
// Throws Error "io.exists", and the errors of write_whole_file.
void write_document(const std::string& path, std::string_view text);

}  // namespace loadstone
