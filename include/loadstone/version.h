// The version of loadstone, here and nowhere else: CMake and the Python package read this line.
#pragma once

#define LOADSTONE_VERSION "0.1.0"
