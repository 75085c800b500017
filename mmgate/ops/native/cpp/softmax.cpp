// Gated softmax of PLuG's dense attention on the CPU, a row of the map at a time, and its gradients.
//
//     P = softmax(f S + bias)
//     dL = P (dP - delta),   dS = f dL,   df = sum of dL S over the heads that share f
//
// In the forward pass f may be formed here, too, from raw gates r, as f = 1 + tanh((a r + b)(c r + e)).
//
// S, f and P are a chunk of the map that fits into a cache; matrix products before and after are torch's. By torch's own
// operators the softmax alone goes over the chunk six times. Here a row stays in the first cache from the first step to
// the last. A task is a row of all heads, so that the sum over the heads has one owner and one order.
#include "native.h"
#include "numbers.h"

// Python builds GatedRows by ctypes, field by field in this order: a chunk of PLuG attention's maps, with f the gate's
// factor. If is_raw, the factor's place holds raw gates, over which f is written first.
struct GatedRows {
    // logits and weights (B, H, N, M), factor and its gradient (B, G, N, M), delta (B, H, N): contiguous, of one type
    int64_t batch, heads, gate_heads, rows, columns;  // G is 1, if heads share the gate, or H
    int64_t compute;         // FLOAT or DOUBLE: the type of all
    int64_t bias_stride[4];  // of B, H, N and M, in numbers; 0 where the bias broadcasts
    int64_t threads;
    int64_t is_raw;          // in the forward pass
    double scalars[4];       // a, b, c and e
    const void *logits;
    void *factor;            // or null, for a softmax without a gate
    const void *bias;        // or null
    void *weights;           // the forward pass's result, which may lie where the logits do
    // the backward pass
    void *grad;              // of the weights; becomes that of the logits
    const void *delta;       // sum of weights times their gradients, by row
    void *grad_factor;       // summed over the heads that share the gate
};

namespace {

constexpr int LANES = 32;  // partial maxima and sums, whose order does not depend on the instructions

template <class C> inline C largest_of(const C *most) {
    C x = most[0];
    for (int k = 1; k < LANES; k++) x = most[k] > x ? most[k] : x;
    return x;
}

template <class C> inline C sum_of(const C *sum) {
    C x = 0;
    for (int k = 0; k < LANES; k++) x += sum[k];
    return x;
}

// Call f(i, lane) for every column, by blocks that become vectors.
template <class F> inline void columns(int64_t n, F f) {
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES)
        for (int k = 0; k < LANES; k++) f(i + k, k);
    for (int k = 0; i + k < n; k++) f(i + k, k);
}

template <class C, class Logit> inline void softmax(C *p, int64_t n, Logit logit) {
    C most[LANES];
    C sum[LANES];
    for (int k = 0; k < LANES; k++) {
        most[k] = -(C)INFINITY;
        sum[k] = 0;
    }
    columns(n, [&](int64_t i, int k) {
        const C x = logit(i);
        p[i] = x;
        most[k] = x > most[k] ? x : most[k];
    });
    const C largest = largest_of(most);
    columns(n, [&](int64_t i, int k) {
        const C e = exp_of(p[i] - largest);
        p[i] = e;
        sum[k] += e;
    });
    const C scale = 1 / sum_of(sum);
    for (int64_t i = 0; i < n; i++) p[i] *= scale;
}

// The places of a row of a head in tensors of C numbers.
template <class C> struct Place {
    int64_t row, at, gate;
    Place(const GatedRows &c, int64_t b, int64_t h, int64_t r) {
        row = (b * c.heads + h) * c.rows + r;
        at = row * c.columns;
        gate = ((b * c.gate_heads + (c.gate_heads == 1 ? 0 : h)) * c.rows + r) * c.columns;
    }
};

// Write 1 + tanh((a r + b)(c r + e)) over a row of raw gates: 2 / (1 + exp(-2 u)), without a large exponential.
template <class C> void make_factor(C *__restrict f, int64_t n, const double *scalars) {
    const C a = (C)scalars[0], b = (C)scalars[1], c = (C)scalars[2], e = (C)scalars[3];
    for (int64_t i = 0; i < n; i++) {
        const C u = (a * f[i] + b) * (c * f[i] + e);
        const C small = exp_of(u > 0 ? -2 * u : 2 * u);
        f[i] = (u > 0 ? 2 : 2 * small) / (1 + small);
    }
}

template <class C> void forward_of(const GatedRows &c, int64_t b, int64_t r) {
    const int64_t step = c.bias_stride[3];
    for (int64_t h = 0; h < c.heads; h++) {
        const Place<C> place(c, b, h, r);
        const C *s = (const C *)c.logits + place.at;
        const C *f = c.factor ? (const C *)c.factor + place.gate : nullptr;
        if (c.is_raw && (h == 0 || c.gate_heads > 1)) make_factor((C *)c.factor + place.gate, c.columns, c.scalars);
        C *p = (C *)c.weights + place.at;
        const C *bias = (const C *)c.bias;
        if (bias) bias += b * c.bias_stride[0] + h * c.bias_stride[1] + r * c.bias_stride[2];
        if (f && !bias) softmax(p, c.columns, [=](int64_t i) { return s[i] * f[i]; });
        else if (f && step == 1) softmax(p, c.columns, [=](int64_t i) { return s[i] * f[i] + bias[i]; });
        else if (f) softmax(p, c.columns, [=](int64_t i) { return s[i] * f[i] + bias[i * step]; });
        else if (bias) softmax(p, c.columns, [=](int64_t i) { return s[i] + bias[i * step]; });
        else softmax(p, c.columns, [=](int64_t i) { return s[i]; });
    }
}

template <class C> void backward_of(const GatedRows &c, int64_t b, int64_t r) {
    for (int64_t h = 0; h < c.heads; h++) {
        const Place<C> place(c, b, h, r);
        const C *s = (const C *)c.logits + place.at;
        const C *p = (const C *)c.weights + place.at;
        const C *f = (const C *)c.factor + place.gate;
        const C delta = ((const C *)c.delta)[place.row];
        C *__restrict grad = (C *)c.grad + place.at;
        C *__restrict of_factor = (C *)c.grad_factor + place.gate;
        const bool adds = h > 0 && c.gate_heads == 1;
        for (int64_t i = 0; i < c.columns; i++) {
            const C of_logit = p[i] * (grad[i] - delta);
            grad[i] = of_logit * f[i];
            of_factor[i] = of_logit * s[i] + (adds ? of_factor[i] : 0);
        }
    }
}

void forward(const GatedRows &c, int64_t image, int64_t row) {
    if (c.compute == DOUBLE) forward_of<double>(c, image, row);
    else forward_of<float>(c, image, row);
}

void backward(const GatedRows &c, int64_t image, int64_t row) {
    if (c.compute == DOUBLE) backward_of<double>(c, image, row);
    else backward_of<float>(c, image, row);
}

struct Job {
    const GatedRows &call;
    void (*run)(const GatedRows &, int64_t image, int64_t row);
    int64_t tasks;
    std::atomic<int64_t> next{0};
};

void work(void *data) {
    Job &job = *(Job *)data;
    for (int64_t task; (task = job.next++) < job.tasks;) job.run(job.call, task / job.call.rows, task % job.call.rows);
}

}  // namespace

EXPORT void mmgate_gated_softmax(const GatedRows *call, int32_t is_backward, int32_t own_threads) {
    Job job{*call, is_backward ? backward : forward, call->batch * call->rows};
    const int64_t threads = job.tasks * call->heads * call->columns > SMALL ? call->threads : 1;
    on_threads(work, &job, job.tasks, threads, own_threads);
}
