/* Small tensors as bytes inside their message; the plain twin is engine/codec/tensors.py.
 *
 * Layout of each tensor, little-endian:
 *
 *     dtype u8 | flags u8 | dimensions u8 | size in bytes u32 | u64 a dimension
 *     with the flag STRIDED: u64 a stride, in elements
 *     with the flag SHARED as well: offset u64, in elements | place u64 of the tensor with the memory
 *     memory
 *
 * Tensors are read and made through DLPack's table of functions. This file handles dense tensors on
 * the CPU that do not overlap. The plain twin takes all others, and tells what is wrong with malformed
 * bytes: functions return -1 for both, with or without an exception.
 */
#include "native.h"

#include <stdlib.h>

enum { REQUIRES_GRAD = 1, PARAMETER = 2, COMPUTED = 16 };
enum {
    MOST_DIMENSIONS = 8,
    HEAD_BYTES = 7,
    /* The same limits as in tensors.py. */
    LIMIT_BYTES = 260 * 1024,
    FURTHER_BYTES = 8 * 1024,
    MESSAGE_LIMIT_BYTES = 2 << 20,
    /* An extent up to this size travels whole, whatever part of it a tensor uses; the plain twin
     * looks at the others. */
    SMALL_EXTENT_BYTES = 4096,
    ALIGNMENT = 64,
    MOST_TENSORS = 256,
};
/* Few tensors begin below it; those of a storage that the program has freed do. */
#define USUAL_ADDRESS ((uintptr_t)1 << 40)

/* A dtype by its number on the wire. */
typedef struct {
    bool is_known, is_differentiable;
    uint8_t item_bytes;
    dlpack_dtype dtype;
} dtype_entry;

static dtype_entry dtypes[256];

/* set_dtype(dtype, number on the wire, code and bits of DLPack, whether it is differentiable); called
 * once for each. */
PyObject *tensors_set_dtype(PyObject *Py_UNUSED(module), PyObject *arguments)
{
    int is_differentiable;
    unsigned char number, code, bits;
    PyObject *dtype;
    if (!PyArg_ParseTuple(arguments, "Obbbp", &dtype, &number, &code, &bits, &is_differentiable))
        return NULL;
    dtypes[number] = (dtype_entry){true, is_differentiable, bits / 8, {code, bits, 1}};
    if (PyDict_SetItem(library.dtype_numbers, dtype, PyTuple_GET_ITEM(arguments, 1)))
        return NULL;
    Py_RETURN_NONE;
}

/* Returns the elements of memory from the first to the last one of a tensor; -1 if they, or the
 * elements of its shape, exceed any memory. A contiguous one needs no strides. */
static int64_t extent(const int64_t *shape, const int64_t *strides, int ndim)
{
    int64_t count = 1, last = 1, step;
    bool is_empty = false;
    for (int index = 0; index < ndim; index++) {
        is_empty |= shape[index] == 0;
        /* Without sizes of 0: torch multiplies the others, to get strides. */
        if (shape[index] < 0 || __builtin_mul_overflow(count, shape[index] ? shape[index] : 1, &count))
            return -1;
        if (strides != NULL && (strides[index] < 0 ||
                                __builtin_mul_overflow(shape[index] - 1, strides[index], &step) ||
                                __builtin_add_overflow(last, step, &last)))
            return -1;
    }
    return is_empty ? 0 : strides != NULL ? last : count;
}

static bool is_contiguous(const int64_t *shape, const int64_t *strides, int ndim)
{
    int64_t step = 1;
    for (int index = ndim - 1; index >= 0; index--) {
        if (shape[index] != 1 && strides[index] != step)
            return false;
        step *= shape[index];
    }
    return true;
}

PyObject *left_to_plain(PyObject *result)
{
    if (PyErr_Occurred() && !PyErr_ExceptionMatches(PyExc_Exception))
        return NULL; /* Such as KeyboardInterrupt. */
    PyErr_Clear();
    return Py_NewRef(result);
}

/* ---------------------------------------------------------------------------------- Encoding */

