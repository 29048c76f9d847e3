/* A connection as torchweft/engine/io/link.py uses it: writes messages, and reads frames.
 *
 * The interpreter lock guards everything here. It is released only while a thread copies much or
 * looks for data; `is_writing` and `is_looking` say so meanwhile. One thread writes at a
 * time, and takes along what others queue. One thread reads at a time: a thread of the reactor, or
 * one with a lease. Signal handlers run in no function but lease_wait.
 *
 * A link that keeps what it wrote belongs to a session: see torchweft/engine/wire/session.py.
 */
#define _GNU_SOURCE
#include "link.h"

#include <errno.h>
#include <limits.h>
#include <poll.h>
#include <structmember.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

enum { HEADER_BYTES = 16, MOST_PIECES = 64, LONG_COPY_BYTES = 1 << 15 };

/* ---------------------------------------------------------------------------------- Writing */

static void drop_first(connection *self)
{
    Py_buffer *first = &self->parts[self->begin++];
    self->front += (unsigned long long)first->len;
    PyBuffer_Release(first);
}

static void drop_all(connection *self)
{
    while (self->begin < self->end)
        drop_first(self);
    self->begin = self->unsent = self->end = 0;
    self->unsent_offset = 0;
}

/* Makes room for `more` parts behind the others; returns 0, or -1 with an exception. */
static int reserve(connection *self, size_t more)
{
    if (self->begin > 0 && self->begin >= self->end - self->begin) {
        memmove(self->parts, self->parts + self->begin,
                (self->end - self->begin) * sizeof *self->parts);
        self->end -= self->begin;
        self->unsent -= self->begin;
        self->begin = 0;
    }
    if (self->capacity - self->end >= more)
        return 0;
    size_t capacity = 2 * (self->end + more);
    Py_buffer *grown = PyMem_Realloc(self->parts, capacity * sizeof *grown);
    if (grown == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    self->parts = grown;
    self->capacity = capacity;
    return 0;
}

/* Queues all pieces of a message, or none; returns 0, or -1 with an exception. */
static int queue_message(connection *self, PyObject *message)
{
    PyObject *pieces = PySequence_Fast(message, "a message is a list of buffers");
    if (pieces == NULL)
        return -1;
    Py_ssize_t count = PySequence_Fast_GET_SIZE(pieces);
    int status = reserve(self, (size_t)count);
    size_t before = self->end;
    for (Py_ssize_t place = 0; !status && place < count; place++) {
        Py_buffer *into = &self->parts[self->end];
        status = PyObject_GetBuffer(PySequence_Fast_GET_ITEM(pieces, place), into, PyBUF_SIMPLE);
        if (!status && into->len == 0)
            PyBuffer_Release(into);
        else if (!status)
            self->position += (unsigned long long)self->parts[self->end++].len;
    }
    Py_DECREF(pieces);
    while (status && self->end > before) {
        self->position -= (unsigned long long)self->parts[--self->end].len;
        PyBuffer_Release(&self->parts[self->end]);
    }
    return status;
}

/* Notes bytes as written. */
static void advance(connection *self, size_t size)
{
    self->bytes_sent += size;
    while (size > 0) {
        size_t left = (size_t)self->parts[self->unsent].len - self->unsent_offset;
        if (size < left) {
            self->unsent_offset += size;
            return;
        }
        size -= left;
        self->unsent_offset = 0;
        self->unsent++;
        if (!self->keeps)
            drop_first(self);
    }
}

/* Writes some of the queue without waiting; returns what sendmsg does. */
static ssize_t write_some(connection *self)
{
    struct iovec pieces[MOST_PIECES];
    size_t count = 0, size = 0, offset = self->unsent_offset;
    for (size_t at = self->unsent; at < self->end && count < MOST_PIECES; at++, offset = 0) {
        Py_buffer *bytes = &self->parts[at];
        pieces[count].iov_base = (char *)bytes->buf + offset;
        pieces[count].iov_len = (size_t)bytes->len - offset;
        size += pieces[count++].iov_len;
    }
    struct msghdr message = {.msg_iov = pieces, .msg_iovlen = count};
    PyThreadState *state = size < LONG_COPY_BYTES ? NULL : PyEval_SaveThread();
    ssize_t written = self->out != NULL
        ? ring_send(self, pieces, count) : sendmsg(self->fd, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
    int error = errno;
    if (state != NULL)
        PyEval_RestoreThread(state);
    errno = error;
    return written;
}

/* write(message): queues a message, and writes what is queued.
 *
 * Returns False if the socket or the ring is full: then write again when there is room. OSError: the connection
 * has ended; a session keeps what is not written. */
static PyObject *link_write(connection *self, PyObject *message)
{
    if (queue_message(self, message))
        return NULL;
    if (self->is_writing || self->is_broken)
        Py_RETURN_TRUE; /* The writer, or the thread that mends the connection, takes it along. */
    self->is_writing = true;
    int error = 0;
    while (self->unsent < self->end && !self->is_broken && !self->is_closed && !error) {
        ssize_t written = write_some(self);
        if (written >= 0)
            advance(self, (size_t)written);
        else if (errno != EINTR)
            error = errno;
    }
    self->is_writing = false;
    if (self->is_closed) {
        error = EPIPE;
        drop_all(self);
    }
    if (!error || error == EAGAIN || error == EWOULDBLOCK)
        return PyBool_FromLong(!error);
    errno = error;
    return PyErr_SetFromErrno(PyExc_OSError);
}

/* Queues a message for the next `write`; returns how many pieces are queued. */
static PyObject *link_hold(connection *self, PyObject *message)
{
    if (queue_message(self, message))
        return NULL;
    return PyLong_FromSize_t(self->end - self->unsent);
}

/* acknowledge(position): drops what a session keeps, up to a position in its stream. */
static PyObject *link_acknowledge(connection *self, PyObject *number)
{
    unsigned long long position = PyLong_AsUnsignedLongLong(number);
    if (PyErr_Occurred())
        return NULL;
    while (self->begin < self->unsent &&
           self->front + (unsigned long long)self->parts[self->begin].len <= position)
        drop_first(self);
    Py_RETURN_NONE;
}

/* resume(position): goes on with a session, on a new connection under the same descriptor, from a
 * position that is kept. */
static PyObject *link_resume(connection *self, PyObject *number)
{
    PyObject *done = link_acknowledge(self, number);
    if (done != NULL) {
        self->unsent = self->begin;
        self->unsent_offset = (size_t)(PyLong_AsUnsignedLongLong(number) - self->front);
        self->is_broken = false;
    }
    return done;
}

/* ---------------------------------------------------------------------------------- Reading */

static uint64_t number_at(const unsigned char *from, size_t size)
{
    uint64_t number = 0;
    memcpy(&number, from, size);
    return number;
}

static PyObject *buffers_of(const unsigned char *lengths, size_t count, const unsigned char *from)
{
    if (count == 0)
        return PyTuple_New(0);
    PyObject *buffers = PyList_New((Py_ssize_t)count);
    for (size_t place = 0; buffers != NULL && place < count; place++) {
        Py_ssize_t size = (Py_ssize_t)number_at(lengths + 8 * place, 8);
        PyObject *bytes = PyByteArray_FromStringAndSize((const char *)from, size);
        if (bytes == NULL)
            Py_CLEAR(buffers);
        else
            PyList_SET_ITEM(buffers, (Py_ssize_t)place, bytes);
        from += size;
    }
    return buffers;
}

/* Makes a Frame of its parts; `lengths` are those of `count` buffers behind the control part. */
static PyObject *make_frame(const unsigned char *head, const unsigned char *lengths, size_t count,
                            const unsigned char *control, size_t control_bytes)
{
    PyTypeObject *type = (PyTypeObject *)library.frame_type;
    PyObject *frame = type->tp_alloc(type, 5);
    if (frame == NULL)
        return NULL;
    PyTuple_SET_ITEM(frame, 0, PyLong_FromLong(head[0]));
    PyTuple_SET_ITEM(frame, 1, PyLong_FromLong(head[1]));
    PyTuple_SET_ITEM(frame, 2, PyLong_FromUnsignedLongLong(number_at(head + 8, 8)));
    PyTuple_SET_ITEM(frame, 3, PyBytes_FromStringAndSize((const char *)control,
                                                         (Py_ssize_t)control_bytes));
    PyTuple_SET_ITEM(frame, 4, buffers_of(lengths, count, control + control_bytes));
    if (PyErr_Occurred())
        Py_CLEAR(frame);
    return frame;
}

/* Cuts the next whole frame; returns 1, 0 if there is none, or -1 with an exception. A frame that does
 * not fit into `data` is left to the plain parser, which knows the limits. */
static int link_cut(connection *self, PyObject **frame)
{
    const unsigned char *head = self->data + self->data_begin, *lengths = head + HEADER_BYTES;
    size_t available = self->data_end - self->data_begin;
    if (available < HEADER_BYTES)
        return 0;
    size_t count = (size_t)number_at(head + 2, 2), control_bytes = (size_t)number_at(head + 4, 4);
    size_t before_control = HEADER_BYTES + 8 * count;
    uint64_t size = (uint64_t)before_control + control_bytes;
    for (size_t place = 0; place < count && before_control <= available; place++) {
        uint64_t length = number_at(lengths + 8 * place, 8);
        size = length > UINT64_MAX - size ? UINT64_MAX : size + length;
    }
    self->is_large = size > self->data_capacity;
    if (self->is_large || available < size)
        return 0;
    *frame = make_frame(head, lengths, count, head + before_control, control_bytes);
    if (*frame == NULL)
        return -1;
    self->data_begin += (size_t)size;
    return 1;
}

/* Receives what is there; returns whether anything arrived or ended. */
static bool receive(connection *self)
{
    if (self->data_begin > 0) {
        memmove(self->data, self->data + self->data_begin, self->data_end - self->data_begin);
        self->data_end -= self->data_begin;
        self->data_begin = 0;
    }
    size_t room = self->data_capacity - self->data_end;
    self->read_error = 0;
    self->has_ended = self->is_large || self->is_broken || self->is_closed || room == 0;
    if (self->has_ended)
        return true;
    unsigned char *into = self->data + self->data_end;
    ssize_t size = self->in != NULL
        ? ring_receive(self, into, room) : recv(self->fd, into, room, MSG_DONTWAIT);
    if (size > 0) {
        self->data_end += (size_t)size;
        self->bytes_received += (unsigned long long)size;
        return true;
    }
    if (size < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR))
        return false;
    self->read_error = size < 0 ? errno : 0;
    return self->has_ended = true;
}

bool links_receive(connection *const *links, Py_ssize_t count)
{
    bool is_any = false;
    for (Py_ssize_t place = 0; place < count; place++)
        is_any |= receive(links[place]);
    return is_any;
}

bool links_look(connection *const *links, Py_ssize_t count, spinning *policy)
{
    bool is_any, spins = policy != NULL && spin_is_worthwhile(policy);
    for (Py_ssize_t place = 0; place < count; place++)
        links[place]->is_looking = true;
    Py_BEGIN_ALLOW_THREADS
    is_any = spins ? spin_over(policy, links, count) : links_receive(links, count);
    Py_END_ALLOW_THREADS
    for (Py_ssize_t place = 0; place < count; place++)
        links[place]->is_looking = false;
    return is_any;
}

Py_ssize_t link_take_frames(connection *self)
{
    Py_ssize_t count = 0;
    int was_collecting = PyGC_Disable(); /* A finalizer could read the same link. */
    PyObject *frame;
    int status;
    while ((status = link_cut(self, &frame)) > 0) {
        status = self->lease == NULL ? 0 : lease_deliver(self->lease, self, frame);
        if (status == 0) {
            PyObject *done = PyObject_CallOneArg(self->add_frame, frame);
            status = done == NULL ? -1 : 0;
            Py_XDECREF(done);
            count++;
        }
        Py_DECREF(frame);
        if (status < 0)
            break;
    }
    if (was_collecting)
        PyGC_Enable();
    return status < 0 ? -1 : count;
}

/* read(spins): for a thread of the reactor: receives, and gives whole frames to `add_frame`.
 *
 * Returns how many; None if the stream has ended, or `is_large` says that the next frame is for the
 * plain parser. OSError: the connection is of no use any more. */
static PyObject *link_read(connection *self, PyObject *spins)
{
    self->must_read = false;
    self->has_bell |= spins != Py_True; /* An event has brought this thread. */
    bool is_any = links_look(&self, 1, spins == Py_True ? &self->spins[FOR_REQUESTS] : NULL);
    Py_ssize_t count = link_take_frames(self);
    if (count < 0)
        return NULL;
    if (count > 0 || !is_any || !self->has_ended)
        return PyLong_FromSsize_t(count);
    if (!self->read_error || self->is_broken || self->is_closed)
        Py_RETURN_NONE;
    errno = self->read_error;
    return PyErr_SetFromErrno(PyExc_OSError);
}

/* Reads out of the ring until `size` bytes are there, or until nothing comes for a tick; else as recv. */
static ssize_t receive_all(connection *self, void *into, size_t size)
{
    size_t count = 0;
    while (count < size) {
        ssize_t more = ring_receive(self, (char *)into + count, size - count);
        count += more > 0 ? (size_t)more : 0;
        if (more > 0 || (more < 0 && errno == EAGAIN && ring_sleep(self)))
            continue;
        struct pollfd end = {.fd = self->fd, .events = POLLIN};
        if (more == 0 || errno != EAGAIN || poll(&end, 1, TICK_MS) <= 0)
            return count > 0 ? (ssize_t)count : more;
        self->has_bell = true;
    }
    return (ssize_t)count;
}

/* fill(into, may_block): reads a part of a large frame out of the ring, as recv_into. */
static PyObject *link_fill(connection *self, PyObject *arguments)
{
    Py_buffer bytes;
    int may_block;
    if (!PyArg_ParseTuple(arguments, "w*p", &bytes, &may_block))
        return NULL;
    ssize_t size = 0;
    self->has_bell = self->is_looking = true;
    Py_BEGIN_ALLOW_THREADS
    if (!self->is_closed)
        size = (may_block ? receive_all : ring_receive)(self, bytes.buf, (size_t)bytes.len);
    Py_END_ALLOW_THREADS
    self->is_looking = false;
    ring_wake(self);
    PyBuffer_Release(&bytes);
    return size < 0 ? PyErr_SetFromErrno(PyExc_OSError) : PyLong_FromSsize_t(size);
}

/* Returns the begin of a large frame, which the plain parser takes over. */
static PyObject *link_take_data(connection *self, PyObject *Py_UNUSED(nothing))
{
    PyObject *data = PyBytes_FromStringAndSize((char *)self->data + self->data_begin,
                                               (Py_ssize_t)(self->data_end - self->data_begin));
    if (data != NULL)
        self->data_begin = self->data_end = 0;
    return data;
}

/* Claims the right to read, for a thread of the reactor; returns whether it was free. */
static PyObject *link_claim(connection *self, PyObject *Py_UNUSED(nothing))
{
    self->is_armed = false; /* An event may have brought this thread. */
    if (self->is_claimed || self->lease != NULL)
        Py_RETURN_FALSE;
    self->is_claimed = true;
    ring_wake(self);
    Py_RETURN_TRUE;
}

static PyObject *link_unclaim(connection *self, PyObject *Py_UNUSED(nothing))
{
    self->is_claimed = false;
    Py_RETURN_NONE;
}

static void set_events(const connection *self, int fd, uint32_t events)
{
    struct epoll_event event = {.events = EPOLLONESHOT | events, .data.fd = fd};
    if (self->epoll_fd >= 0 && fd >= 0 && !self->is_closed)
        epoll_ctl(self->epoll_fd, EPOLL_CTL_MOD, fd, &event);
}

void link_arm(connection *self, bool is_armed)
{
    /* What the ring has already is due at once, and the socket is always writable. */
    bool is_due = is_armed && ring_sleep(self), was_armed = self->is_armed && self->in != NULL;
    self->is_armed = is_armed;
    if (!is_armed || is_due || !was_armed)
        set_events(self, self->fd, is_armed ? EPOLLIN | EPOLLRDHUP | (is_due ? EPOLLOUT : 0) : 0);
}

/* arm(): has the reactor told when there is something to read. */
static PyObject *link_arm_reading(connection *self, PyObject *Py_UNUSED(nothing))
{
    self->is_armed = false; /* An event may have brought this thread. */
    link_arm(self, true);
    Py_RETURN_NONE;
}

void link_arm_writing(connection *self)
{
    self->awaits_room = !ring_has_room(self); /* If so, the reader of the link calls this again. */
    if (!self->awaits_room)
        set_events(self, self->write_fd, EPOLLOUT);
}

/* await_room(): has the reactor told when there is room to write. */
static PyObject *link_await_room(connection *self, PyObject *Py_UNUSED(nothing))
{
    link_arm_writing(self);
    Py_RETURN_NONE;
}

int link_submit(const connection *self, PyObject *task)
{
    PyObject *done = PyObject_CallOneArg(self->add_task, task);
    Py_XDECREF(done);
    uint64_t one = 1;
    if (done != NULL && write(self->wake_fd, &one, sizeof one) < 0)
        errno = 0; /* The reactor has ended. */
    return done == NULL ? -1 : 0;
}

int link_hand_over(connection *self)
{
    if (!self->is_handed_over && link_submit(self, self->task))
        return -1;
    self->is_handed_over = true;
    return 0;
}

/* watch(epoll_fd, write_fd, wake_fd, add_task, task): tells how threads of the reactor are reached. */
static PyObject *link_watch(connection *self, PyObject *arguments)
{
    PyObject *add_task, *task;
    if (!PyArg_ParseTuple(arguments, "iiiOO", &self->epoll_fd, &self->write_fd, &self->wake_fd,
                          &add_task, &task))
        return NULL;
    Py_XSETREF(self->add_task, Py_NewRef(add_task));
    Py_XSETREF(self->task, Py_NewRef(task));
    Py_RETURN_NONE;
}

/* close(): nothing is read or written from now on; once more, when no thread reads or writes: frees
 * the ring. */
static PyObject *link_close(connection *self, PyObject *Py_UNUSED(nothing))
{
    if (self->is_closed && !self->is_writing && !self->is_looking) {
        self->in = self->out = NULL;
        PyBuffer_Release(&self->memory);
    }
    self->is_closed = true;
    self->epoll_fd = self->wake_fd = -1; /* Both may be closed by now, or soon. */
    if (!self->is_writing)
        drop_all(self);
    Py_RETURN_NONE;
}

/* ---------------------------------------------------------------------------------- The type */

static int link_traverse(connection *self, visitproc visit, void *arg)
{
    Py_VISIT(self->peer);
    Py_VISIT(self->add_task);
    Py_VISIT(self->task);
    Py_VISIT(self->add_frame);
    return 0;
}

static int link_clear(connection *self)
{
    Py_CLEAR(self->peer);
    Py_CLEAR(self->add_task);
    Py_CLEAR(self->task);
    Py_CLEAR(self->add_frame);
    return 0;
}

static void link_dealloc(connection *self)
{
    PyObject_GC_UnTrack(self);
    link_clear(self);
    drop_all(self);
    PyMem_Free(self->parts);
    PyMem_RawFree(self->data);
    PyBuffer_Release(&self->memory);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static PyObject *link_new(PyTypeObject *type, PyObject *arguments, PyObject *Py_UNUSED(named))
{
    int fd, keeps, is_first = false;
    PyObject *peer, *add_frame, *memory = Py_None;
    Py_ssize_t receive_bytes;
    double spin_s;
    if (!PyArg_ParseTuple(arguments, "iOOpnd|Op", &fd, &peer, &add_frame, &keeps, &receive_bytes,
                          &spin_s, &memory, &is_first))
        return NULL;
    connection *self = (connection *)type->tp_alloc(type, 0); /* All bytes are 0. */
    if (self == NULL)
        return NULL;
    self->fd = fd;
    self->epoll_fd = self->write_fd = self->wake_fd = -1;
    self->peer = Py_NewRef(peer);
    self->add_frame = Py_NewRef(add_frame);
    self->keeps = keeps;
    self->data_capacity = (size_t)receive_bytes;
    self->data = PyMem_RawMalloc(self->data_capacity);
    for (int kind = 0; kind < SPIN_KINDS; kind++)
        self->spins[kind] = (spinning){.spin_s = spin_s, .may_end_rest = true};
    self->spins[FOR_PASSES].spin_s = 3 * spin_s;
    if (self->data == NULL)
        PyErr_NoMemory();
    if (self->data == NULL || ring_open(self, memory, is_first)) {
        Py_DECREF(self);
        return NULL;
    }
    return (PyObject *)self;
}

static PyObject *get_queued(connection *self, void *Py_UNUSED(context))
{
    return PyBool_FromLong(self->unsent < self->end);
}

static PyGetSetDef properties[] = {
    {"has_queued", (getter)get_queued, NULL, "Whether anything waits to be written.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyMemberDef members[] = {
    {"position", T_ULONGLONG, offsetof(connection, position), READONLY, "Bytes ever queued."},
    {"is_writing", T_BOOL, offsetof(connection, is_writing), READONLY, NULL},
    {"is_looking", T_BOOL, offsetof(connection, is_looking), READONLY, NULL},
    {"is_large", T_BOOL, offsetof(connection, is_large), 0, NULL},
    {"is_broken", T_BOOL, offsetof(connection, is_broken), 0, NULL},
    {"is_handed_over", T_BOOL, offsetof(connection, is_handed_over), 0, NULL},
    {"bytes_sent", T_ULONGLONG, offsetof(connection, bytes_sent), READONLY, NULL},
    {"bytes_received", T_ULONGLONG, offsetof(connection, bytes_received), 0, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyMethodDef methods[] = {
    {"write", (PyCFunction)link_write, METH_O, NULL},
    {"hold", (PyCFunction)link_hold, METH_O, NULL},
    {"acknowledge", (PyCFunction)link_acknowledge, METH_O, NULL},
    {"resume", (PyCFunction)link_resume, METH_O, NULL},
    {"read", (PyCFunction)link_read, METH_O, NULL},
    {"take_data", (PyCFunction)link_take_data, METH_NOARGS, NULL},
    {"claim", (PyCFunction)link_claim, METH_NOARGS, NULL},
    {"unclaim", (PyCFunction)link_unclaim, METH_NOARGS, NULL},
    {"watch", (PyCFunction)link_watch, METH_VARARGS, NULL},
    {"arm", (PyCFunction)link_arm_reading, METH_NOARGS, NULL},
    {"await_room", (PyCFunction)link_await_room, METH_NOARGS, NULL},
    {"fill", (PyCFunction)link_fill, METH_VARARGS, NULL},
    {"close", (PyCFunction)link_close, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

PyTypeObject link_type = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "torchweft._native.Link",
    .tp_doc = "One connection: see torchweft/engine/io/link.py.",
    .tp_basicsize = sizeof(connection),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .tp_new = link_new,
    .tp_dealloc = (destructor)link_dealloc,
    .tp_traverse = (traverseproc)link_traverse,
    .tp_clear = (inquiry)link_clear,
    .tp_methods = methods,
    .tp_members = members,
    .tp_getset = properties,
};
