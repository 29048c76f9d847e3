/* What the files of the native twin share.
 *
 * Functions that make Python objects return NULL, and others -1, where they fail. In the codec they do
 * so without an exception where the plain twin shall go on.
 */
#ifndef WEFT_NATIVE_H
#define WEFT_NATIVE_H

#include "buffer.h"
#include "dlpack.h"

/* Objects of Python that all files need; each is owned, and constant after the initialisation. */
typedef struct {
    const dlpack_api *dlpack;
    PyObject *tensor_type, *parameter_type, *strided_layout;
    PyObject *frame_type, *ordered_dict;
    PyObject *decode_call; /* The plain twin. */
    PyObject *has_modes;   /* Whether torch has modes or transforms, or traces. */
} library_parts;

extern library_parts library;

/* Returns whether a value, which may be NULL, is true, or -1; takes the reference. */
static inline int is_true(PyObject *value)
{
    int found = value == NULL ? -1 : PyObject_IsTrue(value);
    Py_XDECREF(value);
    return found;
}

int tensors_init(void);
PyObject *tensors_set_dtype(PyObject *module, PyObject *arguments);
/* Returns a new bytearray with `front` bytes for the caller to write, and a list of tensors behind
 * them; None for the plain twin. */
PyObject *tensors_behind(PyObject *tensors, size_t front, bool *requires_grad);
PyObject *tensors_encode(PyObject *module, PyObject *tensors);
PyObject *tensors_decode(PyObject *module, PyObject *const *arguments, Py_ssize_t count);

PyObject *values_set_parts(PyObject *module, PyObject *arguments);
PyObject *values_encode(PyObject *module, PyObject *const *arguments, Py_ssize_t count);
PyObject *values_decode(PyObject *module, PyObject *const *arguments, Py_ssize_t count);

PyObject *call_encode(PyObject *module, PyObject *const *arguments, Py_ssize_t count);
PyObject *call_encode_result(PyObject *module, PyObject *arguments);
PyObject *call_decode(PyObject *module, PyObject *control);
PyObject *call_decode_message(PyObject *module, PyObject *arguments);

#endif
