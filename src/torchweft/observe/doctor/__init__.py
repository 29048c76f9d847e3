"""What ``torchweft doctor`` looks at: facts of each worker, and one file of checks of each kind.

Facts are gathered; checks are pure functions of facts, and return findings.
"""

from torchweft.observe.doctor.examining import examine
from torchweft.observe.doctor.facts import HostFacts, PairFacts, gather
from torchweft.observe.doctor.findings import Diagnosis, Finding, Level

__all__ = ["Diagnosis", "Finding", "HostFacts", "Level", "PairFacts", "examine", "gather"]
