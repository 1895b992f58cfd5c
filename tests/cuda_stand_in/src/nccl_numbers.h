// Sums, products, largest and smallest elements of what several ranks hold.
#pragma once

#include <nccl.h>

#include <cstddef>
#include <vector>

namespace stand_in {

size_t width_of(ncclDataType_t type);
// The number of an operation that multiplies by a factor before it adds.
ncclRedOp_t factor_operation(const void* factor, ncclDataType_t type, bool is_on_device);
void combine(char* to, const std::vector<const char*>& parts, size_t count, ncclDataType_t type,
             ncclRedOp_t operation);

}  // namespace stand_in
