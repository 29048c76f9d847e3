/* The usual case of a call: the whole frames of a CALL and of a REPLY, their heads, and the value in a
 * message.
 *
 * Everything else, and whatever is malformed, is left to the plain twins in engine/wire/messages.py
 * and in rpc/{encoding,decoding,worker}.py; the layouts are in engine/wire/frames.py and
 * engine/wire/messages.py.
 */
#include "native.h"

#include <sys/uio.h>

enum { FRAME_HEADER_BYTES = 16, REPLY = 4 };
static const size_t PAYLOAD_LIMIT_BYTES = (size_t)31 << 26;

typedef struct {
    double remaining_s;
    long long creation;
    uint64_t context_id, message_id;
    uint32_t name_bytes, span_bytes, reference_count, payload_bytes;
} call_head;
_Static_assert(sizeof(call_head) == 48, "a compiler has put gaps into the head of a CALL");

/* ---------------------------------------------------------------------------------- Encoding */

static struct iovec part_of(PyObject *bytes)
{
    return (struct iovec){PyBytes_AS_STRING(bytes), (size_t)PyBytes_GET_SIZE(bytes)};
}

/* Returns a frame of parts, the first of which is its header, with tensors behind them; None if it is
 * too large, or for the plain twin. */
static PyObject *frame_of(const struct iovec *parts, int count, PyObject *tensors, bool *requires_grad)
{
    size_t front = 0;
    for (int place = 0; place < count; place++)
        front += parts[place].iov_len;
    if (front > PAYLOAD_LIMIT_BYTES)
        Py_RETURN_NONE;
    PyObject *frame = tensors_behind(tensors, front, requires_grad);
    char *at = frame == NULL || frame == Py_None ? NULL : PyByteArray_AS_STRING(frame);
    for (int place = 0; at != NULL && place < count; at += parts[place++].iov_len)
        memcpy(at, parts[place].iov_base, parts[place].iov_len);
    return frame;
}

/* encode_call(timeout_s, creation, name, span, values, tensors, receiver, home_of, inlines):
 * returns the frame, and whether a tensor requires grad, or False or None, as `plain_frame` does. */
PyObject *call_encode(PyObject *module, PyObject *const *arguments, Py_ssize_t count)
{
    if (count != 9 || !PyBytes_Check(arguments[2]) || !PyBytes_Check(arguments[3]) ||
        !PyList_CheckExact(arguments[5]))
        return PyErr_Format(PyExc_TypeError, "encode_call takes nine arguments");
    call_head head = {.remaining_s = PyFloat_AsDouble(arguments[0]),
                      .creation = PyLong_AsLongLong(arguments[1])};
    if (PyErr_Occurred())
        return NULL;
    PyObject *payload = values_encode(module, arguments + 4, 4), *made = NULL;
    if (payload == NULL || payload == Py_False)
        return payload;
    const char header[FRAME_HEADER_BYTES] = {0}; /* It is filled in with the number of the call. */
    const struct iovec parts[] = {
        {(void *)header, sizeof header}, {&head, sizeof head},
        part_of(arguments[2]), part_of(arguments[3]), part_of(payload),
    };
    head.name_bytes = (uint32_t)parts[2].iov_len;
    head.span_bytes = (uint32_t)parts[3].iov_len;
    head.payload_bytes = (uint32_t)parts[4].iov_len;
    int is_left = 0;
    if (PyList_GET_SIZE(arguments[5]))
        is_left = arguments[8] != Py_True ? 1 : is_true(PyObject_CallNoArgs(library.has_modes));
    bool requires_grad = false;
    if (is_left == 0)
        made = frame_of(parts, 5, arguments[5], &requires_grad);
    else if (is_left > 0)
        made = Py_NewRef(Py_None);
    Py_DECREF(payload);
    if (made == NULL || made == Py_None)
        return made;
    return Py_BuildValue("NO", made, requires_grad ? Py_True : Py_False);
}

/* encode_result(number, context_id, result, receiver, most_tensors, home_of) -> the frame of a
 * REPLY; False for a result that needs a pickle; None for others that are not encoded here. */
