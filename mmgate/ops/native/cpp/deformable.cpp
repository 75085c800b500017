// Gate, softmax and bilinear sampling of multi-scale deformable attention in one loop on the CPU, and its gradients.
//
//     O[q] = sum_j w_j bilinear(V_l(j), x_j),   w = softmax(A F)  or  softmax(A) F,   F = 1 + G or G
//     dw_j = dO . v_j,   dx_j = w_j dO . dv_j/dx,   dV[row] = sum of s dO over all samples with a corner of share s there
//     before the softmax:  dA = P (dw - sum P dw) F,      dG = P (dw - sum P dw) A
//     after the softmax:   dA = P (dw F - sum P dw F),    dG = P dw
//
// with j over the points of the first level, then those of the second, and so on; levels may have different numbers.
//
// A query of a head forms its 16 to 64 weights and pixels in blocks of 16, by loops that compilers turn into vectors, and
// then adds up rows of D channels. Neither weights nor locations leave the scratch memory of a query.
//
// Where there are many queries, a head's values are copied first: rows of a head lie H * D numbers apart, so that they
// would share an H-th of a cache's sets. The copy has a border of zeros around every level, which spares the corners a
// look at whether they are on the map. In the backward pass each row of the copy is followed by its gradient: one task
// owns both, without atomics, and adds in the order of the queries.
#include "native.h"
#include "rows.h"

enum Position : int64_t { PRE_SOFTMAX, POST_SOFTMAX };

// Python builds a Call by ctypes, field by field in this order: those of Samples, sizes, and results.
struct Call {
    Numbers value;              // (B, S, H, D), contiguous, as are all but the gate
    Numbers spatial_shapes;     // (L, 2), INT64
    Numbers level_start_index;  // (L,), INT64
    Numbers points;             // locations or offsets (B, Q, H, N, 2)
    Numbers logits;             // (B, Q, H, N)
    Numbers gate;               // or null
    int64_t residual;           // the factor is 1 + G, else G
    int64_t position;           // of the factor
    Numbers reference_points;   // (B, Q, L, R), or null
    const int64_t *num_points;  // of each level (L,); their sum is N

    int64_t batch, tokens, heads, dim, queries, levels;
    int64_t samples;         // N: the points of the first level, then those of the second, and so on
    int64_t columns;         // R: 2 or 4, or 0, where the points are locations and no offsets
    int64_t gate_stride[5];  // of B, Q, H, a level and a sample, in numbers; 0 where the gate broadcasts
    int64_t gate_summed;     // the gate's gradient is one number for all points of a level
    int64_t compute;         // FLOAT or DOUBLE: what all is summed in
    int64_t threads;

    Numbers output;  // (B, Q, H, D), as the values; the forward pass's result
    // the backward pass; null where a gradient is not wanted
    Numbers grad;                   // (B, Q, H, D), as the values
    Numbers grad_value;             // (B, S, H, D), in the type of computation, zeros
    Numbers grad_points;            // as the points
    Numbers grad_logits;            // as the logits
    Numbers grad_gate;              // (B, Q, H, N), or (B, Q, H, L) if gate_summed; in the type of computation
    Numbers grad_reference_points;  // (B, Q, H, L, R), in the type of computation

    int64_t height(int64_t l) const { return ((const int64_t *)spatial_shapes.data)[2 * l]; }
    int64_t width(int64_t l) const { return ((const int64_t *)spatial_shapes.data)[2 * l + 1]; }
    int64_t start(int64_t l) const { return ((const int64_t *)level_start_index.data)[l]; }
};

namespace {

constexpr int BLOCK = 16;              // samples
constexpr int64_t QUERIES = 64;        // of a part, at least
constexpr int64_t ROWS_PER_COPY = 2;   // samples of a head for each of its values from which on a copy pays

// A task is a part of the queries of one head of one image.
struct Plan {
    int64_t parts;        // of the queries of a head
    int64_t packed;       // whether a head's values are copied first, with a border of zeros around every level
    int64_t rows;         // of a copy, borders included
    int64_t blocks;       // of 16 samples of a query
    int64_t small_bytes;  // scratch memory of a worker beside the copy
    int64_t copy_bytes;   // of a copy; with the gradient of each row beside it in the backward pass
};

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
    bool post;  // the factor comes after the softmax

