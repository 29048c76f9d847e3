/* A connection as torchweft/engine/io/link.py uses it: writes messages, and reads frames.
 *
 * The interpreter lock guards everything here. It is released only while a thread copies much or
 * looks for data; `is_writing` and `is_looking` say so meanwhile. One thread writes at a
 * time, and takes along what others queue. One thread reads at a time: a thread of the reactor, or
 * one with a lease. Signal handlers run in no function but lease_wait.
 *
 * A link that keeps what it wrote belongs to a session: see torchweft/engine/wire/session.py.
 */
#include "link.h"

#include <errno.h>
#include <structmember.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

enum { MOST_PIECES = 64, LONG_COPY_BYTES = 1 << 15 };
/* A training step takes pauses that are longer than those between other calls: waits near messages
 * of backward passes may spin for longer. */
enum { BACKWARD = 9, GRADIENTS = 10, NEAR_FRAMES = 16, NEAR_SPINS = 2 };

/* ---------------------------------------------------------------------------------- Writing */

/* Drops the first pieces; returns 0, or -1 with an exception. Pieces that end may run code. */
static int drop(connection *self, Py_ssize_t count)
{
    self->kept -= count;
    if (count == 0 || !PyList_SetSlice(self->parts, 0, count, NULL))
        return 0;
    self->kept += count;
    return -1;
}

static int drop_all(connection *self)
{
    self->kept += self->queued;
    self->queued = 0;
    self->unsent_offset = 0;
    return drop(self, self->kept);
}

static unsigned long long length_of(const connection *self, Py_ssize_t place)
{
    return (unsigned long long)PyObject_Size(PyList_GET_ITEM(self->parts, place));
}

/* Queues all pieces of a message, or none; returns 0, or -1 with an exception. */
static int queue_message(connection *self, PyObject *message)
{
    Py_ssize_t before = self->kept + self->queued;
    if (PyList_SetSlice(self->parts, before, before, message))
        return -1;
    self->queued = PyList_GET_SIZE(self->parts) - self->kept;
    for (Py_ssize_t place = before; place < self->kept + self->queued; place++)
        self->position += length_of(self, place);
    return 0;
}

/* Notes bytes as written; returns 0, or -1 with an exception. */
static int advance(connection *self, size_t size)
{
    self->bytes_sent += self->out == NULL ? size : 0; /* A ring counts before the peer can read. */
    self->unsent_offset += size;
    while (self->queued > 0 && self->unsent_offset >= length_of(self, self->kept)) {
        self->unsent_offset -= length_of(self, self->kept++);
        self->queued--;
    }
    return self->keeps ? 0 : drop(self, self->kept);
}

