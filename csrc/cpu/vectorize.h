// How the loops of the CPU backend get wide vectors from a build for plain x86-64.
#pragma once

#include <cstddef>  // defines __GLIBC__ where there is one

// A function marked DK_VECTORIZED is compiled once per instruction set, and the loader picks one.
// Elsewhere (other processors, other loaders) it is compiled once, for the build's own flags. The
// build says -ffp-contract=off, so that all of them round alike.
#if defined(__x86_64__) && defined(__GLIBC__) && defined(__has_attribute)
#if __has_attribute(target_clones)
#define DK_VECTORIZED __attribute__((target_clones("avx512f", "avx2", "default")))
#endif
#endif
#ifndef DK_VECTORIZED
#define DK_VECTORIZED
#endif

// The same for loops of fused multiply-adds, std::fma, which rounds alike as an instruction and as
// the slow function that it is where a processor has none.
#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__) && \
    __GNUC__ >= 12
#define DK_VECTORIZED_FMA \
  __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#elif defined(__x86_64__) && defined(__GLIBC__) && defined(__has_attribute)
#if __has_attribute(target_clones)
#define DK_VECTORIZED_FMA __attribute__((target_clones("avx512f", "fma", "default")))
#endif
#endif
#ifndef DK_VECTORIZED_FMA
#define DK_VECTORIZED_FMA
#endif

// Wanted inside of every clone of its caller.
#define DK_INLINE inline __attribute__((always_inline))
