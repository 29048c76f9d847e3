/* A lease: the right of one thread to read some links, while it waits for messages on them.
 *
 * A thread that waits reads its answer itself, so that no other thread has to be woken. What else
 * arrives goes to `add_frame` of its link, and a thread of the reactor is told.
 *
 * A signal handler, or a finalizer, may itself wait in the same thread. The leases that the thread
 * had before then end, and what they held is read by the reactor. While a handler runs within a wait,
 * the reactor reads the links as well.
 *
 * An answer is delivered once: in the same step, the lease comes to owe a task, which completes the
 * call. `settle` says that this was done. A lease that ends before, as a signal handler has raised,
 * has a thread of the reactor run the task.
 */
#define _GNU_SOURCE
#include "link.h"

#include <errno.h>
#include <poll.h>
#include <unistd.h>

enum { MOST_LINKS = 8 };
enum { TAKEN = 1, NOTHING = 0, ENDED = -1 };

struct lease {
    PyObject_HEAD
    Py_ssize_t count; /* Of links; 0 once it has ended. */
    connection *links[MOST_LINKS];
    unsigned long thread;
    unsigned long long kinds, number; /* What it waits for: any of these kinds, with this number. */
    PyObject *into, *then;            /* Where that goes; NULL while it does not wait. */
    PyObject *owed;
    bool has_taken;
    lease *next; /* Another live lease. */
};

static lease *all_leases;

static bool holds_all(const lease *self)
{
    bool is_held = self->count > 0;
    for (Py_ssize_t place = 0; place < self->count; place++)
        is_held &= self->links[place]->lease == self;
    return is_held;
}

/* Gives up the links, to threads of the reactor; returns 0, or -1 with an exception. */
static int give_up(lease *self, bool leaves_unarmed)
{
    int status = 0;
    for (Py_ssize_t place = 0; place < self->count; place++) {
        connection *each = self->links[place];
        if (each->lease != self)
            continue;
        each->lease = NULL;
        if (!leaves_unarmed)
            link_arm(each, true);
        if (each->must_read)
            status |= link_hand_over(each);
    }
    return status;
}

/* Takes the links, unless another thread reads one, or no thread of the reactor can be reached yet;
 * returns whether it did. */
static bool take_all(lease *self)
{
    for (Py_ssize_t place = 0; place < self->count; place++) {
        const connection *each = self->links[place];
        if (each->is_claimed || each->is_closed || each->is_broken || each->is_large || each->lease
            || each->add_task == NULL)
            return false;
    }
    for (Py_ssize_t place = 0; place < self->count; place++) {
        self->links[place]->lease = self;
        if (self->links[place]->in == NULL)
            link_arm(self->links[place], false);
        ring_wake(self->links[place]); /* The peer does not ring, so there is no event. */
    }
    return true;
}

static void end(lease *self, bool leaves_unarmed)
{
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    if (give_up(self, leaves_unarmed))
        PyErr_WriteUnraisable((PyObject *)self);
    if (self->owed != NULL && self->count > 0 && link_submit(self->links[0], self->owed))
        PyErr_WriteUnraisable((PyObject *)self);
    for (Py_ssize_t place = self->count; place > 0; place--)
        Py_CLEAR(self->links[place - 1]);
    self->count = 0;
    Py_CLEAR(self->owed);
    Py_CLEAR(self->into);
    Py_CLEAR(self->then);
    PyErr_Restore(type, value, traceback);
}

/* Lease.take(links): returns a lease, or None if another thread reads one of the links. */
static PyObject *lease_take(PyObject *type, PyObject *links)
{
    Py_ssize_t count = PyTuple_Check(links) ? PyTuple_GET_SIZE(links) : 0;
    if (count < 1 || count > MOST_LINKS)
        Py_RETURN_NONE;
    for (Py_ssize_t place = 0; place < count; place++)
        if (!PyObject_TypeCheck(PyTuple_GET_ITEM(links, place), &link_type))
            return PyErr_Format(PyExc_TypeError, "a lease is one of links");
    lease *self = (lease *)((PyTypeObject *)type)->tp_alloc((PyTypeObject *)type, 0);
    if (self == NULL)
        return NULL;
    self->thread = PyThread_get_thread_ident();
    for (lease *each = all_leases; each != NULL; each = each->next)
        if (each->thread == self->thread && give_up(each, false)) {
            Py_DECREF(self);
            return NULL;
        }
    self->next = all_leases;
    all_leases = self;
    for (; self->count < count; self->count++)
        self->links[self->count] = (connection *)Py_NewRef(PyTuple_GET_ITEM(links, self->count));
    if (take_all(self))
        return (PyObject *)self;
    Py_DECREF(self);
    Py_RETURN_NONE;
}