/* A tensor on its way into a message. */
typedef struct {
    dlpack_tensor view; /* Borrowed from the tensor, which the caller's list keeps alive. */
    const unsigned char *memory;
    uint8_t number, flags;
    size_t size_bytes;
} described;

/* Sets the flags of a tensor that can require grad. The plain twin takes negatives and conjugates. */
static int find_grad(PyObject *tensor, const dlpack_dtype *dtype, uint8_t *flags)
{
    if (is_true(PyObject_CallMethodNoArgs(tensor, names[NAME_IS_NEG])) ||
        (dtype->code == DLPACK_COMPLEX &&
         is_true(PyObject_CallMethodNoArgs(tensor, names[NAME_IS_CONJ]))))
        return -1;
    int requires_grad = is_true(PyObject_GetAttr(tensor, names[NAME_REQUIRES_GRAD]));
    int is_leaf = requires_grad > 0 ? is_true(PyObject_GetAttr(tensor, names[NAME_IS_LEAF])) : 1;
    if (requires_grad > 0)
        *flags |= is_leaf ? REQUIRES_GRAD : REQUIRES_GRAD | COMPUTED;
    return requires_grad < 0 || is_leaf < 0 ? -1 : 0;
}

static int describe(PyObject *tensor, described *into)
{
    PyObject *type = (PyObject *)Py_TYPE(tensor);
    if (type != library.tensor_type && type != library.parameter_type)
        return -1;
    into->flags = type == library.parameter_type ? PARAMETER : 0;
    /* To ask DLPack for the memory of another layout or dtype would raise an exception of C++, which
     * takes a millisecond. */
    PyObject *layout = PyObject_GetAttr(tensor, names[NAME_LAYOUT]);
    PyObject *dtype = layout == library.strided_layout ? PyObject_GetAttr(tensor, names[NAME_DTYPE]) : NULL;
    PyObject *number = dtype == NULL ? NULL : PyDict_GetItemWithError(library.dtype_numbers, dtype);
    Py_XDECREF(layout);
    Py_XDECREF(dtype);
    if (number == NULL || library.dlpack->borrow(tensor, &into->view))
        return -1;
    into->number = (uint8_t)PyLong_AsLong(number);
    const dlpack_tensor *view = &into->view;
    if (view->device.type != DLPACK_CPU || view->ndim > MOST_DIMENSIONS)
        return -1;
    if (dtypes[into->number].is_differentiable && find_grad(tensor, &view->dtype, &into->flags))
        return -1;
    int64_t length = extent(view->shape, view->strides, view->ndim);
    if (length < 0 || length > MESSAGE_LIMIT_BYTES)
        return -1;
    into->memory = (const unsigned char *)view->data + view->byte_offset;
    into->size_bytes = (size_t)length * dtypes[into->number].item_bytes;
    if (length == 0)
        return 0;
    if ((uintptr_t)into->memory < USUAL_ADDRESS)
        return -1;
    if (is_contiguous(view->shape, view->strides, view->ndim))
        return 0;
    into->flags |= STRIDED;
    return into->size_bytes > SMALL_EXTENT_BYTES ? -1 : 0;
}

static size_t described_bytes(const described *each)
{
    size_t places = (size_t)each->view.ndim * (each->flags & STRIDED ? 2 : 1);
    return HEAD_BYTES + 8 * places + each->size_bytes;
}

/* Copies bytes; returns where they end. Neither place may be one to copy from if there are none. */
static unsigned char *write_bytes(unsigned char *at, const void *bytes, size_t size)
{
    if (size)
        memcpy(at, bytes, size);
    return at + size;
}

/* Writes `described_bytes`; returns where they end. */
static unsigned char *write_tensor(unsigned char *at, const described *each)
{
    const dlpack_tensor *view = &each->view;
    uint32_t size_bytes = (uint32_t)each->size_bytes;
    size_t sizes_bytes = 8 * (size_t)view->ndim;
    *at++ = each->number;
    *at++ = each->flags;
    *at++ = (unsigned char)view->ndim;
    at = write_bytes(at, &size_bytes, 4);
    at = write_bytes(at, view->shape, sizes_bytes);
    at = write_bytes(at, view->strides, each->flags & STRIDED ? sizes_bytes : 0);
    return write_bytes(at, each->memory, each->size_bytes);
}

