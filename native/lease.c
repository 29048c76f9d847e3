/* A lease: the right of one thread to read a link, while it waits for messages on it.
 *
 * A thread that waits reads its answer itself, so that no other thread has to be woken. What else
 * arrives goes to `add_frame` of the link, and a thread of the reactor is told.
 *
 * A signal handler, or a finalizer, may itself wait in the same thread. The leases that the thread
 * had before then end, and what they held is read by the reactor. While a handler runs within a wait,
 * the reactor reads the link as well.
 *
 * An answer is delivered once: in the same step, the lease comes to owe a task, which completes the
 * call. `settle` says that this was done. A lease that ends before, as a signal handler has raised,
 * has a thread of the reactor run the task.
 */
#include "link.h"

#include <poll.h>
#include <unistd.h>

enum { TAKEN = 1, NOTHING = 0, ENDED = -1 };

struct lease {
    PyObject_HEAD
    connection *link; /* NULL once the lease has ended. */
    unsigned long thread;
    unsigned long long kinds, number; /* What it waits for: any of these kinds, with this number. */
    PyObject *into, *then;            /* Where that goes; NULL while it does not wait. */
    PyObject *owed;
    bool has_taken;
    lease *next; /* Another live lease. */
};

static lease *all_leases;

/* Gives up the link, to threads of the reactor; returns 0, or -1 with an exception. */
static int give_up(lease *self, bool leaves_unarmed)
{
    connection *link = self->link;
    if (link == NULL || link->lease != self)
        return 0;
    link->lease = NULL;
    if (!leaves_unarmed)
        link_arm(link, true);
    return link->must_read ? link_hand_over(link) : 0;
}

/* Takes the link, unless another thread reads it, or no thread of the reactor can be reached yet;
 * returns whether it did. */
static bool take(lease *self)
{
    connection *link = self->link;
    if (link->is_claimed || link->is_closed || link->is_broken || link->is_large || link->lease ||
        link->watch == NULL)
        return false;
    link->lease = self;
    if (link->in == NULL)
        link_arm(link, false);
    ring_wake(link); /* The peer does not ring, so there is no event. */
    return true;
}

static void end(lease *self, bool leaves_unarmed)
{
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    if (give_up(self, leaves_unarmed))
        PyErr_WriteUnraisable((PyObject *)self);
    if (self->owed != NULL && self->link != NULL && link_submit(self->link, self->owed))
        PyErr_WriteUnraisable((PyObject *)self);
    Py_CLEAR(self->link);
    Py_CLEAR(self->owed);
    Py_CLEAR(self->into);
    Py_CLEAR(self->then);
    PyErr_Restore(type, value, traceback);
}

/* Returns a lease, NULL with an exception, or NULL without one if another thread reads the link. */
static lease *new_lease(PyTypeObject *type, PyObject *link)
{
    lease *self = (lease *)type->tp_alloc(type, 0);
    if (self == NULL)
        return NULL;
    self->thread = PyThread_get_thread_ident();
    int status = 0;
    for (lease *each = all_leases; each != NULL; each = each->next)
        if (each->thread == self->thread)
            status |= give_up(each, false);
    self->next = all_leases;
    all_leases = self;
    self->link = (connection *)Py_NewRef(link);
    if (status || !take(self))
        Py_CLEAR(self);
    return self;
}

/* Lease.take(link): returns a lease, or None if another thread reads the link. */
static PyObject *lease_take(PyObject *type, PyObject *link)
{
    if (!PyObject_TypeCheck(link, &link_type))
        return PyErr_Format(PyExc_TypeError, "a lease is one of a link");
    PyObject *self = (PyObject *)new_lease((PyTypeObject *)type, link);
    return self == NULL && !PyErr_Occurred() ? Py_NewRef(Py_None) : self;
}

int lease_deliver(lease *self, PyObject *frame)
{
    long kind = PyLong_AsLong(PyTuple_GET_ITEM(frame, 0));
    uint64_t number = PyLong_AsUnsignedLongLong(PyTuple_GET_ITEM(frame, 2));
    if (self->into == NULL || self->number != number || kind > 63 || !(self->kinds >> kind & 1))
        return 0;
    if (PyList_Check(self->into)) {
        if (PyList_Append(self->into, frame))
            return -1;
    } else {
        if (self->has_taken)
            return 0; /* A second answer is no answer. */
        if (PyObject_SetAttr(self->into, names[NAME_FRAME], frame))
            return -1;
        if (self->then != Py_None)
            Py_XSETREF(self->owed, Py_NewRef(self->then));
    }
    self->has_taken = true;
    return 1;
}

