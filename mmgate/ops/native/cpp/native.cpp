// Cuts a call into tasks, runs them on threads and takes the instructions that this processor has.
//
// Threads are torch's own, where it has OpenMP by GNU's interface, which LLVM's and Intel's have as well: GOMP_parallel is
// looked up among what the process has loaded. So this library is linked with no OpenMP, needs none when it is built, and
// never brings a second pool that spins beside torch's (whose libgomp has another name in every release). Elsewhere threads
// are started for the call. Of a step of six layers, linear ones between, on two quiet cores that took 1.33 times as long
// by the clock and 1.19 times the processor's time: cores that had worked on a linear layer spin while others start.
// A task writes what no other task writes, so the order in which threads take them changes nothing.
#include "native.h"
#include <stdlib.h>

#include <atomic>
#include <thread>
#include <vector>
#if defined(__unix__) || defined(__APPLE__)
#include <dlfcn.h>
#endif

#define EXPORT extern "C" __attribute__((visibility("default")))

extern "C" const Kernels mmgate_kernels_baseline;
extern "C" const RowKernels mmgate_row_kernels_baseline;
#ifdef MMGATE_HAS_V3
extern "C" const Kernels mmgate_kernels_v3;
extern "C" const RowKernels mmgate_row_kernels_v3;
#endif
#ifdef MMGATE_HAS_V4
extern "C" const Kernels mmgate_kernels_v4;
extern "C" const RowKernels mmgate_row_kernels_v4;
#endif

