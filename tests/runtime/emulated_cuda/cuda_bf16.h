// bfloat16 as its bits, rounded to nearest even.
#pragma once

#include "cuda_runtime.h"

struct __nv_bfloat16 {
    uint16_t bits;
};
inline float __bfloat162float(__nv_bfloat16 value) { return __uint_as_float(uint32_t(value.bits) << 16); }
inline __nv_bfloat16 __float2bfloat16_rn(float value) {
    const uint32_t bits = __float_as_uint(value);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return {0x7fff};
    return {uint16_t((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16)};
}
inline uint16_t __bfloat16_as_ushort(__nv_bfloat16 value) { return value.bits; }
