/* The part of the DLPack specification (version 1) that the native twin uses.
 *
 * DLPack is an open interface for tensors in memory: https://dmlc.github.io/dlpack. Classes of
 * tensors offer a table of functions in a capsule, `__dlpack_c_exchange_api__`. So C code reads and
 * makes tensors without the headers and the binary interface of their library.
 */
#ifndef WEFT_DLPACK_H
#define WEFT_DLPACK_H

#include <stdint.h>

enum { DLPACK_CPU = 1, DLPACK_COMPLEX = 5 };

typedef struct {
    uint32_t major, minor;
} dlpack_version;

typedef struct {
    int32_t type, index;
} dlpack_device;

typedef struct {
    uint8_t code, bits;
    uint16_t lanes;
} dlpack_dtype;

/* Strides count elements. The arrays belong to whoever filled the structure in. */
typedef struct {
    void *data;
    dlpack_device device;
    int32_t ndim;
    dlpack_dtype dtype;
    int64_t *shape, *strides;
    uint64_t byte_offset;
} dlpack_tensor;

/* A tensor that owns its memory; `deleter` frees all of it, in any thread. */
typedef struct dlpack_managed {
    dlpack_version version;
    void *context;
    void (*deleter)(struct dlpack_managed *self);
    uint64_t flags;
    dlpack_tensor tensor;
} dlpack_managed;

/* Functions return 0, or -1 with a Python exception set. Those with "no_sync" do not wait for a
 * device. `borrow` fills in a view that is valid for as long as the object lives unchanged.
 * `to_object` takes the ownership of the managed tensor over if it succeeds. */
typedef struct {
    dlpack_version version;
    void *previous; /* A table of an older version. */
    void *allocate;
    int (*managed_of)(void *object, dlpack_managed **out);
    int (*to_object)(dlpack_managed *tensor, void **out);
    int (*borrow)(void *object, dlpack_tensor *out);
    void *current_stream;
} dlpack_api;

#endif
