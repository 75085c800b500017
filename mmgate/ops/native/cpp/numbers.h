// Numbers as bits, and an exponential that compilers turn into vectors.
//
// Each source that is compiled for several sets of instructions includes this file. All is in an unnamed namespace, so
// that no function of one set is linked into another.
#pragma once
#include <math.h>
#include <stdint.h>
#include <string.h>

#ifndef MMGATE_SET
#define MMGATE_SET baseline
#endif
#define JOIN_(a, b) a##b
#define JOIN(a, b) JOIN_(a, b)

namespace {

inline float as_float(uint32_t bits) { float x; memcpy(&x, &bits, 4); return x; }
inline uint32_t as_bits(float x) { uint32_t bits; memcpy(&bits, &x, 4); return bits; }

// e^x of x <= 0 to 2 units in the last place; no number stays none, and what is below 1e-37 becomes 0.
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

}  // namespace
