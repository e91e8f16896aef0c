// Eight elements at a time, for the matrix instructions.
#pragma once

#include <cstring>

#include "types.h"

namespace tilewright_host {

typedef float Floats __attribute__((vector_size(32)));

template <typename Element>
inline void widen(const uint16_t* from, float* to) {
    for (int i = 0; i < 8; ++i) to[i] = to_float(Element{from[i]});
}
#ifdef __F16C__
template <>
inline void widen<float16>(const uint16_t* from, float* to) {
    Shorts8 bits;
    std::memcpy(&bits, from, sizeof bits);
    const Floats values = __builtin_ia32_vcvtph2ps256(bits);
    std::memcpy(to, &values, sizeof values);
}
#endif

}  // namespace tilewright_host
