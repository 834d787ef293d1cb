#include "cli/app.h"

int main(int argc, char** argv) { return loadstone::cli::run(argc, argv); }
