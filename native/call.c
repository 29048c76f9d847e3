/* The usual call: the whole frames of a CALL and of a REPLY, the value in an answer, and serving, from
 * the frame of a call to that of its answer, around the call of a function.
 *
 * Everything else, and whatever is malformed, is left to the plain twins in engine/codec/objects.py and
 * rpc/{codec,worker,serving}.py; the layouts are in engine/wire/frames.py and engine/wire/messages.py.
 * A call is usual to serve if its function is in a dict of the worker, from which Python takes it out
 * where anybody watches calls.
 */
#include "link.h"

#include <math.h>

static const size_t PAYLOAD_LIMIT_BYTES = (size_t)31 << 26;

typedef struct {
    double remaining_s;
    long long creation;
    uint64_t context_id, message_id;
    uint32_t name_bytes, span_bytes, reference_count, payload_bytes;
} call_head;
_Static_assert(sizeof(call_head) == 48, "a compiler has put gaps into the head of a CALL");

/* ---------------------------------------------------------------------------------- Encoding */

/* encode_call(timeout_s, creation, name, span, values, tensors, receiver, home_of, inlines):
 * returns the frame, and whether a tensor requires grad, or False or None, as `plain_frame` does. */
PyObject *call_encode(PyObject *Py_UNUSED(module), PyObject *const *arguments, Py_ssize_t count)
{
    if (count != 9 || !PyBytes_Check(arguments[2]) || !PyBytes_Check(arguments[3]) ||
        !PyList_CheckExact(arguments[5]))
        return PyErr_Format(PyExc_TypeError, "encode_call takes nine arguments");
    PyObject *name = arguments[2], *span = arguments[3], *tensors = arguments[5], *made = NULL;
    size_t name_bytes = (size_t)PyBytes_GET_SIZE(name), span_bytes = (size_t)PyBytes_GET_SIZE(span);
    /* The header is filled in with the number of the call. */
    struct {
        unsigned char header[HEADER_BYTES];
        call_head head;
    } begin = {.head = {.remaining_s = PyFloat_AsDouble(arguments[0]),
                        .creation = PyLong_AsLongLong(arguments[1]),
                        .name_bytes = (uint32_t)name_bytes, .span_bytes = (uint32_t)span_bytes}};
    buffer front = {0};
    bool requires_grad = false;
    if (PyErr_Occurred() || buffer_add(&front, &begin, sizeof begin) ||
        buffer_add(&front, PyBytes_AS_STRING(name), name_bytes) ||
        buffer_add(&front, PyBytes_AS_STRING(span), span_bytes))
        goto done;
    size_t before = front.size;
    if (values_add(&front, arguments + 4)) {
        made = PyErr_Occurred() ? NULL : Py_NewRef(Py_False);
        goto done;
    }
    begin.head.payload_bytes = (uint32_t)(front.size - before);
    memcpy(front.data, &begin, sizeof begin);
    int is_left = front.size > PAYLOAD_LIMIT_BYTES;
    if (!is_left && PyList_GET_SIZE(tensors))
        is_left = arguments[8] != Py_True ? 1 : is_true(PyObject_CallNoArgs(library.has_modes));
    if (is_left)
        made = is_left < 0 ? NULL : Py_NewRef(Py_None);
    else
        made = tensors_behind(tensors, &front, &requires_grad);
    if (made != NULL && made != Py_None)
        made = Py_BuildValue("NN", made, PyBool_FromLong(requires_grad));
done:
    PyMem_Free(front.data);
    return made;
}

/* Returns the frame of a REPLY; False for a result that needs a pickle; None for others that are not
 * encoded here. The rest: receiver, most tensors, `home_of`. */
static PyObject *reply_of(uint64_t number, uint64_t context_id, PyObject *result, PyObject *const rest[3])
{
    uint32_t heads[10] = {REPLY};
    memcpy(heads + 2, &number, 8);
    memcpy(heads + 4, &context_id, 8);
    buffer front = {0};
    PyObject *frame = NULL, *tensors = PyList_New(0), *const parts[] = {result, tensors, rest[0], rest[2]};
    if (tensors == NULL || buffer_add(&front, heads, sizeof heads))
        goto done;
    if (values_add(&front, parts)) {
        frame = PyErr_Occurred() ? NULL : Py_NewRef(Py_False);
        goto done;
    }
    if (result == Py_None || (PyObject *)Py_TYPE(result) == library.tensor_type)
        front.size = sizeof heads; /* Most results are one tensor or None. */
    heads[9] = (uint32_t)(front.size - sizeof heads);
    memcpy(front.data, heads, sizeof heads);
    if (front.size > PAYLOAD_LIMIT_BYTES || PyList_GET_SIZE(tensors) > PyLong_AsSsize_t(rest[1]))
        frame = Py_NewRef(Py_None);
    else
        frame = tensors_behind(tensors, &front, NULL);
    if (frame != NULL && frame != Py_None) {
        uint32_t control_bytes = (uint32_t)(PyByteArray_GET_SIZE(frame) - HEADER_BYTES);
        memcpy(PyByteArray_AS_STRING(frame) + 4, &control_bytes, 4);
    }
done:
    PyMem_Free(front.data);
    Py_XDECREF(tensors);
    return frame;
}