int lease_deliver(lease *self, const connection *from, PyObject *frame)
{
    long kind = PyLong_AsLong(PyTuple_GET_ITEM(frame, 0));
    uint64_t number = PyLong_AsUnsignedLongLong(PyTuple_GET_ITEM(frame, 2));
    if (self->into == NULL || self->number != number || kind > 63 || !(self->kinds >> kind & 1))
        return 0;
    if (PyList_Check(self->into)) {
        PyObject *item = PyTuple_Pack(2, from->peer, frame);
        int status = item == NULL ? -1 : PyList_Append(self->into, item);
        Py_XDECREF(item);
        if (status)
            return -1;
    } else {
        if (self->has_taken)
            return 0; /* A second answer is no answer. */
        if (PyObject_SetAttrString(self->into, "frame", frame))
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
    Py_ssize_t left = link_take_frames(from);
    from->must_read |= from->is_large;
    return left > 0 ? link_hand_over(from) : (int)left;
}

/* Sleeps until there is data, or for a moment; returns what poll does, or 0 if it was woken. */
static int sleep_until_data(const lease *self, int wake_fd, double left_s)
{
    struct pollfd fds[MOST_LINKS + 1];
    nfds_t count = 0;
    for (; count < (nfds_t)self->count; count++) {
        connection *each = self->links[count];
        if (each->is_armed)
            link_arm(each, false); /* A bell shall wake this thread only. */
        fds[count] = (struct pollfd){.fd = each->fd, .events = POLLIN};
        fds[count].events |= ring_sleep(each) ? POLLOUT : 0; /* It is due at once. */
    }
    fds[count++] = (struct pollfd){.fd = wake_fd, .events = POLLIN};
    int ready, limit_ms = left_s * 1e3 < TICK_MS ? (int)(left_s * 1e3) + 1 : TICK_MS;
    Py_BEGIN_ALLOW_THREADS
    ready = poll(fds, count, limit_ms);
    Py_END_ALLOW_THREADS
    for (Py_ssize_t place = 0; place < self->count; place++) {
        ring_wake(self->links[place]);
        self->links[place]->has_bell |= fds[place].revents != 0;
    }
    uint64_t wakes;
    if (ready > 0 && fds[count - 1].revents)
        return read(wake_fd, &wakes, sizeof wakes) < 0 ? -1 : 0;
    return ready;
}

/* Runs signal handlers, if any are due, while the reactor has the links. Returns 0, 1 if the links
 * were not had back, or -1 with an exception. */
static int run_handlers(lease *self)
{
    if (give_up(self, false) || PyErr_CheckSignals())
        return -1;
    return self->count > 0 && take_all(self) ? 0 : 1;
}

/* Waits as `wait` says; returns TAKEN, NOTHING, ENDED, or -2 with an exception. */
static int wait_for_frames(lease *self, spinning *policy, double limit_s, int wake_fd)
{
    double tick_s = monotonic_s() + 1e-3 * TICK_MS;
    for (;;) {
        bool ended = false, is_any = links_look(self->links, self->count, policy);
        policy = NULL;
        for (Py_ssize_t place = 0; place < self->count; place++) {
            if (is_any && take_frames(self->links[place]))
                return -2;
            ended |= self->links[place]->has_ended || self->links[place]->must_read;
        }
        if (self->has_taken || ended)
            return self->has_taken ? TAKEN : ENDED;
        double left_s = limit_s - monotonic_s();
        if (left_s <= 0)
            return NOTHING;
        int ready = sleep_until_data(self, wake_fd, left_s);
        if (ready > 0 && monotonic_s() < tick_s)
            continue; /* Not for ever: messages for others may come again and again. */
        /* While handlers ran, the reactor may have read what this thread waits for. */
        int status = run_handlers(self);
        return status < 0 ? -2 : status ? ENDED : NOTHING;
    }
}

/* wait(kinds, number, into, then, spins, limit_s, wake_fd): waits for messages of a bit set of kinds
 * with a number. `into` is a list, which gets pairs of peer and frame, or has an attribute `frame`.
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
    if (!holds_all(self) || spins >= SPIN_KINDS)
        return PyLong_FromLong(ENDED);
    self->kinds = kinds;
    self->number = number;
    self->has_taken = false;
    Py_XSETREF(self->into, Py_NewRef(into));
    Py_XSETREF(self->then, Py_NewRef(then));
    spinning *policy = spins < 0 ? NULL : &self->links[0]->spins[spins];
    int outcome = wait_for_frames(self, policy, limit_s, wake_fd);
    Py_CLEAR(self->into);
    Py_CLEAR(self->then);
    return outcome < ENDED ? NULL : PyLong_FromLong(outcome);
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

static int lease_traverse(lease *self, visitproc visit, void *arg)
{
    for (Py_ssize_t place = 0; place < self->count; place++)
        Py_VISIT(self->links[place]);
    Py_VISIT(self->into);
    Py_VISIT(self->then);
    Py_VISIT(self->owed);
    return 0;
}

static void lease_dealloc(lease *self)
{
    PyObject_GC_UnTrack(self);
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
    {"wait", (PyCFunction)lease_wait, METH_VARARGS, NULL},
    {"settle", (PyCFunction)lease_settle, METH_NOARGS, NULL},
    {"give_up", (PyCFunction)lease_give_up, METH_NOARGS, NULL},
    {"release", (PyCFunction)lease_release, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

PyTypeObject lease_type = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "torchweft._native.Lease",
    .tp_doc = "The right of one thread to read some links: see torchweft/engine/worker/calls.py.",
    .tp_basicsize = sizeof(lease),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .tp_dealloc = (destructor)lease_dealloc,
    .tp_traverse = (traverseproc)lease_traverse,
    .tp_methods = methods,
};
