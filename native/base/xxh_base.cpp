// XXH3 for every processor that the compiler's own flags allow.
#define TIERLOAD_XXH_KERNEL xxh_base
#include "base/xxh_kernel.inc"
