/* Small tensors as bytes inside their message; the plain twin is serialize/inline.py.
 *
 * Layout of each tensor, little-endian:
 *
 *     dtype u8 | flags u8 | dimensions u8 | size in bytes u32 | u64 a dimension
 *     with the flag STRIDED: u64 a stride, in elements
 *     with the flag SHARED as well: offset u64, in elements | place u64 of the tensor with the memory
 *     memory
 *
 * Tensors are read and made through DLPack's table of functions. This file handles dense tensors on
 * the CPU that do not overlap. Whatever else there is goes to the plain twin.
 */
#include "native.h"

#include <stdbool.h>
#include <stdlib.h>

enum {
    REQUIRES_GRAD = 1,
    PARAMETER = 2,
    STRIDED = 4,
    SHARED = 8,
    COMPUTED = 16,
    ALL_FLAGS = REQUIRES_GRAD | PARAMETER | STRIDED | SHARED | COMPUTED,
};
enum {
    MOST_DIMENSIONS = 8,
    HEAD_BYTES = 7,
    /* The same limits as in inline.py. */
    LIMIT_BYTES = 68 * 1024,
    FURTHER_BYTES = 8 * 1024,
    MESSAGE_LIMIT_BYTES = 2 << 20,
    /* An extent up to this size travels whole, whatever part of it a tensor uses. */
    SMALL_EXTENT_BYTES = 4096,
    ALIGNMENT = 64,
    MOST_TENSORS = 256, /* The plain twin takes a message with more. */
};
/* Few tensors begin below it; those of a storage that the program has freed do. */
#define USUAL_ADDRESS ((uintptr_t)1 << 40)

/* A dtype by its number on the wire. */
typedef struct {
    bool is_known, is_differentiable, is_complex;
    uint8_t item_bytes;
    dlpack_dtype dtype;
} dtype_entry;

static dtype_entry dtypes[256];
/* Numbers on the wire by dtype, as objects of Python. */
static PyObject *numbers;

static PyObject *name_dtype, *name_requires_grad, *name_is_leaf, *name_layout, *name_is_neg, *name_is_conj;

/* A tensor on its way into a message. */
typedef struct {
    dlpack_tensor view; /* Borrowed from the tensor, which the caller's list keeps alive. */
    uint8_t number, flags;
    size_t size_bytes;
} described;

int tensors_init(void)
{
    numbers = PyDict_New();
    name_dtype = PyUnicode_InternFromString("dtype");
    name_requires_grad = PyUnicode_InternFromString("requires_grad");
    name_is_leaf = PyUnicode_InternFromString("is_leaf");
    name_layout = PyUnicode_InternFromString("layout");
    name_is_neg = PyUnicode_InternFromString("is_neg");
    name_is_conj = PyUnicode_InternFromString("is_conj");
    if (!numbers || !name_dtype || !name_requires_grad || !name_is_leaf || !name_layout || !name_is_neg || !name_is_conj)
        return -1;
    return 0;
}

/* set_dtype(dtype, number on the wire, code and bits of DLPack, whether it is differentiable, whether
 * it is complex); called once for each. */
PyObject *tensors_set_dtype(PyObject *Py_UNUSED(module), PyObject *arguments)
{
    int number, code, bits, is_differentiable, is_complex;
    PyObject *dtype;
    if (!PyArg_ParseTuple(arguments, "Oiiipp", &dtype, &number, &code, &bits, &is_differentiable,
                          &is_complex))
        return NULL;
    if (number < 0 || number > 254 || code < 0 || code > UINT8_MAX || bits < 8 || bits % 8 ||
        bits > UINT8_MAX)
        return PyErr_Format(PyExc_ValueError, "a dtype is out of range");
    dtypes[number] = (dtype_entry){true, is_differentiable, is_complex, (uint8_t)(bits / 8),
                                   {(uint8_t)code, (uint8_t)bits, 1}};
    if (PyDict_SetItem(numbers, dtype, PyTuple_GET_ITEM(arguments, 1)))
        return NULL;
    Py_RETURN_NONE;
}

