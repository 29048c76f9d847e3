/* A connection as torchweft/transport/link.py uses it: writes messages, and reads frames.
 *
 * The interpreter lock guards everything here. It is released only while a thread copies much or
 * looks for data; `is_writing` and `is_looking` say so meanwhile. One thread writes at a
 * time, and takes along what others queue. One thread reads at a time: a thread of the reactor, or
 * one with a lease. Signal handlers run in no function but lease_wait.
 *
 * A link that keeps what it wrote belongs to a session: see torchweft/wire/session.py.
 */
#define _GNU_SOURCE
#include "link.h"

#include <errno.h>
#include <limits.h>
#include <structmember.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

enum { HEADER_BYTES = 16, MOST_PIECES = 64, LONG_COPY_BYTES = 1 << 15 };

static PyObject *frame_type, *no_buffers, *name_append;

/* ---------------------------------------------------------------------------------- Writing */

static void drop_first(connection *self)
{
    part *first = &self->parts[self->begin++];
    self->front += (unsigned long long)first->bytes.len;
    PyBuffer_Release(&first->bytes);
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
    part *grown = PyMem_Realloc(self->parts, capacity * sizeof *grown);
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
    size_t end = self->end;
    int status = reserve(self, (size_t)count);
    if (!status)
        end = self->end;
    for (Py_ssize_t place = 0; !status && place < count; place++) {
        Py_buffer *into = &self->parts[end].bytes;
        status = PyObject_GetBuffer(PySequence_Fast_GET_ITEM(pieces, place), into, PyBUF_SIMPLE);
        if (!status && into->len == 0)
            PyBuffer_Release(into);
        else if (!status)
            end++;
    }
    Py_DECREF(pieces);
    if (status) /* `end` of the link is still before them. */
        while (end > self->end)
            PyBuffer_Release(&self->parts[--end].bytes);
    else
        while (self->end < end)
            self->position += (unsigned long long)self->parts[self->end++].bytes.len;
    return status;
}

