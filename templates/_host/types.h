// CUDA's vector types and the 2-byte element types on the CPU, with their conversions. Every kernel parses it: keep
// it thin.
#pragma once

#include <cstdint>

// Conversions touch registers only: inlining them into watched code hides nothing, and calls would cost a hook each.
#define TILEWRIGHT_INLINE inline __attribute__((always_inline))

// Alignments are CUDA's: a vector read at a wrong address is a fault here as it is there.
struct alignas(8) uint2 {
    unsigned x, y;
};
struct uint3 {
    unsigned x, y, z;
};
struct alignas(16) uint4 {
    unsigned x, y, z, w;
};
struct alignas(8) float2 {
    float x, y;
};
struct alignas(16) float4 {
    float x, y, z, w;
};
struct dim3 {
    unsigned x, y, z;
    constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

struct float16 {
    uint16_t bits;
};
struct bfloat16 {
    uint16_t bits;
};

TILEWRIGHT_INLINE float __uint_as_float(uint32_t bits) {
    float value;
    __builtin_memcpy(&value, &bits, 4);
    return value;
}
TILEWRIGHT_INLINE uint32_t __float_as_uint(float value) {
    uint32_t bits;
    __builtin_memcpy(&bits, &value, 4);
    return bits;
}
TILEWRIGHT_INLINE int __popc(unsigned word) { return __builtin_popcount(word); }
TILEWRIGHT_INLINE int __ffs(int word) { return __builtin_ffs(word); }

namespace tilewright_host {

constexpr uint16_t NAN_BITS = 0x7fff;  // what a GPU makes of every NaN, for float16 and for bfloat16

// float16 without F16C, and without branches, so that loops over it can become vector code. NaN keeps its payload and
// becomes quiet, as F16C does it.
TILEWRIGHT_INLINE float half_to_float(uint16_t half) {
    const uint32_t sign = uint32_t(half & 0x8000u) << 16, magnitude = half & 0x7fffu;
    constexpr uint32_t REBIAS = 112u << 23;  // between the biases of the exponents
    const uint32_t subnormal = __float_as_uint(float(int(magnitude)) * 0x1p-24f);
    const uint32_t special = magnitude >= 0x7c00u ? REBIAS : 0u;  // the largest exponent becomes the largest
    const uint32_t quiet = magnitude > 0x7c00u ? 0x00400000u : 0u;
    const uint32_t normal = ((magnitude << 13) + REBIAS + special) | quiet;
    return __uint_as_float(sign | (magnitude < 0x0400u ? subnormal : normal));
}
TILEWRIGHT_INLINE uint16_t float_to_half(float value) {
    const uint32_t bits = __float_as_uint(value), sign = bits >> 16 & 0x8000u, magnitude = bits & 0x7fffffffu;
    if (magnitude > 0x7f800000u) return NAN_BITS;
    if (magnitude >= 0x477ff000u) return uint16_t(sign | 0x7c00u);  // from 65520 on: the largest is 65504
    if (magnitude < 0x38800000u) {  // below 2^-14: the sum with 0.5 has the subnormals' spacing, so the addition rounds
        return uint16_t(sign | (__float_as_uint(__uint_as_float(magnitude) + 0.5f) - 0x3f000000u));
    }
    const uint32_t rounded = magnitude + 0x0fffu + (magnitude >> 13 & 1u);  // half to even
    return uint16_t(sign | (rounded - (112u << 23)) >> 13);
}

#ifdef __F16C__
// The builtins behind _cvtsh_ss and _cvtss_sh: <immintrin.h> takes longer to parse than a kernel.
typedef float Floats4 __attribute__((vector_size(16)));
typedef short Shorts8 __attribute__((vector_size(16)));

TILEWRIGHT_INLINE float half_to_float_f16c(uint16_t half) {
    return __builtin_ia32_vcvtph2ps(Shorts8{short(half), 0, 0, 0, 0, 0, 0, 0})[0];
}
TILEWRIGHT_INLINE uint16_t float_to_half_f16c(float value) {
    if (value != value) return NAN_BITS;
    return uint16_t(__builtin_ia32_vcvtps2ph(Floats4{value, 0.0f, 0.0f, 0.0f}, 0)[0]);  // 0: round half to even
}
#endif

}  // namespace tilewright_host

TILEWRIGHT_INLINE float to_float(float value) { return value; }
TILEWRIGHT_INLINE float to_float(float16 value) {
#ifdef __F16C__
    return tilewright_host::half_to_float_f16c(value.bits);
#else
    return tilewright_host::half_to_float(value.bits);
#endif
}
TILEWRIGHT_INLINE float to_float(bfloat16 value) { return __uint_as_float(uint32_t(value.bits) << 16); }

// Round half to even; what is too large becomes infinite.
template <typename T>
T from_float(float value) = delete;
template <>
TILEWRIGHT_INLINE float from_float<float>(float value) {
    return value;
}
template <>
TILEWRIGHT_INLINE float16 from_float<float16>(float value) {
#ifdef __F16C__
    return {tilewright_host::float_to_half_f16c(value)};
#else
    return {tilewright_host::float_to_half(value)};
#endif
}
template <>
TILEWRIGHT_INLINE bfloat16 from_float<bfloat16>(float value) {
    if (value != value) return {tilewright_host::NAN_BITS};
    const uint32_t bits = __float_as_uint(value);
    return {uint16_t((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16)};
}

// Two elements of 2 bytes as a word, the first in its low half.
template <typename Element>
TILEWRIGHT_INLINE uint32_t pack(float low, float high) {
    static_assert(sizeof(Element) == 2, "a word holds a pair of 2-byte elements");
    return from_float<Element>(low).bits | uint32_t(from_float<Element>(high).bits) << 16;
}

// Two halves in a word: of floats, rounded towards zero or to nearest; as floats.
TILEWRIGHT_INLINE uint32_t pack_halves_down(float low, float high) {
    const auto down = [](float value) {
        const float16 nearest = from_float<float16>(value);
        const bool up = __builtin_fabsf(to_float(nearest)) > __builtin_fabsf(value);
        return uint32_t(nearest.bits) - (up ? 1u : 0u);
    };
    return down(low) | down(high) << 16;
}
TILEWRIGHT_INLINE uint32_t pack_halves(float low, float high) { return pack<float16>(low, high); }
TILEWRIGHT_INLINE void from_halves(uint32_t word, float (&to)[2]) {
    to[0] = to_float(float16{uint16_t(word)});
    to[1] = to_float(float16{uint16_t(word >> 16)});
}
template <typename Work>
TILEWRIGHT_INLINE uint32_t of_halves(uint32_t a, uint32_t b, const Work& work) {
    float one[2], other[2];
    from_halves(a, one);
    from_halves(b, other);
    return pack<float16>(work(one[0], other[0]), work(one[1], other[1]));
}
// Of each half: the larger, of NaN and a number the number; the sum; 1 where a >= b, else 0.
TILEWRIGHT_INLINE uint32_t max_halves(uint32_t a, uint32_t b) {
    return of_halves(a, b, [](float x, float y) { return __builtin_fmaxf(x, y); });
}
TILEWRIGHT_INLINE uint32_t add_halves(uint32_t a, uint32_t b) {
    return of_halves(a, b, [](float x, float y) { return x + y; });
}
TILEWRIGHT_INLINE uint32_t halves_reach(uint32_t a, uint32_t b) {
    return of_halves(a, b, [](float x, float y) { return x >= y ? 1.0f : 0.0f; });
}
// And a * b + c, rounded once: a product of halves is exact in a float, and the sum nearly; the larger magnitude.
TILEWRIGHT_INLINE uint32_t multiply_add_halves(uint32_t a, uint32_t b, uint32_t c) {
    float x[2], y[2], z[2];
    from_halves(a, x), from_halves(b, y), from_halves(c, z);
    return pack<float16>(x[0] * y[0] + z[0], x[1] * y[1] + z[1]);
}
TILEWRIGHT_INLINE uint32_t larger_magnitudes(uint32_t a, uint32_t b) { return max_halves(a & 0x7fff7fffu, b & 0x7fff7fffu); }

// A word in memory is one float, or a pair of 2-byte elements.
template <typename Element>
TILEWRIGHT_INLINE void from_word(uint32_t word, float* to) {
    if constexpr (sizeof(Element) == 4) {
        to[0] = __uint_as_float(word);
    } else {
        to[0] = to_float(Element{uint16_t(word)});
        to[1] = to_float(Element{uint16_t(word >> 16)});
    }
}
template <typename Element>
TILEWRIGHT_INLINE uint32_t to_word(const float* from) {
    if constexpr (sizeof(Element) == 4) {
        return __float_as_uint(from[0]);
    } else {
        return pack<Element>(from[0], from[1]);
    }
}

// ex2.approx.ftz.f32: 2^x, and 0 where that is subnormal.
TILEWRIGHT_INLINE float exp2_approximate(float x) {
    const float result = __builtin_exp2f(x);
    return result < 0x1p-126f ? 0.0f : result;
}
// lg2.approx.ftz.f32 and rcp.approx.ftz.f32, of numbers that are not subnormal.
TILEWRIGHT_INLINE float log2_approximate(float x) { return __builtin_log2f(x); }
TILEWRIGHT_INLINE float reciprocal_approximate(float x) { return 1.0f / x; }
