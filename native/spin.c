/* Decides whether a thread spins for a moment before it sleeps.
 *
 * Waking a thread on another core takes longer than a whole small call. A spinning thread finds the
 * answer at once if the other side has a core of its own; otherwise it keeps that side from running.
 * No figure of the machine tells the two cases apart, so the decision follows its own success: each
 * failure doubles the rest, in which waits go straight to sleep. The rest ends early if waits follow
 * each other so quickly that each would have found its data.
 *
 * A thread that has spun for longer than a small call takes yields its core between its looks. If
 * another thread takes it, the next waits yield at once.
 */
#define _GNU_SOURCE
#include "link.h"

#include <fcntl.h>
#include <sched.h>
#include <stdio.h>
#include <time.h>
#include <unistd.h>

static const double SHORTEST_REST = 10, LONGEST_REST = 200; /* Multiples of the time spun in vain. */
static const double ALONE_S = 30e-6;   /* A small call takes less. */
static const double SWITCH_S = 5e-6;   /* A yield that takes longer was taken by a thread, */
static const double FOREIGN_S = 1e-3;  /* and one of so long by another program. */
static const double KEEP_S = 1.0;      /* For how long nothing is yielded after that. */
static const double LOAD_AGE_S = 5e-3; /* How long a look at the load of the machine counts. */
enum { QUICK_WAITS = 3 };

double monotonic_s(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

bool spin_is_worthwhile(spinning *self)
{
    if (self->spin_s <= 0)
        return false;
    double now_s = monotonic_s();
    if (now_s >= self->rests_until_s)
        return true;
    bool is_quick = now_s - self->asked_s < self->spin_s;
    self->asked_s = now_s;
    self->quick_waits = is_quick ? self->quick_waits + 1 : 0;
    if (!self->may_end_rest || self->quick_waits < QUICK_WAITS)
        return false;
    self->may_end_rest = false;
    self->quick_waits = 0;
    self->rests_until_s = now_s;
    return true;
}

/* Whether a core is free: no more threads of the machine run or wait to run than it has cores. */
static bool has_free_core(spinning *self, double now_s)
{
    if (now_s < self->load_until_s)
        return self->has_free_core;
    char text[64] = "";
    long running = 0;
    int fd = open("/proc/loadavg", O_RDONLY | O_CLOEXEC);
    if (fd >= 0) {
        ssize_t size = read(fd, text, sizeof text - 1);
        text[size > 0 ? size : 0] = 0;
        close(fd);
        if (sscanf(text, "%*s %*s %*s %ld", &running) != 1)
            running = 0;
    }
    self->has_free_core = running > 0 && running <= sysconf(_SC_NPROCESSORS_ONLN);
    self->load_until_s = now_s + LOAD_AGE_S;
    return self->has_free_core;
}

static bool failed(spinning *self, double spun_s)
{
    double rest = self->rest < SHORTEST_REST ? SHORTEST_REST : self->rest;
    self->rests_until_s = monotonic_s() + rest * spun_s;
    self->rest = 2 * rest < LONGEST_REST ? 2 * rest : LONGEST_REST;
    return false;
}

bool spin_until(spinning *self, bool (*look)(void *), void *context)
{
    double began_s = monotonic_s(), limit_s = began_s + self->spin_s;
    double yields_from_s = self->yields ? began_s : began_s + ALONE_S;
    bool is_usual = true;
    self->yields = false; /* Unless another thread takes the core this time, too. */
    while (!look(context)) {
        double now_s = monotonic_s();
        if (now_s >= limit_s) {
            bool may_go_on = is_usual && self->long_spin_s > self->spin_s;
            if (!may_go_on || !has_free_core(self, now_s))
                return failed(self, now_s - began_s);
            is_usual = false;
            limit_s = began_s + self->long_spin_s;
        } else if (now_s >= yields_from_s && now_s >= self->core_until_s) {
            sched_yield();
            double taken_s = monotonic_s() - now_s;
            if (taken_s < SWITCH_S)
                continue;
            self->yields = true;
            if (taken_s >= FOREIGN_S) {
                self->core_until_s = now_s + KEEP_S;
                return failed(self, now_s - began_s);
            }
        }
    }
    self->rest = SHORTEST_REST;
    self->may_end_rest = true;
    return true;
}
