// Threads, and what the library was built from.
//
// Threads are torch's own, where it has OpenMP by GNU's interface, which LLVM's and Intel's have as well: GOMP_parallel is
// looked up among what the process has loaded. So this library is linked with no OpenMP, needs none when it is built, and
// never brings a second pool that spins beside torch's (whose libgomp has another name in every release). Elsewhere threads
// are started for the call. Of a step of six layers, linear ones between, on two quiet cores that took 1.33 times as long
// by the clock and 1.19 times the processor's time: cores that had worked on a linear layer spin while others start.
#include "native.h"

#include <thread>
#include <vector>
#if defined(__unix__) || defined(__APPLE__)
#include <dlfcn.h>
#endif

namespace {

typedef void (*Parallel)(void (*)(void *), void *, unsigned, unsigned);

}  // namespace

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

// The digests of the sources and of the processor that this library was built from and for.
EXPORT const char *mmgate_built_from() { return MMGATE_BUILT_FROM; }
