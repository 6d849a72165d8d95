/*
 * The kernels that every test program uses, as PTX text for cuModuleLoadData.
 *
 * PTX rather than compiled code, so that the driver-API programs build without nvcc and run on any card since
 * sm_70. A simulated device does not read the text: it knows the kernels by name. All indices are grid-stride,
 * so any launch shape does the whole job. pair.cu holds those that the runtime programs need as CUDA C++.
 *
 *   gr_fill(uint32_t *p, uint32_t value, uint64_t n)                        p[i] = value
 *   gr_spin(uint64_t ns)                                                    busy for ns nanoseconds
 *   gr_late_fill(uint32_t *p, uint32_t value, uint64_t n, uint64_t ns)      busy first, then p[i] = value
 *   gr_copy(uint32_t *dst, const uint32_t *src, uint64_t n)                 dst[i] = src[i]
 *   gr_count_diff(const uint32_t *p, uint32_t value, uint64_t n, uint32_t *count)  *count += number of p[i] != value
 *   gr_await(const uint32_t *p, uint32_t value, uint64_t ns)                until *p >= value, but no longer than ns
 */
#ifndef GR_TEST_KERNELS_H
#define GR_TEST_KERNELS_H

/* %i = this thread's first index, %step = threads in the grid. */
#define GR_PTX_INDEX                                                                                                   \
        "  .reg .b32 %a, %b, %c;\n"                                                                                    \
        "  .reg .b64 %i, %step, %t;\n"                                                                                 \
        "  mov.u32 %a, %ctaid.x;\n"                                                                                    \
        "  mov.u32 %b, %ntid.x;\n"                                                                                     \
        "  mov.u32 %c, %tid.x;\n"                                                                                      \
        "  mul.wide.u32 %i, %a, %b;\n"                                                                                 \
        "  cvt.u64.u32 %t, %c;\n"                                                                                      \
        "  add.u64 %i, %i, %t;\n"                                                                                      \
        "  mov.u32 %a, %nctaid.x;\n"                                                                                   \
        "  mul.wide.u32 %step, %a, %b;\n"

/* Returns to WAIT until %ns nanoseconds have gone by on the card's own clock. */
#define GR_PTX_SPIN                                                                                                    \
        "  .reg .pred %early;\n"                                                                                       \
        "  .reg .b64 %begin, %now;\n"                                                                                  \
        "  mov.u64 %begin, %globaltimer;\n"                                                                            \
        "WAIT:\n"                                                                                                      \
        "  mov.u64 %now, %globaltimer;\n"                                                                              \
        "  sub.u64 %now, %now, %begin;\n"                                                                              \
        "  setp.lo.u64 %early, %now, %ns;\n"                                                                           \
        "  @%early bra WAIT;\n"

/* Stores %v to the words of %p from %i on. */
#define GR_PTX_FILL                                                                                                    \
        "  .reg .pred %done;\n"                                                                                        \
        "  .reg .b64 %at;\n"                                                                                           \
        "LOOP:\n"                                                                                                      \
        "  setp.ge.u64 %done, %i, %n;\n"                                                                               \
        "  @%done bra END;\n"                                                                                          \
        "  shl.b64 %at, %i, 2;\n"                                                                                      \
        "  add.u64 %at, %at, %p;\n"                                                                                    \
        "  st.global.u32 [%at], %v;\n"                                                                                 \
        "  add.u64 %i, %i, %step;\n"                                                                                   \
        "  bra LOOP;\n"                                                                                                \
        "END:\n"                                                                                                       \
        "  ret;\n"