/* Cuts the frames of one link, and has the others read by the reactor; returns 0, or -1. */
static int take_frames(connection *from)
{
    Py_ssize_t left = link_take_frames(from, NULL);
    from->must_read |= from->is_large;
    return left > 0 ? link_hand_over(from) : (int)left;
}

/* Sleeps until there is data, or for a moment; returns what poll does, or 0 if it was woken. */
static int sleep_until_data(connection *link, int wake_fd, double left_s)
{
    struct pollfd fds[] = {{.fd = link->fd, .events = POLLIN}, {.fd = wake_fd, .events = POLLIN}};
    if (link->is_armed)
        link_arm(link, false); /* A bell shall wake this thread only. */
    if (ring_sleep(link))
        fds[0].events |= POLLOUT; /* It is due at once. */
    int ready, limit_ms = left_s * 1e3 < TICK_MS ? (int)(left_s * 1e3) + 1 : TICK_MS;
    Py_BEGIN_ALLOW_THREADS
    ready = poll(fds, 2, limit_ms);
    Py_END_ALLOW_THREADS
    ring_wake(link);
    link->has_bell |= fds[0].revents != 0;
    uint64_t wakes;
    if (ready > 0 && fds[1].revents)
        return read(wake_fd, &wakes, sizeof wakes) < 0 ? -1 : 0;
    return ready;
}

/* Looks, and sleeps, as `wait` says; returns TAKEN, NOTHING, ENDED, or -2 with an exception. */
static int look_and_sleep(lease *self, spinning *policy, double limit_s, int wake_fd)
{
    double tick_s = monotonic_s() + 1e-3 * TICK_MS;
    connection *link = self->link;
    for (;;) {
        if (link_look(link, policy) && take_frames(link))
            return -2;
        policy = NULL;
        link->must_read |= link->awaits_room && ring_room(link);
        if (self->has_taken || link->has_ended || link->must_read)
            return self->has_taken ? TAKEN : ENDED;
        double left_s = limit_s - monotonic_s();
        if (left_s <= 0)
            return NOTHING;
        int ready = sleep_until_data(link, wake_fd, left_s);
        if (ready > 0 && monotonic_s() < tick_s)
            continue; /* Not for ever: messages for others may come again and again. */
        /* While handlers run, the reactor has the link, and may read what this thread waits for. */
        if (give_up(self, false) || PyErr_CheckSignals())
            return -2;
        return self->link != NULL && take(self) ? NOTHING : ENDED;
    }
}

/* Waits for frames of some kinds with a number, which go to `into`; returns as `look_and_sleep`. */
static int wait_for(lease *self, unsigned long long kinds, unsigned long long number, PyObject *into,
                    PyObject *then, int spins, double limit_s, int wake_fd)
{
    self->kinds = kinds;
    self->number = number;
    self->has_taken = false;
    Py_XSETREF(self->into, Py_NewRef(into));
    Py_XSETREF(self->then, Py_NewRef(then));
    spinning *policy = spins < 0 ? NULL : &self->link->spins[spins];
    int outcome = look_and_sleep(self, policy, limit_s, wake_fd);
    Py_CLEAR(self->into);
    Py_CLEAR(self->then);
    return outcome;
}

/* wait(kinds, number, into, then, spins, limit_s, wake_fd): waits for messages of a bit set of kinds
 * with a number. `into` is a list, which gets the frames, or has an attribute `frame`.
 *
 * Spins first, unless `spins` is -1; sleeps until `limit_s`, for a tick at most; not at all if that
 * is 0. Returns 1 if anything was taken, 0 if not, -1 if another thread has to read a link. */
static PyObject *lease_wait(lease *self, PyObject *arguments)
{
    unsigned long long kinds, number;
    PyObject *into, *then;
    int spins, wake_fd;
    double limit_s;
    if (!PyArg_ParseTuple(arguments, "KKOOidi", &kinds, &number, &into, &then, &spins, &limit_s,
                          &wake_fd))
        return NULL;
    if (self->link == NULL || self->link->lease != self || spins >= SPIN_KINDS)
        return PyLong_FromLong(ENDED);
    int outcome = wait_for(self, kinds, number, into, then, spins, limit_s, wake_fd);
    return outcome < ENDED ? NULL : PyLong_FromLong(outcome);
}