/* Notes bytes as written. */
static void advance(connection *self, size_t size)
{
    self->bytes_sent += size;
    while (size > 0) {
        size_t left = (size_t)self->parts[self->unsent].bytes.len - self->unsent_offset;
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
        Py_buffer *bytes = &self->parts[at].bytes;
        pieces[count].iov_base = (char *)bytes->buf + offset;
        pieces[count].iov_len = (size_t)bytes->len - offset;
        size += pieces[count++].iov_len;
    }
    struct msghdr message = {.msg_iov = pieces, .msg_iovlen = count};
    if (size < LONG_COPY_BYTES)
        return sendmsg(self->fd, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
    ssize_t written;
    int error;
    Py_BEGIN_ALLOW_THREADS
    written = sendmsg(self->fd, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
    error = errno;
    Py_END_ALLOW_THREADS
    errno = error;
    return written;
}

/* write(message): queues a message, and writes what is queued.
 *
 * Returns False if the socket is full: then write again when there is room. OSError: the connection
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
           self->front + (unsigned long long)self->parts[self->begin].bytes.len <= position)
        drop_first(self);
    Py_RETURN_NONE;
}

/* resume(position): goes on with a session, on a new connection under the same descriptor, from a
 * position that is kept. */
static PyObject *link_resume(connection *self, PyObject *number)
{
    unsigned long long position = PyLong_AsUnsignedLongLong(number);
    if (PyErr_Occurred())
        return NULL;
    link_acknowledge(self, number);
    self->unsent = self->begin;
    self->unsent_offset = (size_t)(position - self->front);
    self->is_broken = false;
    Py_RETURN_NONE;
}

/* ---------------------------------------------------------------------------------- Reading */

static PyObject *refuse(const char *what, unsigned long long size, unsigned long long limit)
{
    return PyErr_Format(library.protocol_error, "a frame announces %s%llu bytes; the limit is %llu",
                        what, size, limit);
}

static uint64_t number_at(const unsigned char *from, size_t size)
{
    uint64_t number = 0;
    memcpy(&number, from, size);
    return number;
}

static PyObject *buffers_of(const unsigned char *lengths, size_t count, const unsigned char *from)
{
    if (count == 0)
        return Py_NewRef(no_buffers);
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

/* Makes a Frame of its parts. Takes over `buffers`, which may be NULL. */
static PyObject *make_frame(const unsigned char *head, const unsigned char *control,
                            size_t control_bytes, PyObject *buffers)
{
    PyTypeObject *type = (PyTypeObject *)frame_type;
    PyObject *frame = buffers == NULL ? NULL : type->tp_alloc(type, 5);
    if (frame == NULL) {
        Py_XDECREF(buffers);
        return NULL;
    }
    PyObject *parts[] = {
        PyLong_FromLong(head[0]), PyLong_FromLong(head[1]),
        PyLong_FromUnsignedLongLong(number_at(head + 8, 8)),
        PyBytes_FromStringAndSize((const char *)control, (Py_ssize_t)control_bytes), buffers,
    };
    bool is_made = true;
    for (Py_ssize_t place = 0; place < 5; place++) {
        PyTuple_SET_ITEM(frame, place, parts[place]);
        is_made &= parts[place] != NULL;
    }
    if (!is_made)
        Py_CLEAR(frame);
    return frame;
}

/* Cuts the next whole frame; returns 1, 0 if there is none, or -1 with an exception. */
static int link_cut(connection *self, PyObject **frame)
{
    const unsigned char *head = self->data + self->data_begin;
    size_t available = self->data_end - self->data_begin;
    if (self->is_large || available < HEADER_BYTES)
        return 0;
    size_t count = (size_t)number_at(head + 2, 2);
    uint64_t control_bytes = number_at(head + 4, 4), size = HEADER_BYTES + 8 * count;
    if (control_bytes > self->control_limit) {
        refuse("a control part of ", control_bytes, self->control_limit);
        return -1;
    }
    self->is_large = size > self->data_capacity;
    if (available < size)
        return 0;
    const unsigned char *lengths = head + HEADER_BYTES, *control = lengths + 8 * count;
    size += control_bytes;
    for (size_t place = 0; place < count; place++) {
        uint64_t length = number_at(lengths + 8 * place, 8);
        size = length > UINT64_MAX - size ? UINT64_MAX : size + length;
    }
    if (count > 0 && size > self->frame_limit) {
        refuse("", size, self->frame_limit);
        return -1;
    }
    self->is_large = size > self->data_capacity;
    if (available < size)
        return 0;
    PyObject *buffers = buffers_of(lengths, count, control + control_bytes);
    *frame = make_frame(head, control, (size_t)control_bytes, buffers);
    if (*frame == NULL)
        return -1;
    self->data_begin += (size_t)size;
    return 1;
}

bool link_look(connection *self, bool *ended)
{
    if (self->data_begin > 0) {
        memmove(self->data, self->data + self->data_begin, self->data_end - self->data_begin);
        self->data_end -= self->data_begin;
        self->data_begin = 0;
    }
    size_t room = self->data_capacity - self->data_end;
    if (self->is_large || self->is_broken || self->is_closed || room == 0)
        return *ended = true;
    ssize_t size = recv(self->fd, self->data + self->data_end, room, MSG_DONTWAIT);
    if (size > 0) {
        self->data_end += (size_t)size;
        self->bytes_received += (unsigned long long)size;
        return true;
    }
    if (size < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR))
        return false;
    return *ended = true;
}

/* Cuts all whole frames. Each goes to the lease that waits for it, or to `incoming`; returns how many
 * went there, or -1 with an exception. */
Py_ssize_t link_take_frames(connection *self)
{
    Py_ssize_t count = 0;
    int was_collecting = PyGC_Disable(); /* A finalizer could read the same link. */
    PyObject *frame;
    int status;
    while ((status = link_cut(self, &frame)) > 0) {
        status = self->lease == NULL ? 0 : lease_deliver(self->lease, self, frame);
        if (status == 0) {
            PyObject *done = PyObject_CallMethodOneArg(self->incoming, name_append, frame);
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

typedef struct {
    connection *link;
    bool ended;
} one_look;

static bool look_once(void *context)
{
    one_look *each = context;
    return link_look(each->link, &each->ended);
}

/* read(spins): for a thread of the reactor: receives, and appends whole frames to `incoming`.
 *
 * Returns how many; None if the stream has ended, or `is_large` says that the next frame is for the
 * plain parser. OSError and ProtocolError: the connection is of no use any more. */
static PyObject *link_read(connection *self, PyObject *spins)
{
    int may_spin = PyObject_IsTrue(spins);
    spinning *policy = &self->spins[FOR_REQUESTS];
    one_look look = {self, false};
    bool is_any;
    int error;
    self->must_read = false;
    may_spin = may_spin && spin_is_worthwhile(policy);
    self->is_looking = true;
    Py_BEGIN_ALLOW_THREADS
    errno = 0;
    is_any = may_spin ? spin_until(policy, look_once, &look) : look_once(&look);
    error = errno;
    Py_END_ALLOW_THREADS
    self->is_looking = false;
    Py_ssize_t count = link_take_frames(self);
    if (count < 0)
        return NULL;
    if (count > 0 || !is_any || !look.ended)
        return PyLong_FromSsize_t(count);
    if (error && !self->is_large && !self->is_broken && !self->is_closed) {
        errno = error;
        return PyErr_SetFromErrno(PyExc_OSError);
    }
    Py_RETURN_NONE;
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
    if (self->is_claimed || self->lease != NULL)
        Py_RETURN_FALSE;
    self->is_claimed = true;
    Py_RETURN_TRUE;
}

static PyObject *link_unclaim(connection *self, PyObject *Py_UNUSED(nothing))
{
    self->is_claimed = false;
    Py_RETURN_NONE;
}

void link_arm(const connection *self, bool is_armed)
{
    struct epoll_event event = {.events = EPOLLONESHOT, .data.fd = self->fd};
    if (is_armed)
        event.events |= EPOLLIN | EPOLLRDHUP;
    if (self->epoll_fd >= 0 && self->fd >= 0 && !self->is_closed)
        epoll_ctl(self->epoll_fd, EPOLL_CTL_MOD, self->fd, &event);
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

/* watch(epoll_fd, wake_fd, add_task, task): tells how threads of the reactor are reached. */
static PyObject *link_watch(connection *self, PyObject *arguments)
{
    int epoll_fd, wake_fd;
    PyObject *add_task, *task;
    if (!PyArg_ParseTuple(arguments, "iiOO", &epoll_fd, &wake_fd, &add_task, &task))
        return NULL;
    self->epoll_fd = epoll_fd;
    self->wake_fd = wake_fd;
    Py_XSETREF(self->add_task, Py_NewRef(add_task));
    Py_XSETREF(self->task, Py_NewRef(task));
    Py_RETURN_NONE;
}

/* close(): nothing is read or written from now on. */
static PyObject *link_close(connection *self, PyObject *Py_UNUSED(nothing))
{
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
    Py_VISIT(self->incoming);
    return 0;
}

static int link_clear(connection *self)
{
    Py_CLEAR(self->peer);
    Py_CLEAR(self->add_task);
    Py_CLEAR(self->task);
    Py_CLEAR(self->incoming);
    return 0;
}

static void link_dealloc(connection *self)
{
    PyObject_GC_UnTrack(self);
    link_clear(self);
    drop_all(self);
    PyMem_Free(self->parts);
    PyMem_RawFree(self->data);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static PyObject *link_new(PyTypeObject *type, PyObject *arguments, PyObject *named)
{
    static char *names[] = {"fd", "peer", "incoming", "keeps", "receive_bytes", "control_limit",
                            "frame_limit", "spin_s", "long_spin_s", NULL};
    int fd, keeps;
    PyObject *peer, *incoming;
    Py_ssize_t receive_bytes;
    unsigned long long control_limit, frame_limit;
    double spin_s, long_spin_s;
    if (!PyArg_ParseTupleAndKeywords(arguments, named, "iOOpnKKdd", names, &fd, &peer, &incoming,
                                     &keeps, &receive_bytes, &control_limit, &frame_limit, &spin_s,
                                     &long_spin_s))
        return NULL;
    if (receive_bytes < HEADER_BYTES) {
        PyErr_SetString(PyExc_ValueError, "the receive buffer is smaller than a header");
        return NULL;
    }
    connection *self = (connection *)type->tp_alloc(type, 0); /* All bytes are 0. */
    if (self == NULL)
        return NULL;
    self->fd = fd;
    self->epoll_fd = self->wake_fd = -1;
    self->peer = Py_NewRef(peer);
    self->incoming = Py_NewRef(incoming);
    self->keeps = keeps;
    self->data_capacity = (size_t)receive_bytes;
    self->data = PyMem_RawMalloc(self->data_capacity);
    self->control_limit = control_limit;
    self->frame_limit = frame_limit;
    for (int kind = 0; kind < SPIN_KINDS; kind++) {
        self->spins[kind].spin_s = kind == FOR_PASSES ? 3 * spin_s : spin_s;
        self->spins[kind].long_spin_s = long_spin_s;
        self->spins[kind].may_end_rest = true;
    }
    if (self->data == NULL) {
        Py_DECREF(self);
        return PyErr_NoMemory();
    }
    return (PyObject *)self;
}

static PyObject *get_queued(connection *self, void *Py_UNUSED(context))
{
    return PyBool_FromLong(self->unsent < self->end);
}

static PyObject *get_read(connection *self, void *Py_UNUSED(context))
{
    return PyBool_FromLong(self->is_claimed || self->lease != NULL);
}

static PyGetSetDef properties[] = {
    {"has_queued", (getter)get_queued, NULL, "Whether anything waits to be written.", NULL},
    {"is_read", (getter)get_read, NULL, "Whether a thread has the right to read.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyMemberDef members[] = {
    {"incoming", T_OBJECT, offsetof(connection, incoming), READONLY, NULL},
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
    {"close", (PyCFunction)link_close, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

PyTypeObject link_type = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "torchweft._native.Link",
    .tp_doc = "One connection: see torchweft/transport/link.py.",
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

int link_init(void)
{
    no_buffers = PyTuple_New(0);
    name_append = PyUnicode_InternFromString("append");
    PyObject *frames = PyImport_ImportModule("torchweft.wire.frames");
    if (frames == NULL || no_buffers == NULL || name_append == NULL)
        return -1;
    frame_type = PyObject_GetAttrString(frames, "Frame");
    Py_DECREF(frames);
    if (frame_type == NULL || !PyType_Check(frame_type) || PyType_Ready(&link_type))
        return -1;
    return PyType_Ready(&lease_type);
}
