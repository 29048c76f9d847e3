/* A lease: the right of one thread to read some links, while it waits for messages on them.
 *
 * A thread that waits reads its answer itself, so that no other thread has to be woken. What else
 * arrives goes to `incoming` of its link, and a thread of the reactor is told.
 *
 * While a lease waits, a signal handler may run in its thread, and may itself take a lease of the
 * same links: leases of one thread are nested, and the inner one delivers what the outer ones want.
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

enum { MOST_LINKS = 8, TICK_MS = 100 };
enum { TAKEN = 1, NOTHING = 0, ENDED = -1 };

struct lease {
    PyObject_HEAD
    Py_ssize_t count; /* Of links; 0 once it has ended. */
    connection *links[MOST_LINKS];
    lease *outer[MOST_LINKS]; /* The lease of the same thread that had each link before. */
    unsigned long thread;
    unsigned long long kinds, number; /* What it waits for: any of these kinds, with this number. */
    PyObject *into, *then;            /* Where that goes; NULL while it does not wait. */
    PyObject *owed;
    bool has_taken;
};

/* Ends the right to read each link. What needs a thread of the reactor is handed over. */
static void end(lease *self, bool leaves_unarmed)
{
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    for (Py_ssize_t place = 0; place < self->count; place++) {
        connection *each = self->links[place];
        lease **holder = &each->lease;
        while (*holder != NULL && *holder != self) { /* Inner ones may outlive this one. */
            lease *inner = *holder;
            Py_ssize_t at = 0;
            while (at < inner->count && inner->links[at] != each)
                at++;
            holder = &inner->outer[at];
        }
        if (*holder == self)
            *holder = self->outer[place];
        if (each->lease == NULL) {
            if (!leaves_unarmed)
                link_arm(each, true);
            if (each->must_read && link_hand_over(each))
                PyErr_WriteUnraisable((PyObject *)self);
        }
    }
    if (self->owed != NULL && self->count > 0) {
        connection *first = self->links[0];
        PyObject *done = PyObject_CallOneArg(first->add_task, self->owed);
        if (done == NULL)
            PyErr_WriteUnraisable((PyObject *)self);
        Py_XDECREF(done);
        uint64_t one = 1;
        if (write(first->wake_fd, &one, sizeof one) < 0)
            errno = 0; /* The reactor has ended. */
    }
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
    unsigned long me = PyThread_get_thread_ident();
    if (count < 1 || count > MOST_LINKS)
        Py_RETURN_NONE;
    lease *self = (lease *)((PyTypeObject *)type)->tp_alloc((PyTypeObject *)type, 0);
    if (self == NULL) /* First, as a finalizer may run here, and take a lease. */
        return NULL;
    for (Py_ssize_t place = 0; place < count; place++) {
        if (!PyObject_TypeCheck(PyTuple_GET_ITEM(links, place), &link_type)) {
            Py_DECREF(self);
            PyErr_SetString(PyExc_TypeError, "a lease is one of links");
            return NULL;
        }
        const connection *each = (connection *)PyTuple_GET_ITEM(links, place);
        bool is_mine = each->lease == NULL || each->lease->thread == me;
        if (each->is_claimed || each->is_closed || each->is_broken || each->is_large || !is_mine) {
            Py_DECREF(self);
            Py_RETURN_NONE;
        }
    }
    self->thread = me;
    for (; self->count < count; self->count++) {
        connection *each = (connection *)Py_NewRef(PyTuple_GET_ITEM(links, self->count));
        self->links[self->count] = each;
        self->outer[self->count] = each->lease;
        if (each->lease == NULL)
            link_arm(each, false);
        each->lease = self;
    }
    return (PyObject *)self;
}