/* Writes some of the queue without waiting; returns what sendmsg does, or -2 with an exception. */
static ssize_t write_some(connection *self)
{
    struct iovec pieces[MOST_PIECES];
    Py_buffer views[MOST_PIECES];
    size_t size = 0, skipped = self->unsent_offset, count = 0;
    ssize_t written = -2;
    for (; count < (size_t)self->queued && count < MOST_PIECES; count++, skipped = 0) {
        PyObject *piece = PyList_GET_ITEM(self->parts, self->kept + (Py_ssize_t)count);
        if (PyObject_GetBuffer(piece, &views[count], PyBUF_SIMPLE))
            goto release;
        pieces[count].iov_base = (char *)views[count].buf + skipped;
        pieces[count].iov_len = (size_t)views[count].len - skipped;
        size += pieces[count].iov_len;
    }
    struct msghdr message = {.msg_iov = pieces, .msg_iovlen = count};
    PyThreadState *state = size < LONG_COPY_BYTES ? NULL : PyEval_SaveThread();
    written = self->out != NULL ? ring_send(self, pieces, count, size)
                                : sendmsg(self->fd, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
    int error = errno;
    if (state != NULL)
        PyEval_RestoreThread(state);
    errno = error;
release:
    while (count-- > 0)
        PyBuffer_Release(&views[count]);
    return written;
}

/* write(message): queues a message, and writes what is queued.
 *
 * Returns False if the socket or the ring is full: then write again when there is room. OSError: the
 * connection has ended; a session keeps what is not written. */
PyObject *link_write(connection *self, PyObject *message)
{
    if (queue_message(self, message))
        return NULL;
    if (self->is_writing || self->is_broken)
        Py_RETURN_TRUE; /* The writer, or the thread that mends the connection, takes it along. */
    self->is_writing = true;
    int error = 0, status = 0;
    while (self->queued > 0 && !self->is_broken && !self->is_closed && !error && !status) {
        ssize_t written = write_some(self);
        if (written >= 0)
            status = advance(self, (size_t)written);
        else if (written < -1)
            status = -1;
        else if (errno != EINTR)
            error = errno;
        /* Whatever room comes after this look is told by a bell that no thread has heard yet. */
        self->awaits_room = error == EAGAIN && self->out != NULL;
        if (self->awaits_room && ring_room(self))
            error = 0;
    }
    self->is_writing = false;
    if (self->is_closed) {
        error = EPIPE;
        status |= drop_all(self);
    }
    if (status)
        return NULL;
    if (!error || error == EAGAIN)
        return PyBool_FromLong(!error);
    errno = error;
    return PyErr_SetFromErrno(PyExc_OSError);
}

/* Queues a message for the next `write`; returns how many pieces are queued. */
static PyObject *link_hold(connection *self, PyObject *message)
{
    if (queue_message(self, message))
        return NULL;
    return PyLong_FromSsize_t(self->queued);
}

/* acknowledge(position): drops what a session keeps, up to a position in its stream. */
static PyObject *link_acknowledge(connection *self, PyObject *number)
{
    unsigned long long position = PyLong_AsUnsignedLongLong(number);
    if (PyErr_Occurred())
        return NULL;
    Py_ssize_t count = 0;
    while (count < self->kept && self->front + length_of(self, count) <= position)
        self->front += length_of(self, count++);
    if (drop(self, count))
        return NULL;
    Py_RETURN_NONE;
}

/* resume(position): goes on with a session, on a new connection under the same descriptor, from a
 * position that is kept. */
static PyObject *link_resume(connection *self, PyObject *number)
{
    PyObject *done = link_acknowledge(self, number);
    if (done == NULL)
        return NULL;
    self->queued += self->kept;
    self->kept = 0;
    self->unsent_offset = (size_t)(PyLong_AsUnsignedLongLong(number) - self->front);
    self->is_broken = false;
    return done;
}

/* ---------------------------------------------------------------------------------- Reading */

typedef struct {
    uint8_t kind, flags;
    uint16_t buffer_count;
    uint32_t control_bytes;
    uint64_t id;
} frame_head;
_Static_assert(sizeof(frame_head) == HEADER_BYTES, "a compiler has put gaps into the head of a frame");

static uint64_t length_at(const unsigned char *lengths, size_t place)
{
    uint64_t length;
    memcpy(&length, lengths + sizeof length * place, sizeof length);
    return length;
}

static PyObject *buffers_of(const unsigned char *lengths, size_t count, const unsigned char *from)
{
    if (count == 0)
        return PyTuple_New(0);
    PyObject *buffers = PyList_New((Py_ssize_t)count);
    for (size_t place = 0; buffers != NULL && place < count; place++) {
        Py_ssize_t size = (Py_ssize_t)length_at(lengths, place);
        PyObject *bytes = PyByteArray_FromStringAndSize((const char *)from, size);
        if (bytes == NULL)
            Py_CLEAR(buffers);
        else
            PyList_SET_ITEM(buffers, (Py_ssize_t)place, bytes);
        from += size;
    }
    return buffers;
}

/* Cuts the next whole frame; returns 1, 0 if there is none, or -1 with an exception. A frame that does
 * not fit into `data` is left to the plain parser, which knows the limits. */
static int link_cut(connection *self, PyObject **frame)
{
    const unsigned char *begin = self->data + self->data_begin, *lengths = begin + HEADER_BYTES;
    size_t available = self->data_end - self->data_begin;
    frame_head head;
    if (available < sizeof head)
        return 0;
    memcpy(&head, begin, sizeof head);
    size_t before_control = sizeof head + 8 * (size_t)head.buffer_count;
    uint64_t size = (uint64_t)before_control + head.control_bytes;
    for (size_t place = 0; place < head.buffer_count && before_control <= available; place++) {
        uint64_t length = length_at(lengths, place);
        size = length > UINT64_MAX - size ? UINT64_MAX : size + length;
    }
    self->is_large = size > self->data_capacity;
    if (self->is_large || available < size)
        return 0;
    const unsigned char *control = begin + before_control;
    PyObject *parts = Py_BuildValue(
        "((BBKy#N))", head.kind, head.flags, (unsigned long long)head.id, control,
        (Py_ssize_t)head.control_bytes,
        buffers_of(lengths, head.buffer_count, control + head.control_bytes));
    PyTypeObject *type = (PyTypeObject *)library.frame_type;
    *frame = parts == NULL ? NULL : PyTuple_Type.tp_new(type, parts, NULL);
    Py_XDECREF(parts);
    self->data_begin += *frame == NULL ? 0 : (size_t)size;
    if (head.kind == BACKWARD || head.kind == GRADIENTS)
        self->near_pass = NEAR_FRAMES;
    else if (self->near_pass > 0)
        self->near_pass--;
    return *frame == NULL ? -1 : 1;
}

bool link_receive(connection *self)
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
    if (size < 0 && (errno == EAGAIN || errno == EINTR))
        return false;
    self->read_error = size < 0 ? errno : 0;
    return self->has_ended = true;
}

