"""Gatherings: each of several workers brings a value, and continues when all have arrived.

The worker of the lowest id leads: the others send it their values, and when all have arrived it
sends the values to every worker. That takes two calls per worker, for any number of workers.

The rules of this folder:

* A gathering is named by its workers, its kind and a number that each worker counts for itself.
  So the same workers can gather repeatedly, also from several threads at once.
* A failure (a worker is lost, a value cannot be serialized, the leader gave up) ends the
  gathering: all workers that have arrived or still arrive are told the reason.
* The leader (``leading``) remembers a gathering until every worker has arrived or is lost. The
  followers (``following``) remember it while they wait: a follower that is told of an unknown
  gathering has given up, and ignores the message.
"""

from torchweft.rpc.gathering.following import Gatherings
from torchweft.rpc.gathering.terms import Gathering, Key, Limits, Outcome, Ways, check_key

__all__ = ["Gathering", "Gatherings", "Key", "Limits", "Outcome", "Ways", "check_key"]
