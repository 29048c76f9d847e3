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
#include "link.h"

#include <sched.h>
#include <time.h>

static const double SHORTEST_REST = 10, LONGEST_REST = 200; /* Multiples of the time spun in vain. */
static const double ALONE_S = 30e-6;   /* A small call takes less. */
static const double SWITCH_S = 5e-6;   /* A yield that takes longer was taken by a thread, */
static const double FOREIGN_S = 1e-3;  /* and one of so long by another program. */
static const double KEEP_S = 1.0;      /* For how long nothing is yielded after that. */
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

static bool failed(spinning *self, double spun_s)
{
    double rest = self->rest < SHORTEST_REST ? SHORTEST_REST : self->rest;
    self->rests_until_s = monotonic_s() + rest * spun_s;
    self->rest = 2 * rest < LONGEST_REST ? 2 * rest : LONGEST_REST;
    return false;
}

bool spin_over(spinning *self, connection *link)
{
    double began_s = monotonic_s(), limit_s = began_s + self->spin_s;
    double yields_from_s = self->yields ? began_s : began_s + ALONE_S;
    self->yields = false; /* Unless another thread takes the core this time, too. */
    while (!link_receive(link)) {
        double now_s = monotonic_s();
        if (now_s >= limit_s)
            return failed(self, now_s - began_s);
        if (now_s < yields_from_s || now_s < self->core_until_s)
            continue;
        sched_yield();
        double taken_s = monotonic_s() - now_s;
        self->yields |= taken_s >= SWITCH_S;
        if (taken_s >= FOREIGN_S) {
            self->core_until_s = now_s + KEEP_S;
            return failed(self, now_s - began_s);
        }
    }
    self->rest = SHORTEST_REST;
    self->may_end_rest = true;
    return true;
}
