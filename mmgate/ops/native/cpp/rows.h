// Rows of channels, in registers where their number is one of 8, 16, .. 64, else in memory.
#pragma once
#include "numbers.h"

#if defined(__AVX512F__)
#define LANES 16
#elif defined(__AVX__)
#define LANES 8
#else
#define LANES 4
#endif

namespace {

// Vectors of floats, by the means of gcc and clang that suit every processor.
template <int N> struct Floats;
#if defined(__clang__) || __GNUC__ >= 12
#define SHUFFLE(V, I, a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(V, I, a, b, ...) __builtin_shuffle(a, b, I{__VA_ARGS__})
#endif
template <> struct Floats<4> {
    typedef float V __attribute__((vector_size(16)));
    typedef uint32_t I __attribute__((vector_size(16)));
    typedef uint16_t H __attribute__((vector_size(8)));
    // lanes of a and b in turn, each the sum of two; and of pairs of lanes
    static V ones(V a, V b) { return SHUFFLE(V, I, a, b, 0, 4, 1, 5) + SHUFFLE(V, I, a, b, 2, 6, 3, 7); }
    static V pairs(V a, V b) { return SHUFFLE(V, I, a, b, 0, 1, 4, 5) + SHUFFLE(V, I, a, b, 2, 3, 6, 7); }
};
#if LANES >= 8
template <> struct Floats<8> {
    typedef float V __attribute__((vector_size(32)));
    typedef uint32_t I __attribute__((vector_size(32)));
    typedef uint16_t H __attribute__((vector_size(16)));
    static V ones(V a, V b) {
        return SHUFFLE(V, I, a, b, 0, 8, 1, 9, 4, 12, 5, 13) + SHUFFLE(V, I, a, b, 2, 10, 3, 11, 6, 14, 7, 15);
    }
    static V pairs(V a, V b) {
        return SHUFFLE(V, I, a, b, 0, 1, 8, 9, 4, 5, 12, 13) + SHUFFLE(V, I, a, b, 2, 3, 10, 11, 6, 7, 14, 15);
    }
};
#endif
#if LANES >= 16
template <> struct Floats<16> {
    typedef float V __attribute__((vector_size(64)));
    typedef uint32_t I __attribute__((vector_size(64)));
    typedef uint16_t H __attribute__((vector_size(32)));
    static V ones(V a, V b) {
        return SHUFFLE(V, I, a, b, 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29) +
               SHUFFLE(V, I, a, b, 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31);
    }
    static V pairs(V a, V b) {
        return SHUFFLE(V, I, a, b, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29) +
               SHUFFLE(V, I, a, b, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
    }
};
#endif

// A row of D floats in registers.
template <int D> struct Row {
    typedef float C;
    static constexpr int L = LANES >= 16 && D % 16 == 0 ? 16 : LANES >= 8 ? 8 : 4, N = D / L;
    typedef typename Floats<L>::V V;
    typedef typename Floats<L>::I I;
    typedef typename Floats<L>::H H;
    V v[N];

    Row(int64_t, void *) {}
    static constexpr int64_t dim(int64_t) { return D; }
    static V read(const float *p) { V x; memcpy(&x, p, sizeof x); return x; }
    static V read(const bf16 *p) {
        H h; memcpy(&h, p, sizeof h);
        I bits = __builtin_convertvector(h, I) << 16;
        V x; memcpy(&x, &bits, sizeof x); return x;
    }
    static V read(const half *p) {
        H h; memcpy(&h, p, sizeof h);
        I bits = __builtin_convertvector(h, I), size = (bits & 0x7fff) << 13;
        V x; memcpy(&x, &size, sizeof x);
        x *= 0x1p112f;
        memcpy(&size, &x, sizeof x);
        I infinite = (I)(x >= 65536.f) & 0x7f800000;
        size |= infinite | (bits & 0x8000) << 16;
        memcpy(&x, &size, sizeof x);
        return x;
    }
    void zero() { for (int i = 0; i < N; i++) v[i] = V{}; }
    template <class T> void read_row(const T *p) { for (int i = 0; i < N; i++) v[i] = read(p + i * L); }
    template <class T> void add(float s, const T *p) { for (int i = 0; i < N; i++) v[i] += s * read(p + i * L); }
    // Four rows at a time, by two sums, so that samples wait for each other once and not four times.
    template <class T> void add(float s, const T *p, float t, const T *q, float u, const T *r, float w, const T *z) {
        for (int i = 0; i < N; i++)
            v[i] += (s * read(p + i * L) + t * read(q + i * L)) + (u * read(r + i * L) + w * read(z + i * L));
    }
    void write(float *p) const { memcpy(p, v, sizeof v); }
    void add_to(float s, float *p) const {
        for (int i = 0; i < N; i++) {
            V x = read(p + i * L) + s * v[i];
            memcpy(p + i * L, &x, sizeof x);
        }
    }
    template <class T> V partial(const T *p) const {
        V s = v[0] * read(p);
        for (int i = 1; i < N; i++) s += v[i] * read(p + i * L);
        return s;
    }
    // The dots with four rows at a time.
    template <class T> void dots(const T *p, const T *q, const T *r, const T *s, float *to) const {
        const V four = Floats<L>::pairs(
            Floats<L>::ones(partial(p), partial(q)), Floats<L>::ones(partial(r), partial(s)));
        Floats<4>::V part[L / 4];
        memcpy(part, &four, sizeof four);
        Floats<4>::V sum = part[0];
        for (int i = 1; i < L / 4; i++) sum += part[i];
        memcpy(to, &sum, sizeof sum);
    }
    template <class T> float dot(const T *p) const {
        const V s = partial(p);
        float lane[L], sum = 0;
        memcpy(lane, &s, sizeof s);
        for (int i = 0; i < L; i++) sum += lane[i];
        return sum;
    }
};

// A row of any number of channels in memory.
template <class C_> struct AnyRow {
    typedef C_ C;
    int64_t n;
    C *v;

    AnyRow(int64_t dim, void *memory) : n(dim), v((C *)memory) {}
    int64_t dim(int64_t) const { return n; }
    void zero() { memset(v, 0, n * sizeof(C)); }
    template <class T> void read_row(const T *p) { for (int64_t i = 0; i < n; i++) v[i] = up(p[i]); }
    template <class T> void add(C s, const T *p) { for (int64_t i = 0; i < n; i++) v[i] += s * up(p[i]); }
    template <class T> void add(C s, const T *p, C t, const T *q, C u, const T *r, C w, const T *z) {
        for (int64_t i = 0; i < n; i++) v[i] += (s * up(p[i]) + t * up(q[i])) + (u * up(r[i]) + w * up(z[i]));
    }
    void write(C *p) const { memcpy(p, v, n * sizeof(C)); }
    void add_to(C s, C *p) const { for (int64_t i = 0; i < n; i++) p[i] += s * v[i]; }
    template <class T> C dot(const T *p) const {
        C sum = 0;
        for (int64_t i = 0; i < n; i++) sum += v[i] * up(p[i]);
        return sum;
    }
    template <class T> void dots(const T *p, const T *q, const T *r, const T *s, C *to) const {
        to[0] = dot(p), to[1] = dot(q), to[2] = dot(r), to[3] = dot(s);
    }
};

}  // namespace