/* Lease.ask(link, number, call, message, calls, rest): sends the message of a call, which stands in a
 * dict of calls, and looks for the answer for a moment. No signal handler runs meanwhile.
 *
 * Returns False if another thread reads the link, and nothing was sent; a lease if no answer has come.
 * Otherwise the call is no more in the dict. Then the result is a tuple of the value; None if the
 * plain twin is to decode `call.frame`; or an exception: that of a signal handler in Python code that
 * decodes, or one that the plain twin meets again. `rest` is that of `call_value`, or empty for no
 * value. */
static PyObject *lease_ask(PyObject *type, PyObject *arguments)
{
    PyObject *link, *number, *call, *message, *calls, *rest, *frame, *value, *done;
    if (!PyArg_ParseTuple(arguments, "O!O!OOO!O!", &link_type, &link, &PyLong_Type, &number, &call,
                          &message, &PyDict_Type, &calls, &PyTuple_Type, &rest))
        return NULL;
    uint64_t id = PyLong_AsUnsignedLongLong(number);
    if (PyErr_Occurred())
        return NULL;
    lease *self = new_lease((PyTypeObject *)type, link);
    if (self == NULL)
        return PyErr_Occurred() ? NULL : Py_NewRef(Py_False);
    done = link_write(self->link, message);
    int outcome = -2;
    if (done != NULL)
        outcome = wait_for(self, 1 << REPLY, id, call, Py_None, FOR_ANSWERS, 0, -1);
    Py_XDECREF(done);
    if (outcome == NOTHING || outcome == ENDED)
        return (PyObject *)self;
    Py_DECREF(self);
    if (outcome != TAKEN)
        return NULL;
    if (PyDict_DelItem(calls, number)) /* Another thread has just ended it. */
        PyErr_Clear();
    if (PyTuple_GET_SIZE(rest) != 3)
        Py_RETURN_NONE;
    frame = PyObject_GetAttr(call, names[NAME_FRAME]);
    value = frame == NULL || !PyTuple_Check(frame) || PyTuple_GET_SIZE(frame) != 5
        ? NULL : call_answer(frame, &PyTuple_GET_ITEM(rest, 0));
    Py_XDECREF(frame);
    if (value == NULL && PyErr_Occurred())
        return take_error();
    done = value == NULL || value == Py_NotImplemented ? Py_NewRef(Py_None) : PyTuple_Pack(1, value);
    Py_XDECREF(value);
    return done;
}

/* settle(): the task that the lease owed is done. */
static PyObject *lease_settle(lease *self, PyObject *Py_UNUSED(nothing))
{
    Py_CLEAR(self->owed);
    Py_RETURN_NONE;
}

/* give_up(): other threads may read the links; what the lease owes it still owes. */
static PyObject *lease_give_up(lease *self, PyObject *Py_UNUSED(nothing))
{
    if (give_up(self, false))
        return NULL;
    Py_RETURN_NONE;
}

/* release(leaves_unarmed=False) */
static PyObject *lease_release(lease *self, PyObject *arguments)
{
    int leaves_unarmed = 0;
    if (!PyArg_ParseTuple(arguments, "|p", &leaves_unarmed))
        return NULL;
    end(self, leaves_unarmed);
    Py_RETURN_NONE;
}

static void lease_dealloc(lease *self)
{
    end(self, false);
    for (lease **each = &all_leases; *each != NULL; each = &(*each)->next)
        if (*each == self) {
            *each = self->next;
            break;
        }
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static PyMethodDef methods[] = {
    {"take", lease_take, METH_O | METH_CLASS, NULL},
    {"ask", lease_ask, METH_VARARGS | METH_CLASS, NULL},
    {"wait", (PyCFunction)lease_wait, METH_VARARGS, NULL},
    {"settle", (PyCFunction)lease_settle, METH_NOARGS, NULL},
    {"give_up", (PyCFunction)lease_give_up, METH_NOARGS, NULL},
    {"release", (PyCFunction)lease_release, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

PyTypeObject lease_type = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "torchweft._native.Lease",
    .tp_doc = "The right of one thread to read a link: see torchweft/engine/worker/calls.py.",
    .tp_basicsize = sizeof(lease),
    .tp_flags = Py_TPFLAGS_DEFAULT, /* Its end drops all that it refers to. */
    .tp_dealloc = (destructor)lease_dealloc,
    .tp_methods = methods,
};