/* encode_result(number, context_id, result, receiver, most_tensors, home_of): see `reply_of`. */
PyObject *call_encode_result(PyObject *Py_UNUSED(module), PyObject *arguments)
{
    unsigned long long number, context_id;
    PyObject *result, *rest[3];
    if (!PyArg_ParseTuple(arguments, "KKOOOO", &number, &context_id, &result, &rest[0], &rest[1],
                          &rest[2]))
        return NULL;
    return reply_of(number, context_id, result, rest);
}

/* ---------------------------------------------------------------------------------- Decoding */

/* Returns the value of a message from `start` to `end`, before its tensors; NotImplemented for all that
 * the plain twin has to look at or refuse. The rest: most tensors, `resolve` and `come_home`. */
static PyObject *value_of(PyObject *control, Py_ssize_t start, Py_ssize_t end, PyObject *const rest[3])
{
    const unsigned char *data = (unsigned char *)PyBytes_AS_STRING(control);
    PyObject *tensors = NULL, *value = NULL;
    uint8_t flags = 0;
    if (start < end && data[start] == PICKLE)
        Py_RETURN_NOTIMPLEMENTED;
    if (end < PyBytes_GET_SIZE(control)) {
        tensors = tensors_read((reader){data + end, data + PyBytes_GET_SIZE(control)}, NULL, &flags);
        if (tensors == NULL)
            return left_to_plain(Py_NotImplemented);
        if (PyList_GET_SIZE(tensors) > PyLong_AsSsize_t(rest[0]))
            value = Py_NewRef(Py_NotImplemented);
    }
    if (value == NULL && start < end)
        value = values_read((reader){data + start, data + end}, tensors, NULL, rest[1], rest[2]);
    else if (value == NULL) /* Most results are one tensor or None. */
        value = Py_NewRef(tensors == NULL ? Py_None : PyList_GET_ITEM(tensors, 0));
    Py_XDECREF(tensors);
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
        head.payload_bytes > size - start)
        Py_RETURN_NOTIMPLEMENTED;
    return value_of(control, start, start + head.payload_bytes, rest);
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

/* ---------------------------------------------------------------------------------- Serving */

enum { NO_CREATION = -1, NAMED = 4 };
static const double SLOW_S = 0.0005; /* As in engine/protocol/calls.py. */

/* What serving takes from a worker and from a peer of it: a tuple. Both `reply_of` and `value_of` get a
 * part of it. */
enum { WORKER, FUNCTIONS, CURRENT, SERVING, SETTLE, NOTE_SLOW, RECEIVER, MOST, NO_HOME, MOST_AGAIN, RESOLVE,
       COME_HOME, SERVER_PARTS };

/* Drops what a function returned that nobody waits for, or reports its exception. */
static void drop_result(PyObject *result, PyObject *of)
{
    if (result == NULL)
        PyErr_WriteUnraisable(of);
    Py_XDECREF(result);
}

/* Returns the function of a name, as it stands in its module now; NULL if it is not a usual one. */
static PyObject *function_of(PyObject *functions, PyObject *name)
{
    PyObject *known = PyDict_GetItemWithError(functions, name); /* Module, attribute, and function. */
    if (known == NULL)
        return NULL;
    Py_INCREF(known);
    PyObject *found = PyObject_GetAttr(PyTuple_GET_ITEM(known, 0), PyTuple_GET_ITEM(known, 1));
    if (found != PyTuple_GET_ITEM(known, 2))
        Py_CLEAR(found);
    Py_DECREF(known);
    return found;
}

/* A usual call: what it calls, with a tuple of the arguments, and perhaps a dict of the named ones. */
typedef struct {
    call_head head;
    uint64_t number;
    PyObject *name, *function, *values;
    double began_s;
} usual_call;

static void drop(usual_call *self)
{
    Py_CLEAR(self->name);
    Py_CLEAR(self->function);
    Py_CLEAR(self->values);
}

/* Reads the frame of a call; returns whether it is usual. The plain twin meets again what is not, and
 * says what is wrong with it. */
