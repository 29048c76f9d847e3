"""Group membership, under its old name."""

from torchweft.compat.rpc.absent import _group_membership_management, _update_group_membership

__all__ = ["_group_membership_management", "_update_group_membership"]