    Samples(const Call &call, const Plan &plan, char *memory)
        : c(call), blocks((Block<C> *)memory), count(call.samples), n(plan.blocks), post(call.position == POST_SOFTMAX) {
        const int64_t border = plan.packed ? 1 : 0;
        memset(memory, 0, n * sizeof(Block<C>));
        int64_t first = 0, l = 0, end = c.num_points[0];
        for (int64_t i = 0; i < n * BLOCK; i++) {
            Block<C> &b = blocks[i / BLOCK];
            const int64_t k = i % BLOCK;
            b.factor[k] = 1;
            if (i >= count) {  // no location is on a map of -5 columns
                b.width[k] = b.height[k] = -5;
                b.bias[k] = -(C)INFINITY;
                continue;
            }
            for (; i == end; end += c.num_points[++l])
                first += (c.height(l) + 2 * border) * (c.width(l) + 2 * border);
            const int64_t rows = c.height(l), columns = c.width(l);
            b.rows[k] = (int32_t)rows, b.columns[k] = (int32_t)columns;
            b.height[k] = (C)rows, b.width[k] = (C)columns;
            b.pitch[k] = (int32_t)(columns + 2 * border);
            // in a copy, levels follow each other, and the first pixel is inside of the border
            b.first[k] = (int32_t)(border ? first + b.pitch[k] + 1 : c.start(l));
            b.scale_x[k] = b.width[k], b.scale_y[k] = b.height[k];
            b.shift_x[k] = b.shift_y[k] = (C)-0.5;
        }
    }

    // Forms the weights and places of query q of head h of image b.
    void form(int64_t b, int64_t q, int64_t h) {
        const int64_t row = (b * c.queries + q) * c.heads + h;
        for (int64_t i = 0; i < n; i++) {
            const int64_t left = count - i * BLOCK, m = left < BLOCK ? left : BLOCK;
            load(blocks[i].logit, c.logits, row * count + i * BLOCK, m);
            load(blocks[i].points, c.points, 2 * (row * count + i * BLOCK), 2 * m);
        }
        if (c.gate.data) read_gate(b * c.gate_stride[0] + q * c.gate_stride[1] + h * c.gate_stride[2]);
        if (c.columns) read_reference(b * c.queries + q);
        weigh();
        for (int64_t i = 0; i < n; i++) place(blocks[i]);
    }

    void read_gate(int64_t first) {
        const C one = c.residual ? 1 : 0;
        typed(c.gate, [&](auto g) {
            int64_t i = 0;
            for (int64_t l = 0; l < c.levels; l++)
                for (int64_t p = 0; p < c.num_points[l]; p++, i++)
                    blocks[i / BLOCK].factor[i % BLOCK] =
                        one + (C)up(g[first + l * c.gate_stride[3] + i * c.gate_stride[4]]);
        });
    }

