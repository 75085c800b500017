// Gate, softmax and bilinear sampling of multi-scale deformable attention in one loop on the CPU, and its gradients.
//
//     O[q] = sum_j w_j bilinear(V_l(j), x_j),   w = softmax(A F)  or  softmax(A) F,   F = 1 + G or G
//     dw_j = dO . v_j,   dx_j = w_j dO . dv_j/dx,   dV[row] = sum of s dO over all samples with a corner of share s there
//     before the softmax:  dA = P (dw - sum P dw) F,      dG = P (dw - sum P dw) A
//     after the softmax:   dA = P (dw F - sum P dw F),    dG = P dw
//
// with j over the points of the first level, then those of the second, and so on; levels may have different numbers.
//
// This file is compiled once for every set of instructions. All is in an unnamed namespace and nothing of the C++
// library is used, so that no function of one set is linked into another.
//
// A query of a head forms its 16 to 64 weights and pixels in blocks of 16, by loops that compilers turn into vectors, and
// then adds up rows of D channels. Neither weights nor locations leave the scratch memory of a query.
//
// Where there are many queries, a head's values are copied first: rows of a head lie H * D numbers apart, so that they
// would share an H-th of a cache's sets. The copy has a border of zeros around every level, which spares the corners a
// look at whether they are on the map. In the backward pass each row of the copy is followed by its gradient: one task
// owns both, without atomics, and adds in the order of the queries.
#include <stddef.h>

#include "native.h"
#include "numbers.h"

#if defined(__AVX512F__)
#define LANES 16
#elif defined(__AVX__)
#define LANES 8
#else
#define LANES 4
#endif

