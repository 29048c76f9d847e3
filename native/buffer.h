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

enum { BUFFER_OWN_BYTES = 1024 };

/* Small contents stay in `own`, so that most messages need no allocation. */
typedef struct {
    unsigned char *data;
    size_t size, capacity;
    unsigned char own[BUFFER_OWN_BYTES];
} buffer;

static inline void buffer_init(buffer *into)
{
    into->data = into->own;
    into->size = 0;
    into->capacity = BUFFER_OWN_BYTES;
}

static inline void buffer_free(buffer *from)
{
    if (from->data != from->own)
        PyMem_Free(from->data);
}

/* Makes room for `more` bytes and counts them; returns where they begin, or NULL with an error. */
static inline unsigned char *buffer_extend(buffer *into, size_t more)
{
    if (more > into->capacity - into->size) {
        bool fits = more <= (size_t)PY_SSIZE_T_MAX / 2 - into->size;
        size_t capacity = fits ? 2 * (into->size + more) : 0;
        unsigned char *grown = fits ? PyMem_Malloc(capacity) : NULL;
        if (grown == NULL)
            return (unsigned char *)PyErr_NoMemory();
        memcpy(grown, into->data, into->size);
        buffer_free(into);
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
