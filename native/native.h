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
    PyObject *decode_call, *split_names; /* Plain twins. */
    PyObject *starts, *answer, *locked, *frame, *requires_grad; /* Names of attributes. */
    PyObject *has_modes;   /* Whether torch has modes or transforms, or traces. */
} library_parts;

extern library_parts library;

enum { HEADER_BYTES = 16, CALL = 3, REPLY = 4 }; /* Of frames, and two kinds of them. */
enum { STRIDED = 4, PICKLE = 0x80 }; /* A flag of a tensor, and the first byte of a pickle. */

/* Returns whether a value, which may be NULL, is true, or -1; takes the reference. */
static inline int is_true(PyObject *value)
{
    int found = value == NULL ? -1 : PyObject_IsTrue(value);
    Py_XDECREF(value);
    return found;
}

/* Takes the exception that is set; returns it as an object, with its traceback. */
PyObject *take_error(void);

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

typedef struct {
    double remaining_s;
    long long creation;
    uint64_t context_id, message_id;
    uint32_t name_bytes, span_bytes, reference_count, payload_bytes;
} call_head;
_Static_assert(sizeof(call_head) == 48, "a compiler has put gaps into the head of a CALL");

/* Reads a head, and where its value begins and ends; returns whether it is well-formed and usual. */
bool call_read_head(call_head *head, const void *data, Py_ssize_t size, Py_ssize_t *start, Py_ssize_t *end);
/* Returns whether a value needs no pickle, and its first tensor no graph. */
bool call_is_plain(PyObject *control, Py_ssize_t start, Py_ssize_t end);
/* Returns the value of a payload from `start` to `end`, before its tensors; NotImplemented for all that
 * the plain twin has to look at or refuse. The rest: most tensors, `resolve` and `come_home`. */
PyObject *call_value(PyObject *module, PyObject *control, Py_ssize_t start, Py_ssize_t end,
                     PyObject *const rest[3]);
/* Returns the value in the frame of a REPLY; otherwise as `call_value`. */
PyObject *call_answer(PyObject *frame, PyObject *const rest[3]);
/* Returns the frame of a REPLY; False for a result that needs a pickle; None for others that are not
 * encoded here. The rest: receiver, most tensors, `home_of`. */
PyObject *call_reply(PyObject *module, uint64_t number, uint64_t context_id, PyObject *result,
                     PyObject *const rest[3]);
PyObject *call_encode(PyObject *module, PyObject *const *arguments, Py_ssize_t count);
PyObject *call_encode_result(PyObject *module, PyObject *arguments);
PyObject *call_decode(PyObject *module, PyObject *control);
PyObject *call_decode_message(PyObject *module, PyObject *arguments);
PyObject *call_decode_answer(PyObject *module, PyObject *arguments);

PyObject *serve_call(PyObject *module, PyObject *const *arguments, Py_ssize_t count);

#endif
