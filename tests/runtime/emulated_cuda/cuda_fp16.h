// float16 as its bits, rounded to nearest even.
#pragma once

#include "cuda_runtime.h"

struct __half {
    uint16_t bits;
};
inline float __half2float(__half value) {
    const int exponent = value.bits >> 10 & 31, fraction = value.bits & 1023;
    const float sign = value.bits >> 15 ? -1.0f : 1.0f;
    if (exponent == 31) return fraction ? NAN : sign * INFINITY;
    return sign * (exponent ? std::ldexp(float(fraction + 1024), exponent - 25) : std::ldexp(float(fraction), -24));
}
inline __half __float2half_rn(float value) {
    const uint16_t sign = std::signbit(value) ? 0x8000 : 0;
    const float magnitude = std::fabs(value);
    if (std::isnan(value)) return {0x7fff};
    if (magnitude >= 65520.0f) return {uint16_t(sign | 0x7c00)};
    const int exponent = magnitude < 0x1p-14f ? -14 : std::ilogb(magnitude);
    const int steps = int(std::nearbyint(std::ldexp(magnitude, 10 - exponent)));  // of 2^(exponent - 10)
    return {uint16_t(sign | (((exponent + 14) << 10) + steps))};
}
inline uint16_t __half_as_ushort(__half value) { return value.bits; }
inline __half __ushort_as_half(uint16_t bits) { return {bits}; }