static bool read_call(usual_call *self, PyObject *const *server, PyObject *frame)
{
    PyObject *control = PyTuple_GET_ITEM(frame, 3), *values = NULL;
    long flags = PyLong_AsLong(PyTuple_GET_ITEM(frame, 1));
    *self = (usual_call){.began_s = monotonic_s()};
    call_head *head = &self->head;
    if (!PyBytes_CheckExact(control) || (flags != 0 && flags != NAMED) ||
        (size_t)PyBytes_GET_SIZE(control) < sizeof *head)
        return false;
    const char *name = PyBytes_AS_STRING(control) + sizeof *head;
    memcpy(head, PyBytes_AS_STRING(control), sizeof *head);
    Py_ssize_t start = (Py_ssize_t)sizeof *head + head->name_bytes + head->span_bytes;
    Py_ssize_t end = start + head->payload_bytes;
    if (end > PyBytes_GET_SIZE(control) || head->reference_count || head->creation != NO_CREATION ||
        isnan(head->remaining_s) || head->message_id || head->context_id + 1 > 1)
        return false;
    self->number = PyLong_AsUnsignedLongLong(PyTuple_GET_ITEM(frame, 2));
    if ((self->name = PyBytes_FromStringAndSize(name, head->name_bytes)) != NULL)
        self->function = function_of(server[FUNCTIONS], self->name);
    if (self->function != NULL)
        values = value_of(control, start, end, server + MOST_AGAIN);
    if (values != NULL && PyTuple_CheckExact(values))
        self->values = flags == NAMED ? PyObject_CallOneArg(library.split_names, values)
                                      : PyTuple_Pack(1, values);
    Py_XDECREF(values);
    if (self->values == NULL) {
        PyErr_Clear();
        drop(self);
    }
    return self->values != NULL;
}

/* Ends a call with what its function has returned, or with the error that it has raised. */
static PyObject *answer(const usual_call *self, PyObject *const *server, PyObject *call, PyObject *result)
{
    PyObject *done, *frame;
    if (result == NULL) {
        PyObject *error = take_error();
        done = PyObject_CallFunctionObjArgs(call, Py_None, error, NULL);
        Py_XDECREF(error);
        return done;
    }
    frame = reply_of(self->number, self->head.context_id, result, server + RECEIVER);
    if (frame != NULL && PyByteArray_CheckExact(frame)) {
        done = PyObject_CallMethodOneArg(call, names[NAME_ANSWER], frame);
    } else {
        PyErr_Clear(); /* The plain twin meets it again. */
        done = PyObject_CallFunctionObjArgs(server[SETTLE], self->function, result, call, NULL);
    }
    Py_XDECREF(frame);
    return done;
}

/* Runs the function of a call that begins; returns what its end has returned. */
static PyObject *run(usual_call *self, PyObject *const *server, PyObject *call)
{
    PyObject *before = PyContextVar_Set(server[CURRENT], call), *result, *done = NULL;
    PyObject *thread = PyLong_FromUnsignedLong(PyThread_get_thread_ident());
    if (before != NULL && thread != NULL && !PyDict_SetItem(server[SERVING], thread, call)) {
        PyObject *named = PyTuple_GET_SIZE(self->values) > 1 ? PyTuple_GET_ITEM(self->values, 1) : NULL;
        result = PyObject_Call(self->function, PyTuple_GET_ITEM(self->values, 0), named);
        Py_CLEAR(self->values); /* Free them before the answer. */
        done = answer(self, server, call, result);
        Py_XDECREF(result);
        PyObject *type, *error, *traceback;
        PyErr_Fetch(&type, &error, &traceback);
        if (PyDict_DelItem(server[SERVING], thread))
            PyErr_Clear();
        PyErr_Restore(type, error, traceback);
    }
    Py_XDECREF(before);
    Py_XDECREF(thread);
    return done;
}

/* Serves a usual call. */
static void serve(usual_call *self, PyObject *const *server, PyObject *call)
{
    PyObject *head = Py_BuildValue("(OOKdd)", server[WORKER], self->name,
                                   (unsigned long long)self->head.context_id, self->head.remaining_s,
                                   self->began_s);
    PyObject *starts = head == NULL ? NULL : PyObject_GetAttr(call, names[NAME_STARTS]);
    PyObject *done = starts == NULL ? NULL : PyObject_CallObject(starts, head);
    Py_XDECREF(starts);
    Py_XDECREF(head);
    if (done == Py_True) {
        Py_DECREF(done);
        done = run(self, server, call);
        if (monotonic_s() - self->began_s > SLOW_S)
            drop_result(PyObject_CallOneArg(server[NOTE_SLOW], self->name), self->name);
    }
    if (done == NULL)
        done = answer(self, server, call, NULL);
    drop_result(done, call);
}

