// Numbers of a tensor: their types, their bits, and an exponential that compilers turn into vectors.
#pragma once
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

enum Type : int64_t { FLOAT, DOUBLE, BFLOAT16, HALF, INT64 };

// A tensor's numbers and their type; null for None.
struct Numbers {
    void *data;
    int64_t type;
};

namespace {

inline float as_float(uint32_t bits) { float x; memcpy(&x, &bits, 4); return x; }
inline uint32_t as_bits(float x) { uint32_t bits; memcpy(&bits, &x, 4); return bits; }

// e^x of x <= 0 to 2 units in the last place; NaN stays NaN, and what is below 1e-37 becomes 0.
inline float exp_of(float x) {
    const float magic = 12582912.f;  // 1.5 * 2^23: what is added to it loses its fraction
    float c = x < -86.f ? -86.f : x;
    float z = c * 1.44269504f + magic, n = z - magic;
    float r = c - n * 0.693359375f + n * 2.12194440e-4f;  // n log 2 in two pieces
    float p = 1.9875691500e-4f;  // a polynomial of e^r for |r| <= log 2 / 2, by Chebyshev's points
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = (p * r) * r + r + 1.f;
    float power = as_float((as_bits(z) << 23) + 0x3f800000u);
    return x < -86.f ? 0.f : p * power;
}
inline double exp_of(double x) { return exp(x); }

struct bf16 { uint16_t bits; };
struct half { uint16_t bits; };

inline float up(float x) { return x; }
inline double up(double x) { return x; }
inline float up(bf16 x) { return as_float((uint32_t)x.bits << 16); }
inline float up(half x) {
    // 2^112 moves the exponent's bias, of subnormal numbers as well
    float size = as_float((uint32_t)(x.bits & 0x7fff) << 13) * 0x1p112f;
    uint32_t bits = as_bits(size) | (size >= 65536.f ? 0x7f800000u : 0u);
    return as_float(bits | (uint32_t)(x.bits & 0x8000) << 16);
}

inline void down(float x, float *to) { *to = x; }
inline void down(double x, double *to) { *to = x; }
inline void down(double x, float *to) { *to = (float)x; }
inline void down(float x, double *to) { *to = x; }
inline void down(float x, bf16 *to) {  // to the nearest, halves to even
    uint32_t bits = as_bits(x);
    to->bits = x != x ? 0x7fc0 : (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
inline void down(float x, half *to) {
    uint32_t bits = as_bits(x), sign = bits >> 16 & 0x8000, size = bits & 0x7fffffff;
    if (size > 0x7f800000) to->bits = (uint16_t)(sign | 0x7e00);
    else if (size >= 0x477ff000) to->bits = (uint16_t)(sign | 0x7c00);  // from 65520 on
    else if (size < 0x38800000)  // below 2^-14: adding 0.5 rounds to a multiple of 2^-24
        to->bits = (uint16_t)(sign | (as_bits(as_float(size) + 0.5f) - 0x3f000000));
    else to->bits = (uint16_t)(sign | ((size + 0xfff + (size >> 13 & 1) - 0x38000000) >> 13));
}
inline void down(double x, bf16 *to) { down((float)x, to); }
inline void down(double x, half *to) { down((float)x, to); }

// Call f with a pointer of the type that a tensor of numbers has.
template <class F> inline void typed(Numbers x, F f) {
    switch (x.type) {
        case FLOAT: f((float *)x.data); break;
        case DOUBLE: f((double *)x.data); break;
        case BFLOAT16: f((bf16 *)x.data); break;
        default: f((half *)x.data);
    }
}
template <class C> inline void load(C *to, Numbers from, int64_t first, int64_t n) {
    typed(from, [&](auto p) {
        for (int64_t i = 0; i < n; i++) to[i] = (C)up(p[first + i]);
    });
}
template <class C> inline void store(const C *from, Numbers to, int64_t first, int64_t n) {
    typed(to, [&](auto p) {
        for (int64_t i = 0; i < n; i++) down(from[i], p + first + i);
    });
}

}  // namespace
