// Rows of a forward pass over a paged cache.
#pragma once

#include "common.cuh"

// A row's own place and the keys it sees; as paged.rs's RowRef, its ranges as start and length.
struct RowRef {
    uint32_t position;
    uint32_t slot;
    uint32_t table;
    uint32_t prefix;
    uint32_t tail;
    uint32_t tail_len;
};