/* Returns whether some tensors overlap in memory, by the bytes that travel. */
static bool some_overlap(const described *all, size_t count)
{
    for (const described *one = all; one < all + count; one++)
        for (const described *other = all; other < one; other++)
            if (one->size_bytes && other->size_bytes &&
                one->memory < other->memory + other->size_bytes &&
                other->memory < one->memory + one->size_bytes)
                return true;
    return false;
}

PyObject *tensors_behind(PyObject *tensors, const buffer *front, bool *requires_grad)
{
    described all[MOST_TENSORS];
    uint8_t all_flags = 0;
    size_t count = (size_t)PyList_GET_SIZE(tensors), total = 0, place = 0;
    size_t limit = LIMIT_BYTES + (count ? count - 1 : 0) * FURTHER_BYTES;
    if (limit > MESSAGE_LIMIT_BYTES)
        limit = MESSAGE_LIMIT_BYTES;
    for (; place < count && count <= MOST_TENSORS && total <= limit; place++) {
        if (describe(PyList_GET_ITEM(tensors, place), &all[place]))
            return left_to_plain(Py_None);
        total += described_bytes(&all[place]);
        all_flags |= all[place].flags;
    }
    if (place < count || total > limit || (count > 1 && some_overlap(all, count)) ||
        (requires_grad == NULL && all_flags & REQUIRES_GRAD))
        Py_RETURN_NONE;
    PyObject *made = PyByteArray_FromStringAndSize(NULL, (Py_ssize_t)(front->size + total));
    if (made == NULL)
        return NULL;
    unsigned char *at = write_bytes((unsigned char *)PyByteArray_AS_STRING(made), front->data, front->size);
    for (place = 0; place < count; place++)
        at = write_tensor(at, &all[place]);
    if (requires_grad != NULL)
        *requires_grad = all_flags & REQUIRES_GRAD;
    return made;
}

/* encode_tensors(tensors) -> (bytearray, some require grad), or None for the plain twin. */
PyObject *tensors_encode(PyObject *Py_UNUSED(module), PyObject *tensors)
{
    bool requires_grad;
    PyObject *list = PySequence_List(tensors);
    PyObject *made = list == NULL ? NULL : tensors_behind(list, &(buffer){0}, &requires_grad);
    Py_XDECREF(list);
    return made == NULL || made == Py_None ? made : Py_BuildValue("NN", made, PyBool_FromLong(requires_grad));
}

/* ---------------------------------------------------------------------------------- Decoding */

/* The head of one tensor, as it was received. */
typedef struct {
    uint8_t number, flags, ndim;
    uint32_t size_bytes;
    int64_t sizes[2 * MOST_DIMENSIONS]; /* The shape, and behind it the strides of a STRIDED one. */
} head;

/* Reads a head, and checks that as much memory follows as it says. */
static int read_head(reader *from, head *into)
{
    unsigned char bytes[HEAD_BYTES];
    if (reader_take(from, bytes, HEAD_BYTES))
        return -1;
    into->number = bytes[0];
    into->flags = bytes[1];
    into->ndim = bytes[2];
    memcpy(&into->size_bytes, bytes + 3, 4);
    const dtype_entry *dtype = &dtypes[into->number];
    uint8_t grad_flags = into->flags & (REQUIRES_GRAD | COMPUTED);
    if (into->flags & ~(PARAMETER | STRIDED | grad_flags) || grad_flags == COMPUTED ||
        (grad_flags && !dtype->is_differentiable) || !dtype->is_known ||
        into->ndim > MOST_DIMENSIONS)
        return -1;
    bool is_strided = into->flags & STRIDED;
    if (reader_take(from, into->sizes, (is_strided ? 16 : 8) * (size_t)into->ndim))
        return -1;
    int64_t length = extent(into->sizes, is_strided ? into->sizes + into->ndim : NULL, into->ndim);
    if (length < is_strided || length > UINT32_MAX ||
        (uint64_t)length * dtype->item_bytes != into->size_bytes)
        return -1;
    return reader_left(from) < into->size_bytes ? -1 : 0;
}