    void read_reference(int64_t query) {
        typed(c.reference_points, [&](auto r) {
            r += query * c.levels * c.columns;
            int64_t i = 0;
            for (int64_t l = 0; l < c.levels; l++, r += c.columns) {
                const C share = (C)0.5 / (C)c.num_points[l];
                const C width = (C)c.width(l), height = (C)c.height(l);
                const C x = (C)up(r[0]) * width - (C)0.5, y = (C)up(r[1]) * height - (C)0.5;
                const C sx = c.columns == 4 ? (C)up(r[2]) * width * share : 1;
                const C sy = c.columns == 4 ? (C)up(r[3]) * height * share : 1;
                for (int64_t p = 0; p < c.num_points[l]; p++, i++) {
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
                const C x = (post ? b.logit[k] : b.logit[k] * b.factor[k]) + b.bias[k];
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
                b.weight[k] = post ? b.soft[k] * b.factor[k] : b.soft[k];
            }
        }
    }

    static void place(Block<C> &b) {
        for (int k = 0; k < BLOCK; k++) {
            C x = b.points[2 * k] * b.scale_x[k] + b.shift_x[k], y = b.points[2 * k + 1] * b.scale_y[k] + b.shift_y[k];
            // false for NaN
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
                sum[k] = b.soft[k] * b.of_weight[k] * (post ? b.factor[k] : 1);
            }
            for (int s = BLOCK / 2; s; s /= 2)
                for (int k = 0; k < s; k++) sum[k] += sum[k + s];
            mean += sum[0];
        }
        if (c.grad_reference_points.data) store_reference(row);
        C of_points[2 * BLOCK], of_logit[BLOCK], of_gate[BLOCK], level_sum = 0;
        const bool summed = c.gate_summed;
        int64_t point = 0, level = 0;
        for (int64_t i = 0; i < n; i++) {
            Block<C> &b = blocks[i];
            const int64_t left = count - i * BLOCK, m = left < BLOCK ? left : BLOCK;
            for (int k = 0; k < BLOCK; k++) {
                of_points[2 * k] = b.of_x[k] * b.scale_x[k];
                of_points[2 * k + 1] = b.of_y[k] * b.scale_y[k];
                if (post) {
                    of_logit[k] = b.soft[k] * (b.of_weight[k] * b.factor[k] - mean);
                    of_gate[k] = b.soft[k] * b.of_weight[k];
                } else {
                    const C z = b.soft[k] * (b.of_weight[k] - mean);
                    of_logit[k] = z * b.factor[k];
                    of_gate[k] = z * b.logit[k];
                }
            }
            store(of_points, c.grad_points, 2 * (row * count + i * BLOCK), 2 * m);
            store(of_logit, c.grad_logits, row * count + i * BLOCK, m);
            if (!c.grad_gate.data) continue;
            if (!summed) {
                memcpy((C *)c.grad_gate.data + row * count + i * BLOCK, of_gate, m * sizeof(C));
                continue;
            }
            for (int64_t k = 0; k < m; k++) {
                level_sum += of_gate[k];
                if (++point == c.num_points[level]) {
                    ((C *)c.grad_gate.data)[row * c.levels + level++] = level_sum;
                    level_sum = 0, point = 0;
                }
            }
        }
    }

    void store_reference(int64_t row) {
        C *to = (C *)c.grad_reference_points.data + row * c.levels * c.columns;
        int64_t i = 0;
        for (int64_t l = 0; l < c.levels; l++, to += c.columns) {
            const C share = (C)0.5 / (C)c.num_points[l];
            C x = 0, y = 0, w = 0, h = 0;
            for (int64_t p = 0; p < c.num_points[l]; p++, i++) {
                const Block<C> &b = blocks[i / BLOCK];
                const int64_t k = i % BLOCK;
                x += b.of_x[k], y += b.of_y[k];
                if (b.corners[k]) w += b.of_x[k] * b.points[2 * k], h += b.of_y[k] * b.points[2 * k + 1];
            }
            const C width = (C)c.width(l), height = (C)c.height(l);
            to[0] = x * width, to[1] = y * height;
            if (c.columns == 4) to[2] = w * width * share, to[3] = h * height * share;
        }
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
        const int64_t height = c.height(l), width = c.width(l);
        for (int64_t y = 0; y < height; y++)
            f(first + (y + 1) * (width + 2) + 1, image * c.tokens + c.start(l) + y * width, width);
        first += (height + 2) * (width + 2);
    }
}

// Copies a head's values, and lets `pitch` numbers be from a row to the next; what lies between becomes 0.
template <class R> void pack(const Call &c, int64_t image, int64_t head, R &row, typename R::C *copy, int64_t pitch) {
    const int64_t dim = row.dim(c.dim), far = c.heads * dim;
    typed(c.value, [&](auto value) {
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
        store(result, c.output, ((part.image * c.queries + q) * c.heads + part.head) * dim, dim);
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
        load(read, c.grad, ((part.image * c.queries + q) * c.heads + part.head) * dim, dim);
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
    C *to = (C *)c.grad_value.data;
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
        forward_of<AnyRow<C>, C, false>(c, plan, part, small, (const C *)c.value.data);
    else if (c.value.type == FLOAT)
        forward_of<R, C, false>(c, plan, part, small, (const C *)c.value.data);
    else if (c.value.type == BFLOAT16)
        forward_of<R, bf16, false>(c, plan, part, small, (const bf16 *)c.value.data);
    else
        forward_of<R, half, false>(c, plan, part, small, (const half *)c.value.data);
}

template <class R> void backward_by(const Call &c, const Plan &plan, int64_t task, char *small, char *copy) {
    typedef typename R::C C;
    const Part part(c, plan, task);
    if (plan.packed) {
        R row(c.dim, small);
        const int64_t dim = row.dim(c.dim);
        pack(c, part.image, part.head, row, (C *)copy, 2 * dim);
        C *of_value = c.grad_value.data ? (C *)copy + dim : nullptr;
        backward_of<R, C, true>(c, plan, part, small, (const C *)copy, of_value);
        if (c.grad_value.data && plan.parts == 1) unpack(c, part.image, part.head, (const C *)copy, 1, 0, 0, 1);
        return;
    }
    C *of_value = (C *)c.grad_value.data;
    if (sizeof(C) == 8 || c.value.type == FLOAT)
        backward_of<R, C, false>(c, plan, part, small, (const C *)c.value.data, of_value);
    else if (c.value.type == BFLOAT16)
        backward_of<R, bf16, false>(c, plan, part, small, (const bf16 *)c.value.data, of_value);
    else
        backward_of<R, half, false>(c, plan, part, small, (const half *)c.value.data, of_value);
}

#define BY_CHANNELS(function, ...)                                    \
    if (c.compute == DOUBLE) return function<AnyRow<double>>(__VA_ARGS__); \
    switch (c.dim) {                                              \
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

void forward(const Call &c, const Plan &plan, int64_t task, char *small, char *copy) {
    BY_CHANNELS(forward_by, c, plan, task, small, copy)
}

void backward(const Call &c, const Plan &plan, int64_t task, char *small, char *copy) {
    BY_CHANNELS(backward_by, c, plan, task, small, copy)
}

template <class C> void gather_of(const Call &c, const Plan &plan, int64_t task, const char *copy) {
    const Part part(c, plan, task);
    const int64_t size = plan.copy_bytes / (int64_t)sizeof(C), own = task % plan.parts;
    unpack(c, part.image, part.head, (const C *)copy - own * size, plan.parts, size, own, plan.parts);
}

// Adds up the gradients of a head's values from the copies of its parts, in their order, for a part of the rows.
void gather(const Call &c, const Plan &plan, int64_t task, char *, char *copy) {
    if (c.compute == DOUBLE) gather_of<double>(c, plan, task, copy);
    else gather_of<float>(c, plan, task, copy);
}

// A task writes what no other task writes, so the order in which threads take them changes nothing.
struct Job {
    const Call &call;
    const Plan &plan;
    void (*run)(const Call &, const Plan &, int64_t task, char *small, char *copy);
    int64_t tasks;
    char *copies;  // a copy for each task, or null for one for each worker
    std::atomic<int64_t> next{0};
    std::atomic<bool> failed{false};
};

void work(void *data) {
    Job &job = *(Job *)data;
    int64_t task = job.next++;
    if (task >= job.tasks) return;
    Memory memory(job.plan.small_bytes + (job.copies ? 0 : job.plan.copy_bytes));
    if (!memory.start) {
        job.failed = true;
        return;
    }
    char *small = memory.aligned(), *copy = small + job.plan.small_bytes;
    for (; task < job.tasks; task = job.next++)
        job.run(job.call, job.plan, task, small, job.copies ? job.copies + task * job.plan.copy_bytes : copy);
}

int64_t rounded(int64_t bytes) { return (bytes + 63) / 64 * 64; }

}  // namespace

// Returns 0, or 1 if there is not enough memory.
EXPORT int32_t mmgate_ms_deform_attn(const Call *call, int32_t is_backward, int32_t own_threads) {
    const Call &c = *call;
    const int64_t heads = c.batch * c.heads, samples = c.queries * c.samples;
    const int64_t number = c.compute == DOUBLE ? 8 : 4;
    if (!heads || !samples || !c.dim) return 0;
    const int64_t threads = heads * samples * c.dim > SMALL && c.threads > 1 ? c.threads : 1;

    Plan plan{};
    plan.blocks = (c.samples + BLOCK - 1) / BLOCK;
    plan.small_bytes = rounded(plan.blocks * (int64_t)sizeof(Block<double>) + 2 * c.dim * number);
    plan.packed = samples >= ROWS_PER_COPY * c.tokens;
    for (int64_t l = 0; l < c.levels; l++) plan.rows += (c.height(l) + 2) * (c.width(l) + 2);
    plan.copy_bytes = plan.packed ? rounded(plan.rows * c.dim * number * (is_backward ? 2 : 1)) : 0;
    // Heads are enough for most. In the backward pass the parts of a head each have a sum of their own where there is a
    // copy; where there is none, that is, for few queries, a head has one.
    const int64_t most = (c.queries + QUERIES - 1) / QUERIES;
    plan.parts = threads > heads ? (threads + heads - 1) / heads : 1;
    if (!plan.packed && !is_backward && threads > 1) plan.parts = most;
    if (plan.parts > most) plan.parts = most;
    if (!plan.packed && is_backward && c.grad_value.data) plan.parts = 1;

    const int64_t tasks = heads * plan.parts;
    const bool apart = is_backward && c.grad_value.data && plan.packed && plan.parts > 1;
    Memory copies(apart ? tasks * plan.copy_bytes : 0);
    if (!copies.start) return 1;
    char *of_tasks = apart ? copies.aligned() : nullptr;
    Job job{c, plan, is_backward ? backward : forward, tasks, of_tasks};
    on_threads(work, &job, tasks, threads, own_threads);
    if (!apart || job.failed) return job.failed;
    Job sum{c, plan, gather, tasks, of_tasks};
    on_threads(work, &sum, tasks, threads, own_threads);
    return sum.failed;
}
