/* The usual case of a call at its caller: the whole frame of a CALL, and the head of a REPLY.
 *
 * Everything else, and whatever is malformed, is left to the plain twins in rpc/encoding.py and
 * engine/wire/messages.py; the layouts are in engine/wire/frames.py and engine/wire/messages.py.
 */
#include "native.h"
#include "heads.h"

#include <stdbool.h>

/* Functions of torch that return something true where operations do not do what they say. */
static PyObject *modes;

/* set_modes(functions); called once. */
PyObject *call_set_modes(PyObject *Py_UNUSED(module), PyObject *functions)
{
    modes = PySequence_Tuple(functions); /* It stays for as long as the module. */
    if (modes == NULL)
        return NULL;
    Py_RETURN_NONE;
}

/* Returns whether torch has modes or transforms, or traces; -1 with an exception. */
static int has_modes(void)
{
    int is_any = 0;
    for (Py_ssize_t place = 0; !is_any && place < PyTuple_GET_SIZE(modes); place++) {
        PyObject *found = PyObject_CallNoArgs(PyTuple_GET_ITEM(modes, place));
        is_any = found == NULL ? -1 : PyObject_IsTrue(found);
        Py_XDECREF(found);
    }
    return is_any;
}

/* Returns a frame whose tensors stand behind its parts, or are missing; None if a part is too large. */
static PyObject *new_frame(call_head *head, PyObject *const *parts, PyObject *tensors, bool *requires_grad)
{
    const size_t limits[] = {UINT16_MAX, UINT16_MAX, PAYLOAD_LIMIT_BYTES, PAYLOAD_LIMIT_BYTES};
    size_t sizes[4], front = FRAME_HEADER_BYTES + sizeof *head;
    for (int place = 0; place < 4; place++) {
        front += sizes[place] = (size_t)PyBytes_GET_SIZE(parts[place]);
        if (sizes[place] > limits[place])
            Py_RETURN_NONE;
    }
    if (sizes[2] + sizes[3] > PAYLOAD_LIMIT_BYTES)
        Py_RETURN_NONE;
    PyObject *frame = tensors_behind(tensors, front, PyByteArray_FromStringAndSize, requires_grad);
    if (frame == NULL || frame == Py_None)
        return frame;
    head->name_bytes = (uint16_t)sizes[0];
    head->span_bytes = (uint16_t)sizes[1];
    head->code_bytes = (uint32_t)sizes[2];
    head->payload_bytes = (uint32_t)sizes[3];
    char *at = PyByteArray_AS_STRING(frame);
    memset(at, 0, FRAME_HEADER_BYTES);
    memcpy(at + FRAME_HEADER_BYTES, head, sizeof *head);
    at += FRAME_HEADER_BYTES + sizeof *head;
    for (int place = 0; place < 4; at += sizes[place++])
        memcpy(at, PyBytes_AS_STRING(parts[place]), sizes[place]);
    return frame;
}

/* encode_call(timeout_s, creation, name, span, code, values, tensors, main_by_name, home_of, inlines):
 * returns the frame, and whether a tensor requires grad, as `plain_frame` does; or None. */
PyObject *call_encode(PyObject *module, PyObject *const *arguments, Py_ssize_t count)
{
    if (modes == NULL || count != 10 || !PyBytes_Check(arguments[2]) || !PyBytes_Check(arguments[3]) ||
        !PyBytes_Check(arguments[4]) || !PyList_CheckExact(arguments[6]))
        return PyErr_Format(PyExc_TypeError, "encode_call takes ten arguments");
    call_head head = {.remaining_s = PyFloat_AsDouble(arguments[0]),
                      .creation = PyLong_AsLongLong(arguments[1])};
    if (PyErr_Occurred())
        return NULL;
    PyObject *payload = values_encode(module, arguments + 5, 4), *made = NULL;
    if (payload == NULL || payload == Py_None)
        return payload;
    bool requires_grad = false;
    int is_left = PyList_GET_SIZE(arguments[6]) ? arguments[9] != Py_True || has_modes() : 0;
    if (!is_left) {
        PyObject *const parts[] = {arguments[2], arguments[3], arguments[4], payload};
        made = new_frame(&head, parts, arguments[6], &requires_grad);
    } else if (!PyErr_Occurred())
        made = Py_NewRef(Py_None);
    Py_DECREF(payload);
    if (made == NULL || made == Py_None)
        return made;
    return Py_BuildValue("NO", made, requires_grad ? Py_True : Py_False);
}

/* decode_reply(control) -> the head of a REPLY, as messages.decode_reply returns it; None for one with
 * references, and for one that is malformed. */
PyObject *call_decode_reply(PyObject *Py_UNUSED(module), PyObject *control)
{
    Py_buffer data;
    reply_head head = {.reference_count = 1}; /* Too short, it is as unusual. */
    if (PyObject_GetBuffer(control, &data, PyBUF_SIMPLE))
        return NULL;
    if ((size_t)data.len >= sizeof head)
        memcpy(&head, data.buf, sizeof head);
    Py_ssize_t start = sizeof head, end = start + (Py_ssize_t)head.payload_bytes;
    bool is_usual = !head.reference_count && end <= data.len && !(head.message_id >> 63) &&
                    (!(head.context_id >> 63) || head.context_id == UINT64_MAX);
    PyBuffer_Release(&data);
    if (!is_usual)
        Py_RETURN_NONE;
    return Py_BuildValue("KK()nn", (unsigned long long)head.context_id,
                         (unsigned long long)head.message_id, start, end);
}
