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
} library_parts;

extern library_parts library;

static inline unsigned char *bytes_of(PyObject *made)
{
    return (unsigned char *)(PyBytes_Check(made) ? PyBytes_AS_STRING(made) : PyByteArray_AS_STRING(made));
}

int tensors_init(void);
PyObject *tensors_set_dtype(PyObject *module, PyObject *arguments);
/* Makes an object of bytes, as PyBytes_FromStringAndSize. */
typedef PyObject *(*bytes_maker)(const char *, Py_ssize_t);
/* Returns a new object with `front` bytes for the caller to write, and a list of tensors behind them;
 * None for the plain twin. */
PyObject *tensors_behind(PyObject *tensors, size_t front, bytes_maker make, bool *requires_grad);
PyObject *tensors_encode(PyObject *module, PyObject *tensors);
PyObject *tensors_decode(PyObject *module, PyObject *const *arguments, Py_ssize_t count);

PyObject *serve_decode_call(PyObject *module, PyObject *control);
PyObject *serve_decode_message(PyObject *module, PyObject *arguments);
PyObject *serve_encode_result(PyObject *module, PyObject *arguments);

PyObject *values_set_parts(PyObject *module, PyObject *arguments);
PyObject *values_encode(PyObject *module, PyObject *const *arguments, Py_ssize_t count);
PyObject *values_decode(PyObject *module, PyObject *const *arguments, Py_ssize_t count);

PyObject *call_set_modes(PyObject *module, PyObject *functions);
PyObject *call_encode(PyObject *module, PyObject *const *arguments, Py_ssize_t count);
PyObject *call_decode_reply(PyObject *module, PyObject *control);

#endif
