/* Serving the usual call: from its frame to that of its answer, around the call of a function.
 *
 * The plain twin is `_serve` in rpc/serving.py, which gets every other call. A call is usual if its
 * function is in a dict of the worker, from which Python takes it out where anybody watches calls.
 */
#include "link.h"

enum { NO_CREATION = -1, NAMED = 4 };
static const double SLOW_S = 0.0005; /* As in engine/protocol/calls.py. */

/* What serving takes from a worker and from a peer of it: a tuple. Both `call_reply` and `call_value`
 * get a part of it. */
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
    Py_ssize_t start, end;
    *self = (usual_call){.began_s = monotonic_s()};
    call_head *head = &self->head;
    if (!PyBytes_CheckExact(control) || (flags != 0 && flags != NAMED) ||
        !call_read_head(head, PyBytes_AS_STRING(control), PyBytes_GET_SIZE(control), &start, &end) ||
        head->creation != NO_CREATION || head->message_id || head->context_id + 1 > 1 ||
        !call_is_plain(control, start, end))
        return false;
    self->number = PyLong_AsUnsignedLongLong(PyTuple_GET_ITEM(frame, 2));
    const char *text = PyBytes_AS_STRING(control) + sizeof *head;
    if ((self->name = PyBytes_FromStringAndSize(text, head->name_bytes)) != NULL)
        self->function = function_of(server[FUNCTIONS], self->name);
    if (self->function != NULL)
        values = call_value(NULL, control, start, end, server + MOST_AGAIN);
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
    PyObject *done, *frame = NULL;
    if (result == NULL) {
        PyObject *error = take_error();
        done = PyObject_CallFunctionObjArgs(call, Py_None, error, NULL);
        Py_XDECREF(error);
        return done;
    }
    bool is_tensor = (PyObject *)Py_TYPE(result) == library.tensor_type;
    if (!is_tensor || is_true(PyObject_GetAttr(result, library.requires_grad)) == 0)
        frame = call_reply(NULL, self->number, self->head.context_id, result, server + RECEIVER);
    if (frame != NULL && PyByteArray_CheckExact(frame)) {
        done = PyObject_CallMethodOneArg(call, library.answer, frame);
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

/* Serves a usual call, and drops it. */
static void serve(usual_call *self, PyObject *const *server, PyObject *call)
{
    PyObject *head = Py_BuildValue("(OOKdd)", server[WORKER], self->name,
                                   (unsigned long long)self->head.context_id, self->head.remaining_s,
                                   self->began_s);
    PyObject *starts = head == NULL ? NULL : PyObject_GetAttr(call, library.starts);
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
    drop(self);
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
    return is_true(PyObject_CallMethodNoArgs(parts[HANDLING], library.locked)) == 0;
}

/* Serves a call in a Python context of its own. */
static void serve_apart(usual_call *usual, PyObject *const *parts, PyObject *call)
{
    PyObject *context = PyContext_New();
    if (context == NULL || PyContext_Enter(context)) {
        drop_result(answer(usual, NULL, call, NULL), call);
        drop(usual);
    } else {
        serve(usual, &PyTuple_GET_ITEM(parts[SERVER], 0), call);
        PyContext_Exit(context);
        drop_result(PyObject_CallNoArgs(parts[END_MODES]), call); /* As after each task. */
    }
    Py_XDECREF(context);
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
    serve_apart(usual, parts, call);
    Py_DECREF(call);
    if (!PyDict_Contains(parts[UNARMED], fd) || PyDict_DelItem(parts[UNARMED], fd))
        return 0; /* The function took long, and another thread has the link. */
    if (self->is_claimed || self->lease != NULL || self->is_closed)
        link_arm(self, true);
    else
        self->is_claimed = true;
    return self->is_claimed;
}

/* serve(parts, spins): does as `read`, and serves usual calls that come alone, one after the other.
 * Returns False where the link is claimed no more. */
PyObject *link_serve(connection *self, PyObject *arguments)
{
    PyObject *tuple, *frame, *done;
    int spins, status;
    if (!PyArg_ParseTuple(arguments, "O!p", &PyTuple_Type, &tuple, &spins))
        return NULL;
    if (PyTuple_GET_SIZE(tuple) != LINK_PARTS)
        return PyErr_Format(PyExc_TypeError, "serving takes %d parts", LINK_PARTS);
    PyObject *const *parts = &PyTuple_GET_ITEM(tuple, 0);
    self->must_read = false;
    self->has_bell |= !spins; /* An event has brought this thread. */
    for (;;) {
        usual_call usual;
        frame = NULL;
        link_look(self, spins ? &self->spins[FOR_REQUESTS] : NULL);
        Py_ssize_t count = link_take_frames(self, is_next(parts) ? &frame : NULL);
        if (frame == NULL)
            return count < 0 ? NULL : link_outcome(self, count);
        if (!read_call(&usual, &PyTuple_GET_ITEM(parts[SERVER], 0), frame)) {
            done = PyObject_CallOneArg(self->add_frame, frame);
            Py_DECREF(frame);
            Py_XDECREF(done);
            return done == NULL ? NULL : PyLong_FromLong(1);
        }
        status = serve_alone(self, parts, &usual, frame);
        Py_DECREF(frame);
        if (status <= 0)
            return status < 0 ? NULL : Py_NewRef(Py_False);
        spins = PyObject_Size(parts[READY]) == 0 && PyObject_Size(parts[URGENT]) == 0;
        if (!spins)
            return PyLong_FromLong(0);
    }
}
