// See nccl_numbers.h. Narrow floats are added in float32 and rounded after each rank, as along a
// ring; an average of floats multiplies first, as NCCL does.
#include "nccl_numbers.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <map>
#include <type_traits>

#include "stand_in.h"

namespace stand_in {

namespace {

struct Factor {
  double value;
  const void* address;  // null: the value is known
  ncclDataType_t type;
};

std::map<int, Factor>& factors() {
  static auto* known = new std::map<int, Factor>;
  return *known;
}

double read(const void* address, ncclDataType_t type) {
  switch (type) {
    case ncclFloat16:
      return __half2float(*static_cast<const __half*>(address));
    case ncclBfloat16:
      return __bfloat162float(*static_cast<const __nv_bfloat16*>(address));
    case ncclFloat64:
      return *static_cast<const double*>(address);
    case ncclFloat32:
      return *static_cast<const float*>(address);
    default:
      fprintf(stderr, "[stand-in] a factor of type %d is not played\n", static_cast<int>(type));
      return 0;
  }
}

// How numbers of a type are computed with, and stored.
template <class Stored>
struct Number {
  using Wide = Stored;
  static Wide load(Stored value) { return value; }
  static Stored store(Wide value) { return value; }
};
template <>
struct Number<__half> {
  using Wide = float;
  static float load(__half value) { return __half2float(value); }
  static __half store(float value) { return __float2half(value); }
};
template <>
struct Number<__nv_bfloat16> {
  using Wide = float;
  static float load(__nv_bfloat16 value) { return __bfloat162float(value); }
  static __nv_bfloat16 store(float value) { return __float2bfloat16(value); }
};

template <class Stored>
void combine_as(Stored* to, const std::vector<const char*>& parts, size_t count,
                ncclRedOp_t operation, double factor) {
  using As = Number<Stored>;
  using Wide = typename As::Wide;
  constexpr bool is_float = std::is_floating_point_v<Wide>;
  bool averages = operation == ncclAvg;
  bool multiplies = operation >= ncclNumOps || (averages && is_float);
  Wide scale = static_cast<Wide>(averages ? 1.0 / parts.size() : factor);
  for (size_t index = 0; index < count; index++) {
    auto total = Wide{};
    for (size_t rank = 0; rank < parts.size(); rank++) {
      Stored stored;
      memcpy(&stored, parts[rank] + index * sizeof stored, sizeof stored);
      Wide value = As::load(stored);
      if (multiplies) value = static_cast<Wide>(As::load(As::store(value * scale)));
      if (rank == 0) {
        total = value;
      } else if (operation == ncclProd) {
        total = total * value;
      } else if (operation == ncclMax) {
        total = std::max(total, value);
      } else if (operation == ncclMin) {
        total = std::min(total, value);
      } else {
        total = total + value;
      }
      total = As::load(As::store(total));
    }
    if (averages && !is_float) total = static_cast<Wide>(total / static_cast<Wide>(parts.size()));
    Stored stored = As::store(total);
    memcpy(reinterpret_cast<char*>(to) + index * sizeof stored, &stored, sizeof stored);
  }
}

}  // namespace

size_t width_of(ncclDataType_t type) {
  switch (type) {
    case ncclInt8:
    case ncclUint8:
    case ncclFloat8e4m3:
    case ncclFloat8e5m2:
      return 1;
    case ncclFloat16:
    case ncclBfloat16:
      return 2;
    case ncclInt64:
    case ncclUint64:
    case ncclFloat64:
      return 8;
    default:
      return 4;
  }
}

ncclRedOp_t factor_operation(const void* factor, ncclDataType_t type, bool is_on_device) {
  Lock lock(mutex());
  int number = ncclNumOps + static_cast<int>(factors().size());
  factors()[number] = {is_on_device ? 0 : read(factor, type), is_on_device ? factor : nullptr,
                       type};
  return static_cast<ncclRedOp_t>(number);
}

void combine(char* to, const std::vector<const char*>& parts, size_t count, ncclDataType_t type,
             ncclRedOp_t operation) {
  double factor = 1;
  if (operation >= ncclNumOps) {
    Lock lock(mutex());
    auto& known = factors()[operation];
    factor = known.address ? read(known.address, known.type) : known.value;
  }
  auto as = [&](auto* typed) { combine_as(typed, parts, count, operation, factor); };
  switch (type) {
    case ncclInt8:
      return as(reinterpret_cast<int8_t*>(to));
    case ncclUint8:
      return as(reinterpret_cast<uint8_t*>(to));
    case ncclInt32:
      return as(reinterpret_cast<int32_t*>(to));
    case ncclUint32:
      return as(reinterpret_cast<uint32_t*>(to));
    case ncclInt64:
      return as(reinterpret_cast<int64_t*>(to));
    case ncclUint64:
      return as(reinterpret_cast<uint64_t*>(to));
    case ncclFloat16:
      return as(reinterpret_cast<__half*>(to));
    case ncclBfloat16:
      return as(reinterpret_cast<__nv_bfloat16*>(to));
    case ncclFloat32:
      return as(reinterpret_cast<float*>(to));
    case ncclFloat64:
      return as(reinterpret_cast<double*>(to));
    default:
      fprintf(stderr, "[stand-in] sums of type %d are not played\n", static_cast<int>(type));
  }
}

}  // namespace stand_in