/* Returns whether an attribute, or the result of a method, is true; -1 with an exception. */
static int is_true(PyObject *object, PyObject *name, bool is_method)
{
    PyObject *value = is_method ? PyObject_CallMethodNoArgs(object, name)
                                : PyObject_GetAttr(object, name);
    int found = value == NULL ? -1 : PyObject_IsTrue(value);
    Py_XDECREF(value);
    return found;
}

/* Returns how many elements a tensor has; -1 if that exceeds any memory. */
static int64_t element_count(const int64_t *shape, int ndim)
{
    int64_t count = 1;
    for (int index = 0; index < ndim; index++)
        if (shape[index] == 0)
            return 0;
    for (int index = 0; index < ndim; index++)
        if (shape[index] < 0 || __builtin_mul_overflow(count, shape[index], &count))
            return -1;
    return count;
}

/* Returns the elements from the first to the last one of a tensor that has some; -1 if that
 * exceeds any memory. */
static int64_t extent(const int64_t *shape, const int64_t *strides, int ndim)
{
    int64_t last = 1, step;
    for (int index = 0; index < ndim; index++)
        if (strides[index] < 0 ||
            __builtin_mul_overflow(shape[index] - 1, strides[index], &step) ||
            __builtin_add_overflow(last, step, &last))
            return -1;
    return last;
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

/* Elements that can lie at distinct addresses: expanded dimensions count once. */
static int64_t distinct_count(const int64_t *shape, const int64_t *strides, int ndim)
{
    int64_t count = 1;
    for (int index = 0; index < ndim; index++)
        if (strides[index])
            count *= shape[index];
    return count;
}

/* Returns BEYOND for the errors with which torch refuses a kind of tensor, and clears them. */
static outcome beyond_unless_fatal(void)
{
    if (PyErr_ExceptionMatches(PyExc_Exception)) {
        PyErr_Clear();
        return BEYOND;
    }
    return FAILED; /* Such as KeyboardInterrupt. */
}

/* Finds the number of a tensor's dtype. To ask DLPack for the memory of another dtype would raise
 * an exception of C++, which takes a millisecond. */
static outcome find_number(PyObject *tensor, uint8_t *number)
{
    PyObject *dtype = PyObject_GetAttr(tensor, name_dtype);
    if (dtype == NULL)
        return beyond_unless_fatal();
    PyObject *found = PyDict_GetItemWithError(numbers, dtype);
    Py_DECREF(dtype);
    if (found == NULL)
        return PyErr_Occurred() ? FAILED : BEYOND;
    *number = (uint8_t)PyLong_AsLong(found);
    return DONE;
}

/* Sets the flags of a tensor that can require grad; its negative or conjugate is BEYOND. */
static outcome find_grad(PyObject *tensor, const dtype_entry *dtype, uint8_t *flags)
{
    if (!dtype->is_differentiable)
        return DONE;
    int is_lazy = is_true(tensor, name_is_neg, true);
    if (!is_lazy && dtype->is_complex)
        is_lazy = is_true(tensor, name_is_conj, true);
    int requires_grad = is_lazy ? 0 : is_true(tensor, name_requires_grad, false);
    int is_leaf = requires_grad == 1 ? is_true(tensor, name_is_leaf, false) : 1;
    if (is_lazy < 0 || requires_grad < 0 || is_leaf < 0)
        return beyond_unless_fatal();
    if (requires_grad)
        *flags |= is_leaf ? REQUIRES_GRAD : REQUIRES_GRAD | COMPUTED;
    return is_lazy ? BEYOND : DONE;
}

static outcome describe(PyObject *tensor, described *into)
{
    PyTypeObject *type = Py_TYPE(tensor);
    into->flags = 0;
    if ((PyObject *)type == library.parameter_type)
        into->flags = PARAMETER;
    else if ((PyObject *)type != library.tensor_type)
        return BEYOND;
    PyObject *layout = PyObject_GetAttr(tensor, name_layout);
    if (layout == NULL)
        return beyond_unless_fatal();
    bool is_strided = layout == library.strided_layout;
    Py_DECREF(layout);
    if (!is_strided)
        return BEYOND;
    outcome found = find_number(tensor, &into->number);
    if (found != DONE)
        return found;
    if (library.dlpack->borrow(tensor, &into->view))
        return beyond_unless_fatal();
    const dlpack_tensor *view = &into->view;
    const int64_t *shape = view->shape, *strides = view->strides;
    int ndim = view->ndim;
    if (view->device.type != DLPACK_CPU || ndim > MOST_DIMENSIONS)
        return BEYOND;
    const dtype_entry *dtype = &dtypes[into->number];
    outcome found_grad = find_grad(tensor, dtype, &into->flags);
    if (found_grad != DONE)
        return found_grad;
    int64_t count = element_count(shape, ndim);
    if (count <= 0) {
        into->size_bytes = 0;
        return count < 0 ? BEYOND : DONE;
    }
    if ((uintptr_t)view->data + view->byte_offset < USUAL_ADDRESS)
        return BEYOND;
    if (!is_contiguous(shape, strides, ndim)) {
        int64_t length = extent(shape, strides, ndim);
        if (length < 0 || length > MESSAGE_LIMIT_BYTES)
            return BEYOND;
        if (length * dtype->item_bytes > SMALL_EXTENT_BYTES &&
            length > distinct_count(shape, strides, ndim))
            return BEYOND;
        into->flags |= STRIDED;
        count = length;
    }
    if (count > MESSAGE_LIMIT_BYTES)
        return BEYOND;
    into->size_bytes = (size_t)count * dtype->item_bytes;
    return DONE;
}

static const unsigned char *memory_of(const described *each)
{
    return (const unsigned char *)each->view.data + each->view.byte_offset;
}

static size_t described_bytes(const described *each)
{
    size_t places = (size_t)each->view.ndim * (each->flags & STRIDED ? 2 : 1);
    return HEAD_BYTES + 8 * places + each->size_bytes;
}

static int add_tensor(buffer *into, const described *each)
{
    const dlpack_tensor *view = &each->view;
    uint32_t size_bytes = (uint32_t)each->size_bytes;
    size_t sizes_bytes = 8 * (size_t)view->ndim;
    unsigned char *at = buffer_extend(into, described_bytes(each));
    if (at == NULL)
        return -1;
    at[0] = each->number;
    at[1] = each->flags;
    at[2] = (unsigned char)view->ndim;
    memcpy(at + 3, &size_bytes, 4);
    at += HEAD_BYTES;
    if (sizes_bytes) {
        memcpy(at, view->shape, sizes_bytes);
        at += sizes_bytes;
        if (each->flags & STRIDED) {
            memcpy(at, view->strides, sizes_bytes);
            at += sizes_bytes;
        }
    }
    if (size_bytes)
        memcpy(at, memory_of(each), size_bytes);
    return 0;
}

static int by_memory(const void *first, const void *second)
{
    const described *const *left = first, *const *right = second;
    const unsigned char *a = memory_of(*left), *b = memory_of(*right);
    return (a > b) - (a < b);
}

/* Returns whether some tensors overlap in memory, by the bytes that travel. */
static bool some_overlap(const described *all, size_t count)
{
    const described *sorted[MOST_TENSORS];
    size_t used = 0;
    for (size_t index = 0; index < count; index++)
        if (all[index].size_bytes)
            sorted[used++] = &all[index];
    qsort(sorted, used, sizeof *sorted, by_memory);
    for (size_t index = 1; index < used; index++)
        if (memory_of(sorted[index]) < memory_of(sorted[index - 1]) + sorted[index - 1]->size_bytes)
            return true;
    return false;
}

/* Describes all tensors; BEYOND if they overlap, or have too many bytes for the message. */
static outcome describe_all(PyObject *const *tensors, size_t count, described *all)
{
    size_t total = 0, limit = LIMIT_BYTES + (count ? count - 1 : 0) * FURTHER_BYTES;
    if (limit > MESSAGE_LIMIT_BYTES)
        limit = MESSAGE_LIMIT_BYTES;
    for (size_t index = 0; index < count; index++) {
        outcome found = describe(tensors[index], &all[index]);
        if (found != DONE)
            return found;
        total += described_bytes(&all[index]);
        if (total > limit)
            return BEYOND;
    }
    return count > 1 && some_overlap(all, count) ? BEYOND : DONE;
}

/* encode_tensors(tensors) -> (bytes, some require grad), or None for the plain twin. */
PyObject *tensors_encode(PyObject *Py_UNUSED(module), PyObject *tensors)
{
    described all[MOST_TENSORS];
    PyObject *made = NULL, *fast = PySequence_Fast(tensors, "tensors is no sequence");
    if (fast == NULL)
        return NULL;
    size_t count = (size_t)PySequence_Fast_GET_SIZE(fast);
    outcome done = count > MOST_TENSORS ? BEYOND
                                        : describe_all(PySequence_Fast_ITEMS(fast), count, all);
    bool requires_grad = false;
    buffer content;
    buffer_init(&content);
    for (size_t index = 0; done == DONE && index < count; index++) {
        requires_grad |= all[index].flags & REQUIRES_GRAD;
        done = add_tensor(&content, &all[index]) ? FAILED : DONE;
    }
    if (done == DONE)
        made = Py_BuildValue("y#O", (char *)content.data, (Py_ssize_t)content.size,
                             requires_grad ? Py_True : Py_False);
    else if (done == BEYOND)
        made = Py_NewRef(Py_None);
    buffer_free(&content);
    Py_DECREF(fast);
    return made;
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

/* Makes a tensor with memory of its own; `size_bytes` of `memory` are copied. */
static PyObject *new_tensor(const dtype_entry *dtype, int ndim, const int64_t *shape,
                            const int64_t *strides, const unsigned char *memory, size_t size_bytes)
{
    /* The memory stands in front, so that it is aligned. */
    size_t rounded = (size_bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    void *block = NULL, *object = NULL;
    if (posix_memalign(&block, ALIGNMENT, rounded + sizeof(owned)))
        return PyErr_NoMemory();
    owned *made = (owned *)((unsigned char *)block + rounded);
    if (size_bytes)
        memcpy(block, memory, size_bytes);
    memcpy(made->sizes, shape, 8 * (size_t)ndim);
    memcpy(made->sizes + ndim, strides, 8 * (size_t)ndim);
    made->managed = (dlpack_managed){
        .version = {1, 0},
        .context = block,
        .deleter = free_owned,
        .tensor = {.data = block,
                   .device = {DLPACK_CPU, 0},
                   .ndim = ndim,
                   .dtype = dtype->dtype,
                   .shape = made->sizes,
                   .strides = made->sizes + ndim},
    };
    if (library.dlpack->to_object(&made->managed, &object)) {
        free(block);
        return NULL;
    }
    return object;
}

static PyObject *malformed(const char *text)
{
    PyErr_Format(library.protocol_error, "the tensors of a message are malformed: %s", text);
    return NULL;
}

/* The head of one tensor, as it was received. */
typedef struct {
    uint8_t number, flags, ndim;
    uint32_t size_bytes;
    int64_t shape[MOST_DIMENSIONS], strides[MOST_DIMENSIONS];
} head;

/* Reads `ndim` sizes or strides, none of which exceeds 63 bits. */
static int read_sizes(reader *from, int64_t *into, int ndim)
{
    if (reader_take(from, into, 8 * (size_t)ndim))
        return -1;
    for (int index = 0; index < ndim; index++)
        if (into[index] < 0)
            return -1;
    return 0;
}

/* Reads what stands before the strides; returns 0, or -1 with an exception. */
static int read_head(reader *from, head *into)
{
    unsigned char bytes[HEAD_BYTES];
    if (reader_take(from, bytes, HEAD_BYTES)) {
        malformed("a head is cut short");
        return -1;
    }
    into->number = bytes[0];
    into->flags = bytes[1];
    into->ndim = bytes[2];
    memcpy(&into->size_bytes, bytes + 3, 4);
    if (into->ndim > MOST_DIMENSIONS) {
        malformed("it has too many dimensions");
        return -1;
    }
    if (read_sizes(from, into->shape, into->ndim)) {
        malformed("its shape is cut short, or too large");
        return -1;
    }
    const dtype_entry *dtype = &dtypes[into->number];
    bool has_grad = into->flags & REQUIRES_GRAD;
    if (into->flags & ~ALL_FLAGS || (into->flags & SHARED && !(into->flags & STRIDED)) ||
        (into->flags & COMPUTED && !has_grad) ||
        (has_grad && dtype->is_known && !dtype->is_differentiable)) {
        malformed("its flags are impossible");
        return -1;
    }
    return 0;
}

/* Makes a tensor of which no other one of the message shares the memory. */
static PyObject *read_alone(reader *from, head *each)
{
    const dtype_entry *dtype = &dtypes[each->number];
    int64_t count = element_count(each->shape, each->ndim), length = count;
    if (count < 0)
        return malformed("its shape is too large");
    if (each->flags & STRIDED) {
        if (read_sizes(from, each->strides, each->ndim))
            return malformed("its strides are cut short, or too large");
        length = count ? extent(each->shape, each->strides, each->ndim) : -1;
        if (length < 0)
            return malformed("its strides fit no memory");
    } else {
        int64_t step = 1;
        for (int index = each->ndim - 1; index >= 0; index--) {
            each->strides[index] = step;
            if (each->shape[index] > 1 && __builtin_mul_overflow(step, each->shape[index], &step))
                return malformed("its shape is too large");
        }
    }
    if (length > UINT32_MAX || (uint64_t)length * dtype->item_bytes != each->size_bytes)
        return malformed("its shape does not fit its size in bytes");
    if (reader_left(from) < each->size_bytes)
        return malformed("its memory is cut short");
    PyObject *made = new_tensor(dtype, each->ndim, each->shape, each->strides, from->at,
                                each->size_bytes);
    from->at += each->size_bytes;
    return made;
}

/* decode_tensors(data, position) -> (tensors, a byte of flags for each, or none if no tensor needs a
 * closer look), or None for the plain twin. */
PyObject *tensors_decode(PyObject *Py_UNUSED(module), PyObject *const *arguments, Py_ssize_t count)
{
    Py_buffer data;
    PyObject *tensors = NULL, *made = NULL;
    buffer flags;
    bool has_flags = false;
    if (count != 2) {
        PyErr_SetString(PyExc_TypeError, "decode_tensors takes two arguments");
        return NULL;
    }
    Py_ssize_t position = PyLong_AsSsize_t(arguments[1]);
    if (position == -1 && PyErr_Occurred())
        return NULL;
    if (PyObject_GetBuffer(arguments[0], &data, PyBUF_SIMPLE))
        return NULL;
    buffer_init(&flags);
    if (position < 0 || position > data.len) {
        malformed("they begin behind the end");
        goto end;
    }
    const unsigned char *begin = data.buf;
    reader from = {begin + position, begin + data.len};
    if (reader_left(&from) > MESSAGE_LIMIT_BYTES) {
        malformed("they have too many bytes");
        goto end;
    }
    tensors = PyList_New(0);
    if (tensors == NULL)
        goto end;
    while (from.at < from.end) {
        head each;
        if (read_head(&from, &each))
            goto end;
        if (each.flags & SHARED || !dtypes[each.number].is_known) {
            made = Py_NewRef(Py_None);
            goto end;
        }
        PyObject *tensor = read_alone(&from, &each);
        if (tensor == NULL)
            goto end;
        uint8_t noted = each.flags & ~STRIDED;
        has_flags |= noted != 0;
        int is_failed = PyList_Append(tensors, tensor) || buffer_add(&flags, &noted, 1);
        Py_DECREF(tensor);
        if (is_failed)
            goto end;
    }
    made = Py_BuildValue("Oy#", tensors, flags.data, has_flags ? (Py_ssize_t)flags.size : 0);
end:
    buffer_free(&flags);
    Py_XDECREF(tensors);
    PyBuffer_Release(&data);
    return made;
}
