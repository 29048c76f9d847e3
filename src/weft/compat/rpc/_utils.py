"""Group membership, under its old name."""