namespace {

constexpr int64_t SMALL = 1 << 14;     // numbers read by a call that is not worth a second thread
constexpr int64_t QUERIES = 64;        // of a part, at least
constexpr int64_t ROWS_PER_COPY = 2;   // samples of a head for each of its values from which on a copy pays

// Returns the widest set of instructions that the library has, the processor has, and the call allows.
int64_t chosen(int64_t widest) {
#if defined(MMGATE_HAS_V4)
    if (widest > 1 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
        return 2;
#endif
#if defined(MMGATE_HAS_V3)
    if (widest > 0 && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2"))
        return 1;
#endif
    (void)widest;
    return 0;
}

template <class K> const K &of_set(int64_t set, const K *baseline, const K *v3, const K *v4) {
    if (set == 2) return *v4;
    return set == 1 ? *v3 : *baseline;
}

#ifdef MMGATE_HAS_V3
#define V3(name) &name##_v3
#else
#define V3(name) nullptr
#endif
#ifdef MMGATE_HAS_V4
#define V4(name) &name##_v4
#else
#define V4(name) nullptr
#endif
#define KERNELS(name, widest) of_set(chosen(widest), &name##_baseline, V3(name), V4(name))

struct Memory {
    char *start;
    explicit Memory(int64_t bytes) : start((char *)calloc(1, (size_t)bytes + 64)) {}
    ~Memory() { free(start); }
    char *aligned() const { return (char *)(((uintptr_t)start + 63) & ~(uintptr_t)63); }
    Memory(const Memory &) = delete;
};

struct Job {
    const Call &call;
    const Plan &plan;
    const Kernels &kernels;
    void (*run)(const Call *, const Plan *, int64_t, char *, char *);
    int64_t tasks;
    char *copies;  // a copy for each task, else one for each worker
    bool gathers;
    std::atomic<int64_t> next{0};
    std::atomic<bool> failed{false};
};

void work(void *data) {
    Job &job = *(Job *)data;
    int64_t task = job.next++;
    if (task >= job.tasks) return;
    const int64_t copy = job.copies || job.gathers ? 0 : job.plan.copy_bytes;
    Memory memory(job.plan.small_bytes + copy);
    if (!memory.start) {
        job.failed = true;
        return;
    }
    char *small = memory.aligned();
    for (; task < job.tasks; task = job.next++) {
        if (job.gathers) job.kernels.gather(&job.call, &job.plan, task, job.copies);
        else
            job.run(&job.call, &job.plan, task, small,
                job.copies ? job.copies + task * job.plan.copy_bytes : small + job.plan.small_bytes);
    }
}

typedef void (*Parallel)(void (*)(void *), void *, unsigned, unsigned);

// Calls run(job) on threads, each of which takes tasks until there are none.
void on_threads(void (*run)(void *), void *job, int64_t tasks, int64_t threads, bool own_threads) {
    threads = threads < tasks ? threads : tasks;
    if (threads < 2) return run(job);
#if defined(__unix__) || defined(__APPLE__)
    static const Parallel parallel = (Parallel)dlsym(RTLD_DEFAULT, "GOMP_parallel");
    if (parallel && !own_threads) return parallel(run, job, (unsigned)threads, 0);
#endif
    std::vector<std::thread> others;
    try {
        for (int64_t i = 1; i < threads; i++) others.emplace_back(run, job);
    } catch (...) {  // no more threads are to be had; those that there are do the work
    }
    run(job);
    for (auto &thread : others) thread.join();
}

struct RowJob {
    const GatedRows &call;
    void (*run)(const GatedRows *, int64_t image, int64_t row);
    int64_t tasks;
    std::atomic<int64_t> next{0};
};

void work_on_rows(void *data) {
    RowJob &job = *(RowJob *)data;
    for (int64_t task; (task = job.next++) < job.tasks;) job.run(&job.call, task / job.call.rows, task % job.call.rows);
}

int64_t rounded(int64_t bytes) { return (bytes + 63) / 64 * 64; }

}  // namespace

#ifndef MMGATE_SOURCES
#define MMGATE_SOURCES ""
#endif

// The sources and the interface that this library was built from.
EXPORT const char *mmgate_sources() { return MMGATE_SOURCES; }

// Returns 0, or 1 if there is not enough memory.
EXPORT int32_t mmgate_ms_deform_attn(const Call *call, int32_t backward, int32_t own_threads) {
    const Call &c = *call;
    const Kernels &kernels = KERNELS(mmgate_kernels, c.widest);
    const int64_t heads = c.batch * c.heads, samples = c.queries * c.samples;
    const int64_t number = c.compute == DOUBLE ? 8 : 4;
    if (!heads || !samples || !c.dim) return 0;
    int64_t threads = heads * samples * c.dim > SMALL && c.threads > 1 ? c.threads : 1;

    Plan plan{};
    plan.blocks = (c.samples + 15) / 16;
    plan.small_bytes = rounded(plan.blocks * kernels.block_bytes + 2 * c.dim * number);
    plan.packed = samples >= ROWS_PER_COPY * c.tokens;
    for (int64_t l = 0; l < c.levels; l++) plan.rows += (c.shapes[2 * l] + 2) * (c.shapes[2 * l + 1] + 2);
    plan.copy_bytes = plan.packed ? rounded(plan.rows * c.dim * number * (backward ? 2 : 1)) : 0;
    // Heads are enough for most. In the backward pass the parts of a head each have a sum of their own where there is a
    // copy; where there is none, that is, for few queries, a head has one.
    const int64_t most = (c.queries + QUERIES - 1) / QUERIES;
    plan.parts = threads > heads ? (threads + heads - 1) / heads : 1;
    if (!plan.packed && !backward && threads > 1) plan.parts = most;
    if (plan.parts > most) plan.parts = most;
    if (!plan.packed && backward && c.grad_value) plan.parts = 1;

    const int64_t tasks = heads * plan.parts;
    const bool apart = backward && c.grad_value && plan.packed && plan.parts > 1;
    Memory copies(apart ? tasks * plan.copy_bytes : 0);
    if (!copies.start) return 1;
    Job job{c, plan, kernels, backward ? kernels.backward : kernels.forward, tasks, apart ? copies.aligned() : nullptr,
        false};
    on_threads(work, &job, job.tasks, threads, own_threads);
    if (apart && !job.failed) {
        Job sum{c, plan, kernels, nullptr, tasks, copies.aligned(), true};
        on_threads(work, &sum, sum.tasks, threads, own_threads);
        return sum.failed;
    }
    return job.failed;
}

EXPORT void mmgate_gated_softmax(const GatedRows *call, int32_t backward, int32_t own_threads) {
    const RowKernels &kernels = KERNELS(mmgate_row_kernels, call->widest);
    RowJob job{*call, backward ? kernels.backward : kernels.forward, call->batch * call->rows};
    const int64_t threads = job.tasks * call->heads * call->columns > SMALL ? call->threads : 1;
    on_threads(work_on_rows, &job, job.tasks, threads, own_threads);
}
