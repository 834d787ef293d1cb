// The version of loadstone, defined only here: CMake and the Python package read this line.
#pragma once

#define LOADSTONE_VERSION "0.1.0"
