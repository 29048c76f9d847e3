/* A ring in shared memory for each direction between two processes of one host; engine/io/ring.py.
 *
 * A ring carries the bytes that the socket would. Each has one writer and one reader. A side sleeps
 * only after it has raised its flag and looked once more; the other side publishes, looks at the flag,
 * takes it down and rings: one byte on the socket. The end of the socket is the end of the peer.
 *
 * The peer may write anything anywhere. So each side believes only its own counts, reads those of the
 * peer once for a step, and copies bytes out before it looks at them. A peer that dies has published
 * whole bytes, or nothing of them.
 */
#include "link.h"

#include <errno.h>
#include <sys/socket.h>

int ring_open(connection *self, PyObject *memory, bool is_first)
{
    if (memory == Py_None)
        return 0;
    if (PyObject_GetBuffer(memory, &self->memory, PyBUF_WRITABLE))
        return -1;
    if (self->memory.len <= (Py_ssize_t)(2 * sizeof(ring_head))) {
        PyErr_SetString(PyExc_ValueError, "a ring needs more memory");
        return -1;
    }
    ring_head *heads = self->memory.buf;
    unsigned char *bytes = (unsigned char *)(heads + 2);
    self->ring_bytes = ((size_t)self->memory.len - 2 * sizeof *heads) / 2;
    self->in = &heads[is_first];
    self->out = &heads[!is_first];
    self->in_bytes = bytes + is_first * self->ring_bytes;
    self->out_bytes = bytes + !is_first * self->ring_bytes;
    return 0;
}

static size_t least(uint64_t first, uint64_t second)
{
    return (size_t)(first < second ? first : second);
}

/* Wakes the peer; returns 0, or -1 with an errno if it has gone. */
static int wake_peer(const connection *self)
{
    ssize_t sent = send(self->fd, "", 1, MSG_DONTWAIT | MSG_NOSIGNAL);
    return sent >= 0 || errno == EAGAIN || errno == EWOULDBLOCK ? 0 : -1; /* Enough bells wait. */
}

/* Wakes the peer if it has raised its flag, which is looked at after the step it waits for. */
static int wake_sleeper(const connection *self, _Atomic uint32_t *flag)
{
    atomic_thread_fence(memory_order_seq_cst);
    bool sleeps = atomic_load_explicit(flag, memory_order_relaxed) && atomic_exchange(flag, 0);
    return sleeps ? wake_peer(self) : 0;
}

/* Returns the free bytes: more than the ring has, if the peer lies. */
static uint64_t room_of(const connection *self)
{
    return self->ring_bytes - (self->put - atomic_load(&self->out->read));
}

bool ring_has_room(const connection *self)
{
    return self->out == NULL || room_of(self) > 0;
}

ssize_t ring_send(connection *self, const struct iovec *pieces, size_t count)
{
    uint64_t room = room_of(self);
    if (room == 0) {
        /* The first time, this also tells whether the peer lives. */
        if (!atomic_exchange(&self->out->writer_waits, 1) && wake_peer(self))
            return -1;
        room = room_of(self);
    }
    if (room == 0 || room > self->ring_bytes) {
        errno = room ? EPROTO : EAGAIN;
        return -1;
    }
    uint64_t before = self->put;
    for (size_t place = 0; place < count && room > 0; place++) {
        const unsigned char *from = pieces[place].iov_base;
        size_t size = least(pieces[place].iov_len, room), at = (size_t)(self->put % self->ring_bytes);
        size_t first = least(size, self->ring_bytes - at);
        memcpy(self->out_bytes + at, from, first);
        memcpy(self->out_bytes, from + first, size - first);
        self->put += size;
        room -= size;
    }
    atomic_store_explicit(&self->out->written, self->put, memory_order_release);
    return wake_sleeper(self, &self->out->reader_sleeps) ? -1 : (ssize_t)(self->put - before);
}

/* Takes bytes out of the ring; returns how many, or -1 with an errno. */
static ssize_t take(connection *self, unsigned char *into, size_t most)
{
    uint64_t there = atomic_load(&self->in->written) - self->taken;
    if (there == 0 || there > self->ring_bytes) {
        errno = there ? EPROTO : EAGAIN;
        return -1;
    }
    size_t size = least(most, there), at = (size_t)(self->taken % self->ring_bytes);
    size_t first = least(size, self->ring_bytes - at);
    memcpy(into, self->in_bytes + at, first);
    memcpy(into + first, self->in_bytes, size - first);
    self->taken += size;
    atomic_store_explicit(&self->in->read, self->taken, memory_order_release);
    wake_sleeper(self, &self->in->writer_waits); /* A peer that has gone hears none. */
    return (ssize_t)size;
}

ssize_t ring_receive(connection *self, void *into, size_t size)
{
    char bells[64];
    ssize_t rung = self->has_bell ? recv(self->fd, bells, sizeof bells, MSG_DONTWAIT) : -1;
    int error = rung < 0 && self->has_bell ? errno : EAGAIN;
    bool has_ended = rung == 0 || (error != EAGAIN && error != EWOULDBLOCK && error != EINTR);
    self->has_bell = has_ended || error == EINTR;
    if (self->awaits_room && ring_has_room(self))
        link_arm_writing(self);
    ssize_t taken = take(self, into, size); /* After the socket: the peer may have written, and ended. */
    if (taken >= 0 || !has_ended || errno != EAGAIN)
        return taken;
    errno = error;
    return rung == 0 ? 0 : -1;
}

bool ring_sleep(connection *self)
{
    if (self->in == NULL)
        return false;
    atomic_store(&self->in->reader_sleeps, 1);
    return atomic_load(&self->in->written) != self->taken;
}

void ring_wake(connection *self)
{
    if (self->in != NULL)
        atomic_store_explicit(&self->in->reader_sleeps, 0, memory_order_relaxed);
}
