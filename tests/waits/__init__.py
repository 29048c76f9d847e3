"""The list of every wait in the product, and how the waits are found in the source."""
