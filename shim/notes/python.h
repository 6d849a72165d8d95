/*
 * The stack of Python functions that the calling thread is in.
 *
 * A thread that allocates has often released the interpreter's lock (ctypes and PyTorch do so around their calls), and
 * could deadlock if it waited for the lock here. Without the lock it must not call functions of the interpreter that
 * take or count references. But nothing changes the thread's frames during such a call. So they are read in place, by
 * the memory layout of that version of CPython. Before a page is read, the kernel is asked whether it is there. If the
 * layout differs after all, or the interpreter ends meanwhile, names are lost, and the program goes on.
 */
#ifndef GR_PYTHON_H
#define GR_PYTHON_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct gr_python_frame {
        uint64_t code;
        int64_t at;    /* offset in its instructions, in bytes */
        uint64_t mark; /* tells it from a later code object at the same address */
};

/* Looks for an interpreter. Called when libraries have been loaded or unloaded. False: another thread is doing that. */
bool gr_python_find(void);

/* The frames of the calling thread, the innermost first. Returns how many, at most `most`; 0: it is not in Python. */
unsigned gr_python_frames(struct gr_python_frame *ret, unsigned most);

/* Whether the address is in the interpreter's loop. From there outward, Python's frames say more than native ones. */
bool gr_python_is_loop(uintptr_t address);

/*
 * Writes the frame's function and file, each with its NUL, and its line. Returns the bytes written; 0: cannot be read.
 * text_bytes: 8 or more. Must be called before the thread returns to Python, which may free what the frame names.
 */
size_t gr_python_name(const struct gr_python_frame *frame, char *text, size_t text_bytes, uint32_t *ret_line);

#endif
