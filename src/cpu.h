/* Detect what this x86-64 processor supports and its kernel lets programs use, by asking the processor itself.
 * __builtin_cpu_supports asks the compiler's runtime, and zig's (0.17) answers no to everything: its wheels would be correct but
 * slow.
 *
 * Source: Intel's manual, volume 1, 13.3 (the state that the kernel saves: XCR0), 14.3, 15.2; volume 2, CPUID. */
#ifndef SHML_CPU_H
#define SHML_CPU_H

#ifdef __x86_64__
#include <cpuid.h>

#define SHML_CPU_SSE42 1u        /* and CRC32 */
#define SHML_CPU_AVX2 2u
#define SHML_CPU_AVX512 4u       /* F, BW, DQ and VL */
#define SHML_CPU_VPCLMULQDQ 8u   /* and AVX-512 */
#define SHML_CPU_ASKED (1u << 31)

static unsigned shml_cpu_asked(void) {
    unsigned a, b, c, d, kept = 0, has = SHML_CPU_ASKED;
    if (!__get_cpuid(1, &a, &b, &c, &d)) return has;
    if (c & bit_SSE4_2) has |= SHML_CPU_SSE42;
    if (c & bit_OSXSAVE) __asm__ volatile("xgetbv" : "=a"(kept), "=d"(d) : "c"(0));
    if ((kept & 0x6) != 0x6 || !__get_cpuid_count(7, 0, &a, &b, &c, &d)) return has; /* XMM and YMM */
    if (b & bit_AVX2) has |= SHML_CPU_AVX2;
    unsigned all = bit_AVX512F | bit_AVX512BW | bit_AVX512DQ | bit_AVX512VL;
    if ((kept & 0xe6) != 0xe6 || (b & all) != all) return has; /* and masks and ZMM */
    has |= SHML_CPU_AVX512;
    if (c & (1u << 10)) has |= SHML_CPU_VPCLMULQDQ;
    return has;
}

/* Return whether all of these are supported. */
static inline int shml_cpu_has(unsigned wanted) {
    static unsigned known; /* detected once: CPUID takes microseconds in virtual machines */
    unsigned has = __atomic_load_n(&known, __ATOMIC_RELAXED);
    if (!has) __atomic_store_n(&known, has = shml_cpu_asked(), __ATOMIC_RELAXED);
    return (has & wanted) == wanted;
}
#endif
#endif
