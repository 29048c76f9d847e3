/* The usual case of a call at its caller: the whole frame of a CALL, and the head of a REPLY.
 *
 * Everything else, and whatever is malformed, is left to the plain twins in rpc/encoding.py and
 * wire/messages.py; the layouts are in wire/frames.py and wire/messages.py.
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

/* Joins the parts of a frame, of which `tensors` may be NULL; None if a part is too large. */
static PyObject *joined(call_head *head, PyObject *const *texts, PyObject *payload, PyObject *tensors)
{
    PyObject *const parts[] = {texts[0], texts[1], texts[2], payload, tensors};
    const size_t limits[] = {UINT16_MAX, UINT16_MAX, PAYLOAD_LIMIT_BYTES, PAYLOAD_LIMIT_BYTES};
    size_t sizes[5] = {0}, total = FRAME_HEADER_BYTES + sizeof *head;
    for (int place = 0; place < 5 && parts[place] != NULL; place++) {
        total += sizes[place] = (size_t)PyBytes_GET_SIZE(parts[place]);
        if (place < 4 && sizes[place] > limits[place])
            Py_RETURN_NONE;
    }
    if (sizes[2] + sizes[3] > PAYLOAD_LIMIT_BYTES)
        Py_RETURN_NONE;
    PyObject *frame = PyByteArray_FromStringAndSize(NULL, (Py_ssize_t)total);
    if (frame == NULL)
        return NULL;
    head->name_bytes = (uint16_t)sizes[0];
    head->span_bytes = (uint16_t)sizes[1];
    head->code_bytes = (uint32_t)sizes[2];
    head->payload_bytes = (uint32_t)sizes[3];
    char *at = PyByteArray_AS_STRING(frame);
    memset(at, 0, FRAME_HEADER_BYTES);
    memcpy(at + FRAME_HEADER_BYTES, head, sizeof *head);
    at += FRAME_HEADER_BYTES + sizeof *head;
    for (int place = 0; place < 5 && parts[place] != NULL; at += sizes[place++])
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
    PyObject *payload = values_encode(module, arguments + 5, 4);
    if (payload == NULL || payload == Py_None)
        return payload;
    PyObject *tensors = arguments[6], *inlined = NULL, *grad = Py_False, *made = NULL;
    int is_left = PyList_GET_SIZE(tensors) ? has_modes() : 0;
    if (!is_left && PyList_GET_SIZE(tensors)) {
        inlined = arguments[9] == Py_True ? tensors_encode(module, tensors) : Py_NewRef(Py_None);
        is_left = inlined == NULL ? -1 : 0;
        grad = inlined == NULL || inlined == Py_None ? Py_None : PyTuple_GET_ITEM(inlined, 1);
    }
    if (!is_left)
        made = joined(&head, arguments + 2, payload,
                      grad == Py_None || inlined == NULL ? NULL : PyTuple_GET_ITEM(inlined, 0));
    if (made != NULL && made != Py_None)
        made = Py_BuildValue("NO", made, grad);
    Py_XDECREF(inlined);
    Py_DECREF(payload);
    return is_left > 0 ? Py_NewRef(Py_None) : made;
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
