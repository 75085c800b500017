// The plain C interface of the CPU kernels: a call's pointers, sizes and strides, and how it is cut into tasks.
//
// Python builds a Call or a GatedRows by ctypes, field by field in this order. Nothing of torch is included.
#pragma once
#include <stdint.h>

enum Type : int64_t { FLOAT, DOUBLE, BFLOAT16, HALF };

struct Call {
    // value (B, S, H, D), points (B, Q, H, N, 2), logits (B, Q, H, N), reference (B, Q, L, R): contiguous
    int64_t batch, tokens, heads, dim, queries, levels;
    int64_t samples;      // N: the points of the first level, then those of the second, and so on
    int64_t columns;      // R: 2 or 4, or 0, where the points are locations and no offsets
    int64_t residual;     // the factor is 1 + G, else G
    int64_t post;         // the factor comes after the softmax
    int64_t compute;      // FLOAT or DOUBLE: what all is summed in
    int64_t value_type, points_type, logits_type, gate_type, reference_type;
    int64_t gate_stride[5];  // of B, Q, H, a level and a sample, in numbers; 0 where the gate broadcasts
    int64_t gate_summed;     // the gate's gradient is one number for all points of a level
    int64_t threads;
    int64_t widest;       // the most of the instruction sets 0, 1 and 2 that may be taken
    const int64_t *points;  // of each level (L,); their sum is N
    const void *value;
    const int64_t *shapes, *starts;
    const void *at;       // locations or offsets
    const void *logits;
    const void *gate;     // or null
    const void *reference;  // or null
    void *output;         // (B, Q, H, D), as the values; the forward pass's result
    // the backward pass; null where a gradient is not wanted
    const void *grad;     // (B, Q, H, D), as the values
    void *grad_value;     // (B, S, H, D), in the type of computation, zeros
    void *grad_at;        // as the points
    void *grad_logits;    // as the logits
    void *grad_gate;      // (B, Q, H, N), or (B, Q, H, L) if gate_summed; in the type of computation
    void *grad_reference;  // (B, Q, H, L, R), in the type of computation
};

// A task is a part of the queries of one head of one image.
struct Plan {
    int64_t parts;        // of the queries of a head
    int64_t packed;       // whether a head's values are copied first, with a border of zeros around every level
    int64_t rows;         // of a copy, borders included
    int64_t blocks;       // of 16 samples of a query
    int64_t small_bytes;  // scratch memory of a worker beside the copy
    int64_t copy_bytes;   // of a copy; with the gradient of each row beside it in the backward pass
};

// A chunk of PLuG attention's maps, with f the gate's factor: weights = softmax(f logits + bias) over the columns.
// If is_raw, the factor's place holds raw gates r, over which f = 1 + tanh((a r + b)(c r + e)) is written first.
struct GatedRows {
    // logits and weights (B, H, N, M), factor and its gradient (B, G, N, M), delta (B, H, N): contiguous, of one type
    int64_t batch, heads, gate_heads, rows, columns;  // G is 1, if heads share the gate, or H
    int64_t compute;         // FLOAT or DOUBLE: the type of all
    int64_t bias_stride[4];  // of B, H, N and M, in numbers; 0 where the bias broadcasts
    int64_t threads;
    int64_t widest;          // the most of the instruction sets 0, 1 and 2 that may be taken
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

// The functions of deformable.cpp and softmax.cpp, compiled once for every set of instructions.
struct Kernels {
    int64_t block_bytes;
    void (*forward)(const Call *, const Plan *, int64_t task, char *small, char *copy);
    void (*backward)(const Call *, const Plan *, int64_t task, char *small, char *copy);
    // Adds up the gradients of a head's values from the copies of its parts, in their order, for a part of the rows.
    void (*gather)(const Call *, const Plan *, int64_t task, char *copies);
};
struct RowKernels {
    void (*forward)(const GatedRows *, int64_t image, int64_t row);
    void (*backward)(const GatedRows *, int64_t image, int64_t row);
};
