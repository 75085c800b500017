// Functions that both kernels need: scratch memory, and threads.
#pragma once
#include <stdint.h>
#include <stdlib.h>

#include <atomic>

#define EXPORT extern "C" __attribute__((visibility("default")))

constexpr int64_t SMALL = 1 << 14;  // numbers read by a call that is not worth a second thread

struct Memory {
    char *start;
    explicit Memory(int64_t bytes) : start((char *)calloc(1, (size_t)bytes + 64)) {}
    ~Memory() { free(start); }
    char *aligned() const { return (char *)(((uintptr_t)start + 63) & ~(uintptr_t)63); }
    Memory(const Memory &) = delete;
};

// Calls run(job) on threads, torch's or its own, each of which takes tasks until there are none.
void on_threads(void (*run)(void *), void *job, int64_t tasks, int64_t threads, bool own_threads);
