// One translation unit, so that there is one module to load.

#include "attention.cu"
#include "fill.cu"
#include "heads.cu"
#include "linear.cu"
#include "moe.cu"
#include "router.cu"
#include "rows.cu"
