"""Gatherings: every one of some workers brings a value, and goes on when all have come.

The worker of the lowest id leads: the others bring it their values, and when all are there it
tells everyone. So it takes two calls a worker, however many they are.

The rules of this folder:

* A gathering is named by its workers, its kind and a number that each of them counts for itself.
  So the same workers can gather again and again, also from several threads at once.
* A worker that cannot come (it is lost, its value cannot travel, the leader gave up) ends the
  gathering: all that have come or still come are told why.
* The leader (``leading``) remembers a gathering until every worker has come, or is lost. The
  others (``following``) do for as long as they wait: who is told of one that he does not know has
  given up, and ignores it.
"""

from torchweft.rpc.gathering.following import Gatherings
from torchweft.rpc.gathering.terms import Gathering, Key, Limits, Outcome, Ways, check_key

__all__ = ["Gathering", "Gatherings", "Key", "Limits", "Outcome", "Ways", "check_key"]
