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
#include <poll.h>
#include <sys/socket.h>

enum { STEP_BYTES = 1 << 16 };
static const double LOOK_S = 30e-6; /* More than a step takes. */

void ring_open(connection *self, bool is_first)
{
    ring_head *heads = self->memory.buf;
    unsigned char *bytes = (unsigned char *)(heads + 2);
    self->ring_bytes = ((size_t)self->memory.len - 2 * sizeof *heads) / 2;
    self->in = &heads[is_first];
    self->out = &heads[!is_first];
    self->in_bytes = bytes + is_first * self->ring_bytes;
    self->out_bytes = bytes + !is_first * self->ring_bytes;
}

static size_t least(uint64_t first, uint64_t second)
{
    return (size_t)(first < second ? first : second);
}

/* Wakes the peer; returns 0, or -1 with an errno if it has gone. */
static int wake_peer(const connection *self)
{
    ssize_t sent = send(self->fd, "", 1, MSG_DONTWAIT | MSG_NOSIGNAL);
    return sent >= 0 || errno == EAGAIN ? 0 : -1; /* Enough bells wait. */
}

/* Wakes the peer if it has raised its flag, which is looked at after the step it waits for. */
static int wake_sleeper(const connection *self, _Atomic uint32_t *flag)
{
    atomic_thread_fence(memory_order_seq_cst);
    bool sleeps = atomic_load_explicit(flag, memory_order_relaxed) && atomic_exchange(flag, 0);
    return sleeps ? wake_peer(self) : 0;
}

uint64_t ring_room(const connection *self)
{
    return self->out == NULL ? 0 : self->ring_bytes - (self->put - atomic_load(&self->out->read));
}

/* Copies pieces into the ring, up to a limit, and publishes them; moves the pieces on. */
static void put(connection *self, struct iovec **pieces, size_t *count, uint64_t limit)
{
    while (*count > 0 && limit > 0) {
        struct iovec *piece = *pieces;
        size_t size = least(piece->iov_len, limit), at = (size_t)(self->put % self->ring_bytes);
        size_t first = least(size, self->ring_bytes - at);
        memcpy(self->out_bytes + at, piece->iov_base, first);
        memcpy(self->out_bytes, (char *)piece->iov_base + first, size - first);
        self->put += size;
        self->bytes_sent += size;
        limit -= size;
        piece->iov_base = (char *)piece->iov_base + size;
        piece->iov_len -= size;
        if (piece->iov_len == 0) {
            ++*pieces;
            --*count;
        }
    }
    atomic_store_explicit(&self->out->written, self->put, memory_order_release);
}

/* Looks for a moment whether the peer changes a count; returns whether it has. To yield the core
 * between the looks would take milliseconds where other programs compute. */
static bool changes(const _Atomic uint64_t *count, uint64_t known)
{
    double limit_s = monotonic_s() + LOOK_S;
    do {
        if (atomic_load(count) != known)
            return true;
    } while (monotonic_s() < limit_s);
    return false;
}

ssize_t ring_send(connection *self, struct iovec *pieces, size_t count, size_t size)
{
    uint64_t before = self->put, room = ring_room(self);
    /* The peer copies a step of a large message while this side copies the next. */
    bool is_large = size > self->ring_bytes;
    if (room == 0) {
        /* The first time, this also tells whether the peer lives. */
        if (!atomic_exchange(&self->out->writer_waits, 1) && wake_peer(self))
            return -1;
        room = ring_room(self);
        errno = EAGAIN;
    }
    while (room > 0 && room <= self->ring_bytes && count > 0) {
        put(self, &pieces, &count, is_large ? least(room, STEP_BYTES) : room);
        if (wake_sleeper(self, &self->out->reader_sleeps))
            return -1;
        if (count > 0 && is_large)
            changes(&self->out->read, self->put - self->ring_bytes);
        room = ring_room(self);
    }
    if (room > self->ring_bytes)
        errno = EPROTO;
    return room <= self->ring_bytes && (self->put != before || count == 0)
        ? (ssize_t)(self->put - before) : -1;
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

ssize_t ring_receive(connection *self, unsigned char *into, size_t size)
{
    char bells[64];
    ssize_t rung = self->has_bell ? recv(self->fd, bells, sizeof bells, MSG_DONTWAIT) : 1, taken;
    int error = errno;
    self->has_bell = rung == 0 || (rung < 0 && error != EAGAIN); /* The end is found again. */
    size_t count = 0; /* After the socket: the peer may have written, and ended. */
    do {
        taken = take(self, into + count, least(size - count, STEP_BYTES));
        count += taken > 0 ? (size_t)taken : 0;
    } while (taken > 0 && count < size);
    if (count > 0)
        return (ssize_t)count;
    if (self->has_bell && errno == EAGAIN) {
        errno = error;
        return rung;
    }
    return -1;
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

void ring_await(connection *self)
{
    struct pollfd socket = {.fd = self->fd, .events = POLLIN};
    if (!changes(&self->in->written, self->taken) && !ring_sleep(self))
        poll(&socket, 1, TICK_MS);
    ring_wake(self);
}
