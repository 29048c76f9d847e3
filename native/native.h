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
    PyObject *frame_type;
    PyObject *dtype_numbers; /* A dict: the number of a dtype on the wire. */
    PyObject *split_names; /* A plain twin. */
    PyObject *has_modes;   /* Whether torch has modes or transforms, or traces. */
} library_parts;

extern library_parts library;

/* Names of attributes, each made once: the interpreter keeps names that it has looked up. */
enum {
    NAME_ANSWER, NAME_DICT, NAME_DTYPE, NAME_FRAME, NAME_IS_CONJ, NAME_IS_LEAF, NAME_IS_NEG,
    NAME_LAYOUT, NAME_LOCKED, NAME_REQUIRES_GRAD, NAME_STARTS, NAME_COUNT
};
extern PyObject *names[NAME_COUNT];

enum { HEADER_BYTES = 16, CALL = 3, REPLY = 4 }; /* Of frames, and two kinds of them. */
enum { STRIDED = 4, PICKLE = 0x80 }; /* A flag of a tensor, and the first byte of a pickle. */

/* Returns whether a value, which may be NULL, is true, or -1; takes the reference. */
static inline int is_true(PyObject *value)
{
    int found = value == NULL ? -1 : PyObject_IsTrue(value);
    Py_XDECREF(value);
    return found;
}

/* Returns a result, which has the plain twin go on, whatever ordinary exception is set. */
PyObject *left_to_plain(PyObject *result);
/* Takes the exception that is set; returns it as an object, with its traceback. */
PyObject *take_error(void);

PyObject *tensors_set_dtype(PyObject *module, PyObject *arguments);
/* Returns a new bytearray of what is in a buffer, and a list of tensors behind it; None for the plain
 * twin. Without a place for `requires_grad`, no tensor may. */
PyObject *tensors_behind(PyObject *tensors, const buffer *front, bool *requires_grad);
/* Reads tensors up to the end, and the flags of each: a byte in `flags`, and all in one. Without
 * `flags`, a tensor that has some is not read. Returns a list; NULL for the plain twin. */
PyObject *tensors_read(reader from, buffer *flags, uint8_t *all_flags);
PyObject *tensors_encode(PyObject *module, PyObject *tensors);
PyObject *tensors_decode(PyObject *module, PyObject *const *arguments, Py_ssize_t count);

PyObject *values_set_parts(PyObject *module, PyObject *arguments);
/* Adds a value to a buffer; its parts are the value, a list that gets its tensors, the receiver, and
 * `home_of`. Returns -1 without an exception for a value that goes by pickle. */
int values_add(buffer *out, PyObject *const parts[4]);
PyObject *values_encode(PyObject *module, PyObject *const *arguments, Py_ssize_t count);
/* Returns a value; NotImplemented if the bytes are malformed. */
PyObject *values_read(reader in, PyObject *tensors, PyObject *externals, PyObject *resolve,
                      PyObject *come_home);
PyObject *values_decode(PyObject *module, PyObject *const *arguments, Py_ssize_t count);

/* Returns the value in the frame of a REPLY; NotImplemented for all that the plain twin has to look at
 * or refuse. The rest: most tensors, `resolve` and `come_home`. */
PyObject *call_answer(PyObject *frame, PyObject *const rest[3]);
PyObject *call_encode(PyObject *module, PyObject *const *arguments, Py_ssize_t count);
PyObject *call_encode_result(PyObject *module, PyObject *arguments);
PyObject *call_decode_answer(PyObject *module, PyObject *arguments);
PyObject *serve_call(PyObject *module, PyObject *const *arguments, Py_ssize_t count);

#endif
