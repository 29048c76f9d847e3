/* A growing buffer of bytes, and the reader of one that came from a peer. */
#ifndef WEFT_BUFFER_H
#define WEFT_BUFFER_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#if PY_BIG_ENDIAN
#error "the wire format is little-endian, and this code copies numbers as they are"
#endif

enum { BUFFER_BYTES = 256 }; /* Most messages need no second allocation. */

/* Empty if all is 0; the owner of a buffer frees `data` with PyMem_Free. */
typedef struct {
    unsigned char *data;
    size_t size, capacity;
} buffer;

/* Makes room for `more` bytes and counts them; returns where they begin, or NULL with an error. */
static inline unsigned char *buffer_extend(buffer *into, size_t more)
{
    if (more > into->capacity - into->size) {
        bool fits = more <= (size_t)PY_SSIZE_T_MAX / 2 - BUFFER_BYTES - into->size;
        size_t capacity = 2 * (into->size + more) + BUFFER_BYTES;
        unsigned char *grown = fits ? PyMem_Realloc(into->data, capacity) : NULL;
        if (grown == NULL)
            return (unsigned char *)PyErr_NoMemory();
        into->data = grown;
        into->capacity = capacity;
    }
    unsigned char *begin = into->data + into->size;
    into->size += more;
    return begin;
}

static inline int buffer_add(buffer *into, const void *bytes, size_t size)
{
    unsigned char *begin = buffer_extend(into, size);
    if (begin == NULL)
        return -1;
    if (size)
        memcpy(begin, bytes, size);
    return 0;
}

/* Reads from front to end. `end` is behind the last byte; nothing is read beyond it. */
typedef struct {
    const unsigned char *at, *end;
} reader;

static inline size_t reader_left(const reader *from)
{
    return (size_t)(from->end - from->at);
}

/* Copies `size` bytes out; returns 0, or -1 without an error if there are fewer. */
static inline int reader_take(reader *from, void *into, size_t size)
{
    if (reader_left(from) < size)
        return -1;
    memcpy(into, from->at, size);
    from->at += size;
    return 0;
}

#endif
