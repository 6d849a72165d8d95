/*
 * dlsym. Look-ups of names that are none of cu[A-Z]*, cup* and nvml*, and all look-ups with RTLD_NEXT, jump to the C
 * library's dlsym with stack and arguments as the caller made them, because the meaning of RTLD_NEXT and RTLD_DEFAULT
 * depends on the return address. The others call gr_lookup_dlsym first. It returns the pointer to answer, or 1 to
 * answer NULL, or 0 for the answer of the C library's dlsym.
 */
#if defined(__x86_64__)
#ifdef __CET__
#include <cet.h>
#else
#define _CET_ENDBR
#endif
        .text
        .globl  dlsym
        .type   dlsym, @function
        .p2align 4
dlsym:
        .cfi_startproc
        _CET_ENDBR
        testq   %rsi, %rsi
        jz      .Lreal
        cmpb    $'c', (%rsi)
        jne     .Lnvml
        cmpb    $'u', 1(%rsi)
        jne     .Lreal
        movzbl  2(%rsi), %eax
        cmpl    $'p', %eax
        je      .Lask
        subl    $'A', %eax
        cmpl    $25, %eax
        ja      .Lreal
.Lask:
        cmpq    $-1, %rdi               /* RTLD_NEXT */
        je      .Lreal
        pushq   %rdi
        .cfi_adjust_cfa_offset 8
        pushq   %rsi
        .cfi_adjust_cfa_offset 8
        subq    $8, %rsp
        .cfi_adjust_cfa_offset 8
        call    gr_lookup_dlsym
        addq    $8, %rsp
        .cfi_adjust_cfa_offset -8
        popq    %rsi
        .cfi_adjust_cfa_offset -8
        popq    %rdi
        .cfi_adjust_cfa_offset -8
        testq   %rax, %rax
        jz      .Lreal
        cmpq    $1, %rax
        jne     .Lanswer
        xorl    %eax, %eax
.Lanswer:
        ret
.Lnvml:                                 /* byte by byte: what follows the NUL may not be there */
        cmpb    $'n', (%rsi)
        jne     .Lreal
        cmpb    $'v', 1(%rsi)
        jne     .Lreal
        cmpb    $'m', 2(%rsi)
        jne     .Lreal
        cmpb    $'l', 3(%rsi)
        je      .Lask
.Lreal:
        movq    gr_real_dlsym(%rip), %rax
        testq   %rax, %rax
        jz      .Lfirst
        jmpq    *%rax
.Lfirst:
        pushq   %rdi
        .cfi_adjust_cfa_offset 8
        pushq   %rsi
        .cfi_adjust_cfa_offset 8
        subq    $8, %rsp
        .cfi_adjust_cfa_offset 8
        call    gr_real_find_dlsym
        addq    $8, %rsp
        .cfi_adjust_cfa_offset -8
        popq    %rsi
        .cfi_adjust_cfa_offset -8
        popq    %rdi
        .cfi_adjust_cfa_offset -8
        jmpq    *%rax
        .cfi_endproc
        .size   dlsym, .-dlsym
#elif defined(__aarch64__)
        .text
        .globl  dlsym
        .type   dlsym, %function
        .p2align 4
dlsym:
        .cfi_startproc
        hint    #34                     /* bti c, a no-op where there is none */
        cbz     x1, .Lreal
        ldrb    w9, [x1]
        cmp     w9, #'c'
        b.ne    .Lnvml
        ldrb    w9, [x1, #1]
        cmp     w9, #'u'
        b.ne    .Lreal
        ldrb    w9, [x1, #2]
        cmp     w9, #'p'
        b.eq    .Lask
        sub     w9, w9, #'A'
        cmp     w9, #25
        b.hi    .Lreal
.Lask:
        cmn     x0, #1                  /* RTLD_NEXT */
        b.eq    .Lreal
        stp     x29, x30, [sp, #-32]!
        .cfi_adjust_cfa_offset 32
        .cfi_offset 29, -32
        .cfi_offset 30, -24
        stp     x0, x1, [sp, #16]
        mov     x29, sp
        bl      gr_lookup_dlsym
        mov     x9, x0
        ldp     x0, x1, [sp, #16]
        ldp     x29, x30, [sp], #32
        .cfi_restore 29
        .cfi_restore 30
        .cfi_adjust_cfa_offset -32
        cbz     x9, .Lreal
        cmp     x9, #1
        csel    x0, xzr, x9, eq
        ret
.Lnvml:                                 /* byte by byte: what follows the NUL may not be there */
        cmp     w9, #'n'
        b.ne    .Lreal
        ldrb    w9, [x1, #1]
        cmp     w9, #'v'
        b.ne    .Lreal
        ldrb    w9, [x1, #2]
        cmp     w9, #'m'
        b.ne    .Lreal
        ldrb    w9, [x1, #3]
        cmp     w9, #'l'
        b.eq    .Lask
.Lreal:
        adrp    x16, gr_real_dlsym      /* a jump by x16 or x17 may land on "bti c" */
        ldr     x16, [x16, :lo12:gr_real_dlsym]
        cbz     x16, .Lfirst
        br      x16
.Lfirst:
        stp     x29, x30, [sp, #-32]!
        .cfi_adjust_cfa_offset 32
        .cfi_offset 29, -32
        .cfi_offset 30, -24
        stp     x0, x1, [sp, #16]
        mov     x29, sp
        bl      gr_real_find_dlsym
        mov     x16, x0
        ldp     x0, x1, [sp, #16]
        ldp     x29, x30, [sp], #32
        .cfi_restore 29
        .cfi_restore 30
        .cfi_adjust_cfa_offset -32
        br      x16
        .cfi_endproc
        .size   dlsym, .-dlsym

/* Says that indirect jumps into this file land on a bti: without it the linker drops BTI for the whole library. */
        .section .note.gnu.property, "a", %note
        .p2align 3
        .word   4, 16, 5                /* lengths of name and content; NT_GNU_PROPERTY_TYPE_0 */
        .asciz  "GNU"
        .word   0xc0000000, 4, 1, 0     /* AArch64's features, four bytes: BTI; padding */
#else
#error "dlsym needs a tail jump for this processor"
#endif
        .section .note.GNU-stack, "", %progbits
