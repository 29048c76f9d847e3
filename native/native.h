/* What the files of the native twin share.
 *
 * Functions that make Python objects return NULL, and others FAILED, with a Python exception set.
 * BEYOND means, without an exception, that a value is of a kind that only the plain twin handles.
 */
#ifndef WEFT_NATIVE_H
#define WEFT_NATIVE_H

#include "buffer.h"
#include "dlpack.h"

typedef enum { DONE, BEYOND, FAILED } outcome;

/* Objects of Python that all files need; each is owned, and constant after the initialisation. */
typedef struct {
    const dlpack_api *dlpack;
    PyObject *tensor_type, *parameter_type, *strided_layout;
    PyObject *protocol_error;
} library_parts;

extern library_parts library;

int tensors_init(void);
PyObject *tensors_set_dtype(PyObject *module, PyObject *arguments);
PyObject *tensors_encode(PyObject *module, PyObject *tensors);
PyObject *tensors_decode(PyObject *module, PyObject *const *arguments, Py_ssize_t count);

int link_init(void);

int values_init(void);
PyObject *values_set_parts(PyObject *module, PyObject *arguments);
PyObject *values_encode(PyObject *module, PyObject *const *arguments, Py_ssize_t count);
PyObject *values_decode(PyObject *module, PyObject *const *arguments, Py_ssize_t count);

PyObject *call_set_modes(PyObject *module, PyObject *functions);
PyObject *call_encode(PyObject *module, PyObject *const *arguments, Py_ssize_t count);
PyObject *call_decode_reply(PyObject *module, PyObject *control);

#endif