bool link_look(connection *self, spinning *policy)
{
    if (policy != NULL)
        policy->spin_s = self->near_pass > 0 ? NEAR_SPINS * self->spin_s : self->spin_s;
    bool is_any, spins = policy != NULL && spin_is_worthwhile(policy);
    self->is_looking = true;
    Py_BEGIN_ALLOW_THREADS
    is_any = spins ? spin_over(policy, self) : link_receive(self);
    Py_END_ALLOW_THREADS
    self->is_looking = false;
    return is_any;
}

Py_ssize_t link_take_frames(connection *self, PyObject **alone)
{
    Py_ssize_t count = 0;
    int was_collecting = PyGC_Disable(); /* A finalizer could read the same link. */
    PyObject *frame;
    int status;
    while ((status = link_cut(self, &frame)) > 0) {
        if (alone != NULL && count == 0 && self->data_begin == self->data_end &&
            PyLong_AsLong(PyTuple_GET_ITEM(frame, 0)) == CALL) {
            *alone = frame;
            break;
        }
        status = self->lease == NULL ? 0 : lease_deliver(self->lease, frame);
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

PyObject *link_outcome(connection *self, Py_ssize_t count)
{
    if (count > 0 || !self->has_ended)
        return PyLong_FromSsize_t(count);
    if (!self->read_error || self->is_broken || self->is_closed)
        Py_RETURN_NONE;
    errno = self->read_error;
    return PyErr_SetFromErrno(PyExc_OSError);
}

/* fill(into, may_block): for the plain parser: reads a part of a large frame, as recv_into. That is
 * its begin, which `read` has received, or what follows in the ring. */
static PyObject *link_fill(connection *self, PyObject *arguments)
{
    Py_buffer into;
    int may_block;
    if (!PyArg_ParseTuple(arguments, "w*p", &into, &may_block))
        return NULL;
    ssize_t size = (ssize_t)(self->data_end - self->data_begin);
    if (size > 0) {
        size = size < into.len ? size : into.len;
        memcpy(into.buf, self->data + self->data_begin, (size_t)size);
        self->data_begin += (size_t)size;
    } else if (self->in != NULL && !self->is_closed) {
        self->has_bell = self->is_looking = true;
        Py_BEGIN_ALLOW_THREADS
        if (may_block)
            ring_await(self);
        size = ring_receive(self, into.buf, (size_t)into.len);
        Py_END_ALLOW_THREADS
        self->is_looking = false;
        self->bytes_received += size > 0 ? (unsigned long long)size : 0;
    }
    PyBuffer_Release(&into);
    return size < 0 ? PyErr_SetFromErrno(PyExc_OSError) : PyLong_FromSsize_t(size);
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

void link_arm(connection *self, bool is_armed)
{
    /* What the ring has already is due at once, and the socket is always writable. */
    bool is_due = is_armed && ring_sleep(self), was_armed = self->is_armed && self->in != NULL;
    struct epoll_event event = {.events = EPOLLONESHOT, .data.fd = self->fd};
    if (is_armed)
        event.events |= EPOLLIN | EPOLLRDHUP | (is_due ? EPOLLOUT : 0);
    self->is_armed = is_armed;
    if ((!is_armed || is_due || !was_armed) && self->epoll_fd >= 0 && !self->is_closed)
        epoll_ctl(self->epoll_fd, EPOLL_CTL_MOD, self->fd, &event);
}

/* arm(): has the reactor told when there is something to read. */
static PyObject *link_arm_reading(connection *self, PyObject *Py_UNUSED(nothing))
{
    self->is_armed = false; /* An event may have brought this thread. */
    link_arm(self, true);
    Py_RETURN_NONE;
}

int link_submit(const connection *self, PyObject *task)
{
    PyObject *done = PyObject_CallOneArg(PyTuple_GET_ITEM(self->watch, 2), task);
    Py_XDECREF(done);
    uint64_t one = 1;
    if (done != NULL && write(self->wake_fd, &one, sizeof one) < 0)
        errno = 0; /* The reactor has ended. */
    return done == NULL ? -1 : 0;
}

int link_hand_over(connection *self)
{
    if (!self->is_handed_over && link_submit(self, PyTuple_GET_ITEM(self->watch, 3)))
        return -1;
    self->is_handed_over = true;
    return 0;
}

/* watch(epoll_fd, wake_fd, add_task, task): tells how threads of the reactor are reached. */
static PyObject *link_watch(connection *self, PyObject *arguments)
{
    PyObject *add_task, *task;
    if (!PyArg_ParseTuple(arguments, "iiOO", &self->epoll_fd, &self->wake_fd, &add_task, &task))
        return NULL;
    Py_XSETREF(self->watch, Py_NewRef(arguments));
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
    if (!self->is_writing && drop_all(self))
        return NULL;
    Py_RETURN_NONE;
}

/* ---------------------------------------------------------------------------------- The type */

static int link_traverse(connection *self, visitproc visit, void *arg)
{
    Py_VISIT(self->watch);
    Py_VISIT(self->add_frame);
    return 0;
}

static int link_clear(connection *self)
{
    Py_CLEAR(self->watch);
    Py_CLEAR(self->add_frame);
    return 0;
}

static void link_dealloc(connection *self)
{
    PyObject_GC_UnTrack(self);
    link_clear(self);
    Py_XDECREF(self->parts); /* Not in link_clear: a thread may still write. */
    PyMem_RawFree(self->data);
    PyBuffer_Release(&self->memory);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

/* Link(fd, add_frame, keeps, receive_bytes, spin_s, memory, is_first): the memory is that of a ring of
 * two heads and more, or empty. */
static PyObject *link_new(PyTypeObject *type, PyObject *arguments, PyObject *Py_UNUSED(named))
{
    connection *self = (connection *)type->tp_alloc(type, 0); /* All bytes are 0. */
    int keeps, is_first = false;
    Py_ssize_t receive_bytes;
    if (self == NULL)
        return NULL;
    if (!PyArg_ParseTuple(arguments, "iOpnd|w*p", &self->fd, &self->add_frame, &keeps, &receive_bytes,
                          &self->spin_s, &self->memory, &is_first)) {
        self->add_frame = NULL;
        Py_DECREF(self);
        return NULL;
    }
    Py_INCREF(self->add_frame);
    self->epoll_fd = self->wake_fd = -1;
    self->keeps = keeps;
    self->data_capacity = (size_t)receive_bytes;
    self->data = PyMem_RawMalloc(self->data_capacity);
    self->parts = self->data == NULL ? PyErr_NoMemory() : PyList_New(0);
    for (int kind = 0; kind < SPIN_KINDS; kind++)
        self->spins[kind] = (spinning){.may_end_rest = true};
    if (self->memory.buf != NULL)
        ring_open(self, is_first);
    if (self->parts == NULL)
        Py_CLEAR(self);
    return (PyObject *)self;
}

static PyMemberDef members[] = {
    {"queued", T_PYSSIZET, offsetof(connection, queued), READONLY, "Pieces to be written."},
    {"position", T_ULONGLONG, offsetof(connection, position), READONLY, "Bytes ever queued."},
    {"is_writing", T_BOOL, offsetof(connection, is_writing), READONLY, NULL},
    {"is_looking", T_BOOL, offsetof(connection, is_looking), READONLY, NULL},
    {"awaits_room", T_BOOL, offsetof(connection, awaits_room), READONLY, NULL},
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
    {"read", (PyCFunction)link_read, METH_VARARGS, NULL},
    {"claim", (PyCFunction)link_claim, METH_NOARGS, NULL},
    {"unclaim", (PyCFunction)link_unclaim, METH_NOARGS, NULL},
    {"watch", (PyCFunction)link_watch, METH_VARARGS, NULL},
    {"arm", (PyCFunction)link_arm_reading, METH_NOARGS, NULL},
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
};