static const char gr_test_ptx[] = ".version 6.3\n"
                                  ".target sm_70\n"
                                  ".address_size 64\n"

                                  ".visible .entry gr_fill(.param .u64 p, .param .u32 value, .param .u64 n)\n"
                                  "{\n"
                                  "  .reg .b64 %p, %n;\n"
                                  "  .reg .b32 %v;\n"
                                  "  ld.param.u64 %p, [p];\n"
                                  "  ld.param.u32 %v, [value];\n"
                                  "  ld.param.u64 %n, [n];\n" GR_PTX_INDEX GR_PTX_FILL "}\n"

                                  ".visible .entry gr_spin(.param .u64 ns)\n"
                                  "{\n"
                                  "  .reg .b64 %ns;\n"
                                  "  ld.param.u64 %ns, [ns];\n" GR_PTX_SPIN "  ret;\n"
                                  "}\n"

                                  ".visible .entry gr_late_fill(.param .u64 p, .param .u32 value, .param .u64 n,\n"
                                  "                             .param .u64 ns)\n"
                                  "{\n"
                                  "  .reg .b64 %p, %n, %ns;\n"
                                  "  .reg .b32 %v;\n"
                                  "  ld.param.u64 %p, [p];\n"
                                  "  ld.param.u32 %v, [value];\n"
                                  "  ld.param.u64 %n, [n];\n"
                                  "  ld.param.u64 %ns, [ns];\n" GR_PTX_SPIN GR_PTX_INDEX GR_PTX_FILL "}\n"

                                  ".visible .entry gr_copy(.param .u64 dst, .param .u64 src, .param .u64 n)\n"
                                  "{\n"
                                  "  .reg .pred %done;\n"
                                  "  .reg .b64 %dst, %src, %n, %from, %to;\n"
                                  "  .reg .b32 %v;\n"
                                  "  ld.param.u64 %dst, [dst];\n"
                                  "  ld.param.u64 %src, [src];\n"
                                  "  ld.param.u64 %n, [n];\n" GR_PTX_INDEX "LOOP:\n"
                                  "  setp.ge.u64 %done, %i, %n;\n"
                                  "  @%done bra END;\n"
                                  "  shl.b64 %t, %i, 2;\n"
                                  "  add.u64 %from, %src, %t;\n"
                                  "  add.u64 %to, %dst, %t;\n"
                                  "  ld.global.u32 %v, [%from];\n"
                                  "  st.global.u32 [%to], %v;\n"
                                  "  add.u64 %i, %i, %step;\n"
                                  "  bra LOOP;\n"
                                  "END:\n"
                                  "  ret;\n"
                                  "}\n"

                                  ".visible .entry gr_count_diff(.param .u64 p, .param .u32 value, .param .u64 n,\n"
                                  "                              .param .u64 count)\n"
                                  "{\n"
                                  "  .reg .pred %done, %same;\n"
                                  "  .reg .b64 %p, %n, %count, %at;\n"
                                  "  .reg .b32 %v, %got, %sum;\n"
                                  "  ld.param.u64 %p, [p];\n"
                                  "  ld.param.u32 %v, [value];\n"
                                  "  ld.param.u64 %n, [n];\n"
                                  "  ld.param.u64 %count, [count];\n"
                                  "  mov.u32 %sum, 0;\n" GR_PTX_INDEX "LOOP:\n"
                                  "  setp.ge.u64 %done, %i, %n;\n"
                                  "  @%done bra REPORT;\n"
                                  "  shl.b64 %at, %i, 2;\n"
                                  "  add.u64 %at, %at, %p;\n"
                                  "  ld.global.u32 %got, [%at];\n"
                                  "  setp.eq.u32 %same, %got, %v;\n"
                                  "  @!%same add.u32 %sum, %sum, 1;\n"
                                  "  add.u64 %i, %i, %step;\n"
                                  "  bra LOOP;\n"
                                  "REPORT:\n"
                                  "  setp.eq.u32 %same, %sum, 0;\n"
                                  "  @%same bra END;\n"
                                  "  red.global.add.u32 [%count], %sum;\n"
                                  "END:\n"
                                  "  ret;\n"
                                  "}\n"

                                  ".visible .entry gr_await(.param .u64 p, .param .u32 value, .param .u64 ns)\n"
                                  "{\n"
                                  "  .reg .pred %there, %early;\n"
                                  "  .reg .b64 %p, %ns, %begin, %now;\n"
                                  "  .reg .b32 %v, %got;\n"
                                  "  ld.param.u64 %p, [p];\n"
                                  "  ld.param.u32 %v, [value];\n"
                                  "  ld.param.u64 %ns, [ns];\n"
                                  "  mov.u64 %begin, %globaltimer;\n"
                                  "WAIT:\n"
                                  "  ld.volatile.global.u32 %got, [%p];\n"
                                  "  setp.ge.u32 %there, %got, %v;\n"
                                  "  @%there bra END;\n"
                                  "  mov.u64 %now, %globaltimer;\n"
                                  "  sub.u64 %now, %now, %begin;\n"
                                  "  setp.lo.u64 %early, %now, %ns;\n"
                                  "  @%early bra WAIT;\n"
                                  "END:\n"
                                  "  ret;\n"
                                  "}\n";

#endif