/* Gives a frame to a lease that waits for it; returns 1, 0 if it does not, -1 with an exception. */
static int deliver(lease *self, const connection *from, PyObject *frame, long kind, uint64_t number)
{
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

/* Cuts the frames of one link, and gives each to whom it is for; returns 0, or -1. */
static int take_frames(connection *from)
{
    bool is_for_others = false;
    int was_collecting = PyGC_Disable(); /* A finalizer could read the same link. */
    PyObject *frame;
    int status, failed = 0;
    while (!failed && (status = link_cut(from, &frame)) > 0) {
        long kind = PyLong_AsLong(PyTuple_GET_ITEM(frame, 0));
        uint64_t number = PyLong_AsUnsignedLongLong(PyTuple_GET_ITEM(frame, 2));
        int taken = 0;
        for (lease *each = from->lease; each != NULL && !taken;) {
            taken = deliver(each, from, frame, kind, number);
            Py_ssize_t place = 0;
            while (each->links[place] != from)
                place++;
            each = each->outer[place];
        }
        if (!taken) {
            taken = link_leave(from, frame);
            is_for_others = true;
        }
        Py_DECREF(frame);
        failed = taken < 0;
    }
    if (!failed && status < 0) {
        failed = !PyErr_ExceptionMatches(library.protocol_error);
        if (!failed)
            PyErr_Clear(); /* The thread of the reactor that reads next meets it again. */
        from->must_read = true;
    }
    from->must_read |= from->is_large;
    if (!failed && is_for_others)
        failed = link_hand_over(from);
    if (was_collecting)
        PyGC_Enable();
    return failed ? -1 : 0;
}

typedef struct {
    lease *lease;
    bool ended;
} looks;

static bool look_at_all(void *context)
{
    looks *all = context;
    bool is_any = false;
    for (Py_ssize_t place = 0; place < all->lease->count; place++)
        is_any |= link_look(all->lease->links[place], &all->ended);
    return is_any;
}

/* Looks, for a moment if there is a policy, without the interpreter lock. Returns whether there was
 * anything, and whether a link has ended. */
static bool look(lease *self, spinning *policy, bool *ended)
{
    looks all = {self, false};
    bool is_any;
    for (Py_ssize_t place = 0; place < self->count; place++)
        self->links[place]->is_looking = true;
    Py_BEGIN_ALLOW_THREADS
    is_any = policy != NULL ? spin_until(policy, look_at_all, &all) : look_at_all(&all);
    Py_END_ALLOW_THREADS
    for (Py_ssize_t place = 0; place < self->count; place++)
        self->links[place]->is_looking = false;
    *ended = all.ended;
    return is_any;
}

/* Sleeps until there is data, or for a moment; returns what poll does. */
static int sleep_until_data(const lease *self, int wake_fd, double left_s)
{
    struct pollfd fds[MOST_LINKS + 1];
    nfds_t count = 0;
    for (; count < (nfds_t)self->count; count++)
        fds[count] = (struct pollfd){.fd = self->links[count]->fd, .events = POLLIN};
    fds[count++] = (struct pollfd){.fd = wake_fd, .events = POLLIN};
    int ready, limit_ms = left_s * 1e3 < TICK_MS ? (int)(left_s * 1e3) + 1 : TICK_MS;
    Py_BEGIN_ALLOW_THREADS
    ready = poll(fds, count, limit_ms);
    Py_END_ALLOW_THREADS
    uint64_t wakes;
    if (ready > 0 && fds[count - 1].revents && read(wake_fd, &wakes, sizeof wakes) < 0)
        return -1;
    return ready;
}

/* Waits as `wait` says; returns TAKEN, NOTHING, ENDED, or -2 with an exception. */
static int wait_for_frames(lease *self, spinning *policy, double limit_s, int wake_fd)
{
    bool may_sleep = limit_s > 0, ended = false;
    for (;;) {
        bool spins = policy != NULL && spin_is_worthwhile(policy);
        bool is_any = look(self, spins ? policy : NULL, &ended);
        policy = NULL;
        for (Py_ssize_t place = 0; is_any && place < self->count; place++)
            if (take_frames(self->links[place]))
                return -2;
        for (Py_ssize_t place = 0; place < self->count; place++)
            ended |= self->links[place]->must_read;
        if (self->has_taken || ended)
            return self->has_taken ? TAKEN : ENDED;
        double left_s = limit_s - monotonic_s();
        if (!may_sleep || left_s <= 0)
            return NOTHING;
        int ready = sleep_until_data(self, wake_fd, left_s);
        if (PyErr_CheckSignals())
            return -2;
        if (self->has_taken || self->count == 0) /* By the handler. */
            return self->has_taken ? TAKEN : ENDED;
        if (ready <= 0)
            return NOTHING;
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
    if (self->count == 0 || spins >= SPIN_KINDS)
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

/* release(leaves_unarmed=False) */
static PyObject *lease_release(lease *self, PyObject *arguments, PyObject *named)
{
    static char *names[] = {"leaves_unarmed", NULL};
    int leaves_unarmed = 0;
    if (!PyArg_ParseTupleAndKeywords(arguments, named, "|p", names, &leaves_unarmed))
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
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static PyMethodDef methods[] = {
    {"take", lease_take, METH_O | METH_CLASS, NULL},
    {"wait", (PyCFunction)lease_wait, METH_VARARGS, NULL},
    {"settle", (PyCFunction)lease_settle, METH_NOARGS, NULL},
    {"release", (PyCFunction)(void (*)(void))lease_release, METH_VARARGS | METH_KEYWORDS, NULL},
    {NULL, NULL, 0, NULL},
};

PyTypeObject lease_type = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "torchweft._native.Lease",
    .tp_doc = "The right of one thread to read some links: see torchweft/agent/waiting.py.",
    .tp_basicsize = sizeof(lease),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .tp_dealloc = (destructor)lease_dealloc,
    .tp_traverse = (traverseproc)lease_traverse,
    .tp_methods = methods,
};