namespace {

constexpr int BLOCK = 16;  // samples

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
template <class F> inline void typed(int64_t type, const void *p, F f) {
    void *q = const_cast<void *>(p);
    switch (type) {
        case FLOAT: f((float *)q); break;
        case DOUBLE: f((double *)q); break;
        case BFLOAT16: f((bf16 *)q); break;
        default: f((half *)q);
    }
}
template <class C> inline void load(C *to, const void *from, int64_t type, int64_t first, int64_t n) {
    typed(type, from, [&](auto p) {
        for (int64_t i = 0; i < n; i++) to[i] = (C)up(p[first + i]);
    });
}
template <class C> inline void store(const C *from, void *to, int64_t type, int64_t first, int64_t n) {
    typed(type, to, [&](auto p) {
        for (int64_t i = 0; i < n; i++) down(from[i], p + first + i);
    });
}


// 16 samples of a query of a head. Members of one struct do not overlap, which lets the loops become vectors.
template <class C> struct alignas(64) Block {
    // a level's, the same for all queries
    C width[BLOCK], height[BLOCK], bias[BLOCK];  // the bias is -inf for what is no sample
    int32_t columns[BLOCK], rows[BLOCK], pitch[BLOCK], first[BLOCK];
    // a query's
    C points[2 * BLOCK], logit[BLOCK], factor[BLOCK], soft[BLOCK], weight[BLOCK];
    C scale_x[BLOCK], scale_y[BLOCK], shift_x[BLOCK], shift_y[BLOCK];
    C fx[BLOCK], fy[BLOCK], share[4][BLOCK];
    int32_t at[BLOCK], corners[BLOCK];  // the row of the upper left corner; bits: left, right, upper, lower are there
    // the backward pass
    C dots[4 * BLOCK], of_weight[BLOCK], of_x[BLOCK], of_y[BLOCK];
};

template <class C> struct Samples {
    const Call &c;
    Block<C> *blocks;
    int64_t count, n;

    Samples(const Call &call, const Plan &plan, char *memory)
        : c(call), blocks((Block<C> *)memory), count(call.samples), n(plan.blocks) {
        const int64_t border = plan.packed ? 1 : 0;
        memset(memory, 0, n * sizeof(Block<C>));
        int64_t first = 0, l = 0, end = c.points[0];
        for (int64_t i = 0; i < n * BLOCK; i++) {
            Block<C> &b = blocks[i / BLOCK];
            const int64_t k = i % BLOCK;
            b.factor[k] = 1;
            if (i >= count) {  // no location is on a map of -5 columns
                b.width[k] = b.height[k] = -5;
                b.bias[k] = -(C)INFINITY;
                continue;
            }
            for (; i == end; end += c.points[++l])
                first += (c.shapes[2 * l] + 2 * border) * (c.shapes[2 * l + 1] + 2 * border);
            const int64_t rows = c.shapes[2 * l], columns = c.shapes[2 * l + 1];
            b.rows[k] = (int32_t)rows, b.columns[k] = (int32_t)columns;
            b.height[k] = (C)rows, b.width[k] = (C)columns;
            b.pitch[k] = (int32_t)(columns + 2 * border);
            // in a copy, levels follow each other, and the first pixel is inside of the border
            b.first[k] = (int32_t)(border ? first + b.pitch[k] + 1 : c.starts[l]);
            b.scale_x[k] = b.width[k], b.scale_y[k] = b.height[k];
            b.shift_x[k] = b.shift_y[k] = (C)-0.5;
        }
    }

    // Forms the weights and places of query q of head h of image b.
    void form(int64_t b, int64_t q, int64_t h) {
        const int64_t row = (b * c.queries + q) * c.heads + h;
        for (int64_t i = 0; i < n; i++) {
            const int64_t left = count - i * BLOCK, m = left < BLOCK ? left : BLOCK;
            load(blocks[i].logit, c.logits, c.logits_type, row * count + i * BLOCK, m);
            load(blocks[i].points, c.at, c.points_type, 2 * (row * count + i * BLOCK), 2 * m);
        }
        if (c.gate) read_gate(b * c.gate_stride[0] + q * c.gate_stride[1] + h * c.gate_stride[2]);
        if (c.columns) read_reference(b * c.queries + q);
        weigh();
        for (int64_t i = 0; i < n; i++) place(blocks[i]);
    }

    void read_gate(int64_t first) {
        const C one = c.residual ? 1 : 0;
        typed(c.gate_type, c.gate, [&](auto g) {
            int64_t i = 0;
            for (int64_t l = 0; l < c.levels; l++)
                for (int64_t p = 0; p < c.points[l]; p++, i++)
                    blocks[i / BLOCK].factor[i % BLOCK] =
                        one + (C)up(g[first + l * c.gate_stride[3] + i * c.gate_stride[4]]);
        });
    }

    void read_reference(int64_t query) {
        typed(c.reference_type, c.reference, [&](auto r) {
            r += query * c.levels * c.columns;
            int64_t i = 0;
            for (int64_t l = 0; l < c.levels; l++, r += c.columns) {
                const C share = (C)0.5 / (C)c.points[l];
                const C width = (C)c.shapes[2 * l + 1], height = (C)c.shapes[2 * l];
                const C x = (C)up(r[0]) * width - (C)0.5, y = (C)up(r[1]) * height - (C)0.5;
                const C sx = c.columns == 4 ? (C)up(r[2]) * width * share : 1;
                const C sy = c.columns == 4 ? (C)up(r[3]) * height * share : 1;
                for (int64_t p = 0; p < c.points[l]; p++, i++) {
                    Block<C> &b = blocks[i / BLOCK];
                    const int64_t k = i % BLOCK;
                    b.shift_x[k] = x, b.shift_y[k] = y, b.scale_x[k] = sx, b.scale_y[k] = sy;
                }
            }
        });
    }

    // Computes the gated softmax over a query's samples: softmax(factor logit), or factor softmax(logit) if post.
    void weigh() {
        C most[BLOCK], sum[BLOCK];
        for (int k = 0; k < BLOCK; k++) most[k] = -(C)INFINITY, sum[k] = 0;
        for (int64_t i = 0; i < n; i++) {
            Block<C> &b = blocks[i];
            for (int k = 0; k < BLOCK; k++) {
                const C x = (c.post ? b.logit[k] : b.logit[k] * b.factor[k]) + b.bias[k];
                b.soft[k] = x;
                most[k] = x > most[k] ? x : most[k];
            }
        }
        for (int s = BLOCK / 2; s; s /= 2)
            for (int k = 0; k < s; k++) most[k] = most[k + s] > most[k] ? most[k + s] : most[k];
        const C largest = most[0];
        for (int64_t i = 0; i < n; i++) {
            Block<C> &b = blocks[i];
            for (int k = 0; k < BLOCK; k++) {
                // an infinite largest one is subtracted from itself, but not from what is no sample
                const C e = exp_of(b.soft[k] - largest);
                b.soft[k] = b.bias[k] < 0 ? 0 : e;
                sum[k] += b.soft[k];
            }
        }
        for (int s = BLOCK / 2; s; s /= 2)
            for (int k = 0; k < s; k++) sum[k] += sum[k + s];
        const C scale = 1 / sum[0];
        for (int64_t i = 0; i < n; i++) {
            Block<C> &b = blocks[i];
            for (int k = 0; k < BLOCK; k++) {
                b.soft[k] *= scale;
                b.weight[k] = c.post ? b.soft[k] * b.factor[k] : b.soft[k];
            }
        }
    }

    static void place(Block<C> &b) {
        for (int k = 0; k < BLOCK; k++) {
            C x = b.points[2 * k] * b.scale_x[k] + b.shift_x[k], y = b.points[2 * k + 1] * b.scale_y[k] + b.shift_y[k];
            // false for what is no number
            const bool on = (x >= -1) & (y >= -1) & (x < b.width[k]) & (y < b.height[k]);
            x = on ? x : 0, y = on ? y : 0;
            int32_t left = (int32_t)x, upper = (int32_t)y;
            left -= (C)left > x, upper -= (C)upper > y;  // towards minus infinity
            b.fx[k] = x - (C)left, b.fy[k] = y - (C)upper;
            b.at[k] = b.first[k] + upper * b.pitch[k] + left;
            const int32_t there = (left >= 0 ? 1 : 0) | (left + 1 < b.columns[k] ? 2 : 0) | (upper >= 0 ? 4 : 0) |
                                  (upper + 1 < b.rows[k] ? 8 : 0);
            b.corners[k] = on ? there : 0;
        }
        for (int k = 0; k < BLOCK; k++) {
            const C above = b.weight[k] * (1 - b.fy[k]), below = b.weight[k] * b.fy[k];
            b.share[0][k] = above * (1 - b.fx[k]), b.share[1][k] = above * b.fx[k];
            b.share[2][k] = below * (1 - b.fx[k]), b.share[3][k] = below * b.fx[k];
        }
    }

    // From the dots of the four corners to the gradients of all that form() has read.
    void store_gradients(int64_t b_, int64_t q, int64_t h) {
        const int64_t row = (b_ * c.queries + q) * c.heads + h;
        C mean = 0;
        for (int64_t i = 0; i < n; i++) {
            Block<C> &b = blocks[i];
            C sum[BLOCK];
            for (int k = 0; k < BLOCK; k++) {
                const C d00 = b.dots[4 * k], d10 = b.dots[4 * k + 1], d01 = b.dots[4 * k + 2], d11 = b.dots[4 * k + 3];
                const C above = d00 + b.fx[k] * (d10 - d00), below = d01 + b.fx[k] * (d11 - d01);
                b.of_weight[k] = above + b.fy[k] * (below - above);
                b.of_x[k] = b.weight[k] * ((d10 - d00) + b.fy[k] * ((d11 - d01) - (d10 - d00)));
                b.of_y[k] = b.weight[k] * (below - above);
                sum[k] = b.soft[k] * b.of_weight[k] * (c.post ? b.factor[k] : 1);
            }
            for (int s = BLOCK / 2; s; s /= 2)
                for (int k = 0; k < s; k++) sum[k] += sum[k + s];
            mean += sum[0];
        }
        if (c.grad_reference) store_reference(row);
        C of_points[2 * BLOCK], of_logit[BLOCK], of_gate[BLOCK], level_sum = 0;
        const bool summed = c.gate_summed;
        int64_t point = 0, level = 0;
        for (int64_t i = 0; i < n; i++) {
            Block<C> &b = blocks[i];
            const int64_t left = count - i * BLOCK, m = left < BLOCK ? left : BLOCK;
            for (int k = 0; k < BLOCK; k++) {
                of_points[2 * k] = b.of_x[k] * b.scale_x[k];
                of_points[2 * k + 1] = b.of_y[k] * b.scale_y[k];
                if (c.post) {
                    of_logit[k] = b.soft[k] * (b.of_weight[k] * b.factor[k] - mean);
                    of_gate[k] = b.soft[k] * b.of_weight[k];
                } else {
                    const C z = b.soft[k] * (b.of_weight[k] - mean);
                    of_logit[k] = z * b.factor[k];
                    of_gate[k] = z * b.logit[k];
                }
            }
            store(of_points, c.grad_at, c.points_type, 2 * (row * count + i * BLOCK), 2 * m);
            store(of_logit, c.grad_logits, c.logits_type, row * count + i * BLOCK, m);
            if (!c.grad_gate) continue;
            if (!summed) {
                memcpy((C *)c.grad_gate + row * count + i * BLOCK, of_gate, m * sizeof(C));
                continue;
            }
            for (int64_t k = 0; k < m; k++) {
                level_sum += of_gate[k];
                if (++point == c.points[level]) {
                    ((C *)c.grad_gate)[row * c.levels + level++] = level_sum;
                    level_sum = 0, point = 0;
                }
            }
        }
    }

    void store_reference(int64_t row) {
        C *to = (C *)c.grad_reference + row * c.levels * c.columns;
        int64_t i = 0;
        for (int64_t l = 0; l < c.levels; l++, to += c.columns) {
            const C share = (C)0.5 / (C)c.points[l];
            C x = 0, y = 0, w = 0, h = 0;
            for (int64_t p = 0; p < c.points[l]; p++, i++) {
                const Block<C> &b = blocks[i / BLOCK];
                const int64_t k = i % BLOCK;
                x += b.of_x[k], y += b.of_y[k];
                if (b.corners[k]) w += b.of_x[k] * b.points[2 * k], h += b.of_y[k] * b.points[2 * k + 1];
            }
            const C width = (C)c.shapes[2 * l + 1], height = (C)c.shapes[2 * l];
            to[0] = x * width, to[1] = y * height;
            if (c.columns == 4) to[2] = w * width * share, to[3] = h * height * share;
        }
    }
};

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

struct Part {
    int64_t image, head, first, end;  // queries
    Part(const Call &c, const Plan &plan, int64_t task) {
        const int64_t part = task % plan.parts, size = (c.queries + plan.parts - 1) / plan.parts;
        head = task / plan.parts % c.heads;
        image = task / plan.parts / c.heads;
        first = part * size < c.queries ? part * size : c.queries;
        end = first + size < c.queries ? first + size : c.queries;
    }
};

// Calls f(row of the copy, row of the tensor) for rows side by side, as many as f is told, of a head of an image.
template <class F> void for_runs(const Call &c, int64_t image, F f) {
    int64_t first = 0;
    for (int64_t l = 0; l < c.levels; l++) {
        const int64_t height = c.shapes[2 * l], width = c.shapes[2 * l + 1];
        for (int64_t y = 0; y < height; y++)
            f(first + (y + 1) * (width + 2) + 1, image * c.tokens + c.starts[l] + y * width, width);
        first += (height + 2) * (width + 2);
    }
}

// Copies a head's values, and lets `pitch` numbers be from a row to the next; what lies between becomes 0.
template <class R> void pack(const Call &c, int64_t image, int64_t head, R &row, typename R::C *copy, int64_t pitch) {
    const int64_t dim = row.dim(c.dim), far = c.heads * dim;
    typed(c.value_type, c.value, [&](auto value) {
        for_runs(c, image, [&](int64_t to, int64_t from, int64_t n) {
            auto *p = copy + to * pitch;
            auto *q = value + from * far + head * dim;
            for (int64_t i = 0; i < n; i++, p += pitch, q += far) {
                pack_row(row, q, p);
                if (pitch > dim) memset(p + dim, 0, dim * sizeof *p);
            }
        });
    });
}
template <int D, class T> inline void pack_row(Row<D> &row, const T *from, float *to) { row.read_row(from); row.write(to); }
template <int D> inline void pack_row(Row<D> &, const double *, float *) {}  // doubles are not summed in float32
template <class C, class T> inline void pack_row(AnyRow<C> &row, const T *from, C *to) {
    for (int64_t i = 0; i < row.n; i++) to[i] = (C)up(from[i]);
}

template <class R, class T, bool PACKED>
void forward_of(const Call &c, const Plan &plan, const Part &part, char *small, const T *value) {
    typedef typename R::C C;
    Samples<C> samples(c, plan, small);
    C *memory = (C *)(small + plan.blocks * sizeof(Block<C>));
    R sum(c.dim, memory);
    C *result = memory + c.dim;
    const int64_t dim = sum.dim(c.dim), across = PACKED ? dim : c.heads * dim;
    if (!PACKED) value += (part.image * c.tokens * c.heads + part.head) * dim;
    for (int64_t q = part.first; q < part.end; q++) {
        samples.form(part.image, q, part.head);
        sum.zero();
        for (int64_t i = 0; i < samples.count; i++) {
            const Block<C> &b = samples.blocks[i / BLOCK];
            const int64_t k = i % BLOCK;
            const int32_t corners = b.corners[k];
            if (!corners) continue;
            const T *p = value + (int64_t)b.at[k] * across, *r = p + b.pitch[k] * across;
            const C s = b.share[0][k], t = b.share[1][k], u = b.share[2][k], v = b.share[3][k];
            if (PACKED || corners == 15) {
                sum.add(s, p, t, p + across, u, r, v, r + across);
                continue;
            }
            if ((corners & 5) == 5) sum.add(s, p);
            if ((corners & 6) == 6) sum.add(t, p + across);
            if ((corners & 9) == 9) sum.add(u, r);
            if ((corners & 10) == 10) sum.add(v, r + across);
        }
        sum.write(result);
        store(result, c.output, c.value_type, ((part.image * c.queries + q) * c.heads + part.head) * dim, dim);
    }
}

template <class R, class T, bool PACKED>
void backward_of(
    const Call &c, const Plan &plan, const Part &part, char *small, const T *value, typename R::C *of_value) {
    typedef typename R::C C;
    Samples<C> samples(c, plan, small);
    C *memory = (C *)(small + plan.blocks * sizeof(Block<C>));
    R grad(c.dim, memory);
    C *read = memory + c.dim;
    // a row of a copy is followed by its gradient
    const int64_t dim = grad.dim(c.dim), across = PACKED ? 2 * dim : c.heads * dim;
    if (!PACKED) value += (part.image * c.tokens * c.heads + part.head) * dim;
    if (!PACKED && of_value) of_value += (part.image * c.tokens * c.heads + part.head) * dim;
    for (int64_t q = part.first; q < part.end; q++) {
        samples.form(part.image, q, part.head);
        load(read, c.grad, c.value_type, ((part.image * c.queries + q) * c.heads + part.head) * dim, dim);
        grad.read_row(read);
        for (int64_t i = 0; i < samples.count; i++) {
            Block<C> &b = samples.blocks[i / BLOCK];
            const int64_t k = i % BLOCK;
            const int32_t corners = b.corners[k];
            C *dots = b.dots + 4 * k;
            if (!corners) {
                dots[0] = dots[1] = dots[2] = dots[3] = 0;
                continue;
            }
            const int64_t at = (int64_t)b.at[k] * across, below = at + b.pitch[k] * across;
            const C s = b.share[0][k], t = b.share[1][k], u = b.share[2][k], v = b.share[3][k];
            if (PACKED || corners == 15) {
                grad.dots(value + at, value + at + across, value + below, value + below + across, dots);
                if (!of_value) continue;
                grad.add_to(s, of_value + at), grad.add_to(t, of_value + at + across);
                grad.add_to(u, of_value + below), grad.add_to(v, of_value + below + across);
                continue;
            }
            const int64_t places[4] = {at, at + across, below, below + across};
            const C shares[4] = {s, t, u, v};
            const int32_t needs[4] = {5, 6, 9, 10};
            for (int j = 0; j < 4; j++) {
                const bool there = (corners & needs[j]) == needs[j];
                dots[j] = there ? grad.dot(value + places[j]) : 0;
                if (there && of_value) grad.add_to(shares[j], of_value + places[j]);
            }
        }
        samples.store_gradients(part.image, q, part.head);
    }
}

// Adds the gradients of `parts` copies to rows first to end of a head of an image, in the order of the copies.
template <class C>
void unpack(
    const Call &c, int64_t image, int64_t head, const C *copies, int64_t parts, int64_t size, int64_t part,
    int64_t of_parts) {
    const int64_t dim = c.dim;
    C *to = (C *)c.grad_value;
    int64_t run = 0;
    for_runs(c, image, [&](int64_t from, int64_t row, int64_t n) {
        if (run++ % of_parts != part) return;
        for (int64_t i = 0; i < n; i++) {
            C *p = to + ((row + i) * c.heads + head) * dim;
            const C *g = copies + (from + i) * 2 * dim + dim;
            memcpy(p, g, dim * sizeof(C));
            for (int64_t j = 1; j < parts; j++)
                for (int64_t d = 0; d < dim; d++) p[d] += g[j * size + d];
        }
    });
}

template <class R> void forward_by(const Call &c, const Plan &plan, int64_t task, char *small, char *copy) {
    typedef typename R::C C;
    const Part part(c, plan, task);
    if (part.first == part.end) return;
    if (plan.packed) {
        R row(c.dim, small);
        pack(c, part.image, part.head, row, (C *)copy, row.dim(c.dim));
        forward_of<R, C, true>(c, plan, part, small, (const C *)copy);
    } else if (sizeof(C) == 8)
        forward_of<AnyRow<C>, C, false>(c, plan, part, small, (const C *)c.value);
    else if (c.value_type == FLOAT)
        forward_of<R, C, false>(c, plan, part, small, (const C *)c.value);
    else if (c.value_type == BFLOAT16)
        forward_of<R, bf16, false>(c, plan, part, small, (const bf16 *)c.value);
    else
        forward_of<R, half, false>(c, plan, part, small, (const half *)c.value);
}

template <class R> void backward_by(const Call &c, const Plan &plan, int64_t task, char *small, char *copy) {
    typedef typename R::C C;
    const Part part(c, plan, task);
    if (plan.packed) {
        R row(c.dim, small);
        const int64_t dim = row.dim(c.dim);
        pack(c, part.image, part.head, row, (C *)copy, 2 * dim);
        C *of_value = c.grad_value ? (C *)copy + dim : nullptr;
        backward_of<R, C, true>(c, plan, part, small, (const C *)copy, of_value);
        if (c.grad_value && plan.parts == 1) unpack(c, part.image, part.head, (const C *)copy, 1, 0, 0, 1);
        return;
    }
    C *of_value = (C *)c.grad_value;
    if (sizeof(C) == 8 || c.value_type == FLOAT)
        backward_of<R, C, false>(c, plan, part, small, (const C *)c.value, of_value);
    else if (c.value_type == BFLOAT16)
        backward_of<R, bf16, false>(c, plan, part, small, (const bf16 *)c.value, of_value);
    else
        backward_of<R, half, false>(c, plan, part, small, (const half *)c.value, of_value);
}

#define BY_CHANNELS(function, ...)                                    \
    if (call->compute == DOUBLE) return function<AnyRow<double>>(__VA_ARGS__); \
    switch (call->dim) {                                              \
        case 8: return function<Row<8>>(__VA_ARGS__);                 \
        case 16: return function<Row<16>>(__VA_ARGS__);               \
        case 24: return function<Row<24>>(__VA_ARGS__);               \
        case 32: return function<Row<32>>(__VA_ARGS__);               \
        case 40: return function<Row<40>>(__VA_ARGS__);               \
        case 48: return function<Row<48>>(__VA_ARGS__);               \
        case 56: return function<Row<56>>(__VA_ARGS__);               \
        case 64: return function<Row<64>>(__VA_ARGS__);               \
        default: return function<AnyRow<float>>(__VA_ARGS__);         \
    }

void forward(const Call *call, const Plan *plan, int64_t task, char *small, char *copy) {
    BY_CHANNELS(forward_by, *call, *plan, task, small, copy)
}

void backward(const Call *call, const Plan *plan, int64_t task, char *small, char *copy) {
    BY_CHANNELS(backward_by, *call, *plan, task, small, copy)
}

template <class C> void gather_of(const Call &c, const Plan &plan, int64_t task, char *copies) {
    const Part part(c, plan, task);
    const int64_t size = plan.copy_bytes / (int64_t)sizeof(C);
    const C *first = (const C *)copies + task / plan.parts * plan.parts * size;
    unpack(c, part.image, part.head, first, plan.parts, size, task % plan.parts, plan.parts);
}

void gather(const Call *call, const Plan *plan, int64_t task, char *copies) {
    if (call->compute == DOUBLE) gather_of<double>(*call, *plan, task, copies);
    else gather_of<float>(*call, *plan, task, copies);
}

}  // namespace

extern "C" __attribute__((visibility("hidden"))) const Kernels JOIN(mmgate_kernels_, MMGATE_SET);
const Kernels JOIN(mmgate_kernels_, MMGATE_SET) = {(int64_t)sizeof(Block<double>), forward, backward, gather};