/* A tensor's memory and its description in one block. */
typedef struct {
    dlpack_managed managed;
    int64_t sizes[2 * MOST_DIMENSIONS];
} owned;

static void free_owned(dlpack_managed *managed)
{
    free(managed->context);
}

/* Makes a tensor with a copy of some memory. */
static PyObject *new_tensor(const head *each, const unsigned char *memory)
{
    /* The memory stands in front, so that it is aligned. */
    size_t rounded = ((size_t)each->size_bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    void *block = NULL, *object = NULL;
    if (posix_memalign(&block, ALIGNMENT, rounded + sizeof(owned)))
        return PyErr_NoMemory();
    memcpy(block, memory, each->size_bytes);
    owned *made = (owned *)((unsigned char *)block + rounded);
    memcpy(made->sizes, each->sizes, sizeof made->sizes);
    made->managed = (dlpack_managed){
        .version = {1, 0},
        .context = block,
        .deleter = free_owned,
        .tensor = {.data = block,
                   .device = {DLPACK_CPU, 0},
                   .ndim = each->ndim,
                   .dtype = dtypes[each->number].dtype,
                   .shape = made->sizes,
                   .strides = each->flags & STRIDED ? made->sizes + each->ndim : NULL},
    };
    if (library.dlpack->to_object(&made->managed, &object)) {
        free(block);
        return NULL;
    }
    return object;
}

/* Reads the next tensor, and adds its flags to those of all; without a place for them, it has none. */
static int read_tensor(reader *from, PyObject *tensors, buffer *flags, uint8_t *all_flags)
{
    head each = {0};
    if (read_head(from, &each))
        return -1;
    uint8_t noted = each.flags & ~STRIDED;
    *all_flags |= noted;
    if (flags == NULL ? noted : buffer_add(flags, &noted, 1))
        return -1;
    PyObject *tensor = new_tensor(&each, from->at);
    int status = tensor == NULL ? -1 : PyList_Append(tensors, tensor);
    Py_XDECREF(tensor);
    from->at += each.size_bytes;
    return status;
}

PyObject *tensors_read(reader from, buffer *flags, uint8_t *all_flags)
{
    PyObject *tensors = reader_left(&from) > MESSAGE_LIMIT_BYTES ? NULL : PyList_New(0);
    while (tensors != NULL && from.at < from.end)
        if (read_tensor(&from, tensors, flags, all_flags))
            Py_CLEAR(tensors);
    return tensors;
}

/* decode_tensors(data, position) -> (tensors, a byte of flags for each, or none if no tensor needs a
 * closer look), or None for the plain twin. */
PyObject *tensors_decode(PyObject *Py_UNUSED(module), PyObject *const *arguments, Py_ssize_t count)
{
    Py_buffer data;
    if (count != 2)
        return PyErr_Format(PyExc_TypeError, "decode_tensors takes two arguments");
    Py_ssize_t position = PyLong_AsSsize_t(arguments[1]);
    if (PyErr_Occurred() || PyObject_GetBuffer(arguments[0], &data, PyBUF_SIMPLE))
        return NULL;
    const unsigned char *begin = data.buf;
    PyObject *made = NULL, *tensors = NULL;
    buffer flags = {0};
    uint8_t all_flags = 0;
    if (position >= 0 && position <= data.len)
        tensors = tensors_read((reader){begin + position, begin + data.len}, &flags, &all_flags);
    if (tensors != NULL)
        made = Py_BuildValue("Ny#", tensors, all_flags ? (char *)flags.data : "",
                             all_flags ? (Py_ssize_t)flags.size : (Py_ssize_t)0);
    PyMem_Free(flags.data);
    PyBuffer_Release(&data);
    return made == NULL ? left_to_plain(Py_None) : made;
}
