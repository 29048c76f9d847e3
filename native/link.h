/* A connection, and the right to read it; link.c, ring.c and lease.c. */
#ifndef WEFT_LINK_H
#define WEFT_LINK_H

#include "native.h"

#include <stdatomic.h>
#include <sys/uio.h>

/* When a thread that waits spins before it sleeps; see spin.c. */
typedef struct {
    double spin_s, rest, rests_until_s, asked_s, core_until_s;
    int quick_waits;
    bool may_end_rest, yields;
} spinning;

/* One direction of a ring, in memory that the peer may write at any time: bytes ever written, bytes
 * ever read, and what a side says before it sleeps. */
typedef struct {
    _Alignas(64) _Atomic uint64_t written;
    _Alignas(64) _Atomic uint64_t read;
    _Alignas(64) _Atomic uint32_t reader_sleeps;
    _Alignas(64) _Atomic uint32_t writer_waits;
} ring_head;

enum { TICK_MS = 100 }; /* For the longest sleep without a look at the clock. */
enum { FOR_ANSWERS, FOR_REQUESTS, FOR_PASSES, SPIN_KINDS };

typedef struct lease lease;

typedef struct {
    PyObject_HEAD
    int fd;
    int epoll_fd;      /* Where threads of the reactor wait for data. */
    int wake_fd;       /* Wakes one of them. */
    PyObject *add_frame; /* Gives a frame to the threads of the reactor. */
    PyObject *watch;     /* A tuple, which ends with what adds a task for them, and the one for the link. */

    PyObject *parts;         /* A list of the pieces of messages: */
    Py_ssize_t kept, queued; /* those that a session keeps, and behind them those to be written. */
    size_t unsent_offset;    /* Bytes of the first one to be written that are written. */
    unsigned long long front;      /* The position in the stream of the first part, */
    unsigned long long position;   /* and behind the last one. */
    bool keeps, is_broken, is_closed, is_writing, is_looking;

    unsigned char *data; /* What was read: whole frames are cut at once, so this is a part of one. */
    size_t data_begin, data_end, data_capacity;
    bool is_large;       /* The next frame does not fit into `data`: it is for the plain parser. */
    bool has_ended;      /* The last look found the end of the stream, an error, or such a frame. */
    int read_error;      /* The errno of that, or 0. */
    bool must_read;      /* A thread of the reactor has to look: an error, or a large frame. */
    bool is_handed_over; /* Such a thread is about to look. */
    bool is_claimed;     /* A thread of the reactor reads. */
    lease *lease;        /* That of the thread that reads, or NULL. */
    unsigned long long bytes_sent, bytes_received;
    spinning spins[SPIN_KINDS];
    double spin_s;        /* For how long waits spin at most, */
    int near_pass;        /* and how many frames after a message of a pass they spin for longer. */

    Py_buffer memory;     /* Of the ring; both directions are NULL without one. */
    ring_head *in, *out;
    unsigned char *in_bytes, *out_bytes;
    uint64_t ring_bytes, taken, put; /* Its size, and this side's own counts, which it believes. */
    bool has_bell;        /* The socket may have bytes, which only ring, or have ended. */
    bool awaits_room;     /* The ring was full, and the next bell tells of room. */
    bool is_armed;        /* The reactor's epoll has told nothing since it was armed. */
} connection;

extern PyTypeObject link_type, lease_type;

double monotonic_s(void);
/* Cuts all whole frames. Each goes to the lease that waits for it, or to `add_frame`; returns how
 * many went there, or -1 with an exception. A call that comes alone goes to `alone`, if that is not
 * NULL. */
Py_ssize_t link_take_frames(connection *self, PyObject **alone);
/* Returns what a reader gets: how many frames have come, or None or an exception, as `read` says. */
PyObject *link_outcome(connection *self, Py_ssize_t count);
PyObject *link_read(connection *self, PyObject *arguments);
PyObject *link_write(connection *self, PyObject *message);
/* Gives a frame to a lease that waits for it; returns 1, 0 if it does not, -1 with an exception. */
int lease_deliver(lease *self, PyObject *frame);
/* Looks at a link, for a moment if `policy` finds that worthwhile, without the interpreter lock; only
 * for the thread that may read it. Returns whether anything arrived or ended. */
bool link_look(connection *self, spinning *policy);
/* One such look, for callers that have released the interpreter lock. */
bool link_receive(connection *self);
/* Has a thread of the reactor run a task, or that of the link; returns 0, or -1 with an exception. */
int link_submit(const connection *self, PyObject *task);
int link_hand_over(connection *self);
/* Arms or pauses the link at the reactor's epoll. */
void link_arm(connection *self, bool is_armed);

/* Finds both directions in `memory`. */
void ring_open(connection *self, bool is_first);
/* Both do as sendmsg, which moves the pieces on, and recv. Neither waits, but writing a large message
 * looks for room for a while. */
ssize_t ring_send(connection *self, struct iovec *pieces, size_t count, size_t size);
ssize_t ring_receive(connection *self, unsigned char *into, size_t size);
/* Waits for bytes, for a tick at most. */
void ring_await(connection *self);
/* Has the peer ring when it writes; returns whether there is something already. Without a ring: no. */
bool ring_sleep(connection *self);
/* Has the peer write without ringing. */
void ring_wake(connection *self);
/* Returns the free bytes: more than the ring has, if the peer lies; none without a ring. */
uint64_t ring_room(const connection *self);

bool spin_is_worthwhile(spinning *self);
/* Looks at a link again and again; returns whether anything arrived or ended in time. */
bool spin_over(spinning *self, connection *link);

#endif