/* serve_call(server, call, frame): returns whether it served a call. */
PyObject *serve_call(PyObject *Py_UNUSED(module), PyObject *const *arguments, Py_ssize_t count)
{
    if (count != 3 || !PyTuple_CheckExact(arguments[0]) || PyTuple_GET_SIZE(arguments[0]) != SERVER_PARTS ||
        !PyTuple_Check(arguments[2]) || PyTuple_GET_SIZE(arguments[2]) != 5)
        return PyErr_Format(PyExc_TypeError, "serve_call takes what serves, a call, and its frame");
    usual_call usual;
    PyObject *const *server = &PyTuple_GET_ITEM(arguments[0], 0);
    if (!read_call(&usual, server, arguments[2]))
        Py_RETURN_FALSE;
    serve(&usual, server, arguments[1]);
    drop(&usual);
    Py_RETURN_TRUE;
}

/* What serving the calls of a link takes: a tuple. Nothing is in the last ones, if no message is before
 * the next one, and nobody watches. */
enum { SERVER, PEER, DESCRIPTOR, HANDLING, UNARMED, LEAVE, TAKE_UP, END_MODES, INCOMING, READY, URGENT,
       WATCHED, SHARED, LINK_PARTS };

/* Returns whether the next message may be served at once. */
static bool is_next(PyObject *const *parts)
{
    for (int place = INCOMING; place < LINK_PARTS; place++)
        if (PyObject_Size(parts[place]) != 0)
            return false;
    return is_true(PyObject_CallMethodNoArgs(parts[HANDLING], names[NAME_LOCKED])) == 0;
}

/* Serves a usual call that has come alone. The link is claimed before, and not while the function runs.
 * Returns 1 if it is claimed again, 0 if not, -1 with an exception if it still is. */
static int serve_alone(connection *self, PyObject *const *parts, usual_call *usual, PyObject *frame)
{
    PyObject *fd = parts[DESCRIPTOR];
    PyObject *call = PyObject_CallFunction(parts[TAKE_UP], "OOd", parts[PEER], frame, usual->began_s);
    if (call == NULL) {
        drop(usual);
        return -1;
    }
    self->is_claimed = false;
    drop_result(PyObject_CallOneArg(parts[LEAVE], fd), fd);
    PyObject *context = PyContext_New(); /* Of its own, as each task has. */
    if (context == NULL || PyContext_Enter(context)) {
        drop_result(answer(usual, NULL, call, NULL), call);
    } else {
        serve(usual, &PyTuple_GET_ITEM(parts[SERVER], 0), call);
        PyContext_Exit(context);
        drop_result(PyObject_CallNoArgs(parts[END_MODES]), call); /* As after each task. */
    }
    drop(usual);
    Py_XDECREF(context);
    Py_DECREF(call);
    if (!PyDict_Contains(parts[UNARMED], fd) || PyDict_DelItem(parts[UNARMED], fd))
        return 0; /* The function took long, and another thread has the link. */
    if (self->is_claimed || self->lease != NULL || self->is_closed)
        link_arm(self, true);
    else
        self->is_claimed = true;
    return self->is_claimed;
}

/* read(spins, serving=None): for a thread of the reactor: receives, and gives whole frames to `add_frame`.
 * With what serving takes, serves usual calls that come alone, one after the other.
 *
 * Returns how many frames; False where the link is claimed no more; None if the stream has ended, or
 * `is_large` says that the next frame is for the plain parser. OSError: the connection is of no use any
 * more. */
PyObject *link_read(connection *self, PyObject *arguments)
{
    PyObject *serving = Py_None;
    int spins;
    if (!PyArg_ParseTuple(arguments, "p|O", &spins, &serving))
        return NULL;
    if (serving != Py_None && (!PyTuple_Check(serving) || PyTuple_GET_SIZE(serving) != LINK_PARTS))
        return PyErr_Format(PyExc_TypeError, "serving takes %d parts", LINK_PARTS);
    PyObject *const *parts = serving == Py_None ? NULL : &PyTuple_GET_ITEM(serving, 0);
    self->must_read = false;
    self->has_bell |= !spins; /* An event has brought this thread. */
    for (;;) {
        PyObject *frame = NULL;
        link_look(self, spins ? &self->spins[FOR_REQUESTS] : NULL);
        Py_ssize_t count = link_take_frames(self, parts != NULL && is_next(parts) ? &frame : NULL);
        if (frame == NULL)
            return count < 0 ? NULL : link_outcome(self, count);
        usual_call usual;
        if (!read_call(&usual, &PyTuple_GET_ITEM(parts[SERVER], 0), frame)) {
            PyObject *done = PyObject_CallOneArg(self->add_frame, frame);
            Py_DECREF(frame);
            Py_XDECREF(done);
            return done == NULL ? NULL : PyLong_FromLong(1);
        }
        int status = serve_alone(self, parts, &usual, frame);
        Py_DECREF(frame);
        if (status <= 0)
            return status < 0 ? NULL : Py_NewRef(Py_False);
        spins = PyObject_Size(parts[READY]) == 0 && PyObject_Size(parts[URGENT]) == 0;
        if (!spins)
            return PyLong_FromLong(0);
    }
}
