/* The usual case of a call: the whole frames of a CALL and of a REPLY, their heads, and the value in a
 * message.
 *
 * Everything else, and whatever is malformed, is left to the plain twins in engine/wire/messages.py
 * and in rpc/{encoding,decoding,worker}.py; the layouts are in engine/wire/frames.py and
 * engine/wire/messages.py.
 */
#include "native.h"

#include <sys/uio.h>

static const size_t PAYLOAD_LIMIT_BYTES = (size_t)31 << 26;

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
    const char header[HEADER_BYTES] = {0}; /* It is filled in with the number of the call. */
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

PyObject *call_reply(PyObject *module, uint64_t number, uint64_t context_id, PyObject *result,
                     PyObject *const rest[3])
{
    PyObject *frame = NULL, *tensors = PyList_New(0), *const values[] = {result, tensors, rest[0], rest[2]};
    Py_ssize_t most = PyLong_AsSsize_t(rest[1]);
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
            uint32_t control_bytes = (uint32_t)(PyByteArray_GET_SIZE(frame) - HEADER_BYTES);
            memcpy(PyByteArray_AS_STRING(frame) + 4, &control_bytes, 4);
        }
    }
    if (requires_grad)
        Py_CLEAR(frame);
    Py_XDECREF(payload);
    Py_XDECREF(tensors);
    return frame == NULL && !PyErr_Occurred() ? Py_NewRef(Py_None) : frame;
}

/* encode_result(number, context_id, result, receiver, most_tensors, home_of): see `call_reply`. */
PyObject *call_encode_result(PyObject *module, PyObject *arguments)
{
    unsigned long long number, context_id;
    PyObject *result, *rest[3];
    if (!PyArg_ParseTuple(arguments, "KKOOOO", &number, &context_id, &result, &rest[0], &rest[1],
                          &rest[2]))
        return NULL;
    return call_reply(module, number, context_id, result, rest);
}

/* ---------------------------------------------------------------------------------- Decoding */

/* Reads a head, and where its value begins and ends; returns whether it is well-formed and usual. */
bool call_read_head(call_head *head, const void *data, Py_ssize_t size, Py_ssize_t *start, Py_ssize_t *end)
{
    if ((size_t)size < sizeof *head)
        return false;
    memcpy(head, data, sizeof *head);
    *start = (Py_ssize_t)sizeof *head + head->name_bytes + head->span_bytes;
    *end = *start + head->payload_bytes;
    return head->reference_count == 0 && *end <= size && head->creation >= -1 &&
           head->remaining_s == head->remaining_s && !(head->message_id >> 63) &&
           (!(head->context_id >> 63) || head->context_id == UINT64_MAX);
}

/* decode_call(control) -> the head of a CALL, as messages.decode_call returns it. */
PyObject *call_decode(PyObject *Py_UNUSED(module), PyObject *control)
{
    Py_buffer data;
    call_head head;
    PyObject *made = NULL;
    Py_ssize_t start, end;
    if (PyObject_GetBuffer(control, &data, PyBUF_SIMPLE))
        return NULL;
    bool is_usual = call_read_head(&head, data.buf, data.len, &start, &end);
    if (is_usual) {
        Py_ssize_t name = head.name_bytes, span = head.span_bytes;
        const char *at = (const char *)data.buf + sizeof head;
        made = Py_BuildValue("dLy#y#(KK()nn)", head.remaining_s, head.creation, at, name,
                             at + name, span,
                             (unsigned long long)head.context_id,
                             (unsigned long long)head.message_id, start, end);
    }
    PyBuffer_Release(&data);
    return is_usual ? made : PyObject_CallOneArg(library.decode_call, control);
}

bool call_is_plain(PyObject *control, Py_ssize_t start, Py_ssize_t end)
{
    const unsigned char *data = (unsigned char *)PyBytes_AS_STRING(control);
    /* The flags of the first tensor stand behind its dtype. */
    return (start == end || data[start] != PICKLE) &&
           (end + 1 >= PyBytes_GET_SIZE(control) || !(data[end + 1] & ~STRIDED));
}

PyObject *call_value(PyObject *module, PyObject *control, Py_ssize_t start, Py_ssize_t end,
                     PyObject *const rest[3])
{
    PyObject *found = NULL, *tensors = NULL, *value = NULL;
    if (end < PyObject_Size(control)) {
        PyObject *place = PyLong_FromSsize_t(end), *const at[] = {control, place};
        found = place == NULL ? NULL : tensors_decode(module, at, 2);
        Py_XDECREF(place);
        if (found == NULL)
            return NULL;
        if (found != Py_None && !PyBytes_GET_SIZE(PyTuple_GET_ITEM(found, 1)))
            tensors = PyTuple_GET_ITEM(found, 0);
        if (tensors == NULL || PyList_GET_SIZE(tensors) > PyLong_AsSsize_t(rest[0])) {
            Py_DECREF(found);
            Py_RETURN_NOTIMPLEMENTED;
        }
    }
    PyObject *payload = PySequence_GetSlice(control, start, end);
    PyObject *const parts[] = {payload, tensors, NULL, rest[1], rest[2]};
    if (payload != NULL && start == end) /* Most results are one tensor or None. */
        value = tensors == NULL ? Py_NewRef(Py_None) : PySequence_GetItem(tensors, 0);
    else if (payload != NULL)
        value = values_decode(module, parts, 5);
    Py_XDECREF(payload);
    Py_XDECREF(found);
    return value;
}

PyObject *call_answer(PyObject *frame, PyObject *const rest[3])
{
    struct {
        uint64_t context_id, message_id;
        uint32_t reference_count, payload_bytes;
    } head;
    _Static_assert(sizeof head == 24, "a compiler has put gaps into the head of a REPLY");
    PyObject *control = PyTuple_GET_ITEM(frame, 3);
    Py_ssize_t size = PyBytes_CheckExact(control) ? PyBytes_GET_SIZE(control) : 0, start = sizeof head;
    if (size < start || PyLong_AsLong(PyTuple_GET_ITEM(frame, 1)) != 0)
        Py_RETURN_NOTIMPLEMENTED;
    memcpy(&head, PyBytes_AS_STRING(control), sizeof head);
    if (head.reference_count || head.message_id || head.context_id + 1 > 1 ||
        head.payload_bytes > size - start ||
        !call_is_plain(control, start, start + head.payload_bytes))
        Py_RETURN_NOTIMPLEMENTED;
    return call_value(NULL, control, start, start + head.payload_bytes, rest);
}

/* decode_answer(frame, (most_tensors, resolve, come_home)): see `call_answer`. */
PyObject *call_decode_answer(PyObject *Py_UNUSED(module), PyObject *arguments)
{
    PyObject *frame, *rest;
    if (!PyArg_ParseTuple(arguments, "O!O!", library.frame_type, &frame, &PyTuple_Type, &rest))
        return NULL;
    if (PyTuple_GET_SIZE(rest) != 3)
        return PyErr_Format(PyExc_TypeError, "decode_answer takes three parts");
    return call_answer(frame, &PyTuple_GET_ITEM(rest, 0));
}

/* decode_message(control, start, end, most_tensors, resolve, come_home): see `call_value`. */
PyObject *call_decode_message(PyObject *module, PyObject *arguments)
{
    PyObject *control, *rest[3];
    Py_ssize_t start, end;
    if (!PyArg_ParseTuple(arguments, "OnnOOO", &control, &start, &end, &rest[0], &rest[1], &rest[2]))
        return NULL;
    return call_value(module, control, start, end, rest);
}