PyObject *call_encode_result(PyObject *module, PyObject *arguments)
{
    unsigned long long number, context_id;
    PyObject *result, *receiver, *home_of, *frame = NULL;
    Py_ssize_t most;
    if (!PyArg_ParseTuple(arguments, "KKOOnO", &number, &context_id, &result, &receiver, &most,
                          &home_of))
        return NULL;
    PyObject *tensors = PyList_New(0), *const values[] = {result, tensors, receiver, home_of};
    PyObject *payload = tensors == NULL ? NULL : values_encode(module, values, 4);
    bool requires_grad = false;
    if (payload == Py_False)
        frame = Py_NewRef(payload);
    else if (payload != NULL && PyList_GET_SIZE(tensors) <= most) {
        struct iovec value = part_of(payload);
        if (result == Py_None || (PyObject *)Py_TYPE(result) == library.tensor_type)
            value.iov_len = 0;
        uint32_t heads[10] = {REPLY, [9] = (uint32_t)value.iov_len};
        memcpy(heads + 2, &number, 8);
        memcpy(heads + 4, &context_id, 8);
        const struct iovec parts[] = {{heads, sizeof heads}, value};
        frame = frame_of(parts, 2, tensors, &requires_grad);
        if (frame != NULL && frame != Py_None) {
            uint32_t control_bytes = (uint32_t)(PyByteArray_GET_SIZE(frame) - FRAME_HEADER_BYTES);
            memcpy(PyByteArray_AS_STRING(frame) + 4, &control_bytes, 4);
        }
    }
    if (requires_grad)
        Py_CLEAR(frame);
    Py_XDECREF(payload);
    Py_XDECREF(tensors);
    return frame == NULL && !PyErr_Occurred() ? Py_NewRef(Py_None) : frame;
}

/* ---------------------------------------------------------------------------------- Decoding */

/* decode_call(control) -> the head of a CALL, as messages.decode_call returns it. */
PyObject *call_decode(PyObject *Py_UNUSED(module), PyObject *control)
{
    Py_buffer data;
    call_head head = {.reference_count = 1}; /* Too short, it is as unusual as one with references. */
    PyObject *made = NULL;
    if (PyObject_GetBuffer(control, &data, PyBUF_SIMPLE))
        return NULL;
    if ((size_t)data.len >= sizeof head)
        memcpy(&head, data.buf, sizeof head);
    Py_ssize_t name = head.name_bytes, span = head.span_bytes;
    Py_ssize_t start = (Py_ssize_t)sizeof head + name + span, end = start + head.payload_bytes;
    bool is_usual = head.reference_count == 0 && end <= data.len && head.creation >= -1 &&
                    head.remaining_s == head.remaining_s && !(head.message_id >> 63) &&
                    (!(head.context_id >> 63) || head.context_id == UINT64_MAX);
    if (is_usual) {
        const char *at = (const char *)data.buf + sizeof head;
        made = Py_BuildValue("dLy#y#(KK()nn)", head.remaining_s, head.creation, at, name,
                             at + name, span,
                             (unsigned long long)head.context_id,
                             (unsigned long long)head.message_id, start, end);
    }
    PyBuffer_Release(&data);
    return is_usual ? made : PyObject_CallOneArg(library.decode_call, control);
}

/* decode_message(control, start, end, most_tensors, resolve, come_home) -> the value of the payload
 * from `start` to `end`, before its tensors; NotImplemented for all that the plain twin has to look at
 * or refuse. */
PyObject *call_decode_message(PyObject *module, PyObject *arguments)
{
    PyObject *control, *resolve, *come_home, *found = NULL, *tensors = NULL, *value = NULL;
    Py_ssize_t start, end, most;
    if (!PyArg_ParseTuple(arguments, "OnnnOO", &control, &start, &end, &most, &resolve, &come_home))
        return NULL;
    if (end < PyObject_Size(control)) {
        PyObject *const place[] = {control, PyTuple_GET_ITEM(arguments, 2)};
        if ((found = tensors_decode(module, place, 2)) == NULL)
            return NULL;
        if (found != Py_None && !PyBytes_GET_SIZE(PyTuple_GET_ITEM(found, 1)))
            tensors = PyTuple_GET_ITEM(found, 0);
        if (tensors == NULL || PyList_GET_SIZE(tensors) > most) {
            Py_DECREF(found);
            Py_RETURN_NOTIMPLEMENTED;
        }
    }
    PyObject *payload = PySequence_GetSlice(control, start, end);
    PyObject *const parts[] = {payload, tensors, NULL, resolve, come_home};
    if (payload != NULL && start == end) /* Most results are one tensor or None. */
        value = tensors == NULL ? Py_NewRef(Py_None) : PySequence_GetItem(tensors, 0);
    else if (payload != NULL)
        value = values_decode(module, parts, 5);
    Py_XDECREF(payload);
    Py_XDECREF(found);
    return value;
}
