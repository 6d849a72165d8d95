/*
 * The stack of Python functions that the calling thread is in.
 *
 * Whoever allocates often has released the interpreter's lock (ctypes and PyTorch do so around their calls), and
 * waiting for it could deadlock. Then no function of the interpreter may be called that takes or counts references. But
 * a thread in such a call does not change its frames, and nobody else does. So they are read where they lie, in the
 * layout of that version of CPython. Before a page is read the kernel is asked whether it is there: where the layout is
 * another one after all, or the interpreter ends meanwhile, names are lost, and the program goes on.
 */
#ifndef GR_PYTHON_H
#define GR_PYTHON_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct gr_python_frame {
        uint64_t code;
        int64_t at;    /* byte in its instructions */
        uint64_t mark; /* tells another code object at the same address apart */
};

/* Looks for an interpreter; called when libraries have been loaded or unloaded. False: another thread does so. */
bool gr_python_find(void);

/* The frames of the calling thread, the innermost first. Returns how many, at most `most`; 0: it is not in Python. */
unsigned gr_python_frames(struct gr_python_frame *ret, unsigned most);

/* Whether this is an address in the interpreter's loop: what called it is told by Python's frames. */
bool gr_python_is_loop(uintptr_t address);

/*
 * Writes the frame's function and file, each with its NUL, and its line. Returns the bytes written; 0: cannot be read.
 * text_bytes: 8 or more. To be called in the call in which gr_python_frames was.
 */
size_t gr_python_name(const struct gr_python_frame *frame, char *text, size_t text_bytes, uint32_t *ret_line);

#endif
