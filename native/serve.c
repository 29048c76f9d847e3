/* The usual case of a served call: the head of a CALL, the value in a message, and a whole REPLY.
 *
 * Everything else, and whatever is malformed, is left to the plain twins in engine/wire/messages.py,
 * rpc/decoding.py and rpc/worker.py; the layouts are in engine/wire/frames.py and engine/wire/messages.py.
 */
#include "native.h"
#include "heads.h"

#include <stdbool.h>

enum { REPLY = 4 }; /* The kind of a frame. */

/* decode_call(control) -> the head of a CALL, as messages.decode_call returns it. */
PyObject *serve_decode_call(PyObject *Py_UNUSED(module), PyObject *control)
{
    Py_buffer data;
    call_head head = {.reference_count = 1}; /* Too short, it is as unusual as one with references. */
    PyObject *made = NULL;
    if (PyObject_GetBuffer(control, &data, PyBUF_SIMPLE))
        return NULL;
    if ((size_t)data.len >= sizeof head)
        memcpy(&head, data.buf, sizeof head);
    Py_ssize_t name = head.name_bytes, span = head.span_bytes, code = head.code_bytes;
    Py_ssize_t start = (Py_ssize_t)sizeof head + name + span + code, end = start + head.payload_bytes;
    bool is_usual = head.reference_count == 0 && end <= data.len && head.creation >= -1 &&
                    head.remaining_s == head.remaining_s && !(head.message_id >> 63) &&
                    (!(head.context_id >> 63) || head.context_id == UINT64_MAX);
    if (is_usual) {
        const char *at = (const char *)data.buf + sizeof head;
        made = Py_BuildValue("dLy#y#y#(KK()nn)", head.remaining_s, head.creation, at, name,
                             at + name, span, at + name + span, code,
                             (unsigned long long)head.context_id,
                             (unsigned long long)head.message_id, start, end);
    }
    PyBuffer_Release(&data);
    return is_usual ? made : PyObject_CallOneArg(library.decode_call, control);
}

/* decode_message(control, start, end, most_tensors, resolve, come_home) -> the value of the payload
 * from `start` to `end`, before its tensors; NotImplemented for all that the plain twin has to look at
 * or refuse. */
PyObject *serve_decode_message(PyObject *module, PyObject *arguments)
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

/* encode_result(number, context_id, result, main_by_name, most_tensors, home_of) -> the frame of a
 * REPLY; None for a result that is not encoded here, and for tensors with a graph. */
PyObject *serve_encode_result(PyObject *module, PyObject *arguments)
{
    unsigned long long number, context_id;
    PyObject *result, *by_name, *home_of, *frame = NULL;
    Py_ssize_t most;
    if (!PyArg_ParseTuple(arguments, "KKOOnO", &number, &context_id, &result, &by_name, &most,
                          &home_of))
        return NULL;
    PyObject *tensors = PyList_New(0), *const parts[] = {result, tensors, by_name, home_of};
    PyObject *payload = tensors == NULL ? NULL : values_encode(module, parts, 4);
    bool is_bare = result == Py_None || (PyObject *)Py_TYPE(result) == library.tensor_type;
    bool is_usual = payload != NULL && payload != Py_None && PyList_GET_SIZE(tensors) <= most;
    size_t size = is_usual && !is_bare ? (size_t)PyBytes_GET_SIZE(payload) : 0;
    uint32_t heads[10] = {REPLY, [9] = (uint32_t)size};
    bool requires_grad = false;
    if (is_usual && size <= PAYLOAD_LIMIT_BYTES)
        frame = tensors_behind(tensors, sizeof heads + size, PyBytes_FromStringAndSize, &requires_grad);
    if (frame != NULL && frame != Py_None) {
        heads[1] = (uint32_t)(PyBytes_GET_SIZE(frame) - FRAME_HEADER_BYTES);
        memcpy(heads + 2, &number, 8);
        memcpy(heads + 4, &context_id, 8);
        memcpy(bytes_of(frame), heads, sizeof heads);
        memcpy(bytes_of(frame) + sizeof heads, PyBytes_AS_STRING(payload), size);
    }
    if (requires_grad)
        Py_CLEAR(frame);
    Py_XDECREF(payload);
    Py_XDECREF(tensors);
    return frame == NULL && !PyErr_Occurred() ? Py_NewRef(Py_None) : frame;
}
