// Declares the style sheet and the script of the page, which are made from page.css and page.js.
#pragma once

#include <string_view>

namespace loadstone {

extern const std::string_view page_style;
extern const std::string_view page_script;

}  // namespace loadstone
